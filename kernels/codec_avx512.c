/* Codecs with AVX-512 (F, BW, VL, VBMI, BF16: Zen 4, Sapphire Rapids and later): bit-identical to
 * kernels/codec_ref.c, which gets the groups that are too rare for a fast path: scales near the
 * ends of the exponent range, maxima at the source type's edge, codes that are NaN. bf16 to and
 * from fp8 stays in 16-bit lanes. Stateless; any thread; built with its own flags, run only where
 * the processor has them. */
#include "kernels/codec_x86.h"

#define LANES 32u /* elements of 16 bits */

/* The first n < LANES lanes. */
FB_INLINE __mmask32 first_lanes(uint32_t n)
{
    return (1u << n) - 1;
}

FB_INLINE void store_line(uint16_t *x, __m512i v, bool stream)
{
    if (stream) {
        _mm512_stream_si512((__m512i *)x, v);
    } else {
        _mm512_storeu_si512(x, v);
    }
}

FB_INLINE uint16_t min_epu16(__m512i v)
{
    __m256i a = _mm256_min_epu16(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
    __m128i b = _mm_min_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));

    return (uint16_t)_mm_cvtsi128_si32(_mm_minpos_epu16(b));
}

/* 32 elements as fp32, in two halves whose order is that of narrow(): bf16 is widened in place,
 * even and odd elements apart. */
FB_INLINE void widen(enum fb_elem elem, __m512i v, __m512 *ret_a, __m512 *ret_b)
{
    if (elem == FB_ELEM_BF16) {
        *ret_a = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
        *ret_b = _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000)));
    } else {
        *ret_a = _mm512_cvtph_ps(_mm512_castsi512_si256(v));
        *ret_b = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(v, 1));
    }
}

/* Low bytes of 32 codes in 32-bit lanes. */
FB_INLINE __m256i narrow(enum fb_elem elem, __m512i a, __m512i b)
{
    static const uint8_t in_turn[64] = {0,  64,  4,  68,  8,  72,  12, 76,  16,  80, 20,
                                        84, 24,  88, 28,  92, 32,  96, 36,  100, 40, 104,
                                        44, 108, 48, 112, 52, 116, 56, 120, 60,  124};
    static const uint8_t in_order[64] = {0,  4,  8,  12,  16,  20,  24,  28,  32,  36, 40,
                                         44, 48, 52, 56,  60,  64,  68,  72,  76,  80, 84,
                                         88, 92, 96, 100, 104, 108, 112, 116, 120, 124};
    const uint8_t *from = elem == FB_ELEM_BF16 ? in_turn : in_order;

    return _mm512_castsi512_si256(_mm512_permutex2var_epi8(a, _mm512_loadu_si512(from), b));
}

/* High bytes of 32 codes in 16-bit lanes. */
FB_INLINE __m256i narrow_high(__m512i v)
{
    static const uint8_t from[64] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                     23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                     45, 47, 49, 51, 53, 55, 57, 59, 61, 63};

    return _mm512_castsi512_si256(_mm512_permutexvar_epi8(_mm512_loadu_si512(from), v));
}

/* Largest magnitude of a group, on bits. */
FB_INLINE uint16_t group_max(const uint16_t *x, uint32_t n)
{
    const __m512i sign = _mm512_set1_epi16((short)0x8000);
    __m512i max = sign;
    uint32_t i = 0;

    for (; i + LANES <= n; i += LANES) {
        max = _mm512_max_epu16(max, _mm512_or_si512(_mm512_loadu_si512(x + i), sign));
    }
    if (i < n) {
        __m512i v = _mm512_maskz_loadu_epi16(first_lanes(n - i), x + i);

        max = _mm512_max_epu16(max, _mm512_or_si512(v, sign));
    }
    return (uint16_t)~min_epu16(_mm512_xor_si512(max, _mm512_set1_epi16(-1))) & 0x7fff;
}

/* Shift right by the lanes of `by` (at least 1), rounding to nearest even. Counts above 15 give 0;
 * half of the last place, less one, is 2^(by-1) - 1. */
