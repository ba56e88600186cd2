/* Contents and the engine's cache.
 *
 * A row is a stretch of a table of normal bf16 values, from a seeded place on, with each channel
 * scaled. Scaling adds to the bits: 128 steps double a bf16, and between powers of two the bits
 * grow about as the logarithm does. One addition a value, the same result on every machine. */
#include "pool/command/content.h"

#include "pool/command/random.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TABLE_VALUES   65536u
#define MAX_DIM        256u
#define OCTAVE         128  /* steps that double a value */
#define OUTLIER_LOW    384  /* 8 times */
#define OUTLIER_SPREAD 168  /* up to 20 times */
#define SCRUB_BYTE     0xff /* twice a NaN: no codec gives it back, no content has it */

static const struct fb_shape shapes[] = {
    {"small", "Forebay small (made up)", 1, 1, 64},
    {"llama3-scaled", "Llama-3 scaled", 2, 2, 64},
    {"llama3-8b", "Llama-3-8B", 32, 8, 128},
};

#define SHAPES (sizeof(shapes) / sizeof(shapes[0]))

struct fb_content {
    const struct fb_shape *shape;
    uint16_t table[TABLE_VALUES + MAX_DIM];
    uint16_t scales[]; /* [layers, 2, heads, dim] steps to add */
};

const struct fb_shape *fb_shape_find(const char *name)
{
    for (size_t i = 0; i < SHAPES; i++) {
        if (strcmp(shapes[i].name, name) == 0) {
            return &shapes[i];
        }
    }
    return NULL;
}

const struct fb_shape *fb_shape_at(size_t n)
{
    return n < SHAPES ? &shapes[n] : NULL;
}

void fb_shape_manifest(const struct fb_shape *shape, const char *tenant, enum fb_codec codec,
                       uint32_t page_tokens, struct fb_manifest *ret_m)
{
    static const enum fb_section_kind kinds[] = {FB_SECTION_K, FB_SECTION_V};

    memset(ret_m, 0, sizeof(*ret_m));
    snprintf(ret_m->tenant, sizeof(ret_m->tenant), "%s", tenant);
    snprintf(ret_m->model, sizeof(ret_m->model), "%s", shape->model);
    snprintf(ret_m->position, sizeof(ret_m->position), "none: seeded contents, version 1");
    ret_m->rule = FB_RULE_FULL;
    ret_m->page_tokens = page_tokens;
    ret_m->layer_count = shape->layers;
    for (uint32_t i = 0; i < shape->layers; i++) {
        ret_m->layers[i] = (uint16_t)i;
    }
    ret_m->head_count = shape->heads;
    ret_m->head_total = shape->heads;
    ret_m->section_count = 2;
    for (uint32_t s = 0; s < 2; s++) {
        ret_m->sections[s] = (struct fb_section){
            .kind = kinds[s],
            .elem = FB_ELEM_BF16,
            .codec = codec,
            .layer_count = shape->layers,
            .row_elems = shape->dim,
        };
    }
}

uint64_t fb_prompt_page(uint64_t seed, uint32_t index)
{
    return fb_mix64(fb_mix64(seed) + index);
}

void fb_page_tokens(uint64_t page_id, uint32_t count, uint32_t *ret_ids)
{
    uint64_t seed = fb_mix64(page_id);

    for (uint32_t i = 0; i < count; i++) {
        ret_ids[i] = (uint32_t)(fb_mix64(seed + i) % 128000);
    }
}

/* --- contents --- */

/* A normal value as the sum of twelve uniform ones, in whole numbers up to the last step; never
 * zero, so that scaling by bits stays scaling. */
static uint16_t normal_bf16(uint64_t seed)
{
    int32_t sum = 1 - 12 * 32768;
    float value;
    uint32_t bits;

    for (uint32_t i = 0; i < 3; i++) {
        uint64_t r = fb_mix64(seed + i);

        sum += (int32_t)((r & 0xffff) + (r >> 16 & 0xffff) + (r >> 32 & 0xffff) + (r >> 48));
    }
    value = (float)(sum | 1) / 65536.0f;
    memcpy(&bits, &value, sizeof(bits));
    return (uint16_t)(bits >> 16);
}

/* Scales of one head: from half to twice the layer's own; in K one channel of 32 is an outlier. */
static void make_scales(uint16_t *scales, uint32_t dim, uint64_t seed, bool outliers)
{
    uint32_t base = (uint32_t)(fb_mix64(seed) % OCTAVE);

    for (uint32_t c = 0; c < dim; c++) {
        uint64_t r = fb_mix64(seed + 1 + c);

        scales[c] = (uint16_t)(base + r % OCTAVE);
        if (outliers && c % 32 == seed % 32) {
            scales[c] = (uint16_t)(scales[c] + OUTLIER_LOW + (r >> 32) % OUTLIER_SPREAD);
        }
    }
}

