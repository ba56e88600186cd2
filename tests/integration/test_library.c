/* The library in an engine's hands: spaces that go together, long chains, many threads, words about
 * blocks. */
#include "proto/wire.h"
#include "tests/integration/fixture.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

enum { PAGE = FIXTURE_PAGE, PAGES = FIXTURE_PAGES };

static int setup(void **state)
{
    static const char *const flags[] = {"--lease=2s", NULL};
    static struct fixture f;

    fixture_init(&f, flags);
    *state = &f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;

    daemon_signal(&f->daemon, SIGTERM);
    assert_int_equal(daemon_wait(&f->daemon), 0); /* a sanitizer has nothing to say */
    fixture_fini(f);
    return 0;
}

/* --- families --- */

static void make_window(struct fb_manifest *m, uint32_t window_tokens)
{
    manifest_make(m, 2, 2, 32, FB_CODEC_RAW);
    m->rule = FB_RULE_WINDOW;
    m->window_tokens = window_tokens;
    m->layers[0] = 10;
    m->layers[1] = 11;
}

static void make_state(struct fb_manifest *m)
{
    manifest_make(m, 2, 2, 200, FB_CODEC_RAW);
    m->rule = FB_RULE_STATE;
    m->section_count = 1;
    m->sections[0].kind = FB_SECTION_STATE;
    m->layers[0] = 20;
    m->layers[1] = 21;
}

/* Full attention, a window of 100 tokens (2 pages) and recurrent state at every second boundary:
 * the longest prefix is what all have. */
static void family_hits_what_all_have(void **state)
{
    enum { CHAIN = 8, FAMILY = 3 };
    struct fixture *f = *state;
    uint8_t chain[CHAIN][FB_CHAIN_BYTES];
    struct fb_pool_space *family[FAMILY];
    struct engine from[FAMILY], to;
    struct fb_manifest m[FAMILY];
    enum fb_status statuses[CHAIN];
    struct fb_transfer t;
    struct fb_hit *hit;

    manifest_make(&m[0], 2, 2, 32, FB_CODEC_RAW);
    make_window(&m[1], 100);
    make_state(&m[2]);
    chain_make(9, PAGE, CHAIN, chain[0]);
    for (int i = 0; i < FAMILY; i++) {
        family[i] = fixture_open_space(f, &m[i]);
        fixture_engine(&from[i], &m[i], PAGE, CHAIN);
        engine_fill(&from[i], 90 + (uint64_t)i);
    }
    assert_int_equal(engine_put(&from[0], f->pool, family[0], chain[0], 0, 7), FB_OK);
    assert_int_equal(fb_lookup(f->pool, family, FAMILY, chain[0], CHAIN, 0, ENGINE_WAIT_NS, &hit),
                     FB_MISS);
    assert_int_equal(engine_put(&from[1], f->pool, family[1], chain[0], 4, 4), FB_OK);
    for (uint32_t page = 1; page < CHAIN; page += 2) {
        assert_int_equal(engine_put(&from[2], f->pool, family[2], chain[0], page, 1), FB_OK);
    }
    assert_int_equal(fb_lookup(f->pool, family, FAMILY, chain[0], CHAIN, 0, ENGINE_WAIT_NS, &hit),
                     FB_OK);
    assert_int_equal(fb_hit_pages(hit), 6); /* full has 7, but there is no state at 7 */
    for (uint32_t i = 0; i < FAMILY; i++) {
        uint32_t first = i == 0 ? 0 : i == 1 ? 4 : 5;

        fixture_engine(&to, &m[i], PAGE, CHAIN);
        t = engine_transfer(&to, first, 6 - first);
        t.space = i;
        assert_int_equal(fb_get(hit, &t, ENGINE_WAIT_NS, statuses), FB_OK);
        assert_true(engine_equal(&from[i], &to,
                                 (struct part){0, 2, 0, 2, first * PAGE, (6 - first) * PAGE}));
        if (first > 0) {
            t.page_first = first - 1;
            t.page_count = 1;
            assert_int_equal(fb_get(hit, &t, ENGINE_WAIT_NS, statuses), FB_MISS);
        }
        engine_fini(&to);
        engine_fini(&from[i]);
    }
    fb_hit_release(hit);
}

