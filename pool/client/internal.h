/* What the parts of libforebay share. */
#ifndef FB_CLIENT_INTERNAL_H
#define FB_CLIENT_INTERNAL_H

#include "pool/client/forebay.h"
#include "proto/assert.h"
#include "proto/wire.h"
#include "transport/channel.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/queue.h>
#include <time.h>

#define FB_MAP_BUCKETS      256
#define FB_MAX_IDLE_LINKS   8
#define FB_MAX_UNANSWERED   16               /* posts; more could fill the socket */
#define FB_MAX_HELD         FB_WIRE_MAX_KEYS /* leases and claims: their renewal is one message */
#define FB_MAX_PATH_CHARS   255
#define FB_RETRY_FIRST_NS   (100ull * 1000 * 1000)
#define FB_RETRY_LONGEST_NS (5000ull * 1000 * 1000)

/* One connection. Used by one thread at a time; idle ones wait in the pool. */
struct fb_link {
    SLIST_ENTRY(fb_link) idle;
    struct fb_channel *channel;
    struct fb_hasher *hasher;
    uint64_t epoch;              /* of the pool, when it was made */
    uint64_t next_id;            /* of requests; answers with another id are old and skipped */
    uint32_t unanswered;         /* posts since the last call */
    int fds[FB_CHANNEL_MAX_FDS]; /* of the last answer */
    uint32_t fd_count;
    struct fb_wire_message reply;
    uint8_t tx[FB_WIRE_MAX_BYTES];
    uint8_t rx[FB_WIRE_MAX_BYTES];
};

/* A mapped chunk. */
struct fb_map {
    LIST_ENTRY(fb_map) link;
    uint32_t chunk;
    uint32_t refs; /* hits and puts that have looked into it */
    bool retired;  /* the daemon wants it back */
    bool touched;  /* by fb_map_touch */
    uint8_t *base;
    uint64_t bytes;
    uint64_t slot_bytes;
    uint64_t slots_offset;
};

struct fb_pool_space {
    LIST_ENTRY(fb_pool_space) link;
    struct fb_pool *pool;
    uint8_t id[FB_SPACE_ID_BYTES];
    struct fb_layout layout;
    enum fb_rule rule;
    _Atomic uint32_t handle; /* of the daemon; FB_NO_HANDLE while there is none */
    size_t manifest_bytes;
    uint8_t manifest[];
};
#define FB_NO_HANDLE UINT32_MAX

struct fb_map_refs {
    struct fb_map **list;
    uint32_t count;
};

struct fb_hit {
    LIST_ENTRY(fb_hit) link;
    struct fb_pool *pool;
    struct fb_pool_space *family[FB_MAX_FAMILY];
    uint32_t count;
    uint32_t pages;
    uint32_t capacity; /* pages that locations has room for, per space */
    uint64_t leases[FB_HIT_MAX_LEASES];
    uint32_t lease_count;
    uint32_t held;        /* what the pool counts for it; a successor gives no more leases */
    uint64_t incarnation; /* of the daemon that gave the leases */
    _Atomic bool lost;    /* a lease has ended, not by us */
    struct fb_map_refs refs;
    uint8_t *keys;                      /* [count, capacity, FB_KEY_BYTES] */
    struct fb_wire_location *locations; /* [count, capacity] */
};

struct fb_put {
    LIST_ENTRY(fb_put) link;
    struct fb_pool *pool;
    struct fb_pool_space *space;
    struct fb_put_part part;
    uint32_t pages;
    uint64_t incarnation; /* of the daemon that gave the claims */
    bool resumed;         /* its successor has been told: the claims are void */
    uint64_t held_lease;  /* what that one keeps the slots under; 0: none */
    struct fb_map_refs refs;
    struct fb_put_page *page;
    uint64_t *sums; /* [pages, planes of the part] */
};

struct fb_put_page {
    enum fb_status status; /* of the reservation */
    bool written;
    uint64_t claim; /* 0 when there is none */
    struct fb_wire_location where;
    uint8_t key[FB_KEY_BYTES];
};

LIST_HEAD(fb_map_list, fb_map);
LIST_HEAD(fb_space_list, fb_pool_space);
LIST_HEAD(fb_hit_list, fb_hit);
LIST_HEAD(fb_put_list, fb_put);
SLIST_HEAD(fb_link_list, fb_link);

struct fb_pool {
    char path[FB_MAX_PATH_CHARS + 1];
    uint8_t id[FB_CLIENT_ID_BYTES];
    uint64_t spin_ns;
    pid_t pid;
    int pidfd;
    int wake_fd; /* the keeper waits on it */
    const struct fb_kernels *kernels;
    pthread_t keeper;

