/* What a node finds of the one before it, after a stop and after a kill; and clients that outlive
 * both. */
#include "tests/unit/node_util.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const struct shape large = {.row_bytes = LARGE_ROW};
static const struct shape small = {.row_bytes = SMALL_ROW};
static const uint32_t first_plane[4] = {0, 1, 0, LAYERS};

struct fixture {
    struct rig rig;
    struct peer *a, *b;
    struct pages page; /* the first of chain 1 */
};

static void meet(struct fixture *f)
{
    f->a = peer_new(&f->rig, 0, 1);
    f->b = peer_new(&f->rig, 0, 2);
    f->page = (struct pages){peer_space(f->a, &large), 1, 0, 1};
}

static void part(struct fixture *f)
{
    peer_free(f->a);
    peer_free(f->b);
}

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));

    assert_non_null(f);
    rig_init(&f->rig);
    f->rig.config.client_share_percent = 100;
    rig_start(&f->rig);
    meet(f);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;

    part(f);
    rig_fini(&f->rig);
    free(f);
    return 0;
}

static struct pages pages(const struct fixture *f, uint32_t chain, uint32_t first, uint32_t count)
{
    return (struct pages){f->page.space, chain, first, count};
}

/* All clients end; the next node has others. */
static void restart(struct fixture *f, bool by_kill)
{
    if (by_kill) {
        rig_crash(&f->rig);
        part(f);
    } else {
        part(f);
        rig_stop(&f->rig);
    }
    rig_start(&f->rig);
    assert_int_equal(rig_status(&f->rig).awaited, 0);
    meet(f);
}

static void blocks_are_found_again(void **state)
{
    struct fixture *f = *state;
    uint8_t key[FB_KEY_BYTES];
    struct pages chain;
    struct hit hit;
    char id[33];

    memcpy(id, rig_status(&f->rig).id, sizeof(id));
    peer_put(f->a, &large, pages(f, 1, 0, 12));
    for (int by_kill = 0; by_kill < 2; by_kill++) {
        restart(f, by_kill);
        assert_int_equal(rig_status(&f->rig).blocks, 12);
        assert_memory_equal(rig_status(&f->rig).id, id, sizeof(id));
        assert_int_equal(rig_status(&f->rig).host.used_bytes, 4 * MIB);
        chain = pages(f, 1, 0, 12);
        assert_int_equal(peer_lookup(f->a, &chain, 1, &hit), FB_OK);
        assert_int_equal(hit.pages, 12);
        for (uint32_t i = 0; i < 12; i++) {
            key_of(1, i, key);
            assert_true(rig_has(&f->rig, &large, hit.where[i], key));
        }
        assert_int_equal(peer_reject(f->a, pages(f, 1, 3, 1)), FB_OK);
        assert_int_equal(peer_release(f->a, hit.lease), FB_OK);
    }
    peer_put(f->a, &large, pages(f, 1, 12, 1));
}

/* The deepest page still goes first. */
static void order_is_found_again(void **state)
{
    struct fixture *f = *state;
    uint64_t blocks, bytes;
    uint8_t key[FB_KEY_BYTES];

    peer_put(f->a, &large, pages(f, 1, 0, 10));
    peer_put(f->a, &large, pages(f, 2, 0, 22)); /* the tier is full */
    restart(f, true);
    assert_int_equal(peer_finds(f->a, pages(f, 2, 0, 22)), 22); /* warm */
    peer_put(f->a, &large, pages(f, 3, 0, 4));
    assert_int_equal(peer_finds(f->a, pages(f, 1, 0, 10)), 6);
    key_of(1, 2, key);
    assert_int_equal(fb_node_purge(f->rig.node, "default", NULL, key, &blocks, &bytes, NULL),
                     FB_OK);
    assert_int_equal(blocks, 4);
}

/* Also where the slot of a page is before that of its parent. */
static void parents_are_found_again(void **state)
{
    struct fixture *f = *state;
    uint64_t blocks, bytes;
    uint8_t key[FB_KEY_BYTES];

    peer_put(f->a, &large, pages(f, 9, 0, 1));
    peer_put(f->a, &large, pages(f, 1, 0, 1));
    key_of(9, 0, key);
    assert_int_equal(fb_node_purge(f->rig.node, "default", NULL, key, &blocks, &bytes, NULL),
                     FB_OK);
    peer_put(f->a, &large, pages(f, 1, 1, 1));
    restart(f, true);
    key_of(1, 0, key);
    assert_int_equal(fb_node_purge(f->rig.node, "default", NULL, key, &blocks, &bytes, NULL),
                     FB_OK);
    assert_int_equal(blocks, 2);
}

