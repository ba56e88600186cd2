/* Block layout: against offsets computed by hand and against what must hold of any; headers. */
#include "proto/block.h"
#include "tests/unit/proto_util.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

/* An array in a block, for the test that none overlap. */
struct extent {
    uint64_t first;
    uint64_t end;
};

static void layout_make(struct fb_layout *l, const struct fb_manifest *m)
{
    struct fb_error error = {0};

    if (fb_layout_init(l, m, &error) != FB_OK) {
        fail_msg("%s", error.text);
    }
}

/* Llama-3-8B: 64 tokens of 128 bf16 are 16384 B; K, V, then 128 B for the sum. */
static void test_raw_by_hand(void **state)
{
    struct fb_section_place p;
    struct fb_manifest m;
    struct fb_layout l;

    (void)state;
    manifest_make(&m, 32, 8, 128, FB_CODEC_RAW);
    layout_make(&l, &m);
    assert_int_equal(l.segment_offset[1], 32896);
    assert_int_equal(l.segment_offset[32], 32 * 32896);
    assert_int_equal(l.plane_bytes, 257 * 4096);
    assert_int_equal(l.block_bytes, 4096 + 8 * 257 * 4096);
    assert_int_equal(l.code_bytes, 64 * 32 * 8 * 2 * 128 * 2);
    assert_int_equal(l.source_bytes, l.code_bytes);
    assert_int_equal(fb_layout_plane(&l, 3), 4096 + 3 * 257 * 4096);
    assert_int_equal(fb_layout_segment(&l, 3, 5), 4096 + 3 * 257 * 4096 + 5 * 32896);
    assert_int_equal(fb_layout_sum_offset(&l, 31), 32768);

    assert_true(fb_layout_section(&l, 7, 1, &p));
    assert_int_equal(p.rows, 64);
    assert_int_equal(p.groups, 0);
    assert_int_equal(p.row_bytes, 256);
    assert_int_equal(p.scale_bytes, 0);
    assert_int_equal(p.codes_offset, 16384);
    assert_int_equal(p.scales_offset, 32768);
}

/* int8 in groups of 32 of rows of 80: three groups a row; 32 tokens a page.
 *   K  codes 2560 | scales 32 * 3 * 4 = 384
 *   V  codes 2560 | scales 32 -> 128
 *   index, layers 1 and 2: codes 32 * 132 = 4224 */
static void test_mixed_by_hand(void **state)
{
    struct fb_section_place p;
    struct fb_manifest m;
    struct fb_layout l;

    (void)state;
    manifest_make_rich(&m);
    layout_make(&l, &m);
    assert_int_equal(l.segment_offset[1], 2560 + 384 + 2560 + 128 + 128);
    assert_int_equal(l.segment_offset[2], 5760 + 5760 + 4224);
    assert_int_equal(l.segment_offset[3], 15744 + 9984);
    assert_int_equal(l.plane_bytes, 7 * 4096);
    assert_int_equal(l.block_bytes, 15 * 4096);
    assert_int_equal(l.code_bytes, 2 * (3 * (2560 + 384 + 2560 + 32) + 2 * 4224));
    assert_int_equal(l.source_bytes, 2 * (3 * (2 * 2560 + 2 * 2560) + 2 * 4224));

    assert_true(fb_layout_section(&l, 0, 0, &p));
    assert_int_equal(p.groups, 3);
    assert_int_equal(p.row_bytes, 80);
    assert_int_equal(p.scale_bytes, 12);
    assert_int_equal(p.scales_offset, 2560);
    assert_true(fb_layout_section(&l, 0, 1, &p));
    assert_int_equal(p.groups, 1);
    assert_int_equal(p.scale_bytes, 1);
    assert_int_equal(p.codes_offset, 2944);
    assert_int_equal(p.scales_offset, 5504);
    assert_false(fb_layout_section(&l, 0, 2, &p));
    assert_true(fb_layout_section(&l, 1, 2, &p));
    assert_int_equal(p.codes_offset, 5632);
    assert_int_equal(p.scales_offset, 9856);
}

