/* Manifests: round trips, every message of validation, and that there is one encoding only. */
#include "tests/unit/proto_util.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

#define FIELDS 16

/* An encoding, and where its fields are: 1 byte of map header, then key and value each. */
struct encoding {
    uint8_t bytes[FB_MANIFEST_MAX_BYTES];
    size_t count;
    size_t field[FIELDS + 1];
};

/* Head of a CBOR item: type, argument, bytes of the head. Definite forms only. */
struct head {
    uint8_t type;
    uint64_t argument;
    size_t bytes;
};

static struct head head_read(const uint8_t *at)
{
    struct head h = {.type = at[0] >> 5, .argument = at[0] & 31, .bytes = 1};

    if (h.argument >= 24) {
        size_t n = (size_t)1 << (h.argument - 24);

        h.argument = 0;
        for (size_t i = 1; i <= n; i++) {
            h.argument = h.argument << 8 | at[i];
        }
        h.bytes += n;
    }
    return h;
}

static size_t item_bytes(const uint8_t *at)
{
    struct head h = head_read(at);
    size_t bytes = h.bytes;

    if (h.type == 2 || h.type == 3) {
        return bytes + h.argument;
    }
    if (h.type == 4 || h.type == 5) {
        for (uint64_t i = 0; i < h.argument * (h.type == 5 ? 2 : 1); i++) {
            bytes += item_bytes(at + bytes);
        }
    }
    return bytes;
}

static void encoding_make(struct encoding *e)
{
    struct fb_manifest m;
    size_t at = 1;

    manifest_make_rich(&m);
    assert_int_equal(fb_manifest_encode(&m, e->bytes, sizeof(e->bytes), &e->count, NULL), FB_OK);
    assert_int_equal(e->bytes[0], 0xa0 | FIELDS);
    for (int i = 0; i < FIELDS; i++) {
        e->field[i] = at;
        at += item_bytes(e->bytes + at);
        at += item_bytes(e->bytes + at);
    }
    e->field[FIELDS] = at;
    assert_int_equal(at, e->count);
}

static size_t append(uint8_t *out, size_t at, const void *data, size_t bytes)
{
    memcpy(out + at, data, bytes);
    return at + bytes;
}

/* Fields [first, end) of an encoding. */
static size_t append_fields(uint8_t *out, size_t at, const struct encoding *e, int first, int end)
{
    return append(out, at, e->bytes + e->field[first], e->field[end] - e->field[first]);
}

static void expect_refused(const uint8_t *in, size_t bytes)
{
    struct fb_error error = {0};
    struct fb_manifest m;

    assert_int_equal(fb_manifest_decode(in, bytes, &m, &error), FB_EPROTO);
    assert_ptr_equal(strstr(error.text, "manifest: "), error.text);
}

static void expect_round_trip(const struct fb_manifest *m)
{
    uint8_t first[FB_MANIFEST_MAX_BYTES], second[FB_MANIFEST_MAX_BYTES];
    struct fb_manifest back;
    size_t bytes, again;

    assert_int_equal(fb_manifest_encode(m, first, sizeof(first), &bytes, NULL), FB_OK);
    memset(&back, 0x55, sizeof(back));
    assert_int_equal(fb_manifest_decode(first, bytes, &back, NULL), FB_OK);
    assert_int_equal(fb_manifest_encode(&back, second, sizeof(second), &again, NULL), FB_OK);
    assert_int_equal(again, bytes);
    assert_memory_equal(first, second, bytes);
    assert_string_equal(back.tenant, m->tenant);
    assert_string_equal(back.position, m->position);
    assert_memory_equal(back.layers, m->layers, 2 * m->layer_count);
    assert_memory_equal(back.sections, m->sections, m->section_count * sizeof(m->sections[0]));
    assert_memory_equal(back.scales, m->scales, 4 * m->scale_count);
    assert_int_equal(back.generation, m->generation);
    assert_memory_equal(back.private_id, m->private_id, FB_PRIVATE_BYTES);
}

