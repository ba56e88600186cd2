/* Segments of the CPU codecs: every engine layout is gathered and scattered as its strides say,
 * every implementation writes the same bytes, damage is found and nothing is written then.
 *
 * The expected segment is built here element by element from the definitions; the expected cache
 * after decoding is what was there, changed in the requested tokens only. */
#include "kernels/codec_ref.h"
#include "proto/sum.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define CANARY       0xa5

enum { HEADS = 3, BLOCKS = 6, MAX_BLOCK_IDS = 80 };

static const enum fb_kernels_isa isas[] = {FB_KERNELS_REF, FB_KERNELS_AVX2, FB_KERNELS_AVX512};

/* How an engine arranges two sections, K and V, of one layer. */
enum arrangement {
    KV_THEN_PAGES, /* [2, blocks, tokens, heads, dim] */
    PAGES_THEN_KV, /* [blocks, 2, tokens, heads, dim] */
    HEADS_FIRST,   /* [2, blocks, heads, tokens, dim] */
    PACKED_KV,     /* [blocks, tokens, heads, 2 * dim] */
    K_TRANSPOSED,  /* K [blocks, heads, dim, tokens], V [blocks, heads, tokens, dim] */
    ALL_REVERSED,  /* as HEADS_FIRST, every stride negative */
    INTERLEAVED,   /* [blocks, tokens, heads, dim, 2] */
    ARRANGEMENTS,
};

/* One space with an engine's cache of it. */
struct fixture {
    struct fb_layout layout;
    struct fb_paged_view views[2];
    struct fb_token_map map;
    int64_t block_ids[MAX_BLOCK_IDS];
    uint8_t *cache;
    size_t cache_bytes;
    uint8_t *segment;  /* as some implementation wrote it */
    uint8_t *expected; /* as it must be */
    size_t segment_bytes;
};

static uint64_t random_state = 7;

static uint32_t random_u32(void)
{
    random_state = fb_mix64(random_state);
    return (uint32_t)(random_state >> 16);
}

static void fill_finite(uint16_t *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        x[i] = (uint16_t)(random_u32() & 0x8000) | (0x2c00 + random_u32() % 0x1400);
    }
}

static void views_init(struct fixture *f, enum arrangement a, int64_t dim, int64_t tokens)
{
    int64_t section = BLOCKS * tokens * HEADS * dim;
    size_t elem_bytes = fb_elem_bytes(f->layout.sections[0].elem);

    for (int64_t i = 0; i < 2; i++) {
        struct fb_paged_view v = {NULL, tokens * HEADS * dim, HEADS * dim, dim, 1};
        int64_t base = i * section;

        if (a == PAGES_THEN_KV) {
            base = i * v.block_stride;
            v.block_stride *= 2;
        } else if (a == PACKED_KV) {
            base = i * dim;
            v = (struct fb_paged_view){NULL, tokens * HEADS * dim * 2, HEADS * dim * 2, dim * 2, 1};
        } else if (a == INTERLEAVED) {
            base = i;
            v = (struct fb_paged_view){NULL, tokens * HEADS * dim * 2, HEADS * dim * 2, dim * 2, 2};
        } else if (a == K_TRANSPOSED && i == 0) {
            v = (struct fb_paged_view){NULL, HEADS * dim * tokens, 1, dim * tokens, tokens};
        } else if (a == HEADS_FIRST || a == ALL_REVERSED || a == K_TRANSPOSED) {
            v = (struct fb_paged_view){NULL, HEADS * dim * tokens, dim, dim * tokens, 1};
        }
        if (a == ALL_REVERSED) {
            base += section - 1;
            v = (struct fb_paged_view){NULL, -v.block_stride, -v.token_stride, -v.head_stride, -1};
        }
        v.base = f->cache + base * (int64_t)elem_bytes;
        f->views[i] = v;
    }
}

static void manifest_init(struct fb_manifest *m, uint32_t page_tokens, enum fb_elem elem,
                          enum fb_codec codec, uint32_t dim, uint32_t group)
{
    *m = (struct fb_manifest){
        .tenant = "test",
        .model = "test@1",
        .rule = FB_RULE_FULL,
        .page_tokens = page_tokens,
        .layer_count = 2,
        .layers = {0, 1},
        .head_count = HEADS,
        .head_total = HEADS,
        .section_count = 2,
    };
    for (uint32_t i = 0; i < 2; i++) {
        m->sections[i] = (struct fb_section){
            .kind = i ? FB_SECTION_V : FB_SECTION_K,
            .elem = elem,
            .codec = codec,
            .layer_count = 2,
            .row_elems = dim,
            .group = codec != FB_CODEC_RAW && group < dim ? group : 0,
        };
    }
}

