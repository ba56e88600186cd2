/* Pool: opening, closing, spaces. */
#include "pool/client/internal.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FIRST_BYTES_PER_S (1000ull * 1000 * 1000) /* assumed until something was moved */

const char *fb_version(void)
{
    return FOREBAY_VERSION;
}

static enum fb_status set_path(struct fb_pool *pool, const char *address, struct fb_error *error)
{
    if (!address) {
        address = getenv("FOREBAY_SOCKET");
    }
    if (!address || !address[0]) {
        address = FB_DEFAULT_SOCKET;
    }
    if (strlen(address) > FB_MAX_PATH_CHARS || strstr(address, "://")) {
        return fb_error_set(error, FB_EINVAL,
                            "\"%s\" is no address; expected the path of a socket such as "
                            "%s",
                            address, FB_DEFAULT_SOCKET);
    }
    snprintf(pool->path, sizeof(pool->path), "%s", address);
    return FB_OK;
}

static enum fb_status open_descriptors(struct fb_pool *pool, struct fb_error *error)
{
    pool->pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    if (pool->pidfd < 0) {
        return fb_error_set(error, FB_EUNSUPPORTED,
                            "pidfd_open: %s; Linux 5.3 or later is needed, and a seccomp profile "
                            "that allows the call",
                            strerror(errno));
    }
    pool->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (pool->wake_fd < 0) {
        return fb_error_set(error, FB_ENOMEM, "eventfd: %s", strerror(errno));
    }
    return FB_OK;
}

/* The keeper takes no signals: they are the program's. */
static enum fb_status start_keeper(struct fb_pool *pool, struct fb_error *error)
{
    sigset_t all, before;
    int e;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    e = pthread_create(&pool->keeper, NULL, fb_keeper_main, pool);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return e == 0 ? FB_OK : fb_error_set(error, FB_ENOMEM, "pthread_create: %s", strerror(e));
}

/* Until the first attempt has ended; its failure is no error unless the daemon refuses us. */
static enum fb_status wait_first_attempt(struct fb_pool *pool, uint64_t connect_ns,
                                         struct fb_error *error)
{
    enum fb_status status = FB_OK;
    struct timespec until;
    uint64_t deadline;

    deadline = fb_deadline(connect_ns, FB_CONTROL_TIMEOUT_NS);
    until.tv_sec = (time_t)(deadline / 1000000000ull);
    until.tv_nsec = (long)(deadline % 1000000000ull);
    pthread_mutex_lock(&pool->mutex);
    while (pool->attempts == 0 &&
           pthread_cond_timedwait(&pool->changed, &pool->mutex, &until) == 0) {
    }
    if (pool->refusal.status == FB_EVERSION || pool->refusal.status == FB_EPERM ||
        pool->refusal.status == FB_ELIMIT) {
        status = fb_error_set(error, pool->refusal.status, "%s", pool->refusal.text);
    }
    pthread_mutex_unlock(&pool->mutex);
    return status;
}

static void init_locks(struct fb_pool *pool)
{
    pthread_condattr_t attr;

    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->changed, &attr);
    pthread_condattr_destroy(&attr);
}

static void destroy(struct fb_pool *pool)
{
    fb_map_destroy_all(pool);
    while (!LIST_EMPTY(&pool->spaces)) {
        struct fb_pool_space *space = LIST_FIRST(&pool->spaces);

        LIST_REMOVE(space, link);
        free(space);
    }
    if (pool->pidfd >= 0) {
        close(pool->pidfd);
    }
    if (pool->wake_fd >= 0) {
        close(pool->wake_fd);
    }
    pthread_cond_destroy(&pool->changed);
    pthread_mutex_destroy(&pool->mutex);
    free(pool->unmapped);
    free(pool);
}

enum fb_status fb_open(const char *address, const struct fb_open_options *options,
                       struct fb_pool **ret_pool, struct fb_error *error)
{
    struct fb_pool *pool = calloc(1, sizeof(*pool));
    enum fb_status status;

