/* What the tests of the block index share: keys by number, an index of one class. */
#ifndef FB_TESTS_INDEX_UTIL_H
#define FB_TESTS_INDEX_UTIL_H

#include "pool/policy/index.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define NONE FB_ENTRY_NONE

static inline uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

/* Key k; `sharing` keys in a row have the same first 8 bytes. */
static inline void key_make(uint8_t *key, uint32_t k, uint32_t sharing)
{
    uint64_t halves[2] = {mix(k / sharing), mix(~(uint64_t)k)};

    memcpy(key, halves, sizeof(halves));
}

static inline struct fb_index *index_make(uint32_t max_entries, uint16_t *ret_class)
{
    struct fb_index *index = NULL;

    assert_int_equal(fb_index_create(max_entries, &index, NULL), FB_OK);
    assert_int_equal(fb_index_class_add(index, "lru", ret_class, NULL), FB_OK);
    return index;
}

#endif
