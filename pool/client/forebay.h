/* Forebay: a pool of attention keys and values (KV) on this host and its peers.
 *
 * A program opens the pool, describes the spaces its blocks belong to, names pages by chain
 * hashes, and then looks up, gets and puts. This header is all that is needed:
 *
 *     struct fb_pool *pool;
 *     fb_open(NULL, NULL, &pool, &error);
 *     fb_pool_space_open(pool, &manifest, &space, &error);
 *     fb_chain(previous, ids, 64, NULL, 0, hash);                  // page by page
 *     if (fb_lookup(pool, &space, 1, chain, pages, 0, &hit) == FB_OK) {
 *         fb_get(hit, &transfer, 0, statuses);
 *         fb_hit_release(hit);
 *     }
 *
 * The pool is a cache and never in the way: when it is slow, full, broken or gone, calls say so
 * within their deadline and the caller computes what it would have computed anyway. Whatever is
 * returned as FB_OK is exactly what was committed. The library survives the daemon and finds it
 * again by itself.
 *
 * Thread rule: every function may be called from any thread. One hit or one put belongs to one
 * thread at a time. After fork a child must open a pool of its own.
 *
 * Timeouts are in nanoseconds; 0 stands for the default of the call. */
#ifndef FOREBAY_H
#define FOREBAY_H

#include "kernels/codec.h"
#include "proto/block.h"
#include "proto/chain.h"
#include "proto/family.h"
#include "proto/manifest.h"
#include "proto/status.h"
#include "proto/sum.h"