static void fixture_alloc(struct fixture *f, const struct fb_manifest *m, size_t cache_bytes)
{
    struct fb_error error;

    if (fb_layout_init(&f->layout, m, &error)) {
        fail_msg("%s", error.text);
    }
    f->segment_bytes = fb_layout_sum_offset(&f->layout, 0) + FB_ARRAY_ALIGN;
    f->cache_bytes = cache_bytes;
    f->cache = aligned_alloc(64, (cache_bytes + 63) / 64 * 64);
    f->segment = aligned_alloc(128, f->segment_bytes);
    f->expected = aligned_alloc(128, f->segment_bytes);
    assert_true(f->cache && f->segment && f->expected);
    fill_finite((uint16_t *)f->cache, cache_bytes / 2);
}

/* Engine blocks are used from the last to the first, again and again. */
static void map_init(struct fixture *f, uint32_t block_tokens, uint64_t first_token)
{
    f->map = (struct fb_token_map){f->block_ids, MAX_BLOCK_IDS, first_token, block_tokens};
    for (int64_t i = 0; i < MAX_BLOCK_IDS; i++) {
        f->block_ids[i] = BLOCKS - 1 - i % BLOCKS;
    }
}

static void fixture_init(struct fixture *f, enum arrangement a, const struct fb_manifest *m,
                         uint32_t block_tokens, uint64_t first_token)
{
    uint32_t dim = m->sections[0].row_elems;

    fixture_alloc(f, m,
                  2ull * BLOCKS * block_tokens * HEADS * dim * fb_elem_bytes(m->sections[0].elem));
    map_init(f, block_tokens, first_token);
    views_init(f, a, dim, block_tokens);
}

static void fixture_fini(struct fixture *f)
{
    free(f->cache);
    free(f->segment);
    free(f->expected);
}

/* Offset in the cache of a page's element; the tests' own reading of struct fb_paged_view. */
static size_t cache_offset(const struct fixture *f, uint32_t section, uint32_t head, uint32_t token,
                           uint32_t channel)
{
    const struct fb_paged_view *v = &f->views[section];
    bool is_state = f->layout.sections[section].kind == FB_SECTION_STATE;
    uint64_t at = f->map.first_token + (is_state ? f->layout.page_tokens - 1 : token);
    int64_t block = f->block_ids[at / f->map.block_tokens];
    int64_t in_block = is_state ? 0 : (int64_t)(at % f->map.block_tokens);
    int64_t elem = block * v->block_stride + in_block * v->token_stride +
                   (int64_t)head * v->head_stride + (int64_t)channel * v->channel_stride;
    int64_t bytes = fb_elem_bytes(f->layout.sections[section].elem);

    return (size_t)((uint8_t *)v->base - f->cache + elem * bytes);
}

static void expect_row(const struct fixture *f, uint32_t section, uint32_t head, uint32_t row)
{
    const struct fb_section *s = &f->layout.sections[section];
    uint32_t bytes = fb_elem_bytes(s->elem);
    uint8_t *x = malloc((size_t)s->row_elems * bytes);
    struct fb_section_place p;

    assert_non_null(x);
    assert_true(fb_layout_section(&f->layout, 0, section, &p));
    uint8_t *codes = f->expected + p.codes_offset + (size_t)row * p.row_bytes;
    uint8_t *scale = f->expected + p.scales_offset + (size_t)row * p.scale_bytes;

    for (uint32_t c = 0; c < s->row_elems; c++) {
        memcpy(x + (size_t)c * bytes, f->cache + cache_offset(f, section, head, row, c), bytes);
    }
    if (s->codec == FB_CODEC_RAW) {
        memcpy(codes, x, p.row_bytes);
    }
    for (uint32_t c = 0, n; c < s->row_elems && s->codec != FB_CODEC_RAW; c += n) {
        n = s->group && s->row_elems - c > s->group ? s->group : s->row_elems - c;
        assert_true(fb_ref_encode(s->codec, s->elem, (uint16_t *)x + c, n, codes + c, scale));
        scale += p.scale_bytes / p.groups;
    }
    free(x);
}

