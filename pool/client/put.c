/* Puts: reserve, encode, commit, abort. */
#include "pool/client/internal.h"

#include <stdlib.h>

_Static_assert(FB_PUT_MAX_PAGES == FB_MAX_HELD, "the limit that forebay.h names");

/* --- reserving --- */

static struct fb_put *make_put(struct fb_pool *pool, struct fb_pool_space *space,
                               const struct fb_put_part *part, uint32_t pages)
{
    const struct fb_layout *l = &space->layout;
    struct fb_put *put = calloc(1, sizeof(*put));

    if (!put) {
        return NULL;
    }
    put->pool = pool;
    put->space = space;
    put->pages = pages;
    put->part = part ? *part : (struct fb_put_part){0};
    if (put->part.plane_count == 0) {
        put->part.plane_count = l->plane_count;
    }
    if (put->part.layer_count == 0) {
        put->part.layer_count = l->layer_count;
    }
    put->page = calloc(pages, sizeof(*put->page));
    put->sums = calloc((size_t)pages * put->part.plane_count, sizeof(*put->sums));
    if (!put->page || !put->sums) {
        free(put->page);
        free(put->sums);
        free(put);
        return NULL;
    }
    return put;
}

static void free_put(struct fb_put *put)
{
    fb_map_release(put->pool, &put->refs);
    free(put->page);
    free(put->sums);
    free(put);
}

/* Once a successor of the daemon has been told what this process writes, it is too late for what
 * the old one had still given. */
static enum fb_status take_rows(struct fb_link *link, struct fb_put *put, uint32_t first,
                                uint32_t n)
{
    bool is_current;

    pthread_mutex_lock(&put->pool->mutex);
    is_current = fb_link_is_current(put->pool, link);
    for (uint32_t i = 0; i < n && is_current; i++) {
        struct fb_put_page *page = &put->page[first + i];
        struct fb_reserve_row row;

        memcpy(&row, link->reply.first + i * sizeof(row), sizeof(row));
        page->status = fb_status_valid(row.status) ? (enum fb_status)row.status : FB_EPROTO;
        page->where = row.where;
        page->claim = row.status == FB_OK ? row.claim : 0;
    }
    pthread_mutex_unlock(&put->pool->mutex);
    return is_current ? FB_OK : FB_ECONN;
}

/* Ask for pages [first, first + n). */
static enum fb_status reserve_part(struct fb_link *link, struct fb_put *put, const uint8_t *parent,
                                   uint64_t position, uint32_t first, uint32_t n,
                                   uint64_t deadline_ns)
{
    struct fb_reserve_request request = {
        .space = atomic_load(&put->space->handle),
        .count = n,
        .has_parent = parent != NULL,
        .plane_first = put->part.plane_first,
        .plane_count = put->part.plane_count,
        .layer_first = put->part.layer_first,
        .layer_count = put->part.layer_count,
        .position = position + first,
    };
    struct fb_wire_writer w;
    enum fb_status status;

    if (parent) {
        memcpy(request.parent, parent, FB_KEY_BYTES);
    }
    fb_link_begin(link, &w, FB_MSG_RESERVE, &request, sizeof(request));
    for (uint32_t i = 0; i < n; i++) {
        fb_wire_append(&w, put->page[first + i].key, FB_KEY_BYTES);
    }
    status = fb_link_call(put->pool, link, &w, NULL, 0, deadline_ns);
    if (status != FB_OK) {
        return status;
    }
    if (link->reply.list_reply.count != n) {
        return FB_EPROTO;
    }
    return take_rows(link, put, first, n);
}

static enum fb_status reserve_all(struct fb_link *link, struct fb_put *put, const uint8_t *parent,
                                  uint64_t position, uint64_t deadline_ns)
{
    enum fb_status status = FB_OK;

    for (uint32_t first = 0; first < put->pages && status == FB_OK;) {
        uint32_t left = put->pages - first;
        uint32_t n = left < FB_WIRE_MAX_CLAIMS ? left : FB_WIRE_MAX_CLAIMS;

        status = reserve_part(link, put, first ? put->page[first - 1].key : parent, position, first,
                              n, deadline_ns);
        first += n;
    }
    return status;
}