static void what_went_stays_away(void **state)
{
    struct fixture *f = *state;
    uint64_t blocks, bytes;
    uint8_t key[FB_KEY_BYTES];
    struct hit hit;

    for (int by_kill = 0; by_kill < 2; by_kill++) {
        for (uint32_t chain = 1; chain < 7; chain++) {
            peer_put(f->a, &large, pages(f, chain, 0, 1));
        }
        key_of(1, 0, key); /* purged, and while it is read */
        peer_leases(f->b, pages(f, 1, 0, 1));
        assert_int_equal(fb_node_purge(f->rig.node, "default", NULL, key, &blocks, &bytes, NULL),
                         FB_OK);
        f->page.chain = 2; /* rejected */
        assert_int_equal(peer_lookup(f->a, &f->page, 1, &hit), FB_OK);
        rig_slot(&f->rig, hit.where[0])[FB_BLOCK_HEADER_BYTES + 99] ^= 1;
        assert_int_equal(peer_reject(f->a, f->page), FB_ECORRUPT);
        f->page.chain = 3; /* its time is over */
        assert_int_equal(peer_hint(f->a, f->page, FB_HINT_TTL, 1), FB_OK);
        rig_pass(&f->rig, 2 * SECOND);
        f->page.chain = 4; /* evicted, with 5 and 6 */
        for (uint32_t chain = 100; chain < 100 + 4 * LARGE_SLOTS - 2; chain++) {
            peer_put(f->a, &large, pages(f, chain, 0, 1));
        }
        assert_int_equal(peer_finds(f->a, f->page), 0);
        blocks = rig_status(&f->rig).blocks;
        restart(f, by_kill);
        assert_int_equal(rig_status(&f->rig).blocks, blocks);
        for (uint32_t chain = 1; chain < 5; chain++) {
            assert_int_equal(peer_finds(f->a, pages(f, chain, 0, 1)), 0);
        }
        assert_int_equal(fb_node_purge(f->rig.node, "default", NULL, NULL, &blocks, &bytes, NULL),
                         FB_OK);
    }
}

static void half_a_block_is_none(void **state)
{
    struct fixture *f = *state;
    struct fb_reserve_row row;
    const uint64_t sum = 0;

    peer_put(f->b, &large, pages(f, 9, 0, 1));
    assert_int_equal(peer_reserve(f->a, f->page, first_plane, &row), FB_OK);
    assert_int_equal(peer_commit(f->a, row.claim, &sum, 1), FB_OK);
    restart(f, true);
    assert_int_equal(rig_status(&f->rig).blocks, 1);
    assert_int_equal(rig_status(&f->rig).host.slots_used, 1);
    assert_int_equal(peer_finds(f->a, f->page), 0);
    peer_put(f->a, &large, f->page);
    assert_int_equal(peer_finds(f->a, f->page), 1);
}

static void damaged_header_costs_its_block(void **state)
{
    struct fixture *f = *state;
    struct hit hit;

    peer_put(f->a, &large, pages(f, 1, 0, 3));
    f->page.first = 2;
    assert_int_equal(peer_lookup(f->a, &f->page, 1, &hit), FB_OK);
    rig_slot(&f->rig, hit.where[0])[20] ^= 1;
    assert_int_equal(peer_release(f->a, hit.lease), FB_OK);
    restart(f, false);
    assert_int_equal(peer_finds(f->a, pages(f, 1, 0, 3)), 2);
}

static void smaller_tier_is_kept_to(void **state)
{
    struct fixture *f = *state;

    peer_put(f->a, &large, pages(f, 1, 0, 4 * LARGE_SLOTS));
    f->rig.config.host_bytes = TIER_OF(2);
    restart(f, false);
    assert_int_equal(rig_status(&f->rig).host.used_bytes, 4 * MIB);
    assert_int_equal(rig_status(&f->rig).blocks, 2 * LARGE_SLOTS);
    f->rig.config.host_bytes = TIER_OF(4);
    restart(f, false);
    assert_int_equal(rig_status(&f->rig).blocks, 2 * LARGE_SLOTS);
}

/* --- survivors --- */

/* The node ends while two clients live, one of which comes back. */
static void end_without_goodbye(struct fixture *f)
{
    rig_stop(&f->rig);
    peer_close(f->a);
    peer_close(f->b);
    rig_start(&f->rig);
    assert_int_equal(rig_status(&f->rig).awaited, 2);
    peer_connect(f->a);
    assert_int_equal(f->a->reply.hello_reply.client_existed, 0);
}

static void survivors_are_waited_for(void **state)
{
    struct fixture *f = *state;
    struct fb_reserve_row row;

    peer_put(f->a, &large, pages(f, 1, 0, 3));
    end_without_goodbye(f);
    f->page.space = peer_space(f->a, &large);
    assert_int_equal(peer_finds(f->a, pages(f, 1, 0, 3)), 3); /* at once */
    assert_int_equal(peer_reserve(f->a, pages(f, 2, 0, 1), NULL, &row), NOT_ANSWERED);
    rig_pass(&f->rig, SECOND / 2);
    assert_true(peer_receive(f->a));
    peer_rows(f->a, &row, 1);
    assert_int_equal(row.status, FB_AGAIN);

    assert_int_equal(peer_renew(f->a, 0, 0, 0), FB_OK); /* it reads nothing */
    assert_int_equal(rig_status(&f->rig).awaited, 1);
    assert_int_equal(peer_reserve(f->a, pages(f, 2, 0, 1), NULL, &row), NOT_ANSWERED);
    peer_kill(f->b); /* a stranger to this node: it looks at the locks */
    rig_pass(&f->rig, SECOND / 10);
    assert_int_equal(rig_status(&f->rig).awaited, 0);
    assert_true(peer_receive(f->a));
    peer_rows(f->a, &row, 1);
    assert_int_equal(row.status, FB_OK);
}