static void expect_segment(struct fixture *f, uint32_t head, uint64_t seed)
{
    uint64_t sum_offset = f->segment_bytes - FB_ARRAY_ALIGN;
    struct fb_section_place p;

    memset(f->expected, 0, f->segment_bytes);
    for (uint32_t i = 0; i < f->layout.section_count; i++) {
        assert_true(fb_layout_section(&f->layout, 0, i, &p));
        for (uint32_t row = 0; row < p.rows; row++) {
            expect_row(f, i, head, row);
        }
    }
    uint64_t sum = seed + fb_sum_ref(f->expected, sum_offset, 0);

    memcpy(f->expected + sum_offset, &sum, sizeof(sum));
}

static enum fb_status encode(struct fixture *f, enum fb_kernels_isa isa, uint32_t head,
                             uint64_t seed, uint64_t *ret_bad)
{
    uint64_t sum;

    memset(f->segment, CANARY, f->segment_bytes);
    return fb_segment_encode(fb_kernels_get(isa), &f->layout, 0, head, f->views, &f->map, seed,
                             f->segment, &sum, ret_bad);
}

/* Change what decoding a token must change. */
static void expect_token(const struct fixture *f, uint32_t head, uint32_t token, uint8_t *cache)
{
    struct fb_section_place p;

    for (uint32_t i = 0; i < f->layout.section_count; i++) {
        const struct fb_section *s = &f->layout.sections[i];
        uint32_t bytes = fb_elem_bytes(s->elem);

        assert_true(fb_layout_section(&f->layout, 0, i, &p));
        uint32_t row = p.rows == 1 ? 0 : token;
        const uint8_t *codes = f->expected + p.codes_offset + (size_t)row * p.row_bytes;
        const uint8_t *scales = f->expected + p.scales_offset + (size_t)row * p.scale_bytes;

        for (uint32_t c = 0; c < s->row_elems; c++) {
            uint8_t *to = cache + cache_offset(f, i, head, token, c);
            uint32_t group = s->group ? c / s->group : 0;
            uint16_t value;

            if (s->codec == FB_CODEC_RAW) {
                memcpy(to, codes + (size_t)c * bytes, bytes);
                continue;
            }
            fb_ref_decode(s->codec, s->elem, codes + c,
                          scales + (size_t)group * (p.scale_bytes / p.groups), 1, &value);
            memcpy(to, &value, sizeof(value));
        }
    }
}

static void check_decode(struct fixture *f, enum fb_kernels_isa isa, uint32_t head, uint64_t seed,
                         uint32_t first, uint32_t count)
{
    uint8_t *before = malloc(f->cache_bytes);
    uint8_t *after = malloc(f->cache_bytes);
    uint64_t sum;

    assert_true(before && after);
    memcpy(before, f->cache, f->cache_bytes);
    memset(f->cache, CANARY, f->cache_bytes);
    memset(after, CANARY, f->cache_bytes);
    for (uint32_t t = first; t < first + count; t++) {
        expect_token(f, head, t, after);
    }
    assert_int_equal(fb_segment_decode(fb_kernels_get(isa), &f->layout, 0, head, f->views, &f->map,
                                       first, count, seed, f->expected, &sum),
                     FB_OK);
    assert_memory_equal(&sum, f->expected + f->segment_bytes - FB_ARRAY_ALIGN, sizeof(sum));
    assert_memory_equal(f->cache, after, f->cache_bytes);
    memcpy(f->cache, before, f->cache_bytes);
    free(before);
    free(after);
}

static void check_round_trip(struct fixture *f, uint32_t head)
{
    uint64_t seed = random_u32();
    uint32_t tokens = f->layout.page_tokens;
    uint64_t bad;

    expect_segment(f, head, seed);
    for (size_t i = 0; i < COUNT(isas); i++) {
        if (fb_kernels_get(isas[i])) {
            assert_int_equal(encode(f, isas[i], head, seed, &bad), FB_OK);
            assert_int_equal(bad, 0);
            assert_memory_equal(f->segment, f->expected, f->segment_bytes);
            check_decode(f, isas[i], head, seed, 0, tokens);
            check_decode(f, isas[i], head, seed, tokens / 3, tokens - tokens / 3);
        }
    }
}

