/* A program of a user: put two pages, find them, read them back. It needs the installed header and
 * library only. Exit status 0 when the bytes are the same. */
#include <forebay.h>

#include <stdio.h>
#include <string.h>

enum { HEADS = 2, DIM = 32, PAGE = 16, PAGES = 2, TOKENS = PAGES * PAGE };

static uint16_t written[2][TOKENS][HEADS][DIM], read_back[2][TOKENS][HEADS][DIM]; /* K and V */

static const struct fb_manifest manifest = {
    .tenant = "default",
    .model = "example/consumer@1",
    .rule = FB_RULE_FULL,
    .page_tokens = PAGE,
    .layer_count = 1,
    .head_count = HEADS,
    .head_total = HEADS,
    .section_count = 2,
    .sections = {{FB_SECTION_K, FB_ELEM_BF16, FB_CODEC_RAW, 0, 1, DIM, 0},
                 {FB_SECTION_V, FB_ELEM_BF16, FB_CODEC_RAW, 0, 1, DIM, 0}},
};

static struct fb_transfer transfer_of(void *keys, void *values, struct fb_paged_view views[2])
{
    static const int64_t block = 0;

    views[0] = (struct fb_paged_view){keys, 0, HEADS * DIM, DIM, 1};
    views[1] = (struct fb_paged_view){values, 0, HEADS * DIM, DIM, 1};
    return (struct fb_transfer){
        .page_count = PAGES,
        .plane_count = HEADS,
        .layer_count = 1,
        .views = views,
        .map = {.block_ids = &block, .block_count = 1, .block_tokens = TOKENS},
    };
}

static int fail(const char *what, enum fb_status status)
{
    fprintf(stderr, "%s: %s\n", what, fb_status_text(status));
    return 1;
}

static enum fb_status put(struct fb_pool *pool, struct fb_pool_space *space, const uint8_t *chain)
{
    enum fb_status statuses[PAGES], status;
    struct fb_paged_view views[2];
    struct fb_transfer t = transfer_of(written[0], written[1], views);
    struct fb_put *put;

    status = fb_put_begin(pool, space, chain, PAGES, NULL, 0, NULL, 0, &put, statuses);
    if (status != FB_OK) {
        return status;
    }
    status = fb_put_encode(put, &t, statuses);
    if (status != FB_OK) {
        fb_put_abort(put);
        return status;
    }
    return fb_put_commit(put, 0, NULL);
}

static enum fb_status get(struct fb_pool *pool, struct fb_pool_space *space, const uint8_t *chain)
{
    enum fb_status statuses[PAGES], status;
    struct fb_paged_view views[2];
    struct fb_transfer t = transfer_of(read_back[0], read_back[1], views);
    struct fb_hit *hit;

    status = fb_lookup(pool, &space, 1, chain, PAGES, 0, FB_CONTROL_TIMEOUT_NS, &hit);
    if (status != FB_OK) {
        return status;
    }
    status = fb_hit_pages(hit) == PAGES ? fb_get(hit, &t, 0, statuses) : FB_MISS;
    fb_hit_release(hit);
    return status;
}

int main(void)
{
    uint8_t chain[PAGES][FB_CHAIN_BYTES];
    uint32_t ids[PAGE] = {0};
    struct fb_pool_space *space;
    struct fb_error error;
    enum fb_status status;
    struct fb_pool *pool;

    memset(written, 0x3c, sizeof(written));
    for (int page = 0; page < PAGES; page++) {
        fb_chain(page ? chain[page - 1] : NULL, ids, PAGE, NULL, 0, chain[page]);
    }
    status = fb_open(NULL, NULL, &pool, &error);
    if (status == FB_OK) {
        status = fb_pool_space_open(pool, &manifest, &space, &error);
    }
    if (status != FB_OK) {
        return fail(error.text, status);
    }
    status = put(pool, space, chain[0]);
    if (status != FB_OK && status != FB_MISS) { /* an earlier run has put it already */
        return fail("put", status);
    }
    status = get(pool, space, chain[0]);
    fb_close(pool);
    if (status != FB_OK) {
        return fail("get", status);
    }
    printf("forebay %s: %d pages came back\n", fb_version(), PAGES);
    return memcmp(written, read_back, sizeof(written)) != 0;
}
