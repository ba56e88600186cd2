/* A node that a test drives: time is set, jobs wait until they are run, connections are socket
 * pairs, clients are children that only wait to be killed. Nothing happens unless the test says
 * so, and after every request the whole structure is checked. One thread. */
#ifndef FB_TESTS_NODE_UTIL_H
#define FB_TESTS_NODE_UTIL_H

#include "pool/node/node.h"
#include "proto/wire.h"

#define SECOND       1000000000ull
#define MIB          (1ull << 20)
#define TIER_OF(n)   ((n)*2 * MIB + 400) /* chunks; shares are rounded down */
#define PLANES       2                   /* of every space here */
#define LAYERS       2
#define LARGE_SLOTS  8 /* in a chunk of 2 MiB: blocks of a space of large rows */
#define LARGE_ROW    3900
#define SMALL_ROW    64
#define MAX_PAGES    512 /* of a request */
#define NOT_ANSWERED FB_ECANCELED

struct rig {
    char dir[64];
    uint32_t lives; /* of the node in this directory */
    struct fb_config config;
    struct fb_tier_faults faults; /* with a seed: worn by the tier */
    struct fb_metrics *metrics;
    struct fb_node *node;
    struct fb_tier *host;
    struct fb_job *jobs;
    struct fb_job **last_job;
    struct fb_source *watched; /* last */
    uint64_t now_ns;
};

/* A directory and a configuration of four chunks. rig_start makes the node; after rig_stop
 * the next one finds what it left. */
void rig_init(struct rig *rig);
void rig_start(struct rig *rig);
void rig_stop(struct rig *rig);
void rig_fini(struct rig *rig);

/* The node ends between two instructions: the next one finds the directory as it is now. */
void rig_crash(struct rig *rig);

/* Let time pass, in one step. */
void rig_pass(struct rig *rig, uint64_t ns);

/* Work and mail of all jobs, in order; returns how many. */
uint32_t rig_run_jobs(struct rig *rig);

struct fb_node_status rig_status(struct rig *rig);
uint64_t rig_metric(const struct rig *rig, enum fb_metric metric);

/* --- spaces and blocks --- */

struct shape {
    const char *tenant; /* NULL: default */
    enum fb_rule rule;  /* 0: full */
    uint32_t row_bytes;
    uint32_t window_tokens;
};

void shape_manifest(const struct shape *shape, struct fb_manifest *ret_manifest);

void key_of(uint32_t chain, uint32_t page, uint8_t ret_key[FB_KEY_BYTES]);

uint8_t *rig_slot(const struct rig *rig, struct fb_wire_location where);

/* Write planes and layers of a block whose bytes tell its key; sums [plane_count] are for commit.
 */
void rig_write(const struct rig *rig, const struct shape *shape, struct fb_wire_location where,
               const uint8_t key[FB_KEY_BYTES], const uint32_t range[4], uint64_t *ret_sums);

/* Whether a slot has that block, header and bytes. */
bool rig_has(const struct rig *rig, const struct shape *shape, struct fb_wire_location where,
             const uint8_t key[FB_KEY_BYTES]);

/* --- clients --- */

struct peer {
    struct rig *rig;
    uint32_t tenant;
    pid_t pid;
    int pidfd;
    uint8_t id[FB_CLIENT_ID_BYTES];
    struct fb_channel *channel; /* NULL: not connected */
    struct fb_source *session;
    struct fb_source *exit; /* NULL: the node does not know it */
    struct fb_wire_message reply;
    uint32_t notices; /* by the node */
    struct fb_notify notice;
    uint8_t tx[FB_WIRE_MAX_BYTES];
    uint8_t rx[FB_WIRE_MAX_BYTES];
};

/* A process; connected. */
struct peer *peer_new(struct rig *rig, uint32_t tenant, uint8_t id);
void peer_connect(struct peer *peer);
void peer_close(struct peer *peer); /* the connection goes, the process lives */
void peer_kill(struct peer *peer);  /* the node sees it */
void peer_free(struct peer *peer);  /* kill too; without a node, nobody sees it */

/* Take the answer that is there; false: none yet, or the node has cut the connection (channel is
 * NULL then). */
bool peer_receive(struct peer *peer);

/* Send a request, of the test's own making, in peer->tx; the status of its answer. */
enum fb_status peer_send(struct peer *peer, struct fb_wire_writer *w);

/* Requests. Each returns the status of its answer, or of the first element where it asks for one
 * thing only. NOT_ANSWERED: the node will answer later. */
uint32_t peer_space(struct peer *peer, const struct shape *shape);

/* Consecutive pages of a chain. */
struct pages {
    uint32_t space;
    uint32_t chain;
    uint32_t first;
    uint32_t count;
};

/* range  first plane, planes, first layer, layers; NULL: the whole block
 * rows   [pages.count]; set when answered with FB_OK */
enum fb_status peer_reserve(struct peer *peer, struct pages pages, const uint32_t range[4],
                            struct fb_reserve_row *ret_rows);
void peer_rows(const struct peer *peer, struct fb_reserve_row *ret_rows, uint32_t count);

enum fb_status peer_commit(struct peer *peer, uint64_t claim, const uint64_t *sums, uint32_t n);
enum fb_status peer_abort(struct peer *peer, uint64_t claim);

/* All of it: jobs are run, every page has to be stored. */
void peer_put(struct peer *peer, const struct shape *shape, struct pages pages);

struct hit {
    uint64_t lease;
    uint32_t pages;
    struct fb_wire_location where[4 * MAX_PAGES]; /* [spaces][pages] */
};

/* A family, its pages under the same keys in every space but for the space's own chain. */
enum fb_status peer_lookup(struct peer *peer, const struct pages *spaces, uint32_t count,
                           struct hit *ret_hit);

/* Pages of one space that a lookup finds; the lease is released, or kept where asked for. */
uint32_t peer_finds(struct peer *peer, struct pages pages);
uint64_t peer_leases(struct peer *peer, struct pages pages);

enum fb_status peer_attach(struct peer *peer, uint64_t lease);
enum fb_status peer_release(struct peer *peer, uint64_t lease);

/* Name a lease and a claim (0: none) and a chunk that is unmapped (0: none). Returns the lease's
 * status, FB_OK without one. */
enum fb_status peer_renew(struct peer *peer, uint64_t lease, uint64_t claim, uint32_t unmapped);

enum fb_status peer_map(struct peer *peer, uint32_t chunk);
enum fb_status peer_reject(struct peer *peer, struct pages page);
enum fb_status peer_hint(struct peer *peer, struct pages page, enum fb_hint hint, uint32_t value);
enum fb_status peer_resume(struct peer *peer, struct fb_wire_location where, uint64_t *ret_lease);

#endif