static void test_state_has_one_row(void **state)
{
    struct fb_section_place p;
    struct fb_manifest m;
    struct fb_layout l;

    (void)state;
    manifest_make(&m, 2, 1, 100, FB_CODEC_RAW);
    m.rule = FB_RULE_STATE;
    m.section_count = 1;
    m.sections[0].kind = FB_SECTION_STATE;
    layout_make(&l, &m);
    assert_true(fb_layout_section(&l, 1, 0, &p));
    assert_int_equal(p.rows, 1);
    assert_int_equal(l.segment_offset[1], 256 + 128);
    assert_int_equal(l.source_bytes, 2 * 200);
    assert_int_equal(l.block_bytes, 2 * 4096);
}

/* A random manifest of small numbers; sections 0 and 1 cover all layers, others some. */
static void random_manifest(struct fb_manifest *m, uint64_t *random)
{
    manifest_make(m, 1 + random_below(random, 6), 1 + random_below(random, 4),
                  1 + random_below(random, 200), FB_CODEC_RAW);
    m->page_tokens = 1 + random_below(random, 100);
    m->section_count = 2 + random_below(random, 4);
    for (uint32_t i = 0; i < m->section_count; i++) {
        struct fb_section *s = &m->sections[i];

        *s = (struct fb_section){
            .kind = (enum fb_section_kind)(FB_SECTION_K + i),
            .elem = (enum fb_elem)(1 + random_below(random, 6)),
            .codec = (enum fb_codec)(1 + random_below(random, 4)),
            .layer_count = m->layer_count,
            .row_elems = 1 + random_below(random, 200),
        };
        if (i >= 2) {
            s->layer_first = random_below(random, m->layer_count);
            s->layer_count = 1 + random_below(random, m->layer_count - s->layer_first);
        }
        if (s->elem > FB_ELEM_FP16) {
            s->codec = FB_CODEC_RAW;
        }
        if (s->codec != FB_CODEC_RAW) {
            s->group = random_below(random, s->row_elems);
        }
        if (s->kind == FB_SECTION_STATE) {
            s->kind = FB_SECTION_K;
        }
    }
}

static void expect_array(uint64_t offset, uint64_t bytes, uint64_t segment, struct extent *last)
{
    assert_int_equal(offset % FB_ARRAY_ALIGN, 0);
    assert_true(segment + offset >= last->end);
    assert_true(segment + offset < last->end + FB_ARRAY_ALIGN); /* nothing but padding between */
    *last = (struct extent){segment + offset, segment + offset + bytes};
}

/* Arrays follow each other in order of plane, layer, section, aligned and without overlap: so a
 * range of heads, or a range of layers of one head, is one range of bytes. */
static void check_layout(const struct fb_layout *l)
{
    uint64_t codes = 0;

    for (uint32_t plane = 0; plane < l->plane_count; plane++) {
        struct extent last = {0, fb_layout_plane(l, plane)};

        assert_int_equal(fb_layout_plane(l, plane) % FB_BLOCK_ALIGN, 0);
        for (uint32_t layer = 0; layer < l->layer_count; layer++) {
            uint64_t segment = fb_layout_segment(l, plane, layer);

            assert_int_equal(segment, layer ? last.end + FB_ARRAY_ALIGN - 8 : last.end);
            last.end = segment;
            for (uint32_t i = 0; i < l->section_count; i++) {
                struct fb_section_place p;

                if (!fb_layout_section(l, layer, i, &p)) {
                    continue;
                }
                expect_array(p.codes_offset, (uint64_t)p.rows * p.row_bytes, segment, &last);
                expect_array(p.scales_offset, (uint64_t)p.rows * p.scale_bytes, segment, &last);
                codes += (uint64_t)p.rows * (p.row_bytes + p.scale_bytes);
            }
            expect_array(fb_layout_sum_offset(l, layer), 8, segment, &last);
        }
        assert_true(last.end <= fb_layout_plane(l, plane) + l->plane_bytes);
        assert_true(l->plane_bytes < l->segment_offset[l->layer_count] + FB_BLOCK_ALIGN);
    }
    assert_int_equal(codes, l->code_bytes);
    assert_int_equal(l->block_bytes, fb_layout_plane(l, l->plane_count));
}