static void test_arrangements(void **state)
{
    static const uint32_t block_tokens[] = {16, 32, 128};
    static const uint32_t dims[] = {64, 80, 7};
    struct fb_manifest m;
    struct fixture f;

    (void)state;
    for (uint32_t n = 0; n < ARRANGEMENTS * 4 * 3 * 2; n++) {
        enum fb_codec codec = FB_CODEC_RAW + n / ARRANGEMENTS % 4;
        uint32_t which = n / ARRANGEMENTS / 4 % 3;
        enum fb_elem elem = n / ARRANGEMENTS / 12 ? FB_ELEM_FP16 : FB_ELEM_BF16;

        manifest_init(&m, 64, elem, codec, dims[(which + n) % 3], n % 2 ? 32 : 0);
        fixture_init(&f, n % ARRANGEMENTS, &m, block_tokens[which], which == 2 ? 64 : n % 3 * 5);
        check_round_trip(&f, n % HEADS);
        fixture_fini(&f);
    }
}

static void test_page_sizes(void **state)
{
    static const uint32_t pages[] = {1, 16, 64};
    struct fb_manifest m;
    struct fixture f;

    (void)state;
    for (uint32_t n = 0; n < COUNT(pages) * 4 * 3; n++) {
        enum fb_codec codec = FB_CODEC_RAW + n / 3 % 4;

        manifest_init(&m, pages[n % 3], FB_ELEM_BF16, codec, 1 + random_u32() % 200, n / 12 * 16);
        fixture_init(&f, n % ARRANGEMENTS, &m, 16, random_u32() % 64);
        check_round_trip(&f, 1);
        fixture_fini(&f);
    }
}

static void test_all_token_ranges(void **state)
{
    size_t best = COUNT(isas) - 1;
    struct fb_manifest m;
    struct fixture f;

    (void)state;
    while (best > 0 && !fb_kernels_get(isas[best])) {
        best--;
    }
    for (uint32_t n = 0; n < 8; n++) {
        manifest_init(&m, 16, FB_ELEM_BF16, FB_CODEC_RAW + n / 2, 32, 0);
        fixture_init(&f, n / 2 % 2 ? K_TRANSPOSED : KV_THEN_PAGES, &m, 16, 6);
        expect_segment(&f, 2, 99);
        for (uint32_t first = 0; first <= 16; first++) {
            for (uint32_t count = 0; count <= 16 - first; count++) {
                check_decode(&f, isas[n % 2 ? best : 0], 2, 99, first, count);
            }
        }
        fixture_fini(&f);
    }
}

/* MLA: latent in groups and rope raw, packed in one row of the engine. */
static void test_mla(void **state)
{
    struct fb_manifest m;
    struct fixture f;

    (void)state;
    manifest_init(&m, 64, FB_ELEM_BF16, FB_CODEC_FP8_E4M3, 512, 128);
    m.sections[0].kind = FB_SECTION_LATENT;
    m.sections[1] = (struct fb_section){FB_SECTION_ROPE, FB_ELEM_BF16, FB_CODEC_RAW, 0, 2, 64, 0};
    m.head_count = 1;
    m.head_total = 1;
    fixture_alloc(&f, &m, BLOCKS * 64 * 576 * 2);
    map_init(&f, 64, 128);
    f.views[0] = (struct fb_paged_view){f.cache, 64 * 576, 576, 0, 1};
    f.views[1] = (struct fb_paged_view){f.cache + 512 * 2, 64 * 576, 576, 0, 1};
    check_round_trip(&f, 0);
    fixture_fini(&f);
}

/* Rows far longer than any buffer; in the block of the page's last token; written only with it. */
static void test_state_rows(void **state)
{
    static const int64_t channel_strides[] = {1, 2};
    struct fb_manifest m;
    struct fixture f;

    (void)state;
    for (size_t n = 0; n < COUNT(channel_strides); n++) {
        int64_t row = 100003 * channel_strides[n];

        manifest_init(&m, 16, n ? FB_ELEM_BF16 : FB_ELEM_BYTE, FB_CODEC_RAW, 100003, 0);
        m.rule = FB_RULE_STATE;
        m.section_count = 1;
        m.sections[0].kind = FB_SECTION_STATE;
        fixture_alloc(&f, &m, (size_t)(BLOCKS * row * HEADS) * (n ? 2 : 1));
        map_init(&f, 16, 32);
        f.block_ids[0] = -1;
        f.views[0] = (struct fb_paged_view){f.cache, HEADS * row, 12345, row, channel_strides[n]};
        check_round_trip(&f, 2);
        fixture_fini(&f);
    }
}

