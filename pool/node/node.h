/* Node: everything a daemon knows, as one state machine without I/O of its own.
 *
 * The reactor (or a test) feeds it: time, connections, packets, deaths; the node answers through
 * channels and asks for what takes long through `edges`. All calls from one thread, with the
 * current time given first (fb_node_set_time). pool/node/README.md has the states and the rules. */
#ifndef FB_NODE_NODE_H
#define FB_NODE_NODE_H

#include "pool/node/config.h"
#include "pool/node/metric.h"
#include "pool/node/tier.h"
#include "pool/node/worker.h"
#include "transport/channel.h"

struct fb_node;

enum fb_node_state { FB_NODE_STARTING, FB_NODE_READY, FB_NODE_DRAINING, FB_NODE_DRAINED };

/* Something the reactor polls: embedded in what it belongs to. */
struct fb_source {
    void (*ready)(struct fb_source *source);
    void *owner;
    void *context;
};

/* What a node needs done for it. */
struct fb_node_edges {
    void *context;
    /* Run a job elsewhere and its mail later on this thread. */
    void (*submit)(void *context, struct fb_job *job);
    /* Poll fd for reading and call source->ready, until unwatch. That comes before fd is closed:
     * a process that has sent fd, or was sent it, keeps what it stands for open. */
    enum fb_status (*watch)(void *context, int fd, struct fb_source *source);
    void (*unwatch)(void *context, int fd);
    /* Tests: wear decorators around the tier; NULL for none. Takes and returns a tier. */
    struct fb_tier *(*wrap_tier)(void *context, struct fb_tier *tier);
};

/* What only a node can judge of a configuration: the policy's name, the length of socket paths.
 * returns FB_OK | FB_EINVAL */
enum fb_status fb_node_check_config(const struct fb_config *config, struct fb_error *error);

/* Open the directory, lock it, take over what is there.
 * config, metrics  copied; borrowed until destroy
 * returns  FB_OK | FB_BUSY (another daemon has the directory) | FB_EIO | FB_ENOMEM | FB_EINVAL */
enum fb_status fb_node_create(const struct fb_config *config, const struct fb_node_edges *edges,
                              struct fb_metrics *metrics, const struct fb_log *log, uint64_t now_ns,
                              struct fb_node **ret_node, struct fb_error *error);

/* Close everything and keep the chunks. No job may be outstanding. */
void fb_node_destroy(struct fb_node *node);

void fb_node_set_time(struct fb_node *node, uint64_t now_ns);

/* A connection of a tenant (by its place in the configuration). Takes the channel. */
enum fb_status fb_node_connect(struct fb_node *node, uint32_t tenant, struct fb_channel *channel);

/* Listen on every tenant's socket; fb_node_accept is called through edges.watch. */
enum fb_status fb_node_listen(struct fb_node *node, struct fb_error *error);

/* Time-driven work. Returns when to be called again, in ns from now; UINT64_MAX: no need. */
uint64_t fb_node_tick(struct fb_node *node);

/* Take what the connection that spoke last has sent since: cheaper than asking after all, and the
 * next request is likely to be its. Returns whether there was anything. */
bool fb_node_poll(struct fb_node *node);

/* Free what closed during this round; when no source of the round is used any more. */
void fb_node_collect(struct fb_node *node);

/* Refuse new work; done (FB_NODE_DRAINED) when nothing is in flight or the time is over. */
void fb_node_drain(struct fb_node *node, uint64_t within_ns);
enum fb_node_state fb_node_state(const struct fb_node *node);

/* --- what operators ask --- */

struct fb_node_status {
    char id[33];
    enum fb_node_state state;
    uint64_t uptime_ns;
    struct fb_tier_stats host;
    uint64_t index_bytes;
    uint32_t blocks;
    uint32_t clients;
    uint32_t leases;
    uint32_t awaited; /* survivors of an earlier incarnation */
    uint64_t leased_bytes;
    uint64_t reserved_bytes;
    uint64_t quarantined_bytes;
    uint64_t pinned_bytes;
    uint32_t tenant_count;
    struct fb_node_tenant_status {
        char name[FB_MAX_TENANT_CHARS + 1];
        uint64_t limit_bytes;
        uint64_t used_bytes;
        uint64_t blocks;
        uint32_t chunks;
    } tenants[FB_TENANTS_MAX];
};

struct fb_node_space_status {
    uint8_t id[FB_SPACE_ID_BYTES];
    char tenant[FB_MAX_TENANT_CHARS + 1];
    char model[FB_MAX_TEXT_CHARS + 1];
    char codecs[64];
    enum fb_rule rule;
    uint32_t window_tokens;
    uint32_t page_tokens;
    uint32_t layers;
    uint32_t heads;
    uint64_t block_bytes;
    uint64_t blocks;
};

void fb_node_get_status(struct fb_node *node, struct fb_node_status *ret_status);

/* The n-th space, or false at the end. */
bool fb_node_get_space(struct fb_node *node, uint32_t n, struct fb_node_space_status *ret_space);

/* The encoded manifest of a space that the node knows.
 * returns FB_OK | FB_EIO (in words) */
enum fb_status fb_node_get_manifest(struct fb_node *node, const uint8_t id[FB_SPACE_ID_BYTES],
                                    uint8_t ret_manifest[FB_MANIFEST_MAX_BYTES], size_t *ret_bytes,
                                    struct fb_error *error);

/* Remove blocks: of a tenant (space NULL), of a space (key NULL), or one page and all that extend
 * it. Leased ones become invisible now and go when they are released.
 * returns FB_OK | FB_ENOENT */
enum fb_status fb_node_purge(struct fb_node *node, const char *tenant, const uint8_t *space,
                             const uint8_t *key, uint64_t *ret_blocks, uint64_t *ret_bytes,
                             struct fb_error *error);

enum fb_event_kind {
    FB_EVENT_STATE = 1,
    FB_EVENT_COMMITTED,
    FB_EVENT_EVICTED,
    FB_EVENT_PURGED,
    FB_EVENT_REJECTED,
    FB_EVENT_CLIENT_JOINED,
    FB_EVENT_CLIENT_DIED,
    FB_EVENT_CHUNK_MOVED,
};

struct fb_event {
    uint64_t sequence;
    uint64_t unix_ms;
    enum fb_event_kind kind;
    char tenant[FB_MAX_TENANT_CHARS + 1];
    uint8_t space[FB_SPACE_ID_BYTES];
    uint8_t key[8];
    uint64_t count;
};

/* Events from *sequence on, oldest first: fills one and moves *sequence behind it, or returns
 * false. Those that were overwritten are skipped. */
uint64_t fb_node_event_count(const struct fb_node *node); /* the sequence that comes next */
bool fb_node_next_event(struct fb_node *node, uint64_t *sequence, struct fb_event *ret_event);

/* Whole-structure check for tests; aborts on a contradiction. */
void fb_node_check(struct fb_node *node);

#endif
