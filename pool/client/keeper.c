/* Keeper: the library's own thread. It connects and reconnects, opens spaces again, names what a
 * new daemon must not touch, renews leases, and answers notifications. */
#include "pool/client/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define CONNECT_NS (1000ull * 1000 * 1000)

struct keeper {
    struct fb_pool *pool;
    struct fb_link *control;
    uint64_t incarnation; /* of the last daemon; 0 before the first */
    uint64_t retry_ns;    /* how long to wait before the next attempt */
    uint64_t due_ns;      /* of the next attempt or renewal */
};

void fb_keeper_wake(struct fb_pool *pool)
{
    uint64_t one = 1;
    ssize_t n = write(pool->wake_fd, &one, sizeof(one));

    (void)n; /* a full counter wakes as well */
}

/* Hold a lock on a file of our own, so that a daemon that starts knows of us. The directory is
 * the daemon's, which has said hello: it has looked for locks and will not delete this file. */
static void hold_lock(struct fb_pool *pool)
{
    char path[FB_MAX_PATH_CHARS + 64];
    const char *slash = strrchr(pool->path, '/');
    int at = snprintf(path, sizeof(path), "%.*s/clients/", slash ? (int)(slash - pool->path) : 1,
                      slash ? pool->path : ".");
    struct stat held, named;

    for (size_t i = 0; i < sizeof(pool->id); i++) {
        at += snprintf(path + at, sizeof(path) - (size_t)at, "%02x", pool->id[i]);
    }
    if (pool->lock_fd >= 0 && fstat(pool->lock_fd, &held) == 0 && stat(path, &named) == 0 &&
        held.st_ino == named.st_ino && held.st_dev == named.st_dev) {
        return;
    }
    if (pool->lock_fd >= 0) {
        close(pool->lock_fd);
    }
    pool->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (pool->lock_fd >= 0) {
        flock(pool->lock_fd, LOCK_EX | LOCK_NB);
    }
}

static void drop_lock(struct fb_pool *pool)
{
    char link[64], path[FB_MAX_PATH_CHARS + 64];
    ssize_t n;

    if (pool->lock_fd < 0) {
        return;
    }
    snprintf(link, sizeof(link), "/proc/self/fd/%d", pool->lock_fd);
    n = readlink(link, path, sizeof(path) - 1);
    if (n > 0) {
        path[n] = 0;
        unlink(path);
    }
    close(pool->lock_fd);
    pool->lock_fd = -1;
}

enum fb_status fb_keeper_open_space(struct fb_pool *pool, struct fb_link *link,
                                    struct fb_pool_space *space, uint64_t deadline_ns,
                                    struct fb_error *error)
{
    struct fb_space_request request = {.manifest_bytes = (uint32_t)space->manifest_bytes};
    struct fb_wire_writer w;
    enum fb_status status;

    fb_link_begin(link, &w, FB_MSG_SPACE, &request, sizeof(request));
    fb_wire_append(&w, space->manifest, space->manifest_bytes);
    status = fb_link_call(pool, link, &w, NULL, 0, deadline_ns);
    if (status == FB_OK) {
        atomic_store(&space->handle, link->reply.space_reply.space);
        return FB_OK;
    }
    atomic_store(&space->handle, FB_NO_HANDLE);
    return fb_error_set(error, status, "%.*s", link->reply.text ? (int)link->reply.text_bytes : 80,
                        link->reply.text ? link->reply.text : fb_status_text(status));
}

static bool is_lost(enum fb_status status)
{
    return status == FB_ETIMEDOUT || status == FB_ECONN || status == FB_EPROTO;
}

/* A space that the daemon refuses misses; only a lost connection ends the attempt. Spaces are
 * added at the head and never go while the pool is open, so the list is walked without the
 * mutex. */
static enum fb_status open_spaces(struct keeper *k)
{
    struct fb_pool_space *space;