static void test_bad_arguments(void **state)
{
    struct fb_manifest m;
    struct fixture f;
    uint64_t sum, bad;

    (void)state;
    manifest_init(&m, 16, FB_ELEM_BF16, FB_CODEC_RAW, 32, 0);
    fixture_init(&f, HEADS_FIRST, &m, 8, 0);
    const struct fb_kernels *k = fb_kernels_best();

    expect_segment(&f, 0, 1);
    f.block_ids[1] = -1;
    assert_int_equal(encode(&f, FB_KERNELS_REF, 0, 1, &bad), FB_EINVAL);
    assert_int_equal(f.segment[0], CANARY);
    /* a range without the null block is fine */
    check_decode(&f, FB_KERNELS_REF, 0, 1, 0, 8);
    assert_int_equal(
        fb_segment_decode(k, &f.layout, 0, 0, f.views, &f.map, 0, 9, 1, f.expected, &sum),
        FB_EINVAL);
    f.block_ids[1] = 1;
    assert_int_equal(
        fb_segment_decode(k, &f.layout, 0, 0, f.views, &f.map, 9, 8, 1, f.expected, &sum),
        FB_EINVAL);
    assert_int_equal(
        fb_segment_decode(k, &f.layout, 2, 0, f.views, &f.map, 0, 8, 1, f.expected, &sum),
        FB_EINVAL);
    f.map.block_count = 1;
    assert_int_equal(encode(&f, FB_KERNELS_REF, 0, 1, &bad), FB_EINVAL);
    f.map.block_count = 2;
    f.map.first_token = UINT64_MAX - 3;
    assert_int_equal(encode(&f, FB_KERNELS_REF, 0, 1, &bad), FB_EINVAL);
    f.map.first_token = 0;
    f.map.block_tokens = 0;
    assert_int_equal(encode(&f, FB_KERNELS_REF, 0, 1, &bad), FB_EINVAL);
    fixture_fini(&f);
}

static void test_bad_rows_are_counted(void **state)
{
    struct fb_manifest m;
    struct fixture f;
    uint64_t bad;

    (void)state;
    for (uint32_t n = 0; n < 4; n++) {
        manifest_init(&m, 16, FB_ELEM_BF16, FB_CODEC_RAW + n, 64, n % 2 ? 16 : 0);
        fixture_init(&f, K_TRANSPOSED, &m, 16, 0);
        for (uint32_t i = 0; i < 3; i++) {
            uint16_t nan = 0x7f81, inf = 0xff80;

            memcpy(f.cache + cache_offset(&f, 0, 1, i * 5, i * 20), i ? &inf : &nan, 2);
            memcpy(f.cache + cache_offset(&f, 0, 1, i * 5, 63), &nan, 2);
        }
        for (size_t i = 0; i < COUNT(isas); i++) {
            if (fb_kernels_get(isas[i])) {
                assert_int_equal(encode(&f, isas[i], 1, 5, &bad), n ? FB_ENONFINITE : FB_OK);
                assert_int_equal(bad, n ? 3 : 0);
                memcpy(i ? f.segment : f.expected, f.segment, f.segment_bytes);
                assert_memory_equal(f.segment, f.expected, f.segment_bytes);
            }
        }
        fixture_fini(&f);
    }
}

/* A segment that must not be believed: nothing is written. */
static void check_refused(struct fixture *f, uint64_t seed, const uint8_t *segment)
{
    uint64_t sum;

    for (size_t i = 0; i < COUNT(isas); i++) {
        const struct fb_kernels *k = fb_kernels_get(isas[i]);

        if (k) {
            assert_int_equal(fb_segment_check(k, &f->layout, 0, seed, segment, &sum), FB_ECORRUPT);
            assert_int_equal(fb_segment_decode(k, &f->layout, 0, 0, f->views, &f->map, 0,
                                               f->layout.page_tokens, seed, segment, &sum),
                             FB_ECORRUPT);
        }
    }
}

