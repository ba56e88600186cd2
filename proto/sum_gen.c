/* Prints the position keys of block sums as a C initializer; run at build time. */
#include "proto/sum.h"

#include <inttypes.h>
#include <stdio.h>

#define SUM_TABLE_START 0x666f7265626179ull /* "forebay" */

int main(void)
{
    for (uint32_t j = 0; j < FB_SUM_LAP_WORDS; j++) {
        uint32_t key = (uint32_t)(fb_mix64(SUM_TABLE_START + j) >> 32);

        printf("0x%08" PRIx32 "u,%c", key, j % 8 == 7 ? '\n' : ' ');
    }
    return ferror(stdout) || fflush(stdout) ? 1 : 0;
}
