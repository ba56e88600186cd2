/* Chunks of a node: how they come to a class, move to another one and go, while others read. */
#include "tests/unit/node_util.h"

#include "proto/sum.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static const struct shape large = {.row_bytes = LARGE_ROW};
static const struct shape small = {.row_bytes = SMALL_ROW};

struct fixture {
    struct rig rig;
    struct peer *a, *b;
    struct pages large, small; /* one page of each space */
};

static void begin(struct fixture *f, uint32_t chunks)
{
    f->rig.config.host_bytes = TIER_OF(chunks);
    f->rig.config.client_share_percent = 100;
    rig_start(&f->rig);
    f->a = peer_new(&f->rig, 0, 1);
    f->b = peer_new(&f->rig, 0, 2);
    f->large = (struct pages){peer_space(f->a, &large), 1, 0, 1};
    f->small = (struct pages){peer_space(f->b, &small), 2, 0, 1};
}

static int setup_only(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));

    assert_non_null(f);
    rig_init(&f->rig);
    *state = f;
    return 0;
}

/* Two chunks, both full of large blocks: chains 100 and up of one page. */
static int setup(void **state)
{
    struct fixture *f;

    setup_only(state);
    f = *state;
    begin(f, 2);
    for (f->large.chain = 100; f->large.chain < 100 + 2 * LARGE_SLOTS; f->large.chain++) {
        peer_put(f->a, &large, f->large);
    }
    f->large.chain = 100;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;

    peer_free(f->a);
    peer_free(f->b);
    rig_fini(&f->rig);
    free(f);
    return 0;
}

static struct fb_wire_location location(struct peer *p, struct pages page)
{
    struct hit hit;

    assert_int_equal(peer_lookup(p, &page, 1, &hit), FB_OK);
    assert_int_equal(hit.pages, 1);
    assert_int_equal(peer_release(p, hit.lease), FB_OK);
    return hit.where[0];
}

static void map_all(struct fixture *f, struct peer *p)
{
    for (uint32_t i = 0; i < 2 * LARGE_SLOTS; i++) {
        struct pages page = {f->large.space, 100 + i, 0, 1};

        assert_int_equal(peer_map(p, location(p, page).chunk), FB_OK);
    }
}

static uint32_t count_large(struct fixture *f)
{
    struct pages page = f->large;
    uint32_t n = 0;

    for (page.chain = 100; page.chain < 100 + 2 * LARGE_SLOTS; page.chain++) {
        n += peer_finds(f->a, page);
    }
    return n;
}

static enum fb_status row_status(const struct peer *p)
{
    struct fb_reserve_row row;

    peer_rows(p, &row, 1);
    return (enum fb_status)row.status;
}

static void new_class_gets_a_chunk(void **state)
{
    struct fixture *f = *state;

    peer_put(f->b, &small, f->small);
    assert_int_equal(peer_finds(f->a, f->small), 1);
    assert_int_equal(count_large(f), LARGE_SLOTS); /* the others are still there */
    assert_int_equal(rig_metric(&f->rig, FB_METRIC_CHUNKS_MOVED), 1);
    assert_int_equal(rig_status(&f->rig).host.used_bytes, 4 * MIB);
}

static void empty_chunk_goes_at_once(void **state)
{
    struct fixture *f = *state;
    uint64_t blocks, bytes;
    struct fb_node_space_status s;

    peer_put(f->b, &small, f->small); /* not its first any more */
    fb_node_get_space(f->rig.node, f->large.space, &s);
    assert_int_equal(fb_node_purge(f->rig.node, "default", s.id, NULL, &blocks, &bytes, NULL),
                     FB_OK);
    f->small.count = 200; /* more than a chunk holds */
    f->small.chain = 3;
    peer_put(f->b, &small, f->small);
    assert_int_equal(peer_finds(f->a, f->small), 200);
    assert_int_equal(rig_metric(&f->rig, FB_METRIC_CHUNKS_MOVED), 2);
    assert_int_equal(rig_metric(&f->rig, FB_METRIC_EVICTED_BLOCKS), 0);
}