    pthread_mutex_lock(&k->pool->mutex);
    space = LIST_FIRST(&k->pool->spaces);
    pthread_mutex_unlock(&k->pool->mutex);
    for (; space; space = LIST_NEXT(space, link)) {
        enum fb_status status =
            fb_keeper_open_space(k->pool, k->control, space, fb_now_ns() + CONNECT_NS, NULL);

        if (is_lost(status)) {
            return status;
        }
    }
    return FB_OK;
}

/* Ask again for every mapped chunk, so that the daemon knows who has it; descriptors that come
 * are not needed. What it does not know any more is retired. */
static enum fb_status announce_maps(struct keeper *k)
{
    struct fb_pool *pool = k->pool;
    uint32_t *chunks = NULL, n = 0;
    enum fb_status status = FB_OK;
    struct fb_map *map;

    pthread_mutex_lock(&pool->mutex);
    for (uint32_t i = 0; i < FB_MAP_BUCKETS; i++) {
        LIST_FOREACH(map, &pool->maps[i], link) {
            n++;
        }
    }
    chunks = calloc(n + 1, sizeof(*chunks));
    n = 0;
    for (uint32_t i = 0; i < FB_MAP_BUCKETS && chunks; i++) {
        LIST_FOREACH(map, &pool->maps[i], link) {
            chunks[n++] = map->chunk;
        }
    }
    pthread_mutex_unlock(&pool->mutex);
    for (uint32_t i = 0; i < n && status == FB_OK; i++) {
        struct fb_list_request request = {.count = 1};
        struct fb_wire_writer w;

        fb_link_begin(k->control, &w, FB_MSG_CHUNKS, &request, sizeof(request));
        fb_wire_append(&w, &chunks[i], sizeof(*chunks));
        status = fb_link_call(pool, k->control, &w, NULL, 0, fb_now_ns() + CONNECT_NS);
        if (status == FB_OK && fb_wire_u32(k->control->reply.first, 0) != FB_OK) {
            fb_map_retire(pool, chunks[i]);
        }
    }
    free(chunks);
    return status;
}

/* Name slots to a new daemon; it keeps them under leases of its own. */
static enum fb_status resume_slots(struct keeper *k, const struct fb_wire_location *locations,
                                   uint32_t n, uint64_t *ret_leases, uint32_t *ret_count)
{
    enum fb_status status = FB_OK;

    *ret_count = 0;
    for (uint32_t at = 0; at < n && *ret_count < FB_HIT_MAX_LEASES;) {
        uint32_t some = n - at < FB_WIRE_MAX_KEYS ? n - at : FB_WIRE_MAX_KEYS;
        struct fb_resume_request request = {.count = some};
        struct fb_wire_writer w;

        fb_link_begin(k->control, &w, FB_MSG_RESUME, &request, sizeof(request));
        fb_wire_append(&w, locations + at, some * sizeof(*locations));
        status = fb_link_call(k->pool, k->control, &w, NULL, 0, fb_now_ns() + CONNECT_NS);
        if (status != FB_OK) {
            return status;
        }
        ret_leases[(*ret_count)++] = k->control->reply.resume_reply.lease;
        at += some;
    }
    return FB_OK;
}

/* What a hit or put of an earlier daemon uses, copied: the mutex is not held while the daemon is
 * asked, and whoever owns it may release it meanwhile. */
struct used_slots {
    struct fb_hit *hit; /* or */
    struct fb_put *put;
    struct fb_wire_location *locations;
    uint32_t count;
};

static bool copy_hit(struct fb_hit *hit, struct used_slots *u)
{
    uint32_t cells = hit->count * hit->capacity;

    u->locations = malloc((cells + 1) * sizeof(*u->locations));
    for (uint32_t i = 0; u->locations && i < cells; i++) {
        if (hit->locations[i].chunk != FB_WIRE_NOWHERE) {
            u->locations[u->count++] = hit->locations[i];
        }
    }
    u->hit = hit;
    return u->locations != NULL;
}

