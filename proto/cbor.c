/* CBOR writer and reader over libcbor's streaming calls. */
#include "proto/cbor.h"

#include <cbor.h>
#include <string.h>

void fb_cbor_writer_init(struct fb_cbor_writer *w, uint8_t *out, size_t capacity)
{
    *w = (struct fb_cbor_writer){.out = out, .capacity = capacity};
}

/* libcbor's encoders return the bytes written, 0 when they do not fit. */
static void advance(struct fb_cbor_writer *w, size_t written)
{
    w->full |= written == 0;
    w->bytes += written;
}

static void put_raw(struct fb_cbor_writer *w, const void *data, size_t bytes)
{
    if (w->full || bytes > w->capacity - w->bytes) {
        w->full = true;
        return;
    }
    if (bytes > 0) {
        memcpy(w->out + w->bytes, data, bytes);
    }
    w->bytes += bytes;
}

void fb_cbor_put_uint(struct fb_cbor_writer *w, uint64_t v)
{
    advance(w, cbor_encode_uint(v, w->out + w->bytes, w->capacity - w->bytes));
}

void fb_cbor_put_int(struct fb_cbor_writer *w, int64_t v)
{
    if (v >= 0) {
        fb_cbor_put_uint(w, (uint64_t)v);
    } else {
        advance(w, cbor_encode_negint(~(uint64_t)v, w->out + w->bytes, w->capacity - w->bytes));
    }
}

void fb_cbor_put_bytes(struct fb_cbor_writer *w, const void *data, size_t bytes)
{
    advance(w, cbor_encode_bytestring_start(bytes, w->out + w->bytes, w->capacity - w->bytes));
    put_raw(w, data, bytes);
}

void fb_cbor_put_text(struct fb_cbor_writer *w, const char *text)
{
    size_t bytes = strlen(text);

    advance(w, cbor_encode_string_start(bytes, w->out + w->bytes, w->capacity - w->bytes));
    put_raw(w, text, bytes);
}

void fb_cbor_put_array(struct fb_cbor_writer *w, size_t items)
{
    advance(w, cbor_encode_array_start(items, w->out + w->bytes, w->capacity - w->bytes));
}

void fb_cbor_put_map(struct fb_cbor_writer *w, size_t pairs)
{
    advance(w, cbor_encode_map_start(pairs, w->out + w->bytes, w->capacity - w->bytes));
}

void fb_cbor_reader_init(struct fb_cbor_reader *r, const uint8_t *in, size_t bytes)
{
    *r = (struct fb_cbor_reader){.in = in, .bytes = bytes};
}

enum item_type { ITEM_OTHER, ITEM_UINT, ITEM_BYTES, ITEM_TEXT, ITEM_ARRAY, ITEM_MAP };

struct item {
    enum item_type type;
    uint64_t value; /* number, or count of items, pairs or bytes */
    const uint8_t *data;
};

static void on_u8(void *c, uint8_t v)
{
    *(struct item *)c = (struct item){ITEM_UINT, v, NULL};
}

static void on_u16(void *c, uint16_t v)
{
    *(struct item *)c = (struct item){ITEM_UINT, v, NULL};
}

static void on_u32(void *c, uint32_t v)
{
    *(struct item *)c = (struct item){ITEM_UINT, v, NULL};
}

static void on_u64(void *c, uint64_t v)
{
    *(struct item *)c = (struct item){ITEM_UINT, v, NULL};
}

static void on_bytes(void *c, const unsigned char *data, size_t bytes)
{
    *(struct item *)c = (struct item){ITEM_BYTES, bytes, data};
}

static void on_text(void *c, const unsigned char *data, size_t bytes)
{
    *(struct item *)c = (struct item){ITEM_TEXT, bytes, data};
}

static void on_array(void *c, size_t items)
{
    *(struct item *)c = (struct item){ITEM_ARRAY, items, NULL};
}

static void on_map(void *c, size_t pairs)
{
    *(struct item *)c = (struct item){ITEM_MAP, pairs, NULL};
}

static bool take(struct fb_cbor_reader *r, enum item_type type, struct item *ret_item)
{
    struct cbor_callbacks callbacks = cbor_empty_callbacks;
    struct item item = {0};
    struct cbor_decoder_result result;

    callbacks.uint8 = on_u8;
    callbacks.uint16 = on_u16;
    callbacks.uint32 = on_u32;
    callbacks.uint64 = on_u64;
    callbacks.byte_string = (cbor_string_callback)on_bytes;
    callbacks.string = (cbor_string_callback)on_text;
    callbacks.array_start = (cbor_collection_callback)on_array;
    callbacks.map_start = (cbor_collection_callback)on_map;
    if (r->at >= r->bytes) {
        return false;
    }
    result = cbor_stream_decode(r->in + r->at, r->bytes - r->at, &callbacks, &item);
    if (result.status != CBOR_DECODER_FINISHED || item.type != type) {
        return false;
    }
    r->at += result.read;
    *ret_item = item;
    return true;
}

bool fb_cbor_get_uint(struct fb_cbor_reader *r, uint64_t *ret_v)
{
    struct item item;

    if (!take(r, ITEM_UINT, &item)) {
        return false;
    }
    *ret_v = item.value;
    return true;
}

bool fb_cbor_get_bytes(struct fb_cbor_reader *r, const uint8_t **ret_data, size_t *ret_bytes)
{
    struct item item;

    if (!take(r, ITEM_BYTES, &item)) {
        return false;
    }
    *ret_data = item.data;
    *ret_bytes = item.value;
    return true;
}

bool fb_cbor_get_text(struct fb_cbor_reader *r, const char **ret_text, size_t *ret_bytes)
{
    struct item item;

    if (!take(r, ITEM_TEXT, &item)) {
        return false;
    }
    *ret_text = (const char *)item.data;
    *ret_bytes = item.value;
    return true;
}

bool fb_cbor_get_array(struct fb_cbor_reader *r, uint64_t *ret_items)
{
    struct item item;

    if (!take(r, ITEM_ARRAY, &item)) {
        return false;
    }
    *ret_items = item.value;
    return true;
}

bool fb_cbor_get_map(struct fb_cbor_reader *r, uint64_t *ret_pairs)
{
    struct item item;

    if (!take(r, ITEM_MAP, &item)) {
        return false;
    }
    *ret_pairs = item.value;
    return true;
}
