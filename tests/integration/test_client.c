/* The library against a daemon: what was put is what is got, whole or in part, by any process. */
#include "tests/integration/actor.h"
#include "tests/integration/fixture.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#define CLEAR 0xa5 /* what memory holds that must not be written */

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

/* --- round trips --- */

static void every_codec_comes_back(void **state)
{
    static const struct {
        enum fb_codec codec;
        enum fb_elem elem;
    } cases[] = {
        {FB_CODEC_RAW, FB_ELEM_BF16},      {FB_CODEC_RAW, FB_ELEM_FP16},
        {FB_CODEC_RAW, FB_ELEM_E4M3FN},    {FB_CODEC_RAW, FB_ELEM_E5M2},
        {FB_CODEC_RAW, FB_ELEM_E4M3FNUZ},  {FB_CODEC_RAW, FB_ELEM_BYTE},
        {FB_CODEC_FP8_E4M3, FB_ELEM_BF16}, {FB_CODEC_FP8_E4M3, FB_ELEM_FP16},
        {FB_CODEC_FP8_E5M2, FB_ELEM_BF16}, {FB_CODEC_FP8_E5M2, FB_ELEM_FP16},
        {FB_CODEC_INT8, FB_ELEM_BF16},     {FB_CODEC_INT8, FB_ELEM_FP16},
    };
    struct fb_manifest m;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        manifest_make(&m, 2, 3, 64, cases[i].codec);
        m.sections[0].elem = m.sections[1].elem = cases[i].elem;
        fixture_round_trip(*state, &m, 64, 3, 100 + i);
    }
}

/* An engine's blocks have their own size, pages have theirs. */
static void every_shape_comes_back(void **state)
{
    static const struct {
        uint32_t layers, heads, dim, page, block, pages;
    } cases[] = {
        {1, 1, 1, 1, 1, 1},     {1, 1, 8, 64, 16, 5},   {3, 2, 80, 32, 48, 7},
        {2, 5, 96, 16, 528, 9}, {4, 1, 576, 64, 64, 2}, {1, 17, 33, 64, 100, 3},
        {6, 8, 128, 64, 16, 2},
    };
    struct fb_manifest m;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        manifest_make(&m, cases[i].layers, cases[i].heads, cases[i].dim,
                      i % 2 ? FB_CODEC_FP8_E4M3 : FB_CODEC_RAW);
        m.page_tokens = cases[i].page;
        fixture_round_trip(*state, &m, cases[i].block, cases[i].pages, 200 + i);
    }
}

/* Latent attention, an index of some layers, and keys in finer steps than values. */
static void mixed_sections_come_back(void **state)
{
    struct fb_manifest m;

    manifest_make(&m, 3, 1, 512, FB_CODEC_FP8_E4M3);
    m.sections[0].kind = FB_SECTION_LATENT;
    m.sections[0].group = 128;
    m.sections[1] = (struct fb_section){FB_SECTION_ROPE, FB_ELEM_BF16, FB_CODEC_RAW, 0, 3, 64, 0};
    m.sections[2] = (struct fb_section){FB_SECTION_INDEX, FB_ELEM_BYTE, FB_CODEC_RAW, 1, 2, 132, 0};
    m.section_count = 3;
    fixture_round_trip(*state, &m, 64, 3, 300);
    manifest_make(&m, 3, 2, 64, FB_CODEC_INT8);
    m.sections[1].codec = FB_CODEC_FP8_E5M2;
    m.sections[0].group = 32;
    fixture_round_trip(*state, &m, 16, 3, 301);
}

static void weights_of_another_generation_find_nothing(void **state)
{
    struct fb_manifest m;

    manifest_make(&m, 1, 1, 32, FB_CODEC_RAW);
    fixture_round_trip(*state, &m, 64, 2, 310);
    m.generation = 1;
    fixture_round_trip(*state, &m, 64, 2, 310); /* begins with a miss */
}

