/* Histogram: a value's bucket is its exponent and the bits after its leading one. */
#include "pool/command/histogram.h"

#define SUB_BUCKETS (1u << FB_HISTOGRAM_BITS)

static uint32_t bucket_of(uint64_t value)
{
    uint32_t shift;

    if (value < SUB_BUCKETS) {
        return (uint32_t)value;
    }
    shift = 63 - (uint32_t)__builtin_clzll(value) - FB_HISTOGRAM_BITS;
    return (shift << FB_HISTOGRAM_BITS) + (uint32_t)(value >> shift);
}

/* Largest value of a bucket. */
static uint64_t bucket_last(uint32_t bucket)
{
    uint32_t shift;

    if (bucket < SUB_BUCKETS) {
        return bucket;
    }
    shift = (bucket >> FB_HISTOGRAM_BITS) - 1;
    return ((((uint64_t)bucket & (SUB_BUCKETS - 1)) + SUB_BUCKETS + 1) << shift) - 1;
}

void fb_histogram_add(struct fb_histogram *h, uint64_t value)
{
    h->count++;
    h->sum += value;
    h->max = value > h->max ? value : h->max;
    h->buckets[bucket_of(value)]++;
}

void fb_histogram_merge(struct fb_histogram *h, const struct fb_histogram *other)
{
    h->count += other->count;
    h->sum += other->sum;
    h->max = other->max > h->max ? other->max : h->max;
    for (uint32_t i = 0; i < FB_HISTOGRAM_BUCKETS; i++) {
        h->buckets[i] += other->buckets[i];
    }
}

uint64_t fb_histogram_quantile(const struct fb_histogram *h, double q)
{
    uint64_t seen = 0;

    for (uint32_t i = 0; i < FB_HISTOGRAM_BUCKETS; i++) {
        seen += h->buckets[i];
        if (h->buckets[i] && (double)seen >= q * (double)h->count) {
            uint64_t last = bucket_last(i);
            return last < h->max ? last : h->max;
        }
    }
    return h->max;
}
