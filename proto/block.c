/* Block layout with checked arithmetic; header checks. */
#include "proto/block.h"

#include "proto/assert.h"

#include <isa-l/crc.h>
#include <string.h>

static bool add(uint64_t *acc, uint64_t v)
{
    return !__builtin_add_overflow(*acc, v, acc);
}

/* Round up to a power of two; false on overflow. */
static bool align_up(uint64_t *v, uint64_t align)
{
    if (!add(v, align - 1)) {
        return false;
    }
    *v &= ~(align - 1);
    return true;
}

static uint32_t groups_of(const struct fb_section *s)
{
    if (s->codec == FB_CODEC_RAW) {
        return 0;
    }
    return s->group == 0 ? 1 : (s->row_elems + s->group - 1) / s->group;
}

/* Bytes of one row's codes and scales. */
static bool row_bytes(const struct fb_section *s, uint32_t *ret_codes, uint32_t *ret_scales)
{
    static const uint32_t scale_bytes[] = {
        [FB_CODEC_RAW] = 0, [FB_CODEC_FP8_E4M3] = 1, [FB_CODEC_FP8_E5M2] = 1, [FB_CODEC_INT8] = 4};
    uint32_t code_bytes = s->codec == FB_CODEC_RAW ? fb_elem_bytes(s->elem) : 1;

    return !__builtin_mul_overflow(s->row_elems, code_bytes, ret_codes) &&
           !__builtin_mul_overflow(groups_of(s), scale_bytes[s->codec], ret_scales);
}

static bool covers(const struct fb_section *s, uint32_t layer)
{
    return layer >= s->layer_first && layer - s->layer_first < s->layer_count;
}

/* Append a section's arrays at *at; *at moves behind them. */
static bool place_section(const struct fb_layout *l, const struct fb_section *s, uint64_t *at,
                          struct fb_section_place *ret_place)
{
    struct fb_section_place p = {.rows = fb_section_rows(l, s), .groups = groups_of(s)};

    if (!row_bytes(s, &p.row_bytes, &p.scale_bytes)) {
        return false;
    }
    p.codes_offset = *at;
    if (!add(at, (uint64_t)p.rows * p.row_bytes) || !align_up(at, FB_ARRAY_ALIGN)) {
        return false;
    }
    p.scales_offset = *at;
    if (!add(at, (uint64_t)p.rows * p.scale_bytes) || !align_up(at, FB_ARRAY_ALIGN)) {
        return false;
    }
    *ret_place = p;
    return true;
}

static bool place_segment(struct fb_layout *l, uint32_t layer)
{
    uint64_t at = 0;

    for (uint32_t i = 0; i < l->section_count; i++) {
        const struct fb_section *s = &l->sections[i];
        struct fb_section_place p;

        if (!covers(s, layer)) {
            continue;
        }
        if (!place_section(l, s, &at, &p)) {
            return false;
        }
        l->code_bytes += (uint64_t)p.rows * (p.row_bytes + p.scale_bytes) * l->plane_count;
        l->source_bytes +=
            (uint64_t)p.rows * s->row_elems * fb_elem_bytes(s->elem) * l->plane_count;
    }
    return add(&at, FB_ARRAY_ALIGN) && add(&at, l->segment_offset[layer]) &&
           (l->segment_offset[layer + 1] = at) <= FB_BLOCK_MAX_BYTES;
}

enum fb_status fb_layout_init(struct fb_layout *l, const struct fb_manifest *m,
                              struct fb_error *error)
{
    enum fb_status status = fb_manifest_validate(m, error);
    uint64_t plane, block;

