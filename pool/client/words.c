/* Words about blocks: rejects and hints. */
#include "pool/client/internal.h"

_Static_assert((int)FB_HINT_KIND_PRIORITY == (int)FB_HINT_PRIORITY &&
                   (int)FB_HINT_KIND_TTL == (int)FB_HINT_TTL &&
                   (int)FB_HINT_KIND_PIN == (int)FB_HINT_PIN,
               "hints on the wire");

/* Send one request with n keys behind it and wait for n statuses. */
static enum fb_status call_with_keys(struct fb_pool *pool, struct fb_link *link, enum fb_msg type,
                                     const void *body, size_t body_bytes, const uint8_t *keys,
                                     uint32_t n, uint64_t deadline_ns)
{
    struct fb_wire_writer w;
    enum fb_status status;

    fb_link_begin(link, &w, type, body, body_bytes);
    fb_wire_append(&w, keys, (size_t)n * FB_KEY_BYTES);
    status = fb_link_call(pool, link, &w, NULL, 0, deadline_ns);
    return status == FB_OK && link->reply.list_reply.count != n ? FB_EPROTO : status;
}

enum fb_status fb_reject(struct fb_pool *pool, struct fb_pool_space *space, const uint8_t *keys,
                         uint32_t n, uint64_t timeout_ns)
{
    uint64_t deadline_ns = fb_deadline(timeout_ns, FB_CONTROL_TIMEOUT_NS);
    struct fb_link *link;
    enum fb_status status = fb_link_take(pool, deadline_ns, &link);

    if (status != FB_OK) {
        return status;
    }
    for (uint32_t first = 0; first < n && status == FB_OK; first += FB_WIRE_MAX_KEYS) {
        uint32_t some = n - first < FB_WIRE_MAX_KEYS ? n - first : FB_WIRE_MAX_KEYS;
        struct fb_reject_request request = {atomic_load(&space->handle), some};

        status = call_with_keys(pool, link, FB_MSG_REJECT, &request, sizeof(request),
                                keys + (size_t)first * FB_KEY_BYTES, some, deadline_ns);
    }
    fb_link_give(pool, link, status);
    return status;
}

#define HINT_BATCH 512u

enum fb_status fb_hint_pages(struct fb_pool *pool, struct fb_pool_space *space,
                             const uint8_t *chain, uint32_t pages, enum fb_hint_kind kind,
                             uint32_t value, uint64_t timeout_ns, enum fb_status *ret_statuses)
{
    uint64_t deadline_ns = fb_deadline(timeout_ns, FB_CONTROL_TIMEOUT_NS);
    uint8_t keys[HINT_BATCH * FB_KEY_BYTES];
    struct fb_link *link;
    enum fb_status status = fb_link_take(pool, deadline_ns, &link);

    if (status != FB_OK) {
        return status;
    }
    for (uint32_t first = 0; first < pages && status == FB_OK; first += HINT_BATCH) {
        uint32_t some = pages - first < HINT_BATCH ? pages - first : HINT_BATCH;
        struct fb_hint_request request = {atomic_load(&space->handle), some, kind, value};

        fb_pool_keys(link->hasher, space->id, chain + (size_t)first * FB_CHAIN_BYTES, some, keys);
        status = call_with_keys(pool, link, FB_MSG_HINT, &request, sizeof(request), keys, some,
                                deadline_ns);
        for (uint32_t i = 0; i < some && status == FB_OK && ret_statuses; i++) {
            uint32_t s = fb_wire_u32(link->reply.first, i);

            ret_statuses[first + i] = fb_status_valid(s) ? (enum fb_status)s : FB_EPROTO;
        }
    }
    fb_link_give(pool, link, status);
    return status;
}
