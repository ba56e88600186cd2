/* Codecs with AVX2, FMA and F16C: bit-identical to kernels/codec_ref.c, which gets groups that are
 * not a multiple of 16 and the rare ones that codec_avx512.c gives it. Without shifts by lane in 16
 * bits, encoding works in fp32 throughout.
 * Stateless; any thread; built with its own flags, run only where the processor has them. */
#include "kernels/codec_x86.h"

#define LANES 16u /* elements of 16 bits */

FB_INLINE __m256i load(const uint16_t *x)
{
    return _mm256_loadu_si256((const __m256i *)x);
}

FB_INLINE __m256i load_codes(const uint8_t *codes)
{
    return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)codes));
}

FB_INLINE void store_row(uint16_t *x, __m256i v, bool stream)
{
    if (stream && (uintptr_t)x % sizeof(v) == 0) {
        _mm256_stream_si256((__m256i *)x, v);
    } else {
        _mm256_storeu_si256((__m256i *)x, v);
    }
}

FB_INLINE uint16_t min_epu16(__m256i v)
{
    __m128i a = _mm_min_epu16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));

    return (uint16_t)_mm_cvtsi128_si32(_mm_minpos_epu16(a));
}

/* 16 elements as fp32, in two halves whose order is that of narrow(): bf16 is widened in place,
 * even and odd elements apart. */
FB_INLINE void widen(enum fb_elem elem, __m256i v, __m256 *ret_a, __m256 *ret_b)
{
    if (elem == FB_ELEM_BF16) {
        *ret_a = _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
        *ret_b = _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32((int)0xffff0000)));
    } else {
        *ret_a = _mm256_cvtph_ps(_mm256_castsi256_si128(v));
        *ret_b = _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1));
    }
}

/* 16 codes in 32-bit lanes to bytes. */
FB_INLINE __m128i narrow(enum fb_elem elem, __m256i a, __m256i b)
{
    __m256i words = elem == FB_ELEM_BF16
                        ? _mm256_or_si256(a, _mm256_slli_epi32(b, 16))
                        : _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);

    return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

/* Largest magnitude of a group, on bits. */
FB_INLINE uint16_t group_max(const uint16_t *x, uint32_t n)
{
    const __m256i sign = _mm256_set1_epi16((short)0x8000);
    __m256i max = sign;

    for (uint32_t i = 0; i + LANES <= n; i += LANES) {
        max = _mm256_max_epu16(max, _mm256_or_si256(load(x + i), sign));
    }
    return (uint16_t)~min_epu16(_mm256_xor_si256(max, _mm256_set1_epi16(-1))) & 0x7fff;
}

/* 8 scaled fp32 to fp8 codes: adding 2^(e + 23 - mantissa_bits) to a value of exponent e leaves
 * it rounded to mantissa_bits, and the difference of the bits is its mantissa as an integer. */
FB_INLINE __m256i fp8_codes(const struct fb_fp8 *f, __m256 y)
{
    const int drop = 23 - f->mantissa_bits;
    const __m256i least = _mm256_set1_epi32((128 - f->bias) << 23);
    __m256i bits = _mm256_castps_si256(y);
    __m256i mag = _mm256_and_si256(bits, _mm256_set1_epi32(FB_F32_ABS));
    __m256i e = _mm256_and_si256(mag, _mm256_set1_epi32(FB_F32_INF));

    e = _mm256_max_epi32(e, least);
    __m256i magic = _mm256_add_epi32(e, _mm256_set1_epi32(drop << 23));
    __m256 sum = _mm256_add_ps(_mm256_castsi256_ps(mag), _mm256_castsi256_ps(magic));
    __m256i mantissa = _mm256_sub_epi32(_mm256_castps_si256(sum), magic);
    __m256i exponent = _mm256_srli_epi32(_mm256_sub_epi32(e, least), drop);
    __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));

    return _mm256_or_si256(_mm256_add_epi32(mantissa, exponent), sign);
}

