/* Watchers are kept until they cancel, do not read, or the server ends. The lock is taken before
 * the server's, never after. */
#include "transport/grpc_health.h"

#include "proto/health.pb-c.h"

#include <string.h>

#define UNKNOWN     GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVICE_UNKNOWN
#define SERVING     GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING
#define NOT_SERVING GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING

typedef Grpc__Health__V1__HealthCheckResponse__ServingStatus serving_status;

struct encoded {
    uint8_t data[16];
    size_t bytes;
};

static struct encoded encode(serving_status status)
{
    Grpc__Health__V1__HealthCheckResponse reply = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
    struct encoded out;

    reply.status = status;
    out.bytes = grpc__health__v1__health_check_response__pack(&reply, out.data);
    return out;
}

static bool knows(const struct fb_rpc_health *health, const char *service)
{
    size_t n = strlen(service);

    if (n == 0) {
        return true;
    }
    for (size_t i = 0; i < health->options->method_count; i++) {
        const char *path = health->options->methods[i].path + 1;

        if (strncmp(path, service, n) == 0 && path[n] == '/') {
            return true;
        }
    }
    return false;
}

/* returns  FB_OK | FB_ENOENT no such service | FB_EINVAL a request that cannot be read */
static enum fb_status find_service(const struct fb_rpc_health *health, const uint8_t *request,
                                   size_t bytes)
{
    Grpc__Health__V1__HealthCheckRequest *message =
        grpc__health__v1__health_check_request__unpack(NULL, bytes, request);
    enum fb_status status;

    if (!message) {
        return FB_EINVAL;
    }
    status = knows(health, message->service) ? FB_OK : FB_ENOENT;
    grpc__health__v1__health_check_request__free_unpacked(message, NULL);
    return status;
}

static enum fb_status send_status(struct fb_rpc_call *call, serving_status status)
{
    struct encoded message = encode(status);

    return fb_rpc_send(call, message.data, message.bytes);
}

static void check_start(struct fb_rpc_call *call, const uint8_t *request, size_t bytes,
                        void *context)
{
    struct fb_rpc_health *health = context;
    enum fb_status status = find_service(health, request, bytes);
    struct encoded message;

    if (status != FB_OK) {
        fb_rpc_finish(call, status, NULL);
        return;
    }
    pthread_mutex_lock(&health->lock);
    message = encode(health->serving ? SERVING : NOT_SERVING);
    pthread_mutex_unlock(&health->lock);
    fb_rpc_reply(call, message.data, message.bytes);
}

/* An unknown service is told so, and watched nevertheless: it cannot appear later, but the
 * protocol wants the stream open. */
static void watch_start(struct fb_rpc_call *call, const uint8_t *request, size_t bytes,
                        void *context)
{
    struct fb_rpc_health *health = context;
    enum fb_status status = find_service(health, request, bytes);

    pthread_mutex_lock(&health->lock);
    if (status != FB_EINVAL && health->watcher_count == FB_RPC_HEALTH_WATCHERS) {
        status = FB_ELIMIT;
    }
    if (status == FB_EINVAL || status == FB_ELIMIT) {
        fb_rpc_finish(call, status, NULL);
    } else {
        /* a failure to send shows again with the next change, or as a cancellation */
        send_status(call, status == FB_ENOENT ? UNKNOWN : health->serving ? SERVING : NOT_SERVING);
        health->watchers[health->watcher_count++] =
            (struct fb_rpc_watcher){.call = call, .knows_service = status == FB_OK};
    }
    pthread_mutex_unlock(&health->lock);
}

/* With the lock held. */
static void drop_watcher(struct fb_rpc_health *health, uint32_t i, enum fb_status status)
{
    fb_rpc_finish(health->watchers[i].call, status, NULL);
    health->watchers[i] = health->watchers[--health->watcher_count];
}

static void watch_canceled(uint64_t call_id, void *context)
{
    struct fb_rpc_health *health = context;

    pthread_mutex_lock(&health->lock);
    for (uint32_t i = 0; i < health->watcher_count; i++) {
        if (fb_rpc_call_id(health->watchers[i].call) == call_id) {
            drop_watcher(health, i, FB_ECANCELED);
            break;
        }
    }
    pthread_mutex_unlock(&health->lock);
}

const struct fb_rpc_method fb_rpc_health_methods[FB_RPC_HEALTH_METHODS] = {
    {"/grpc.health.v1.Health/Check", check_start, NULL},
    {"/grpc.health.v1.Health/Watch", watch_start, watch_canceled},
};

void fb_rpc_health_init(struct fb_rpc_health *health, const struct fb_rpc_server_options *options)
{
    memset(health, 0, sizeof(*health));
    health->options = options;
    pthread_mutex_init(&health->lock, NULL);
}

void fb_rpc_health_fini(struct fb_rpc_health *health)
{
    pthread_mutex_destroy(&health->lock);
}

void fb_rpc_health_set(struct fb_rpc_health *health, bool serving)
{
    pthread_mutex_lock(&health->lock);
    if (health->serving != serving) {
        health->serving = serving;
        for (uint32_t i = health->watcher_count; i-- > 0;) {
            struct fb_rpc_watcher *watcher = &health->watchers[i];

            if (watcher->knows_service &&
                send_status(watcher->call, serving ? SERVING : NOT_SERVING) != FB_OK) {
                drop_watcher(health, i, FB_ELIMIT);
            }
        }
    }
    pthread_mutex_unlock(&health->lock);
}

void fb_rpc_health_end(struct fb_rpc_health *health)
{
    pthread_mutex_lock(&health->lock);
    while (health->watcher_count > 0) {
        drop_watcher(health, health->watcher_count - 1, FB_ECONN);
    }
    pthread_mutex_unlock(&health->lock);
}