FB_INLINE __m512i shift_round(__m512i v, __m512i by)
{
    const __m512i one = _mm512_set1_epi16(1);
    __m512i half =
        _mm512_srlv_epi16(_mm512_set1_epi16(0x7fff), _mm512_sub_epi16(_mm512_set1_epi16(16), by));
    __m512i odd = _mm512_and_si512(_mm512_srlv_epi16(v, by), one);

    return _mm512_srlv_epi16(_mm512_add_epi16(v, _mm512_add_epi16(half, odd)), by);
}

/* 32 bf16 to fp8 codes. The exponent and mantissa of bf16, rebiased, are those of a normal code
 * with more mantissa; below that the mantissa is shifted out further.
 * rebias  (s - bias) << 7 */
FB_INLINE __m256i fp8_codes_bf16(const struct fb_fp8 *f, __m512i x, __m512i rebias)
{
    const int drop = 7 - f->mantissa_bits;
    const __m512i one = _mm512_set1_epi16(1);
    __m512i mag = _mm512_and_si512(x, _mm512_set1_epi16(0x7fff));
    __m512i t = _mm512_sub_epi16(mag, rebias);
    __mmask32 odd = _mm512_test_epi16_mask(t, _mm512_set1_epi16((short)(1 << drop)));
    __mmask32 small = _mm512_cmplt_epi16_mask(t, _mm512_set1_epi16(128));
    __m512i code = _mm512_add_epi16(t, _mm512_set1_epi16((short)((1 << (drop - 1)) - 1)));

    code = _mm512_slli_epi16(_mm512_mask_add_epi16(code, odd, code, one), 8u - (unsigned)drop);
    if (small) {
        __m512i mantissa = _mm512_or_si512(_mm512_and_si512(mag, _mm512_set1_epi16(0x7f)),
                                           _mm512_set1_epi16(0x80));
        __m512i by =
            _mm512_sub_epi16(_mm512_set1_epi16((short)(drop + 1)), _mm512_srai_epi16(t, 7));

        code = _mm512_mask_slli_epi16(code, small, shift_round(mantissa, by), 8);
    }
    /* the sign of x, the rest of code */
    return narrow_high(_mm512_ternarylogic_epi64(_mm512_set1_epi16((short)0x8000), x, code, 0xca));
}

/* 16 scaled fp32 to fp8 codes: adding 2^(e + 23 - mantissa_bits) to a value of exponent e leaves
 * it rounded to mantissa_bits, and the difference of the bits is its mantissa as an integer. */
FB_INLINE __m512i fp8_codes_f32(const struct fb_fp8 *f, __m512 y)
{
    const int drop = 23 - f->mantissa_bits;
    const __m512i least = _mm512_set1_epi32((128 - f->bias) << 23);
    __m512i bits = _mm512_castps_si512(y);
    __m512i mag = _mm512_and_si512(bits, _mm512_set1_epi32(FB_F32_ABS));
    __m512i e = _mm512_and_si512(mag, _mm512_set1_epi32(FB_F32_INF));

    e = _mm512_max_epu32(e, least);
    __m512i magic = _mm512_add_epi32(e, _mm512_set1_epi32(drop << 23));
    __m512 sum = _mm512_add_ps(_mm512_castsi512_ps(mag), _mm512_castsi512_ps(magic));
    __m512i mantissa = _mm512_sub_epi32(_mm512_castps_si512(sum), magic);
    __m512i exponent = _mm512_srli_epi32(_mm512_sub_epi32(e, least), drop);
    __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));

    return _mm512_or_si512(_mm512_add_epi32(mantissa, exponent), sign);
}

FB_INLINE __m256i fp8_codes(const struct fb_fp8 *f, enum fb_elem elem, __m512i x, __m512i rebias,
                            __m512 factor)
{
    __m512 a, b;

    if (elem == FB_ELEM_BF16) {
        return fp8_codes_bf16(f, x, rebias);
    }

    widen(FB_ELEM_FP16, x, &a, &b);
    return narrow(FB_ELEM_FP16, fp8_codes_f32(f, _mm512_mul_ps(a, factor)),
                  fp8_codes_f32(f, _mm512_mul_ps(b, factor)));
}