FB_INLINE bool fp8_plan(const struct fb_fp8 *f, enum fb_elem elem, const uint16_t *x, uint32_t n,
                        struct fb_group_plan *plan, uint8_t *scale)
{
    return n % LANES == 0 && fb_fp8_plan(f, elem, group_max(x, n), plan, scale);
}

FB_INLINE void fp8_encode(const struct fb_fp8 *f, enum fb_elem elem, const uint16_t *x, uint32_t n,
                          const struct fb_group_plan *plan, uint8_t *codes)
{
    __m256 factor = _mm256_set1_ps(fb_pow2_f32(127 - (int32_t)plan->scale));

    for (uint32_t i = 0; i < n; i += LANES) {
        __m256 a, b;

        widen(elem, load(x + i), &a, &b);
        __m128i c = narrow(elem, fp8_codes(f, _mm256_mul_ps(a, factor)),
                           fp8_codes(f, _mm256_mul_ps(b, factor)));

        _mm_storeu_si128((__m128i *)(codes + i), c);
    }
}

/* Whether the fast path has the group: no NaN or infinity, a scale in range or only zeros, which
 * any scale in range decodes. ret_scale is the scale to decode with. */
FB_INLINE bool fp8_is_plain(const struct fb_fp8 *f, const uint8_t *codes, uint32_t n,
                            uint32_t *ret_scale)
{
    const __m128i abs = _mm_set1_epi8(0x7f);
    __m128i max = _mm_setzero_si128();

    if (n % LANES) {
        return false;
    }
    for (uint32_t i = 0; i < n; i += LANES) {
        max = _mm_max_epu8(max, _mm_and_si128(_mm_loadu_si128((const __m128i *)(codes + i)), abs));
    }
    if (_mm_test_all_zeros(max, max) && *ret_scale < FB_SCALE_LOW) {
        *ret_scale = FB_SCALE_LOW;
    }
    return !_mm_movemask_epi8(_mm_cmpgt_epi8(max, _mm_set1_epi8((char)(f->nan - 1)))) &&
           *ret_scale >= FB_SCALE_LOW && *ret_scale <= FB_SCALE_HIGH;
}

/* 16 bf16 to fp16. */
FB_INLINE __m256i fp16_of_bf16(__m256i v)
{
    __m256i low = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(v)), 16);
    __m256i high = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(v, 1)), 16);
    __m128i a = _mm256_cvtps_ph(_mm256_castsi256_ps(low), _MM_FROUND_TO_NEAREST_INT);
    __m128i b = _mm256_cvtps_ph(_mm256_castsi256_ps(high), _MM_FROUND_TO_NEAREST_INT);

    return _mm256_set_m128i(b, a);
}

/* 16 fp8 codes to bf16.
 * rebias  (s - bias) << 7
 * small   bf16 of the codes below the first normal one, at this scale */
FB_INLINE __m256i fp8_values(const struct fb_fp8 *f, __m256i c, __m256i rebias, __m256i small)
{
    __m256i mag = _mm256_and_si256(c, _mm256_set1_epi16(0x7f));
    __m256i is_small = _mm256_cmpgt_epi16(_mm256_set1_epi16((short)(1 << f->mantissa_bits)), mag);
    __m256i normal = _mm256_add_epi16(_mm256_slli_epi16(mag, 7 - f->mantissa_bits), rebias);
    /* bytes 2 * mag and 2 * mag + 1 of the table */
    __m256i at = _mm256_add_epi16(_mm256_mullo_epi16(mag, _mm256_set1_epi16(0x0202)),
                                  _mm256_set1_epi16(0x0100));
    __m256i v = _mm256_blendv_epi8(normal, _mm256_shuffle_epi8(small, at), is_small);
    __m256i sign = _mm256_and_si256(_mm256_slli_epi16(c, 8), _mm256_set1_epi16((short)0x8000));

    return _mm256_or_si256(v, sign);
}