    if (!pool) {
        return fb_error_set(error, FB_ENOMEM, "out of memory");
    }
    pool->pid = getpid();
    pool->pidfd = pool->wake_fd = pool->lock_fd = -1;
    pool->kernels = fb_kernels_best();
    pool->spin_ns = options ? options->spin_ns : 0;
    pool->lease_ms = 1000;
    atomic_store(&pool->bytes_per_s, FIRST_BYTES_PER_S);
    init_locks(pool);
    status = set_path(pool, address, error);
    if (status == FB_OK && getrandom(pool->id, sizeof(pool->id), 0) != sizeof(pool->id)) {
        status = fb_error_set(error, FB_EUNSUPPORTED, "getrandom: %s", strerror(errno));
    }
    if (status == FB_OK) {
        status = open_descriptors(pool, error);
    }
    if (status == FB_OK) {
        status = start_keeper(pool, error);
    }
    if (status != FB_OK) {
        destroy(pool);
        return status;
    }
    status = wait_first_attempt(pool, options ? options->connect_ns : 0, error);
    if (status != FB_OK) {
        fb_close(pool);
        return status;
    }
    *ret_pool = pool;
    return FB_OK;
}

void fb_close(struct fb_pool *pool)
{
    if (!pool) {
        return;
    }
    if (pool->pid == getpid()) {
        pthread_mutex_lock(&pool->mutex);
        pool->stopping = true;
        pthread_mutex_unlock(&pool->mutex);
        fb_keeper_wake(pool);
        pthread_join(pool->keeper, NULL);
    }
    destroy(pool);
}

void fb_pool_get_info(struct fb_pool *pool, struct fb_pool_info *ret_info)
{
    pthread_mutex_lock(&pool->mutex);
    pool->info.connected = pool->connected;
    *ret_info = pool->info;
    pthread_mutex_unlock(&pool->mutex);
}

/* --- spaces --- */

/* Tell the daemon now if it is there; else the keeper does when it comes. */
static enum fb_status register_space(struct fb_pool *pool, struct fb_pool_space *space,
                                     struct fb_error *error)
{
    uint64_t deadline_ns = fb_deadline(0, FB_CONTROL_TIMEOUT_NS);
    struct fb_link *link;
    enum fb_status status = fb_link_take(pool, deadline_ns, &link);

    if (status != FB_OK) {
        return FB_OK;
    }
    status = fb_keeper_open_space(pool, link, space, deadline_ns, error);
    fb_link_give(pool, link, status);
    return status == FB_ETIMEDOUT || status == FB_ECONN || status == FB_EPROTO ? FB_OK : status;
}

enum fb_status fb_pool_space_open(struct fb_pool *pool, const struct fb_manifest *manifest,
                                  struct fb_pool_space **ret_space, struct fb_error *error)
{
    uint8_t encoded[FB_MANIFEST_MAX_BYTES];
    struct fb_pool_space *space;
    enum fb_status status;
    size_t bytes;

    status = fb_manifest_encode(manifest, encoded, sizeof(encoded), &bytes, error);
    if (status != FB_OK) {
        return status;
    }
    space = calloc(1, sizeof(*space) + bytes);
    if (!space) {
        return fb_error_set(error, FB_ENOMEM, "out of memory");
    }
    space->pool = pool;
    space->rule = manifest->rule;
    space->manifest_bytes = bytes;
    memcpy(space->manifest, encoded, bytes);
    fb_space_id(encoded, bytes, space->id);
    atomic_store(&space->handle, FB_NO_HANDLE);
    status = fb_layout_init(&space->layout, manifest, error);
    if (status != FB_OK) {
        free(space);
        return status;
    }
    /* Listed before it is registered: whichever of keeper and caller comes second finds it. */
    pthread_mutex_lock(&pool->mutex);
    LIST_INSERT_HEAD(&pool->spaces, space, link);
    pthread_mutex_unlock(&pool->mutex);
    status = register_space(pool, space, error);
    if (status == FB_OK) {
        *ret_space = space;
    }
    return status; /* a refused one stays listed, of no use and no harm, until fb_close */
}

const uint8_t *fb_pool_space_id(const struct fb_pool_space *space)
{
    return space->id;
}

const struct fb_layout *fb_pool_space_layout(const struct fb_pool_space *space)
{
    return &space->layout;
}

void fb_pool_key(const struct fb_pool_space *space, const uint8_t chain_hash[FB_CHAIN_BYTES],
                 uint8_t ret_key[FB_KEY_BYTES])
{
    struct fb_hasher *hasher;

    FB_ASSERT(fb_hasher_create(&hasher) == FB_OK);
    fb_pool_keys(hasher, space->id, chain_hash, 1, ret_key);
    fb_hasher_destroy(hasher);
}
