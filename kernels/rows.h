/* What an implementation of the codecs provides: the ops behind struct fb_kernels.
 *
 * Rows of a quantizing codec are coded group by group: a group is `n` elements that share a scale.
 * kernels/codec_ref.c codes any group, and defines the bits. An implementation codes rows that are
 * plain (finite, far from the ends of the exponent range) and leaves the others to it.
 * Elements are aligned to their size, nothing else is. Callers have entered fb_fpenv. Functions
 * that stream leave the fence to their caller. Stateless; any thread. */
#ifndef FB_KERNELS_ROWS_H
#define FB_KERNELS_ROWS_H

#include "kernels/codec.h"

#define FB_LINE_BYTES 64u

struct fb_row_format;

/* Encode the leading rows that are plain; returns how many. Of the row after them, codes and
 * scales may have been written.
 * src      [rows, row_elems], rows src_stride elements apart
 * codes    [rows, row_elems]
 * scales   [rows, groups, scale_bytes] */
typedef uint32_t fb_encode_plain(const struct fb_row_format *f, const uint16_t *src,
                                 int64_t src_stride, uint32_t rows, uint8_t *codes,
                                 uint8_t *scales);

/* Decode the leading rows that are plain; returns how many. stream: dst is not read soon, whole
 * lines may bypass the cache. */
typedef uint32_t fb_decode_plain(const struct fb_row_format *f, const uint8_t *codes,
                                 const uint8_t *scales, uint32_t rows, uint16_t *dst,
                                 int64_t dst_stride, bool stream);

enum {
    FB_QUANT_CODECS = FB_CODEC_INT8 - FB_CODEC_FP8_E4M3 + 1,
    FB_QUANT_ELEMS = FB_ELEM_FP16 - FB_ELEM_BF16 + 1,
};

struct fb_kernels {
    const char *name;

    /* [codec - FB_CODEC_FP8_E4M3][elem - FB_ELEM_BF16]; NULL: no row is plain */
    fb_encode_plain *encode[FB_QUANT_CODECS][FB_QUANT_ELEMS];
    fb_decode_plain *decode[FB_QUANT_CODECS][FB_QUANT_ELEMS];

    /* fb_sum_copy. A dst that is aligned to 64 is streamed to. */
    uint64_t (*sum_copy)(void *dst, const void *src, size_t bytes, uint64_t offset);

    /* Copy a row, or several that are contiguous; past the cache where dst is aligned to 64. */
    void (*stream_copy)(void *dst, const void *src, size_t bytes);

    /* dst[c * dst_stride + r] = src[r * src_stride + c], r < rows, c < cols; strides in elements.
     * stream as in fb_decode_plain. */
    void (*transpose)(const uint16_t *src, int64_t src_stride, uint32_t rows, uint32_t cols,
                      uint16_t *dst, int64_t dst_stride, bool stream);
};

/* Codec, element type and grouping of a section's rows. */
struct fb_row_format {
    enum fb_codec codec;
    enum fb_elem elem;
    fb_encode_plain *encode;
    fb_decode_plain *decode;
    uint32_t row_elems;
    uint32_t group;       /* 1..row_elems; the last group of a row may be shorter */
    uint32_t scale_bytes; /* of one group */
    uint32_t row_scale_bytes;
};

static inline uint32_t fb_group_elems(const struct fb_row_format *f, uint32_t first)
{
    uint32_t left = f->row_elems - first;

    return left < f->group ? left : f->group;
}

extern const struct fb_kernels fb_kernels_ref;
#if defined(__x86_64__)
extern const struct fb_kernels fb_kernels_avx2;
extern const struct fb_kernels fb_kernels_avx512;
#endif

/* Row format of a quantizing section. */
void fb_row_format_init(struct fb_row_format *f, const struct fb_kernels *k,
                        const struct fb_section *s);

/* Encode rows, laid out as for fb_encode_plain; returns how many of them the codec cannot carry:
 * codes and scales of those are zero. */
uint32_t fb_rows_encode(const struct fb_row_format *f, const uint16_t *src, int64_t src_stride,
                        uint32_t rows, uint8_t *codes, uint8_t *scales);

/* Decode rows, laid out as for fb_decode_plain. */
void fb_rows_decode(const struct fb_row_format *f, const uint8_t *codes, const uint8_t *scales,
                    uint32_t rows, uint16_t *dst, int64_t dst_stride, bool stream);

#endif
