/* Scales of a group: how they follow from its extremes, how they are stored.
 *
 * Defined in docs/formats.md, "Codecs"; shared by all implementations, which differ only in how
 * they find the extremes. Needs the environment of kernels/fpenv.h. Stateless; any thread. */
#ifndef FB_KERNELS_SCALE_H
#define FB_KERNELS_SCALE_H

#include "kernels/convert.h"

/* Magnitude of the largest code below 2^top: the same in both fp8 formats. */
#define FB_FP8_EDGE_CODE 0x77

/* An fp8 group's scale has the value 2^(s - 127), and maximum / scale is at most 1.75 * 2^top.
 * max_bits  largest |x| of the group as fp32, finite */
static inline uint32_t fb_fp8_scale(const struct fb_fp8 *f, uint32_t max_bits)
{
    int32_t s = (int32_t)(max_bits >> 23) - f->top + ((max_bits & FB_F32_MANTISSA) > 0x600000);

    return s > 0 ? (uint32_t)s : 0;
}

/* Whether codes are limited to FB_FP8_EDGE_CODE: the maximum is scaled below 2^top though it has
 * the source type's top exponent, so that rounding up to 2^top would decode to infinity. */
static inline bool fb_fp8_on_edge(enum fb_elem elem, uint32_t max_bits)
{
    uint32_t exponent = elem == FB_ELEM_BF16 ? 254 : 142;

    return max_bits >> 23 == exponent && (max_bits & FB_F32_MANTISSA) > 0x600000;
}

/* An int8 group's scale: value = code * step + min. */
struct fb_int8_scale {
    float min;
    float step;
    float inverse; /* 1 / step, or 0 where step is 0; not stored */
};

/* lo rounded toward minus infinity to bf16; upward where that leaves fp16's range. */
static inline float fb_int8_min(enum fb_elem elem, float lo)
{
    uint32_t bits = fb_f32_bits(lo);
    uint32_t down = (bits >> 31 ? bits + 0xffff : bits) & 0xffff0000;

    if (elem == FB_ELEM_FP16 && fb_bits_f32(down) < -65504.0f) {
        down = bits & 0xffff0000;
    }
    return fb_bits_f32(down);
}

/* Scale of a group whose extremes are lo and hi, both finite; false where hi - min is not. */
static inline bool fb_int8_scale_init(struct fb_int8_scale *s, enum fb_elem elem, float lo,
                                      float hi)
{
    s->min = fb_int8_min(elem, lo);
    s->step = 0.0f;
    s->inverse = 0.0f;
    if (hi <= s->min) {
        return true;
    }
    float range = hi - s->min;

    if (fb_f32_bits(range) >= FB_F32_INF) {
        return false;
    }
    uint32_t up = (fb_f32_bits(range * (1.0f / 255.0f)) + 0xffff) & 0xffff0000;
    uint32_t least = fb_f32_bits(fb_pow2_f32(-126));

    s->step = fb_bits_f32(up > least ? up : least);
    s->inverse = 1.0f / s->step;
    return true;
}

/* As stored: min, step, each bf16, little-endian. Loading leaves inverse alone. */
static inline void fb_int8_scale_store(const struct fb_int8_scale *s, uint8_t *scale)
{
    uint32_t min = fb_f32_bits(s->min) >> 16;
    uint32_t step = fb_f32_bits(s->step) >> 16;

    scale[0] = (uint8_t)min;
    scale[1] = (uint8_t)(min >> 8);
    scale[2] = (uint8_t)step;
    scale[3] = (uint8_t)(step >> 8);
}

static inline void fb_int8_scale_load(struct fb_int8_scale *s, const uint8_t *scale)
{
    s->min = fb_bf16_to_f32((uint16_t)(scale[0] | scale[1] << 8));
    s->step = fb_bf16_to_f32((uint16_t)(scale[2] | scale[3] << 8));
}

#endif