static void chunk_waits_until_it_is_unmapped(void **state)
{
    struct fixture *f = *state;
    struct peer *c = peer_new(&f->rig, 0, 3);
    struct fb_reserve_row row;
    uint32_t chunk;

    map_all(f, f->a);
    assert_int_equal(peer_reserve(f->b, f->small, NULL, &row), NOT_ANSWERED);
    assert_false(peer_receive(f->a));
    assert_int_equal(f->a->notices, 1);
    assert_int_equal(f->a->notice.kind, FB_NOTIFY_UNMAP);
    chunk = f->a->notice.value;
    assert_null(f->rig.jobs); /* its memory is not free yet */
    assert_int_equal(count_large(f), LARGE_SLOTS);
    assert_int_equal(peer_map(c, chunk), FB_OK); /* late */
    assert_int_equal(peer_renew(f->a, 0, 0, chunk), FB_OK);
    assert_null(f->rig.jobs);
    rig_pass(&f->rig, SECOND); /* the writer has waited enough, and who mapped late is asked */
    assert_true(peer_receive(f->b));
    assert_int_equal(row_status(f->b), FB_AGAIN);
    assert_false(peer_receive(c));
    assert_int_equal(c->notices, 1);
    assert_int_equal(c->notice.value, chunk);
    assert_int_equal(peer_renew(c, 0, 0, chunk), FB_OK);
    assert_int_equal(peer_map(f->a, chunk), FB_ENOENT);
    peer_free(c);
    peer_put(f->b, &small, f->small);
    assert_int_equal(rig_status(&f->rig).host.used_bytes, 4 * MIB);
}

static void death_counts_as_unmapping(void **state)
{
    struct fixture *f = *state;
    struct fb_reserve_row row;

    map_all(f, f->a);
    assert_int_equal(peer_reserve(f->b, f->small, NULL, &row), NOT_ANSWERED);
    peer_kill(f->a);
    assert_int_equal(rig_run_jobs(&f->rig), 1);
    assert_true(peer_receive(f->b));
    assert_int_equal(row_status(f->b), FB_OK);
}

static void all_leased(struct fixture *f, uint64_t leases[2 * LARGE_SLOTS])
{
    for (uint32_t i = 0; i < 2 * LARGE_SLOTS; i++) {
        leases[i] = peer_leases(f->a, (struct pages){f->large.space, 100 + i, 0, 1});
    }
}

static void chunk_waits_for_its_readers(void **state)
{
    struct fixture *f = *state;
    uint64_t leases[2 * LARGE_SLOTS];
    struct fb_reserve_row row;

    all_leased(f, leases);
    assert_int_equal(peer_reserve(f->b, f->small, NULL, &row), NOT_ANSWERED);
    assert_null(f->rig.jobs);
    for (uint32_t i = 0; i < 2 * LARGE_SLOTS; i++) {
        assert_int_equal(rig_status(&f->rig).host.used_bytes, 4 * MIB);
        assert_int_equal(peer_release(f->a, leases[i]), FB_OK);
    }
    assert_int_equal(rig_run_jobs(&f->rig), 1);
    assert_true(peer_receive(f->b));
    assert_int_equal(row_status(f->b), FB_OK);
}

/* A request that frees the chunk for which another one waits, and has waited enough: each gets the
 * answer that is its own. */
static void answers_are_not_mixed(void **state)
{
    struct fixture *f = *state;
    struct fb_reserve_row row;
    uint64_t lease;

    f->large = (struct pages){f->large.space, 200, 0, 2 * LARGE_SLOTS};
    peer_put(f->a, &large, f->large);
    lease = peer_leases(f->a, f->large);
    assert_int_equal(peer_reserve(f->b, f->small, NULL, &row), NOT_ANSWERED);
    fb_node_set_time(f->rig.node, f->rig.now_ns += SECOND);
    assert_int_equal(peer_release(f->a, lease), FB_OK);
    assert_true(peer_receive(f->b));
    assert_int_equal(row_status(f->b), FB_AGAIN);
}

