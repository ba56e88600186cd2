/* Chain hashes and pool keys over OpenSSL's SHA-256. */
#include "proto/chain.h"

#include "proto/assert.h"
#include "proto/cbor.h"

#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>

/* Domain tags end in their version. The key's tag, the space id and the chain hash together are
 * 55 bytes: the most that one block of SHA-256 takes. */
static const uint8_t chain_tag[9] = {'f', 'b', '.', 'c', 'h', 'a', 'i', 'n', 1};
static const uint8_t key_tag[7] = {'f', 'b', '.', 'k', 'e', 'y', 1};

enum extra_key { EXTRA_ADAPTER = 1, EXTRA_MULTIMODAL = 2, EXTRA_EMBEDDINGS = 3, EXTRA_SALT = 4 };

struct fb_hasher {
    EVP_MD *md;
    EVP_MD_CTX *context;
};

enum fb_status fb_hasher_create(struct fb_hasher **ret_hasher)
{
    struct fb_hasher *h = calloc(1, sizeof(*h));

    if (!h) {
        return FB_ENOMEM;
    }
    h->md = EVP_MD_fetch(NULL, "SHA256", NULL);
    h->context = EVP_MD_CTX_new();
    if (!h->md || !h->context) {
        fb_hasher_destroy(h);
        return FB_ENOMEM;
    }
    *ret_hasher = h;
    return FB_OK;
}

void fb_hasher_destroy(struct fb_hasher *hasher)
{
    if (hasher) {
        EVP_MD_CTX_free(hasher->context);
        EVP_MD_free(hasher->md);
        free(hasher);
    }
}

static uint8_t *put_le32(uint8_t *out, uint32_t v)
{
    for (int i = 0; i < 4; i++) {
        out[i] = (uint8_t)(v >> (8 * i));
    }
    return out + 4;
}

/* A hash that cannot be computed must never become a key: stop instead. */
static void digest_ids(EVP_MD_CTX *context, const uint32_t *ids, uint32_t count)
{
    uint8_t buffer[4 * 64];
    uint32_t i = 0;

    while (i < count) {
        uint8_t *at = buffer;

        for (; i < count && at < buffer + sizeof(buffer); i++) {
            at = put_le32(at, ids[i]);
        }
        FB_ASSERT(EVP_DigestUpdate(context, buffer, (size_t)(at - buffer)) == 1);
    }
}

/* One page; the context has been initialized. */
static void chain_page(EVP_MD_CTX *context, const uint8_t *previous, const uint32_t *token_ids,
                       uint32_t count, const uint8_t *extra, size_t extra_bytes, uint8_t *ret_hash)
{
    uint8_t number[4];

    FB_ASSERT(EVP_DigestUpdate(context, chain_tag, sizeof(chain_tag)) == 1);
    FB_ASSERT(EVP_DigestUpdate(context, previous, FB_CHAIN_BYTES) == 1);
    put_le32(number, count);
    FB_ASSERT(EVP_DigestUpdate(context, number, sizeof(number)) == 1);
    digest_ids(context, token_ids, count);
    put_le32(number, (uint32_t)extra_bytes);
    FB_ASSERT(EVP_DigestUpdate(context, number, sizeof(number)) == 1);
    FB_ASSERT(EVP_DigestUpdate(context, extra, extra_bytes) == 1);
    FB_ASSERT(EVP_DigestFinal_ex(context, ret_hash, NULL) == 1);
}

enum fb_status fb_chain_pages(const uint8_t *previous, const uint32_t *token_ids,
                              uint32_t page_tokens, uint32_t pages, const uint8_t *extra,
                              size_t extra_bytes, uint8_t *ret_hashes)
{
    uint8_t root[FB_CHAIN_BYTES];
    EVP_MD_CTX *context;

    if (page_tokens == 0 || page_tokens > FB_MAX_PAGE_TOKENS || extra_bytes > FB_CHAIN_MAX_EXTRA) {
        return FB_EINVAL;
    }
    context = EVP_MD_CTX_new();
    if (!context) {
        return FB_ENOMEM;
    }
    if (!previous) {
        FB_ASSERT(EVP_Digest(chain_tag, sizeof(chain_tag), root, NULL, EVP_sha256(), NULL) == 1);
        previous = root;
    }
    for (uint32_t i = 0; i < pages; i++) {
        uint8_t *hash = ret_hashes + (size_t)i * FB_CHAIN_BYTES;

        FB_ASSERT(EVP_DigestInit_ex(context, i == 0 ? EVP_sha256() : NULL, NULL) == 1);
        chain_page(context, previous, token_ids + (size_t)i * page_tokens, page_tokens, extra,
                   extra_bytes, hash);
        previous = hash;
    }
    EVP_MD_CTX_free(context);
    return FB_OK;
}