/* As much of everything as there can be. */
static void manifest_make_largest(struct fb_manifest *m)
{
    manifest_make(m, FB_MAX_LAYERS, FB_MAX_PLANES, 1, FB_CODEC_RAW);
    memset(m->tenant, 't', FB_MAX_TENANT_CHARS);
    memset(m->model, 'm', FB_MAX_TEXT_CHARS);
    memset(m->quantization, 'q', FB_MAX_TEXT_CHARS);
    memset(m->position, 'p', FB_MAX_TEXT_CHARS);
    memset(m->arrangement, 'a', FB_MAX_TEXT_CHARS);
    m->engine_block_tokens = UINT32_MAX;
    m->rule = FB_RULE_WINDOW;
    m->window_tokens = UINT32_MAX;
    m->page_tokens = FB_MAX_PAGE_TOKENS;
    m->head_first = UINT32_MAX - FB_MAX_PLANES;
    m->head_total = UINT32_MAX;
    m->section_count = FB_MAX_SECTIONS;
    for (uint32_t i = 0; i < FB_MAX_SECTIONS; i++) {
        m->sections[i] = (struct fb_section){
            .kind = FB_SECTION_K,
            .elem = FB_ELEM_BYTE,
            .codec = FB_CODEC_RAW,
            .layer_first = i * (FB_MAX_LAYERS / FB_MAX_SECTIONS),
            .layer_count = FB_MAX_LAYERS / FB_MAX_SECTIONS,
            .row_elems = FB_MAX_ROW_ELEMS,
        };
    }
    for (uint32_t i = 0; i < FB_MAX_LAYERS; i++) {
        m->layers[i] = (uint16_t)(UINT16_MAX - FB_MAX_LAYERS + i);
    }
    m->scale_count = FB_MAX_SCALES;
    m->generation = UINT64_MAX;
    m->is_private = true;
}

static void test_round_trips(void **state)
{
    struct fb_manifest m;

    (void)state;
    manifest_make(&m, 32, 8, 128, FB_CODEC_RAW);
    expect_round_trip(&m);
    manifest_make_rich(&m);
    expect_round_trip(&m);
    manifest_make_largest(&m);
    expect_round_trip(&m);

    manifest_make(&m, 2, 1, 4096, FB_CODEC_RAW);
    m.rule = FB_RULE_STATE;
    m.section_count = 1;
    m.sections[0].kind = FB_SECTION_STATE;
    m.model[0] = 0;
    m.is_private = true;
    expect_round_trip(&m);
}

/* One byte short is refused, not written past. */
static void test_capacity(void **state)
{
    uint8_t out[FB_MANIFEST_MAX_BYTES];
    struct fb_error error;
    struct fb_manifest m;
    size_t bytes, other = 7;

    (void)state;
    manifest_make_rich(&m);
    assert_int_equal(fb_manifest_encode(&m, out, sizeof(out), &bytes, NULL), FB_OK);
    for (size_t capacity = 0; capacity < bytes; capacity++) {
        memset(out, 0xee, sizeof(out));
        assert_int_equal(fb_manifest_encode(&m, out, capacity, &other, &error), FB_ELIMIT);
        assert_int_equal(out[capacity], 0xee);
        assert_int_equal(other, 7);
    }
    assert_non_null(strstr(error.text, "does not fit"));
    assert_int_equal(fb_manifest_encode(&m, out, bytes, &other, NULL), FB_OK);
    assert_int_equal(other, bytes);
}

static void expect_invalid(const struct fb_manifest *m, enum fb_status status, const char *text)
{
    uint8_t out[FB_MANIFEST_MAX_BYTES];
    struct fb_error error = {0};
    size_t bytes = 0;

    assert_int_equal(fb_manifest_validate(m, &error), status);
    assert_int_equal(error.status, status);
    if (!strstr(error.text, text)) {
        fail_msg("'%s' does not say '%s'", error.text, text);
    }
    assert_int_equal(fb_manifest_encode(m, out, sizeof(out), &bytes, NULL), status);
    assert_int_equal(bytes, 0);
}

/* A good manifest, changed, is refused with that status and a text that contains those words. */
#define INVALID(change, status, text)                    \
    do {                                                 \
        manifest_make(&m, 4, 8, 128, FB_CODEC_FP8_E4M3); \
        change;                                          \
        expect_invalid(&m, status, text);                \
    } while (0)

static void test_invalid_texts(void **state)
{
    struct fb_manifest m;

    (void)state;
    INVALID(memset(m.tenant, 'x', sizeof(m.tenant)), FB_EINVAL, "tenant is longer than 63");
    INVALID(memset(m.model, 'x', sizeof(m.model)), FB_EINVAL, "model is longer than 255");
    INVALID(memset(m.quantization, 'x', 256), FB_EINVAL, "quantization is longer than 255");
    INVALID(memset(m.position, 'x', 256), FB_EINVAL, "position is longer than 255");
    INVALID(memset(m.arrangement, 'x', 256), FB_EINVAL, "arrangement is longer than 255");
    INVALID(m.tenant[0] = 0, FB_EINVAL, "tenant is empty");
    INVALID(m.model[0] = 0, FB_EINVAL, "model is empty");
    INVALID(strcpy(m.arrangement, "amx"), FB_EINVAL, "engine_block_tokens go together");
    INVALID(m.engine_block_tokens = 16, FB_EINVAL, "engine_block_tokens go together");
}