#ifdef __cplusplus
extern "C" {
#endif

#define FB_VERSION_MAJOR 0
#define FB_VERSION_MINOR 1

#define FB_LOOKUP_TIMEOUT_NS  (2ull * 1000 * 1000)
#define FB_CONTROL_TIMEOUT_NS (1000ull * 1000 * 1000)
#define FB_TRANSFER_TIMEOUT_NS                                    \
    (1000ull * 1000 * 1000) /* plus the bytes at a quarter of the \
                               measured bandwidth */
#define FB_DEFAULT_SOCKET "/run/forebay/default/forebay.sock"

struct fb_pool;
struct fb_pool_space;
struct fb_hit;
struct fb_put;

/* Version of the library that is running, such as "0.1.0". */
const char *fb_version(void);

/* --- pool --- */

struct fb_open_options {
    uint64_t spin_ns;    /* poll this long for an answer before sleeping; default 0 */
    uint64_t connect_ns; /* wait this long for the daemon in fb_open; default 1 s */
};

/* Open a pool.
 * address  path of a tenant's socket; NULL: $FOREBAY_SOCKET, else FB_DEFAULT_SOCKET
 * options  NULL for the defaults
 * returns  FB_OK, also while no daemon answers: everything misses until one does;
 *          FB_EINVAL (not an address) | FB_ENOMEM | FB_EVERSION, FB_EPERM (the daemon refuses) */
enum fb_status fb_open(const char *address, const struct fb_open_options *options,
                       struct fb_pool **ret_pool, struct fb_error *error);

/* Close a pool; NULL is allowed. Hits and puts must be released before. Waits for nothing but the
 * library's own thread. */
void fb_close(struct fb_pool *pool);

struct fb_pool_info {
    bool connected;
    char tenant[FB_MAX_TENANT_CHARS + 1]; /* of the last connection; empty before the first */
    uint64_t incarnation;                 /* of the daemon */
    uint64_t deadlines_missed;            /* calls that got no answer in time */
    uint64_t calls_skipped;               /* answered as misses while the daemon was away */
    uint64_t reconnects;
    uint64_t bytes_mapped;
};

void fb_pool_get_info(struct fb_pool *pool, struct fb_pool_info *ret_info);

/* --- spaces --- */

/* Open a space. Its blocks can be used from now on, also across restarts of the daemon. The space
 * is the pool's, and goes with it.
 * returns  FB_OK, also while no daemon answers | FB_EINVAL, FB_EGEOMETRY, FB_EUNSUPPORTED (the
 *          manifest) | FB_EPERM (another tenant's) | FB_ELIMIT | FB_ENOMEM */
enum fb_status fb_pool_space_open(struct fb_pool *pool, const struct fb_manifest *manifest,
                                  struct fb_pool_space **ret_space, struct fb_error *error);

const uint8_t *fb_pool_space_id(const struct fb_pool_space *space); /* [FB_SPACE_ID_BYTES] */
const struct fb_layout *fb_pool_space_layout(const struct fb_pool_space *space);

/* --- lookup --- */

enum fb_lookup_option {
    FB_LOOKUP_READ_AHEAD = 1, /* start to bring what is in slower tiers */
};

/* Find the longest prefix of a chain that all spaces of a family have, and lease it.
 * family   [count] spaces that a request needs together, of one page size
 * chain    [pages, FB_CHAIN_BYTES] chain hashes, from the first page on
 * returns  FB_OK (a hit, to be released) | FB_MISS | else no answer, treat as FB_MISS:
 *          FB_ETIMEDOUT, FB_ECONN, FB_AGAIN, FB_EINVAL, FB_ENOMEM
 * A family with window or state spaces is looked up to FB_WIRE_MAX_KEYS / count pages. */
enum fb_status fb_lookup(struct fb_pool *pool, struct fb_pool_space *const *family, uint32_t count,
                         const uint8_t *chain, uint32_t pages, uint32_t options,
                         uint64_t timeout_ns, struct fb_hit **ret_hit);

/* Leases of a hit, to be handed to the processes that will read: at most FB_HIT_MAX_LEASES. */
#define FB_HIT_MAX_LEASES 16
uint32_t fb_hit_pages(const struct fb_hit *hit);
uint32_t fb_hit_leases(const struct fb_hit *hit, uint64_t ret_leases[FB_HIT_MAX_LEASES]);

/* Become a holder of leases that another process of the tenant looked up, with the same family
 * and chain. returns as fb_lookup; FB_ENOENT when a lease has ended */
enum fb_status fb_attach(struct fb_pool *pool, struct fb_pool_space *const *family, uint32_t count,
                         const uint8_t *chain, uint32_t pages, const uint64_t *leases,
                         uint32_t lease_count, uint64_t timeout_ns, struct fb_hit **ret_hit);

/* Give a hit back; NULL is allowed. Waits no longer than a lookup. Transfers from it must
 * have ended. */
void fb_hit_release(struct fb_hit *hit);

/* --- get --- */

/* The block of a page in place, good until the hit is released. Its header has been checked; its
 * planes have not: fb_segment_check, fb_block_check.
 * space    index in the family
 * returns  FB_OK | FB_MISS (not needed for this prefix, or gone) | FB_ECORRUPT | FB_ECONN */
enum fb_status fb_hit_map(struct fb_hit *hit, uint32_t space, uint32_t page,
                          const uint8_t **ret_block);

/* What to move between blocks of one space and an engine's cache. */
struct fb_transfer {
    uint32_t space;      /* index in the family; ignored by puts */
    uint32_t page_first; /* of the chain (puts: of the put) */
    uint32_t page_count;
    uint64_t token_first; /* gets: tokens of the chain outside are not written */
    uint64_t token_count; /* gets: 0: all tokens of the pages */
    uint32_t plane_first;
    uint32_t plane_count;
    uint32_t layer_first;
    uint32_t layer_count;
    uint32_t head_first;               /* head of the views that is plane_first */
    const struct fb_paged_view *views; /* [layer_count, sections of the space] */
    struct fb_token_map map;           /* first_token: where the chain's (put's) token 0 is */
    /* [layer_count] for layers that are in different blocks of the engine; NULL: map for all */
    const struct fb_token_map *layer_maps;
};

/* Decode pages into the engine's cache, checking every segment before it is written.
 * ret_statuses  [page_count] FB_OK | FB_MISS | FB_ECORRUPT (reported to the pool) | FB_ETIMEDOUT
 *               | FB_EINVAL (the map)
 * returns       FB_OK when every page arrived, else the first status that is not; use the leading
 *               pages that are FB_OK and compute the rest. A page that is not FB_OK may have been
 *               written in part. */
enum fb_status fb_get(struct fb_hit *hit, const struct fb_transfer *transfer, uint64_t timeout_ns,
                      enum fb_status *ret_statuses);

/* Ask that pages be brought to this host. Nothing to do while all tiers are local.
 * returns as fb_lookup */
enum fb_status fb_prefetch(struct fb_pool *pool, struct fb_pool_space *const *family,
                           uint32_t count, const uint8_t *chain, uint32_t pages,
                           uint64_t timeout_ns);

/* --- put --- */

/* Which part of each block this process writes; the others are written by its peers. */
struct fb_put_part {
    uint32_t plane_first;
    uint32_t plane_count; /* 0: all */
    uint32_t layer_first;
    uint32_t layer_count; /* 0: all */
};

#define FB_PUT_MAX_PAGES 4096 /* of one put; all of a pool together, or it gets FB_AGAIN */

/* Reserve slots for consecutive pages.
 * chain         [pages, FB_CHAIN_BYTES]
 * parent        chain hash of the page before, NULL where position is 0
 * position      of the first page in its chain
 * part          NULL: whole blocks
 * ret_statuses  [pages] FB_OK (to be written) | FB_EXISTS, FB_BUSY (nothing to do) | FB_AGAIN (no
 *               room now) | FB_ENOENT (the parent is not in the pool)
 * returns       FB_OK (a put, to be committed or aborted) | FB_MISS (nothing to write) | else no
 *               answer as of fb_lookup */
enum fb_status fb_put_begin(struct fb_pool *pool, struct fb_pool_space *space, const uint8_t *chain,
                            uint32_t pages, const uint8_t *parent, uint64_t position,
                            const struct fb_put_part *part, uint64_t timeout_ns,
                            struct fb_put **ret_put, enum fb_status *ret_statuses);

/* Gather, encode and sum the reserved pages of a range; the others are skipped. The transfer's
 * planes and layers must be those of the part.
 * ret_statuses  [page_count] FB_OK | FB_ENONFINITE (NaN or infinity in rows to be quantized)
 *               | FB_EINVAL (the map, a null block) | FB_ESTATE (not reserved)
 * returns       the first status that is not FB_OK or FB_ESTATE, or FB_OK */
enum fb_status fb_put_encode(struct fb_put *put, const struct fb_transfer *transfer,
                             enum fb_status *ret_statuses);

/* For writers that fill raw segments themselves: the block to write to, and, when its planes and
 * layers of the part are written with their sums, the planes' sums.
 * sums  [plane_count of the part] sum over the part's layers mod 2^64 */
enum fb_status fb_put_block(struct fb_put *put, uint32_t page, uint8_t **ret_block,
                            uint8_t ret_key[FB_KEY_BYTES]);
enum fb_status fb_put_set_sums(struct fb_put *put, uint32_t page, const uint64_t *sums);

/* Publish what was written, give up what was not, and free the put.
 * ret_statuses  [pages] or NULL: FB_OK committed | FB_ESTATE (given up meanwhile) | FB_ECANCELED
 *               (not written) | what fb_put_begin said of pages that were not reserved
 * returns       FB_OK | FB_ETIMEDOUT, FB_ECONN: whether it was published is not known */
enum fb_status fb_put_commit(struct fb_put *put, uint64_t timeout_ns, enum fb_status *ret_statuses);

/* Give everything up and free the put; NULL is allowed. Nothing may write to its blocks any more.
 */
void fb_put_abort(struct fb_put *put);

/* --- words about blocks --- */

/* Report blocks whose bytes were wrong. The daemon looks itself and drops what is.
 * keys     [n, FB_KEY_BYTES] pool keys (fb_pool_key)
 * returns  FB_OK | as fb_lookup */
enum fb_status fb_reject(struct fb_pool *pool, struct fb_pool_space *space, const uint8_t *keys,
                         uint32_t n, uint64_t timeout_ns);

enum fb_hint_kind {
    FB_HINT_KIND_PRIORITY = 1, /* 0 low, 1 normal, 2 high */
    FB_HINT_KIND_TTL = 2,      /* seconds until the blocks go; 0 never */
    FB_HINT_KIND_PIN = 3,      /* 1 keep, within the tenant's quota; 0 as others */
};

/* Say how long pages should stay; priority and pins count for the pages before them too.
 * chain         [pages, FB_CHAIN_BYTES]
 * ret_statuses  [pages] or NULL: FB_OK | FB_MISS | FB_ELIMIT (pin quota) */
enum fb_status fb_hint_pages(struct fb_pool *pool, struct fb_pool_space *space,
                             const uint8_t *chain, uint32_t pages, enum fb_hint_kind kind,
                             uint32_t value, uint64_t timeout_ns, enum fb_status *ret_statuses);

/* Pool key of a page in a space. */
void fb_pool_key(const struct fb_pool_space *space, const uint8_t chain_hash[FB_CHAIN_BYTES],
                 uint8_t ret_key[FB_KEY_BYTES]);

#ifdef __cplusplus
}
#endif
#endif
