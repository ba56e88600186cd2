/* One daemon, one pool, one space. */
#include "tests/integration/fixture.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

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