static void test_any_layout(void **state)
{
    uint64_t random = 1;
    struct fb_manifest m;
    struct fb_layout l;

    (void)state;
    for (int round = 0; round < 2000; round++) {
        random_manifest(&m, &random);
        layout_make(&l, &m);
        check_layout(&l);
    }
    manifest_make_rich(&m);
    layout_make(&l, &m);
    check_layout(&l);
}

static void expect_too_large(const struct fb_manifest *m, const char *text)
{
    struct fb_error error = {0};
    struct fb_layout l;

    assert_int_equal(fb_layout_init(&l, m, &error), FB_EGEOMETRY);
    if (!strstr(error.text, text)) {
        fail_msg("'%s' does not say '%s'", error.text, text);
    }
}

static void test_too_large(void **state)
{
    struct fb_manifest m;
    struct fb_layout l;

    (void)state;
    /* One plane of the most that there can be, and one page more. */
    manifest_make(&m, 1, 1, 1, FB_CODEC_RAW);
    m.page_tokens = 1;
    m.section_count = 1;
    m.sections[0].elem = FB_ELEM_BYTE;
    m.sections[0].row_elems = FB_BLOCK_MAX_BYTES - FB_BLOCK_HEADER_BYTES - FB_ARRAY_ALIGN;
    layout_make(&l, &m);
    assert_int_equal(l.block_bytes, FB_BLOCK_MAX_BYTES);
    m.sections[0].row_elems++;
    expect_too_large(&m, "1 planes of");
    m.sections[0].row_elems = FB_MAX_ROW_ELEMS;
    expect_too_large(&m, "layer 0 ends beyond");

    /* Products that leave 32 and, taken together, 64 bits. */
    manifest_make(&m, FB_MAX_LAYERS, FB_MAX_PLANES, FB_MAX_ROW_ELEMS, FB_CODEC_RAW);
    m.page_tokens = FB_MAX_PAGE_TOKENS;
    expect_too_large(&m, "layer 0 ends beyond");

    manifest_make(&m, 1000, 8, 128, FB_CODEC_RAW);
    expect_too_large(&m, "8 planes of 32899072 bytes make a block beyond 134213632 bytes");
    m.layer_count = 500;
    m.sections[0].layer_count = m.sections[1].layer_count = 500;
    layout_make(&l, &m);
    m.head_count = m.head_total = 9;
    expect_too_large(&m, "split layers or heads");

    manifest_make(&m, 4, 8, 128, FB_CODEC_RAW);
    m.page_tokens = 0;
    expect_too_large(&m, "manifest: page_tokens 0");
}

/* --- header --- */

static void header_make(struct fb_block_header *h, const struct fb_layout *l)
{
    memset(h, 0, sizeof(*h));
    h->magic = FB_BLOCK_MAGIC;
    h->version = FB_BLOCK_VERSION;
    h->state = FB_BLOCK_COMMITTED;
    memset(h->space, 1, sizeof(h->space));
    memset(h->key, 2, sizeof(h->key));
    memset(h->parent, 3, sizeof(h->parent));
    h->position = 5;
    h->block_bytes = l->block_bytes;
    h->plane_bytes = l->plane_bytes;
    h->plane_count = l->plane_count;
    h->layer_count = l->layer_count;
    h->page_tokens = l->page_tokens;
    fb_block_header_seal(h);
}

static void test_crc(void **state)
{
    (void)state;
    assert_int_equal(fb_crc32c("123456789", 9), 0xe3069283);
    assert_int_equal(fb_crc32c(NULL, 0), 0);
}

/* Offsets that other implementations rely on. */
static void test_header_fields(void **state)
{
    struct fb_block_header h;
    struct fb_manifest m;
    struct fb_layout l;
    uint32_t crc;

    (void)state;
    manifest_make(&m, 2, 8, 128, FB_CODEC_RAW);
    layout_make(&l, &m);
    header_make(&h, &l);
    assert_memory_equal(&h, "FBBLOCK1\1\0\0\0\2\0\0\0", 16);
    assert_int_equal(offsetof(struct fb_block_header, space), 16);
    assert_int_equal(offsetof(struct fb_block_header, key), 32);
    assert_int_equal(offsetof(struct fb_block_header, parent), 64);
    assert_int_equal(offsetof(struct fb_block_header, position), 96);
    assert_int_equal(offsetof(struct fb_block_header, plane_count), 120);
    assert_int_equal(offsetof(struct fb_block_header, sequence), 136);
    assert_int_equal(offsetof(struct fb_block_header, plane_sums), 144);
    assert_int_equal(offsetof(struct fb_block_header, crc), 132);
    crc = h.crc;
    h.crc = 0;
    assert_int_equal(crc, fb_crc32c(&h, 144 + 8 * h.plane_count));
}

