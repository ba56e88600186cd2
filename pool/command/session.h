/* A session with a pool for commands that move made-up KV: pool, space, contents, and an engine's
 * cache with a window of pages, plus a reference page to check against.
 *
 * The pool and the space are shared by the threads of a command; each thread has a fb_seat. */
#ifndef FB_COMMAND_SESSION_H
#define FB_COMMAND_SESSION_H

#include "pool/client/forebay.h"
#include "pool/command/cli.h"
#include "pool/command/content.h"

/* Deadline of what these commands ask for. They measure a pool, not an engine's patience: its
 * latencies are in the results. */
#define FB_SESSION_TIMEOUT_NS (1000ull * 1000 * 1000)

struct fb_session {
    struct fb_pool *pool;
    struct fb_pool_space *space;
    struct fb_content *content;
    const struct fb_shape *shape;
    enum fb_codec codec;
    const struct fb_layout *layout; /* the space's */
};

/* Connect and open the space of a shape. Says what went wrong itself.
 * returns FB_OK | what fb_open and fb_pool_space_open return | FB_ECONN (no daemon) */
enum fb_status fb_session_open(struct fb_session *s, const struct fb_cli *cli,
                               const struct fb_shape *shape, enum fb_codec codec,
                               uint32_t page_tokens);
void fb_session_close(struct fb_session *s); /* also of an all-zero session */

struct fb_seat {
    const struct fb_session *session;
    struct fb_engine cache;
    struct fb_engine reference; /* one page: what must come back */
    uint8_t *scratch;           /* one block */
    uint32_t *token_ids;        /* of one page */
};

/* max_pages  longest chain
 * returns    FB_OK | FB_ENOMEM */
enum fb_status fb_seat_init(struct fb_seat *seat, const struct fb_session *session,
                            uint32_t max_pages);
void fb_seat_fini(struct fb_seat *seat); /* also of an all-zero seat */

/* Chain hashes of pages; ret_chain [pages, FB_CHAIN_BYTES]. */
enum fb_status fb_seat_chain(struct fb_seat *seat, const uint64_t *ids, uint32_t pages,
                             uint8_t *ret_chain);

/* Get pages [first, first + count) of a hit into the cache; count is at most its window.
 * returns as fb_get, statuses too */
enum fb_status fb_seat_get(struct fb_seat *seat, struct fb_hit *hit, uint32_t first, uint32_t count,
                           enum fb_status *ret_statuses);

/* Whether a page in the cache is, bit by bit, what encoding and decoding its contents gives. */
bool fb_seat_check(struct fb_seat *seat, uint32_t page, uint64_t page_id);

/* Put pages [first, first + count) of a chain, computing those that are to be written.
 * count      at most the window; statuses of computed rows are those of fb_put_commit
 * ret_ns     what begin, encode and commit took, without the computing
 * returns    FB_OK also when there was nothing to write, else no answer in time */
enum fb_status fb_seat_put(struct fb_seat *seat, const uint8_t *chain, const uint64_t *ids,
                           uint32_t first, uint32_t count, enum fb_status *ret_statuses,
                           uint64_t *ret_ns);

#endif