    pthread_mutex_t mutex; /* guards what follows; never held over a wait */
    pthread_cond_t changed;
    bool connected; /* calls may be made; else they miss at once */
    bool stopping;
    uint64_t epoch;    /* counts connections lost */
    uint64_t attempts; /* counts connections tried */
    struct fb_link_list idle;
    uint32_t idle_count;
    struct fb_map_list maps[FB_MAP_BUCKETS]; /* by chunk id */
    struct fb_space_list spaces;
    struct fb_hit_list hits;
    struct fb_put_list puts;
    uint32_t held;      /* leases and claims */
    uint32_t *unmapped; /* chunk ids to confirm */
    uint32_t unmapped_count;
    struct fb_pool_info info;
    struct fb_error refusal; /* the daemon's last word, when it refused us */
    uint32_t lease_ms;

    int lock_fd;                  /* the keeper's: our file in the clients directory */
    _Atomic uint64_t bytes_per_s; /* of transfers, measured */
};

static inline uint64_t fb_now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static inline uint64_t fb_deadline(uint64_t timeout_ns, uint64_t standard_ns)
{
    return fb_now_ns() + (timeout_ns ? timeout_ns : standard_ns);
}

/* The map of a transfer's i-th layer, moved to where page `page` begins. */
static inline struct fb_token_map fb_transfer_map(const struct fb_transfer *t, uint32_t i,
                                                  uint32_t page, uint32_t page_tokens)
{
    struct fb_token_map map = t->layer_maps ? t->layer_maps[i] : t->map;

    map.first_token += (uint64_t)page * page_tokens;
    return map;
}

/* Whether every layer of a transfer has a map. */
static inline bool fb_transfer_is_mapped(const struct fb_transfer *t)
{
    for (uint32_t i = 0; t->layer_maps && i < t->layer_count; i++) {
        if (t->layer_maps[i].block_tokens == 0) {
            return false;
        }
    }
    return t->layer_maps || t->map.block_tokens > 0;
}

/* --- link.c --- */

/* Connect and say hello. control: this connection gets notifications. */
enum fb_status fb_link_create(struct fb_pool *pool, bool control, uint64_t deadline_ns,
                              struct fb_link **ret_link, struct fb_error *error);
void fb_link_destroy(struct fb_link *link);

/* An idle connection or a new one; FB_ECONN at once while the daemon is away. */
enum fb_status fb_link_take(struct fb_pool *pool, uint64_t deadline_ns, struct fb_link **ret_link);

/* Give a connection back after a call that ended so; broken ones are closed, and a missed
 * deadline opens the breaker. */
void fb_link_give(struct fb_pool *pool, struct fb_link *link, enum fb_status status);

/* Begin a request in link->tx; fb_link_call sends it and waits for the answer in link->reply.
 * returns the answer's status, or FB_ETIMEDOUT | FB_ECONN | FB_EPROTO */
void fb_link_begin(struct fb_link *link, struct fb_wire_writer *w, enum fb_msg type,
                   const void *body, size_t body_bytes);
enum fb_status fb_link_call(struct fb_pool *pool, struct fb_link *link, struct fb_wire_writer *w,
                            const int *fds, uint32_t fd_count, uint64_t deadline_ns);

/* Send a request whose answer nobody needs. Only every so many posts one waits for its answer, as a
 * lookup would, so that posts do not pile up. */
enum fb_status fb_link_post(struct fb_pool *pool, struct fb_link *link, struct fb_wire_writer *w);

/* Whether the daemon that this connection is to is the one the keeper knows: what it said is void
 * otherwise. The mutex is held. */
static inline bool fb_link_is_current(const struct fb_pool *pool, const struct fb_link *link)
{
    return link->epoch == pool->epoch;
}

/* --- keeper.c: the library's own thread --- */

void *fb_keeper_main(void *pool);
void fb_keeper_wake(struct fb_pool *pool);

/* Register a space over a link. */
enum fb_status fb_keeper_open_space(struct fb_pool *pool, struct fb_link *link,
                                    struct fb_pool_space *space, uint64_t deadline_ns,
                                    struct fb_error *error);

/* --- map.c --- */

/* Address of a slot, mapping its chunk if need be; the chunk stays mapped until the refs are
 * released. returns FB_OK | FB_MISS (the chunk is gone) | as of calls */
enum fb_status fb_map_slot(struct fb_pool *pool, struct fb_map_refs *refs,
                           struct fb_wire_location where, uint64_t block_bytes,
                           uint64_t deadline_ns, uint8_t **ret_slot);
void fb_map_release(struct fb_pool *pool, struct fb_map_refs *refs);
void fb_map_retire(struct fb_pool *pool, uint32_t chunk); /* unmap when nobody looks into it */
/* Fill the page tables of chunks mapped since the last call, so that transfers do not fault page by
 * page. Keeper only: a chunk of 1 GiB takes some ten milliseconds. */
void fb_map_touch(struct fb_pool *pool);
void fb_map_destroy_all(struct fb_pool *pool);

#endif