FB_INLINE bool fp8_plan(const struct fb_fp8 *f, enum fb_elem elem, const uint16_t *x, uint32_t n,
                        struct fb_group_plan *plan, uint8_t *scale)
{
    return fb_fp8_plan(f, elem, group_max(x, n), plan, scale);
}

FB_INLINE void fp8_encode(const struct fb_fp8 *f, enum fb_elem elem, const uint16_t *x, uint32_t n,
                          const struct fb_group_plan *plan, uint8_t *codes)
{
    __m512i rebias = _mm512_set1_epi16((short)((plan->scale - (uint32_t)f->bias) << 7));
    __m512 factor = _mm512_set1_ps(fb_pow2_f32(127 - (int32_t)plan->scale));

    uint32_t i = 0;

    for (; i + LANES <= n; i += LANES) {
        __m256i c = fp8_codes(f, elem, _mm512_loadu_si512(x + i), rebias, factor);

        _mm256_storeu_si256((__m256i *)(codes + i), c);
    }
    if (i < n) {
        __mmask32 lanes = first_lanes(n - i);
        __m512i v = _mm512_maskz_loadu_epi16(lanes, x + i);

        _mm256_mask_storeu_epi8(codes + i, lanes, fp8_codes(f, elem, v, rebias, factor));
    }
}

/* Whether the fast path has the group: no NaN or infinity, a scale in range or only zeros, which
 * any scale in range decodes. ret_scale is the scale to decode with. */
FB_INLINE bool fp8_is_plain(const struct fb_fp8 *f, const uint8_t *codes, uint32_t n,
                            uint32_t *ret_scale)
{
    const __m512i abs = _mm512_set1_epi8(0x7f);
    __m512i max = _mm512_setzero_si512();
    uint32_t i = 0;

    for (; i + 64 <= n; i += 64) {
        max = _mm512_max_epu8(max, _mm512_and_si512(_mm512_loadu_si512(codes + i), abs));
    }
    if (i < n) {
        __m512i c = _mm512_maskz_loadu_epi8((1ull << (n - i)) - 1, codes + i);

        max = _mm512_max_epu8(max, _mm512_and_si512(c, abs));
    }
    if (*ret_scale < FB_SCALE_LOW && !_mm512_test_epi8_mask(max, max)) {
        *ret_scale = FB_SCALE_LOW;
    }
    return *ret_scale >= FB_SCALE_LOW && *ret_scale <= FB_SCALE_HIGH &&
           !_mm512_cmpge_epu8_mask(max, _mm512_set1_epi8((char)f->nan));
}

FB_INLINE __m512i fp16_of_f32(__m512 low, __m512 high)
{
    __m256i a = _mm512_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT);
    __m256i b = _mm512_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT);

    return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
}

/* 32 bf16 to fp16. */
FB_INLINE __m512i fp16_of_bf16(__m512i v)
{
    __m512i low = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(v)), 16);
    __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(v, 1)), 16);

    return fp16_of_f32(_mm512_castsi512_ps(low), _mm512_castsi512_ps(high));
}

/* 32 fp8 codes to elements.
 * rebias  (s - bias) << 7
 * small   bf16 of the codes below the first normal one, at this scale */
FB_INLINE __m512i fp8_values(const struct fb_fp8 *f, enum fb_elem elem, __m256i codes,
                             __m512i rebias, __m512i small)
{
    __m512i c = _mm512_cvtepi8_epi16(codes);
    __m512i mag = _mm512_and_si512(c, _mm512_set1_epi16(0x7f));
    __mmask32 is_small =
        _mm512_cmplt_epi16_mask(mag, _mm512_set1_epi16((short)(1 << f->mantissa_bits)));
    __m512i v = _mm512_add_epi16(_mm512_slli_epi16(mag, (unsigned)(7 - f->mantissa_bits)), rebias);

    v = _mm512_mask_permutexvar_epi16(v, is_small, mag, small);
    __m512i sign = _mm512_and_si512(c, _mm512_set1_epi16((short)0x8000));

    v = _mm512_or_si512(v, sign);
    return elem == FB_ELEM_BF16 ? v : fp16_of_bf16(v);
}