FB_INLINE bool fp8_decode(const struct fb_fp8 *f, enum fb_elem elem, const uint8_t *codes,
                          const uint8_t *scale, uint32_t n, uint16_t *x, bool stream)
{
    uint32_t s = *scale;

    if (!fp8_is_plain(f, codes, n, &s)) {
        return false;
    }
    const int16_t *table = f->mantissa_bits == 3 ? fb_e4m3_small : fb_e5m2_small;
    __m128i small =
        _mm_add_epi16(_mm_loadu_si128((const __m128i *)table), _mm_set1_epi16((short)(s << 7)));
    __m256i small2 = _mm256_broadcastsi128_si256(_mm_insert_epi16(small, 0, 0));
    __m256i rebias = _mm256_set1_epi16((short)((s - (uint32_t)f->bias) << 7));

    for (uint32_t i = 0; i < n; i += LANES) {
        __m256i v = fp8_values(f, load_codes(codes + i), rebias, small2);

        store_row(x + i, elem == FB_ELEM_BF16 ? v : fp16_of_bf16(v), stream);
    }
    return true;
}

FB_INLINE bool int8_plan(enum fb_elem elem, const uint16_t *x, uint32_t n,
                         struct fb_group_plan *plan, uint8_t *scale)
{
    __m256i lo = _mm256_set1_epi16(INT16_MAX);
    __m256i hi = _mm256_set1_epi16(INT16_MIN);

    for (uint32_t i = 0; i + LANES <= n; i += LANES) {
        __m256i v = load(x + i);

        v = _mm256_xor_si256(v, _mm256_srli_epi16(_mm256_srai_epi16(v, 15), 1));
        lo = _mm256_min_epi16(lo, v);
        hi = _mm256_max_epi16(hi, v);
    }
    /* as unsigned minima: of the lower bound with its sign turned, of the upper's complement */
    uint16_t least = min_epu16(_mm256_xor_si256(lo, _mm256_set1_epi16((short)0x8000)));
    uint16_t most = min_epu16(_mm256_xor_si256(hi, _mm256_set1_epi16(0x7fff)));

    return n % LANES == 0 &&
           fb_int8_plan(elem, (int16_t)(least ^ 0x8000), (int16_t)(most ^ 0x7fff), plan, scale);
}

FB_INLINE __m256i int8_quantize(__m256 x, __m256 min, __m256 inverse)
{
    __m256 y = _mm256_mul_ps(_mm256_sub_ps(x, min), inverse);

    return _mm256_cvtps_epi32(y);
}

FB_INLINE void int8_encode(enum fb_elem elem, const uint16_t *x, uint32_t n,
                           const struct fb_group_plan *plan, uint8_t *codes)
{
    __m256 min = _mm256_set1_ps(plan->min);
    __m256 inverse = _mm256_set1_ps(plan->inverse);

    for (uint32_t i = 0; i < n; i += LANES) {
        __m256 a, b;

        widen(elem, load(x + i), &a, &b);
        __m128i c = narrow(elem, int8_quantize(a, min, inverse), int8_quantize(b, min, inverse));

        _mm_storeu_si128((__m128i *)(codes + i), c);
    }
}

/* fp32, no NaN, to bf16 in the upper half of each lane; the lower is left over. */
FB_INLINE __m256i round_to_bf16(__m256 v)
{
    __m256i bits = _mm256_castps_si256(v);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));

    return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
}

