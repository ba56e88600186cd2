/* Scalar reference of the codecs: the oracle for every other implementation, and what runs where
 * there is none. Follows docs/formats.md, "Codecs", operation by operation; clarity before speed.
 * Stateless; any thread. */
#include "kernels/codec_ref.h"
#include "kernels/scale.h"
#include "proto/sum.h"

#include <math.h>

static bool fp8_encode(const struct fb_fp8 *f, enum fb_elem elem, const uint16_t *x, uint32_t n,
                       uint8_t *codes, uint8_t *scale)
{
    uint32_t max_bits = 0;

    for (uint32_t i = 0; i < n; i++) {
        uint32_t bits = fb_f32_bits(fb_elem_to_f32(elem, x[i])) & FB_F32_ABS;

        max_bits = bits > max_bits ? bits : max_bits;
    }
    if (max_bits >= FB_F32_INF) {
        return false;
    }
    uint32_t s = fb_fp8_scale(f, max_bits);
    float factor = fb_pow2_f32(127 - (int32_t)s);
    uint8_t limit = fb_fp8_on_edge(elem, max_bits) ? FB_FP8_EDGE_CODE : f->nan - 1;

    for (uint32_t i = 0; i < n; i++) {
        uint8_t code = fb_f32_to_fp8(f, fb_elem_to_f32(elem, x[i]) * factor);

        codes[i] = (code & 0x7f) > limit ? (code & 0x80) | limit : code;
    }
    *scale = (uint8_t)s;
    return true;
}

static void fp8_decode(const struct fb_fp8 *f, enum fb_elem elem, const uint8_t *codes,
                       const uint8_t *scale, uint32_t n, uint16_t *x)
{
    /* 2^-127 is subnormal; 2^128, which no encoder writes, is infinity */
    float factor = fb_bits_f32(*scale ? (uint32_t)*scale << 23 : 1u << 22);

    for (uint32_t i = 0; i < n; i++) {
        x[i] = fb_f32_to_elem(elem, fb_fp8_to_f32(f, codes[i]) * factor);
    }
}

static uint16_t int8_value(const struct fb_int8_scale *s, enum fb_elem elem, uint32_t code)
{
    return fb_f32_to_elem(elem, fmaf((float)code, s->step, s->min));
}

/* Largest code whose value is finite; 255 but for groups at the source type's maximum. */
static uint32_t int8_limit(const struct fb_int8_scale *s, enum fb_elem elem)
{
    uint32_t inf = elem == FB_ELEM_BF16 ? 0x7f80 : 0x7c00;
    uint32_t code = 255;

    while ((int8_value(s, elem, code) & 0x7fff) >= inf) {
        code--;
    }
    return code;
}

/* Order of bf16 and fp16 bit patterns as integers: numeric, with -0 below +0. */
static int32_t order_key(uint16_t h)
{
    return (int16_t)(h & 0x8000 ? h ^ 0x7fff : h);
}

static bool int8_encode(enum fb_elem elem, const uint16_t *x, uint32_t n, uint8_t *codes,
                        uint8_t *scale)
{
    uint32_t inf = elem == FB_ELEM_BF16 ? 0x7f80 : 0x7c00;
    uint16_t lo = x[0];
    uint16_t hi = x[0];
    bool finite = true;

    for (uint32_t i = 0; i < n; i++) {
        finite &= (x[i] & 0x7fffu) < inf;
        lo = order_key(x[i]) < order_key(lo) ? x[i] : lo;
        hi = order_key(x[i]) > order_key(hi) ? x[i] : hi;
    }
    struct fb_int8_scale s;

    if (!finite ||
        !fb_int8_scale_init(&s, elem, fb_elem_to_f32(elem, lo), fb_elem_to_f32(elem, hi))) {
        return false;
    }
    float limit = (float)int8_limit(&s, elem);

    for (uint32_t i = 0; i < n; i++) {
        float y = (fb_elem_to_f32(elem, x[i]) - s.min) * s.inverse;

        y = y > 0.0f ? rintf(y) : 0.0f;
        codes[i] = (uint8_t)(y < limit ? y : limit);
    }
    fb_int8_scale_store(&s, scale);
    return true;
}

static void int8_decode(enum fb_elem elem, const uint8_t *codes, const uint8_t *scale, uint32_t n,
                        uint16_t *x)
{
    struct fb_int8_scale s;

    fb_int8_scale_load(&s, scale);
    for (uint32_t i = 0; i < n; i++) {
        x[i] = int8_value(&s, elem, codes[i]);
    }
}

bool fb_ref_encode(enum fb_codec codec, enum fb_elem elem, const uint16_t *x, uint32_t n,
                   uint8_t *codes, uint8_t *scale)
{
    switch (codec) {
    case FB_CODEC_FP8_E4M3: return fp8_encode(&fb_e4m3, elem, x, n, codes, scale);
    case FB_CODEC_FP8_E5M2: return fp8_encode(&fb_e5m2, elem, x, n, codes, scale);
    default: return int8_encode(elem, x, n, codes, scale);
    }
}

void fb_ref_decode(enum fb_codec codec, enum fb_elem elem, const uint8_t *codes,
                   const uint8_t *scale, uint32_t n, uint16_t *x)
{
    switch (codec) {
    case FB_CODEC_FP8_E4M3: fp8_decode(&fb_e4m3, elem, codes, scale, n, x); break;
    case FB_CODEC_FP8_E5M2: fp8_decode(&fb_e5m2, elem, codes, scale, n, x); break;
    default: int8_decode(elem, codes, scale, n, x); break;
    }
}

static uint64_t ref_sum_copy(void *dst, const void *src, size_t bytes, uint64_t offset)
{
    if (dst) {
        memcpy(dst, src, bytes);
    }
    return fb_sum_ref(src, bytes, offset);
}

static void ref_stream_copy(void *dst, const void *src, size_t bytes)
{
    memcpy(dst, src, bytes);
}

void fb_ref_transpose(const uint16_t *src, int64_t src_stride, uint32_t rows, uint32_t cols,
                      uint16_t *dst, int64_t dst_stride, bool stream)
{
    (void)stream;
    for (uint32_t c = 0; c < cols; c++) {
        for (uint32_t r = 0; r < rows; r++) {
            dst[c * dst_stride + r] = src[r * src_stride + c];
        }
    }
}

const struct fb_kernels fb_kernels_ref = {
    .name = "ref",
    .sum_copy = ref_sum_copy,
    .stream_copy = ref_stream_copy,
    .transpose = fb_ref_transpose,
};
