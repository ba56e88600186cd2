/* Extras: CBOR to JSON. */
#include "pool/command/key_extra.h"

#include "pool/command/output.h"
#include "proto/cbor.h"
#include "proto/chain.h"

#include <string.h>

/* A number of either sign: a negative one has the head of the uint -1 - n, but for its type. */
static bool get_offset(struct fb_cbor_reader *r, json_int_t *ret_offset)
{
    uint8_t head[9] = {0};
    size_t bytes = r->bytes - r->at < sizeof(head) ? r->bytes - r->at : sizeof(head);
    struct fb_cbor_reader one;
    bool negative;
    uint64_t v;

    memcpy(head, r->in + r->at, bytes);
    negative = head[0] >> 5 == 1;
    head[0] &= (uint8_t)(negative ? 0x1f : 0xff);
    fb_cbor_reader_init(&one, head, bytes);
    if (!fb_cbor_get_uint(&one, &v) || v > INT64_MAX) {
        return false;
    }
    r->at += one.at;
    *ret_offset = negative ? -1 - (json_int_t)v : (json_int_t)v;
    return true;
}

static bool get_digest(struct fb_cbor_reader *r, char *out)
{
    const uint8_t *data;
    size_t bytes;

    if (!fb_cbor_get_bytes(r, &data, &bytes) || bytes != FB_DIGEST_BYTES) {
        return false;
    }
    fb_hex_format(data, bytes, out);
    return true;
}

static json_t *get_multimodal(struct fb_cbor_reader *r)
{
    json_t *items = json_array();
    uint64_t count, fields;

    if (!fb_cbor_get_array(r, &count) || count == 0 || count > FB_CHAIN_MAX_MULTIMODAL) {
        json_decref(items);
        return NULL;
    }
    for (uint64_t i = 0; i < count; i++) {
        char digest[2 * FB_DIGEST_BYTES + 1];
        json_int_t offset;

        if (!fb_cbor_get_array(r, &fields) || fields != 2 || !get_digest(r, digest) ||
            !get_offset(r, &offset)) {
            json_decref(items);
            return NULL;
        }
        json_array_append_new(items, json_sprintf("%s at %" JSON_INTEGER_FORMAT, digest, offset));
    }
    return items;
}

static json_t *get_part(struct fb_cbor_reader *r, uint64_t key)
{
    char digest[2 * FB_DIGEST_BYTES + 1];
    const char *text;
    size_t bytes;

    switch (key) {
    case 1:
    case 3: return get_digest(r, digest) ? json_string(digest) : NULL;
    case 2: return get_multimodal(r);
    case 4: return fb_cbor_get_text(r, &text, &bytes) ? json_stringn(text, bytes) : NULL;
    default: return NULL;
    }
}

json_t *fb_key_extra_parts(const uint8_t *extra, size_t bytes)
{
    static const char *const names[] = {NULL, "adapter", "multimodal", "embeddings", "salt"};
    json_t *parts = json_object();
    struct fb_cbor_reader r;
    uint64_t pairs = 0, last = 0, key;

    fb_cbor_reader_init(&r, extra, bytes);
    if (bytes > 0 && (!fb_cbor_get_map(&r, &pairs) || pairs == 0)) {
        goto err;
    }
    for (uint64_t i = 0; i < pairs; i++) {
        json_t *part;

        if (!fb_cbor_get_uint(&r, &key) || key <= last || key >= FB_COUNT_OF(names)) {
            goto err;
        }
        part = get_part(&r, key);
        if (!part) {
            goto err;
        }
        json_object_set_new(parts, names[key], part);
        last = key;
    }
    if (r.at == bytes) {
        return parts;
    }
err:
    json_decref(parts);
    return NULL;
}