static bool copy_put(struct fb_put *put, struct used_slots *u)
{
    u->locations = malloc((put->pages + 1) * sizeof(*u->locations));
    for (uint32_t i = 0; u->locations && i < put->pages; i++) {
        if (put->page[i].claim) {
            u->locations[u->count++] = put->page[i].where;
        }
    }
    u->put = put;
    return u->locations != NULL;
}

/* The next one that this daemon has not been told of. */
static bool next_used(struct keeper *k, struct used_slots *u)
{
    struct fb_hit *hit;
    struct fb_put *put;
    bool found = false;

    *u = (struct used_slots){0};
    pthread_mutex_lock(&k->pool->mutex);
    LIST_FOREACH(hit, &k->pool->hits, link) {
        if (hit->incarnation != k->incarnation) {
            found = copy_hit(hit, u);
            break;
        }
    }
    LIST_FOREACH(put, &k->pool->puts, link) {
        if (!found && put->incarnation != k->incarnation && !put->resumed) {
            found = copy_put(put, u);
            break;
        }
    }
    pthread_mutex_unlock(&k->pool->mutex);
    return found;
}

/* Hand the new leases to the owner; if it has gone they are released. */
static void settle_used(struct keeper *k, const struct used_slots *u, const uint64_t *leases,
                        uint32_t count)
{
    struct fb_hit *hit;
    struct fb_put *put;
    bool taken = false;

    pthread_mutex_lock(&k->pool->mutex);
    LIST_FOREACH(hit, &k->pool->hits, link) {
        if (hit == u->hit && hit->incarnation != k->incarnation) {
            memcpy(hit->leases, leases, count * sizeof(*leases));
            hit->lease_count = count;
            hit->incarnation = k->incarnation;
            taken = true;
        }
    }
    LIST_FOREACH(put, &k->pool->puts, link) {
        if (put == u->put && !put->resumed) {
            put->resumed = true;
            put->held_lease = count ? leases[0] : 0;
            taken = true;
        }
    }
    pthread_mutex_unlock(&k->pool->mutex);
    if (!taken && count > 0) {
        struct fb_list_request request = {.count = count};
        struct fb_wire_writer w;

        fb_link_begin(k->control, &w, FB_MSG_RELEASE, &request, sizeof(request));
        fb_wire_append(&w, leases, count * sizeof(*leases));
        fb_link_post(k->pool, k->control, &w);
    }
}

static enum fb_status resume_all(struct keeper *k)
{
    uint64_t leases[FB_HIT_MAX_LEASES];
    enum fb_status status = FB_OK;
    struct used_slots u;
    uint32_t count;

    while (status == FB_OK && next_used(k, &u)) {
        status = resume_slots(k, u.locations, u.count, leases, &count);
        if (status == FB_OK) {
            settle_used(k, &u, leases, count);
        }
        free(u.locations);
    }
    return status;
}

static void put_ids(struct fb_pool *pool, struct fb_wire_writer *w, struct fb_renew_request *r)
{
    struct fb_hit *hit;
    struct fb_put *put;

    LIST_FOREACH(hit, &pool->hits, link) {
        fb_wire_append(w, hit->leases, hit->lease_count * sizeof(uint64_t));
        r->lease_count += hit->lease_count;
    }
    LIST_FOREACH(put, &pool->puts, link) {
        if (put->held_lease) {
            fb_wire_append(w, &put->held_lease, sizeof(put->held_lease));
            r->lease_count++;
        }
    }
    LIST_FOREACH(put, &pool->puts, link) {
        for (uint32_t i = 0; i < put->pages && !put->resumed; i++) {
            if (put->page[i].claim) {
                fb_wire_append(w, &put->page[i].claim, sizeof(uint64_t));
                r->claim_count++;
            }
        }
    }
}

