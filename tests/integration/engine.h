/* An inference engine's cache as tests need it: paged memory of every section and layer, filled
 * from a seed, so that any process knows what a block must hold.
 *
 * One thread at a time. Functions assert nothing: actors use them too. */
#ifndef FB_TESTS_ENGINE_H
#define FB_TESTS_ENGINE_H

#include "pool/client/forebay.h"
#include "tests/unit/proto_util.h"

#define ENGINE_WAIT_NS (5000ull * 1000 * 1000) /* tests of deadlines use their own */

struct engine {
    struct fb_manifest manifest;
    struct fb_layout layout;
    uint32_t pages;
    uint32_t block_tokens;
    uint32_t block_count;
    int64_t *block_ids;          /* not in order */
    struct fb_paged_view *views; /* [layers, sections] */
    uint8_t *data;               /* [bytes] of all of them */
    size_t bytes;
};

/* What of a cache is meant; all of it with engine_all. */
struct part {
    uint32_t layer_first, layer_count;
    uint32_t head_first, head_count;
    uint32_t token_first, token_count;
};

/* block_tokens is the engine's own; with state sections it must be page_tokens. */
bool engine_init(struct engine *e, const struct fb_manifest *manifest, uint32_t block_tokens,
                 uint32_t pages);
void engine_fini(struct engine *e);

/* Finite values that follow from the seed; one byte everywhere. */
void engine_fill(struct engine *e, uint64_t seed);
void engine_clear(struct engine *e, uint8_t byte);

/* Make every value what it is after it was stored and read: the codecs' rounding. */
void engine_round(struct engine *e);

/* Row of a token, or NULL where the section does not cover the layer. */
uint8_t *engine_row(const struct engine *e, uint32_t layer, uint32_t section, uint32_t token,
                    uint32_t head);

struct part engine_all(const struct engine *e);
bool engine_equal(const struct engine *a, const struct engine *b, struct part part);
bool engine_is_clear(const struct engine *e, struct part part, uint8_t byte);

/* All planes and layers of pages [first, first + count). */
struct fb_transfer engine_transfer(const struct engine *e, uint32_t first, uint32_t count);

/* Chain of a prompt that is known by its seed. chain: [pages, FB_CHAIN_BYTES] */
void chain_make(uint64_t seed, uint32_t page_tokens, uint32_t pages, uint8_t *chain);

/* Put pages [first, first + count); returns FB_OK, or the first page's status that is neither
 * FB_OK nor FB_EXISTS. */
enum fb_status engine_put(struct engine *e, struct fb_pool *pool, struct fb_pool_space *space,
                          const uint8_t *chain, uint32_t first, uint32_t count);

/* Look up and get the whole chain; ret_pages arrived. returns as fb_lookup, fb_get */
enum fb_status engine_get(struct engine *e, struct fb_pool *pool, struct fb_pool_space *space,
                          const uint8_t *chain, uint32_t *ret_pages);

#endif
