/* What the x86 implementations share: everything but their vectors. Included by files that are
 * built with AVX2 flags at least. Stateless; any thread. */
#ifndef FB_KERNELS_CODEC_X86_H
#define FB_KERNELS_CODEC_X86_H

#include "kernels/codec_ref.h"
#include "kernels/scale.h"
#include "proto/sum.h"

#include <immintrin.h>

/* Groups planned before the first is encoded. */
#define FB_GROUPS_AHEAD 16

/* Bytes that a sum without a copy prefetches ahead, past its end too: what follows a segment is
 * the segment that is read next. */
#define FB_SUM_AHEAD 12288

#define FB_INLINE static inline __attribute__((always_inline))

/* Scales in [FB_SCALE_LOW, FB_SCALE_HIGH] keep all values of a group, except those that become
 * code 0, normal in bf16 and fp32. */
#define FB_SCALE_LOW  32u
#define FB_SCALE_HIGH 239u

/* bf16 of the codes below the first normal one, at scale 0: their exponents are negative. */
static const int16_t fb_e4m3_small[8] = {
    0, -9 * 128, -8 * 128, -8 * 128 + 64, -7 * 128, -7 * 128 + 32, -7 * 128 + 64, -7 * 128 + 96,
};
static const int16_t fb_e5m2_small[8] = {0, -16 * 128, -15 * 128, -15 * 128 + 64};

/* bf16 or fp16 to and from an integer of the same order, with -0 below +0; infinities and NaN are
 * outside of the rest. */
FB_INLINE uint16_t fb_order_flip(int16_t v)
{
    return (uint16_t)(v < 0 ? v ^ 0x7fff : v);
}

/* What the coding of a group needs besides its elements. */
struct fb_group_plan {
    uint32_t scale; /* fp8: at least FB_SCALE_LOW */
    float min;      /* int8 */
    float inverse;
};

/* Plan a group and store its scale; false where the group is not plain.
 * max  largest magnitude, on bits */
FB_INLINE bool fb_fp8_plan(const struct fb_fp8 *f, enum fb_elem elem, uint16_t max,
                           struct fb_group_plan *plan, uint8_t *scale)
{
    uint32_t max_bits = fb_f32_bits(fb_elem_to_f32(elem, max));
    uint32_t s = fb_fp8_scale(f, max_bits);

    *scale = (uint8_t)s;
    plan->scale = max_bits ? s : FB_SCALE_LOW; /* any scale gives zeros their codes */
    return max_bits < FB_F32_INF && plan->scale >= FB_SCALE_LOW && !fb_fp8_on_edge(elem, max_bits);
}

/* lo, hi  smallest and largest element as fb_order_flip orders them. Not plain are also groups so
 * large that codes are limited, or that the minimum is rounded up: then none needs clamping. */
FB_INLINE bool fb_int8_plan(enum fb_elem elem, int16_t lo, int16_t hi, struct fb_group_plan *plan,
                            uint8_t *scale)
{
    const int16_t inf = elem == FB_ELEM_BF16 ? 0x7f80 : 0x7c00;
    const int16_t edge = elem == FB_ELEM_BF16 ? 0x7f00 : 0x7800;
    float least = fb_elem_to_f32(elem, fb_order_flip(lo));
    struct fb_int8_scale s;

    if (hi >= edge || lo <= ~inf ||
        !fb_int8_scale_init(&s, elem, least, fb_elem_to_f32(elem, fb_order_flip(hi))) ||
        s.min > least) {
        return false;
    }
    fb_int8_scale_store(&s, scale);
    plan->min = s.min;
    plan->inverse = s.inverse;
    return true;
}

/* Zero, or in [2^-119, infinity): as bf16, a multiple of 2^-126. */
FB_INLINE bool fb_is_plain(float v)
{
    uint32_t bits = fb_f32_bits(v) & FB_F32_ABS;

    return bits == 0 || (bits >= 8u << 23 && bits < FB_F32_INF);
}