static void test_invalid_shape(void **state)
{
    struct fb_manifest m;

    (void)state;
    INVALID(m.rule = 0, FB_EINVAL, "rule 0 is not");
    INVALID(m.rule = 4, FB_EINVAL, "rule 4 is not");
    INVALID(m.window_tokens = 5, FB_EINVAL, "window_tokens is 5");
    INVALID(m.rule = FB_RULE_WINDOW, FB_EINVAL, "window_tokens is 0");
    INVALID(m.page_tokens = 0, FB_EGEOMETRY, "page_tokens 0; expected 1 to 4096");
    INVALID(m.page_tokens = 4097, FB_EGEOMETRY, "page_tokens 4097");
    INVALID(m.layer_count = 0, FB_EGEOMETRY, "0 layers; expected 1 to 1024");
    INVALID(m.layer_count = 1025, FB_EGEOMETRY, "1025 layers");
    INVALID(m.layers[2] = 1, FB_EINVAL, "layer index 1 follows 1");
    INVALID(m.layers[0] = 9, FB_EINVAL, "layer index 1 follows 9");
    INVALID(m.head_count = 0, FB_EGEOMETRY, "0 heads; expected 1 to 448");
    INVALID(m.head_count = 449, FB_EGEOMETRY, "449 heads");
    INVALID(m.head_first = 1, FB_EGEOMETRY, "heads 1+8 are outside the model's 8");
    INVALID(m.head_first = UINT32_MAX, FB_EGEOMETRY, "outside the model's 8");
    INVALID(m.scale_count = 2049, FB_EINVAL, "2049 scales; expected at most 2048");
    INVALID((m.scale_count = 2, m.scales[1] = NAN), FB_EINVAL, "scale 1 is not finite");
    INVALID((m.scale_count = 1, m.scales[0] = -INFINITY), FB_EINVAL, "scale 0 is not finite");
}

static void test_invalid_sections(void **state)
{
    struct fb_section *s;
    struct fb_manifest m;

    (void)state;
    s = &m.sections[1];
    INVALID(m.section_count = 0, FB_EGEOMETRY, "0 sections; expected 1 to 32");
    INVALID(m.section_count = 33, FB_EGEOMETRY, "33 sections");
    INVALID(s->kind = 0, FB_EINVAL, "section 1: unknown kind 0");
    INVALID(s->kind = 7, FB_EINVAL, "section 1: unknown kind 7");
    INVALID(s->elem = 7, FB_EINVAL, "element 7");
    INVALID(s->codec = 0, FB_EUNSUPPORTED, "section 1: codec 0 is not known");
    INVALID(s->codec = 5, FB_EUNSUPPORTED, "section 1: codec 5 is not known");
    INVALID(s->kind = FB_SECTION_STATE, FB_EINVAL, "state sections and rule state go together");
    INVALID(m.rule = FB_RULE_STATE, FB_EINVAL, "section 0: state sections and rule state");
    INVALID(s->layer_count = 0, FB_EGEOMETRY, "layers 0+0 are outside the space's 4");
    INVALID(s->layer_first = 1, FB_EGEOMETRY, "layers 1+4 are outside the space's 4");
    INVALID(s->layer_first = UINT32_MAX, FB_EGEOMETRY, "outside the space's 4");
    INVALID(s->row_elems = 0, FB_EGEOMETRY, "0 elements a row; expected 1 to 4096");
    INVALID(s->row_elems = 4097, FB_EGEOMETRY, "4097 elements a row; expected 1 to 4096");
    INVALID((s->codec = FB_CODEC_RAW, s->row_elems = FB_MAX_ROW_ELEMS + 1), FB_EGEOMETRY,
            "134217729 elements a row; expected 1 to 134217728");
    INVALID(s->elem = FB_ELEM_E4M3FN, FB_EUNSUPPORTED, "e4m3fn rows cannot be quantized to fp8");
    INVALID(s->group = 128, FB_EINVAL, "group 128; expected 0 for the whole row");
    INVALID((s->codec = FB_CODEC_RAW, s->group = 32), FB_EINVAL, "group 32");
    INVALID((strcpy(m.arrangement, "amx"), m.engine_block_tokens = 16), FB_EUNSUPPORTED,
            "rows in an engine's arrangement travel raw");
    INVALID(s->kind = FB_SECTION_K, FB_EINVAL, "layer 0 has two sections of kind K");
    INVALID((m.section_count = 1, m.sections[0].layer_count = 3), FB_EINVAL,
            "layer 3 has no section");
}