static void test_header_check(void **state)
{
    struct fb_error error = {0};
    struct fb_block_header h;
    struct fb_manifest m;
    struct fb_layout l;

    (void)state;
    manifest_make(&m, 2, 8, 128, FB_CODEC_RAW);
    layout_make(&l, &m);
    header_make(&h, &l);
    assert_int_equal(fb_block_header_check(&h, NULL), FB_OK);

    h.state = FB_BLOCK_WRITING;
    fb_block_header_seal(&h);
    assert_int_equal(fb_block_header_check(&h, &error), FB_MISS);
    assert_non_null(strstr(error.text, "not committed"));
    header_make(&h, &l);
    h.version = 2;
    assert_int_equal(fb_block_header_check(&h, &error), FB_EVERSION);
    assert_non_null(strstr(error.text, "version 2; this program knows 1"));
    memset(&h, 0, sizeof(h));
    assert_int_equal(fb_block_header_check(&h, &error), FB_MISS);
    assert_non_null(strstr(error.text, "no header here"));
}

/* Any changed bit up to the last plane's sum is found: by the CRC, or since nothing is here that
 * could be believed. What follows is not read. */
static void test_header_bits(void **state)
{
    struct fb_block_header h;
    struct fb_manifest m;
    struct fb_layout l;
    uint8_t *bytes = (uint8_t *)&h;

    (void)state;
    manifest_make(&m, 2, 8, 128, FB_CODEC_RAW);
    layout_make(&l, &m);
    header_make(&h, &l);
    for (uint32_t bit = 0; bit < 8 * (144 + 8 * l.plane_count); bit++) {
        enum fb_status status;

        bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
        status = fb_block_header_check(&h, NULL);
        assert_int_equal(status, bit < 64    ? FB_MISS
                                 : bit < 96  ? FB_EVERSION
                                 : bit < 128 ? FB_MISS
                                             : FB_ECORRUPT);
        bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    assert_int_equal(fb_block_header_check(&h, NULL), FB_OK);
}

#define MISMATCH(change)                                                          \
    do {                                                                          \
        header_make(&h, &l);                                                      \
        change;                                                                   \
        fb_block_header_seal(&h);                                                 \
        assert_int_equal(fb_block_header_check(&h, NULL), FB_OK);                 \
        assert_int_equal(fb_block_header_match(&h, space, key, &l), FB_ECORRUPT); \
    } while (0)

static void test_header_match(void **state)
{
    uint8_t space[FB_SPACE_ID_BYTES], key[FB_KEY_BYTES];
    struct fb_block_header h;
    struct fb_manifest m;
    struct fb_layout l;

    (void)state;
    memset(space, 1, sizeof(space));
    memset(key, 2, sizeof(key));
    manifest_make(&m, 2, 8, 128, FB_CODEC_RAW);
    layout_make(&l, &m);
    header_make(&h, &l);
    assert_int_equal(fb_block_header_match(&h, space, key, &l), FB_OK);
    MISMATCH(h.space[15] ^= 1);
    MISMATCH(h.key[0] ^= 1);
    MISMATCH(h.key[31] ^= 1);
    MISMATCH(h.block_bytes += 4096);
    MISMATCH(h.plane_bytes += 4096);
    MISMATCH(h.plane_count--);
    MISMATCH(h.layer_count++);
    MISMATCH(h.page_tokens = 32);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_raw_by_hand),       cmocka_unit_test(test_mixed_by_hand),
        cmocka_unit_test(test_state_has_one_row), cmocka_unit_test(test_any_layout),
        cmocka_unit_test(test_too_large),         cmocka_unit_test(test_crc),
        cmocka_unit_test(test_header_fields),     cmocka_unit_test(test_header_check),
        cmocka_unit_test(test_header_bits),       cmocka_unit_test(test_header_match),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