/* A lease that has ended turns what it answered into a miss. The ids are still in the request. */
static void mark_lost(struct fb_pool *pool, const struct fb_link *link)
{
    const uint8_t *ids = link->tx + sizeof(struct fb_wire_header) + sizeof(struct fb_renew_request);
    struct fb_hit *hit;

    for (uint32_t i = 0; i < link->reply.list_reply.count; i++) {
        if (fb_wire_u32(link->reply.first, i) == FB_OK) {
            continue;
        }
        LIST_FOREACH(hit, &pool->hits, link) {
            for (uint32_t j = 0; j < hit->lease_count; j++) {
                if (hit->leases[j] == fb_wire_u64(ids, i)) {
                    atomic_store(&hit->lost, true);
                }
            }
        }
    }
}

/* Name everything held, renewing it, and confirm what was unmapped. What is not named and has run
 * out counts as given back, so the list must be complete; it is made under the mutex. */
static enum fb_status renew(struct keeper *k)
{
    struct fb_pool *pool = k->pool;
    struct fb_renew_request request = {0};
    struct fb_wire_writer w;
    enum fb_status status;

    pthread_mutex_lock(&pool->mutex);
    fb_link_begin(k->control, &w, FB_MSG_RENEW, &request, sizeof(request));
    put_ids(pool, &w, &request);
    request.unmapped_count = pool->unmapped_count < 1024 ? pool->unmapped_count : 1024;
    fb_wire_append(&w, pool->unmapped, request.unmapped_count * sizeof(uint32_t));
    memcpy(k->control->tx + sizeof(struct fb_wire_header), &request, sizeof(request));
    pthread_mutex_unlock(&pool->mutex);
    status = fb_link_call(pool, k->control, &w, NULL, 0, fb_now_ns() + CONNECT_NS);
    if (status != FB_OK) {
        return status;
    }
    pthread_mutex_lock(&pool->mutex);
    mark_lost(pool, k->control);
    pool->unmapped_count -= request.unmapped_count;
    if (pool->unmapped_count > 0) {
        memmove(pool->unmapped, pool->unmapped + request.unmapped_count,
                pool->unmapped_count * sizeof(uint32_t));
    }
    pthread_mutex_unlock(&pool->mutex);
    return FB_OK;
}

/* --- connecting --- */

static void disconnect(struct keeper *k)
{
    struct fb_pool *pool = k->pool;
    struct fb_link_list idle;

    pthread_mutex_lock(&pool->mutex);
    pool->connected = false;
    pool->epoch++;
    idle = pool->idle;
    SLIST_INIT(&pool->idle);
    pool->idle_count = 0;
    pthread_mutex_unlock(&pool->mutex);
    while (!SLIST_EMPTY(&idle)) {
        struct fb_link *link = SLIST_FIRST(&idle);

        SLIST_REMOVE_HEAD(&idle, idle);
        fb_link_destroy(link);
    }
    fb_link_destroy(k->control);
    k->control = NULL;
    k->due_ns = fb_now_ns() + k->retry_ns;
}

static void set_connected(struct keeper *k, const struct fb_hello_reply *hello)
{
    struct fb_pool *pool = k->pool;

    pthread_mutex_lock(&pool->mutex);
    pool->connected = true;
    pool->info.connected = true;
    pool->info.incarnation = hello->incarnation;
    pool->info.reconnects += pool->epoch > 0;
    memcpy(pool->info.tenant, hello->tenant, sizeof(pool->info.tenant));
    pool->info.tenant[FB_MAX_TENANT_CHARS] = 0;
    pool->lease_ms = hello->lease_ms;
    pool->refusal.status = FB_OK;
    pool->attempts++;
    pthread_cond_broadcast(&pool->changed);
    pthread_mutex_unlock(&pool->mutex);
    k->retry_ns = FB_RETRY_FIRST_NS;
    k->due_ns = fb_now_ns() + hello->lease_ms * 1000000ull / 3;
}

static void set_refused(struct keeper *k, const struct fb_error *error)
{
    struct fb_pool *pool = k->pool;

    pthread_mutex_lock(&pool->mutex);
    pool->refusal = *error;
    pool->attempts++;
    pthread_cond_broadcast(&pool->changed);
    pthread_mutex_unlock(&pool->mutex);
}