static void test_damage_is_found(void **state)
{
    uint8_t key[FB_KEY_BYTES] = {1, 2, 3}, other_key[FB_KEY_BYTES] = {1, 2, 4};
    uint64_t seed = fb_sum_seed(key, 0, 0);
    struct fb_manifest m;
    struct fixture f;
    uint64_t bad;

    (void)state;
    manifest_init(&m, 4, FB_ELEM_BF16, FB_CODEC_INT8, 24, 0);
    fixture_init(&f, HEADS_FIRST, &m, 16, 0);
    expect_segment(&f, 0, seed);
    assert_int_equal(encode(&f, FB_KERNELS_REF, 1, fb_sum_seed(key, 1, 0), &bad), FB_OK);
    size_t body = f.segment_bytes - FB_ARRAY_ALIGN;

    memset(f.cache, CANARY, f.cache_bytes);
    /* stale: another key, head or layer; swapped: another head's segment in this place */
    check_refused(&f, fb_sum_seed(other_key, 0, 0), f.expected);
    check_refused(&f, fb_sum_seed(key, 1, 0), f.expected);
    check_refused(&f, fb_sum_seed(key, 0, 1), f.expected);
    check_refused(&f, seed, f.segment);
    /* torn: from some line on, or up to it, the other segment */
    for (size_t at = 64; at < body; at += 64) {
        uint8_t *torn = f.segment;
        uint8_t kept[4096];

        memcpy(kept, torn, f.segment_bytes);
        memcpy(torn, f.expected, at);
        if (memcmp(torn, f.expected, f.segment_bytes) != 0) {
            check_refused(&f, seed, torn);
        }
        memcpy(torn, f.expected, f.segment_bytes);
        memcpy(torn, kept, at);
        check_refused(&f, seed, torn);
        memcpy(torn, kept, f.segment_bytes);
    }
    /* lines swapped within the segment */
    memcpy(f.segment, f.expected, f.segment_bytes);
    memcpy(f.segment, f.expected + 8, 8);
    memcpy(f.segment + 8, f.expected, 8);
    check_refused(&f, seed, f.segment);
    for (size_t bit = 0; bit < (body + FB_SUM_BYTES) * 8; bit++) {
        f.expected[bit / 8] ^= (uint8_t)(1 << bit % 8);
        check_refused(&f, seed, f.expected);
        f.expected[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    for (size_t i = 0; i < f.cache_bytes; i++) {
        assert_int_equal(f.cache[i], CANARY);
    }
    fixture_fini(&f);
}

static void test_block_check(void **state)
{
    struct fb_manifest m;
    struct fixture f;
    uint64_t sum, bad;

    (void)state;
    manifest_init(&m, 16, FB_ELEM_FP16, FB_CODEC_FP8_E5M2, 64, 0);
    fixture_init(&f, PAGES_THEN_KV, &m, 16, 16);
    const struct fb_kernels *k = fb_kernels_best();
    uint8_t *block = aligned_alloc(FB_BLOCK_ALIGN, f.layout.block_bytes);
    struct fb_block_header *h = (struct fb_block_header *)block;

    assert_non_null(block);
    memset(block, 0, f.layout.block_bytes);
    h->key[3] = 9;
    for (uint32_t p = 0; p < HEADS; p++) {
        for (uint32_t layer = 0; layer < 2; layer++) {
            uint8_t *segment = block + fb_layout_segment(&f.layout, p, layer);

            assert_int_equal(fb_segment_encode(k, &f.layout, layer, p, f.views, &f.map,
                                               fb_sum_seed(h->key, p, layer), segment, &sum, &bad),
                             FB_OK);
            h->plane_sums[p] += sum;
        }
    }
    assert_int_equal(fb_block_check(k, &f.layout, block, 0, HEADS), FB_OK);
    block[fb_layout_segment(&f.layout, 1, 1) + 5] ^= 4;
    assert_int_equal(fb_block_check(k, &f.layout, block, 0, HEADS), FB_ECORRUPT);
    assert_int_equal(fb_block_check(k, &f.layout, block, 0, 1), FB_OK);
    assert_int_equal(fb_block_check(k, &f.layout, block, 2, 1), FB_OK);
    h->plane_sums[2]++;
    assert_int_equal(fb_block_check(k, &f.layout, block, 2, 1), FB_ECORRUPT);
    free(block);
    fixture_fini(&f);
}

/* Sections that do not cover a layer are left out of its segment, and their views are not read. */
static void test_sections_of_some_layers(void **state)
{
    struct fb_manifest m;
    struct fixture f;
    uint64_t sum, bad;

    (void)state;
    manifest_init(&m, 16, FB_ELEM_BF16, FB_CODEC_FP8_E4M3, 64, 0);
    m.sections[1].layer_count = 1;
    fixture_init(&f, HEADS_FIRST, &m, 16, 0);
    f.views[1].base = NULL;
    assert_int_equal(fb_segment_encode(fb_kernels_best(), &f.layout, 1, 0, f.views, &f.map, 0,
                                       f.segment, &sum, &bad),
                     FB_OK);
    assert_int_equal(fb_segment_decode(fb_kernels_best(), &f.layout, 1, 0, f.views, &f.map, 0, 16,
                                       0, f.segment, &sum),
                     FB_OK);
    fixture_fini(&f);
}

#if defined(__x86_64__)
/* Decode a segment over the cache's contents and return a copy of the cache. */
static uint8_t *decoded_cache(struct fixture *f, enum fb_kernels_isa isa, const uint8_t *segment)
{
    uint8_t *copy = malloc(f->cache_bytes);
    uint64_t sum;

    assert_non_null(copy);
    assert_int_equal(fb_segment_decode(fb_kernels_get(isa), &f->layout, 0, 0, f->views, &f->map, 0,
                                       f->layout.page_tokens, 3, segment, &sum),
                     FB_OK);
    memcpy(copy, f->cache, f->cache_bytes);
    return copy;
}

/* FTZ, DAZ and rounding toward zero change nothing, and are there again afterwards. */
static void check_environment(struct fixture *f, enum fb_kernels_isa isa)
{
    const unsigned int odd = 0xffc0;
    unsigned int saved = _mm_getcsr();
    uint64_t bad;

    _mm_setcsr(odd);
    enum fb_status status = encode(f, isa, 0, 3, &bad);
    unsigned int after_encode = _mm_getcsr();
    uint8_t *with_odd = decoded_cache(f, isa, f->segment);
    unsigned int after_decode = _mm_getcsr();

    _mm_setcsr(saved);
    assert_int_equal(status, FB_OK);
    assert_int_equal(after_encode, odd);
    assert_int_equal(after_decode, odd);
    assert_memory_equal(f->segment, f->expected, f->segment_bytes);

    uint8_t *without = decoded_cache(f, FB_KERNELS_REF, f->segment);

    assert_memory_equal(with_odd, without, f->cache_bytes);
    free(with_odd);
    free(without);
}

static void test_caller_environment(void **state)
{
    struct fb_manifest m;
    struct fixture f;

    (void)state;
    for (uint32_t n = 0; n < 6 * COUNT(isas); n++) {
        enum fb_kernels_isa isa = isas[n / 6];
        enum fb_elem elem = n % 2 ? FB_ELEM_FP16 : FB_ELEM_BF16;

        if (!fb_kernels_get(isa)) {
            continue;
        }
        manifest_init(&m, 16, elem, FB_CODEC_FP8_E4M3 + n % 6 / 2, 64, 0);
        fixture_init(&f, HEADS_FIRST, &m, 16, 0);
        for (size_t i = 0; i < f.cache_bytes; i += 2) {
            f.cache[i + 1] &= i % 256 < 128 ? 0x80 : 0xbf; /* every other row subnormal */
        }
        expect_segment(&f, 0, 3);
        check_environment(&f, isa);
        fixture_fini(&f);
    }
}
#endif

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_arrangements),
        cmocka_unit_test(test_page_sizes),
        cmocka_unit_test(test_all_token_ranges),
        cmocka_unit_test(test_mla),
        cmocka_unit_test(test_state_rows),
        cmocka_unit_test(test_bad_arguments),
        cmocka_unit_test(test_bad_rows_are_counted),
        cmocka_unit_test(test_damage_is_found),
        cmocka_unit_test(test_block_check),
        cmocka_unit_test(test_sections_of_some_layers),
#if defined(__x86_64__)
        cmocka_unit_test(test_caller_environment),
#endif
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
