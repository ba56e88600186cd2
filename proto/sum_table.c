/* Position keys of block sums: constant, made by proto/sum_gen.c. 64-aligned for vector loads. */
#include "proto/sum.h"

__attribute__((aligned(64))) const uint32_t fb_sum_table[FB_SUM_LAP_WORDS] = {
#include "proto/sum_table.inc"
};