/* --- many --- */

static void long_chain_takes_several_messages(void **state)
{
    enum { LONG = 5000 };
    struct fixture *f = *state;
    struct fb_manifest m;

    _Static_assert((int)LONG > (int)FB_WIRE_MAX_KEYS, "more than one lookup");
    manifest_make(&m, 1, 1, 8, FB_CODEC_RAW);
    m.page_tokens = 1;
    strcpy(m.model, "tiny/blocks@1");
    daemon_kill(&f->daemon);
    daemon_start(&f->daemon, (const char *const[]){"--host-bytes=128MiB", "--lease=2s", NULL});
    fixture_await_connected(f);
    fixture_round_trip(f, &m, 16, LONG, 400);
    daemon_await_nothing_held(&f->daemon);
}

/* A scheduler that drops its whole queue at once. */
static void many_hits_are_released_in_a_row(void **state)
{
    enum { MANY = 500 };
    struct fixture *f = *state;
    struct fb_hit *hits[MANY];
    uint8_t chain[FB_CHAIN_BYTES];
    struct fb_pool_space *space;
    struct fb_pool_info info;
    struct fb_manifest m;
    struct engine e;

    manifest_make(&m, 1, 1, 8, FB_CODEC_RAW);
    space = fixture_open_space(f, &m);
    fixture_engine(&e, &m, 16, 1);
    engine_fill(&e, 1);
    chain_make(1, PAGE, 1, chain);
    assert_int_equal(engine_put(&e, f->pool, space, chain, 0, 1), FB_OK);
    for (int i = 0; i < MANY; i++) {
        assert_int_equal(fb_lookup(f->pool, &space, 1, chain, 1, 0, ENGINE_WAIT_NS, &hits[i]),
                         FB_OK);
    }
    for (int i = 0; i < MANY; i++) {
        fb_hit_release(hits[i]);
    }
    daemon_await_nothing_held(&f->daemon);
    fixture_await_connected(f);
    assert_int_equal(fb_lookup(f->pool, &space, 1, chain, 1, 0, ENGINE_WAIT_NS, &hits[0]), FB_OK);
    fb_hit_release(hits[0]);
    fb_pool_get_info(f->pool, &info);
    assert_int_equal(info.reconnects, info.deadlines_missed); /* none, on a machine with time */
    engine_fini(&e);
}

/* A chunk that is to change its slot size is mapped by a reader only after it was asked for back.
 */
static void late_map_does_not_keep_a_chunk(void **state)
{
    enum { CHUNKS = 16, STEP = 10 }; /* of 2 MiB; about 11 chains fill one */
    struct fixture *f = *state;
    uint64_t chains = (32ull << 20) / (FIXTURE_PAGES * f->from.layout.block_bytes);
    enum fb_status statuses[FIXTURE_PAGES], status;
    uint64_t until = clock_ms() + DAEMON_WAIT_MS;
    struct fb_pool_space *mine = f->space, *large;
    struct fb_pool *writer = f->pool;
    struct fb_hit *hits[2 * CHUNKS];
    struct fb_manifest m;
    struct engine e;
    uint32_t n = 0;

    for (uint64_t seed = 0; seed < chains; seed++) {
        fixture_put(f, seed);
    }
    assert_int_equal(fb_open(f->daemon.socket, NULL, &f->pool, NULL), FB_OK);
    assert_int_equal(fb_pool_space_open(f->pool, &f->manifest, &f->space, NULL), FB_OK);
    for (uint64_t seed = chains / 2; seed < chains && n < 2 * CHUNKS; seed += STEP / 2) {
        fixture_use(f, seed);
        hits[n++] = fixture_lookup(f);
    }
    manifest_make(&m, 2, 4, 128, FB_CODEC_RAW);
    fixture_engine(&e, &m, 64, 1);
    assert_int_equal(fb_pool_space_open(writer, &m, &large, NULL), FB_OK);
    fixture_use(f, 1);
    engine_fill(&e, 1);
    engine_put(&e, writer, large, f->chain[0], 0, 1);
    daemon_await_metric(&f->daemon, "forebay_chunks_moved_total", 2);
    for (uint32_t i = 0; i < n; i++) {
        struct fb_transfer t = engine_transfer(&f->to, 0, fb_hit_pages(hits[i]));

        fb_get(hits[i], &t, 0, statuses); /* blocks of that chunk may be gone */
        fb_hit_release(hits[i]);
    }
    do {
        status = engine_put(&e, writer, large, f->chain[0], 0, 1);
    } while (status == FB_AGAIN && clock_ms() < until);
    assert_int_equal(status, FB_OK);
    fb_close(f->pool);
    f->pool = writer;
    f->space = mine;
    engine_fini(&e);
}

