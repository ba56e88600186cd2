/* Any bytes as a reply: refused with a reason, or arrays that are all inside the packet. */
#include "proto/wire.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct fb_error error = {0};
    struct fb_wire_message m;

    if (fb_wire_parse_reply(data, bytes, &m, &error) != FB_OK) {
        FB_ASSERT(error.status != FB_OK && error.text[0]);
        return 0;
    }
    FB_ASSERT(m.header.bytes == bytes);
    FB_ASSERT(!m.first || (m.first > data && m.first <= data + bytes));
    FB_ASSERT(!m.second || (m.second > data && m.second <= data + bytes));
    FB_ASSERT(!m.text || m.text + m.text_bytes == (const char *)data + bytes);
    return 0;
}
