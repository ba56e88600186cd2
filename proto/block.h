/* Block layout: where everything is in a stored page. One packed definition serves host, device,
 * wire and disk.
 *
 *   header   4096 B
 *   plane 0  segment of layer 0 | segment of layer 1 | ...   padded to 4096 B
 *   plane 1  ...
 *
 *   segment  per section, in table order: codes padded to 128 B, scales padded to 128 B;
 *            then the segment's sum, 8 B, padded to 128 B. Padding is zero.
 *
 * Rows of a section are [rows, row_elems], rows = page_tokens (state: 1). A sum covers every byte
 * of its segment before it. A plane's sum is the sum of its segments' sums mod 2^64.
 * source: docs/formats.md, "Block" */
#ifndef FB_PROTO_BLOCK_H
#define FB_PROTO_BLOCK_H

#include "proto/manifest.h"

#ifdef __cplusplus
#define FB_STATIC_ASSERT static_assert
extern "C" {
#else
#define FB_STATIC_ASSERT _Static_assert
#endif

#define FB_KEY_BYTES          32
#define FB_BLOCK_ALIGN        4096u
#define FB_ARRAY_ALIGN        128u
#define FB_BLOCK_HEADER_BYTES 4096u
#define FB_BLOCK_MAGIC        0x314b434f4c424246ull /* "FBBLOCK1" */
#define FB_BLOCK_VERSION      1u
/* A chunk of 1 GiB holds 8 slots and its own header. */
#define FB_BLOCK_MAX_BYTES (((1ull << 30) - FB_BLOCK_ALIGN) / 8 / FB_BLOCK_ALIGN * FB_BLOCK_ALIGN)

enum fb_block_state {
    FB_BLOCK_WRITING = 1, /* reserved: nothing in the slot may be believed */
    FB_BLOCK_COMMITTED = 2,
};

struct __attribute__((packed)) fb_block_header {
    uint64_t magic;
    uint32_t version;
    uint32_t state;
    uint8_t space[FB_SPACE_ID_BYTES];
    uint8_t key[FB_KEY_BYTES];
    uint8_t parent[FB_KEY_BYTES]; /* key of the page before, zero for the first */
    uint64_t position;            /* pages before this one in its chain */
    uint64_t block_bytes;
    uint64_t plane_bytes;
    uint32_t plane_count;
    uint32_t layer_count;
    uint32_t page_tokens;
    uint32_t crc;      /* CRC32C from magic to the last plane's sum, taken as 0 itself */
    uint64_t sequence; /* commits of this pool so far, for order after a restart */
    uint64_t plane_sums[FB_MAX_PLANES];
    uint8_t pad[FB_BLOCK_HEADER_BYTES - 144 - 8 * FB_MAX_PLANES];
};
FB_STATIC_ASSERT(sizeof(struct fb_block_header) == FB_BLOCK_HEADER_BYTES, "block header");

/* Offsets and sizes in bytes, from a valid manifest. */
struct fb_layout {
    uint32_t plane_count;
    uint32_t layer_count;
    uint32_t page_tokens;
    uint32_t section_count;
    struct fb_section sections[FB_MAX_SECTIONS];
    uint64_t plane_bytes;
    uint64_t block_bytes;
    uint64_t code_bytes;                        /* codes and scales of a block, no padding */
    uint64_t source_bytes;                      /* what the same rows take in the engine */
    uint64_t segment_offset[FB_MAX_LAYERS + 1]; /* in a plane; the last is where layers end */
};

/* Where one section's arrays are in a segment. */
struct fb_section_place {
    uint32_t rows;         /* rows of the arrays */
    uint32_t groups;       /* scales per row; 0 for raw */
    uint32_t row_bytes;    /* codes of one row */
    uint32_t scale_bytes;  /* of one row */
    uint64_t codes_offset; /* from the segment's start */
    uint64_t scales_offset;
};

/* Compute the layout of a manifest with checked arithmetic.
 * returns FB_OK | FB_EGEOMETRY | what fb_manifest_validate returns */
enum fb_status fb_layout_init(struct fb_layout *l, const struct fb_manifest *m,
                              struct fb_error *error);

/* Place of a section in the segment of a layer; false when the section does not cover it. */
bool fb_layout_section(const struct fb_layout *l, uint32_t layer, uint32_t section,
                       struct fb_section_place *ret_place);

/* Offset of a plane in a block; of a segment in a block; of the sum in a segment. */
static inline uint64_t fb_layout_plane(const struct fb_layout *l, uint32_t plane)
{
    return FB_BLOCK_HEADER_BYTES + plane * l->plane_bytes;
}

static inline uint64_t fb_layout_segment(const struct fb_layout *l, uint32_t plane, uint32_t layer)
{
    return fb_layout_plane(l, plane) + l->segment_offset[layer];
}

static inline uint64_t fb_layout_sum_offset(const struct fb_layout *l, uint32_t layer)
{
    return l->segment_offset[layer + 1] - l->segment_offset[layer] - FB_ARRAY_ALIGN;
}

/* Rows of a section in a page: page_tokens, or 1 for state. */
static inline uint32_t fb_section_rows(const struct fb_layout *l, const struct fb_section *s)
{
    return s->kind == FB_SECTION_STATE ? 1 : l->page_tokens;
}

/* CRC32C (Castagnoli) of bytes. */
uint32_t fb_crc32c(const void *data, size_t bytes);

/* Set and check the CRC of a header.
 * fb_block_header_check: FB_OK | FB_MISS (not a committed block) | FB_EVERSION | FB_ECORRUPT */
void fb_block_header_seal(struct fb_block_header *h);
enum fb_status fb_block_header_check(const struct fb_block_header *h, struct fb_error *error);

/* Whether a checked header is what a reader of this space and key expects.
 * returns FB_OK | FB_ECORRUPT */
enum fb_status fb_block_header_match(const struct fb_block_header *h,
                                     const uint8_t space[FB_SPACE_ID_BYTES],
                                     const uint8_t key[FB_KEY_BYTES], const struct fb_layout *l);

#ifdef __cplusplus
}
#endif
#endif
