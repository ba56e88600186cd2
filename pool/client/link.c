/* Links: connections to the daemon, and one request after another on each. */
#include "pool/client/internal.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

static void close_fds(struct fb_link *link)
{
    for (uint32_t i = 0; i < link->fd_count; i++) {
        close(link->fds[i]);
    }
    link->fd_count = 0;
}

void fb_link_destroy(struct fb_link *link)
{
    if (link) {
        close_fds(link);
        fb_channel_destroy(link->channel);
        fb_hasher_destroy(link->hasher);
        free(link);
    }
}

static enum fb_status hello(struct fb_pool *pool, struct fb_link *link, bool control,
                            uint64_t deadline_ns, struct fb_error *error)
{
    struct fb_hello_request request = {
        .version_min = FB_WIRE_VERSION,
        .version_max = FB_WIRE_VERSION,
        .flags = control ? FB_HELLO_CONTROL : 0,
    };
    struct fb_wire_writer w;
    enum fb_status status;

    memcpy(request.client, pool->id, sizeof(request.client));
    fb_link_begin(link, &w, FB_MSG_HELLO, &request, sizeof(request));
    status = fb_link_call(pool, link, &w, &pool->pidfd, 1, deadline_ns);
    if (status != FB_OK) {
        return fb_error_set(error, status, "the daemon at %s: %.*s", pool->path,
                            link->reply.text ? (int)link->reply.text_bytes : 40,
                            link->reply.text ? link->reply.text : fb_status_text(status));
    }
    return FB_OK;
}

enum fb_status fb_link_create(struct fb_pool *pool, bool control, uint64_t deadline_ns,
                              struct fb_link **ret_link, struct fb_error *error)
{
    struct fb_link *link = calloc(1, sizeof(*link));
    enum fb_status status = FB_ENOMEM;

    if (!link || fb_hasher_create(&link->hasher) != FB_OK) {
        fb_error_set(error, FB_ENOMEM, "out of memory");
        goto err_link;
    }
    status = fb_unix_connect(pool->path, &link->channel, error);
    if (status != FB_OK) {
        goto err_link;
    }
    status = hello(pool, link, control, deadline_ns, error);
    if (status != FB_OK) {
        goto err_link;
    }
    *ret_link = link;
    return FB_OK;

err_link:
    fb_link_destroy(link);
    return status;
}

static bool is_broken(enum fb_status status)
{
    return status == FB_ETIMEDOUT || status == FB_ECONN || status == FB_EPROTO ||
           status == FB_EVERSION;
}

/* The breaker: until the keeper has had an answer, nobody else waits for one. The mutex is held. */
static void trip(struct fb_pool *pool, uint64_t epoch, enum fb_status status)
{
    if (pool->connected && epoch == pool->epoch) {
        pool->connected = false;
        pool->info.deadlines_missed += status == FB_ETIMEDOUT;
        fb_keeper_wake(pool);
    }
}

/* One more connection to the daemon that the keeper knows: what a pool holds, and its handles of
 * spaces, are of that one. */
static enum fb_status add_link(struct fb_pool *pool, uint64_t epoch, uint64_t incarnation,
                               uint64_t deadline_ns, struct fb_link **ret_link)
{
    struct fb_link *link = NULL;
    enum fb_status status = fb_link_create(pool, false, deadline_ns, &link, NULL);

    if (status == FB_OK && link->reply.hello_reply.incarnation != incarnation) {
        fb_link_destroy(link);
        status = FB_ECONN;
    }
    if (status == FB_OK) {
        link->epoch = epoch;
        *ret_link = link;
        return FB_OK;
    }
    if (is_broken(status)) {
        pthread_mutex_lock(&pool->mutex);
        trip(pool, epoch, status);
        pthread_mutex_unlock(&pool->mutex);
    }
    return status == FB_EVERSION || status == FB_ELIMIT ? FB_ECONN : status;
}

enum fb_status fb_link_take(struct fb_pool *pool, uint64_t deadline_ns, struct fb_link **ret_link)
{
    uint64_t epoch, incarnation;
    struct fb_link *link;

    if (getpid() != pool->pid) {
        return FB_ESTATE; /* after fork the connections are the parent's */
    }
    pthread_mutex_lock(&pool->mutex);
    if (!pool->connected) {
        pool->info.calls_skipped++;
        pthread_mutex_unlock(&pool->mutex);
        return FB_ECONN;
    }
    link = SLIST_FIRST(&pool->idle);
    if (link) {
        SLIST_REMOVE_HEAD(&pool->idle, idle);
        pool->idle_count--;
    }
    epoch = pool->epoch;
    incarnation = pool->info.incarnation;
    pthread_mutex_unlock(&pool->mutex);
    if (link) {
        *ret_link = link;
        return FB_OK;
    }
    return add_link(pool, epoch, incarnation, deadline_ns, ret_link);
}