FB_INLINE __m256i int8_values(enum fb_elem elem, __m256i c, __m256 step, __m256 min)
{
    if (elem == FB_ELEM_BF16) {
        __m256i even = _mm256_and_si256(c, _mm256_set1_epi32(0xffff));
        __m256i odd = _mm256_srli_epi32(c, 16);

        even = round_to_bf16(_mm256_fmadd_ps(_mm256_cvtepi32_ps(even), step, min));
        odd = round_to_bf16(_mm256_fmadd_ps(_mm256_cvtepi32_ps(odd), step, min));
        return _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa);
    }
    __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(c)));
    __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(c, 1)));
    __m128i a = _mm256_cvtps_ph(_mm256_fmadd_ps(low, step, min), _MM_FROUND_TO_NEAREST_INT);
    __m128i b = _mm256_cvtps_ph(_mm256_fmadd_ps(high, step, min), _MM_FROUND_TO_NEAREST_INT);

    return _mm256_set_m128i(b, a);
}

FB_INLINE bool int8_decode(enum fb_elem elem, const uint8_t *codes, const uint8_t *scale,
                           uint32_t n, uint16_t *x, bool stream)
{
    struct fb_int8_scale s;

    fb_int8_scale_load(&s, scale);
    if (n % LANES || !fb_int8_scale_plain(&s)) {
        return false;
    }
    __m256 min = _mm256_set1_ps(s.min);
    __m256 step = _mm256_set1_ps(s.step);

    for (uint32_t i = 0; i < n; i += LANES) {
        store_row(x + i, int8_values(elem, load_codes(codes + i), step, min), stream);
    }
    return true;
}

FB_DEFINE_ROW_OPS

FB_INLINE __m256i sum_half_line(uint8_t *dst, const uint8_t *src, const uint32_t *keys, __m256i lap,
                                bool stream)
{
    __m256i w = _mm256_loadu_si256((const __m256i *)src);
    __m256i key = _mm256_load_si256((const __m256i *)keys);
    __m256i a = _mm256_add_epi32(w, _mm256_add_epi32(key, lap));

    if (dst && stream) {
        _mm256_stream_si256((__m256i *)dst, w);
    } else if (dst) {
        _mm256_storeu_si256((__m256i *)dst, w);
    }
    return _mm256_mul_epu32(a, _mm256_srli_epi64(a, 32));
}

FB_INLINE uint64_t sum_lines(uint8_t *dst, const uint8_t *src, size_t bytes, const uint32_t *keys,
                             uint32_t lap, bool stream)
{
    __m256i add = _mm256_set1_epi32((int)lap);
    __m256i sum = _mm256_setzero_si256();

    for (size_t i = 0; i < bytes; i += FB_LINE_BYTES) {
        uint8_t *to = dst ? dst + i : NULL;
        __m256i p = sum_half_line(to, src + i, keys + i / 4, add, stream);
        __m256i q = sum_half_line(to ? to + 32 : NULL, src + i + 32, keys + i / 4 + 8, add, stream);

        if (!dst) {
            _mm_prefetch((const char *)src + i + FB_SUM_AHEAD, _MM_HINT_T1);
        }
        sum = _mm256_add_epi64(sum, _mm256_add_epi64(p, q));
    }
    return fb_add_lanes(sum);
}

static uint64_t sum_copy(void *dst, const void *src, size_t bytes, uint64_t offset)
{
    return fb_sum_copy_lines(sum_lines, dst, src, bytes, offset);
}

static void stream_copy(void *dst, const void *src, size_t bytes)
{
    size_t i = 0;

    if ((uintptr_t)dst % sizeof(__m256i) == 0) {
        for (; i + sizeof(__m256i) <= bytes; i += sizeof(__m256i)) {
            _mm256_stream_si256((__m256i *)((uint8_t *)dst + i),
                                _mm256_loadu_si256((const __m256i *)((const uint8_t *)src + i)));
        }
    }
    memcpy((uint8_t *)dst + i, (const uint8_t *)src + i, bytes - i);
}

const struct fb_kernels fb_kernels_avx2 = {
    .name = "avx2",
    FB_ROW_OPS_TABLE,
    .sum_copy = sum_copy,
    .stream_copy = stream_copy,
    .transpose = fb_transpose_256,
};
