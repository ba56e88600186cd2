/* Arithmetic of the CPU codecs: every implementation gives the reference's bits, and the reference
 * stays within the bounds of docs/formats.md. Segments and layouts: test_segment.c. */
#include "kernels/codec_ref.h"
#include "kernels/fpenv.h"
#include "kernels/scale.h"
#include "proto/sum.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#define MAX_ROW    576
#define MAX_ROWS   32
#define CANARY     0xa5
#define ELEM_COUNT 65536

static const enum fb_kernels_isa isas[] = {FB_KERNELS_AVX2, FB_KERNELS_AVX512};
static const enum fb_codec codecs[] = {FB_CODEC_FP8_E4M3, FB_CODEC_FP8_E5M2, FB_CODEC_INT8};
static const enum fb_elem elems[] = {FB_ELEM_BF16, FB_ELEM_FP16};

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static uint64_t random_state = 1;

static uint32_t random_u32(void)
{
    random_state = fb_mix64(random_state);
    return (uint32_t)(random_state >> 16);
}

static float random_float(void)
{
    float v = 0;

    for (int i = 0; i < 4; i++) {
        v += (float)(random_u32() & 0xffff) / 65536.0f - 0.5f;
    }
    return v;
}

static uint16_t elem_inf(enum fb_elem elem)
{
    return elem == FB_ELEM_BF16 ? 0x7f80 : 0x7c00;
}

/* Kinds of rows. */
enum pattern {
    ROW_BELL,
    ROW_CONSTANT,
    ROW_ZERO,
    ROW_MINUS_ZERO,
    ROW_SUBNORMAL,
    ROW_TINY,
    ROW_OUTLIER,
    ROW_ONE_HUGE,
    ROW_NEAR_MAX,
    ROW_NEAR_MIN,
    ROW_ANY_FINITE,
    ROW_NAN,
    ROW_INF,
    PATTERNS,
};

static uint16_t pattern_elem(enum pattern p, enum fb_elem elem, uint32_t i)
{
    uint16_t inf = elem_inf(elem);
    uint16_t sign = (uint16_t)(random_u32() & 0x8000);

    switch (p) {
    case ROW_CONSTANT: return fb_f32_to_elem(elem, 0.3f);
    case ROW_ZERO: return 0;
    case ROW_MINUS_ZERO: return random_u32() % 3 ? 0x8000 : 0;
    case ROW_SUBNORMAL: return sign | (random_u32() & (elem == FB_ELEM_BF16 ? 0x7f : 0x3ff));
    case ROW_TINY: return sign | (random_u32() & 0xfff);
    case ROW_OUTLIER: return fb_f32_to_elem(elem, random_float() * (i % 64 == 5 ? 200.0f : 1.0f));
    case ROW_ONE_HUGE: return i == 0 ? inf - 1 : fb_f32_to_elem(elem, random_float());
    case ROW_NEAR_MAX: return (uint16_t)(inf - 1 - random_u32() % 64);
    case ROW_NEAR_MIN: return (uint16_t)((inf - 1 - random_u32() % 40) | 0x8000);
    case ROW_ANY_FINITE: return sign | (random_u32() % inf);
    case ROW_NAN: return i ? fb_f32_to_elem(elem, random_float()) : inf + 1;
    case ROW_INF: return i ? fb_f32_to_elem(elem, random_float()) : sign | inf;
    default: return fb_f32_to_elem(elem, random_float());
    }
}

static void format_init(struct fb_row_format *f, enum fb_kernels_isa isa, enum fb_codec codec,
                        enum fb_elem elem, uint32_t row_elems, uint32_t group)
{
    struct fb_section s = {.codec = codec, .elem = elem, .row_elems = row_elems, .group = group};

    fb_row_format_init(f, fb_kernels_get(isa), &s);
}

/* What one implementation makes of rows. Canaries are behind what it may write. */
struct coded {
    uint8_t codes[MAX_ROWS * MAX_ROW + 64];
    uint8_t scales[MAX_ROWS * MAX_ROW * 4 + 64];
    uint16_t values[MAX_ROWS * (MAX_ROW + 3) + 64] __attribute__((aligned(64)));
    uint32_t bad;
};

