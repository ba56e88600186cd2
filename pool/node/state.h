/* What a node holds: the structs that the reactor's modules share. Only they include this.
 *
 * Everything here is read and written by the reactor alone. How the pieces hang together:
 *
 *   tenant -- class (tenant, slot size) -- chunks in the host tier
 *   space  -- its class
 *   client -- sessions (connections)
 *          -- claims -- fill (a block being written) -- entry, slot
 *          -- holds  -- lease -- entries, each pinned once by the lease
 *
 * Pins on an entry: one per lease that has it, one by its fill until the block is published or
 * given up, one per fill of a child. The slot goes when the entry has no pin left and is evicted
 * or detached. */
#ifndef FB_NODE_STATE_H
#define FB_NODE_STATE_H

#include "kernels/codec.h"
#include "pool/node/config.h"
#include "pool/node/host.h"
#include "pool/node/log.h"
#include "pool/node/mailbox.h"
#include "pool/node/metric.h"
#include "pool/node/node.h"
#include "pool/node/slab.h"
#include "pool/node/survivor.h"
#include "pool/policy/index.h"
#include "proto/assert.h"
#include "proto/wire.h"
#include "transport/channel.h"

#include <sys/queue.h>
#include <time.h>
#include <uthash.h>

#define FB_MAX_SPACES   4096
#define FB_EVENT_RING   1024
#define FB_CELL_CLASSES 8 /* arrays of 32 << i cells */

/* An array of cells that no lease uses. */
struct fb_free_cells {
    struct fb_free_cells *next;
};

struct fb_expiry;
struct fb_op;
struct fb_session;

struct fb_tenant {
    char name[FB_MAX_TENANT_CHARS + 1];
    uint16_t index;
    uint64_t pinned_bytes; /* by hints */
    uint64_t used_bytes;   /* of blocks that have a pin, each counted once */
    uint64_t pin_limit_bytes;
    uint64_t client_limit_bytes;
    struct fb_survivors survivors; /* clients of an earlier incarnation that may still use slots */
    int listen_fd;
    struct fb_source accept_source;
};

struct fb_class {
    struct fb_tier_class tier;
    uint16_t order;      /* eviction order in the index */
    uint64_t hits;       /* pages found, decaying */
    uint64_t ghost_hits; /* pages that one more chunk would have kept, decaying */
    uint64_t *ghosts;    /* [ghost_mask + 1] key prefixes of what was evicted last */
    uint64_t ghost_mask;
    uint64_t moved_ns; /* when a chunk last came from another class */
};

struct fb_space {
    uint8_t id[FB_SPACE_ID_BYTES];
    UT_hash_handle hh; /* by id */
    uint32_t handle;   /* place in the node's table */
    uint16_t tenant;
    uint16_t class_id;
    enum fb_rule rule;
    uint32_t window_pages;
    struct fb_layout layout;
    char model[FB_MAX_TEXT_CHARS + 1];
    uint32_t window_tokens;
    uint32_t blocks; /* committed */
    uint32_t fills;
    uint32_t users; /* clients that opened it */
};

LIST_HEAD(fb_hold_list, fb_hold);
LIST_HEAD(fb_claim_list, fb_claim);

struct fb_client {
    struct fb_slab_head head;
    TAILQ_ENTRY(fb_client) link;
    uint8_t id[FB_CLIENT_ID_BYTES];
    struct fb_tenant *tenant;
    struct fb_source exit_source; /* of its pidfd */
    int pidfd;
    uint32_t sessions;
    struct fb_session *control;
    struct fb_hold_list holds;
    struct fb_claim_list claims;
    uint64_t held_bytes; /* leased, reserved and quarantined */
    uint32_t *chunks;    /* ids it was given */
    uint32_t chunk_count;
    uint32_t *spaces; /* handles it opened */
    uint32_t space_count;
};

struct fb_lease {
    struct fb_slab_head head;
    TAILQ_ENTRY(fb_lease) link; /* by deadline, the earliest first */
    struct fb_tenant *tenant;
    struct fb_hold_list holds;
    uint64_t deadline_ns;
    bool expired; /* no more attaching; its slots wait for the holders to confirm */
    uint64_t bytes;
    uint32_t space_count;
    uint32_t page_count;
    uint32_t *cells; /* [space_count][page_count] entries, or FB_ENTRY_NONE */
};

/* A client holds a lease. */
struct fb_hold {
    struct fb_slab_head head;
    LIST_ENTRY(fb_hold) in_client;
    LIST_ENTRY(fb_hold) in_lease;
    struct fb_client *client;
    struct fb_lease *lease;
};

enum fb_fill_state {
    FB_FILL_OPEN,       /* claims are being written */
    FB_FILL_PUBLISHING, /* whole; the tier is making it last */
    FB_FILL_ABORTED,    /* given up; the slot waits for open claims to end */
};