/* The whole tier is full: what is read stays, what was written is not given to another. */
static void what_survivors_use_is_theirs(void **state)
{
    struct fixture *f = *state;
    struct fb_reserve_row written;
    uint64_t lease, bare, blocks, bytes;
    uint8_t key[FB_KEY_BYTES];
    struct hit hit;

    peer_put(f->a, &large, pages(f, 1, 0, 2));
    peer_put(f->b, &large, pages(f, 9, 0, 4 * LARGE_SLOTS - 3));
    f->page.chain = 1;
    assert_int_equal(peer_lookup(f->a, &f->page, 1, &hit), FB_OK);
    f->page.chain = 5;
    assert_int_equal(peer_reserve(f->a, f->page, NULL, &written), FB_OK);
    end_without_goodbye(f);
    f->page.space = peer_space(f->a, &large);
    assert_int_equal(peer_resume(f->a, hit.where[0], &lease), FB_OK);
    assert_int_equal(peer_resume(f->a, written.where, &bare), FB_OK);
    assert_int_equal(peer_renew(f->a, lease, 0, 0), FB_OK);
    peer_connect(f->b);
    assert_int_equal(peer_renew(f->b, 0, 0, 0), FB_OK);
    assert_int_equal(rig_status(&f->rig).awaited, 0);

    assert_int_equal(fb_node_purge(f->rig.node, "default", NULL, NULL, &blocks, &bytes, NULL),
                     FB_OK);
    assert_int_equal(rig_status(&f->rig).host.slots_used, 2);
    peer_put(f->b, &large, pages(f, 20, 0, 4 * LARGE_SLOTS - 2));
    key_of(1, 0, key);
    assert_true(rig_has(&f->rig, &large, hit.where[0], key));
    assert_int_equal(rig_status(&f->rig).host.slots_used, 4 * LARGE_SLOTS);
    assert_int_equal(peer_release(f->a, bare), FB_OK);
    assert_int_equal(peer_release(f->a, lease), FB_OK);
    assert_int_equal(rig_status(&f->rig).host.slots_used, 4 * LARGE_SLOTS - 2);
    assert_int_equal(peer_resume(f->a, written.where, &bare), FB_OK); /* nobody is awaited: none */
    assert_int_equal(rig_status(&f->rig).host.slots_used, 4 * LARGE_SLOTS - 2);
}

static void one_tenant_waits_alone(void **state)
{
    static const struct shape theirs = {.tenant = "other", .row_bytes = SMALL_ROW};
    struct fixture *f = *state;
    struct peer *c;

    part(f);
    rig_stop(&f->rig);
    strcpy(f->rig.config.tenants[0].name, "default");
    f->rig.config.tenants[0].share_percent = 50;
    strcpy(f->rig.config.tenants[1].name, "other");
    f->rig.config.tenants[1].share_percent = 50;
    f->rig.config.tenant_count = 2;
    rig_start(&f->rig);
    meet(f);
    end_without_goodbye(f);
    c = peer_new(&f->rig, 1, 1);
    peer_put(c, &theirs, (struct pages){peer_space(c, &theirs), 1, 0, 4});
    peer_free(c);
}

/* Of two slot sizes, one of which nobody opens again. */
static void spaces_are_found_again(void **state)
{
    struct fixture *f = *state;
    struct pages other = {peer_space(f->b, &small), 7, 0, 5};
    struct fb_node_space_status s;
    uint64_t blocks = 0;

    peer_put(f->a, &large, pages(f, 1, 0, 3));
    peer_put(f->b, &small, other);
    restart(f, true);
    for (uint32_t i = 0; i < 2; i++) {
        assert_true(fb_node_get_space(f->rig.node, i, &s));
        blocks += s.blocks;
    }
    assert_false(fb_node_get_space(f->rig.node, 2, &s));
    assert_int_equal(blocks, 8);
    other.space = peer_space(f->b, &small);
    assert_int_equal(peer_finds(f->b, other), 5);
    assert_int_equal(peer_finds(f->b, pages(f, 1, 0, 3)), 3);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    static const struct CMUnitTest tests[] = {
        TEST(blocks_are_found_again),       TEST(order_is_found_again),
        TEST(parents_are_found_again),      TEST(what_went_stays_away),
        TEST(half_a_block_is_none),         TEST(damaged_header_costs_its_block),
        TEST(smaller_tier_is_kept_to),      TEST(survivors_are_waited_for),
        TEST(what_survivors_use_is_theirs), TEST(one_tenant_waits_alone),
        TEST(spaces_are_found_again),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
