/* Survivors: clients that were there before the daemon was, and may still read or write slots.
 *
 * Every client holds a lock (flock) on a file of its own, <socket dir>/clients/<hex id>, for as
 * long as it lives. A daemon that starts finds who holds one; no slot of the tenant is reused
 * until each has come back and named what it uses, or its lock is free. Reactor only. */
#ifndef FB_NODE_SURVIVOR_H
#define FB_NODE_SURVIVOR_H

#include "proto/wire.h"

struct fb_survivor;

struct fb_survivors {
    int dir_fd; /* of the clients directory, -1 when there is none */
    struct fb_survivor *list;
    uint32_t count;
};

/* Open (and create) the directory and find who is alive; files of the dead are deleted.
 * mode, group as for the socket. returns FB_OK | FB_EIO | FB_ENOMEM */
enum fb_status fb_survivors_init(struct fb_survivors *s, const char *socket_dir, unsigned mode,
                                 int group, struct fb_error *error);
void fb_survivors_fini(struct fb_survivors *s);

/* The client has come back and named everything. Returns whether it was awaited. */
bool fb_survivors_returned(struct fb_survivors *s, const uint8_t id[FB_CLIENT_ID_BYTES]);

/* Look whether awaited ones have died meanwhile; returns how many had. */
uint32_t fb_survivors_poll(struct fb_survivors *s);

#endif