/* Whether all values of a group are zero, normal or infinite as fp32 and as bf16: they are sums of
 * multiples of 2^-126. */
FB_INLINE bool fb_int8_scale_plain(const struct fb_int8_scale *s)
{
    return fb_is_plain(s->min) && fb_is_plain(s->step);
}

/* 16 rows of 8 columns to 8 rows of 16. Lane 0 takes source rows 0..7, lane 1 rows 8..15, so that
 * three rounds of unpacking within lanes leave whole destination rows. */
FB_INLINE void fb_transpose_16x8(const uint16_t *src, int64_t src_stride, uint16_t *dst,
                                 int64_t dst_stride, bool stream)
{
    __m256i a[8];
    __m256i b[8];

#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m128i low = _mm_loadu_si128((const __m128i *)(src + i * src_stride));
        __m128i high = _mm_loadu_si128((const __m128i *)(src + (i + 8) * src_stride));

        a[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) {
        b[2 * i] = _mm256_unpacklo_epi16(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm256_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 2; i++) {
#pragma GCC unroll 8
        for (int j = 0; j < 2; j++) {
            a[4 * i + 2 * j] = _mm256_unpacklo_epi32(b[4 * i + j], b[4 * i + j + 2]);
            a[4 * i + 2 * j + 1] = _mm256_unpackhi_epi32(b[4 * i + j], b[4 * i + j + 2]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) {
        b[2 * i] = _mm256_unpacklo_epi64(a[i], a[i + 4]);
        b[2 * i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 4]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m256i *row = (__m256i *)(dst + i * dst_stride);

        if (stream) {
            _mm256_stream_si256(row, b[i]);
        } else {
            _mm256_storeu_si256(row, b[i]);
        }
    }
}

/* Streams only where the destination's rows follow each other, since lines written by halves at
 * different times are slower past the cache than through it. */
FB_INLINE void fb_transpose_256(const uint16_t *src, int64_t src_stride, uint32_t rows,
                                uint32_t cols, uint16_t *dst, int64_t dst_stride, bool stream)
{
    uint32_t whole_rows = rows & ~15u;
    uint32_t whole_cols = cols & ~7u;

    stream = stream && dst_stride == 16 && (uintptr_t)dst % 64 == 0;
    for (uint32_t c = 0; c < whole_cols; c += 8) {
        for (uint32_t r = 0; r < whole_rows; r += 16) {
            const uint16_t *from = src + r * src_stride + c;
            uint16_t *to = dst + c * dst_stride + r;

            if (stream) {
                fb_transpose_16x8(from, src_stride, to, dst_stride, true);
            } else {
                fb_transpose_16x8(from, src_stride, to, dst_stride, false);
            }
        }
    }
    if (whole_rows < rows) {
        fb_ref_transpose(src + whole_rows * src_stride, src_stride, rows - whole_rows, cols,
                         dst + whole_rows, dst_stride, false);
    }
    if (whole_cols < cols) {
        fb_ref_transpose(src + whole_cols, src_stride, whole_rows, cols - whole_cols,
                         dst + whole_cols * dst_stride, dst_stride, false);
    }
}

FB_INLINE uint64_t fb_add_lanes(__m256i v)
{
    uint64_t lanes[4];

    _mm256_storeu_si256((__m256i *)lanes, v);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

/* Head or tail of a range that does not fill a line. */
static inline uint64_t fb_sum_part(uint8_t *dst, const uint8_t *src, size_t bytes, uint64_t offset)
{
    if (dst) {
        memcpy(dst, src, bytes);
    }
    return fb_sum_ref(src, bytes, offset);
}

/* Sum whole lines within one lap and copy them to dst, if there is one.
 * keys  [bytes / 4], aligned to a line
 * lap   what to add to each of them */
typedef uint64_t fb_sum_lines(uint8_t *dst, const uint8_t *src, size_t bytes, const uint32_t *keys,
                              uint32_t lap, bool stream);

/* sum_copy of struct fb_kernels on top of sum_lines. */
FB_INLINE uint64_t fb_sum_copy_lines(fb_sum_lines *sum_lines, uint8_t *dst, const uint8_t *src,
                                     size_t bytes, uint64_t offset)
{
    size_t done = -offset % FB_LINE_BYTES;

    done = done < bytes ? done : bytes;
    uint64_t sum = fb_sum_part(dst, src, done, offset);

    while (bytes - done >= FB_LINE_BYTES) {
        uint64_t at = offset + done;
        size_t left = (bytes - done) & -(size_t)FB_LINE_BYTES;
        size_t lap_left = FB_SUM_LAP_BYTES - at % FB_SUM_LAP_BYTES;
        size_t n = left < lap_left ? left : lap_left;
        const uint32_t *keys = fb_sum_table + at / 4 % FB_SUM_LAP_WORDS;
        uint32_t lap = fb_sum_lap_key(at / FB_SUM_LAP_BYTES);

        if (!dst) {
            sum += sum_lines(NULL, src + done, n, keys, lap, false);
        } else if ((uintptr_t)(dst + done) % FB_LINE_BYTES == 0) {
            sum += sum_lines(dst + done, src + done, n, keys, lap, true);
        } else {
            sum += sum_lines(dst + done, src + done, n, keys, lap, false);
        }
        done += n;
    }
    return sum + fb_sum_part(dst ? dst + done : NULL, src + done, bytes - done, offset + done);
}

/* Parts of the coding of one group, inlined into the loops below. */
typedef bool fb_plan_group(const uint16_t *x, uint32_t n, struct fb_group_plan *plan,
                           uint8_t *scale);
typedef void fb_encode_group(const uint16_t *x, uint32_t n, const struct fb_group_plan *plan,
                             uint8_t *codes);
typedef bool fb_decode_group(const uint8_t *codes, const uint8_t *scale, uint32_t n, uint16_t *x,
                             bool stream);

/* Walks the groups of rows. */
struct fb_group_cursor {
    const struct fb_row_format *format;
    const uint16_t *row;
    int64_t stride;
    uint32_t first; /* element of the row */
    uint32_t rows_done;
};

FB_INLINE void fb_group_next(struct fb_group_cursor *c)
{
    c->first += c->format->group;
    if (c->first >= c->format->row_elems) {
        c->first = 0;
        c->row += c->stride;
        c->rows_done++;
    }
}

/* In two sweeps over a few groups at a time: planning waits for memory, for reductions across lanes
 * and for divisions, of many groups at once; encoding then finds everything at hand. */
FB_INLINE uint32_t fb_encode_rows(fb_plan_group *plan, fb_encode_group *encode,
                                  const struct fb_row_format *f, const uint16_t *src,
                                  int64_t src_stride, uint32_t rows, uint8_t *codes,
                                  uint8_t *scales)
{
    struct fb_group_cursor ahead = {.format = f, .row = src, .stride = src_stride};
    struct fb_group_cursor at = ahead;
    struct fb_group_plan plans[FB_GROUPS_AHEAD];
    bool plain = true;

    while (plain && at.rows_done < rows) {
        uint32_t n = 0;

        while (n < FB_GROUPS_AHEAD && ahead.rows_done < rows) {
            plain =
                plan(ahead.row + ahead.first, fb_group_elems(f, ahead.first), &plans[n], scales);
            if (!plain) {
                break;
            }
            scales += f->scale_bytes;
            fb_group_next(&ahead);
            n++;
        }
        for (uint32_t i = 0; i < n; i++) {
            uint32_t elems = fb_group_elems(f, at.first);

            encode(at.row + at.first, elems, &plans[i], codes);
            codes += elems;
            fb_group_next(&at);
        }
    }
    return at.rows_done;
}

FB_INLINE uint32_t fb_decode_rows(fb_decode_group *decode, const struct fb_row_format *f,
                                  const uint8_t *codes, const uint8_t *scales, uint32_t rows,
                                  uint16_t *dst, int64_t dst_stride, bool stream)
{
    for (uint32_t r = 0; r < rows; r++) {
        uint16_t *row = dst + r * dst_stride;

        for (uint32_t i = 0; i < f->row_elems; i += f->group) {
            if (!decode(codes + i, scales, fb_group_elems(f, i), row + i, stream)) {
                return r;
            }
            scales += f->scale_bytes;
        }
        codes += f->row_elems;
    }
    return rows;
}

/* Make the functions that go into struct fb_kernels from the file's
 *   fp8_plan(format, elem, x, n, plan, scale), fp8_encode(format, elem, x, n, plan, codes),
 *   fp8_decode(format, elem, codes, scale, n, x, stream), and
 *   int8_plan, int8_encode, int8_decode, which lack the format. */
#define FB_ROW_OPS(name, plan_call, encode_call, decode_call)                                   \
    FB_INLINE bool plan_group_##name(const uint16_t *x, uint32_t n, struct fb_group_plan *plan, \
                                     uint8_t *scale)                                            \
    {                                                                                           \
        return plan_call;                                                                       \
    }                                                                                           \
    FB_INLINE void encode_group_##name(const uint16_t *x, uint32_t n,                           \
                                       const struct fb_group_plan *plan, uint8_t *codes)        \
    {                                                                                           \
        encode_call;                                                                            \
    }                                                                                           \
    FB_INLINE bool decode_group_##name(const uint8_t *codes, const uint8_t *scale, uint32_t n,  \
                                       uint16_t *x, bool stream)                                \
    {                                                                                           \
        return decode_call;                                                                     \
    }                                                                                           \
    static uint32_t encode_##name(const struct fb_row_format *f, const uint16_t *src,           \
                                  int64_t src_stride, uint32_t rows, uint8_t *codes,            \
                                  uint8_t *scales)                                              \
    {                                                                                           \
        return fb_encode_rows(plan_group_##name, encode_group_##name, f, src, src_stride, rows, \
                              codes, scales);                                                   \
    }                                                                                           \
    static uint32_t decode_##name(const struct fb_row_format *f, const uint8_t *codes,          \
                                  const uint8_t *scales, uint32_t rows, uint16_t *dst,          \
                                  int64_t dst_stride, bool stream)                              \
    {                                                                                           \
        return fb_decode_rows(decode_group_##name, f, codes, scales, rows, dst, dst_stride,     \
                              stream);                                                          \
    }
