/* Any 4096 bytes as a block header, as they are and with a CRC that is right: no field may be
 * believed beyond what check and match say. */
#include "proto/block.h"
#include "tests/fuzz/fuzz.h"
#include "tests/unit/proto_util.h"

static void check(const struct fb_block_header *h, const struct fb_layout *l)
{
    struct fb_error error = {0};

    if (fb_block_header_check(h, &error) != FB_OK) {
        FB_ASSERT(error.status != FB_OK && error.text[0]);
        return;
    }
    FB_ASSERT(h->magic == FB_BLOCK_MAGIC && h->state == FB_BLOCK_COMMITTED);
    if (fb_block_header_match(h, h->space, h->key, l) == FB_OK) {
        FB_ASSERT(h->plane_count <= FB_MAX_PLANES && h->block_bytes <= FB_BLOCK_MAX_BYTES);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct fb_block_header h = {0};
    struct fb_manifest m;
    struct fb_layout l;

    memcpy(&h, data, bytes < sizeof(h) ? bytes : sizeof(h));
    manifest_make(&m, 2, 2, 64, FB_CODEC_INT8);
    FB_ASSERT(fb_layout_init(&l, &m, NULL) == FB_OK);
    check(&h, &l);
    if (h.plane_count <= FB_MAX_PLANES) {
        fb_block_header_seal(&h);
        check(&h, &l);
    }
    return 0;
}
