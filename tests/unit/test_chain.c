/* Chain hashes, their extra bytes and pool keys: against SHA-256 of bytes laid out by hand. */
#include "proto/chain.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>
#include <openssl/sha.h>

static const uint32_t tokens[] = {1, 0x01020304, UINT32_MAX};

static void fill(uint8_t *out, size_t bytes, uint8_t first)
{
    for (size_t i = 0; i < bytes; i++) {
        out[i] = (uint8_t)(first + i);
    }
}

static void test_first_page(void **state)
{
    static const char text[] = "\x03\0\0\0"
                               "\x01\0\0\0\x04\x03\x02\x01\xff\xff\xff\xff"
                               "\x02\0\0\0"
                               "xy";
    uint8_t in[9 + 32 + sizeof(text) - 1], expected[32], hash[FB_CHAIN_BYTES];

    (void)state;
    memcpy(in, "fb.chain\x01", 9);
    SHA256(in, 9, in + 9);
    memcpy(in + 41, text, sizeof(text) - 1);
    SHA256(in, sizeof(in), expected);
    assert_int_equal(fb_chain(NULL, tokens, 3, (const uint8_t *)"xy", 2, hash), FB_OK);
    assert_memory_equal(hash, expected, sizeof(hash));

    /* The first page follows the digest of the tag, and nothing else is special about it. */
    assert_int_equal(fb_chain(in + 9, tokens, 3, (const uint8_t *)"xy", 2, hash), FB_OK);
    assert_memory_equal(hash, expected, sizeof(hash));
}

/* More tokens than one of the implementation's buffers holds. */
static void test_long_page(void **state)
{
    enum { COUNT = FB_MAX_PAGE_TOKENS };
    static uint32_t ids[COUNT];
    static uint8_t in[9 + 32 + 4 + 4 * COUNT + 4];
    uint8_t previous[FB_CHAIN_BYTES], expected[32], hash[FB_CHAIN_BYTES];

    (void)state;
    fill(previous, sizeof(previous), 3);
    for (uint32_t count = 1; count <= COUNT; count = count < 200 ? count + 1 : count * 2 - 1) {
        uint8_t *at = in + 41;

        memcpy(in, "fb.chain\x01", 9);
        memcpy(in + 9, previous, 32);
        memcpy(at, &count, 4);
        for (uint32_t i = 0; i < count; i++) {
            ids[i] = i * 0x9e3779b9u;
            memcpy(at + 4 + 4 * i, &ids[i], 4);
        }
        memset(at + 4 + 4 * count, 0, 4);
        SHA256(in, 41 + 4 + 4 * count + 4, expected);
        assert_int_equal(fb_chain(previous, ids, count, NULL, 0, hash), FB_OK);
        assert_memory_equal(hash, expected, sizeof(hash));
    }
}

static void test_limits(void **state)
{
    static uint32_t ids[FB_MAX_PAGE_TOKENS + 1];
    static uint8_t extra[FB_CHAIN_MAX_EXTRA + 1];
    uint8_t hash[FB_CHAIN_BYTES], untouched[FB_CHAIN_BYTES];

    (void)state;
    memset(hash, 0xee, sizeof(hash));
    memcpy(untouched, hash, sizeof(hash));
    assert_int_equal(fb_chain(NULL, ids, 0, NULL, 0, hash), FB_EINVAL);
    assert_int_equal(fb_chain(NULL, ids, FB_MAX_PAGE_TOKENS + 1, NULL, 0, hash), FB_EINVAL);
    assert_int_equal(fb_chain(NULL, ids, 1, extra, sizeof(extra), hash), FB_EINVAL);
    assert_memory_equal(hash, untouched, sizeof(hash));
    assert_int_equal(fb_chain(NULL, ids, 1, extra, sizeof(extra) - 1, hash), FB_OK);
}