void fb_link_give(struct fb_pool *pool, struct fb_link *link, enum fb_status status)
{
    bool keep = !is_broken(status);

    pthread_mutex_lock(&pool->mutex);
    if (!keep) {
        trip(pool, link->epoch, status);
    }
    keep = keep && fb_link_is_current(pool, link) && pool->idle_count < FB_MAX_IDLE_LINKS;
    if (keep) {
        SLIST_INSERT_HEAD(&pool->idle, link, idle);
        pool->idle_count++;
    }
    pthread_mutex_unlock(&pool->mutex);
    if (!keep) {
        fb_link_destroy(link);
    }
}

void fb_link_begin(struct fb_link *link, struct fb_wire_writer *w, enum fb_msg type,
                   const void *body, size_t body_bytes)
{
    fb_wire_begin(w, link->tx, type, ++link->next_id, FB_OK, body, body_bytes);
}

/* Wait until the channel can be read; false when the deadline has passed. */
static bool wait_readable(struct fb_link *link, uint64_t deadline_ns)
{
    struct pollfd p = {.fd = fb_channel_fd(link->channel), .events = POLLIN};
    uint64_t now = fb_now_ns();
    struct timespec left;

    if (now >= deadline_ns) {
        return false;
    }
    left.tv_sec = (time_t)((deadline_ns - now) / 1000000000ull);
    left.tv_nsec = (long)((deadline_ns - now) % 1000000000ull);
    return ppoll(&p, 1, &left, NULL) != 0;
}

static enum fb_status try_receive(struct fb_link *link, size_t *ret_bytes)
{
    return fb_channel_recv(link->channel, link->rx, sizeof(link->rx), ret_bytes, link->fds,
                           &link->fd_count);
}

/* Take the next packet, spinning for a while before sleeping. */
static enum fb_status receive(struct fb_pool *pool, struct fb_link *link, uint64_t deadline_ns,
                              size_t *ret_bytes)
{
    uint64_t spin_until = pool->spin_ns ? fb_now_ns() + pool->spin_ns : 0;
    enum fb_status status = FB_AGAIN;

    while (spin_until && status == FB_AGAIN && fb_now_ns() < spin_until) {
        status = try_receive(link, ret_bytes);
    }
    while (status == FB_AGAIN) {
        if (!wait_readable(link, deadline_ns)) {
            return FB_ETIMEDOUT;
        }
        status = try_receive(link, ret_bytes);
    }
    return status;
}

enum fb_status fb_link_call(struct fb_pool *pool, struct fb_link *link, struct fb_wire_writer *w,
                            const int *fds, uint32_t fd_count, uint64_t deadline_ns)
{
    enum fb_status status = fb_channel_send(link->channel, link->tx, fb_wire_end(w), fds, fd_count);
    uint64_t id = link->next_id;
    struct fb_wire_header sent;
    size_t bytes;

    memset(&link->reply, 0, sizeof(link->reply));
    memcpy(&sent, link->tx, sizeof(sent));
    while (status == FB_OK) {
        close_fds(link);
        status = receive(pool, link, deadline_ns, &bytes);
        if (status == FB_OK) {
            status = fb_wire_parse_reply(link->rx, bytes, &link->reply, NULL);
        }
        if (status != FB_OK) {
            break;
        }
        if (link->reply.header.type == FB_MSG_NOTIFY) {
            if (link->reply.notify.kind == FB_NOTIFY_UNMAP) {
                fb_map_retire(pool, link->reply.notify.value);
            }
            continue;
        }
        if (link->reply.header.id != id) {
            continue; /* the answer to a request that was posted or given up */
        }
        if (link->reply.header.type != sent.type) {
            return FB_EPROTO;
        }
        link->unanswered = 0;
        return (enum fb_status)link->reply.header.status;
    }
    return status == FB_AGAIN || status == FB_ELIMIT ? FB_ECONN : status;
}

enum fb_status fb_link_post(struct fb_pool *pool, struct fb_link *link, struct fb_wire_writer *w)
{
    if (++link->unanswered >= FB_MAX_UNANSWERED) {
        return fb_link_call(pool, link, w, NULL, 0, fb_deadline(0, FB_LOOKUP_TIMEOUT_NS));
    }
    fb_wire_no_reply(w);
    return fb_channel_send(link->channel, link->tx, fb_wire_end(w), NULL, 0) == FB_OK ? FB_OK
                                                                                      : FB_ECONN;
}
