/* Scalar conversions between fp32 and the element and code types, on bits.
 *
 * These are the definitions of docs/formats.md, "Codecs": widening is exact, narrowing rounds to
 * nearest even and keeps subnormals and minus zero. NaN narrows to one canonical pattern. They
 * need the environment of kernels/fpenv.h where they calculate. Stateless; any thread. */
#ifndef FB_KERNELS_CONVERT_H
#define FB_KERNELS_CONVERT_H

#include "kernels/codec.h"

#include <string.h>

#define FB_F32_ABS      0x7fffffffu
#define FB_F32_INF      0x7f800000u
#define FB_F32_MANTISSA 0x007fffffu
#define FB_BF16_NAN     0x7fc0u
#define FB_FP16_NAN     0x7e00u

/* An 8-bit float format: one sign bit, then exponent, then mantissa. */
struct fb_fp8 {
    int32_t mantissa_bits;
    int32_t bias; /* of the exponent; also the exponent of the largest scaled value */
    int32_t top;  /* a group's maximum is scaled to at most 1.75 * 2^top */
    uint8_t nan;  /* first magnitude that is not finite */
    bool has_inf; /* that one is infinity, and the rest NaN */
};

static const struct fb_fp8 fb_e4m3 = {3, 7, 8, 0x7f, false};
static const struct fb_fp8 fb_e5m2 = {2, 15, 15, 0x7c, true};

static inline uint32_t fb_f32_bits(float v)
{
    uint32_t bits;

    memcpy(&bits, &v, sizeof(bits));
    return bits;
}

static inline float fb_bits_f32(uint32_t bits)
{
    float v;

    memcpy(&v, &bits, sizeof(v));
    return v;
}

/* 2^e for e in [-126, 127]. */
static inline float fb_pow2_f32(int32_t e)
{
    return fb_bits_f32((uint32_t)(e + 127) << 23);
}

static inline float fb_bf16_to_f32(uint16_t h)
{
    return fb_bits_f32((uint32_t)h << 16);
}

static inline uint16_t fb_f32_to_bf16(float v)
{
    uint32_t u = fb_f32_bits(v);

    if ((u & FB_F32_ABS) > FB_F32_INF) {
        return FB_BF16_NAN;
    }
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static inline float fb_fp16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16;
    uint32_t mag = h & 0x7fff;

    if (mag >= 0x7c00) {
        return fb_bits_f32(sign | FB_F32_INF | (mag & 0x3ff) << 13);
    }
    if (mag < 0x400) {
        return fb_bits_f32(sign | fb_f32_bits((float)mag * fb_pow2_f32(-24)));
    }
    return fb_bits_f32(sign | ((mag << 13) + (112u << 23)));
}

static inline uint16_t fb_f32_to_fp16(float v)
{
    uint32_t u = fb_f32_bits(v) & FB_F32_ABS;
    uint16_t sign = (uint16_t)(fb_f32_bits(v) >> 16 & 0x8000);

    if (u > FB_F32_INF) {
        return FB_FP16_NAN;
    }
    if (u >= fb_f32_bits(65520.0f)) {
        return sign | 0x7c00;
    }
    if (u < fb_f32_bits(fb_pow2_f32(-14))) {
        /* the sum's last place is 2^-24, that of a subnormal result */
        float sum = fb_bits_f32(u) + 0.5f;

        return (uint16_t)(sign | (fb_f32_bits(sum) - fb_f32_bits(0.5f)));
    }
    return (uint16_t)(sign | (u + 0xfff + (u >> 13 & 1) - (112u << 23)) >> 13);
}

/* Magnitude must not round beyond the format's largest finite value. */
static inline uint8_t fb_f32_to_fp8(const struct fb_fp8 *f, float v)
{
    uint32_t u = fb_f32_bits(v) & FB_F32_ABS;
    uint8_t sign = (uint8_t)(fb_f32_bits(v) >> 24 & 0x80);
    int32_t field = u >> 23 ? (int32_t)(u >> 23) : 1;
    uint32_t mantissa = (u & FB_F32_MANTISSA) | (u >> 23 ? 1u << 23 : 0);
    int32_t least = 1 - f->bias; /* exponent of the smallest normal code */
    int32_t e = field - 127 > least ? field - 127 : least;
    int32_t drop = 23 - f->mantissa_bits + e - (field - 127);

    if (drop > 24) {
        return sign; /* less than half of the smallest code */
    }
    uint32_t q = mantissa >> drop;
    uint32_t rest = mantissa & ((1u << drop) - 1);
    uint32_t half = 1u << (drop - 1);

    q += rest > half || (rest == half && (q & 1));
    /* q counts from 2^mantissa_bits where normal, so that a carry moves into the exponent */
    return (uint8_t)(sign | (((uint32_t)(e - least) << f->mantissa_bits) + q));
}

static inline float fb_fp8_to_f32(const struct fb_fp8 *f, uint8_t code)
{
    uint32_t sign = (uint32_t)(code & 0x80) << 24;
    int32_t mag = code & 0x7f;
    int32_t exponent = mag >> f->mantissa_bits;
    int32_t mantissa = mag & ((1 << f->mantissa_bits) - 1);

    if (mag >= f->nan) {
        bool inf = f->has_inf && mag == f->nan;

        return fb_bits_f32(sign | (inf ? FB_F32_INF : FB_F32_INF | 1u << 22));
    }
    if (exponent) {
        mantissa |= 1 << f->mantissa_bits;
    } else {
        exponent = 1;
    }
    float v = (float)mantissa * fb_pow2_f32(exponent - f->bias - f->mantissa_bits);

    return fb_bits_f32(sign | fb_f32_bits(v));
}

static inline float fb_elem_to_f32(enum fb_elem elem, uint16_t h)
{
    return elem == FB_ELEM_BF16 ? fb_bf16_to_f32(h) : fb_fp16_to_f32(h);
}

static inline uint16_t fb_f32_to_elem(enum fb_elem elem, float v)
{
    return elem == FB_ELEM_BF16 ? fb_f32_to_bf16(v) : fb_f32_to_fp16(v);
}

#endif