static void rows_that_are_not_finite_are_refused(void **state)
{
    struct fixture *f = *state;
    struct fb_pool_space *space;
    uint8_t chain[FB_CHAIN_BYTES];
    const uint16_t nan = 0x7fc0;
    struct fb_manifest m;
    struct engine e;
    uint32_t arrived;

    manifest_make(&m, 2, 2, 64, FB_CODEC_FP8_E4M3);
    space = fixture_open_space(f, &m);
    fixture_engine(&e, &m, 64, 1);
    chain_make(1, m.page_tokens, 1, chain);
    engine_fill(&e, 1);
    memcpy(engine_row(&e, 1, 1, 63, 1), &nan, sizeof(nan));
    assert_int_equal(engine_put(&e, f->pool, space, chain, 0, 1), FB_ENONFINITE);
    assert_int_equal(engine_get(&e, f->pool, space, chain, &arrived), FB_MISS);
    engine_fill(&e, 1);
    assert_int_equal(engine_put(&e, f->pool, space, chain, 0, 1), FB_OK);
    engine_fini(&e);
}

/* --- parts of blocks --- */

enum { PAGES = 4, LAYERS = 4, HEADS = 4, PAGE = 64 };

struct stored {
    struct fb_manifest manifest;
    struct fb_pool_space *space;
    uint8_t chain[PAGES][FB_CHAIN_BYTES];
    struct engine from, to;
    struct fb_hit *hit;
};

/* A chain that is in the pool and looked up, and memory that has not been written. */
static void store(struct fixture *f, struct stored *s)
{
    manifest_make(&s->manifest, LAYERS, HEADS, 32, FB_CODEC_RAW);
    s->space = fixture_open_space(f, &s->manifest);
    fixture_engine(&s->from, &s->manifest, 48, PAGES);
    fixture_engine(&s->to, &s->manifest, 48, PAGES);
    chain_make(7, PAGE, PAGES, s->chain[0]);
    engine_fill(&s->from, 7);
    engine_clear(&s->to, CLEAR);
    assert_int_equal(engine_put(&s->from, f->pool, s->space, s->chain[0], 0, PAGES), FB_OK);
    assert_int_equal(
        fb_lookup(f->pool, &s->space, 1, s->chain[0], PAGES, 0, ENGINE_WAIT_NS, &s->hit), FB_OK);
    assert_int_equal(fb_hit_pages(s->hit), PAGES);
}

static void forget(struct stored *s)
{
    fb_hit_release(s->hit);
    engine_fini(&s->from);
    engine_fini(&s->to);
}

static void get(struct stored *s, const struct fb_transfer *t)
{
    enum fb_status statuses[PAGES];

    assert_int_equal(fb_get(s->hit, t, ENGINE_WAIT_NS, statuses), FB_OK);
    for (uint32_t i = 0; i < t->page_count; i++) {
        assert_int_equal(statuses[i], FB_OK);
    }
}

static void token_range_leaves_others_alone(void **state)
{
    static const uint32_t ranges[][2] = {{0, 1}, {63, 2}, {70, 100}, {64, 64}, {255, 1}, {0, 256}};

    for (size_t i = 0; i < sizeof(ranges) / sizeof(ranges[0]); i++) {
        struct part before, within, after;
        struct fb_transfer t;
        struct stored s;

        store(*state, &s);
        t = engine_transfer(&s.to, 0, PAGES);
        t.token_first = ranges[i][0];
        t.token_count = ranges[i][1];
        get(&s, &t);
        before = within = after = engine_all(&s.to);
        before.token_count = ranges[i][0];
        within.token_first = ranges[i][0];
        within.token_count = ranges[i][1];
        after.token_first = ranges[i][0] + ranges[i][1];
        after.token_count = PAGES * PAGE - after.token_first;
        assert_true(engine_is_clear(&s.to, before, CLEAR));
        assert_true(engine_equal(&s.from, &s.to, within));
        assert_true(engine_is_clear(&s.to, after, CLEAR));
        forget(&s);
    }
}

static void layers_and_heads_leave_others_alone(void **state)
{
    struct part within, layers_before, heads_after;
    struct fb_transfer t;
    struct stored s;

    store(*state, &s);
    t = engine_transfer(&s.to, 1, 2);
    t.layer_first = 1;
    t.layer_count = 2;
    t.views += s.manifest.section_count; /* views begin with the first layer of the range */
    t.plane_first = t.head_first = 1;
    t.plane_count = 2;
    get(&s, &t);
    within = (struct part){1, 2, 1, 2, PAGE, 2 * PAGE};
    layers_before = (struct part){0, 1, 0, HEADS, 0, PAGES * PAGE};
    heads_after = (struct part){0, LAYERS, 3, 1, 0, PAGES * PAGE};
    assert_true(engine_equal(&s.from, &s.to, within));
    assert_true(engine_is_clear(&s.to, layers_before, CLEAR));
    assert_true(engine_is_clear(&s.to, heads_after, CLEAR));
    assert_true(engine_is_clear(&s.to, (struct part){0, LAYERS, 0, HEADS, 0, PAGE}, CLEAR));
    forget(&s);
}

