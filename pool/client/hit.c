/* Hits: lookup, attach, map, get, release. */
#include "pool/client/internal.h"

#include <stdlib.h>

/* --- hits as objects --- */

static struct fb_hit *make_hit(struct fb_pool *pool, struct fb_pool_space *const *family,
                               uint32_t count, uint32_t capacity)
{
    struct fb_hit *hit = calloc(1, sizeof(*hit));

    if (!hit) {
        return NULL;
    }
    hit->pool = pool;
    memcpy(hit->family, family, count * sizeof(*family));
    hit->count = count;
    hit->capacity = capacity;
    hit->keys = malloc((size_t)count * capacity * FB_KEY_BYTES);
    hit->locations = malloc((size_t)count * capacity * sizeof(*hit->locations));
    if (!hit->keys || !hit->locations) {
        free(hit->keys);
        free(hit->locations);
        free(hit);
        return NULL;
    }
    memset(hit->locations, 0xff, (size_t)count * capacity * sizeof(*hit->locations));
    return hit;
}

static void free_hit(struct fb_hit *hit)
{
    fb_map_release(hit->pool, &hit->refs);
    free(hit->keys);
    free(hit->locations);
    free(hit);
}

/* From now on the keeper renews its leases, and names its slots to the daemon's successors.
 * returns FB_OK | FB_AGAIN (too much is held) | FB_ECONN (a successor has been told already) */
static enum fb_status list_hit(struct fb_hit *hit, const struct fb_link *link)
{
    struct fb_pool *pool = hit->pool;
    enum fb_status status = FB_OK;

    pthread_mutex_lock(&pool->mutex);
    if (!fb_link_is_current(pool, link)) {
        status = FB_ECONN;
    } else if (pool->held + hit->lease_count > FB_MAX_HELD) {
        status = FB_AGAIN;
    } else {
        hit->held = hit->lease_count;
        pool->held += hit->held;
        hit->incarnation = pool->info.incarnation;
        LIST_INSERT_HEAD(&pool->hits, hit, link);
    }
    pthread_mutex_unlock(&pool->mutex);
    return status;
}

static void unlist_hit(struct fb_hit *hit)
{
    pthread_mutex_lock(&hit->pool->mutex);
    hit->pool->held -= hit->held;
    LIST_REMOVE(hit, link);
    pthread_mutex_unlock(&hit->pool->mutex);
}

static void post_release(struct fb_pool *pool, const uint64_t *leases, uint32_t n)
{
    struct fb_list_request request = {.count = n};
    struct fb_wire_writer w;
    struct fb_link *link;

    /* Where this fails the lease runs out, and the keeper's next list does not name it. */
    if (n == 0 || fb_link_take(pool, fb_deadline(0, FB_LOOKUP_TIMEOUT_NS), &link) != FB_OK) {
        return;
    }
    fb_link_begin(link, &w, FB_MSG_RELEASE, &request, sizeof(request));
    fb_wire_append(&w, leases, n * sizeof(*leases));
    fb_link_give(pool, link, fb_link_post(pool, link, &w));
}

void fb_hit_release(struct fb_hit *hit)
{
    if (hit) {
        unlist_hit(hit);
        post_release(hit->pool, hit->leases, hit->lease_count);
        free_hit(hit);
    }
}

uint32_t fb_hit_pages(const struct fb_hit *hit)
{
    return hit->pages;
}

uint32_t fb_hit_leases(const struct fb_hit *hit, uint64_t ret_leases[FB_HIT_MAX_LEASES])
{
    uint32_t n;

    pthread_mutex_lock(&hit->pool->mutex);
    n = hit->lease_count;
    memcpy(ret_leases, hit->leases, n * sizeof(*ret_leases));
    pthread_mutex_unlock(&hit->pool->mutex);
    return n;
}

/* --- lookup --- */