/* Rows are stride apart in source and result. */
static void code_rows(const struct fb_row_format *f, const uint16_t *src, int64_t stride,
                      uint32_t rows, struct coded *out)
{
    fb_fpenv saved = fb_fpenv_enter();

    memset(out, CANARY, sizeof(*out));
    out->bad = fb_rows_encode(f, src, stride, rows, out->codes, out->scales);
    fb_rows_decode(f, out->codes, out->scales, rows, out->values, stride, true);
    fb_stream_fence();
    fb_fpenv_leave(saved);
}

static void check_same(enum fb_codec codec, enum fb_elem elem, uint32_t row_elems, uint32_t group,
                       const uint16_t *src, int64_t stride, uint32_t rows)
{
    static struct coded ref, other;
    struct fb_row_format f;

    format_init(&f, FB_KERNELS_REF, codec, elem, row_elems, group);
    code_rows(&f, src, stride, rows, &ref);
    for (size_t i = 0; i < COUNT(isas); i++) {
        if (fb_kernels_get(isas[i])) {
            format_init(&f, isas[i], codec, elem, row_elems, group);
            code_rows(&f, src, stride, rows, &other);
            assert_memory_equal(&ref, &other, sizeof(ref));
        }
    }
}

static void test_rows_are_bit_identical(void **state)
{
    static const uint32_t lengths[] = {1, 7, 16, 33, 64, 80, 128, MAX_ROW};
    static const uint32_t groups[] = {0, 32, 7, 1};
    static uint16_t src[MAX_ROWS * (MAX_ROW + 3)];

    (void)state;
    for (size_t e = 0; e < COUNT(elems); e++) {
        for (size_t n = 0; n < COUNT(lengths) * COUNT(groups); n++) {
            uint32_t length = lengths[n / COUNT(groups)];
            uint32_t group = groups[n % COUNT(groups)];
            uint32_t stride = length + n % 4;

            for (uint32_t r = 0; r < MAX_ROWS; r++) {
                for (uint32_t i = 0; i < length; i++) {
                    src[r * stride + i] = pattern_elem(r % PATTERNS, elems[e], i);
                }
            }
            for (size_t c = 0; c < COUNT(codecs); c++) {
                check_same(codecs[c], elems[e], length, group, src, stride, MAX_ROWS);
            }
        }
    }
}

/* Every bit pattern, beside maxima from the smallest to the largest. */
static void test_all_elements(void **state)
{
    static uint16_t src[ELEM_COUNT];

    (void)state;
    for (size_t e = 0; e < COUNT(elems); e++) {
        for (uint32_t anchor = 1; anchor < elem_inf(elems[e]); anchor = anchor * 5 / 4 + 1) {
            for (uint32_t i = 0; i < ELEM_COUNT; i++) {
                bool over = (i & 0x7fff) > anchor || i % 128 == 0;

                src[i] = (uint16_t)(over ? anchor | (i & 0x8000) : i);
            }
            for (uint32_t at = 0; at < ELEM_COUNT; at += 128 * MAX_ROWS) {
                for (size_t c = 0; c < COUNT(codecs); c++) {
                    check_same(codecs[c], elems[e], 128, 0, src + at, 128, MAX_ROWS);
                }
            }
        }
        for (uint32_t i = 0; i < ELEM_COUNT; i++) {
            src[i] = (uint16_t)i;
        }
        for (uint32_t at = 0; at < ELEM_COUNT; at += 16 * MAX_ROWS) {
            for (size_t c = 0; c < COUNT(codecs); c++) {
                check_same(codecs[c], elems[e], 16, 0, src + at, 16, MAX_ROWS);
            }
        }
    }
}

static void check_decode_same(enum fb_codec codec, enum fb_elem elem, uint32_t row_elems,
                              const uint8_t *codes, const uint8_t *scales, uint32_t rows)
{
    static uint16_t ref[256 * 256], other[256 * 256];
    fb_fpenv saved = fb_fpenv_enter();
    struct fb_row_format f;

    format_init(&f, FB_KERNELS_REF, codec, elem, row_elems, 0);
    fb_rows_decode(&f, codes, scales, rows, ref, row_elems, false);
    for (size_t i = 0; i < COUNT(isas); i++) {
        if (fb_kernels_get(isas[i])) {
            format_init(&f, isas[i], codec, elem, row_elems, 0);
            fb_rows_decode(&f, codes, scales, rows, other, row_elems, false);
            assert_memory_equal(ref, other, (size_t)rows * row_elems * 2);
        }
    }
    fb_fpenv_leave(saved);
}