/* A rank of a larger group has fewer heads, counted from its own 0. */
static void rank_reads_its_heads(void **state)
{
    struct fb_manifest mine;
    struct fb_transfer t;
    struct engine rank;
    struct stored s;

    store(*state, &s);
    mine = s.manifest;
    mine.head_count = 1;
    fixture_engine(&rank, &mine, 16, PAGES);
    for (uint32_t head = 0; head < HEADS; head++) {
        t = engine_transfer(&rank, 0, PAGES);
        t.plane_first = head;
        engine_clear(&rank, CLEAR);
        get(&s, &t);
        for (uint32_t token = 0; token < PAGES * PAGE; token++) {
            assert_memory_equal(engine_row(&rank, 2, 1, token, 0),
                                engine_row(&s.from, 2, 1, token, head), 64);
        }
    }
    engine_fini(&rank);
    forget(&s);
}

static void null_block_is_refused(void **state)
{
    enum fb_status statuses[PAGES];
    struct fb_transfer t;
    struct stored s;

    store(*state, &s);
    t = engine_transfer(&s.to, 0, PAGES);
    s.to.block_ids[1] = -1; /* tokens 48 to 95: pages 0 and 1 */
    assert_int_equal(fb_get(s.hit, &t, ENGINE_WAIT_NS, statuses), FB_EINVAL);
    assert_int_equal(statuses[0], FB_EINVAL);
    assert_int_equal(statuses[1], FB_EINVAL);
    assert_int_equal(statuses[2], FB_OK);
    t.page_count = PAGES + 1;
    assert_int_equal(fb_get(s.hit, &t, ENGINE_WAIT_NS, statuses), FB_EINVAL);
    forget(&s);
}

static void mapped_block_is_whole(void **state)
{
    const uint8_t *block;
    struct stored s;

    store(*state, &s);
    for (uint32_t page = 0; page < PAGES; page++) {
        const struct fb_layout *l = fb_pool_space_layout(s.space);

        assert_int_equal(fb_hit_map(s.hit, 0, page, &block), FB_OK);
        assert_int_equal(fb_block_check(fb_kernels_best(), l, block, 0, HEADS), FB_OK);
    }
    assert_int_equal(fb_hit_map(s.hit, 0, PAGES, &block), FB_EINVAL);
    assert_int_equal(fb_hit_map(s.hit, 1, 0, &block), FB_EINVAL);
    forget(&s);
}

/* Two ranks fill the planes of the same blocks; nobody sees half of one. */
static void ranks_fill_one_block(void **state)
{
    static const struct fb_put_part parts[] = {
        {0, 1, 0, LAYERS}, {1, 3, 0, 1}, {1, 3, 1, LAYERS - 1}};
    struct fixture *f = *state;
    uint8_t chain[PAGES][FB_CHAIN_BYTES];
    struct fb_put *puts[3], *late;
    enum fb_status statuses[PAGES];
    struct fb_pool_space *space;
    struct engine from, to;
    struct fb_manifest m;
    uint32_t arrived;

    manifest_make(&m, LAYERS, HEADS, 32, FB_CODEC_FP8_E4M3);
    space = fixture_open_space(f, &m);
    fixture_engine(&from, &m, 16, PAGES);
    fixture_engine(&to, &m, 16, PAGES);
    engine_fill(&from, 8);
    chain_make(8, PAGE, PAGES, chain[0]);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(fb_put_begin(f->pool, space, chain[0], PAGES, NULL, 0, &parts[i],
                                      ENGINE_WAIT_NS, &puts[i], statuses),
                         FB_OK);
    }
    assert_int_equal(fb_put_begin(f->pool, space, chain[0], PAGES, NULL, 0, NULL, ENGINE_WAIT_NS,
                                  &late, statuses),
                     FB_MISS);
    assert_int_equal(statuses[0], FB_BUSY);
    for (int i = 0; i < 3; i++) {
        struct fb_transfer t = engine_transfer(&from, 0, PAGES);

        assert_int_equal(engine_get(&to, f->pool, space, chain[0], &arrived), FB_MISS);
        t.plane_first = t.head_first = parts[i].plane_first;
        t.plane_count = parts[i].plane_count;
        t.layer_first = parts[i].layer_first;
        t.layer_count = parts[i].layer_count;
        t.views += t.layer_first * m.section_count;
        assert_int_equal(fb_put_encode(puts[i], &t, statuses), FB_OK);
        assert_int_equal(fb_put_commit(puts[i], ENGINE_WAIT_NS, statuses), FB_OK);
        assert_int_equal(statuses[PAGES - 1], FB_OK);
    }
    assert_int_equal(engine_get(&to, f->pool, space, chain[0], &arrived), FB_OK);
    engine_round(&from);
    assert_true(engine_equal(&from, &to, engine_all(&to)));
    engine_fini(&from);
    engine_fini(&to);
}