static void test_names(void **state)
{
    (void)state;
    for (int codec = FB_CODEC_RAW; codec <= FB_CODEC_INT8; codec++) {
        assert_int_equal(fb_codec_by_name(fb_codec_name((enum fb_codec)codec)), codec);
    }
    assert_int_equal(fb_codec_by_name("int3"), 0);
    assert_string_equal(fb_codec_name(0), "?");
    assert_string_equal(fb_elem_name(FB_ELEM_E4M3FNUZ), "e4m3fnuz");
    assert_string_equal(fb_section_kind_name(FB_SECTION_LATENT), "latent");
    assert_string_equal(fb_rule_name(FB_RULE_WINDOW), "window");
    assert_int_equal(fb_elem_bytes(FB_ELEM_FP16), 2);
    assert_int_equal(fb_elem_bytes(FB_ELEM_BYTE), 1);
    assert_int_equal(fb_elem_bytes((enum fb_elem)99), 0);
}

/* --- one encoding --- */

/* Every head in a longer form than it needs, one at a time. */
static void test_longer_heads_are_refused(void **state)
{
    uint8_t out[FB_MANIFEST_MAX_BYTES];
    struct encoding e;

    (void)state;
    encoding_make(&e);
    for (size_t at = 0; at < e.count;) {
        struct head h = head_read(e.bytes + at);
        size_t skip = h.type == 2 || h.type == 3 ? h.argument : 0;

        for (int form = 0; form < 4; form++) {
            size_t width = (size_t)1 << form, n = at;

            if (width + 1 <= h.bytes) {
                continue;
            }
            memcpy(out, e.bytes, at);
            out[n++] = (uint8_t)(h.type << 5 | (24 + form));
            for (size_t i = width; i-- > 0;) {
                out[n++] = (uint8_t)(h.argument >> (8 * i));
            }
            n = append(out, n, e.bytes + at + h.bytes, e.count - at - h.bytes);
            expect_refused(out, n);
        }
        at += h.bytes + skip;
    }
}

/* Every string, array and map in the indefinite form, one at a time. */
static void test_indefinite_lengths_are_refused(void **state)
{
    uint8_t out[FB_MANIFEST_MAX_BYTES];
    struct encoding e;

    (void)state;
    encoding_make(&e);
    for (size_t at = 0; at < e.count;) {
        struct head h = head_read(e.bytes + at);
        bool is_string = h.type == 2 || h.type == 3;
        size_t end = at + item_bytes(e.bytes + at), n = at;

        if (h.type >= 2) {
            memcpy(out, e.bytes, at);
            out[n++] = (uint8_t)(h.type << 5 | 31);
            n = is_string ? append(out, n, e.bytes + at, end - at)
                          : append(out, n, e.bytes + at + h.bytes, end - at - h.bytes);
            out[n++] = 0xff;
            n = append(out, n, e.bytes + end, e.count - end);
            expect_refused(out, n);
        }
        at += h.bytes + (is_string ? h.argument : 0);
    }
}

static void test_other_keys_are_refused(void **state)
{
    static const uint8_t key_17[] = {17, 0};
    uint8_t out[FB_MANIFEST_MAX_BYTES];
    struct encoding e;
    size_t n;

    (void)state;
    encoding_make(&e);
    for (int i = 0; i < FIELDS; i++) {
        /* missing */
        out[0] = 0xa0 | (FIELDS - 1);
        n = append_fields(out, 1, &e, 0, i);
        n = append_fields(out, n, &e, i + 1, FIELDS);
        expect_refused(out, n);
        out[0] = 0xa0 | FIELDS;
        expect_refused(out, n);
        /* twice, once in place of its neighbour */
        n = append_fields(out, 1, &e, 0, i + 1);
        n = append_fields(out, n, &e, i, FIELDS);
        expect_refused(out, n);
        n = append_fields(out, 1, &e, 0, i + 1);
        n = append_fields(out, n, &e, i, i + 1);
        n = i + 2 < FIELDS ? append_fields(out, n, &e, i + 2, FIELDS) : n;
        expect_refused(out, n);
    }
    for (int i = 0; i + 1 < FIELDS; i++) {
        n = append_fields(out, 1, &e, 0, i);
        n = append_fields(out, n, &e, i + 1, i + 2);
        n = append_fields(out, n, &e, i, i + 1);
        n = append_fields(out, n, &e, i + 2, FIELDS);
        expect_refused(out, n);
    }
    out[0] = 0xb1;
    n = append_fields(out, 1, &e, 0, FIELDS);
    n = append(out, n, key_17, sizeof(key_17));
    expect_refused(out, n);
}

