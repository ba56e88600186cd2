/* The scalar reference: one group at a time, and what others use for leftovers.
 * Needs the environment of kernels/fpenv.h. Stateless; any thread. */
#ifndef FB_KERNELS_CODEC_REF_H
#define FB_KERNELS_CODEC_REF_H

#include "kernels/rows.h"

/* Quantize one group.
 * x        [n] bf16 or fp16
 * scale    1 byte (fp8), 4 bytes (int8)
 * returns  false: the codec cannot carry it (NaN, infinity; int8: a range beyond fp32) */
bool fb_ref_encode(enum fb_codec codec, enum fb_elem elem, const uint16_t *x, uint32_t n,
                   uint8_t *codes, uint8_t *scale);

/* Reconstruct one group; any codes and scale. */
void fb_ref_decode(enum fb_codec codec, enum fb_elem elem, const uint8_t *codes,
                   const uint8_t *scale, uint32_t n, uint16_t *x);

void fb_ref_transpose(const uint16_t *src, int64_t src_stride, uint32_t rows, uint32_t cols,
                      uint16_t *dst, int64_t dst_stride, bool stream);

#endif