/* Codes and scales that no encoder writes are decoded alike too. */
static void test_all_codes_and_scales(void **state)
{
    static uint8_t codes[256 * 256], scales[256 * 4];

    (void)state;
    for (uint32_t i = 0; i < sizeof(codes); i++) {
        codes[i] = (uint8_t)i;
    }
    for (uint32_t i = 0; i < 256; i++) {
        scales[i] = (uint8_t)i;
    }
    for (size_t e = 0; e < COUNT(elems); e++) {
        check_decode_same(FB_CODEC_FP8_E4M3, elems[e], 256, codes, scales, 256);
        check_decode_same(FB_CODEC_FP8_E5M2, elems[e], 256, codes, scales, 256);
    }
    /* again without the codes that keep a row from the fast paths */
    for (uint32_t i = 0; i < sizeof(codes); i++) {
        codes[i] = (uint8_t)((i & 0x80) | (i & 0x7f) % 0x7c);
    }
    for (size_t e = 0; e < COUNT(elems); e++) {
        check_decode_same(FB_CODEC_FP8_E4M3, elems[e], 256, codes, scales, 256);
        check_decode_same(FB_CODEC_FP8_E5M2, elems[e], 256, codes, scales, 256);
    }
    for (uint32_t n = 0; n < 64; n++) {
        for (uint32_t i = 0; i < sizeof(scales); i++) {
            scales[i] = (uint8_t)random_u32();
        }
        check_decode_same(FB_CODEC_INT8, FB_ELEM_BF16, 256, codes, scales, 256);
        check_decode_same(FB_CODEC_INT8, FB_ELEM_FP16, 256, codes, scales, 256);
    }
}

/* Largest error that docs/formats.md allows for one element of a group. */
static double fp8_bound(const struct fb_fp8 *f, enum fb_elem elem, double x, uint8_t scale)
{
    double relative = fabs(x) * ldexp(1, -f->mantissa_bits - 1);
    double absolute = ldexp(1, scale - 127 - f->bias - f->mantissa_bits);
    double source = ldexp(1, elem == FB_ELEM_BF16 ? -134 : -25);

    return (relative > absolute ? relative : absolute) + source;
}

static double int8_bound(enum fb_elem elem, double value, const uint8_t *scale, uint16_t hi)
{
    struct fb_int8_scale s;
    double half_place = fabs(value) * ldexp(1, elem == FB_ELEM_BF16 ? -8 : -11);

    fb_int8_scale_load(&s, scale);
    if (hi >= elem_inf(elem) - 0x80) {
        return s.step * 1.5 + half_place; /* codes may be limited */
    }
    return s.step * (0.5 + 0x1p-13) + half_place + ldexp(1, elem == FB_ELEM_BF16 ? -134 : -25);
}

static void check_bounds(enum fb_codec codec, enum fb_elem elem, const uint16_t *x, uint32_t n)
{
    const struct fb_fp8 *f = codec == FB_CODEC_FP8_E4M3 ? &fb_e4m3 : &fb_e5m2;
    uint8_t codes[128], scale[4];
    uint16_t values[128];
    uint16_t hi = 0;

    assert_true(fb_ref_encode(codec, elem, x, n, codes, scale));
    fb_ref_decode(codec, elem, codes, scale, n, values);
    for (uint32_t i = 0; i < n; i++) {
        hi = (x[i] & 0x7fff) > hi ? x[i] & 0x7fff : hi;
    }
    for (uint32_t i = 0; i < n; i++) {
        double from = (double)fb_elem_to_f32(elem, x[i]);
        double to = (double)fb_elem_to_f32(elem, values[i]);
        double bound = codec == FB_CODEC_INT8 ? int8_bound(elem, to, scale, hi)
                                              : fp8_bound(f, elem, from, scale[0]);

        assert_true(isfinite(to));
        assert_true(fabs(to - from) <= bound);
        if (codec != FB_CODEC_INT8) {
            assert_int_equal(codes[i] & 0x80, x[i] >> 8 & 0x80);
        }
    }
}

