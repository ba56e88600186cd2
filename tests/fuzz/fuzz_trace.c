/* Any bytes as a trace line: refused with its place, or a request whose pages fit its tokens. */
#include "pool/command/trace.h"
#include "tests/fuzz/fuzz.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static struct fb_request request;
    struct fb_error error = {0};

    if (fb_request_parse((const char *)data, bytes, "trace", 1, &request, &error) != FB_OK) {
        FB_ASSERT(error.status == FB_EINVAL && !strncmp(error.text, "trace:1: ", 9));
        return 0;
    }
    FB_ASSERT(request.pages > 0 && request.pages <= FB_TRACE_MAX_PAGES);
    FB_ASSERT((request.pages - 1) * FB_TRACE_PAGE_TOKENS < request.input_tokens);
    FB_ASSERT(request.pages * FB_TRACE_PAGE_TOKENS >= request.input_tokens);
    return 0;
}
