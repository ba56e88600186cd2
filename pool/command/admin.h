/* Calls of the control plane that other commands make. */
#ifndef FB_COMMAND_ADMIN_H
#define FB_COMMAND_ADMIN_H

#include "pool/command/cli.h"
#include "proto/manifest.h"

/* Ask the daemon at cli->grpc for the manifest of a space. Says what went wrong itself. */
bool fb_admin_get_manifest(const struct fb_cli *cli, const uint8_t id[FB_SPACE_ID_BYTES],
                           struct fb_manifest *ret_manifest);

#endif
