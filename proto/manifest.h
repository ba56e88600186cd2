/* Space manifest: everything two blocks must agree on to be interchangeable.
 *
 * A manifest has one encoding (deterministic CBOR, RFC 8949 section 4.2, integer keys) and its
 * name, the space id, is the first 16 bytes of the SHA-256 of that encoding. Values only: a
 * manifest owns no memory and may be copied.
 * source: docs/formats.md, "Manifest" */
#ifndef FB_PROTO_MANIFEST_H
#define FB_PROTO_MANIFEST_H

#include "proto/status.h"

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FB_MANIFEST_SCHEMA    1
#define FB_MANIFEST_MAX_BYTES 16384

#define FB_SPACE_ID_BYTES 16
#define FB_PRIVATE_BYTES  16

#define FB_MAX_TENANT_CHARS 63
#define FB_MAX_TEXT_CHARS   255
#define FB_MAX_LAYERS       1024
#define FB_MAX_PLANES       448
#define FB_MAX_SECTIONS     32
#define FB_MAX_SCALES       2048
#define FB_MAX_PAGE_TOKENS  4096
#define FB_MAX_ROW_ELEMS    (1u << 27)
#define FB_MAX_QUANT_ROW    4096 /* elements of a row that a quantizing codec takes */

enum fb_rule {
    FB_RULE_FULL = 1,   /* every page from 0 is needed */
    FB_RULE_WINDOW = 2, /* only the pages that cover the trailing window_tokens */
    FB_RULE_STATE = 3,  /* only the page that ends at the boundary; one row a page */
};

enum fb_section_kind {
    FB_SECTION_K = 1,
    FB_SECTION_V = 2,
    FB_SECTION_LATENT = 3,
    FB_SECTION_ROPE = 4,
    FB_SECTION_INDEX = 5,
    FB_SECTION_STATE = 6,
};

enum fb_elem {
    FB_ELEM_BF16 = 1,
    FB_ELEM_FP16 = 2,
    FB_ELEM_E4M3FN = 3,
    FB_ELEM_E5M2 = 4,
    FB_ELEM_E4M3FNUZ = 5,
    FB_ELEM_BYTE = 6,
};

enum fb_codec {
    FB_CODEC_RAW = 1,
    FB_CODEC_FP8_E4M3 = 2,
    FB_CODEC_FP8_E5M2 = 3,
    FB_CODEC_INT8 = 4,
};

/* One kind of rows in a run of the space's layers. Layers are counted by their place in the
 * manifest's layer list, so that 0 is the first layer of the space. */
struct fb_section {
    enum fb_section_kind kind;
    enum fb_elem elem;
    enum fb_codec codec;
    uint32_t layer_first;
    uint32_t layer_count;
    uint32_t row_elems; /* elements of one row: one token (state: one page), head, layer */
    uint32_t group;     /* elements that share a scale; 0: the whole row */
};

struct fb_manifest {
    char tenant[FB_MAX_TENANT_CHARS + 1];
    char model[FB_MAX_TEXT_CHARS + 1];        /* "repository@revision", or a digest of files */
    char quantization[FB_MAX_TEXT_CHARS + 1]; /* load-time quantization of weights; "" none */
    char position[FB_MAX_TEXT_CHARS + 1];     /* position-encoding settings, canonical text */
    char arrangement[FB_MAX_TEXT_CHARS + 1];  /* "" canonical rows; else what raw rows hold */
    uint32_t engine_block_tokens;             /* with an arrangement; else 0 */
    enum fb_rule rule;
    uint32_t window_tokens; /* FB_RULE_WINDOW only */
    uint32_t page_tokens;
    uint32_t layer_count;
    uint16_t layers[FB_MAX_LAYERS]; /* the model's own layer indices, ascending */
    uint32_t head_first;            /* KV heads [head_first, head_first + head_count) */
    uint32_t head_count;            /* = planes of a block */
    uint32_t head_total;            /* of the model */
    uint32_t section_count;
    struct fb_section sections[FB_MAX_SECTIONS];
    uint32_t scale_count;
    float scales[FB_MAX_SCALES]; /* static scales of the engine, in its own order */
    uint64_t generation;         /* of weights that change in place under one identity */
    bool is_private;             /* blocks are good for one process only */
    uint8_t private_id[FB_PRIVATE_BYTES];
};

/* Bytes of one element; 0 for a value that is no fb_elem. */
uint32_t fb_elem_bytes(enum fb_elem elem);

/* Names as used by commands and logs ("fp8_e4m3"); never NULL, "?" for unknown values. */
const char *fb_codec_name(enum fb_codec codec);
const char *fb_elem_name(enum fb_elem elem);
const char *fb_section_kind_name(enum fb_section_kind kind);
const char *fb_rule_name(enum fb_rule rule);

/* Codec of that name, or 0. */
enum fb_codec fb_codec_by_name(const char *name);

/* Whether every field is in range and the sections fit the rule and the codecs.
 * returns FB_OK | FB_EINVAL | FB_EGEOMETRY | FB_EUNSUPPORTED; error names field and expectation */
enum fb_status fb_manifest_validate(const struct fb_manifest *m, struct fb_error *error);

/* Encode a valid manifest.
 * out      [capacity] bytes; FB_MANIFEST_MAX_BYTES always suffices
 * returns  FB_OK | what fb_manifest_validate returns | FB_ELIMIT */
enum fb_status fb_manifest_encode(const struct fb_manifest *m, uint8_t *out, size_t capacity,
                                  size_t *ret_bytes, struct fb_error *error);

/* Decode and validate; any encoding but the deterministic one is refused.
 * returns  FB_OK | FB_EPROTO | FB_EVERSION | what fb_manifest_validate returns */
enum fb_status fb_manifest_decode(const uint8_t *in, size_t bytes, struct fb_manifest *ret_m,
                                  struct fb_error *error);

/* Space id of an encoded manifest. */
void fb_space_id(const uint8_t *encoded, size_t bytes, uint8_t ret_id[FB_SPACE_ID_BYTES]);

#ifdef __cplusplus
}
#endif
#endif