static void test_errors_are_bounded(void **state)
{
    fb_fpenv saved = fb_fpenv_enter();
    uint16_t x[128];

    (void)state;
    for (size_t e = 0; e < COUNT(elems); e++) {
        for (uint32_t n = 0; n < 20000; n++) {
            enum pattern p = n % ROW_NAN;

            if (p == ROW_ANY_FINITE || p == ROW_NEAR_MIN || p == ROW_NEAR_MAX) {
                continue; /* int8: ranges beyond fp32, minima beyond bf16; below */
            }
            for (uint32_t i = 0; i < 128; i++) {
                x[i] = pattern_elem(p, elems[e], i);
            }
            for (size_t c = 0; c < COUNT(codecs); c++) {
                check_bounds(codecs[c], elems[e], x, 1 + n % 128);
            }
        }
        for (uint32_t i = 0; i < elem_inf(elems[e]); i++) {
            x[0] = (uint16_t)i;
            x[1] = (uint16_t)(i / 2 | 0x8000);
            check_bounds(FB_CODEC_FP8_E4M3, elems[e], x, 2);
            check_bounds(FB_CODEC_FP8_E5M2, elems[e], x, 2);
            check_bounds(FB_CODEC_INT8, elems[e], x, 1);
        }
    }
    fb_fpenv_leave(saved);
}

/* Whatever finite row was encoded, no element decodes to infinity or NaN. */
static void test_decoded_is_finite(void **state)
{
    static const enum pattern patterns[] = {ROW_NEAR_MAX, ROW_NEAR_MIN, ROW_ANY_FINITE};
    fb_fpenv saved = fb_fpenv_enter();
    uint8_t codes[64], scale[4];
    uint16_t x[64];

    (void)state;
    for (uint32_t n = 0; n < 60000; n++) {
        enum fb_elem elem = elems[n % 2];
        enum fb_codec codec = codecs[n / 2 % 3];
        bool low = n & 8;

        for (uint32_t i = 0; i < 64; i++) {
            x[i] = pattern_elem(patterns[n / 6 % 3], elem, i);
            x[i] = low && elem == FB_ELEM_BF16 ? x[i] & 0xfeff : x[i]; /* half of the range */
        }
        if (!fb_ref_encode(codec, elem, x, 64, codes, scale)) {
            assert_int_equal(codec, FB_CODEC_INT8);
            assert_int_equal(elem, FB_ELEM_BF16);
            continue;
        }
        fb_ref_decode(codec, elem, codes, scale, 64, x);
        for (uint32_t i = 0; i < 64; i++) {
            assert_true((x[i] & 0x7fff) < elem_inf(elem));
        }
    }
    fb_fpenv_leave(saved);
}

static void check_row(enum fb_codec codec, enum fb_elem elem, const uint16_t x[4],
                      const uint8_t codes[4], uint32_t scale)
{
    uint8_t got_codes[4], got_scale[4] = {0};

    assert_true(fb_ref_encode(codec, elem, x, 4, got_codes, got_scale));
    assert_memory_equal(got_codes, codes, 4);
    assert_memory_equal(got_scale, &scale, 4);
}

/* Worked by hand from docs/formats.md. */
static void test_known_rows(void **state)
{
    (void)state;
    /* 1, -0, 1.75 * 2^-8, 448: scale 1 */
    check_row(FB_CODEC_FP8_E4M3, FB_ELEM_BF16, (uint16_t[]){0x3f80, 0x8000, 0x3be0, 0x43e0},
              (uint8_t[]){0x38, 0x80, 0x04, 0x7e}, 127);
    /* 449 needs the next scale */
    check_row(FB_CODEC_FP8_E4M3, FB_ELEM_BF16, (uint16_t[]){0x3f80, 0, 0, 0x43e1},
              (uint8_t[]){0x30, 0, 0, 0x76}, 128);
    /* the largest bf16 would round up to infinity: limited */
    check_row(FB_CODEC_FP8_E4M3, FB_ELEM_BF16, (uint16_t[]){0x7f7f, 0xff7f, 0, 0},
              (uint8_t[]){0x77, 0xf7, 0, 0}, 247);
    check_row(FB_CODEC_FP8_E5M2, FB_ELEM_FP16, (uint16_t[]){0x7bff, 0xfbff, 0, 0},
              (uint8_t[]){0x77, 0xf7, 0, 0}, 128);
    /* 0, 1, 2, 3: min 0, step 3 / 255 rounded up to bf16, 0x3c41 */
    check_row(FB_CODEC_INT8, FB_ELEM_BF16, (uint16_t[]){0, 0x3f80, 0x4000, 0x4040},
              (uint8_t[]){0, 85, 170, 255}, 0x3c410000);
    /* a constant row needs no step */
    check_row(FB_CODEC_INT8, FB_ELEM_BF16, (uint16_t[]){0xbf80, 0xbf80, 0xbf80, 0xbf80},
              (uint8_t[]){0, 0, 0, 0}, 0x0000bf80);
    /* fp16: -65504 cannot be rounded down to bf16 and stay in range */
    check_row(FB_CODEC_INT8, FB_ELEM_FP16, (uint16_t[]){0xfbff, 0xfbff, 0xfbff, 0xfbff},
              (uint8_t[]){0, 0, 0, 0}, 0x0000c77f);
}