enum fb_status fb_chain(const uint8_t *previous, const uint32_t *token_ids, uint32_t count,
                        const uint8_t *extra, size_t extra_bytes, uint8_t ret_hash[FB_CHAIN_BYTES])
{
    return fb_chain_pages(previous, token_ids, count, 1, extra, extra_bytes, ret_hash);
}

static void put_multimodal(struct fb_cbor_writer *w, const struct fb_chain_extra *extra)
{
    fb_cbor_put_uint(w, EXTRA_MULTIMODAL);
    fb_cbor_put_array(w, extra->multimodal_count);
    for (uint32_t i = 0; i < extra->multimodal_count; i++) {
        fb_cbor_put_array(w, 2);
        fb_cbor_put_bytes(w, extra->multimodal[i].digest, FB_DIGEST_BYTES);
        fb_cbor_put_int(w, extra->multimodal[i].offset);
    }
}

enum fb_status fb_chain_extra_encode(const struct fb_chain_extra *extra, uint8_t *out,
                                     size_t capacity, size_t *ret_bytes)
{
    bool salted = extra->salt && extra->salt[0];
    size_t pairs = (size_t)(extra->adapter != NULL) + (extra->multimodal_count > 0) +
                   (extra->embeddings != NULL) + salted;
    struct fb_cbor_writer w;

    *ret_bytes = 0;
    if (extra->multimodal_count > FB_CHAIN_MAX_MULTIMODAL) {
        return FB_ELIMIT;
    }
    if (pairs == 0) {
        return FB_OK;
    }
    fb_cbor_writer_init(&w, out, capacity < FB_CHAIN_MAX_EXTRA ? capacity : FB_CHAIN_MAX_EXTRA);
    fb_cbor_put_map(&w, pairs);
    if (extra->adapter) {
        fb_cbor_put_uint(&w, EXTRA_ADAPTER);
        fb_cbor_put_bytes(&w, extra->adapter, FB_DIGEST_BYTES);
    }
    if (extra->multimodal_count > 0) {
        put_multimodal(&w, extra);
    }
    if (extra->embeddings) {
        fb_cbor_put_uint(&w, EXTRA_EMBEDDINGS);
        fb_cbor_put_bytes(&w, extra->embeddings, FB_DIGEST_BYTES);
    }
    if (salted) {
        fb_cbor_put_uint(&w, EXTRA_SALT);
        fb_cbor_put_text(&w, extra->salt);
    }
    if (w.full) {
        return FB_ELIMIT;
    }
    *ret_bytes = w.bytes;
    return FB_OK;
}

void fb_pool_keys(struct fb_hasher *hasher, const uint8_t space[FB_SPACE_ID_BYTES],
                  const uint8_t *chain, uint32_t n, uint8_t *ret_keys)
{
    uint8_t in[sizeof(key_tag) + FB_SPACE_ID_BYTES + FB_CHAIN_BYTES];

    memcpy(in, key_tag, sizeof(key_tag));
    memcpy(in + sizeof(key_tag), space, FB_SPACE_ID_BYTES);
    for (uint32_t i = 0; i < n; i++) {
        memcpy(in + sizeof(key_tag) + FB_SPACE_ID_BYTES, chain + (size_t)i * FB_CHAIN_BYTES,
               FB_CHAIN_BYTES);
        FB_ASSERT(EVP_DigestInit_ex(hasher->context, hasher->md, NULL) == 1);
        FB_ASSERT(EVP_DigestUpdate(hasher->context, in, sizeof(in)) == 1);
        FB_ASSERT(EVP_DigestFinal_ex(hasher->context, ret_keys + (size_t)i * FB_KEY_BYTES, NULL) ==
                  1);
    }
}