    if (status != FB_OK) {
        return status;
    }
    *l = (struct fb_layout){
        .plane_count = m->head_count,
        .layer_count = m->layer_count,
        .page_tokens = m->page_tokens,
        .section_count = m->section_count,
    };
    memcpy(l->sections, m->sections, sizeof(l->sections));
    for (uint32_t layer = 0; layer < l->layer_count; layer++) {
        if (!place_segment(l, layer)) {
            return fb_error_set(error, FB_EGEOMETRY,
                                "geometry: layer %u ends beyond %llu bytes of one plane; split the "
                                "layers over several spaces or use shorter pages",
                                layer, FB_BLOCK_MAX_BYTES);
        }
    }
    plane = l->segment_offset[l->layer_count];
    if (!align_up(&plane, FB_BLOCK_ALIGN) ||
        __builtin_mul_overflow(plane, (uint64_t)l->plane_count, &block) ||
        !add(&block, FB_BLOCK_HEADER_BYTES) || block > FB_BLOCK_MAX_BYTES) {
        return fb_error_set(error, FB_EGEOMETRY,
                            "geometry: %u planes of %llu bytes make a block beyond %llu bytes; "
                            "split layers or heads over several spaces or use shorter pages",
                            l->plane_count, (unsigned long long)plane, FB_BLOCK_MAX_BYTES);
    }
    l->plane_bytes = plane;
    l->block_bytes = block;
    return FB_OK;
}

bool fb_layout_section(const struct fb_layout *l, uint32_t layer, uint32_t section,
                       struct fb_section_place *ret_place)
{
    uint64_t at = 0;

    if (!covers(&l->sections[section], layer)) {
        return false;
    }
    for (uint32_t i = 0; i <= section; i++) {
        if (covers(&l->sections[i], layer) && !place_section(l, &l->sections[i], &at, ret_place)) {
            return false;
        }
    }
    return true;
}

uint32_t fb_crc32c(const void *data, size_t bytes)
{
    uint32_t crc = UINT32_MAX;
    const uint8_t *at = data;

    /* isa-l takes int lengths and does not write through its pointer. */
    while (bytes > 0) {
        int n = bytes > (1 << 30) ? 1 << 30 : (int)bytes;

        crc = crc32_iscsi((unsigned char *)(uintptr_t)at, n, crc);
        at += n;
        bytes -= (size_t)n;
    }
    return ~crc;
}

/* Only the sums of planes that there are: a reader touches a few lines, not the whole page. */
static uint32_t header_crc(const struct fb_block_header *h)
{
    size_t bytes = offsetof(struct fb_block_header, plane_sums) + 8 * (size_t)h->plane_count;
    struct fb_block_header copy;

    memcpy(&copy, h, bytes);
    copy.crc = 0;
    return fb_crc32c(&copy, bytes);
}

void fb_block_header_seal(struct fb_block_header *h)
{
    FB_ASSERT(h->plane_count <= FB_MAX_PLANES);
    h->crc = header_crc(h);
}

enum fb_status fb_block_header_check(const struct fb_block_header *h, struct fb_error *error)
{
    if (h->magic != FB_BLOCK_MAGIC) {
        return fb_error_set(error, FB_MISS, "block: no header here");
    }
    if (h->version != FB_BLOCK_VERSION) {
        return fb_error_set(error, FB_EVERSION, "block: version %u; this program knows %u",
                            h->version, FB_BLOCK_VERSION);
    }
    if (h->state != FB_BLOCK_COMMITTED) {
        return fb_error_set(error, FB_MISS, "block: not committed");
    }
    if (h->plane_count > FB_MAX_PLANES || h->crc != header_crc(h)) {
        return fb_error_set(error, FB_ECORRUPT, "block: header does not match its CRC32C");
    }
    return FB_OK;
}

enum fb_status fb_block_header_match(const struct fb_block_header *h,
                                     const uint8_t space[FB_SPACE_ID_BYTES],
                                     const uint8_t key[FB_KEY_BYTES], const struct fb_layout *l)
{
    bool same = memcmp(h->space, space, FB_SPACE_ID_BYTES) == 0 &&
                memcmp(h->key, key, FB_KEY_BYTES) == 0 && h->block_bytes == l->block_bytes &&
                h->plane_bytes == l->plane_bytes && h->plane_count == l->plane_count &&
                h->layer_count == l->layer_count && h->page_tokens == l->page_tokens;

    return same ? FB_OK : FB_ECORRUPT;
}
