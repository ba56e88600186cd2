/* splitmix64: one step of a generator whose state is a counter, good for hashing ids too. */
#ifndef FB_COMMAND_RANDOM_H
#define FB_COMMAND_RANDOM_H

#include <stdint.h>

static inline uint64_t fb_mix64(uint64_t x)
{
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

#endif
