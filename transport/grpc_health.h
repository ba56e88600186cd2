/* The standard health service (grpc.health.v1) as handlers of a server. Private to
 * transport/grpc_*.c. Every service of the server has the same health, and so has "". */
#ifndef FB_TRANSPORT_GRPC_HEALTH_H
#define FB_TRANSPORT_GRPC_HEALTH_H

#include "transport/grpc_server.h"

#include <pthread.h>

#define FB_RPC_HEALTH_METHODS  2
#define FB_RPC_HEALTH_WATCHERS 32

struct fb_rpc_watcher {
    struct fb_rpc_call *call;
    bool knows_service; /* else changes do not concern it */
};

struct fb_rpc_health {
    const struct fb_rpc_server_options *options; /* names the services */
    pthread_mutex_t lock;
    bool serving;
    uint32_t watcher_count;
    struct fb_rpc_watcher watchers[FB_RPC_HEALTH_WATCHERS];
};

/* Their context is a struct fb_rpc_health. */
extern const struct fb_rpc_method fb_rpc_health_methods[FB_RPC_HEALTH_METHODS];

void fb_rpc_health_init(struct fb_rpc_health *health, const struct fb_rpc_server_options *options);
void fb_rpc_health_fini(struct fb_rpc_health *health);

void fb_rpc_health_set(struct fb_rpc_health *health, bool serving);

/* Tell the watchers that it is over. */
void fb_rpc_health_end(struct fb_rpc_health *health);

#endif