static void derive_keys(struct fb_link *link, struct fb_put *put, const uint8_t *chain)
{
    for (uint32_t i = 0; i < put->pages; i++) {
        fb_pool_keys(link->hasher, put->space->id, chain + (size_t)i * FB_CHAIN_BYTES, 1,
                     put->page[i].key);
        put->page[i].status = FB_AGAIN;
    }
}

static uint32_t count_claims(const struct fb_put *put)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < put->pages; i++) {
        n += put->page[i].claim != 0;
    }
    return n;
}

/* From now on the keeper names its claims; false when too much is held. */
static bool list_put(struct fb_put *put)
{
    struct fb_pool *pool = put->pool;
    bool ok;

    pthread_mutex_lock(&pool->mutex);
    ok = put->pages <= FB_MAX_HELD - pool->held;
    if (ok) {
        pool->held += put->pages;
        put->incarnation = pool->info.incarnation;
        LIST_INSERT_HEAD(&pool->puts, put, link);
    }
    pthread_mutex_unlock(&pool->mutex);
    return ok;
}

static void unlist_put(struct fb_put *put)
{
    struct fb_pool *pool = put->pool;

    pthread_mutex_lock(&pool->mutex);
    pool->held -= put->pages;
    LIST_REMOVE(put, link);
    pthread_mutex_unlock(&pool->mutex);
}

enum fb_status fb_put_begin(struct fb_pool *pool, struct fb_pool_space *space, const uint8_t *chain,
                            uint32_t pages, const uint8_t *parent, uint64_t position,
                            const struct fb_put_part *part, uint64_t timeout_ns,
                            struct fb_put **ret_put, enum fb_status *ret_statuses)
{
    uint64_t deadline_ns = fb_deadline(timeout_ns, FB_CONTROL_TIMEOUT_NS);
    uint8_t parent_key[FB_KEY_BYTES];
    struct fb_link *link;
    struct fb_put *put;
    enum fb_status status;

    if (pages == 0 || pages > FB_PUT_MAX_PAGES ||
        (position > 0 && !parent && space->rule == FB_RULE_FULL)) {
        return FB_EINVAL;
    }
    put = make_put(pool, space, part, pages);
    if (!put) {
        return FB_ENOMEM;
    }
    status = fb_link_take(pool, deadline_ns, &link);
    if (status != FB_OK) {
        free_put(put);
        return status;
    }
    derive_keys(link, put, chain);
    if (parent) {
        fb_pool_keys(link->hasher, space->id, parent, 1, parent_key);
    }
    if (!list_put(put)) {
        fb_link_give(pool, link, FB_OK);
        free_put(put);
        return FB_AGAIN;
    }
    status = reserve_all(link, put, parent ? parent_key : NULL, position, deadline_ns);
    fb_link_give(pool, link, status);
    for (uint32_t i = 0; i < pages; i++) {
        ret_statuses[i] = put->page[i].status;
    }
    if (status == FB_OK && count_claims(put) == 0) {
        status = FB_MISS;
    }
    if (status != FB_OK) {
        fb_put_abort(put);
        return status;
    }
    *ret_put = put;
    return FB_OK;
}

/* --- writing --- */

static enum fb_status map_page(struct fb_put *put, uint32_t page, uint8_t **ret_block)
{
    if (page >= put->pages || !put->page[page].claim) {
        return FB_ESTATE;
    }
    return fb_map_slot(put->pool, &put->refs, put->page[page].where, put->space->layout.block_bytes,
                       fb_deadline(0, FB_CONTROL_TIMEOUT_NS), ret_block);
}

static enum fb_status encode_page(struct fb_put *put, const struct fb_transfer *t, uint32_t page)
{
    const struct fb_layout *l = &put->space->layout;
    const struct fb_put_part *part = &put->part;
    uint64_t *sums = put->sums + (size_t)page * part->plane_count;
    uint8_t *block;
    enum fb_status status = map_page(put, page, &block);