static enum fb_status check_family(struct fb_pool_space *const *family, uint32_t count,
                                   uint32_t pages, bool *ret_all_full)
{
    if (count == 0 || count > FB_MAX_FAMILY || pages == 0) {
        return FB_EINVAL;
    }
    *ret_all_full = true;
    for (uint32_t s = 0; s < count; s++) {
        if (family[s]->layout.page_tokens != family[0]->layout.page_tokens) {
            return FB_EINVAL;
        }
        if (atomic_load(&family[s]->handle) == FB_NO_HANDLE) {
            return FB_ENOENT;
        }
        *ret_all_full &= family[s]->rule == FB_RULE_FULL;
    }
    return FB_OK;
}

/* Ask for pages [first, first + pages) and add what is found to the hit. */
static enum fb_status lookup_part(struct fb_link *link, struct fb_hit *hit, const uint8_t *chain,
                                  uint32_t first, uint32_t pages, uint32_t flags,
                                  uint64_t deadline_ns)
{
    struct fb_lookup_request request = {hit->count, pages, flags};
    const struct fb_lookup_reply *reply = &link->reply.lookup_reply;
    struct fb_wire_writer w;
    enum fb_status status;

    fb_link_begin(link, &w, FB_MSG_LOOKUP, &request, sizeof(request));
    for (uint32_t s = 0; s < hit->count; s++) {
        uint32_t handle = atomic_load(&hit->family[s]->handle);

        fb_wire_append(&w, &handle, sizeof(handle));
    }
    for (uint32_t s = 0; s < hit->count; s++) {
        uint8_t *keys = fb_wire_append(&w, NULL, (size_t)pages * FB_KEY_BYTES);

        fb_pool_keys(link->hasher, hit->family[s]->id, chain + (size_t)first * FB_CHAIN_BYTES,
                     pages, keys);
        memcpy(hit->keys + ((size_t)s * hit->capacity + first) * FB_KEY_BYTES, keys,
               (size_t)pages * FB_KEY_BYTES);
    }
    status = fb_link_call(hit->pool, link, &w, NULL, 0, deadline_ns);
    if (status != FB_OK) {
        return status;
    }
    if (reply->page_count > pages || (reply->page_count > 0 && reply->space_count != hit->count)) {
        return FB_EPROTO;
    }
    if (reply->page_count == 0) {
        return FB_MISS;
    }
    for (uint32_t s = 0; s < hit->count; s++) {
        memcpy(hit->locations + (size_t)s * hit->capacity + first,
               link->reply.first + (size_t)s * reply->page_count * sizeof(*hit->locations),
               reply->page_count * sizeof(*hit->locations));
    }
    hit->leases[hit->lease_count++] = reply->lease;
    hit->pages = first + reply->page_count;
    return FB_OK;
}

/* Long chains are asked for in parts, as long as each part is there whole. That works where every
 * space needs every page. */
static enum fb_status lookup_parts(struct fb_link *link, struct fb_hit *hit, const uint8_t *chain,
                                   uint32_t pages, uint32_t options, uint64_t deadline_ns)
{
    uint32_t part = FB_WIRE_MAX_KEYS / hit->count;
    enum fb_status status = FB_OK;

    while (status == FB_OK && hit->pages < pages && hit->lease_count < FB_HIT_MAX_LEASES) {
        uint32_t first = hit->pages;
        uint32_t some = pages - first < part ? pages - first : part;

        status = lookup_part(link, hit, chain, first, some, options, deadline_ns);
        if (status == FB_OK && hit->pages < first + some) {
            break;
        }
    }
    return hit->pages > 0 && (status == FB_MISS || status == FB_AGAIN) ? FB_OK : status;
}