static void test_sums(void **state)
{
    static uint8_t src[70000], dst[70000 + 64];
    static const size_t sizes[] = {0, 8, 56, 64, 72, 1000, 16384, 16448, 65544};

    (void)state;
    for (size_t i = 0; i < sizeof(src); i++) {
        src[i] = (uint8_t)random_u32();
    }
    for (size_t n = 0; n < COUNT(sizes) * 40; n++) {
        size_t bytes = sizes[n % COUNT(sizes)];
        uint64_t offset = n < 200 ? n * 8 : (uint64_t)random_u32() * 8 << (n % 20);
        size_t shift = n % 5 * 16;
        uint64_t sum = fb_sum_ref(src + shift, bytes, offset);

        for (size_t i = 0; i < COUNT(isas); i++) {
            const struct fb_kernels *k = fb_kernels_get(isas[i]);

            if (!k) {
                continue;
            }
            memset(dst, CANARY, sizeof(dst));
            assert_int_equal(fb_sum_copy(k, NULL, src + shift, bytes, offset), sum);
            assert_int_equal(fb_sum_copy(k, dst + n % 3, src + shift, bytes, offset), sum);
            assert_memory_equal(dst + n % 3, src + shift, bytes);
            assert_int_equal(dst[n % 3 + bytes], CANARY);
        }
    }
    /* parts add up, in any order */
    assert_int_equal(fb_sum_ref(src, 40000, 0),
                     fb_sum_ref(src + 24, 39976, 24) + fb_sum_ref(src, 24, 0));
    assert_int_not_equal(fb_sum_seed(src, 0, 1), fb_sum_seed(src, 1, 0));
}

static void test_transposes(void **state)
{
    static uint16_t src[64 * 80], dst[80 * 96] __attribute__((aligned(64))), ref[80 * 96];

    (void)state;
    for (size_t i = 0; i < COUNT(src); i++) {
        src[i] = (uint16_t)random_u32();
    }
    for (uint32_t n = 0; n < 2000; n++) {
        uint32_t rows = 1 + random_u32() % 64;
        uint32_t cols = 1 + random_u32() % 72;
        int64_t stride = n % 3 ? rows + n % 16 : 16;

        rows = rows > stride ? (uint32_t)stride : rows;
        memset(ref, CANARY, sizeof(ref));
        fb_ref_transpose(src, 80, rows, cols, ref, stride, false);
        for (size_t i = 0; i < COUNT(isas); i++) {
            if (fb_kernels_get(isas[i])) {
                memset(dst, CANARY, sizeof(dst));
                fb_kernels_get(isas[i])->transpose(src, 80, rows, cols, dst, stride, true);
                fb_stream_fence();
                assert_memory_equal(dst, ref, sizeof(ref));
            }
        }
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows_are_bit_identical),
        cmocka_unit_test(test_all_elements),
        cmocka_unit_test(test_all_codes_and_scales),
        cmocka_unit_test(test_errors_are_bounded),
        cmocka_unit_test(test_decoded_is_finite),
        cmocka_unit_test(test_known_rows),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_transposes),
    };

    for (size_t i = 0; i < COUNT(isas); i++) {
        if (!fb_kernels_get(isas[i])) {
            printf("skipped: this processor lacks %s\n",
                   isas[i] == FB_KERNELS_AVX2 ? "avx2" : "avx512");
        }
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