/* A block being written. */
struct fb_fill {
    struct fb_slab_head head;
    TAILQ_ENTRY(fb_fill) link; /* by deadline, the earliest first; FB_FILL_OPEN only */
    enum fb_fill_state state;
    struct fb_node *node;
    struct fb_space *space;
    struct fb_location where;
    uint32_t entry;
    uint32_t parent; /* entry, pinned, or FB_ENTRY_NONE */
    uint64_t deadline_ns;
    uint64_t area_left; /* plane x layer not committed yet */
    struct fb_claim_list claims;
    struct fb_op *op; /* the commit that waits for publication */
    uint32_t op_row;
};

/* A client writes these planes and layers of a fill. Committed ones stay until the fill ends. */
struct fb_claim {
    struct fb_slab_head head;
    LIST_ENTRY(fb_claim) in_client;
    LIST_ENTRY(fb_claim) in_fill;
    struct fb_client *client; /* NULL once committed */
    struct fb_fill *fill;
    uint32_t plane_first;
    uint32_t plane_count;
    uint32_t layer_first;
    uint32_t layer_count;
};

enum fb_op_state {
    FB_OP_IDLE,  /* no request */
    FB_OP_RUN,   /* can go on now */
    FB_OP_SPACE, /* waits for slots, until its deadline */
    FB_OP_TIER,  /* waits for completions of a tier */
};

/* The request a session is in. */
struct fb_op {
    TAILQ_ENTRY(fb_op) link; /* FB_OP_SPACE only */
    enum fb_op_state state;
    struct fb_session *session;
    uint64_t begun_ns;
    uint64_t deadline_ns;
    const uint8_t *packet; /* the reactor's buffer, or `kept` once the op waits */
    size_t packet_bytes;
    uint8_t *kept;
    struct fb_wire_message message;
    int fds[FB_CHANNEL_MAX_FDS]; /* that came with the request; closed at its end */
    uint32_t fd_count;
    int reply_fds[FB_CHANNEL_MAX_FDS]; /* borrowed */
    uint32_t reply_fd_count;
    struct fb_lease *granted; /* by a lookup; pinned when its reply has been sent */
    uint32_t next;            /* element to do next */
    uint32_t pending;         /* completions outstanding */
    void *rows;               /* results so far; kept between requests */
    size_t rows_bytes;
};

struct fb_session {
    struct fb_source source;
    LIST_ENTRY(fb_session) link;
    struct fb_channel *channel;
    struct fb_tenant *tenant;
    struct fb_client *client; /* NULL before hello */
    bool closed;              /* marked */
    struct fb_op op;
};

TAILQ_HEAD(fb_client_list, fb_client);
TAILQ_HEAD(fb_lease_list, fb_lease);
TAILQ_HEAD(fb_fill_list, fb_fill);
TAILQ_HEAD(fb_op_list, fb_op);
LIST_HEAD(fb_session_list, fb_session);

struct fb_node {
    struct fb_config config;
    struct fb_node_edges edges;
    struct fb_metrics *metrics; /* borrowed */
    struct fb_log log;
    enum fb_node_state state;
    uint64_t now_ns; /* monotonic; set before every call into the node */
    uint64_t started_ns;
    uint64_t drain_deadline_ns;
    uint64_t decayed_ns;
    uint64_t asked_ns; /* when retiring chunks were last asked for */
    uint64_t incarnation;
    uint64_t sequence; /* commits */
    char id[33];       /* of this node, kept with its chunks */
    int dir_fd;
    int lock_fd;

    struct fb_index *index;
    struct fb_tier *tier; /* what operations use: the host tier, or a decorator around it */
    struct fb_tier *host;

    struct fb_tenant tenants[FB_TENANTS_MAX];
    uint32_t tenant_count;
    struct fb_class classes[FB_MAX_CLASSES];
    uint32_t class_count;
    struct fb_space *spaces[FB_MAX_SPACES];
    struct fb_space *spaces_by_id;

    struct fb_slab clients;
    struct fb_slab leases;
    struct fb_slab holds;
    struct fb_slab fills;
    struct fb_slab claims;
    struct fb_client_list client_list;
    struct fb_lease_list lease_list;
    struct fb_fill_list fill_list;
    struct fb_op_list waiting; /* for slots */
    bool woken;                /* those should try again */
    struct fb_expiry *expiries;
    uint64_t expired_ns; /* when they were last looked at */
    struct fb_session_list sessions;
    struct fb_session_list closed_sessions; /* to be freed by fb_node_collect */
    struct fb_session *last_session;        /* whose request came last; NULL when it closed */
    bool any_marked;
    uint32_t session_count;
    struct fb_free_cells *free_cells[FB_CELL_CLASSES];