/* Not only at the next tick. */
static void death_is_heard_by_those_who_wait(void **state)
{
    struct fixture *f = *state;
    uint64_t leases[2 * LARGE_SLOTS];
    struct fb_reserve_row row;

    all_leased(f, leases);
    assert_int_equal(peer_reserve(f->b, f->small, NULL, &row), NOT_ANSWERED);
    peer_close(f->a);
    peer_kill(f->a);
    assert_int_equal(rig_run_jobs(&f->rig), 1);
    assert_true(peer_receive(f->b));
    assert_int_equal(row_status(f->b), FB_OK);
}

/* It was written when its chunk was given up. */
static void last_block_of_a_chunk(void **state)
{
    struct fixture *f = *state;
    struct fb_reserve_row rows[2 * LARGE_SLOTS], row;
    const uint64_t sums[PLANES] = {0};
    uint64_t blocks, bytes;

    fb_node_purge(f->rig.node, "default", NULL, NULL, &blocks, &bytes, NULL);
    f->large.chain = 300;
    f->large.count = 2 * LARGE_SLOTS;
    assert_int_equal(peer_reserve(f->a, f->large, NULL, rows), FB_OK);
    assert_int_equal(peer_reserve(f->b, f->small, NULL, &row), NOT_ANSWERED);
    for (uint32_t i = 0; i < f->large.count; i++) {
        assert_int_equal(peer_commit(f->a, rows[i].claim, sums, PLANES), FB_OK);
    }
    assert_int_equal(rig_run_jobs(&f->rig), 1);
    assert_true(peer_receive(f->b));
    assert_int_equal(row_status(f->b), FB_OK);
    assert_int_equal(rig_status(&f->rig).blocks, LARGE_SLOTS);
}

/* --- balance --- */

/* What a small engine does with a page: look, and write where there is nothing. */
static bool use(struct peer *p, const struct shape *shape, struct pages page)
{
    bool found = peer_finds(p, page) == 1;

    if (!found) {
        peer_put(p, shape, page);
    }
    return found;
}

/* Some pages are wanted more than others. */
static uint32_t draw(uint64_t *random, uint32_t n)
{
    uint64_t a = fb_mix64(*random), b = fb_mix64(a);

    *random = b;
    return (uint32_t)(a % n < b % n ? a % n : b % n);
}

/* More than fits of both, by turns: of one alone, of both, of the other alone, of both. */
static void spaces_that_alternate_settle(void **state)
{
    enum { ROUNDS = 2000, PHASES = 4, LARGES = 60, SMALLS = 900 };
    struct fixture *f = *state;
    uint64_t random = 1;

    begin(f, 4);
    for (uint32_t phase = 0; phase < PHASES; phase++) {
        uint64_t moves = rig_metric(&f->rig, FB_METRIC_CHUNKS_MOVED);
        uint32_t larges = 0, smalls = 0;

        for (uint32_t i = 0; i < ROUNDS; i++) {
            f->large.chain = 1000 + draw(&random, LARGES);
            f->small.chain = 2000 + draw(&random, SMALLS);
            larges += phase != 2 && use(f->a, &large, f->large);
            smalls += phase != 0 && use(f->b, &small, f->small);
            rig_pass(&f->rig, SECOND / 200);
        }
        moves = rig_metric(&f->rig, FB_METRIC_CHUNKS_MOVED) - moves;
        print_message("phase %u: %u and %u hits of %d, %u moves\n", phase, larges, smalls, ROUNDS,
                      (uint32_t)moves);
        assert_in_range(moves, 0, 6);
        assert_true(phase == 2 || larges > ROUNDS / 10);
        assert_true(phase == 0 || smalls > ROUNDS / 10);
    }
}

