/* One daemon, one pool, one space. */
#include "tests/integration/fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#define PUT_PAGES 3000 /* of one put, at most */

void fixture_manifest(struct fb_manifest *m)
{
    manifest_make(m, FIXTURE_LAYERS, FIXTURE_HEADS, 64, FB_CODEC_FP8_E4M3);
    m->page_tokens = FIXTURE_PAGE;
}

void fixture_init(struct fixture *f, const char *const *flags)
{
    struct fb_error error;

    *f = (struct fixture){0};
    daemon_init(&f->daemon);
    daemon_start(&f->daemon, flags);
    fixture_manifest(&f->manifest);
    assert_true(engine_init(&f->from, &f->manifest, 16, FIXTURE_PAGES));
    assert_true(engine_init(&f->to, &f->manifest, 48, FIXTURE_PAGES));
    assert_int_equal(fb_open(f->daemon.socket, NULL, &f->pool, &error), FB_OK);
    assert_int_equal(fb_pool_space_open(f->pool, &f->manifest, &f->space, &error), FB_OK);
}

void fixture_fini(struct fixture *f)
{
    fb_close(f->pool);
    engine_fini(&f->from);
    engine_fini(&f->to);
    daemon_fini(&f->daemon);
}

void fixture_use(struct fixture *f, uint64_t seed)
{
    chain_make(seed, FIXTURE_PAGE, FIXTURE_PAGES, f->chain[0]);
    engine_fill(&f->from, seed);
}

void fixture_put(struct fixture *f, uint64_t seed)
{
    fixture_use(f, seed);
    assert_int_equal(engine_put(&f->from, f->pool, f->space, f->chain[0], 0, FIXTURE_PAGES), FB_OK);
}

void fixture_check(struct fixture *f, uint64_t seed)
{
    uint32_t arrived;

    fixture_use(f, seed);
    engine_round(&f->from);
    engine_clear(&f->to, 0);
    assert_int_equal(engine_get(&f->to, f->pool, f->space, f->chain[0], &arrived), FB_OK);
    assert_int_equal(arrived, FIXTURE_PAGES);
    assert_true(engine_equal(&f->from, &f->to, engine_all(&f->to)));
}

struct fb_pool_space *fixture_open_space(struct fixture *f, const struct fb_manifest *m)
{
    struct fb_pool_space *space;
    struct fb_error error;

    if (fb_pool_space_open(f->pool, m, &space, &error) != FB_OK) {
        fail_msg("%s", error.text);
    }
    return space;
}

void fixture_engine(struct engine *e, const struct fb_manifest *m, uint32_t block_tokens,
                    uint32_t pages)
{
    assert_true(engine_init(e, m, block_tokens, pages));
}

void fixture_round_trip(struct fixture *f, const struct fb_manifest *m, uint32_t block_tokens,
                        uint32_t pages, uint64_t seed)
{
    struct fb_pool_space *space = fixture_open_space(f, m);
    uint8_t *chain = malloc((size_t)pages * FB_CHAIN_BYTES);
    struct engine from, to;
    uint32_t arrived;

    assert_non_null(chain);
    fixture_engine(&from, m, block_tokens, pages);
    fixture_engine(&to, m, block_tokens, pages);
    chain_make(seed, m->page_tokens, pages, chain);
    engine_fill(&from, seed);
    engine_clear(&to, 0xa5);
    assert_int_equal(engine_get(&to, f->pool, space, chain, &arrived), FB_MISS);
    for (uint32_t first = 0; first < pages; first += PUT_PAGES) {
        uint32_t some = pages - first < PUT_PAGES ? pages - first : PUT_PAGES;

        assert_int_equal(engine_put(&from, f->pool, space, chain, first, some), FB_OK);
    }
    assert_int_equal(engine_get(&to, f->pool, space, chain, &arrived), FB_OK);
    assert_int_equal(arrived, pages);
    engine_round(&from);
    assert_true(engine_equal(&from, &to, engine_all(&to)));
    engine_fini(&from);
    engine_fini(&to);
    free(chain);
}

struct fb_hit *fixture_lookup(struct fixture *f)
{
    struct fb_hit *hit;

    assert_int_equal(
        fb_lookup(f->pool, &f->space, 1, f->chain[0], FIXTURE_PAGES, 0, ENGINE_WAIT_NS, &hit),
        FB_OK);
    return hit;
}

/* The keeper may not have noticed yet that the one before has gone: ask, and wait for an answer. */
void fixture_await_connected(struct fixture *f)
{
    uint64_t until = clock_ms() + DAEMON_WAIT_MS;
    enum fb_status status;

    do {
        nap();
        status = fb_prefetch(f->pool, &f->space, 1, f->chain[0], 1, ENGINE_WAIT_NS);
    } while (status != FB_OK && status != FB_MISS && clock_ms() < until);
    assert_in_range(status, FB_OK, FB_MISS);
}
