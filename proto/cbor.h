/* Deterministic CBOR in fixed buffers: a writer and a pull reader over libcbor's streaming calls.
 * Neither allocates. The writer always emits shortest forms; the reader accepts any definite
 * form, so a decoder that wants determinism encodes again and compares. Not installed. */
#ifndef FB_PROTO_CBOR_H
#define FB_PROTO_CBOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct fb_cbor_writer {
    uint8_t *out;
    size_t capacity;
    size_t bytes;
    bool full; /* something did not fit; bytes is then meaningless */
};

void fb_cbor_writer_init(struct fb_cbor_writer *w, uint8_t *out, size_t capacity);
void fb_cbor_put_uint(struct fb_cbor_writer *w, uint64_t v);
void fb_cbor_put_int(struct fb_cbor_writer *w, int64_t v);
void fb_cbor_put_bytes(struct fb_cbor_writer *w, const void *data, size_t bytes);
void fb_cbor_put_text(struct fb_cbor_writer *w, const char *text);
void fb_cbor_put_array(struct fb_cbor_writer *w, size_t items);
void fb_cbor_put_map(struct fb_cbor_writer *w, size_t pairs);

struct fb_cbor_reader {
    const uint8_t *in;
    size_t bytes;
    size_t at;
};

void fb_cbor_reader_init(struct fb_cbor_reader *r, const uint8_t *in, size_t bytes);

/* Take the next item when it is of that type; false leaves the reader where it was. Strings are
 * borrowed from the input. */
bool fb_cbor_get_uint(struct fb_cbor_reader *r, uint64_t *ret_v);
bool fb_cbor_get_bytes(struct fb_cbor_reader *r, const uint8_t **ret_data, size_t *ret_bytes);
bool fb_cbor_get_text(struct fb_cbor_reader *r, const char **ret_text, size_t *ret_bytes);
bool fb_cbor_get_array(struct fb_cbor_reader *r, uint64_t *ret_items);
bool fb_cbor_get_map(struct fb_cbor_reader *r, uint64_t *ret_pairs);

#endif