enum fb_status fb_content_create(const struct fb_shape *shape, struct fb_content **ret_content)
{
    uint32_t rows = shape->layers * 2 * shape->heads;
    struct fb_content *content =
        malloc(sizeof(*content) + (size_t)rows * shape->dim * sizeof(content->scales[0]));

    if (!content) {
        return FB_ENOMEM;
    }
    content->shape = shape;
    for (uint32_t i = 0; i < TABLE_VALUES; i++) {
        content->table[i] = normal_bf16((uint64_t)i << 32);
    }
    memcpy(content->table + TABLE_VALUES, content->table, MAX_DIM * sizeof(content->table[0]));
    for (uint32_t i = 0; i < rows; i++) {
        bool is_k = i / shape->heads % 2 == 0;

        make_scales(content->scales + (size_t)i * shape->dim, shape->dim, fb_mix64(i), is_k);
    }
    *ret_content = content;
    return FB_OK;
}

void fb_content_destroy(struct fb_content *content)
{
    free(content);
}

static void make_row(const struct fb_content *content, const uint16_t *scales, uint64_t seed,
                     uint16_t *restrict row)
{
    const uint16_t *values = content->table + seed % TABLE_VALUES;
    uint16_t shift = (uint16_t)(seed >> 32) % OCTAVE;

    for (uint32_t c = 0; c < content->shape->dim; c++) {
        row[c] = (uint16_t)(values[c] + scales[c] + shift);
    }
}

/* --- the engine's cache --- */

static uint32_t blocks_of_page(const struct fb_engine *e)
{
    return e->layout->page_tokens / FB_ENGINE_BLOCK_TOKENS;
}

static size_t block_elems(const struct fb_engine *e)
{
    return (size_t)FB_ENGINE_BLOCK_TOKENS * e->content->shape->heads * e->content->shape->dim;
}

/* One block of one tensor; tensor = layer * 2 + section. */
static uint16_t *block_at(const struct fb_engine *e, uint32_t tensor, uint32_t page, uint32_t block)
{
    int64_t id = e->block_ids[(size_t)page * blocks_of_page(e) + block];

    return e->memory + ((size_t)tensor * e->blocks + (size_t)id) * block_elems(e);
}

static void init_views(struct fb_engine *e)
{
    const struct fb_shape *shape = e->content->shape;

    for (uint32_t i = 0; i < shape->layers * 2; i++) {
        e->views[i] = (struct fb_paged_view){
            .base = e->memory + (size_t)i * e->blocks * block_elems(e),
            .block_stride = (int64_t)block_elems(e),
            .token_stride = (int64_t)shape->heads * shape->dim,
            .head_stride = shape->dim,
            .channel_stride = 1,
        };
    }
}

/* A shuffled order of all blocks, again and again. */
static void init_table(struct fb_engine *e, size_t entries)
{
    for (uint32_t i = 0; i < e->blocks; i++) {
        uint32_t j = (uint32_t)(fb_mix64(i) % (i + 1));

        e->block_ids[i] = e->block_ids[j];
        e->block_ids[j] = i;
    }
    for (size_t i = e->blocks; i < entries; i++) {
        e->block_ids[i] = e->block_ids[i - e->blocks];
    }
    e->map = (struct fb_token_map){
        .block_ids = e->block_ids,
        .block_count = entries,
        .block_tokens = FB_ENGINE_BLOCK_TOKENS,
    };
}

enum fb_status fb_engine_init(struct fb_engine *e, const struct fb_content *content,
                              const struct fb_layout *layout, uint32_t window_pages,
                              uint32_t chain_pages)
{
    uint32_t tensors = content->shape->layers * 2;
    size_t entries;
    size_t bytes;

    memset(e, 0, sizeof(*e));
    e->content = content;
    e->layout = layout;
    e->window_pages = window_pages;
    e->blocks = window_pages * blocks_of_page(e);
    entries = (size_t)(chain_pages > window_pages ? chain_pages : window_pages) * blocks_of_page(e);
    bytes = (size_t)tensors * e->blocks * block_elems(e) * sizeof(e->memory[0]);
    e->memory = malloc(bytes);
    e->views = calloc(tensors, sizeof(*e->views));
    e->block_ids = calloc(entries, sizeof(*e->block_ids));
    if (!e->memory || !e->views || !e->block_ids) {
        fb_engine_fini(e);
        return FB_ENOMEM;
    }
    memset(e->memory, 0, bytes);
    init_views(e);
    init_table(e, entries);
    return FB_OK;
}

void fb_engine_fini(struct fb_engine *e)
{
    free(e->memory);
    free(e->views);
    free(e->block_ids);
    memset(e, 0, sizeof(*e));
}

