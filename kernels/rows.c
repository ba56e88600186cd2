/* Rows of groups, and the choice of an implementation. Stateless; any thread. */
#include "kernels/codec_ref.h"

#include <string.h>

void fb_row_format_init(struct fb_row_format *f, const struct fb_kernels *k,
                        const struct fb_section *s)
{
    uint32_t codec = s->codec - FB_CODEC_FP8_E4M3;
    uint32_t elem = s->elem - FB_ELEM_BF16;

    f->codec = s->codec;
    f->elem = s->elem;
    f->encode = k->encode[codec][elem];
    f->decode = k->decode[codec][elem];
    f->row_elems = s->row_elems;
    f->group = s->group && s->group < s->row_elems ? s->group : s->row_elems;
    f->scale_bytes = s->codec == FB_CODEC_INT8 ? 4 : 1;
    f->row_scale_bytes = (f->row_elems + f->group - 1) / f->group * f->scale_bytes;
}

static bool encode_any(const struct fb_row_format *f, const uint16_t *x, uint8_t *codes,
                       uint8_t *scale)
{
    for (uint32_t i = 0; i < f->row_elems; i += f->group) {
        if (!fb_ref_encode(f->codec, f->elem, x + i, fb_group_elems(f, i), codes + i, scale)) {
            return false;
        }
        scale += f->scale_bytes;
    }
    return true;
}

static void decode_any(const struct fb_row_format *f, const uint8_t *codes, const uint8_t *scale,
                       uint16_t *x)
{
    for (uint32_t i = 0; i < f->row_elems; i += f->group) {
        fb_ref_decode(f->codec, f->elem, codes + i, scale, fb_group_elems(f, i), x + i);
        scale += f->scale_bytes;
    }
}

uint32_t fb_rows_encode(const struct fb_row_format *f, const uint16_t *src, int64_t src_stride,
                        uint32_t rows, uint8_t *codes, uint8_t *scales)
{
    uint32_t bad = 0;
    uint32_t r = 0;

    while (true) {
        if (f->encode) {
            r += f->encode(f, src + r * src_stride, src_stride, rows - r,
                           codes + (size_t)r * f->row_elems,
                           scales + (size_t)r * f->row_scale_bytes);
        }
        if (r == rows) {
            return bad;
        }
        uint8_t *row_codes = codes + (size_t)r * f->row_elems;
        uint8_t *row_scales = scales + (size_t)r * f->row_scale_bytes;

        if (!encode_any(f, src + r * src_stride, row_codes, row_scales)) {
            memset(row_codes, 0, f->row_elems);
            memset(row_scales, 0, f->row_scale_bytes);
            bad++;
        }
        r++;
    }
}

void fb_rows_decode(const struct fb_row_format *f, const uint8_t *codes, const uint8_t *scales,
                    uint32_t rows, uint16_t *dst, int64_t dst_stride, bool stream)
{
    uint32_t r = 0;

    while (true) {
        if (f->decode) {
            r += f->decode(f, codes + (size_t)r * f->row_elems,
                           scales + (size_t)r * f->row_scale_bytes, rows - r, dst + r * dst_stride,
                           dst_stride, stream);
        }
        if (r == rows) {
            return;
        }
        decode_any(f, codes + (size_t)r * f->row_elems, scales + (size_t)r * f->row_scale_bytes,
                   dst + r * dst_stride);
        r++;
    }
}

#if defined(__x86_64__)
/* F16C is older than AVX2 and in every processor that has it; not all compilers know its name, and
 * asking the processor itself is slow in virtual machines. */
static bool have_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static bool have_avx512(void)
{
    return have_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("avx512bf16");
}
#endif

const struct fb_kernels *fb_kernels_get(enum fb_kernels_isa isa)
{
    switch (isa) {
    case FB_KERNELS_REF: return &fb_kernels_ref;
#if defined(__x86_64__)
    case FB_KERNELS_AVX2: return have_avx2() ? &fb_kernels_avx2 : NULL;
    case FB_KERNELS_AVX512: return have_avx512() ? &fb_kernels_avx512 : NULL;
#endif
    default: return NULL;
    }
}

const struct fb_kernels *fb_kernels_best(void)
{
    const struct fb_kernels *k = fb_kernels_get(FB_KERNELS_AVX512);

    if (!k) {
        k = fb_kernels_get(FB_KERNELS_AVX2);
    }
    return k ? k : &fb_kernels_ref;
}

const char *fb_kernels_name(const struct fb_kernels *k)
{
    return k->name;
}