enum fb_status fb_lookup(struct fb_pool *pool, struct fb_pool_space *const *family, uint32_t count,
                         const uint8_t *chain, uint32_t pages, uint32_t options,
                         uint64_t timeout_ns, struct fb_hit **ret_hit)
{
    uint64_t deadline_ns = fb_deadline(timeout_ns, FB_LOOKUP_TIMEOUT_NS);
    struct fb_link *link;
    struct fb_hit *hit;
    bool all_full;
    enum fb_status status = fb_link_take(pool, deadline_ns, &link);

    if (status != FB_OK) {
        return status;
    }
    status = check_family(family, count, pages, &all_full);
    if (status != FB_OK) {
        fb_link_give(pool, link, FB_OK);
        return status;
    }
    if (!all_full && pages > FB_WIRE_MAX_KEYS / count) {
        pages = FB_WIRE_MAX_KEYS / count;
    }
    hit = make_hit(pool, family, count, pages);
    status = hit ? lookup_parts(link, hit, chain, pages, options, deadline_ns) : FB_ENOMEM;
    if (status == FB_OK) {
        status = list_hit(hit, link);
    }
    fb_link_give(pool, link, status);
    if (status == FB_OK) {
        *ret_hit = hit;
    } else if (hit) {
        post_release(pool, hit->leases, hit->lease_count);
        free_hit(hit);
    }
    return status;
}

/* Spread an attach reply over the hit: leases follow each other along the chain. */
static enum fb_status take_attached(struct fb_hit *hit, const struct fb_link *link,
                                    const uint64_t *leases, uint32_t n)
{
    const uint8_t *locations = link->reply.second;

    if (link->reply.list_reply.count != n) {
        return FB_EPROTO;
    }
    for (uint32_t i = 0; i < n; i++) {
        struct fb_attach_row row;

        memcpy(&row, link->reply.first + i * sizeof(row), sizeof(row));
        if (row.status != FB_OK) {
            return (enum fb_status)row.status;
        }
        if (row.space_count != hit->count || row.page_count > hit->capacity - hit->pages) {
            return FB_EINVAL; /* not the family or the chain that was looked up */
        }
        for (uint32_t s = 0; s < hit->count; s++) {
            memcpy(hit->locations + (size_t)s * hit->capacity + hit->pages, locations,
                   row.page_count * sizeof(*hit->locations));
            locations += row.page_count * sizeof(*hit->locations);
        }
        hit->leases[hit->lease_count++] = leases[i];
        hit->pages += row.page_count;
    }
    return FB_OK;
}

enum fb_status fb_attach(struct fb_pool *pool, struct fb_pool_space *const *family, uint32_t count,
                         const uint8_t *chain, uint32_t pages, const uint64_t *leases,
                         uint32_t lease_count, uint64_t timeout_ns, struct fb_hit **ret_hit)
{
    uint64_t deadline_ns = fb_deadline(timeout_ns, FB_CONTROL_TIMEOUT_NS);
    struct fb_list_request request = {.count = lease_count};
    struct fb_wire_writer w;
    struct fb_link *link;
    struct fb_hit *hit;
    bool all_full;
    enum fb_status status = check_family(family, count, pages, &all_full);

    if (status != FB_OK || lease_count == 0 || lease_count > FB_HIT_MAX_LEASES) {
        return status != FB_OK ? status : FB_EINVAL;
    }
    status = fb_link_take(pool, deadline_ns, &link);
    if (status != FB_OK) {
        return status;
    }
    hit = make_hit(pool, family, count, pages);
    if (!hit) {
        fb_link_give(pool, link, FB_OK);
        return FB_ENOMEM;
    }
    for (uint32_t s = 0; s < count; s++) {
        fb_pool_keys(link->hasher, family[s]->id, chain, pages,
                     hit->keys + (size_t)s * pages * FB_KEY_BYTES);
    }
    fb_link_begin(link, &w, FB_MSG_ATTACH, &request, sizeof(request));
    fb_wire_append(&w, leases, lease_count * sizeof(*leases));
    status = fb_link_call(pool, link, &w, NULL, 0, deadline_ns);
    if (status == FB_OK) {
        status = take_attached(hit, link, leases, lease_count);
    }
    if (status == FB_OK) {
        status = list_hit(hit, link);
    }
    fb_link_give(pool, link, status);
    if (status != FB_OK) {
        post_release(pool, leases, lease_count); /* those that were attached */
        free_hit(hit);
        return status;
    }
    *ret_hit = hit;
    return FB_OK;
}