/* Bytes cannot move from one input to another unnoticed. */
static void test_inputs_are_told_apart(void **state)
{
    uint8_t hashes[7][FB_CHAIN_BYTES];
    const uint32_t one[] = {1, 2}, other[] = {2, 1};
    const uint8_t extra[] = {2, 0, 0, 0};

    (void)state;
    fb_chain(NULL, one, 2, NULL, 0, hashes[0]);
    fb_chain(NULL, one, 1, NULL, 0, hashes[1]);
    fb_chain(NULL, other, 2, NULL, 0, hashes[2]);
    fb_chain(NULL, one, 1, extra, 4, hashes[3]);
    fb_chain(NULL, one, 2, extra, 4, hashes[4]);
    fb_chain(hashes[1], one + 1, 1, NULL, 0, hashes[5]);
    fb_chain(hashes[0], one, 2, NULL, 0, hashes[6]);
    for (int i = 0; i < 7; i++) {
        for (int j = 0; j < i; j++) {
            assert_memory_not_equal(hashes[i], hashes[j], FB_CHAIN_BYTES);
        }
    }
}

static void test_extra_absent(void **state)
{
    struct fb_chain_extra extra = {.salt = ""};
    uint8_t out[1];
    size_t bytes = 9;

    (void)state;
    assert_int_equal(fb_chain_extra_encode(&extra, out, 0, &bytes), FB_OK);
    assert_int_equal(bytes, 0);
}

static void test_extra_encoding(void **state)
{
    struct fb_multimodal_item items[2] = {{.offset = -300}, {.offset = 63}};
    uint8_t adapter[FB_DIGEST_BYTES], embeddings[FB_DIGEST_BYTES];
    struct fb_chain_extra extra = {.adapter = adapter,
                                   .multimodal = items,
                                   .multimodal_count = 2,
                                   .embeddings = embeddings,
                                   .salt = "user-7"};
    uint8_t expected[256], out[256];
    uint8_t *at = expected;
    size_t bytes, n;

    (void)state;
    fill(adapter, sizeof(adapter), 0);
    fill(embeddings, sizeof(embeddings), 32);
    fill(items[0].digest, FB_DIGEST_BYTES, 64);
    fill(items[1].digest, FB_DIGEST_BYTES, 96);
    at = (uint8_t *)mempcpy(at, "\xa4\x01\x58\x20", 4);
    at = (uint8_t *)mempcpy(at, adapter, 32);
    at = (uint8_t *)mempcpy(at, "\x02\x82\x82\x58\x20", 5);
    at = (uint8_t *)mempcpy(at, items[0].digest, 32);
    at = (uint8_t *)mempcpy(at, "\x39\x01\x2b\x82\x58\x20", 6);
    at = (uint8_t *)mempcpy(at, items[1].digest, 32);
    at = (uint8_t *)mempcpy(at, "\x18\x3f\x03\x58\x20", 5);
    at = (uint8_t *)mempcpy(at, embeddings, 32);
    at = (uint8_t *)mempcpy(at, "\x04\x66user-7", 8);
    n = (size_t)(at - expected);

    assert_int_equal(fb_chain_extra_encode(&extra, out, sizeof(out), &bytes), FB_OK);
    assert_int_equal(bytes, n);
    assert_memory_equal(out, expected, n);
    for (size_t capacity = 0; capacity < n; capacity++) {
        assert_int_equal(fb_chain_extra_encode(&extra, out, capacity, &bytes), FB_ELIMIT);
        assert_int_equal(bytes, 0);
    }

    extra = (struct fb_chain_extra){.salt = "s"};
    assert_int_equal(fb_chain_extra_encode(&extra, out, sizeof(out), &bytes), FB_OK);
    assert_int_equal(bytes, 4);
    assert_memory_equal(out, "\xa1\x04\x61s", 4);
}