static void compute_block(struct fb_engine *e, uint32_t tensor, uint32_t page, uint32_t block,
                          uint64_t seed)
{
    const struct fb_shape *shape = e->content->shape;
    const uint16_t *scales = e->content->scales + (size_t)tensor * shape->heads * shape->dim;
    uint16_t *rows = block_at(e, tensor, page, block);

    for (uint32_t i = 0; i < FB_ENGINE_BLOCK_TOKENS * shape->heads; i++) {
        make_row(e->content, scales + (size_t)(i % shape->heads) * shape->dim, fb_mix64(seed + i),
                 rows + (size_t)i * shape->dim);
    }
}

void fb_engine_compute(struct fb_engine *e, uint32_t page, uint64_t page_id)
{
    for (uint32_t tensor = 0; tensor < e->content->shape->layers * 2; tensor++) {
        for (uint32_t b = 0; b < blocks_of_page(e); b++) {
            uint64_t place = (uint64_t)tensor << 48 | (uint64_t)b << 32;

            compute_block(e, tensor, page, b, fb_mix64(page_id) + place);
        }
    }
}

void fb_engine_scrub(struct fb_engine *e, uint32_t page)
{
    for (uint32_t tensor = 0; tensor < e->content->shape->layers * 2; tensor++) {
        for (uint32_t b = 0; b < blocks_of_page(e); b++) {
            memset(block_at(e, tensor, page, b), SCRUB_BYTE, block_elems(e) * sizeof(uint16_t));
        }
    }
}

enum fb_status fb_engine_round_trip(struct fb_engine *e, uint32_t page, uint8_t *scratch)
{
    const struct fb_kernels *k = fb_kernels_best();
    const struct fb_layout *l = e->layout;
    struct fb_token_map map = e->map;
    enum fb_status status = FB_OK;

    map.first_token = (uint64_t)page * l->page_tokens;
    for (uint32_t i = 0; i < l->plane_count * l->layer_count && status == FB_OK; i++) {
        uint32_t head = i / l->layer_count;
        uint32_t layer = i % l->layer_count;
        const struct fb_paged_view *views = e->views + (size_t)layer * l->section_count;
        uint8_t *segment = scratch + fb_layout_segment(l, head, layer);
        uint64_t sum;
        uint64_t bad_rows;

        status = fb_segment_encode(k, l, layer, head, views, &map, 0, segment, &sum, &bad_rows);
        if (status == FB_OK) {
            status = fb_segment_decode(k, l, layer, head, views, &map, 0, l->page_tokens, 0,
                                       segment, &sum);
        }
    }
    return status;
}

bool fb_engine_same(const struct fb_engine *a, uint32_t page_a, const struct fb_engine *b,
                    uint32_t page_b)
{
    size_t bytes = block_elems(a) * sizeof(a->memory[0]);

    for (uint32_t tensor = 0; tensor < a->content->shape->layers * 2; tensor++) {
        for (uint32_t i = 0; i < blocks_of_page(a); i++) {
            if (memcmp(block_at(a, tensor, page_a, i), block_at(b, tensor, page_b, i), bytes) !=
                0) {
                return false;
            }
        }
    }
    return true;
}

/* Say where two blocks differ; false if they do not. */
static bool explain_block(const struct fb_shape *shape, const uint16_t *got,
                          const uint16_t *expected, uint32_t tensor, uint32_t first_token,
                          char *out, size_t capacity)
{
    uint32_t row_elems = shape->heads * shape->dim;

    for (uint32_t i = 0; i < FB_ENGINE_BLOCK_TOKENS * row_elems; i++) {
        if (got[i] != expected[i]) {
            snprintf(out, capacity,
                     "%s of layer %u, head %u, token %u, channel %u: got 0x%04x, expected 0x%04x",
                     tensor % 2 ? "V" : "K", tensor / 2, i % row_elems / shape->dim,
                     first_token + i / row_elems, i % shape->dim, got[i], expected[i]);
            return true;
        }
    }
    return false;
}

void fb_engine_explain(const struct fb_engine *got, uint32_t got_page,
                       const struct fb_engine *expected, uint32_t expected_page, char *out,
                       size_t capacity)
{
    const struct fb_shape *shape = got->content->shape;

    snprintf(out, capacity, "no difference");
    for (uint32_t tensor = 0; tensor < shape->layers * 2; tensor++) {
        for (uint32_t b = 0; b < blocks_of_page(got); b++) {
            if (explain_block(shape, block_at(got, tensor, got_page, b),
                              block_at(expected, tensor, expected_page, b), tensor,
                              b * FB_ENGINE_BLOCK_TOKENS, out, capacity)) {
                return;
            }
        }
    }
}
