/* Codecs on the CPU: engine rows to and from the segments of a block.
 *
 * A segment is all rows of one head and one layer in a page (proto/block.h). Encoding gathers an
 * engine's rows, quantizes, writes the segment and its sum; decoding checks the segment's sum
 * first and scatters only what is right. Every implementation gives the same bits as the scalar
 * reference; docs/formats.md, "Codecs", defines them operation by operation. Functions here keep
 * no state, may run on any thread, and save and restore the caller's floating-point environment. */
#ifndef FB_KERNELS_CODEC_H
#define FB_KERNELS_CODEC_H

#include "proto/block.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One section of one layer in an engine's paged cache. Element (block b, token t, head h,
 * channel c) is at base + elem_bytes * (b*block + t*token + h*head + c*channel). Strides are in
 * elements and may have any sign. State rows: one row a block, the token stride is not used. */
struct fb_paged_view {
    void *base;
    int64_t block_stride;
    int64_t token_stride;
    int64_t head_stride;
    int64_t channel_stride;
};

/* Where a page's tokens are: token t of the page is token (first_token + t) mod block_tokens of
 * engine block block_ids[(first_token + t) / block_tokens]. State rows are in the block of the
 * page's last token. A negative id is a null block: refused, never gathered or written. */
struct fb_token_map {
    const int64_t *block_ids; /* [block_count] */
    uint64_t block_count;
    uint64_t first_token;
    uint32_t block_tokens;
};

/* An implementation: chosen once, by what the processor has. */
struct fb_kernels;

enum fb_kernels_isa {
    FB_KERNELS_REF = 0,
    FB_KERNELS_AVX2 = 1,
    FB_KERNELS_AVX512 = 2,
};

/* The fastest implementation this processor runs; never NULL. */
const struct fb_kernels *fb_kernels_best(void);

/* A given implementation, or NULL where the processor lacks it. */
const struct fb_kernels *fb_kernels_get(enum fb_kernels_isa isa);

const char *fb_kernels_name(const struct fb_kernels *k);

/* Encode one segment.
 * views    [l->section_count] of this layer, element types as in the sections; borrowed. Entries
 *          of sections that do not cover the layer are not read.
 * head     head index within the views
 * seed     fb_sum_seed(key, plane, layer)
 * segment  the segment's bytes in the block, 128-aligned; written whole, with padding and sum
 * returns  FB_OK | FB_EINVAL (null block, or the map does not cover the page)
 *          | FB_ENONFINITE (ret_bad_rows of them; the segment must not be committed)
 * error    rounding to nearest even throughout; bounds in docs/formats.md */
enum fb_status fb_segment_encode(const struct fb_kernels *k, const struct fb_layout *l,
                                 uint32_t layer, uint32_t head, const struct fb_paged_view *views,
                                 const struct fb_token_map *map, uint64_t seed, uint8_t *segment,
                                 uint64_t *ret_sum, uint64_t *ret_bad_rows);

/* Check one segment's sum and scatter its tokens [token_first, token_first + token_count).
 * Nothing is written unless the sum is right. State sections are written when the range reaches
 * the page's last token. map names the whole page; only blocks of the range must not be null.
 * returns  FB_OK | FB_EINVAL | FB_ECORRUPT; ret_sum is the segment's sum when FB_OK */
enum fb_status fb_segment_decode(const struct fb_kernels *k, const struct fb_layout *l,
                                 uint32_t layer, uint32_t head, const struct fb_paged_view *views,
                                 const struct fb_token_map *map, uint32_t token_first,
                                 uint32_t token_count, uint64_t seed, const uint8_t *segment,
                                 uint64_t *ret_sum);

/* Check one segment: computed sum against the stored one.
 * returns FB_OK | FB_ECORRUPT; ret_sum is the computed sum in both cases */
enum fb_status fb_segment_check(const struct fb_kernels *k, const struct fb_layout *l,
                                uint32_t layer, uint64_t seed, const uint8_t *segment,
                                uint64_t *ret_sum);

/* Check all segments of planes [plane_first, plane_first + plane_count) of a block against their
 * stored sums and the header's plane sums. The header itself must have been checked.
 * returns FB_OK | FB_ECORRUPT */
enum fb_status fb_block_check(const struct fb_kernels *k, const struct fb_layout *l,
                              const uint8_t *block, uint32_t plane_first, uint32_t plane_count);

/* Copy bytes and return their sum (no seed), as fb_sum_ref; for writers that fill raw segments
 * themselves. dst may be NULL: sum only. */
uint64_t fb_sum_copy(const struct fb_kernels *k, void *dst, const void *src, size_t bytes,
                     uint64_t offset);

#ifdef __cplusplus
}
#endif
#endif