enum fb_status fb_prefetch(struct fb_pool *pool, struct fb_pool_space *const *family,
                           uint32_t count, const uint8_t *chain, uint32_t pages,
                           uint64_t timeout_ns)
{
    struct fb_hit *hit;
    enum fb_status status =
        fb_lookup(pool, family, count, chain, pages, FB_LOOKUP_READ_AHEAD, timeout_ns, &hit);

    if (status == FB_OK) {
        fb_hit_release(hit);
    }
    return status;
}

/* --- reading --- */

static const uint8_t *key_of(const struct fb_hit *hit, uint32_t space, uint32_t page)
{
    return hit->keys + ((size_t)space * hit->capacity + page) * FB_KEY_BYTES;
}

enum fb_status fb_hit_map(struct fb_hit *hit, uint32_t space, uint32_t page,
                          const uint8_t **ret_block)
{
    struct fb_wire_location where;
    const struct fb_layout *l;
    enum fb_status status;
    uint8_t *block;

    if (space >= hit->count || page >= hit->pages) {
        return FB_EINVAL;
    }
    where = hit->locations[(size_t)space * hit->capacity + page];
    if (where.chunk == FB_WIRE_NOWHERE || atomic_load(&hit->lost)) {
        return FB_MISS;
    }
    l = &hit->family[space]->layout;
    status = fb_map_slot(hit->pool, &hit->refs, where, l->block_bytes,
                         fb_deadline(0, FB_CONTROL_TIMEOUT_NS), &block);
    if (status == FB_OK) {
        status = fb_block_header_check((const struct fb_block_header *)block, NULL);
    }
    if (status == FB_OK) {
        status = fb_block_header_match((const struct fb_block_header *)block,
                                       hit->family[space]->id, key_of(hit, space, page), l);
    }
    if (status == FB_OK) {
        *ret_block = block;
    }
    return status;
}

static enum fb_status check_transfer(const struct fb_transfer *t, const struct fb_layout *l,
                                     uint32_t pages)
{
    bool ok = t->page_first <= pages && t->page_count <= pages - t->page_first &&
              t->plane_first < l->plane_count && t->plane_count > 0 &&
              t->plane_count <= l->plane_count - t->plane_first &&
              t->layer_first < l->layer_count && t->layer_count > 0 &&
              t->layer_count <= l->layer_count - t->layer_first && t->views &&
              fb_transfer_is_mapped(t);

    return ok ? FB_OK : FB_EINVAL;
}

/* Tokens of a page that the transfer wants, relative to the page. */
static void clip_tokens(const struct fb_transfer *t, const struct fb_layout *l, uint32_t page,
                        uint32_t *ret_first, uint32_t *ret_count)
{
    uint64_t begin = (uint64_t)page * l->page_tokens, end = begin + l->page_tokens;
    uint64_t from = t->token_count ? t->token_first : begin;
    uint64_t to = t->token_count ? t->token_first + t->token_count : end;

    from = from > begin ? from : begin;
    to = to < end ? to : end;
    *ret_first = (uint32_t)(from - begin);
    *ret_count = to > from ? (uint32_t)(to - from) : 0;
}

/* One plane's layers of one page. Where all layers are read the plane's sum is checked as well. */
static enum fb_status get_plane(struct fb_hit *hit, const struct fb_transfer *t, uint32_t page,
                                const uint8_t *block, uint32_t plane, uint32_t token_first,
                                uint32_t token_count)
{
    const struct fb_layout *l = &hit->family[t->space]->layout;
    const struct fb_block_header *header = (const struct fb_block_header *)block;
    const uint8_t *key = key_of(hit, t->space, page);
    uint64_t total = 0;

    for (uint32_t i = 0; i < t->layer_count; i++) {
        struct fb_token_map map = fb_transfer_map(t, i, page, l->page_tokens);
        uint32_t layer = t->layer_first + i;
        uint64_t sum = 0;
        enum fb_status status = fb_segment_decode(
            hit->pool->kernels, l, layer, t->head_first + plane - t->plane_first,
            t->views + (size_t)i * l->section_count, &map, token_first, token_count,
            fb_sum_seed(key, plane, layer), block + fb_layout_segment(l, plane, layer), &sum);

        if (status != FB_OK) {
            return status;
        }
        total += sum;
    }
    if (t->layer_count == l->layer_count && total != header->plane_sums[plane]) {
        return FB_ECORRUPT;
    }
    return FB_OK;
}