enum { THREADS = 8, ROUNDS = 30, CHAINS = 12 };

struct worker {
    pthread_t thread;
    struct fixture *fixture;
    struct fb_pool_space *space;
    const struct fb_manifest *manifest;
    uint64_t random;
    uint32_t hits;
    bool good;
};

/* Put and get chains that others put and get as well. */
static void *work(void *arg)
{
    struct worker *w = arg;
    uint8_t chain[PAGES][FB_CHAIN_BYTES];
    struct engine from, to;
    uint32_t arrived;

    w->good =
        engine_init(&from, w->manifest, 16, PAGES) && engine_init(&to, w->manifest, 32, PAGES);
    for (int i = 0; i < ROUNDS && w->good; i++) {
        uint64_t seed = 500 + random_below(&w->random, CHAINS);
        struct part part = engine_all(&to);

        chain_make(seed, PAGE, PAGES, chain[0]);
        engine_fill(&from, seed);
        engine_put(&from, w->fixture->pool, w->space, chain[0], 0, PAGES);
        engine_get(&to, w->fixture->pool, w->space, chain[0], &arrived);
        part.token_count = arrived * PAGE;
        engine_round(&from);
        w->good = engine_equal(&from, &to, part);
        w->hits += arrived > 0;
    }
    engine_fini(&from);
    engine_fini(&to);
    return NULL;
}