/* Both have nothing without the one chunk there is: it does not change hands for every page. */
static void one_chunk_for_two(void **state)
{
    enum { ROUNDS = 1000 };
    struct fixture *f = *state;
    const uint64_t sums[PLANES] = {0};
    struct fb_reserve_row row;

    begin(f, 1);
    for (uint32_t i = 0; i < ROUNDS; i++) {
        struct pages page = i % 2 ? f->large : f->small;
        struct peer *p = i % 2 ? f->a : f->b;

        page.chain = 1000 + i;
        if (peer_reserve(p, page, NULL, &row) == NOT_ANSWERED) {
            rig_run_jobs(&f->rig);
            assert_true(peer_receive(p));
            peer_rows(p, &row, 1);
        }
        if (row.status == FB_OK) {
            assert_int_equal(peer_commit(p, row.claim, sums, PLANES), FB_OK);
        } else {
            assert_int_equal(row.status, FB_AGAIN);
        }
        rig_pass(&f->rig, SECOND / 200);
    }
    assert_in_range(rig_metric(&f->rig, FB_METRIC_CHUNKS_MOVED), 10, ROUNDS / 200 * 4);
}

/* --- shares, failures --- */

static void tenants_keep_their_shares(void **state)
{
    static const struct shape theirs = {.tenant = "other", .row_bytes = LARGE_ROW};
    struct fixture *f = *state;
    struct pages mine, other;
    struct fb_node_status s;

    strcpy(f->rig.config.tenants[0].name, "default");
    f->rig.config.tenants[0].share_percent = 75;
    strcpy(f->rig.config.tenants[1].name, "other");
    f->rig.config.tenants[1].share_percent = 25;
    f->rig.config.tenant_count = 2;
    rig_start(&f->rig);
    f->a = peer_new(&f->rig, 0, 1);
    f->b = peer_new(&f->rig, 1, 2);
    mine = (struct pages){peer_space(f->a, &large), 1, 0, 1};
    other = (struct pages){peer_space(f->b, &theirs), 2, 0, 1};
    for (uint32_t i = 0; i < 6 * LARGE_SLOTS; i++) {
        mine.chain = other.chain = 1000 + i;
        other.chain += 1000;
        peer_put(f->a, &large, mine);
        peer_put(f->b, &theirs, other);
    }
    s = rig_status(&f->rig);
    assert_int_equal(s.tenants[0].blocks, 3 * LARGE_SLOTS);
    assert_int_equal(s.tenants[1].blocks, LARGE_SLOTS);
    assert_int_equal(s.tenants[0].used_bytes, 6 * MIB);
    assert_int_equal(s.tenants[1].used_bytes, 2 * MIB);
}

static void chunk_cannot_be_made(void **state)
{
    struct fixture *f = *state;
    char moved[256];
    struct fb_reserve_row row;

    begin(f, 2);
    snprintf(moved, sizeof(moved), "%s/moved", f->rig.dir);
    assert_int_equal(peer_reserve(f->a, f->large, NULL, &row), NOT_ANSWERED);
    {
        char command[512];

        snprintf(command, sizeof(command), "rm -r %s", f->rig.config.chunk_dir);
        assert_int_equal(system(command), 0);
    }
    assert_int_equal(rig_run_jobs(&f->rig), 1);
    assert_true(peer_receive(f->a));
    assert_int_equal(row_status(f->a), FB_AGAIN);
    assert_int_equal(rig_status(&f->rig).host.used_bytes, 0);
    assert_int_equal(peer_reserve(f->a, f->large, NULL, &row), FB_OK); /* not again so soon */
    assert_int_equal(row.status, FB_AGAIN);
    rig_pass(&f->rig, 2 * SECOND);
    assert_int_equal(peer_reserve(f->a, f->large, NULL, &row), NOT_ANSWERED);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
#define OWN(name)  cmocka_unit_test_setup_teardown(name, setup_only, teardown)
    static const struct CMUnitTest tests[] = {
        TEST(new_class_gets_a_chunk),           TEST(empty_chunk_goes_at_once),
        TEST(chunk_waits_until_it_is_unmapped), TEST(death_counts_as_unmapping),
        TEST(chunk_waits_for_its_readers),      TEST(answers_are_not_mixed),
        TEST(death_is_heard_by_those_who_wait), TEST(last_block_of_a_chunk),
        OWN(spaces_that_alternate_settle),      OWN(one_chunk_for_two),
        OWN(tenants_keep_their_shares),         OWN(chunk_cannot_be_made),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
