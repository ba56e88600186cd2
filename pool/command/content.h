/* What the made-up model computes: shapes of models, prompts of pages, and their keys and values.
 *
 * A page is named by a 64-bit id; its token ids and the K and V of its rows follow from the id
 * alone, so that contents are made anew wherever they are to be checked. Rows look like the real
 * thing where codecs care: normal values, scales that differ by layer, head, token and channel,
 * and in K a few channels 8 to 20 times larger than the rest.
 *
 * fb_engine is a cache as engines keep one: per layer a K and a V tensor of
 * [blocks, FB_ENGINE_BLOCK_TOKENS, heads, dim] in bf16, whose blocks a shuffled table gives out.
 * It holds a window of a chain's pages; the table wraps around, so that a chain of any length has
 * a place for each page, and pages a window apart share it.
 *
 * struct fb_content is read-only after its creation and may be shared by threads; an engine
 * belongs to one. */
#ifndef FB_COMMAND_CONTENT_H
#define FB_COMMAND_CONTENT_H

#include "kernels/codec.h"

#define FB_ENGINE_BLOCK_TOKENS 16u

struct fb_shape {
    const char *name;
    const char *model; /* in words, and as the manifest has it */
    uint32_t layers;
    uint32_t heads;
    uint32_t dim;
};

/* Shape of that name, or NULL; the n-th shape, or NULL behind the last. */
const struct fb_shape *fb_shape_find(const char *name);
const struct fb_shape *fb_shape_at(size_t n);

/* Manifest of a shape's blocks. */
void fb_shape_manifest(const struct fb_shape *shape, const char *tenant, enum fb_codec codec,
                       uint32_t page_tokens, struct fb_manifest *ret_m);

/* Id of page `index` of the prompt a person names by a seed. */
uint64_t fb_prompt_page(uint64_t seed, uint32_t index);

/* Token ids of a page; ret_ids [count]. */
void fb_page_tokens(uint64_t page_id, uint32_t count, uint32_t *ret_ids);

struct fb_content;

enum fb_status fb_content_create(const struct fb_shape *shape, struct fb_content **ret_content);
void fb_content_destroy(struct fb_content *content); /* NULL is allowed */

/* Where engine element [layer, section (0 K, 1 V), token of the chain, head, channel] is. */
struct fb_engine {
    const struct fb_content *content; /* borrowed */
    const struct fb_layout *layout;   /* borrowed */
    uint32_t window_pages;
    uint32_t blocks;
    uint16_t *memory; /* [layers, 2, blocks, FB_ENGINE_BLOCK_TOKENS, heads, dim] */
    struct fb_paged_view *views;
    int64_t *block_ids; /* [chain_pages * blocks of a page] */
    struct fb_token_map map;
};

/* chain_pages  longest chain the table is for
 * layout       of a manifest of fb_shape_manifest; its pages are whole engine blocks
 * returns      FB_OK | FB_ENOMEM */
enum fb_status fb_engine_init(struct fb_engine *e, const struct fb_content *content,
                              const struct fb_layout *layout, uint32_t window_pages,
                              uint32_t chain_pages);
void fb_engine_fini(struct fb_engine *e); /* also of an all-zero engine */

/* Compute a page, as the model would: write the rows of page_id to the place of page `page`. */
void fb_engine_compute(struct fb_engine *e, uint32_t page, uint64_t page_id);

/* Forget a page: fill its place with a pattern that no page has. */
void fb_engine_scrub(struct fb_engine *e, uint32_t page);

/* Send a page through the codec, encoded and decoded in place: what a pool must give back.
 * scratch  [layout->block_bytes], 128-aligned
 * returns  FB_OK | what the codecs return */
enum fb_status fb_engine_round_trip(struct fb_engine *e, uint32_t page, uint8_t *scratch);

/* Whether two engines of one layout have the same bits in two pages. */
bool fb_engine_same(const struct fb_engine *a, uint32_t page_a, const struct fb_engine *b,
                    uint32_t page_b);

/* First difference in words, for a person who asks why they are not the same. */
void fb_engine_explain(const struct fb_engine *got, uint32_t got_page,
                       const struct fb_engine *expected, uint32_t expected_page, char *out,
                       size_t capacity);

#endif