/* --- other processes --- */

/* SOCKET LEASE: attach, read, compare, end without a word. */
static _Noreturn void act_attach(char **args)
{
    uint64_t lease = strtoull(args[1], NULL, 16);
    uint8_t chain[PAGES][FB_CHAIN_BYTES];
    enum fb_status statuses[PAGES];
    struct fb_pool_space *space;
    struct engine from, to;
    struct fb_manifest m;
    struct fb_transfer t;
    struct fb_pool *pool;
    struct fb_hit *hit;

    manifest_make(&m, LAYERS, HEADS, 32, FB_CODEC_RAW);
    chain_make(7, PAGE, PAGES, chain[0]);
    ACTOR_CHECK(engine_init(&from, &m, 48, PAGES) && engine_init(&to, &m, 64, PAGES));
    engine_fill(&from, 7);
    ACTOR_CHECK(fb_open(args[0], NULL, &pool, NULL) == FB_OK);
    ACTOR_CHECK(fb_pool_space_open(pool, &m, &space, NULL) == FB_OK);
    ACTOR_CHECK(fb_attach(pool, &space, 1, chain[0], PAGES, &(uint64_t){lease + 1}, 1, 0, &hit) ==
                FB_ENOENT);
    ACTOR_CHECK(fb_attach(pool, &space, 1, chain[0], PAGES, &lease, 1, 0, &hit) == FB_OK);
    actor_say("attached");
    actor_wait(); /* the one that looked up has released */
    t = engine_transfer(&to, 0, PAGES);
    ACTOR_CHECK(fb_get(hit, &t, 0, statuses) == FB_OK);
    ACTOR_CHECK(engine_equal(&from, &to, engine_all(&to)));
    actor_say("read");
    actor_wait();
    _exit(EXIT_SUCCESS);
}

static void worker_attaches_to_the_schedulers_lease(void **state)
{
    uint64_t leases[FB_HIT_MAX_LEASES];
    struct fixture *f = *state;
    struct actor worker;
    struct stored s;
    char lease[32];

    store(f, &s);
    assert_int_equal(fb_hit_leases(s.hit, leases), 1);
    snprintf(lease, sizeof(lease), "%llx", (unsigned long long)leases[0]);
    actor_start(&worker, "attach", (const char *[]){f->daemon.socket, lease, NULL});
    actor_expect(&worker, "attached");
    forget(&s);
    daemon_await_metric(&f->daemon, "forebay_leases", 1);
    actor_tell(&worker);
    actor_expect(&worker, "read");
    actor_tell(&worker);
    actor_join(&worker);
    daemon_await_nothing_held(&f->daemon);
    daemon_await_metric(&f->daemon, "forebay_clients", 1);
}

int main(int argc, char **argv)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    static const struct CMUnitTest tests[] = {
        TEST(every_codec_comes_back),
        TEST(every_shape_comes_back),
        TEST(mixed_sections_come_back),
        TEST(weights_of_another_generation_find_nothing),
        TEST(rows_that_are_not_finite_are_refused),
        TEST(token_range_leaves_others_alone),
        TEST(layers_and_heads_leave_others_alone),
        TEST(rank_reads_its_heads),
        TEST(null_block_is_refused),
        TEST(mapped_block_is_whole),
        TEST(ranks_fill_one_block),
        TEST(worker_attaches_to_the_schedulers_lease),
    };

    if (argc > 1 && strcmp(argv[1], "attach") == 0) {
        act_attach(argv + 2);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
