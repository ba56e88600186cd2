/* Block sums: seed and scalar reference. Pure functions; any thread. */
#include "proto/sum.h"

static uint64_t load_le(const uint8_t *p, uint32_t bytes)
{
    uint64_t v = 0;

    for (uint32_t i = 0; i < bytes; i++) {
        v |= (uint64_t)p[i] << (8 * i);
    }
    return v;
}

uint64_t fb_sum_seed(const uint8_t key[32], uint32_t plane, uint32_t layer)
{
    uint64_t place = (uint64_t)plane << 32 | layer;

    return fb_mix64(load_le(key, 8) ^ fb_mix64(place + 1));
}

uint64_t fb_sum_ref(const uint8_t *data, size_t bytes, uint64_t offset)
{
    uint64_t sum = 0;

    for (size_t i = 0; i + 8 <= bytes; i += 8) {
        uint64_t word = (offset + i) / 4;
        const uint32_t *key = &fb_sum_table[word % FB_SUM_LAP_WORDS];
        uint32_t lap = fb_sum_lap_key(word / FB_SUM_LAP_WORDS);
        uint32_t a = (uint32_t)load_le(data + i, 4) + key[0] + lap;
        uint32_t b = (uint32_t)load_le(data + i + 4, 4) + key[1] + lap;

        sum += (uint64_t)a * b;
    }
    return sum;
}
