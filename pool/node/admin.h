/* Admin service: what operators ask over gRPC (proto/forebay.proto), answered by the reactor. */
#ifndef FB_NODE_ADMIN_H
#define FB_NODE_ADMIN_H

#include "pool/node/reactor.h"

struct fb_admin;

/* Listen; calls are answered while the reactor runs. address: as in the configuration.
 * reactor, config, metrics  borrowed until destroy */
enum fb_status fb_admin_create(const char *address, struct fb_reactor *reactor,
                               const struct fb_config *config, struct fb_metrics *metrics,
                               struct fb_admin **ret_admin, struct fb_error *error);

/* After the reactor has stopped running, before it is destroyed. */
void fb_admin_destroy(struct fb_admin *admin);

#endif
