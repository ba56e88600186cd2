/* Session: the calls of forebay.h as an engine makes them. */
#include "pool/command/session.h"

#include "pool/command/output.h"

#include <stdlib.h>
#include <string.h>

#define WINDOW_BYTES (16ull << 20) /* of the cache; more than caches of the CPU hold */

/* --- session --- */

static enum fb_status connect_pool(struct fb_session *s, const struct fb_cli *cli,
                                   struct fb_pool_info *ret_info)
{
    struct fb_error error = {.text = "out of memory"};
    enum fb_status status = fb_open(cli->socket, NULL, &s->pool, &error);

    if (status != FB_OK) {
        fb_fail("%s", error.text);
        return status;
    }
    fb_pool_get_info(s->pool, ret_info);
    if (!ret_info->connected) {
        fb_fail("no daemon answers at %s; start forebayd, or name its socket with --socket",
                cli->socket);
        return FB_ECONN;
    }
    return FB_OK;
}

enum fb_status fb_session_open(struct fb_session *s, const struct fb_cli *cli,
                               const struct fb_shape *shape, enum fb_codec codec,
                               uint32_t page_tokens)
{
    struct fb_pool_info info;
    struct fb_error error = {.text = "out of memory"};
    struct fb_manifest *manifest = NULL;
    enum fb_status status;

    *s = (struct fb_session){.shape = shape, .codec = codec};
    status = connect_pool(s, cli, &info);
    if (status != FB_OK) {
        goto err_close;
    }
    manifest = malloc(sizeof(*manifest));
    status = manifest ? fb_content_create(shape, &s->content) : FB_ENOMEM;
    if (status == FB_OK) {
        fb_shape_manifest(shape, info.tenant, codec, page_tokens, manifest);
        status = fb_pool_space_open(s->pool, manifest, &s->space, &error);
    }
    free(manifest);
    if (status != FB_OK) {
        fb_fail("cannot open the space: %s", error.text);
        goto err_close;
    }
    s->layout = fb_pool_space_layout(s->space);
    return FB_OK;

err_close:
    fb_session_close(s);
    return status;
}

void fb_session_close(struct fb_session *s)
{
    fb_content_destroy(s->content);
    fb_close(s->pool);
    memset(s, 0, sizeof(*s));
}

/* --- seat --- */

enum fb_status fb_seat_init(struct fb_seat *seat, const struct fb_session *session,
                            uint32_t max_pages)
{
    const struct fb_layout *layout = session->layout;
    uint64_t window = WINDOW_BYTES / layout->source_bytes;
    enum fb_status status;

    memset(seat, 0, sizeof(*seat));
    seat->session = session;
    window = window < 1 ? 1 : window;
    window = window < max_pages ? window : max_pages;
    status = fb_engine_init(&seat->cache, session->content, layout, (uint32_t)window, max_pages);
    if (status == FB_OK) {
        status = fb_engine_init(&seat->reference, session->content, layout, 1, 1);
    }
    seat->scratch = aligned_alloc(FB_BLOCK_ALIGN, layout->block_bytes);
    seat->token_ids = calloc(layout->page_tokens, sizeof(*seat->token_ids));
    if (status != FB_OK || !seat->scratch || !seat->token_ids) {
        fb_seat_fini(seat);
        return FB_ENOMEM;
    }
    return FB_OK;
}

void fb_seat_fini(struct fb_seat *seat)
{
    fb_engine_fini(&seat->cache);
    fb_engine_fini(&seat->reference);
    free(seat->scratch);
    free(seat->token_ids);
    memset(seat, 0, sizeof(*seat));
}

enum fb_status fb_seat_chain(struct fb_seat *seat, const uint64_t *ids, uint32_t pages,
                             uint8_t *ret_chain)
{
    uint32_t page_tokens = seat->session->layout->page_tokens;
    const uint8_t *previous = NULL;
    enum fb_status status = FB_OK;

    for (uint32_t p = 0; p < pages && status == FB_OK; p++) {
        uint8_t *hash = ret_chain + (size_t)p * FB_CHAIN_BYTES;

        fb_page_tokens(ids[p], page_tokens, seat->token_ids);
        status = fb_chain(previous, seat->token_ids, page_tokens, NULL, 0, hash);
        previous = hash;
    }
    return status;
}

/* A transfer of whole pages; page 0 of it is at page `base` of the cache's table. */
static struct fb_transfer whole_pages(const struct fb_seat *seat, uint32_t base, uint32_t first,
                                      uint32_t count)
{
    const struct fb_layout *layout = seat->session->layout;
    struct fb_transfer transfer = {
        .page_first = first,
        .page_count = count,
        .plane_count = layout->plane_count,
        .layer_count = layout->layer_count,
        .views = seat->cache.views,
        .map = seat->cache.map,
    };

    transfer.map.first_token = (uint64_t)base * layout->page_tokens;
    return transfer;
}

enum fb_status fb_seat_get(struct fb_seat *seat, struct fb_hit *hit, uint32_t first, uint32_t count,
                           enum fb_status *ret_statuses)
{
    struct fb_transfer transfer = whole_pages(seat, 0, first, count);

    return fb_get(hit, &transfer, 0, ret_statuses);
}

bool fb_seat_check(struct fb_seat *seat, uint32_t page, uint64_t page_id)
{
    fb_engine_compute(&seat->reference, 0, page_id);
    if (seat->session->codec != FB_CODEC_RAW &&
        fb_engine_round_trip(&seat->reference, 0, seat->scratch) != FB_OK) {
        return false;
    }
    return fb_engine_same(&seat->cache, page, &seat->reference, 0);
}

/* Encode and commit the pages of a reservation whose status is FB_OK. */
static enum fb_status write_pages(struct fb_seat *seat, struct fb_put *put, const uint64_t *ids,
                                  uint32_t first, uint32_t count, enum fb_status *statuses,
                                  uint64_t *ret_ns)
{
    struct fb_transfer transfer = whole_pages(seat, first, 0, count);
    uint64_t started;
    enum fb_status status;

    for (uint32_t i = 0; i < count; i++) {
        if (statuses[i] == FB_OK) {
            fb_engine_compute(&seat->cache, first + i, ids[first + i]);
        }
    }
    started = fb_now_ns();
    fb_put_encode(put, &transfer, statuses); /* pages it refuses are given up by the commit */
    status = fb_put_commit(put, FB_SESSION_TIMEOUT_NS, statuses);
    *ret_ns = fb_now_ns() - started;
    return status;
}

enum fb_status fb_seat_put(struct fb_seat *seat, const uint8_t *chain, const uint64_t *ids,
                           uint32_t first, uint32_t count, enum fb_status *ret_statuses,
                           uint64_t *ret_ns)
{
    const struct fb_session *s = seat->session;
    const uint8_t *hashes = chain + (size_t)first * FB_CHAIN_BYTES;
    const uint8_t *parent = first ? hashes - FB_CHAIN_BYTES : NULL;
    uint64_t started = fb_now_ns();
    uint64_t write_ns = 0;
    struct fb_put *put;
    enum fb_status status = fb_put_begin(s->pool, s->space, hashes, count, parent, first, NULL,
                                         FB_SESSION_TIMEOUT_NS, &put, ret_statuses);

    *ret_ns = fb_now_ns() - started;
    if (status == FB_OK) {
        status = write_pages(seat, put, ids, first, count, ret_statuses, &write_ns);
        *ret_ns += write_ns;
    }
    return status == FB_MISS ? FB_OK : status;
}
