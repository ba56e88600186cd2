/* Histogram of durations or sizes: log-linear buckets, as in HDR histograms.
 *
 * Values below 64 are exact; above, each power of two has 64 buckets, so that a quantile is at
 * most 1/64 too large, whatever the range. Fixed size, no allocation; an all-zero histogram is an
 * empty one. One thread at a time; threads keep one each and merge. */
#ifndef FB_COMMAND_HISTOGRAM_H
#define FB_COMMAND_HISTOGRAM_H

#include <stdint.h>

#define FB_HISTOGRAM_BITS    6 /* log2 of the buckets of one power of two */
#define FB_HISTOGRAM_BUCKETS ((65 - FB_HISTOGRAM_BITS) << FB_HISTOGRAM_BITS)

struct fb_histogram {
    uint64_t count;
    uint64_t sum; /* wraps; durations in ns take centuries to get there */
    uint64_t max;
    uint64_t buckets[FB_HISTOGRAM_BUCKETS];
};

void fb_histogram_add(struct fb_histogram *h, uint64_t value);
void fb_histogram_merge(struct fb_histogram *h, const struct fb_histogram *other);

/* Smallest bucket end that at least the share `q` of all values (0 to 1) does not exceed; at most
 * the largest value, 0 when empty. */
uint64_t fb_histogram_quantile(const struct fb_histogram *h, double q);

#endif