    for (uint32_t p = 0; p < part->plane_count && status == FB_OK; p++) {
        sums[p] = 0;
        for (uint32_t i = 0; i < part->layer_count && status == FB_OK; i++) {
            uint32_t plane = part->plane_first + p, layer = part->layer_first + i;
            struct fb_token_map map = fb_transfer_map(t, i, page, l->page_tokens);
            uint64_t sum = 0, bad_rows;

            status = fb_segment_encode(put->pool->kernels, l, layer, t->head_first + p,
                                       t->views + (size_t)i * l->section_count, &map,
                                       fb_sum_seed(put->page[page].key, plane, layer),
                                       block + fb_layout_segment(l, plane, layer), &sum, &bad_rows);
            sums[p] += sum;
        }
    }
    put->page[page].written = status == FB_OK;
    return status;
}

enum fb_status fb_put_encode(struct fb_put *put, const struct fb_transfer *transfer,
                             enum fb_status *ret_statuses)
{
    const struct fb_transfer *t = transfer;
    enum fb_status first = FB_OK;

    if (t->page_first > put->pages || t->page_count > put->pages - t->page_first ||
        t->plane_first != put->part.plane_first || t->plane_count != put->part.plane_count ||
        t->layer_first != put->part.layer_first || t->layer_count != put->part.layer_count ||
        !t->views || !fb_transfer_is_mapped(t)) {
        return FB_EINVAL;
    }
    for (uint32_t i = 0; i < t->page_count; i++) {
        ret_statuses[i] = encode_page(put, t, t->page_first + i);
        if (first == FB_OK && ret_statuses[i] != FB_ESTATE) {
            first = ret_statuses[i];
        }
    }
    return first;
}

enum fb_status fb_put_block(struct fb_put *put, uint32_t page, uint8_t **ret_block,
                            uint8_t ret_key[FB_KEY_BYTES])
{
    enum fb_status status = map_page(put, page, ret_block);

    if (status == FB_OK) {
        memcpy(ret_key, put->page[page].key, FB_KEY_BYTES);
    }
    return status;
}

enum fb_status fb_put_set_sums(struct fb_put *put, uint32_t page, const uint64_t *sums)
{
    if (page >= put->pages || !put->page[page].claim) {
        return FB_ESTATE;
    }
    memcpy(put->sums + (size_t)page * put->part.plane_count, sums,
           put->part.plane_count * sizeof(*sums));
    put->page[page].written = true;
    return FB_OK;
}

/* --- ending --- */

/* Pages of one message: as many as fit with their sums. */
static uint32_t commit_batch(const struct fb_put *put)
{
    uint32_t by_sums = FB_WIRE_MAX_SUMS / put->part.plane_count;

    return by_sums < FB_WIRE_MAX_CLAIMS ? by_sums : FB_WIRE_MAX_CLAIMS;
}

/* Commit up to a batch of written pages from *at on; *at moves behind them. */
static enum fb_status commit_some(struct fb_link *link, struct fb_put *put, uint32_t *at,
                                  uint64_t deadline_ns)
{
    struct fb_commit_request request = {.plane_count = put->part.plane_count};
    uint32_t pages[FB_WIRE_MAX_CLAIMS], batch = commit_batch(put);
    struct fb_wire_writer w;
    enum fb_status status;

    for (; *at < put->pages && request.count < batch; ++*at) {
        if (put->page[*at].claim && put->page[*at].written) {
            pages[request.count++] = *at;
        }
    }
    if (request.count == 0) {
        return FB_OK;
    }
    fb_link_begin(link, &w, FB_MSG_COMMIT, &request, sizeof(request));
    for (uint32_t i = 0; i < request.count; i++) {
        fb_wire_append(&w, &put->page[pages[i]].claim, sizeof(uint64_t));
    }
    for (uint32_t i = 0; i < request.count; i++) {
        fb_wire_append(&w, put->sums + (size_t)pages[i] * request.plane_count,
                       request.plane_count * sizeof(uint64_t));
    }
    status = fb_link_call(put->pool, link, &w, NULL, 0, deadline_ns);
    if (status == FB_OK && link->reply.list_reply.count != request.count) {
        status = FB_EPROTO;
    }
    pthread_mutex_lock(&put->pool->mutex);
    for (uint32_t i = 0; i < request.count; i++) {
        struct fb_put_page *page = &put->page[pages[i]];
        uint32_t s = status == FB_OK ? fb_wire_u32(link->reply.first, i) : (uint32_t)status;

        page->claim = 0;
        page->status = fb_status_valid(s) ? (enum fb_status)s : FB_EPROTO;
    }
    pthread_mutex_unlock(&put->pool->mutex);
    return status;
}

