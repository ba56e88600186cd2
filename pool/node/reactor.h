/* Reactor: the one thread that owns a node. It waits in one place for sockets, deaths, mail and
 * time; after work it polls for a while before it sleeps. */
#ifndef FB_NODE_REACTOR_H
#define FB_NODE_REACTOR_H

#include "pool/node/node.h"

struct fb_reactor;

struct fb_reactor_options {
    const struct fb_config *config; /* borrowed until created */
    struct fb_metrics *metrics;     /* borrowed until destroy */
    struct fb_log log;
    struct fb_tier *(*wrap_tier)(void *context, struct fb_tier *tier); /* tests; else NULL */
    void *wrap_context;
};

/* Create the node and listen. */
enum fb_status fb_reactor_create(const struct fb_reactor_options *options,
                                 struct fb_reactor **ret_reactor, struct fb_error *error);
void fb_reactor_destroy(struct fb_reactor *reactor);

/* Run until the node is drained. */
void fb_reactor_run(struct fb_reactor *reactor);

/* From any thread: begin to drain, within that time. A second call ends the reactor at once. */
void fb_reactor_drain(struct fb_reactor *reactor, uint64_t within_ns);

/* Poll one more descriptor. Before run, or on the reactor's thread. */
enum fb_status fb_reactor_watch(struct fb_reactor *reactor, int fd, struct fb_source *source);

struct fb_node *fb_reactor_node(struct fb_reactor *reactor);
struct fb_mailbox *fb_reactor_mailbox(struct fb_reactor *reactor);

/* Called at the end of every round on the reactor's thread; set before run. */
void fb_reactor_on_round(struct fb_reactor *reactor, void (*round)(void *context), void *context);

#endif