static enum fb_status get_page(struct fb_hit *hit, const struct fb_transfer *t, uint32_t page)
{
    const struct fb_layout *l = &hit->family[t->space]->layout;
    uint32_t token_first, token_count;
    const uint8_t *block;
    enum fb_status status = fb_hit_map(hit, t->space, page, &block);

    clip_tokens(t, l, page, &token_first, &token_count);
    for (uint32_t i = 0; i < t->plane_count && status == FB_OK && token_count > 0; i++) {
        status = get_plane(hit, t, page, block, t->plane_first + i, token_first, token_count);
    }
    return status;
}

/* Tell the daemon, without waiting for what it makes of it. */
static void post_reject(struct fb_hit *hit, uint32_t space, uint32_t page)
{
    struct fb_reject_request request = {.space = atomic_load(&hit->family[space]->handle),
                                        .count = 1};
    struct fb_wire_writer w;
    struct fb_link *link;

    if (fb_link_take(hit->pool, fb_deadline(0, FB_LOOKUP_TIMEOUT_NS), &link) == FB_OK) {
        fb_link_begin(link, &w, FB_MSG_REJECT, &request, sizeof(request));
        fb_wire_append(&w, key_of(hit, space, page), FB_KEY_BYTES);
        fb_link_give(hit->pool, link, fb_link_post(hit->pool, link, &w));
    }
}

/* A slow mean, so that one slow transfer does not change much. */
static void note_bandwidth(struct fb_pool *pool, uint64_t bytes, uint64_t ns)
{
    uint64_t old = atomic_load(&pool->bytes_per_s);

    if (bytes > 65536 && ns > 0) {
        uint64_t rate = (uint64_t)((double)bytes * 1e9 / (double)ns);

        atomic_store(&pool->bytes_per_s, old - old / 8 + rate / 8 + 1);
    }
}

enum fb_status fb_get(struct fb_hit *hit, const struct fb_transfer *transfer, uint64_t timeout_ns,
                      enum fb_status *ret_statuses)
{
    const struct fb_transfer *t = transfer;
    enum fb_status first = FB_OK;
    const struct fb_layout *l;
    uint64_t begun_ns = fb_now_ns(), deadline_ns, bytes, rate;

    if (t->space >= hit->count ||
        check_transfer(t, &hit->family[t->space]->layout, hit->pages) != FB_OK) {
        return FB_EINVAL;
    }
    l = &hit->family[t->space]->layout;
    bytes = (uint64_t)t->page_count * t->plane_count * l->plane_bytes;
    rate = atomic_load(&hit->pool->bytes_per_s) / 4 + 1;
    deadline_ns = begun_ns + (timeout_ns ? timeout_ns
                                         : FB_TRANSFER_TIMEOUT_NS +
                                               (uint64_t)((double)bytes * 1e9 / (double)rate));
    for (uint32_t i = 0; i < t->page_count; i++) {
        uint32_t page = t->page_first + i;

        ret_statuses[i] = fb_now_ns() < deadline_ns ? get_page(hit, t, page) : FB_ETIMEDOUT;
        if (ret_statuses[i] == FB_ECORRUPT) {
            post_reject(hit, t->space, page);
        }
        first = first == FB_OK ? ret_statuses[i] : first;
    }
    if (first == FB_OK) {
        note_bandwidth(hit->pool, bytes, fb_now_ns() - begun_ns);
    }
    return first;
}
