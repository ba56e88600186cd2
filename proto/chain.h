/* Chain hashes and pool keys.
 *
 * fb_chain names a page by all tokens up to its end; it does not know of models. A pool key is the
 * chain hash in one space. Test vectors: docs/vectors.json.
 * source: docs/formats.md, "Chain and key" */
#ifndef FB_PROTO_CHAIN_H
#define FB_PROTO_CHAIN_H

#include "proto/block.h"

#ifdef __cplusplus
extern "C" {
#endif

#define FB_CHAIN_BYTES          32
#define FB_CHAIN_MAX_EXTRA      4096
#define FB_CHAIN_MAX_MULTIMODAL 64
#define FB_DIGEST_BYTES         32

/* Chain hash of the page that holds token_ids, after the page whose hash is `previous`.
 * previous  [FB_CHAIN_BYTES], or NULL for the first page
 * extra     fb_chain_extra_encode's output, or NULL with 0 bytes
 * returns   FB_OK | FB_EINVAL (no tokens, too many, or extra too long) */
enum fb_status fb_chain(const uint8_t *previous, const uint32_t *token_ids, uint32_t count,
                        const uint8_t *extra, size_t extra_bytes, uint8_t ret_hash[FB_CHAIN_BYTES]);

/* The same for consecutive pages of page_tokens each, all with the same extra.
 * token_ids  [pages, page_tokens]; ret_hashes [pages, FB_CHAIN_BYTES] */
enum fb_status fb_chain_pages(const uint8_t *previous, const uint32_t *token_ids,
                              uint32_t page_tokens, uint32_t pages, const uint8_t *extra,
                              size_t extra_bytes, uint8_t *ret_hashes);

/* What else the KV of a page depends on. All pointers are borrowed; NULL or 0 means absent. */
struct fb_multimodal_item {
    uint8_t digest[FB_DIGEST_BYTES]; /* of the content, never a name */
    int64_t offset;                  /* of its first token in this page; negative: began before */
};

struct fb_chain_extra {
    const uint8_t *adapter; /* [FB_DIGEST_BYTES] digest of the adapter's files */
    const struct fb_multimodal_item *multimodal;
    uint32_t multimodal_count;
    const uint8_t *embeddings; /* [FB_DIGEST_BYTES] digest of prompt embeddings */
    const char *salt;          /* first page only */
};

/* Encode as deterministic CBOR. Nothing present gives 0 bytes.
 * returns FB_OK | FB_EINVAL | FB_ELIMIT */
enum fb_status fb_chain_extra_encode(const struct fb_chain_extra *extra, uint8_t *out,
                                     size_t capacity, size_t *ret_bytes);

/* A reusable SHA-256, so that deriving a list of keys costs no set-up. One thread at a time. */
struct fb_hasher;

enum fb_status fb_hasher_create(struct fb_hasher **ret_hasher);
void fb_hasher_destroy(struct fb_hasher *hasher);

/* Pool keys of n chain hashes in a space.
 * chain [n, FB_CHAIN_BYTES]; ret_keys [n, FB_KEY_BYTES] */
void fb_pool_keys(struct fb_hasher *hasher, const uint8_t space[FB_SPACE_ID_BYTES],
                  const uint8_t *chain, uint32_t n, uint8_t *ret_keys);

#ifdef __cplusplus
}
#endif
#endif
