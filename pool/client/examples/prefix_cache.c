/* A first program: put the KV of a prompt once, find it again, read it back.
 *
 *     cc prefix_cache.c $(pkg-config --cflags --libs forebay) -o prefix_cache
 *     FOREBAY_SOCKET=/run/forebay/default/forebay.sock ./prefix_cache */
#include <forebay.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 2, HEADS = 2, DIM = 64, PAGE = 64, PAGES = 4, TOKENS = PAGES * PAGE };

/* An engine's cache of one section: [layers, tokens, heads, dim] bf16, one block of TOKENS. */
static uint16_t key_cache[LAYERS][TOKENS][HEADS][DIM], value_cache[LAYERS][TOKENS][HEADS][DIM];

static void describe(struct fb_manifest *m)
{
    *m = (struct fb_manifest){
        .tenant = "default",
        .model = "example/tiny@1",
        .rule = FB_RULE_FULL,
        .page_tokens = PAGE,
        .layer_count = LAYERS,
        .layers = {0, 1},
        .head_count = HEADS,
        .head_total = HEADS,
        .section_count = 2,
        .sections =
            {
                {FB_SECTION_K, FB_ELEM_BF16, FB_CODEC_FP8_E4M3, 0, LAYERS, DIM, 0},
                {FB_SECTION_V, FB_ELEM_BF16, FB_CODEC_FP8_E4M3, 0, LAYERS, DIM, 0},
            },
    };
}

static void chain_of_prompt(uint8_t chain[PAGES][FB_CHAIN_BYTES])
{
    uint32_t ids[PAGE];

    for (uint32_t page = 0; page < PAGES; page++) {
        for (uint32_t i = 0; i < PAGE; i++) {
            ids[i] = page * PAGE + i;
        }
        fb_chain(page ? chain[page - 1] : NULL, ids, PAGE, NULL, 0, chain[page]);
    }
}

int main(void)
{
    static const int64_t blocks[1] = {0};
    struct fb_paged_view views[LAYERS][2];
    uint8_t chain[PAGES][FB_CHAIN_BYTES];
    enum fb_status statuses[PAGES];
    struct fb_pool_space *space;
    struct fb_manifest manifest;
    struct fb_error error;
    struct fb_pool *pool;
    struct fb_put *put;
    struct fb_hit *hit;

    for (int layer = 0; layer < LAYERS; layer++) {
        views[layer][0] = (struct fb_paged_view){key_cache[layer], 0, HEADS * DIM, DIM, 1};
        views[layer][1] = (struct fb_paged_view){value_cache[layer], 0, HEADS * DIM, DIM, 1};
    }
    memset(key_cache, 0x3f, sizeof(key_cache));
    struct fb_transfer all = {
        .page_count = PAGES,
        .plane_count = HEADS,
        .layer_count = LAYERS,
        .views = views[0],
        .map = {.block_ids = blocks, .block_count = 1, .block_tokens = TOKENS},
    };
    describe(&manifest);
    chain_of_prompt(chain);
    if (fb_open(NULL, NULL, &pool, &error) != FB_OK ||
        fb_pool_space_open(pool, &manifest, &space, &error) != FB_OK) {
        fprintf(stderr, "%s\n", error.text);
        return EXIT_FAILURE;
    }
    if (fb_put_begin(pool, space, chain[0], PAGES, NULL, 0, NULL, 0, &put, statuses) == FB_OK) {
        fb_put_encode(put, &all, statuses);
        fb_put_commit(put, 0, NULL);
    }
    if (fb_lookup(pool, &space, 1, chain[0], PAGES, 0, 0, &hit) == FB_OK) {
        printf("%u of %d pages are in the pool\n", fb_hit_pages(hit), PAGES);
        all.page_count = fb_hit_pages(hit);
        printf("get: %s\n", fb_status_text(fb_get(hit, &all, 0, statuses)));
        fb_hit_release(hit);
    } else {
        printf("nothing in the pool: is forebayd running?\n");
    }
    fb_close(pool);
    return EXIT_SUCCESS;
}