FB_INLINE bool fp8_decode(const struct fb_fp8 *f, enum fb_elem elem, const uint8_t *codes,
                          const uint8_t *scale, uint32_t n, uint16_t *x, bool stream)
{
    uint32_t s = *scale;

    if (!fp8_is_plain(f, codes, n, &s)) {
        return false;
    }
    const int16_t *table = f->mantissa_bits == 3 ? fb_e4m3_small : fb_e5m2_small;
    __m512i small = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)table));
    __m512i rebias = _mm512_set1_epi16((short)((s - (uint32_t)f->bias) << 7));

    small = _mm512_maskz_add_epi16(0xfe, small, _mm512_set1_epi16((short)(s << 7)));
    uint32_t i = 0;

    stream = stream && (uintptr_t)x % FB_LINE_BYTES == 0;
    for (; i + LANES <= n; i += LANES) {
        __m256i c = _mm256_loadu_si256((const __m256i *)(codes + i));

        store_line(x + i, fp8_values(f, elem, c, rebias, small), stream);
    }
    if (i < n) {
        __mmask32 lanes = first_lanes(n - i);
        __m256i c = _mm256_maskz_loadu_epi8(lanes, codes + i);

        _mm512_mask_storeu_epi16(x + i, lanes, fp8_values(f, elem, c, rebias, small));
    }
    return true;
}

FB_INLINE __m512i order_flip(__m512i v)
{
    /* v ^ (sign & 0x7fff) */
    return _mm512_ternarylogic_epi64(v, _mm512_srai_epi16(v, 15), _mm512_set1_epi16(0x7fff), 0x78);
}

FB_INLINE bool int8_plan(enum fb_elem elem, const uint16_t *x, uint32_t n,
                         struct fb_group_plan *plan, uint8_t *scale)
{
    __m512i lo = _mm512_set1_epi16(INT16_MAX);
    __m512i hi = _mm512_set1_epi16(INT16_MIN);

    uint32_t i = 0;

    for (; i + LANES <= n; i += LANES) {
        __m512i v = order_flip(_mm512_loadu_si512(x + i));

        lo = _mm512_min_epi16(lo, v);
        hi = _mm512_max_epi16(hi, v);
    }
    if (i < n) {
        __m512i first = _mm512_set1_epi16((short)x[0]);
        __m512i v = order_flip(_mm512_mask_loadu_epi16(first, first_lanes(n - i), x + i));

        lo = _mm512_min_epi16(lo, v);
        hi = _mm512_max_epi16(hi, v);
    }
    /* as unsigned minima: of the lower bound with its sign turned, of the upper's complement */
    uint16_t least = min_epu16(_mm512_xor_si512(lo, _mm512_set1_epi16((short)0x8000)));
    uint16_t most = min_epu16(_mm512_xor_si512(hi, _mm512_set1_epi16(0x7fff)));

    return fb_int8_plan(elem, (int16_t)(least ^ 0x8000), (int16_t)(most ^ 0x7fff), plan, scale);
}

FB_INLINE __m512i int8_quantize(__m512 x, __m512 min, __m512 inverse)
{
    __m512 y = _mm512_mul_ps(_mm512_sub_ps(x, min), inverse);

    return _mm512_cvtps_epi32(y);
}

FB_INLINE __m256i int8_codes(enum fb_elem elem, __m512i x, __m512 min, __m512 inverse)
{
    __m512 a, b;

    widen(elem, x, &a, &b);
    return narrow(elem, int8_quantize(a, min, inverse), int8_quantize(b, min, inverse));
}

FB_INLINE void int8_encode(enum fb_elem elem, const uint16_t *x, uint32_t n,
                           const struct fb_group_plan *plan, uint8_t *codes)
{
    __m512 min = _mm512_set1_ps(plan->min);
    __m512 inverse = _mm512_set1_ps(plan->inverse);

    uint32_t i = 0;

    for (; i + LANES <= n; i += LANES) {
        __m256i c = int8_codes(elem, _mm512_loadu_si512(x + i), min, inverse);

        _mm256_storeu_si256((__m256i *)(codes + i), c);
    }
    if (i < n) {
        __mmask32 lanes = first_lanes(n - i);
        __m512i v = _mm512_maskz_loadu_epi16(lanes, x + i);

        _mm256_mask_storeu_epi8(codes + i, lanes, int8_codes(elem, v, min, inverse));
    }
}