    struct fb_event events[FB_EVENT_RING];
    uint64_t event_count;

    uint64_t leased_bytes;
    uint64_t reserved_bytes;
    uint64_t quarantined_bytes;

    struct fb_log_limit full_limit; /* log sites that could flood */
    struct fb_log_limit protocol_limit;

    uint8_t rx[FB_WIRE_MAX_BYTES];
    uint8_t tx[FB_WIRE_MAX_BYTES];
    uint32_t ids[FB_WIRE_MAX_KEYS]; /* scratch of one lookup */
    uint8_t present[FB_WIRE_MAX_KEYS];
};

/* Time for measuring an operation; deadlines use node->now_ns. */
static inline uint64_t fb_node_clock(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

/* --- block.c: entries and their slots --- */

/* Take a slot of a class, evicting what is coldest.
 * returns FB_OK | FB_AGAIN (a chunk is coming) | FB_ELIMIT (all in use) | FB_EIO | FB_EGEOMETRY */
enum fb_status fb_block_take_slot(struct fb_node *node, struct fb_class *class,
                                  struct fb_location *ret_where);

/* Add a pin; fb_block_inserted: the entry came with one. */
void fb_block_pin(struct fb_node *node, uint32_t entry);
void fb_block_inserted(struct fb_node *node, uint32_t entry);

/* Drop one pin; the slot goes with the last pin of a detached entry. */
void fb_block_unpin(struct fb_node *node, uint32_t entry);

/* Make an entry invisible; its slot goes now or with its last pin. */
void fb_block_drop(struct fb_node *node, uint32_t entry);

struct fb_block_header *fb_block_header(struct fb_node *node, struct fb_location where);
void fb_block_set_entry(struct fb_node *node, struct fb_location where, uint32_t entry);
uint32_t fb_block_entry_at(struct fb_node *node, struct fb_location where);

/* --- space.c --- */

enum fb_status fb_space_open(struct fb_node *node, uint16_t tenant, const uint8_t *manifest,
                             size_t bytes, struct fb_space **ret_space, struct fb_error *error);
struct fb_space *fb_space_by_handle(struct fb_node *node, uint32_t handle, uint16_t tenant);
struct fb_space *fb_space_by_id(struct fb_node *node, const uint8_t id[FB_SPACE_ID_BYTES]);
enum fb_status fb_space_load_all(struct fb_node *node, struct fb_error *error);
void fb_space_forget_unused(struct fb_node *node);
void fb_space_destroy_all(struct fb_node *node);
enum fb_status fb_class_get(struct fb_node *node, uint16_t tenant, uint64_t slot_bytes,
                            uint16_t *ret_class, struct fb_error *error);

/* --- balance.c: chunks between classes of a tenant --- */

void fb_balance_evicted(struct fb_class *class, const uint8_t *key);
void fb_balance_missed(struct fb_class *class, const uint8_t *keys, uint32_t n);
/* The class is full: take a chunk from another one if that is worth it. Returns whether one is
 * on its way. */
bool fb_balance_ask(struct fb_node *node, struct fb_class *class);
void fb_balance_tick(struct fb_node *node);
void fb_balance_try_reap(struct fb_node *node, struct fb_chunk *chunk);

/* --- lease.c --- */

/* A lease must be pinned before anything else happens. */
enum fb_status fb_lease_grant(struct fb_node *node, struct fb_client *client, uint32_t space_count,
                              uint32_t page_count, const uint32_t *cells, uint32_t stride,
                              uint64_t bytes, struct fb_lease **ret_lease);
void fb_lease_pin(struct fb_node *node, const struct fb_lease *lease);
/* Locations that an answer about this lease has; 0 when there is none. */
uint32_t fb_lease_cells(struct fb_node *node, const struct fb_client *client, uint64_t id);
enum fb_status fb_lease_attach(struct fb_node *node, struct fb_client *client, uint64_t id,
                               struct fb_lease **ret_lease);
enum fb_status fb_lease_release(struct fb_node *node, struct fb_client *client, uint64_t id);
enum fb_status fb_lease_renew(struct fb_node *node, struct fb_client *client, uint64_t id);
void fb_lease_drop_client(struct fb_node *node, struct fb_client *client);
/* End expired leases of the client that are not among `held` [n]: it has confirmed them. */
void fb_lease_confirm(struct fb_node *node, struct fb_client *client, const uint8_t *held,
                      uint32_t n);
void fb_lease_tick(struct fb_node *node);

/* --- fill.c --- */

enum fb_status fb_fill_reserve(struct fb_node *node, struct fb_client *client,
                               struct fb_space *space, const struct fb_reserve_request *request,
                               const uint8_t *key, const uint8_t *parent_key, uint64_t position,
                               struct fb_reserve_row *ret_row);
enum fb_status fb_fill_commit(struct fb_node *node, struct fb_client *client, uint64_t claim,
                              const uint8_t *sums, uint32_t sum_count, struct fb_op *op,
                              uint32_t op_row);
enum fb_status fb_fill_abort(struct fb_node *node, struct fb_client *client, uint64_t claim);
void fb_fill_drop_client(struct fb_node *node, struct fb_client *client);
void fb_fill_confirm(struct fb_node *node, struct fb_client *client, const uint8_t *held,
                     uint32_t n);
void fb_fill_forget_op(struct fb_node *node, struct fb_op *op);
void fb_fill_tick(struct fb_node *node);

/* --- client.c: clients and their sessions --- */

enum fb_status fb_client_hello(struct fb_node *node, struct fb_session *session,
                               const struct fb_hello_request *hello, int pidfd, bool *ret_existed,
                               struct fb_error *error);
void fb_client_leave(struct fb_node *node, struct fb_session *session);
void fb_client_die(struct fb_node *node, struct fb_client *client);
enum fb_status fb_client_give_chunk(struct fb_client *client, struct fb_chunk *chunk);
void fb_client_unmapped(struct fb_node *node, struct fb_client *client, uint32_t chunk_id);
void fb_client_notify_unmap(struct fb_node *node, struct fb_chunk *chunk);
void fb_client_used_space(struct fb_client *client, struct fb_space *space);
/* Whether a client may hold so many bytes more, of which nobody has `fresh` in use yet. What it
 * holds is at most the sum over its leases and claims, and at most what its whole tenant has in
 * use: the second is the smaller one where many leases share a prefix. */
bool fb_client_may_hold(const struct fb_client *client, uint64_t bytes, uint64_t fresh);

/* --- op.c and op_*.c --- */

void fb_op_start(struct fb_node *node, struct fb_session *session, size_t packet_bytes);
void fb_op_advance(struct fb_node *node, struct fb_op *op);
void fb_op_cancel(struct fb_node *node, struct fb_op *op);
void fb_op_wake_all(struct fb_node *node); /* slots may have become free */
void fb_op_run_woken(struct fb_node *node);
void fb_op_tick(struct fb_node *node);
/* Results so far, at least `bytes` large, or NULL. */
void *fb_op_rows(struct fb_op *op, size_t bytes);

/* Handlers by message type. FB_OK: the reply is in node->tx, *ret_bytes long; FB_AGAIN: the op
 * waits, its state says for what; else the error is sent. */
typedef enum fb_status (*fb_op_handler)(struct fb_node *node, struct fb_op *op, uint32_t *ret_bytes,
                                        struct fb_error *error);
enum fb_status fb_op_lookup(struct fb_node *, struct fb_op *, uint32_t *, struct fb_error *);
enum fb_status fb_op_attach(struct fb_node *, struct fb_op *, uint32_t *, struct fb_error *);
enum fb_status fb_op_release(struct fb_node *, struct fb_op *, uint32_t *, struct fb_error *);
enum fb_status fb_op_renew(struct fb_node *, struct fb_op *, uint32_t *, struct fb_error *);
enum fb_status fb_op_resume(struct fb_node *, struct fb_op *, uint32_t *, struct fb_error *);
enum fb_status fb_op_reserve(struct fb_node *, struct fb_op *, uint32_t *, struct fb_error *);
enum fb_status fb_op_commit(struct fb_node *, struct fb_op *, uint32_t *, struct fb_error *);
enum fb_status fb_op_abort(struct fb_node *, struct fb_op *, uint32_t *, struct fb_error *);
enum fb_status fb_op_reject(struct fb_node *, struct fb_op *, uint32_t *, struct fb_error *);
enum fb_status fb_op_hint(struct fb_node *, struct fb_op *, uint32_t *, struct fb_error *);

/* --- session.c --- */

/* Mark a session to be closed; fb_session_sweep does it when no operation is on the stack. */
void fb_session_mark(struct fb_node *node, struct fb_session *session);
void fb_session_sweep(struct fb_node *node);

/* --- expiry.c: times to live, few, beside the index --- */

enum fb_status fb_expiry_set(struct fb_node *node, uint32_t entry, uint32_t seconds);
void fb_expiry_forget(struct fb_node *node, uint32_t entry);
void fb_expiry_tick(struct fb_node *node);
void fb_expiry_destroy_all(struct fb_node *node);

/* --- recover.c --- */

/* Take over the chunks in the directory and index their blocks. */
enum fb_status fb_recover(struct fb_node *node, struct fb_error *error);

/* --- event.c --- */

void fb_event_push(struct fb_node *node, enum fb_event_kind kind, uint16_t tenant,
                   const uint8_t *space, const uint8_t *key, uint64_t count);

#endif
