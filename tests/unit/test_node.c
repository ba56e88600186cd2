/* Rules of a node: who may write, who may read, for how long, and what becomes of a slot. */
#include "tests/unit/node_util.h"
#include "transport/channel.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const struct shape large = {.row_bytes = LARGE_ROW};
static const struct shape small = {.row_bytes = SMALL_ROW};
static const uint32_t first_plane[4] = {0, 1, 0, LAYERS};
static const uint32_t second_plane[4] = {1, 1, 0, LAYERS};

struct fixture {
    struct rig rig;
    struct peer *a, *b;
    uint32_t space; /* of small blocks */
};

static void begin_with(struct fixture *f, const struct shape *shape)
{
    rig_start(&f->rig);
    f->a = peer_new(&f->rig, 0, 1);
    f->b = peer_new(&f->rig, 0, 2);
    f->space = peer_space(f->a, shape);
}

static int setup_only(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));

    assert_non_null(f);
    rig_init(&f->rig);
    *state = f;
    return 0;
}

static int setup(void **state)
{
    setup_only(state);
    begin_with(*state, &small);
    return 0;
}

static int setup_large(void **state)
{
    setup_only(state);
    begin_with(*state, &large);
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

static struct pages page(const struct fixture *f, uint32_t chain, uint32_t first)
{
    return (struct pages){f->space, chain, first, 1};
}

static struct pages chain_of(const struct fixture *f, uint32_t chain, uint32_t count)
{
    return (struct pages){f->space, chain, 0, count};
}

/* One page; the tier has made its chunk. */
static struct fb_reserve_row reserve(struct peer *p, struct pages pages, const uint32_t range[4])
{
    struct fb_reserve_row row;
    enum fb_status status = peer_reserve(p, pages, range, &row);

    if (status == NOT_ANSWERED) {
        rig_run_jobs(p->rig);
        assert_true(peer_receive(p));
        peer_rows(p, &row, 1);
    } else {
        assert_int_equal(status, FB_OK);
    }
    return row;
}

static void assert_nothing_held(struct fixture *f)
{
    struct fb_node_status s = rig_status(&f->rig);

    assert_int_equal(s.leases, 0);
    assert_int_equal(s.leased_bytes, 0);
    assert_int_equal(s.reserved_bytes, 0);
    assert_int_equal(s.quarantined_bytes, 0);
    assert_int_equal(s.blocks, s.host.slots_used);
}

/* --- writing --- */

static void block_lives_from_reserve_to_release(void **state)
{
    struct fixture *f = *state;
    struct fb_reserve_row row = reserve(f->a, page(f, 1, 0), NULL);
    const uint32_t range[4] = {0, PLANES, 0, LAYERS};
    struct pages first = page(f, 1, 0);
    uint8_t key[FB_KEY_BYTES];
    uint64_t sums[PLANES];
    struct hit hit;

    assert_int_equal(row.status, FB_OK);
    assert_int_equal(peer_finds(f->b, first), 0);
    assert_true(rig_status(&f->rig).reserved_bytes > 0);
    key_of(1, 0, key);
    rig_write(&f->rig, &small, row.where, key, range, sums);
    assert_int_equal(peer_commit(f->a, row.claim, sums, PLANES), FB_OK);
    assert_int_equal(rig_status(&f->rig).reserved_bytes, 0);

    assert_int_equal(peer_lookup(f->b, &first, 1, &hit), FB_OK);
    assert_int_equal(hit.pages, 1);
    assert_memory_equal(&hit.where[0], &row.where, sizeof(row.where));
    assert_true(rig_has(&f->rig, &small, hit.where[0], key));
    assert_true(rig_status(&f->rig).leased_bytes > 0);
    assert_int_equal(peer_release(f->b, hit.lease), FB_OK);
    assert_int_equal(peer_release(f->b, hit.lease), FB_ENOENT);
    assert_nothing_held(f);
    assert_int_equal(reserve(f->b, first, NULL).status, FB_EXISTS);
}

static void lookup_finds_the_prefix_only(void **state)
{
    struct fixture *f = *state;

    peer_put(f->a, &small, chain_of(f, 1, 4));
    assert_int_equal(peer_finds(f->b, chain_of(f, 1, 9)), 4);
    assert_int_equal(peer_finds(f->b, (struct pages){f->space, 1, 2, 2}), 2);
    assert_int_equal(peer_finds(f->b, chain_of(f, 2, 9)), 0);
}

static void first_claim_wins(void **state)
{
    struct fixture *f = *state;
    const uint32_t one_layer[4] = {1, 1, 1, 1};
    const uint32_t other_layer[4] = {1, 1, 0, 1};

    assert_int_equal(reserve(f->a, page(f, 1, 0), first_plane).status, FB_OK);
    assert_int_equal(reserve(f->b, page(f, 1, 0), first_plane).status, FB_BUSY);
    assert_int_equal(reserve(f->b, page(f, 1, 0), NULL).status, FB_BUSY);
    assert_int_equal(reserve(f->b, page(f, 1, 0), one_layer).status, FB_OK);
    assert_int_equal(reserve(f->a, page(f, 1, 0), second_plane).status, FB_BUSY);
    assert_int_equal(reserve(f->a, page(f, 1, 0), other_layer).status, FB_OK);
}

static void block_is_seen_when_whole(void **state)
{
    struct fixture *f = *state;
    struct fb_reserve_row a = reserve(f->a, page(f, 1, 0), first_plane);
    struct fb_reserve_row b = reserve(f->b, page(f, 1, 0), second_plane);
    uint8_t key[FB_KEY_BYTES];
    struct pages first = page(f, 1, 0);
    struct hit hit;
    uint64_t sum;

    assert_memory_equal(&a.where, &b.where, sizeof(a.where));
    assert_true(a.claim != b.claim);
    key_of(1, 0, key);
    rig_write(&f->rig, &small, a.where, key, first_plane, &sum);
    assert_int_equal(peer_commit(f->a, a.claim, &sum, 1), FB_OK);
    assert_int_equal(peer_finds(f->a, first), 0);
    /* What is committed stays claimed. */
    assert_int_equal(reserve(f->b, first, first_plane).status, FB_BUSY);
    rig_write(&f->rig, &small, b.where, key, second_plane, &sum);
    assert_int_equal(peer_commit(f->b, b.claim, &sum, 1), FB_OK);
    assert_int_equal(peer_lookup(f->a, &first, 1, &hit), FB_OK);
    assert_int_equal(hit.pages, 1);
    assert_true(rig_has(&f->rig, &small, hit.where[0], key));
    assert_int_equal(peer_reject(f->a, first), FB_OK); /* sums of planes and layers are right */
    assert_int_equal(peer_release(f->a, hit.lease), FB_OK);
    assert_nothing_held(f);
}

static void layers_of_a_plane_add_up(void **state)
{
    static const uint32_t ranges[LAYERS][4] = {{0, PLANES, 0, 1}, {0, PLANES, 1, 1}};
    struct fixture *f = *state;
    uint8_t key[FB_KEY_BYTES];
    uint64_t sums[PLANES];

    key_of(1, 0, key);
    for (uint32_t i = 0; i < LAYERS; i++) {
        struct fb_reserve_row row = reserve(f->a, page(f, 1, 0), ranges[i]);

        rig_write(&f->rig, &small, row.where, key, ranges[i], sums);
        assert_int_equal(peer_commit(f->a, row.claim, sums, PLANES), FB_OK);
    }
    assert_int_equal(peer_finds(f->b, page(f, 1, 0)), 1);
    assert_int_equal(peer_reject(f->b, page(f, 1, 0)), FB_OK);
}

/* In a tier that has one slot left. */
static void aborted_slot_waits_for_every_claim(void **state)
{
    struct fixture *f = *state;
    struct fb_reserve_row a, b, c;
    const uint64_t sum = 0;

    f->rig.config.host_bytes = TIER_OF(1);
    f->rig.config.client_share_percent = 100;
    begin_with(f, &large);
    peer_put(f->a, &large, chain_of(f, 9, LARGE_SLOTS - 1));
    peer_leases(f->a, chain_of(f, 9, LARGE_SLOTS - 1));
    a = reserve(f->a, page(f, 1, 0), first_plane);
    b = reserve(f->b, page(f, 1, 0), second_plane);
    assert_int_equal(a.status | b.status, FB_OK);
    assert_int_equal(peer_abort(f->a, a.claim), FB_OK);
    assert_true(rig_status(&f->rig).quarantined_bytes > 0);
    assert_int_equal(peer_finds(f->a, page(f, 1, 0)), 0);

    assert_int_equal(reserve(f->a, page(f, 2, 0), NULL).status, FB_AGAIN);
    assert_int_equal(peer_commit(f->b, b.claim, &sum, 1), FB_ESTATE); /* the last claim */
    c = reserve(f->a, page(f, 2, 0), NULL);
    assert_int_equal(c.status, FB_OK);
    assert_memory_equal(&c.where, &b.where, sizeof(c.where));
    assert_int_equal(rig_status(&f->rig).quarantined_bytes, 0);
}

static void aborted_key_may_be_written_again(void **state)
{
    struct fixture *f = *state;
    struct fb_reserve_row a = reserve(f->a, page(f, 1, 0), first_plane);
    struct fb_reserve_row b = reserve(f->b, page(f, 1, 0), second_plane), c;
    const uint64_t sum = 0;

    assert_int_equal(peer_commit(f->a, a.claim, &sum, 1), FB_OK);
    assert_int_equal(peer_abort(f->b, b.claim), FB_OK);
    c = reserve(f->b, page(f, 1, 0), NULL);
    assert_int_equal(c.status, FB_OK);
    assert_int_equal(peer_abort(f->b, c.claim), FB_OK);
    assert_nothing_held(f);
    assert_int_equal(rig_status(&f->rig).blocks, 0);
}

static void claims_end_once(void **state)
{
    struct fixture *f = *state;
    struct fb_reserve_row row = reserve(f->a, page(f, 1, 0), NULL);
    const uint64_t sums[PLANES + 1] = {0};

    assert_int_equal(peer_commit(f->a, row.claim + (1ull << 32), sums, PLANES), FB_ENOENT);
    assert_int_equal(peer_commit(f->a, 0, sums, PLANES), FB_ENOENT);
    assert_int_equal(peer_commit(f->b, row.claim, sums, PLANES), FB_EPERM);
    assert_int_equal(peer_abort(f->b, row.claim), FB_EPERM);
    assert_int_equal(peer_commit(f->a, row.claim, sums, PLANES - 1), FB_EINVAL);
    assert_int_equal(peer_commit(f->a, row.claim, sums, PLANES + 1), FB_EINVAL);
    assert_int_equal(peer_commit(f->a, row.claim, sums, PLANES), FB_OK);
    assert_int_equal(peer_commit(f->a, row.claim, sums, PLANES), FB_ENOENT);
    assert_int_equal(peer_abort(f->a, row.claim), FB_ENOENT);
    assert_int_equal(peer_finds(f->a, page(f, 1, 0)), 1);
}

static void late_writer_keeps_its_slot(void **state)
{
    struct fixture *f = *state;
    struct fb_reserve_row row = reserve(f->a, page(f, 1, 0), NULL), again;
    const uint64_t sums[PLANES] = {0};

    rig_pass(&f->rig, f->rig.config.reserve_ns - 1);
    assert_int_equal(rig_status(&f->rig).quarantined_bytes, 0);
    rig_pass(&f->rig, 1);
    assert_int_equal(rig_status(&f->rig).reserved_bytes, 0);
    assert_true(rig_status(&f->rig).quarantined_bytes > 0);
    assert_int_equal(peer_renew(f->a, 0, row.claim, 0), FB_OK);
    assert_true(rig_status(&f->rig).quarantined_bytes > 0); /* it writes still */
    again = reserve(f->b, page(f, 1, 0), NULL);
    assert_int_equal(again.status, FB_OK);
    assert_true(memcmp(&again.where, &row.where, sizeof(row.where)) != 0);
    assert_int_equal(peer_commit(f->a, row.claim, sums, PLANES), FB_ESTATE);
    assert_int_equal(rig_status(&f->rig).quarantined_bytes, 0);
    assert_int_equal(peer_commit(f->b, again.claim, sums, PLANES), FB_OK);
    assert_nothing_held(f);
}

static void late_claim_ends_by_not_being_named(void **state)
{
    struct fixture *f = *state;
    uint64_t claim = reserve(f->a, page(f, 1, 0), NULL).claim;

    assert_int_equal(peer_renew(f->a, 0, 0, 0), FB_OK);
    assert_true(rig_status(&f->rig).reserved_bytes > 0); /* renew was sent before it knew */
    rig_pass(&f->rig, f->rig.config.reserve_ns);
    assert_int_equal(peer_renew(f->a, 0, 0, 0), FB_OK);
    assert_nothing_held(f);
    assert_int_equal(peer_abort(f->a, claim), FB_ENOENT);
}

static void writer_dies(void **state)
{
    struct fixture *f = *state;
    struct fb_reserve_row a = reserve(f->a, page(f, 1, 0), first_plane);
    struct fb_reserve_row b = reserve(f->b, page(f, 1, 0), second_plane);
    const uint64_t sum = 0;

    assert_int_equal(a.status | b.status, FB_OK);
    peer_close(f->a); /* may come back */
    assert_true(rig_status(&f->rig).reserved_bytes > 0);
    peer_kill(f->a);
    assert_int_equal(rig_status(&f->rig).clients, 1);
    assert_true(rig_status(&f->rig).quarantined_bytes > 0);
    assert_int_equal(peer_commit(f->b, b.claim, &sum, 1), FB_ESTATE);
    assert_nothing_held(f);
}

static void client_comes_back_for_its_claim(void **state)
{
    struct fixture *f = *state;
    struct fb_reserve_row row = reserve(f->a, page(f, 1, 0), NULL);
    const uint64_t sums[PLANES] = {0};

    peer_close(f->a);
    peer_connect(f->a);
    assert_int_equal(f->a->reply.hello_reply.client_existed, 1);
    assert_int_equal(peer_commit(f->a, row.claim, sums, PLANES), FB_OK);
    peer_close(f->a); /* holds nothing: forgotten */
    assert_int_equal(rig_status(&f->rig).clients, 1);
    peer_connect(f->a);
    assert_int_equal(f->a->reply.hello_reply.client_existed, 0);
}

static void page_before_has_to_be_there(void **state)
{
    static const struct shape window = {
        .rule = FB_RULE_WINDOW, .row_bytes = SMALL_ROW, .window_tokens = 32};
    static const struct shape states = {.rule = FB_RULE_STATE, .row_bytes = SMALL_ROW};
    struct fixture *f = *state;
    struct pages in_window = {peer_space(f->a, &window), 2, 5, 1};
    struct pages in_states = {peer_space(f->a, &states), 3, 5, 1};
    struct fb_reserve_row rows[3];

    assert_int_equal(reserve(f->a, page(f, 1, 5), NULL).status, FB_ENOENT);
    assert_int_equal(reserve(f->a, in_window, NULL).status, FB_OK);
    assert_int_equal(reserve(f->a, in_states, NULL).status, FB_OK);
    /* One that is being written counts. */
    assert_int_equal(peer_reserve(f->a, chain_of(f, 1, 2), NULL, rows), FB_OK);
    assert_int_equal(rows[0].status | rows[1].status, FB_OK);
    assert_int_equal(reserve(f->b, page(f, 1, 2), NULL).status, FB_OK);
}

/* --- families --- */

static void family_takes_what_all_rules_allow(void **state)
{
    static const struct shape window = {
        .rule = FB_RULE_WINDOW, .row_bytes = SMALL_ROW, .window_tokens = 32};
    static const struct shape states = {.rule = FB_RULE_STATE, .row_bytes = SMALL_ROW};
    struct fixture *f = *state;
    struct pages family[3] = {chain_of(f, 1, 8),
                              {peer_space(f->a, &window), 2, 0, 8},
                              {peer_space(f->a, &states), 3, 0, 8}};
    struct hit hit;

    peer_put(f->a, &small, chain_of(f, 1, 7));
    peer_put(f->a, &window, (struct pages){family[1].space, 2, 3, 3}); /* pages 3, 4, 5 */
    peer_put(f->a, &states, (struct pages){family[2].space, 3, 5, 1});
    peer_put(f->a, &states, (struct pages){family[2].space, 3, 6, 1});
    assert_int_equal(peer_lookup(f->b, family, 3, &hit), FB_OK);
    assert_int_equal(hit.pages, 6); /* a state at 7, but no window there */
    for (uint32_t i = 0; i < 6; i++) {
        assert_int_not_equal(hit.where[i].chunk, FB_WIRE_NOWHERE);
        assert_int_equal(hit.where[6 + i].chunk == FB_WIRE_NOWHERE, i < 4);
        assert_int_equal(hit.where[12 + i].chunk == FB_WIRE_NOWHERE, i < 5);
    }
    assert_int_equal(peer_release(f->b, hit.lease), FB_OK);
    assert_int_equal(peer_lookup(f->b, family, 2, &hit), FB_OK);
    assert_int_equal(hit.pages, 6);
    assert_int_equal(peer_release(f->b, hit.lease), FB_OK);
    family[1] = family[2];
    assert_int_equal(peer_lookup(f->b, family, 2, &hit), FB_OK);
    assert_int_equal(hit.pages, 7);
    assert_int_equal(peer_release(f->b, hit.lease), FB_OK);
    assert_nothing_held(f);
}

/* --- leases --- */

static void lease_is_held_until_the_last_one_lets_go(void **state)
{
    struct fixture *f = *state;
    uint64_t lease, blocks, bytes;

    peer_put(f->a, &small, chain_of(f, 1, 3));
    lease = peer_leases(f->a, chain_of(f, 1, 3));
    assert_int_equal(peer_attach(f->b, lease), FB_OK);
    assert_int_equal(peer_attach(f->b, lease), FB_OK); /* once is enough */
    assert_int_equal(peer_release(f->a, lease), FB_OK);
    assert_int_equal(fb_node_purge(f->rig.node, "default", NULL, NULL, &blocks, &bytes, NULL),
                     FB_OK);
    assert_int_equal(rig_status(&f->rig).host.slots_used, 3);
    assert_int_equal(peer_release(f->b, lease), FB_OK);
    assert_int_equal(rig_status(&f->rig).host.slots_used, 0);
    assert_int_equal(peer_attach(f->b, lease), FB_ENOENT);
    assert_nothing_held(f);
}

static void lease_runs_out(void **state)
{
    struct fixture *f = *state;
    uint64_t lease;

    peer_put(f->a, &small, chain_of(f, 1, 3));
    lease = peer_leases(f->a, chain_of(f, 1, 3));
    rig_pass(&f->rig, f->rig.config.lease_ns - 1);
    assert_int_equal(peer_renew(f->a, lease, 0, 0), FB_OK);
    rig_pass(&f->rig, f->rig.config.lease_ns - 1);
    assert_int_equal(rig_status(&f->rig).quarantined_bytes, 0);
    rig_pass(&f->rig, 1);
    assert_int_equal(rig_status(&f->rig).leased_bytes, 0);
    assert_true(rig_status(&f->rig).quarantined_bytes > 0);
    assert_int_equal(peer_attach(f->b, lease), FB_ENOENT);
    assert_int_equal(peer_renew(f->a, lease, 0, 0), FB_ENOENT); /* named: reads still */
    assert_true(rig_status(&f->rig).quarantined_bytes > 0);
    assert_int_equal(peer_renew(f->a, 0, 0, 0), FB_OK);
    assert_nothing_held(f);
}

static void expired_lease_ends_by_release_or_death(void **state)
{
    struct fixture *f = *state;
    uint64_t lease;

    peer_put(f->a, &small, chain_of(f, 1, 3));
    lease = peer_leases(f->a, chain_of(f, 1, 3));
    assert_int_equal(peer_attach(f->b, lease), FB_OK);
    rig_pass(&f->rig, f->rig.config.lease_ns);
    assert_int_equal(peer_release(f->a, lease), FB_OK);
    assert_true(rig_status(&f->rig).quarantined_bytes > 0);
    peer_kill(f->b);
    assert_nothing_held(f);
}

/* Its deadline has passed, though nobody has looked at the clock since. */
static void nobody_attaches_after_the_deadline(void **state)
{
    struct fixture *f = *state;
    uint64_t lease;

    peer_put(f->a, &small, chain_of(f, 1, 3));
    lease = peer_leases(f->a, chain_of(f, 1, 3));
    fb_node_set_time(f->rig.node, f->rig.now_ns + f->rig.config.lease_ns + SECOND / 100);
    assert_int_equal(peer_attach(f->b, lease), FB_ENOENT);
    assert_int_equal(peer_release(f->a, lease), FB_OK);
}

static void leased_blocks_are_not_evicted(void **state)
{
    struct fixture *f = *state;
    struct pages kept;
    struct hit hit;
    uint8_t key[FB_KEY_BYTES];

    f->rig.config.host_bytes = TIER_OF(1);
    begin_with(f, &large);
    kept = chain_of(f, 1, 3);
    peer_put(f->a, &large, kept);
    assert_int_equal(peer_lookup(f->b, &kept, 1, &hit), FB_OK);
    for (uint32_t chain = 2; chain < 20; chain++) {
        peer_put(f->a, &large, page(f, chain, 0));
    }
    for (uint32_t i = 0; i < 3; i++) {
        key_of(1, i, key);
        assert_true(rig_has(&f->rig, &large, hit.where[i], key));
    }
    assert_int_equal(peer_release(f->b, hit.lease), FB_OK);
    for (uint32_t chain = 20; chain < 40; chain++) {
        peer_put(f->a, &large, page(f, chain, 0));
    }
    assert_int_equal(peer_finds(f->b, kept), 0);
    assert_int_equal(rig_status(&f->rig).blocks, LARGE_SLOTS);
}

/* Attaching to too much at once is refused, and takes nothing away that was held before. */
static void attach_has_a_limit(void **state)
{
    struct fixture *f = *state;
    struct fb_list_request request = {.count = 0};
    uint64_t leases[FB_WIRE_MAX_KEYS / 256 + 1], blocks, bytes;
    struct pages pages = chain_of(f, 1, 256);
    struct fb_wire_writer w;

    f->rig.config.client_share_percent = 100;
    peer_put(f->a, &small, pages);
    fb_wire_begin(&w, f->b->tx, FB_MSG_ATTACH, 1, FB_OK, &request, sizeof(request));
    for (; request.count < FB_WIRE_MAX_KEYS / 256 + 1; request.count++) {
        leases[request.count] = peer_leases(f->a, pages);
    }
    assert_int_equal(peer_attach(f->b, leases[0]), FB_OK);
    for (uint32_t i = 0; i < request.count; i++) {
        assert_int_equal(i > 0 ? peer_attach(f->b, leases[i]) : FB_OK, FB_OK);
        assert_int_equal(i > 0 ? peer_release(f->b, leases[i]) : FB_OK, FB_OK);
    }
    fb_wire_begin(&w, f->b->tx, FB_MSG_ATTACH, 1, FB_OK, &request, sizeof(request));
    fb_wire_append(&w, leases, request.count * sizeof(*leases));
    assert_int_equal(peer_send(f->b, &w), FB_ELIMIT);
    for (uint32_t i = 0; i < request.count; i++) {
        assert_int_equal(peer_release(f->a, leases[i]), FB_OK);
    }
    assert_int_equal(fb_node_purge(f->rig.node, "default", NULL, NULL, &blocks, &bytes, NULL),
                     FB_OK);
    assert_int_equal(rig_status(&f->rig).host.slots_used, 256);
    assert_int_equal(peer_release(f->b, leases[0]), FB_OK);
    assert_nothing_held(f);
}

/* --- limits --- */

static void client_holds_no_more_than_its_share(void **state)
{
    struct fixture *f = *state;
    struct pages pages = chain_of(f, 1, 2 * LARGE_SLOTS);
    struct fb_reserve_row rows[2 * LARGE_SLOTS];
    uint32_t got = 0;

    f->rig.config.client_share_percent = 25; /* 8 blocks and a bit */
    begin_with(f, &large);
    pages.space = f->space;
    peer_put(f->b, &large, page(f, 2, 0));
    assert_int_equal(peer_reserve(f->a, pages, NULL, rows), NOT_ANSWERED);
    rig_run_jobs(&f->rig);
    assert_true(peer_receive(f->a));
    peer_rows(f->a, rows, pages.count);
    while (got < pages.count && rows[got].status == FB_OK) {
        got++;
    }
    assert_int_equal(got, LARGE_SLOTS);
    assert_int_equal(rows[got].status, FB_AGAIN);
    {
        struct pages other = page(f, 2, 0);
        struct hit hit;

        assert_int_equal(peer_lookup(f->a, &other, 1, &hit), FB_AGAIN);
        assert_int_equal(peer_finds(f->b, other), 1); /* each has its own */
        rig_pass(&f->rig, f->rig.config.reserve_ns);
        assert_int_equal(peer_lookup(f->a, &other, 1, &hit), FB_AGAIN); /* quarantine counts */
        for (uint32_t i = 0; i < got; i++) {
            assert_int_equal(peer_abort(f->a, rows[i].claim), FB_OK);
        }
        assert_int_equal(peer_finds(f->a, other), 1);
    }
    assert_nothing_held(f);
}

/* A page that many leases have is held once: a prefix that all requests share does not use up a
 * share. But leasing again and giving the first lease back holds no more than the share either. */
static void shared_page_counts_once(void **state)
{
    struct fixture *f = *state;
    struct hit first, again;
    uint32_t held = 0;

    f->rig.config.client_share_percent = 25; /* 8 blocks and a bit */
    begin_with(f, &large);
    for (uint32_t chain = 0; chain < 2 * LARGE_SLOTS; chain++) {
        peer_put(f->b, &large, page(f, 10 + chain, 0));
    }
    for (uint32_t i = 0; i < 4 * LARGE_SLOTS; i++) {
        struct pages shared = page(f, 10, 0);

        assert_int_equal(peer_lookup(f->b, &shared, 1, &again), FB_OK);
    }
    for (uint32_t chain = 0; chain < 2 * LARGE_SLOTS; chain++) {
        struct pages one = page(f, 10 + chain, 0);

        if (peer_lookup(f->a, &one, 1, &first) != FB_OK) {
            continue;
        }
        held++;
        if (peer_lookup(f->a, &one, 1, &again) == FB_OK) {
            assert_int_equal(peer_release(f->a, first.lease), FB_OK);
        }
    }
    assert_in_range(held, LARGE_SLOTS - 1, LARGE_SLOTS);
    peer_kill(f->a);
    peer_kill(f->b);
    assert_nothing_held(f);
}

/* --- tenants --- */

static void tenants_do_not_share(void **state)
{
    static const struct shape theirs = {.tenant = "other", .row_bytes = SMALL_ROW};
    struct fixture *f = *state;
    struct pages pages, other;
    struct hit hit;
    uint64_t lease, leased;

    strcpy(f->rig.config.tenants[0].name, "default");
    f->rig.config.tenants[0].share_percent = 50;
    strcpy(f->rig.config.tenants[1].name, "other");
    f->rig.config.tenants[1].share_percent = 50;
    f->rig.config.tenant_count = 2;
    rig_start(&f->rig);
    f->a = peer_new(&f->rig, 0, 1);
    f->b = peer_new(&f->rig, 1, 1); /* ids are a tenant's own */
    f->space = peer_space(f->a, &small);
    pages = chain_of(f, 1, 2);
    other = (struct pages){peer_space(f->b, &theirs), 1, 0, 2};
    peer_put(f->a, &small, pages);
    lease = peer_leases(f->a, pages);
    assert_int_equal(peer_attach(f->b, lease), FB_ENOENT);
    assert_int_equal(peer_release(f->b, lease), FB_ENOENT);
    assert_int_equal(peer_renew(f->b, lease, 0, 0), FB_ENOENT);
    assert_int_equal(peer_lookup(f->b, &pages, 1, &hit), FB_ENOENT);
    assert_int_equal(peer_lookup(f->a, &pages, 1, &hit), FB_OK);
    assert_int_equal(peer_finds(f->b, other), 0);
    assert_int_equal(peer_map(f->b, hit.where[0].chunk), FB_ENOENT);
    leased = rig_status(&f->rig).leased_bytes;
    assert_int_equal(peer_resume(f->b, hit.where[0], &lease), FB_OK); /* names nothing of theirs */
    assert_int_equal(rig_status(&f->rig).leased_bytes, leased);
    assert_int_equal(peer_release(f->b, lease), FB_OK);
    assert_int_equal(peer_map(f->a, hit.where[0].chunk), FB_OK);
    rig_run_jobs(&f->rig);
}

/* --- waiting, draining, faults --- */

static void writer_waits_for_a_chunk(void **state)
{
    struct fixture *f = *state;
    struct fb_reserve_row row;

    assert_int_equal(peer_reserve(f->a, page(f, 1, 0), NULL, &row), NOT_ANSWERED);
    assert_int_equal(peer_reserve(f->b, page(f, 2, 0), NULL, &row), NOT_ANSWERED);
    rig_pass(&f->rig, SECOND / 4);
    assert_false(peer_receive(f->a));
    rig_pass(&f->rig, SECOND / 4);
    assert_true(peer_receive(f->a)); /* it was slow */
    peer_rows(f->a, &row, 1);
    assert_int_equal(row.status, FB_AGAIN);
    assert_true(peer_receive(f->b));
    assert_int_equal(peer_reserve(f->a, page(f, 1, 0), NULL, &row), NOT_ANSWERED);
    peer_close(f->a);
    assert_int_equal(rig_run_jobs(&f->rig), 1); /* one chunk for all */
    assert_nothing_held(f);
    assert_int_equal(reserve(f->b, page(f, 2, 0), NULL).status, FB_OK);
}

/* Some pages have their slot when the process dies. */
static void writer_dies_while_it_waits(void **state)
{
    struct fixture *f = *state;
    struct fb_reserve_row rows[LARGE_SLOTS + 2];

    peer_put(f->b, &large, chain_of(f, 9, 1));
    assert_int_equal(peer_reserve(f->a, chain_of(f, 1, LARGE_SLOTS + 2), NULL, rows), NOT_ANSWERED);
    assert_true(rig_status(&f->rig).reserved_bytes > 0);
    peer_kill(f->a);
    assert_nothing_held(f);
    rig_run_jobs(&f->rig);
    assert_int_equal(rig_status(&f->rig).blocks, 1);
}

/* The connection goes, the process stays: nobody will hear of what it got so far. */
static void writer_leaves_while_it_waits(void **state)
{
    struct fixture *f = *state;
    struct fb_reserve_row rows[LARGE_SLOTS + 2];

    peer_put(f->b, &large, chain_of(f, 9, 1));
    assert_int_equal(peer_reserve(f->a, chain_of(f, 1, LARGE_SLOTS + 2), NULL, rows), NOT_ANSWERED);
    peer_close(f->a);
    assert_nothing_held(f);
}

static void drain_waits_and_refuses(void **state)
{
    struct fixture *f = *state;
    struct pages pages = chain_of(f, 1, 3);
    struct fb_reserve_row claim, row;
    const uint64_t sums[PLANES] = {0};
    uint64_t lease;

    peer_put(f->a, &small, pages);
    lease = peer_leases(f->b, pages);
    claim = reserve(f->a, page(f, 2, 0), NULL);
    fb_node_drain(f->rig.node, 60 * SECOND);
    assert_int_equal(fb_node_state(f->rig.node), FB_NODE_DRAINING);
    assert_false(peer_receive(f->b));
    assert_int_equal(f->b->notice.kind, FB_NOTIFY_DRAINING);
    assert_int_equal(peer_finds(f->a, pages), 0);
    assert_int_equal(peer_reserve(f->a, page(f, 3, 0), NULL, &row), FB_AGAIN);
    assert_int_equal(peer_attach(f->a, lease), FB_OK);
    assert_int_equal(peer_release(f->a, lease), FB_OK);
    assert_int_equal(peer_commit(f->a, claim.claim, sums, PLANES), FB_OK);
    rig_pass(&f->rig, SECOND);
    assert_int_equal(fb_node_state(f->rig.node), FB_NODE_DRAINING);
    assert_int_equal(peer_release(f->b, lease), FB_OK);
    rig_pass(&f->rig, SECOND / 10);
    assert_int_equal(fb_node_state(f->rig.node), FB_NODE_DRAINED);
}

static void drain_ends_in_time(void **state)
{
    struct fixture *f = *state;

    peer_put(f->a, &small, chain_of(f, 1, 1));
    peer_leases(f->a, chain_of(f, 1, 1));
    fb_node_drain(f->rig.node, 2 * SECOND);
    rig_pass(&f->rig, 2 * SECOND - 1);
    assert_int_equal(fb_node_state(f->rig.node), FB_NODE_DRAINING);
    rig_pass(&f->rig, 1);
    assert_int_equal(fb_node_state(f->rig.node), FB_NODE_DRAINED);
}

/* What a waiting writer has got by then it is told. */
static void drain_answers_those_who_wait(void **state)
{
    struct fixture *f = *state;
    struct fb_reserve_row rows[LARGE_SLOTS + 2];

    peer_put(f->b, &large, chain_of(f, 9, 1));
    assert_int_equal(peer_reserve(f->a, chain_of(f, 1, LARGE_SLOTS + 2), NULL, rows), NOT_ANSWERED);
    fb_node_drain(f->rig.node, SECOND);
    assert_true(peer_receive(f->a));
    assert_int_equal(f->a->reply.header.status, FB_OK);
    peer_rows(f->a, rows, LARGE_SLOTS + 2);
    for (uint32_t i = 0; i < LARGE_SLOTS + 2; i++) {
        assert_int_equal(rows[i].status, i < LARGE_SLOTS - 1 ? FB_OK : FB_AGAIN);
        assert_int_equal(rows[i].claim ? peer_abort(f->a, rows[i].claim) : FB_OK, FB_OK);
    }
    assert_nothing_held(f);
}

static void failed_commit_leaves_nothing(void **state)
{
    struct fixture *f = *state;
    const uint64_t sums[PLANES] = {0};
    struct fb_reserve_row row;

    f->rig.faults = (struct fb_tier_faults){.seed = 1, .fail_commit = 1};
    begin_with(f, &small);
    row = reserve(f->a, page(f, 1, 0), NULL);
    assert_int_equal(peer_commit(f->a, row.claim, sums, PLANES), FB_EIO);
    assert_int_equal(peer_finds(f->a, page(f, 1, 0)), 0);
    assert_int_equal(peer_commit(f->a, row.claim, sums, PLANES), FB_ENOENT);
    assert_nothing_held(f);
}

/* Publication takes time; the writer may be gone by then. */
static void late_publication(void **state)
{
    struct fixture *f = *state;
    const uint64_t sums[PLANES] = {0};
    struct fb_reserve_row row;

    f->rig.faults = (struct fb_tier_faults){.seed = 1, .delay = 1, .delay_ns = SECOND};
    begin_with(f, &small);
    rig_pass(&f->rig, 1);
    row = reserve(f->a, page(f, 1, 0), NULL);
    assert_int_equal(peer_commit(f->a, row.claim, sums, PLANES), NOT_ANSWERED);
    assert_int_equal(peer_finds(f->b, page(f, 1, 0)), 0);
    rig_pass(&f->rig, SECOND);
    assert_true(peer_receive(f->a));
    assert_int_equal(fb_wire_u32(f->a->reply.first, 0), FB_OK);
    assert_int_equal(peer_finds(f->b, page(f, 1, 0)), 1);

    row = reserve(f->a, page(f, 2, 0), NULL);
    assert_int_equal(peer_commit(f->a, row.claim, sums, PLANES), NOT_ANSWERED);
    peer_kill(f->a);
    rig_pass(&f->rig, f->rig.config.reserve_ns);
    assert_int_equal(peer_finds(f->b, page(f, 2, 0)), 1);
    assert_nothing_held(f);
}

static void speaking_while_an_answer_is_due_is_the_end(void **state)
{
    struct fixture *f = *state;
    struct fb_reserve_row row;

    assert_int_equal(peer_reserve(f->a, page(f, 1, 0), NULL, &row), NOT_ANSWERED);
    assert_int_equal(peer_reserve(f->a, page(f, 1, 0), NULL, &row), NOT_ANSWERED);
    assert_int_equal(rig_status(&f->rig).clients, 1);
    rig_run_jobs(&f->rig);
    assert_false(peer_receive(f->a));
    assert_nothing_held(f);
}

/* A spinning reactor asks the connection that spoke last: not while an answer is due, and not once
 * it has gone. */
static void polls_who_spoke_last(void **state)
{
    struct fixture *f = *state;
    struct fb_list_request none = {0};
    struct fb_wire_writer w;
    struct fb_node *node = f->rig.node;

    peer_put(f->a, &small, page(f, 1, 0));
    assert_false(fb_node_poll(node));
    fb_wire_begin(&w, f->a->tx, FB_MSG_RELEASE, 7, FB_OK, &none, sizeof(none));
    assert_int_equal(fb_channel_send(f->a->channel, f->a->tx, fb_wire_end(&w), NULL, 0), FB_OK);
    assert_true(fb_node_poll(node));
    assert_true(peer_receive(f->a));
    assert_int_equal(f->a->reply.header.id, 7);
    assert_int_equal(peer_finds(f->b, page(f, 1, 0)), 1);
    peer_close(f->b);
    assert_false(fb_node_poll(node));
    assert_int_equal(peer_finds(f->a, page(f, 1, 0)), 1);
    fb_channel_destroy(f->a->channel);
    f->a->channel = NULL;
    assert_true(fb_node_poll(node));
    fb_node_collect(node);
    assert_false(fb_node_poll(node));
    fb_node_check(node);
}

int main(void)
{
#define TEST(name)  cmocka_unit_test_setup_teardown(name, setup, teardown)
#define LARGE(name) cmocka_unit_test_setup_teardown(name, setup_large, teardown)
#define OWN(name)   cmocka_unit_test_setup_teardown(name, setup_only, teardown)
    static const struct CMUnitTest tests[] = {
        TEST(block_lives_from_reserve_to_release),
        TEST(lookup_finds_the_prefix_only),
        TEST(first_claim_wins),
        TEST(block_is_seen_when_whole),
        TEST(layers_of_a_plane_add_up),
        OWN(aborted_slot_waits_for_every_claim),
        TEST(aborted_key_may_be_written_again),
        TEST(claims_end_once),
        TEST(late_writer_keeps_its_slot),
        TEST(late_claim_ends_by_not_being_named),
        TEST(writer_dies),
        TEST(client_comes_back_for_its_claim),
        TEST(page_before_has_to_be_there),
        TEST(family_takes_what_all_rules_allow),
        TEST(lease_is_held_until_the_last_one_lets_go),
        TEST(lease_runs_out),
        TEST(expired_lease_ends_by_release_or_death),
        TEST(nobody_attaches_after_the_deadline),
        OWN(leased_blocks_are_not_evicted),
        TEST(attach_has_a_limit),
        OWN(client_holds_no_more_than_its_share),
        OWN(shared_page_counts_once),
        OWN(tenants_do_not_share),
        TEST(writer_waits_for_a_chunk),
        LARGE(writer_dies_while_it_waits),
        LARGE(writer_leaves_while_it_waits),
        TEST(drain_waits_and_refuses),
        TEST(drain_ends_in_time),
        LARGE(drain_answers_those_who_wait),
        OWN(failed_commit_leaves_nothing),
        OWN(late_publication),
        TEST(speaking_while_an_answer_is_due_is_the_end),
        TEST(polls_who_spoke_last),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