/* Give up to a message's worth of claims up, from page *at on. */
static uint32_t cancel_claims(struct fb_put *put, uint32_t *at, uint64_t claims[FB_WIRE_MAX_CLAIMS])
{
    uint32_t n = 0;

    pthread_mutex_lock(&put->pool->mutex);
    for (; *at < put->pages && n < FB_WIRE_MAX_CLAIMS; ++*at) {
        struct fb_put_page *page = &put->page[*at];

        if (page->claim) {
            claims[n++] = page->claim;
            page->claim = 0;
            page->status = FB_ECANCELED;
        }
    }
    pthread_mutex_unlock(&put->pool->mutex);
    return n;
}

/* Nobody waits: what does not arrive runs out, and the keeper's list does not name it. */
static void post_aborts(struct fb_link *link, struct fb_put *put)
{
    struct fb_list_request request;
    uint64_t claims[FB_WIRE_MAX_CLAIMS];
    struct fb_wire_writer w;
    uint32_t at = 0;

    while ((request.count = cancel_claims(put, &at, claims)) > 0) {
        fb_link_begin(link, &w, FB_MSG_ABORT, &request, sizeof(request));
        fb_wire_append(&w, claims, request.count * sizeof(*claims));
        fb_link_post(put->pool, link, &w);
    }
}

static void post_held_lease(struct fb_link *link, const struct fb_put *put)
{
    struct fb_list_request request = {.count = 1};
    struct fb_wire_writer w;

    if (put->held_lease) {
        fb_link_begin(link, &w, FB_MSG_RELEASE, &request, sizeof(request));
        fb_wire_append(&w, &put->held_lease, sizeof(put->held_lease));
        fb_link_post(put->pool, link, &w);
    }
}

/* Claims of a daemon that is gone name nothing. */
static bool claims_are_void(struct fb_put *put)
{
    bool is_void;

    pthread_mutex_lock(&put->pool->mutex);
    is_void = put->resumed || put->incarnation != put->pool->info.incarnation;
    pthread_mutex_unlock(&put->pool->mutex);
    return is_void;
}

static enum fb_status end_claims(struct fb_link *link, struct fb_put *put, bool commit,
                                 uint64_t deadline_ns)
{
    enum fb_status status = FB_OK;

    if (claims_are_void(put)) {
        return FB_OK;
    }
    for (uint32_t at = 0; commit && at < put->pages && status == FB_OK;) {
        status = commit_some(link, put, &at, deadline_ns);
    }
    if (status == FB_OK) {
        post_aborts(link, put);
    }
    return status;
}

/* What the daemon is not told now it learns from the keeper's next list. */
static enum fb_status end_put(struct fb_put *put, bool commit, uint64_t deadline_ns,
                              enum fb_status *ret_statuses)
{
    struct fb_link *link = NULL;
    enum fb_status status = fb_link_take(put->pool, deadline_ns, &link);

    if (status == FB_OK) {
        status = end_claims(link, put, commit, deadline_ns);
    }
    unlist_put(put);
    if (link) {
        if (status == FB_OK) {
            post_held_lease(link, put);
        }
        fb_link_give(put->pool, link, status);
    }
    for (uint32_t i = 0; i < put->pages && ret_statuses; i++) {
        enum fb_status unknown = status == FB_OK ? FB_ESTATE : status;

        ret_statuses[i] = put->page[i].claim ? unknown : put->page[i].status;
    }
    return status;
}

enum fb_status fb_put_commit(struct fb_put *put, uint64_t timeout_ns, enum fb_status *ret_statuses)
{
    enum fb_status status =
        end_put(put, true, fb_deadline(timeout_ns, FB_CONTROL_TIMEOUT_NS), ret_statuses);

    free_put(put);
    return status;
}

void fb_put_abort(struct fb_put *put)
{
    if (put) {
        end_put(put, false, fb_deadline(0, FB_LOOKUP_TIMEOUT_NS), NULL);
        free_put(put);
    }
}