static void test_extra_limits(void **state)
{
    static struct fb_multimodal_item items[FB_CHAIN_MAX_MULTIMODAL + 1];
    static char salt[FB_CHAIN_MAX_EXTRA + 1];
    static uint8_t out[2 * FB_CHAIN_MAX_EXTRA];
    struct fb_chain_extra extra = {.multimodal = items, .multimodal_count = 64};
    size_t bytes;

    (void)state;
    assert_int_equal(fb_chain_extra_encode(&extra, out, sizeof(out), &bytes), FB_OK);
    extra.multimodal_count = 65;
    assert_int_equal(fb_chain_extra_encode(&extra, out, sizeof(out), &bytes), FB_ELIMIT);

    /* What does not fit a page's extra bytes is refused, however large the caller's buffer. */
    memset(salt, 's', sizeof(salt) - 1);
    extra = (struct fb_chain_extra){.salt = salt};
    assert_int_equal(fb_chain_extra_encode(&extra, out, sizeof(out), &bytes), FB_ELIMIT);
    salt[FB_CHAIN_MAX_EXTRA - 5] = 0;
    assert_int_equal(fb_chain_extra_encode(&extra, out, sizeof(out), &bytes), FB_OK);
    assert_int_equal(bytes, FB_CHAIN_MAX_EXTRA);
}

static void test_pool_keys(void **state)
{
    enum { COUNT = 5 };
    uint8_t chain[COUNT * FB_CHAIN_BYTES], keys[COUNT * FB_KEY_BYTES], space[FB_SPACE_ID_BYTES];
    uint8_t in[7 + FB_SPACE_ID_BYTES + FB_CHAIN_BYTES], expected[32];
    struct fb_hasher *hasher;

    (void)state;
    assert_int_equal(fb_hasher_create(&hasher), FB_OK);
    fill(chain, sizeof(chain), 1);
    fill(space, sizeof(space), 200);
    for (int round = 0; round < 2; round++) {
        fb_pool_keys(hasher, space, chain, COUNT, keys);
        for (int i = 0; i < COUNT; i++) {
            memcpy(in, "fb.key\x01", 7);
            memcpy(in + 7, space, sizeof(space));
            memcpy(in + 7 + sizeof(space), chain + i * FB_CHAIN_BYTES, FB_CHAIN_BYTES);
            SHA256(in, sizeof(in), expected);
            assert_memory_equal(keys + i * FB_KEY_BYTES, expected, FB_KEY_BYTES);
        }
        space[0]++;
    }
    fb_hasher_destroy(hasher);
    fb_hasher_destroy(NULL);
}

static void test_pages_are_chained(void **state)
{
    enum { PAGES = 5, TOKENS = 70 };
    uint32_t ids[PAGES * TOKENS];
    uint8_t extra[] = {0xa1, 0x04, 0x61, 'x'}, start[FB_CHAIN_BYTES], expected[FB_CHAIN_BYTES];
    uint8_t hashes[PAGES * FB_CHAIN_BYTES];

    (void)state;
    fill(start, sizeof(start), 9);
    for (int i = 0; i < PAGES * TOKENS; i++) {
        ids[i] = (uint32_t)i * 2654435761u;
    }
    for (int from_root = 0; from_root < 2; from_root++) {
        const uint8_t *previous = from_root ? NULL : start;

        assert_int_equal(fb_chain_pages(previous, ids, TOKENS, PAGES, extra, sizeof(extra), hashes),
                         FB_OK);
        for (int i = 0; i < PAGES; i++) {
            assert_int_equal(
                fb_chain(previous, ids + i * TOKENS, TOKENS, extra, sizeof(extra), expected),
                FB_OK);
            previous = hashes + i * FB_CHAIN_BYTES;
            assert_memory_equal(previous, expected, FB_CHAIN_BYTES);
        }
    }
    assert_int_equal(fb_chain_pages(NULL, ids, 0, PAGES, NULL, 0, hashes), FB_EINVAL);
    assert_int_equal(fb_chain_pages(NULL, ids, TOKENS, 0, NULL, 0, hashes), FB_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_first_page),
        cmocka_unit_test(test_long_page),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_inputs_are_told_apart),
        cmocka_unit_test(test_extra_absent),
        cmocka_unit_test(test_extra_encoding),
        cmocka_unit_test(test_extra_limits),
        cmocka_unit_test(test_pool_keys),
        cmocka_unit_test(test_pages_are_chained),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