#define FB_FP8_OPS(name, format, elem)                          \
    FB_ROW_OPS(name, fp8_plan(format, elem, x, n, plan, scale), \
               fp8_encode(format, elem, x, n, plan, codes),     \
               fp8_decode(format, elem, codes, scale, n, x, stream))
#define FB_INT8_OPS(name, elem)                                                                \
    FB_ROW_OPS(name, int8_plan(elem, x, n, plan, scale), int8_encode(elem, x, n, plan, codes), \
               int8_decode(elem, codes, scale, n, x, stream))

#define FB_DEFINE_ROW_OPS                         \
    FB_FP8_OPS(e4m3_bf16, &fb_e4m3, FB_ELEM_BF16) \
    FB_FP8_OPS(e4m3_fp16, &fb_e4m3, FB_ELEM_FP16) \
    FB_FP8_OPS(e5m2_bf16, &fb_e5m2, FB_ELEM_BF16) \
    FB_FP8_OPS(e5m2_fp16, &fb_e5m2, FB_ELEM_FP16) \
    FB_INT8_OPS(int8_bf16, FB_ELEM_BF16)          \
    FB_INT8_OPS(int8_fp16, FB_ELEM_FP16)

#define FB_ROW_OPS_TABLE                              \
    .encode = {{encode_e4m3_bf16, encode_e4m3_fp16},  \
               {encode_e5m2_bf16, encode_e5m2_fp16},  \
               {encode_int8_bf16, encode_int8_fp16}}, \
    .decode = {{decode_e4m3_bf16, decode_e4m3_fp16},  \
               {decode_e5m2_bf16, decode_e5m2_fp16},  \
               {decode_int8_bf16, decode_int8_fp16}}

#endif
