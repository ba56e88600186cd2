/* The cache of a test's engine. */
#include "tests/integration/engine.h"

#include <stdlib.h>

/* --- memory --- */

static bool is_state(const struct engine *e, uint32_t section)
{
    return e->manifest.sections[section].kind == FB_SECTION_STATE;
}

static bool covers(const struct engine *e, uint32_t section, uint32_t layer)
{
    const struct fb_section *s = &e->manifest.sections[section];

    return layer >= s->layer_first && layer - s->layer_first < s->layer_count;
}

/* Elements of one layer of a section in a block: [tokens, heads, row]; state: [heads, row]. */
static size_t block_elems(const struct engine *e, uint32_t section)
{
    size_t rows = is_state(e, section) ? 1 : e->block_tokens;

    return rows * e->manifest.head_count * e->manifest.sections[section].row_elems;
}

static void place_views(struct engine *e)
{
    const struct fb_manifest *m = &e->manifest;
    size_t at = 0;

    for (uint32_t layer = 0; layer < m->layer_count; layer++) {
        for (uint32_t s = 0; s < m->section_count; s++) {
            int64_t row = m->sections[s].row_elems;

            if (!covers(e, s, layer)) {
                continue;
            }
            e->views[layer * m->section_count + s] = (struct fb_paged_view){
                .base = e->data + at,
                .block_stride = (int64_t)block_elems(e, s),
                .token_stride = is_state(e, s) ? 0 : row * m->head_count,
                .head_stride = row,
                .channel_stride = 1,
            };
            at += e->block_count * block_elems(e, s) * fb_elem_bytes(m->sections[s].elem);
        }
    }
}

bool engine_init(struct engine *e, const struct fb_manifest *manifest, uint32_t block_tokens,
                 uint32_t pages)
{
    *e = (struct engine){.manifest = *manifest, .pages = pages, .block_tokens = block_tokens};
    if (pages == 0 || fb_layout_init(&e->layout, manifest, NULL) != FB_OK) {
        return false;
    }
    e->block_count = (pages * manifest->page_tokens + block_tokens - 1) / block_tokens;
    for (uint32_t s = 0; s < manifest->section_count; s++) {
        e->bytes += manifest->sections[s].layer_count * e->block_count * block_elems(e, s) *
                    fb_elem_bytes(manifest->sections[s].elem);
    }
    e->block_ids = calloc(e->block_count, sizeof(*e->block_ids));
    e->views =
        calloc((size_t)manifest->layer_count * manifest->section_count + 1, sizeof(*e->views));
    e->data = malloc(e->bytes);
    if (!e->block_ids || !e->views || !e->data) {
        engine_fini(e);
        return false;
    }
    for (uint32_t i = 0; i < e->block_count; i++) {
        e->block_ids[i] = e->block_count - 1 - i;
    }
    place_views(e);
    return true;
}

void engine_fini(struct engine *e)
{
    free(e->block_ids);
    free(e->views);
    free(e->data);
    *e = (struct engine){0};
}

void engine_clear(struct engine *e, uint8_t byte)
{
    memset(e->data, byte, e->bytes);
}

static uint16_t finite_value(enum fb_elem elem, uint64_t random)
{
    uint16_t sign = (uint16_t)(random & 0x8000);

    if (elem == FB_ELEM_BF16) {
        return (uint16_t)(sign | (120 + (random >> 16) % 10) << 7 | (random & 0x7f));
    }
    return (uint16_t)(sign | (8 + (random >> 16) % 10) << 10 | (random & 0x3ff));
}

void engine_fill(struct engine *e, uint64_t seed)
{
    const struct fb_manifest *m = &e->manifest;
    uint8_t *at = e->data;

    for (uint32_t i = 0; i < m->layer_count * m->section_count; i++) {
        uint32_t layer = i / m->section_count, s = i % m->section_count;
        enum fb_elem elem = m->sections[s].elem;
        size_t n = covers(e, s, layer) ? e->block_count * block_elems(e, s) : 0;

        for (; n > 0; n--) {
            uint64_t random = random_next(&seed);
            uint16_t value =
                fb_elem_bytes(elem) == 2 ? finite_value(elem, random) : (uint16_t)(random & 0xff);

            memcpy(at, &value, fb_elem_bytes(elem));
            at += fb_elem_bytes(elem);
        }
    }
}

uint8_t *engine_row(const struct engine *e, uint32_t layer, uint32_t section, uint32_t token,
                    uint32_t head)
{
    const struct fb_paged_view *v = &e->views[layer * e->manifest.section_count + section];
    int64_t block = e->block_ids[token / e->block_tokens];
    int64_t at = block * v->block_stride + (token % e->block_tokens) * v->token_stride +
                 head * v->head_stride;

    if (!v->base) {
        return NULL;
    }
    return (uint8_t *)v->base + at * fb_elem_bytes(e->manifest.sections[section].elem);
}

/* --- comparing --- */

struct part engine_all(const struct engine *e)
{
    return (struct part){
        .layer_count = e->manifest.layer_count,
        .head_count = e->manifest.head_count,
        .token_count = e->pages * e->manifest.page_tokens,
    };
}

static bool row_is_clear(const uint8_t *row, size_t bytes, uint8_t byte)
{
    for (size_t i = 0; i < bytes; i++) {
        if (row[i] != byte) {
            return false;
        }
    }
    return true;
}