/* 32 codes to elements. Conversion to bf16 would flush subnormals; a plain scale has none. */
FB_INLINE __m512i int8_values(enum fb_elem elem, __m256i codes, __m512 step, __m512 min)
{
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm256_castsi256_si128(codes)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm256_extracti128_si256(codes, 1)));

    low = _mm512_fmadd_ps(low, step, min);
    high = _mm512_fmadd_ps(high, step, min);
    if (elem == FB_ELEM_BF16) {
        return (__m512i)_mm512_cvtne2ps_pbh(high, low);
    }
    return fp16_of_f32(low, high);
}

FB_INLINE bool int8_decode(enum fb_elem elem, const uint8_t *codes, const uint8_t *scale,
                           uint32_t n, uint16_t *x, bool stream)
{
    struct fb_int8_scale s;

    fb_int8_scale_load(&s, scale);
    if (!fb_int8_scale_plain(&s)) {
        return false;
    }
    __m512 min = _mm512_set1_ps(s.min);
    __m512 step = _mm512_set1_ps(s.step);

    uint32_t i = 0;

    stream = stream && (uintptr_t)x % FB_LINE_BYTES == 0;
    for (; i + LANES <= n; i += LANES) {
        __m256i c = _mm256_loadu_si256((const __m256i *)(codes + i));

        store_line(x + i, int8_values(elem, c, step, min), stream);
    }
    if (i < n) {
        __mmask32 lanes = first_lanes(n - i);
        __m256i c = _mm256_maskz_loadu_epi8(lanes, codes + i);

        _mm512_mask_storeu_epi16(x + i, lanes, int8_values(elem, c, step, min));
    }
    return true;
}

FB_DEFINE_ROW_OPS

FB_INLINE __m512i sum_line(uint8_t *dst, const uint8_t *src, const uint32_t *keys, __m512i lap,
                           bool stream)
{
    __m512i w = _mm512_loadu_si512(src);
    __m512i a = _mm512_add_epi32(w, _mm512_add_epi32(_mm512_load_si512(keys), lap));

    if (dst && stream) {
        _mm512_stream_si512((__m512i *)dst, w);
    } else if (dst) {
        _mm512_storeu_si512(dst, w);
    } else {
        _mm_prefetch((const char *)src + FB_SUM_AHEAD, _MM_HINT_T1);
    }
    return _mm512_mul_epu32(a, _mm512_srli_epi64(a, 32));
}

FB_INLINE uint64_t sum_lines(uint8_t *dst, const uint8_t *src, size_t bytes, const uint32_t *keys,
                             uint32_t lap, bool stream)
{
    __m512i add = _mm512_set1_epi32((int)lap);
    __m512i sum = _mm512_setzero_si512();

    for (size_t i = 0; i < bytes; i += FB_LINE_BYTES) {
        __m512i p = sum_line(dst ? dst + i : NULL, src + i, keys + i / 4, add, stream);

        sum = _mm512_add_epi64(sum, p);
    }
    return fb_add_lanes(
        _mm256_add_epi64(_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64(sum, 1)));
}

static uint64_t sum_copy(void *dst, const void *src, size_t bytes, uint64_t offset)
{
    return fb_sum_copy_lines(sum_lines, dst, src, bytes, offset);
}

static void stream_copy(void *dst, const void *src, size_t bytes)
{
    size_t i = 0;

    if ((uintptr_t)dst % FB_LINE_BYTES == 0) {
        for (; i + FB_LINE_BYTES <= bytes; i += FB_LINE_BYTES) {
            _mm512_stream_si512((__m512i *)((uint8_t *)dst + i),
                                _mm512_loadu_si512((const uint8_t *)src + i));
        }
    }
    memcpy((uint8_t *)dst + i, (const uint8_t *)src + i, bytes - i);
}

const struct fb_kernels fb_kernels_avx512 = {
    .name = "avx512",
    FB_ROW_OPS_TABLE,
    .sum_copy = sum_copy,
    .stream_copy = stream_copy,
    .transpose = fb_transpose_256,
};
