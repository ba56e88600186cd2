/* Any bytes as a manifest: refused with a reason, or the one encoding of what was decoded, which
 * then has a sound layout or is refused for its size. */
#include "proto/block.h"
#include "tests/fuzz/fuzz.h"

#include <string.h>

static void check_layout(const struct fb_manifest *m)
{
    struct fb_error error = {0};
    struct fb_layout l;

    if (fb_layout_init(&l, m, &error) != FB_OK) {
        FB_ASSERT(error.status == FB_EGEOMETRY && error.text[0]);
        return;
    }
    FB_ASSERT(l.block_bytes <= FB_BLOCK_MAX_BYTES && l.block_bytes % FB_BLOCK_ALIGN == 0);
    for (uint32_t layer = 0; layer < l.layer_count; layer++) {
        uint64_t end = 0;

        for (uint32_t i = 0; i < l.section_count; i++) {
            struct fb_section_place p;

            if (fb_layout_section(&l, layer, i, &p)) {
                FB_ASSERT(p.codes_offset >= end && p.scales_offset >= p.codes_offset);
                end = p.scales_offset + (uint64_t)p.rows * p.scale_bytes;
            }
        }
        FB_ASSERT(end <= fb_layout_sum_offset(&l, layer));
        FB_ASSERT(l.segment_offset[layer + 1] <= l.plane_bytes);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    uint8_t again[FB_MANIFEST_MAX_BYTES];
    struct fb_error error = {0};
    struct fb_manifest m;
    size_t again_bytes;

    if (fb_manifest_decode(data, bytes, &m, &error) != FB_OK) {
        FB_ASSERT(error.status != FB_OK && error.text[0]);
        return 0;
    }
    FB_ASSERT(fb_manifest_encode(&m, again, sizeof(again), &again_bytes, NULL) == FB_OK);
    FB_ASSERT(again_bytes == bytes && memcmp(again, data, bytes) == 0);
    check_layout(&m);
    return 0;
}
