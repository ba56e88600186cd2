/* What goes before its time, and what stays longer: purge, reject, hints. */
#include "tests/unit/node_util.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const struct shape large = {.row_bytes = LARGE_ROW};
static const struct shape small = {.row_bytes = SMALL_ROW};

struct fixture {
    struct rig rig;
    struct peer *a, *b;
    uint32_t space;
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

static uint64_t purge(struct fixture *f, const uint8_t *space, const uint8_t *key)
{
    uint64_t blocks, bytes;

    assert_int_equal(fb_node_purge(f->rig.node, "default", space, key, &blocks, &bytes, NULL),
                     FB_OK);
    fb_node_check(f->rig.node);
    assert_true((blocks > 0) == (bytes > 0));
    return blocks;
}

static void purge_takes_a_page_and_what_extends_it(void **state)
{
    struct fixture *f = *state;
    uint8_t key[FB_KEY_BYTES];

    peer_put(f->a, &small, chain_of(f, 1, 9));
    peer_put(f->a, &small, chain_of(f, 2, 3));
    key_of(1, 9, key);
    assert_int_equal(purge(f, NULL, key), 0);
    key_of(1, 4, key);
    assert_int_equal(purge(f, NULL, key), 5);
    assert_int_equal(peer_finds(f->a, chain_of(f, 1, 9)), 4);
    assert_int_equal(peer_finds(f->a, chain_of(f, 2, 3)), 3);
    assert_int_equal(rig_status(&f->rig).blocks, 7);
}

static void purge_takes_a_space_or_all(void **state)
{
    struct fixture *f = *state;
    struct pages larger = {peer_space(f->b, &large), 3, 0, 2};
    struct fb_node_space_status s;
    struct fb_reserve_row row;
    uint64_t blocks, bytes;
    const uint8_t nowhere[FB_SPACE_ID_BYTES] = {1};

    peer_put(f->a, &small, chain_of(f, 1, 3));
    peer_put(f->b, &large, larger);
    assert_int_equal(peer_reserve(f->a, page(f, 5, 0), NULL, &row), FB_OK); /* stays */
    assert_true(fb_node_get_space(f->rig.node, 0, &s));
    assert_int_equal(s.blocks, 3);
    assert_int_equal(purge(f, s.id, NULL), 3);
    assert_int_equal(peer_finds(f->a, chain_of(f, 1, 3)), 0);
    assert_int_equal(purge(f, NULL, NULL), 2);
    assert_int_equal(rig_status(&f->rig).blocks, 0);
    assert_int_equal(rig_status(&f->rig).host.slots_used, 1);
    assert_int_equal(fb_node_purge(f->rig.node, "none", NULL, NULL, &blocks, &bytes, NULL),
                     FB_ENOENT);
    assert_int_equal(fb_node_purge(f->rig.node, "default", nowhere, NULL, &blocks, &bytes, NULL),
                     FB_ENOENT);
}

static void purged_block_stays_with_its_readers(void **state)
{
    struct fixture *f = *state;
    struct pages pages = chain_of(f, 1, 2);
    uint8_t key[FB_KEY_BYTES];
    struct hit hit;

    peer_put(f->a, &small, pages);
    assert_int_equal(peer_lookup(f->a, &pages, 1, &hit), FB_OK);
    assert_int_equal(purge(f, NULL, NULL), 2);
    assert_int_equal(purge(f, NULL, NULL), 0);
    assert_int_equal(peer_finds(f->b, pages), 0);
    peer_put(f->b, &small, pages); /* anew, elsewhere */
    key_of(1, 1, key);
    assert_true(rig_has(&f->rig, &small, hit.where[1], key));
    assert_int_equal(rig_status(&f->rig).host.slots_used, 4);
    assert_int_equal(peer_release(f->a, hit.lease), FB_OK);
    assert_int_equal(rig_status(&f->rig).host.slots_used, 2);
    assert_int_equal(peer_finds(f->b, pages), 2);
}

static void bad_block_is_dropped_good_one_kept(void **state)
{
    struct fixture *f = *state;
    struct pages pages = chain_of(f, 1, 2);
    struct hit hit;

    peer_put(f->a, &small, pages);
    assert_int_equal(peer_reject(f->b, page(f, 1, 0)), FB_OK);
    assert_int_equal(peer_reject(f->b, page(f, 7, 0)), FB_MISS);
    assert_int_equal(peer_lookup(f->a, &pages, 1, &hit), FB_OK);
    rig_slot(&f->rig, hit.where[1])[FB_BLOCK_HEADER_BYTES + 700] ^= 4;
    assert_int_equal(peer_reject(f->b, page(f, 1, 1)), FB_ECORRUPT);
    assert_int_equal(peer_reject(f->b, page(f, 1, 1)), FB_MISS);
    assert_int_equal(peer_finds(f->b, pages), 1);
    assert_int_equal(peer_release(f->a, hit.lease), FB_OK);
    assert_int_equal(rig_status(&f->rig).host.slots_used, 1);
    peer_put(f->b, &small, page(f, 1, 1)); /* no hole */
    assert_int_equal(peer_finds(f->b, pages), 2);
}

static void block_lives_for_its_time(void **state)
{
    struct fixture *f = *state;
    struct pages pages = chain_of(f, 1, 3);
    uint64_t lease;

    peer_put(f->a, &small, pages);
    assert_int_equal(peer_hint(f->a, page(f, 1, 2), FB_HINT_TTL, 5), FB_OK);
    assert_int_equal(peer_hint(f->a, page(f, 1, 1), FB_HINT_TTL, 5), FB_OK);
    assert_int_equal(peer_hint(f->a, page(f, 1, 1), FB_HINT_TTL, 0), FB_OK);
    assert_int_equal(peer_hint(f->a, page(f, 7, 0), FB_HINT_TTL, 5), FB_MISS);
    lease = peer_leases(f->b, pages);
    rig_pass(&f->rig, 4 * SECOND);
    assert_int_equal(peer_finds(f->a, pages), 3);
    rig_pass(&f->rig, 2 * SECOND);
    assert_int_equal(peer_finds(f->a, pages), 2);
    assert_int_equal(rig_status(&f->rig).host.slots_used, 3);
    assert_int_equal(peer_release(f->b, lease), FB_OK);
    assert_int_equal(rig_status(&f->rig).host.slots_used, 2);
}

/* One that takes the place of another has not its time. */
static void time_goes_with_its_block(void **state)
{
    struct fixture *f = *state;

    peer_put(f->a, &small, page(f, 1, 0));
    assert_int_equal(peer_hint(f->a, page(f, 1, 0), FB_HINT_TTL, 5), FB_OK);
    assert_int_equal(purge(f, NULL, NULL), 1);
    peer_put(f->a, &small, page(f, 2, 0));
    rig_pass(&f->rig, 10 * SECOND);
    assert_int_equal(peer_finds(f->a, page(f, 2, 0)), 1);
}

static void pins_have_a_quota(void **state)
{
    struct fixture *f = *state;
    struct pages pages;
    uint64_t pinned;

    f->rig.config.host_bytes = TIER_OF(1);
    f->rig.config.pin_share_percent = 50; /* 4 blocks */
    begin_with(f, &large);
    pages = chain_of(f, 1, 4);
    peer_put(f->a, &large, pages);
    peer_put(f->a, &large, page(f, 2, 0));
    assert_int_equal(peer_hint(f->a, page(f, 1, 3), FB_HINT_PIN, 1), FB_OK); /* and its parents */
    pinned = rig_status(&f->rig).pinned_bytes;
    assert_int_equal(peer_hint(f->a, page(f, 1, 0), FB_HINT_PIN, 1), FB_OK);
    assert_int_equal(rig_status(&f->rig).pinned_bytes, pinned);
    assert_int_equal(peer_hint(f->a, page(f, 2, 0), FB_HINT_PIN, 1), FB_ELIMIT);
    for (uint32_t chain = 10; chain < 30; chain++) {
        peer_put(f->a, &large, page(f, chain, 0));
    }
    assert_int_equal(peer_finds(f->a, pages), 4);
    assert_int_equal(peer_finds(f->a, page(f, 2, 0)), 0);
    assert_int_equal(peer_hint(f->a, page(f, 1, 3), FB_HINT_PIN, 0), FB_OK);
    assert_int_equal(rig_status(&f->rig).pinned_bytes, pinned / 4 * 3);
    assert_int_equal(purge(f, NULL, NULL), LARGE_SLOTS);
    assert_int_equal(rig_status(&f->rig).pinned_bytes, 0);
}

static void priority_says_who_goes_first(void **state)
{
    struct fixture *f = *state;

    f->rig.config.host_bytes = TIER_OF(1);
    begin_with(f, &large);
    for (uint32_t chain = 0; chain < LARGE_SLOTS; chain++) {
        peer_put(f->a, &large, page(f, chain, 0));
    }
    assert_int_equal(peer_hint(f->a, page(f, 0, 0), FB_HINT_PRIORITY, FB_PRIORITY_HIGH), FB_OK);
    assert_int_equal(peer_hint(f->a, page(f, 7, 0), FB_HINT_PRIORITY, FB_PRIORITY_LOW), FB_OK);
    peer_put(f->a, &large, page(f, 10, 0));
    assert_int_equal(peer_finds(f->a, page(f, 7, 0)), 0);
    for (uint32_t chain = 11; chain < 20; chain++) {
        peer_put(f->a, &large, page(f, chain, 0));
    }
    assert_int_equal(peer_finds(f->a, page(f, 0, 0)), 1);
    assert_int_equal(peer_finds(f->a, page(f, 1, 0)), 0);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
#define OWN(name)  cmocka_unit_test_setup_teardown(name, setup_only, teardown)
    static const struct CMUnitTest tests[] = {
        TEST(purge_takes_a_page_and_what_extends_it),
        TEST(purge_takes_a_space_or_all),
        TEST(purged_block_stays_with_its_readers),
        TEST(bad_block_is_dropped_good_one_kept),
        TEST(block_lives_for_its_time),
        TEST(time_goes_with_its_block),
        OWN(pins_have_a_quota),
        OWN(priority_says_who_goes_first),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