/* Compare each row of the part with that of another engine, or with a byte. */
static bool compare(const struct engine *a, const struct engine *b, struct part p, uint8_t byte)
{
    const struct fb_manifest *m = &a->manifest;

    for (uint32_t i = 0; i < p.layer_count * m->section_count * p.head_count; i++) {
        uint32_t head = p.head_first + i % p.head_count;
        uint32_t s = i / p.head_count % m->section_count;
        uint32_t layer = p.layer_first + i / p.head_count / m->section_count;
        size_t bytes = m->sections[s].row_elems * fb_elem_bytes(m->sections[s].elem);

        for (uint32_t t = p.token_first; t < p.token_first + p.token_count; t++) {
            const uint8_t *row = engine_row(a, layer, s, t, head);

            if (row && !(b ? memcmp(row, engine_row(b, layer, s, t, head), bytes) == 0
                           : row_is_clear(row, bytes, byte))) {
                return false;
            }
        }
    }
    return true;
}

bool engine_equal(const struct engine *a, const struct engine *b, struct part part)
{
    return compare(a, b, part, 0);
}

bool engine_is_clear(const struct engine *e, struct part part, uint8_t byte)
{
    return compare(e, NULL, part, byte);
}

/* One segment through the reference codec, in place. */
static void round_segment(struct engine *e, uint32_t layer, uint32_t head, uint32_t page,
                          uint8_t *segment)
{
    const struct fb_kernels *k = fb_kernels_get(FB_KERNELS_REF);
    struct fb_transfer t = engine_transfer(e, 0, e->pages);
    const struct fb_paged_view *views = t.views + (size_t)layer * e->manifest.section_count;
    uint64_t sum, bad_rows;

    t.map.first_token = (uint64_t)page * e->manifest.page_tokens;
    fb_segment_encode(k, &e->layout, layer, head, views, &t.map, 0, segment, &sum, &bad_rows);
    fb_segment_decode(k, &e->layout, layer, head, views, &t.map, 0, e->manifest.page_tokens, 0,
                      segment, &sum);
}

void engine_round(struct engine *e)
{
    uint8_t *plane = aligned_alloc(FB_BLOCK_ALIGN, e->layout.plane_bytes);

    for (uint32_t page = 0; plane && page < e->pages; page++) {
        for (uint32_t head = 0; head < e->manifest.head_count; head++) {
            for (uint32_t layer = 0; layer < e->manifest.layer_count; layer++) {
                round_segment(e, layer, head, page, plane + e->layout.segment_offset[layer]);
            }
        }
    }
    free(plane);
}

/* --- through the pool --- */

struct fb_transfer engine_transfer(const struct engine *e, uint32_t first, uint32_t count)
{
    return (struct fb_transfer){
        .page_first = first,
        .page_count = count,
        .plane_count = e->manifest.head_count,
        .layer_count = e->manifest.layer_count,
        .views = e->views,
        .map = {.block_ids = e->block_ids,
                .block_count = e->block_count,
                .block_tokens = e->block_tokens},
    };
}

void chain_make(uint64_t seed, uint32_t page_tokens, uint32_t pages, uint8_t *chain)
{
    uint32_t ids[FB_MAX_PAGE_TOKENS];

    for (uint32_t page = 0; page < pages; page++) {
        uint8_t *hash = chain + (size_t)page * FB_CHAIN_BYTES;

        for (uint32_t i = 0; i < page_tokens; i++) {
            ids[i] = (uint32_t)random_next(&seed);
        }
        fb_chain(page ? hash - FB_CHAIN_BYTES : NULL, ids, page_tokens, NULL, 0, hash);
    }
}

enum fb_status engine_put(struct engine *e, struct fb_pool *pool, struct fb_pool_space *space,
                          const uint8_t *chain, uint32_t first, uint32_t count)
{
    const uint8_t *hash = chain + (size_t)first * FB_CHAIN_BYTES;
    enum fb_status *statuses = calloc(count, sizeof(*statuses)), status = FB_ENOMEM;
    struct fb_transfer t = engine_transfer(e, 0, count);
    struct fb_put *put;

    t.map.first_token = (uint64_t)first * e->manifest.page_tokens;
    if (statuses) {
        status = fb_put_begin(pool, space, hash, count, first ? hash - FB_CHAIN_BYTES : NULL, first,
                              NULL, ENGINE_WAIT_NS, &put, statuses);
    }
    if (status == FB_OK) {
        status = fb_put_encode(put, &t, statuses);
        if (status == FB_OK) {
            status = fb_put_commit(put, ENGINE_WAIT_NS, statuses);
        } else {
            fb_put_abort(put);
        }
    } else if (status == FB_MISS) {
        status = FB_OK; /* nothing to write; the pages say why */
    }
    for (uint32_t i = 0; i < count && status == FB_OK; i++) {
        status = statuses[i] == FB_EXISTS ? FB_OK : statuses[i];
    }
    free(statuses);
    return status;
}

enum fb_status engine_get(struct engine *e, struct fb_pool *pool, struct fb_pool_space *space,
                          const uint8_t *chain, uint32_t *ret_pages)
{
    enum fb_status *statuses = calloc(e->pages, sizeof(*statuses));
    struct fb_transfer t;
    struct fb_hit *hit;
    enum fb_status status = FB_ENOMEM;

    *ret_pages = 0;
    if (statuses) {
        status = fb_lookup(pool, &space, 1, chain, e->pages, 0, ENGINE_WAIT_NS, &hit);
    }
    if (status == FB_OK) {
        t = engine_transfer(e, 0, fb_hit_pages(hit));
        statuses[0] = FB_MISS;
        status = fb_get(hit, &t, ENGINE_WAIT_NS, statuses);
        while (*ret_pages < fb_hit_pages(hit) && statuses[*ret_pages] == FB_OK) {
            ++*ret_pages;
        }
        fb_hit_release(hit);
    }
    free(statuses);
    return status;
}