static void test_lengths(void **state)
{
    uint8_t out[FB_MANIFEST_MAX_BYTES + 1] = {0};
    struct encoding e;

    (void)state;
    encoding_make(&e);
    for (size_t bytes = 0; bytes < e.count; bytes++) {
        expect_refused(e.bytes, bytes);
    }
    memcpy(out, e.bytes, e.count);
    expect_refused(out, e.count + 1);
    expect_refused(out, sizeof(out));
}

/* Whatever one byte is changed to: refused, or the one encoding of another manifest. */
static void test_changed_bytes(void **state)
{
    uint8_t again[FB_MANIFEST_MAX_BYTES];
    struct fb_manifest m;
    struct encoding e;
    size_t bytes;

    (void)state;
    encoding_make(&e);
    for (size_t at = 0; at < e.count; at++) {
        uint8_t was = e.bytes[at];

        for (int v = 0; v < 256; v++) {
            e.bytes[at] = (uint8_t)v;
            if (fb_manifest_decode(e.bytes, e.count, &m, NULL) == FB_OK) {
                assert_int_equal(fb_manifest_encode(&m, again, sizeof(again), &bytes, NULL), FB_OK);
                assert_int_equal(bytes, e.count);
                assert_memory_equal(again, e.bytes, bytes);
            }
        }
        e.bytes[at] = was;
    }
}

static void test_other_schema(void **state)
{
    struct fb_error error = {0};
    struct fb_manifest m;
    struct encoding e;

    (void)state;
    encoding_make(&e);
    e.bytes[2] = 2;
    assert_int_equal(fb_manifest_decode(e.bytes, e.count, &m, &error), FB_EVERSION);
    assert_non_null(strstr(error.text, "schema 2; this program knows 1"));
    /* Also where the rest is nothing that this version could read. */
    assert_int_equal(fb_manifest_decode((const uint8_t[]){0xa1, 1, 0x19, 1, 0}, 5, &m, &error),
                     FB_EVERSION);
    assert_non_null(strstr(error.text, "schema 256"));
}

/* Validation runs on what is decoded. */
static void test_invalid_is_refused(void **state)
{
    struct fb_error error = {0};
    struct fb_manifest m;
    struct encoding e;

    (void)state;
    encoding_make(&e);
    assert_int_equal(e.bytes[e.field[7]], 8); /* rule */
    e.bytes[e.field[7] + 1] = 9;
    assert_int_equal(fb_manifest_decode(e.bytes, e.count, &m, &error), FB_EINVAL);
    assert_non_null(strstr(error.text, "rule 9"));
}

static void test_space_id(void **state)
{
    uint8_t id[FB_SPACE_ID_BYTES], other[FB_SPACE_ID_BYTES];
    struct encoding e;

    (void)state;
    encoding_make(&e);
    fb_space_id((const uint8_t *)"abc", 3, id);
    assert_memory_equal(id, "\xba\x78\x16\xbf\x8f\x01\xcf\xea\x41\x41\x40\xde\x5d\xae\x22\x23",
                        FB_SPACE_ID_BYTES);
    fb_space_id(e.bytes, e.count, id);
    e.bytes[e.field[14] + 2] ^= 1;
    fb_space_id(e.bytes, e.count, other);
    assert_memory_not_equal(id, other, FB_SPACE_ID_BYTES);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trips),
        cmocka_unit_test(test_capacity),
        cmocka_unit_test(test_invalid_texts),
        cmocka_unit_test(test_invalid_shape),
        cmocka_unit_test(test_invalid_sections),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_longer_heads_are_refused),
        cmocka_unit_test(test_indefinite_lengths_are_refused),
        cmocka_unit_test(test_other_keys_are_refused),
        cmocka_unit_test(test_lengths),
        cmocka_unit_test(test_changed_bytes),
        cmocka_unit_test(test_other_schema),
        cmocka_unit_test(test_invalid_is_refused),
        cmocka_unit_test(test_space_id),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