static void connect_daemon(struct keeper *k)
{
    struct fb_error error = {.status = FB_ECONN, .text = "connection lost while connecting"};
    struct fb_hello_reply hello;
    enum fb_status status;

    status = fb_link_create(k->pool, true, fb_now_ns() + CONNECT_NS, &k->control, &error);
    if (status == FB_OK) {
        hello = k->control->reply.hello_reply;
        k->incarnation = hello.incarnation;
        hold_lock(k->pool);
        status = open_spaces(k);
    }
    if (status == FB_OK) {
        status = announce_maps(k);
    }
    if (status == FB_OK) {
        status = resume_all(k);
    }
    if (status == FB_OK) {
        status = renew(k);
    }
    if (status == FB_OK) {
        set_connected(k, &hello);
        return;
    }
    disconnect(k);
    set_refused(k, &error);
    k->retry_ns = 2 * k->retry_ns < FB_RETRY_LONGEST_NS ? 2 * k->retry_ns : FB_RETRY_LONGEST_NS;
}

/* --- the loop --- */

/* Nothing is expected on the control connection but notifications and its end. */
static void read_control(struct keeper *k)
{
    struct fb_link *link = k->control;
    struct fb_wire_message m;
    size_t bytes;
    enum fb_status status;

    FB_ASSERT(link);
    while ((status = fb_channel_recv(link->channel, link->rx, sizeof(link->rx), &bytes, link->fds,
                                     &link->fd_count)) == FB_OK) {
        if (fb_wire_parse_reply(link->rx, bytes, &m, NULL) == FB_OK &&
            m.header.type == FB_MSG_NOTIFY && m.notify.kind == FB_NOTIFY_UNMAP) {
            fb_map_retire(k->pool, m.notify.value);
        }
        for (uint32_t i = 0; i < link->fd_count; i++) {
            close(link->fds[i]);
        }
        link->fd_count = 0;
    }
    if (status != FB_AGAIN) {
        disconnect(k);
    }
}

static void wait_for_work(struct keeper *k)
{
    struct pollfd p[2] = {
        {.fd = k->pool->wake_fd, .events = POLLIN},
        {.fd = k->control ? fb_channel_fd(k->control->channel) : -1, .events = POLLIN},
    };
    uint64_t now = fb_now_ns(), count;
    int timeout_ms = now >= k->due_ns ? 0 : (int)((k->due_ns - now) / 1000000) + 1;
    ssize_t n;

    poll(p, 2, timeout_ms);
    if (p[0].revents) {
        n = read(k->pool->wake_fd, &count, sizeof(count));
        (void)n;
    }
    if (p[1].revents) {
        read_control(k);
    }
}

static bool is_stopping(struct fb_pool *pool, bool *ret_tripped, bool *ret_unmapped)
{
    bool stopping;

    pthread_mutex_lock(&pool->mutex);
    stopping = pool->stopping;
    *ret_tripped = !pool->connected;
    *ret_unmapped = pool->unmapped_count > 0;
    pthread_mutex_unlock(&pool->mutex);
    return stopping;
}

void *fb_keeper_main(void *pool)
{
    struct keeper k = {.pool = pool, .retry_ns = FB_RETRY_FIRST_NS};
    bool tripped, unmapped;

    while (!is_stopping(k.pool, &tripped, &unmapped)) {
        if (k.control && tripped) {
            disconnect(&k);
        } else if (!k.control && fb_now_ns() >= k.due_ns) {
            connect_daemon(&k);
        } else if (k.control && (unmapped || fb_now_ns() >= k.due_ns)) {
            k.due_ns = fb_now_ns() + k.pool->lease_ms * 1000000ull / 3;
            if (renew(&k) != FB_OK) {
                disconnect(&k);
            }
        } else {
            fb_map_touch(k.pool);
            wait_for_work(&k);
        }
    }
    disconnect(&k);
    drop_lock(k.pool);
    return NULL;
}