static void threads_share_a_pool(void **state)
{
    struct worker workers[THREADS] = {0};
    struct fb_pool_space *space;
    struct fixture *f = *state;
    struct fb_manifest m;
    uint32_t hits = 0;

    manifest_make(&m, 2, 2, 64, FB_CODEC_FP8_E4M3);
    space = fixture_open_space(f, &m);
    for (uint64_t i = 0; i < THREADS; i++) {
        workers[i] =
            (struct worker){.fixture = f, .space = space, .manifest = &m, .random = 1000 + i};
        assert_int_equal(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(workers[i].thread, NULL);
        assert_true(workers[i].good);
        hits += workers[i].hits;
    }
    assert_true(hits > THREADS * ROUNDS / 2);
    daemon_await_nothing_held(&f->daemon);
}

/* --- words about blocks --- */

static void hints_say_what_they_did(void **state)
{
    enum fb_status statuses[PAGES];
    uint8_t other[FB_CHAIN_BYTES];
    struct fixture *f = *state;
    struct fb_hit *hit;

    fixture_put(f, 7);
    hit = fixture_lookup(f);
    chain_make(12345, PAGE, 1, other);
    assert_int_equal(
        fb_hint_pages(f->pool, f->space, f->chain[0], PAGES, FB_HINT_KIND_PRIORITY, 2, 0, statuses),
        FB_OK);
    assert_int_equal(statuses[PAGES - 1], FB_OK);
    assert_int_equal(
        fb_hint_pages(f->pool, f->space, other, 1, FB_HINT_KIND_PRIORITY, 2, 0, statuses), FB_OK);
    assert_int_equal(statuses[0], FB_MISS);
    assert_int_equal(
        fb_hint_pages(f->pool, f->space, other, 1, FB_HINT_KIND_PRIORITY, 3, 0, statuses),
        FB_EINVAL);
    assert_int_equal(
        fb_hint_pages(f->pool, f->space, f->chain[PAGES - 1], 1, FB_HINT_KIND_PIN, 1, 0, statuses),
        FB_OK);
    daemon_await_metric(&f->daemon, "forebay_pinned_bytes", /* it and all before it */
                        PAGES * fb_pool_space_layout(f->space)->block_bytes);
    assert_int_equal(
        fb_hint_pages(f->pool, f->space, f->chain[0], PAGES, FB_HINT_KIND_PIN, 0, 0, NULL), FB_OK);
    daemon_await_metric(&f->daemon, "forebay_pinned_bytes", 0);
    fb_hit_release(hit);
    assert_int_equal(fb_hint_pages(f->pool, f->space, f->chain[2], 1, FB_HINT_KIND_TTL, 1, 0, NULL),
                     FB_OK);
    daemon_await_metric(&f->daemon, "forebay_blocks", PAGES - 1);
}

/* The daemon looks itself, so that a false report costs nothing. */
static void good_block_is_not_rejected(void **state)
{
    uint8_t keys[PAGES][FB_KEY_BYTES];
    struct fixture *f = *state;

    fixture_put(f, 7);
    for (int i = 0; i < PAGES; i++) {
        fb_pool_key(f->space, f->chain[i], keys[i]);
    }
    assert_int_equal(fb_reject(f->pool, f->space, keys[0], PAGES, 0), FB_OK);
    daemon_await_metric(&f->daemon, "forebay_rejected_blocks_total", 0);
    daemon_await_metric(&f->daemon, "forebay_blocks", PAGES);
    assert_int_equal(fb_prefetch(f->pool, &f->space, 1, f->chain[0], PAGES, ENGINE_WAIT_NS), FB_OK);
    daemon_await_nothing_held(&f->daemon);
}

static void arguments_are_checked(void **state)
{
    struct fixture *f = *state;
    uint8_t chain[2][FB_CHAIN_BYTES];
    enum fb_status statuses[2];
    struct fb_pool_space *spaces[2];
    struct fb_manifest m;
    struct fb_error error;
    struct fb_pool *pool;
    struct fb_put *put;
    struct fb_hit *hit;

    manifest_make(&m, 1, 1, 32, FB_CODEC_RAW);
    spaces[0] = fixture_open_space(f, &m);
    m.page_tokens = 32;
    spaces[1] = fixture_open_space(f, &m);
    chain_make(1, PAGE, 2, chain[0]);
    assert_int_equal(fb_open("tcp://host:1", NULL, &pool, &error), FB_EINVAL);
    assert_non_null(strstr(error.text, "expected the path of a socket"));
    assert_int_equal(fb_lookup(f->pool, spaces, 0, chain[0], 2, 0, 0, &hit), FB_EINVAL);
    assert_int_equal(fb_lookup(f->pool, spaces, 1, chain[0], 0, 0, 0, &hit), FB_EINVAL);
    assert_int_equal(fb_lookup(f->pool, spaces, 2, chain[0], 2, 0, 0, &hit), FB_EINVAL);
    assert_int_equal(
        fb_put_begin(f->pool, spaces[0], chain[1], 1, NULL, 1, NULL, 0, &put, statuses), FB_EINVAL);
    assert_int_equal(fb_put_begin(f->pool, spaces[0], chain[0], FB_PUT_MAX_PAGES + 1, NULL, 0, NULL,
                                  0, &put, statuses),
                     FB_EINVAL);
    assert_int_equal(
        fb_put_begin(f->pool, spaces[0], chain[1], 1, chain[0], 1, NULL, 0, &put, statuses),
        FB_MISS);
    assert_int_equal(statuses[0], FB_ENOENT);
    strcpy(m.tenant, "other");
    assert_int_equal(fb_pool_space_open(f->pool, &m, &spaces[1], &error), FB_EPERM);
    assert_non_null(strstr(error.text, "other"));
}

/* --- layers apart --- */

/* The second layer keeps its pages in the order of its own blocks: a put and a get that are told so
 * agree with each other, and one that is not told finds them the other way round. */
static void layers_have_blocks_of_their_own(void **state)
{
    enum { CHAIN = 4, ROW = 32 * 2 };
    struct fixture *f = *state;
    uint8_t chain[CHAIN][FB_CHAIN_BYTES];
    struct engine from, back, plain;
    enum fb_status statuses[CHAIN];
    struct fb_token_map maps[2];
    struct fb_pool_space *space;
    struct fb_manifest m;
    struct fb_transfer t;
    struct fb_put *put;
    struct fb_hit *hit;
    int64_t turned[CHAIN];

    manifest_make(&m, 2, 2, 32, FB_CODEC_RAW);
    chain_make(77, PAGE, CHAIN, chain[0]);
    space = fixture_open_space(f, &m);
    fixture_engine(&from, &m, PAGE, CHAIN);
    fixture_engine(&back, &m, PAGE, CHAIN);
    fixture_engine(&plain, &m, PAGE, CHAIN);
    engine_fill(&from, 78);
    engine_clear(&back, 0);
    engine_clear(&plain, 0);
    for (int i = 0; i < CHAIN; i++) {
        turned[i] = from.block_ids[CHAIN - 1 - i];
    }
    t = engine_transfer(&from, 0, CHAIN);
    maps[0] = maps[1] = t.map;
    maps[1].block_ids = turned;
    t.layer_maps = maps;
    assert_int_equal(fb_put_begin(f->pool, space, chain[0], CHAIN, NULL, 0, NULL, ENGINE_WAIT_NS,
                                  &put, statuses),
                     FB_OK);
    assert_int_equal(fb_put_encode(put, &t, statuses), FB_OK);
    assert_int_equal(fb_put_commit(put, ENGINE_WAIT_NS, NULL), FB_OK);
    assert_int_equal(fb_lookup(f->pool, &space, 1, chain[0], CHAIN, 0, ENGINE_WAIT_NS, &hit),
                     FB_OK);
    t.views = back.views;
    assert_int_equal(fb_get(hit, &t, ENGINE_WAIT_NS, statuses), FB_OK);
    assert_true(engine_equal(&from, &back, engine_all(&from)));
    t = engine_transfer(&plain, 0, CHAIN);
    assert_int_equal(fb_get(hit, &t, ENGINE_WAIT_NS, statuses), FB_OK);
    for (uint32_t token = 0; token < CHAIN * PAGE; token++) {
        uint32_t other = (CHAIN - 1 - token / PAGE) * PAGE + token % PAGE;

        assert_memory_equal(engine_row(&plain, 0, 0, token, 1), engine_row(&from, 0, 0, token, 1),
                            ROW);
        assert_memory_equal(engine_row(&plain, 1, 1, token, 0), engine_row(&from, 1, 1, other, 0),
                            ROW);
    }
    maps[1].block_tokens = 0;
    t.layer_maps = maps;
    assert_int_equal(fb_get(hit, &t, ENGINE_WAIT_NS, statuses), FB_EINVAL);
    fb_hit_release(hit);
    engine_fini(&from);
    engine_fini(&back);
    engine_fini(&plain);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    static const struct CMUnitTest tests[] = {
        TEST(family_hits_what_all_have),
        TEST(long_chain_takes_several_messages),
        TEST(many_hits_are_released_in_a_row),
        TEST(late_map_does_not_keep_a_chunk),
        TEST(threads_share_a_pool),
        TEST(hints_say_what_they_did),
        TEST(good_block_is_not_rejected),
        TEST(layers_have_blocks_of_their_own),
        TEST(arguments_are_checked),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
