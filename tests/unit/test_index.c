/* The block index and its "lru" order, case by case; test_index_model.c has random operations. */
#include "tests/unit/index_util.h"

/* Insert key k and publish it; its first pin stays. */
static uint32_t put_pinned(struct fb_index *index, uint32_t k, uint32_t parent, uint16_t class_id)
{
    uint8_t key[FB_INDEX_KEY_BYTES];
    uint32_t id = NONE;

    key_make(key, k, 1);
    assert_int_equal(
        fb_index_insert(index, key, parent, class_id, 0, (struct fb_location){k, ~k}, &id), FB_OK);
    fb_index_publish(index, id);
    return id;
}

static uint32_t put(struct fb_index *index, uint32_t k, uint32_t parent, uint16_t class_id)
{
    uint32_t id = put_pinned(index, k, parent, class_id);

    assert_int_equal(fb_index_unpin(index, id), 0);
    return id;
}

static uint32_t find_key(const struct fb_index *index, uint32_t k)
{
    uint8_t key[FB_INDEX_KEY_BYTES];
    uint32_t id;

    key_make(key, k, 1);
    fb_index_find(index, key, sizeof(key), 1, &id);
    return id;
}

/* The victims, in turn, are exactly these; each is removed. */
static void expect_drain(struct fb_index *index, uint16_t class_id, const uint32_t *ids, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        assert_int_equal(fb_index_victim(index, class_id), ids[i]);
        fb_index_remove(index, ids[i]);
        assert_true(fb_index_check(index));
    }
    assert_int_equal(fb_index_victim(index, class_id), NONE);
}

/* --- cases --- */

static void test_create_refuses(void **state)
{
    struct fb_index *index = NULL;
    struct fb_error error;
    uint16_t class_id = 7;

    (void)state;
    assert_int_equal(fb_index_create(0, &index, &error), FB_EINVAL);
    assert_int_equal(fb_index_create(NONE, &index, &error), FB_EINVAL);
    assert_null(index);
    fb_index_destroy(NULL);

    assert_int_equal(fb_index_create(1, &index, &error), FB_OK);
    assert_int_equal(fb_index_class_add(index, "mru", &class_id, &error), FB_EINVAL);
    assert_non_null(strstr(error.text, "'lru'"));
    assert_int_equal(class_id, 7);
    fb_index_destroy(index);
}

static void test_visibility(void **state)
{
    uint8_t key[FB_INDEX_KEY_BYTES];
    uint16_t class_id;
    struct fb_index *index = index_make(8, &class_id);
    uint32_t old, new;

    (void)state;
    key_make(key, 1, 1);
    assert_int_equal(
        fb_index_insert(index, key, NONE, class_id, 3, (struct fb_location){4, 5}, &old), FB_OK);
    assert_int_equal(find_key(index, 1), NONE);
    assert_int_equal(fb_index_find_any(index, key), old);
    assert_int_equal(fb_index_refs(index, old), 1);
    assert_int_equal(fb_index_flags(index, old), FB_ENTRY_WRITING);
    assert_int_equal(fb_index_space(index, old), 3);
    assert_int_equal(fb_index_location(index, old).slot, 5);

    fb_index_publish(index, old);
    assert_int_equal(find_key(index, 1), old);
    assert_int_equal(fb_index_victim(index, class_id), NONE);

    /* Detached while pinned: the key is free at once, the memory is not. */
    fb_index_detach(index, old);
    assert_int_equal(fb_index_find_any(index, key), NONE);
    new = put(index, 1, NONE, class_id);
    assert_int_not_equal(new, old);
    assert_int_equal(find_key(index, 1), new);
    assert_int_equal(fb_index_victim(index, class_id), new);
    assert_int_equal(fb_index_unpin(index, old), 0);
    assert_int_equal(fb_index_victim(index, class_id), new);
    fb_index_remove(index, old);
    assert_int_equal(find_key(index, 1), new);
    assert_int_equal(fb_index_count(index), 1);
    assert_true(fb_index_check(index));
    fb_index_destroy(index);
}

static void test_capacity(void **state)
{
    enum { MAX = 100 };
    uint8_t key[FB_INDEX_KEY_BYTES];
    uint16_t class_id;
    struct fb_index *index = index_make(MAX, &class_id);
    uint32_t id = 12345;

    (void)state;
    for (uint32_t k = 0; k < MAX; k++) {
        put(index, k, NONE, class_id);
    }
    key_make(key, MAX, 1);
    assert_int_equal(
        fb_index_insert(index, key, NONE, class_id, 0, (struct fb_location){0, 0}, &id), FB_ENOMEM);
    assert_int_equal(id, 12345);
    assert_int_equal(fb_index_count(index), MAX);
    assert_true(fb_index_check(index));
    for (uint32_t k = 0; k < MAX; k++) {
        assert_int_not_equal(find_key(index, k), NONE);
    }
    assert_int_equal(find_key(index, MAX), NONE);
    fb_index_remove(index, find_key(index, 50));
    put(index, MAX, NONE, class_id);
    assert_int_not_equal(find_key(index, MAX), NONE);
    assert_int_equal(find_key(index, 50), NONE);
    assert_true(fb_index_check(index));
    fb_index_destroy(index);
}

/* Growth over many doublings, lists longer than a group, a stride, ids used again. */
static void test_growth(void **state)
{
    enum { COUNT = 70000, LIST = 100, STRIDE = 32 };
    static uint8_t keys[LIST * STRIDE];
    uint32_t ids[LIST];
    uint16_t class_id;
    struct fb_index *index = index_make(COUNT, &class_id);

    (void)state;
    for (uint32_t k = 0; k < COUNT; k++) {
        put(index, k, NONE, class_id);
        if ((k & (k - 1)) == 0 || k % 9973 == 0) {
            assert_true(fb_index_check(index));
        }
    }
    assert_true(fb_index_bytes(index) >= 56ull * COUNT);
    assert_true(fb_index_bytes(index) <= 56ull * COUNT + 8192);
    for (uint32_t k = 0; k < COUNT; k += 2) {
        fb_index_remove(index, find_key(index, k));
    }
    assert_int_equal(fb_index_count(index), COUNT / 2);
    for (uint32_t first = 0; first < COUNT; first += LIST) {
        for (uint32_t i = 0; i < LIST; i++) {
            key_make(keys + i * STRIDE, first + i, 1);
        }
        fb_index_find(index, keys, STRIDE, LIST, ids);
        for (uint32_t i = 0; i < LIST; i++) {
            uint32_t k = first + i;

            assert_int_equal(ids[i] == NONE, k % 2 == 0);
            assert_true(ids[i] == NONE || fb_index_location(index, ids[i]).chunk == k);
        }
    }
    for (uint32_t k = 0; k < COUNT; k += 2) {
        assert_true(put(index, COUNT + k, NONE, class_id) < COUNT);
    }
    assert_true(fb_index_check(index));
    fb_index_destroy(index);
}

/* A parent that goes before its child keeps its id to itself until the child has gone too. */
static void test_parent_gone(void **state)
{
    uint16_t class_id;
    struct fb_index *index = index_make(8, &class_id);
    uint32_t parent = put(index, 1, NONE, class_id);
    uint32_t child = put(index, 2, parent, class_id);
    uint32_t again, other;

    (void)state;
    assert_int_equal(fb_index_parent(index, child), parent);
    fb_index_remove(index, parent);
    assert_int_equal(fb_index_count(index), 1);
    assert_int_equal(fb_index_parent(index, child), NONE);
    again = put(index, 1, NONE, class_id);
    assert_int_not_equal(again, parent);
    assert_int_equal(fb_index_parent(index, child), NONE);
    assert_int_equal(fb_index_children(index, again), 0);
    fb_index_set_priority(index, child, FB_PRIORITY_HIGH);
    assert_int_equal(fb_index_priority(index, again), FB_PRIORITY_NORMAL);
    assert_true(fb_index_check(index));

    fb_index_remove(index, child);
    assert_int_equal(put(index, 3, NONE, class_id), child); /* the last to be given back */
    other = put(index, 4, NONE, class_id);
    assert_int_equal(other, parent);
    assert_int_equal(fb_index_id_limit(index), 3);
    expect_drain(index, class_id, (uint32_t[]){again, child, other}, 3);
    fb_index_destroy(index);
}

/* The i-th of n pages to be unpinned, in one of RELEASE_ORDERS. */
static uint32_t release_step(uint32_t order, uint32_t i, uint32_t n)
{
    switch (order) {
    case 0: return i;
    case 1: return n - 1 - i;
    case 2: return 2 * i % n + 2 * i / n; /* even, then odd */
    case 3: return i * 23 % n;            /* scattered */
    default: return (i + n / 2) % n;      /* second half first */
    }
}
#define RELEASE_ORDERS 5

/* A chain goes deepest page first whatever the order in which it is unpinned, also between two
 * others, and entire. */
static void test_release_orders(void **state)
{
    enum { PAGES = 60 };
    uint32_t ids[PAGES], drain[PAGES];

    (void)state;
    for (uint32_t order = 0; order < RELEASE_ORDERS; order++) {
        uint16_t class_id;
        struct fb_index *index = index_make(PAGES + 2, &class_id);
        uint32_t before = put(index, 1000, NONE, class_id);

        for (uint32_t i = 0; i < PAGES; i++) {
            ids[i] = put_pinned(index, i, i ? ids[i - 1] : NONE, class_id);
            drain[PAGES - 1 - i] = ids[i];
        }
        for (uint32_t i = 0; i < PAGES; i++) {
            fb_index_unpin(index, ids[release_step(order, i, PAGES)]);
            assert_true(fb_index_check(index));
        }
        put(index, 1001, NONE, class_id);
        assert_int_equal(fb_index_victim(index, class_id), before);
        fb_index_remove(index, before);
        for (uint32_t i = 0; i < PAGES; i++) {
            assert_int_equal(fb_index_victim(index, class_id), drain[i]);
            fb_index_remove(index, drain[i]);
        }
        fb_index_destroy(index);
    }
}

/* A page that is committed after one that extends it. */
static void test_commit_out_of_order(void **state)
{
    uint16_t class_id;
    struct fb_index *index = index_make(8, &class_id);
    uint32_t p0 = put(index, 0, NONE, class_id);
    uint32_t p1 = put_pinned(index, 1, p0, class_id);
    uint32_t p2 = put_pinned(index, 2, p1, class_id);
    uint32_t alone = put(index, 9, NONE, class_id);

    (void)state;
    fb_index_unpin(index, p2);
    fb_index_unpin(index, p1);
    expect_drain(index, class_id, (uint32_t[]){alone, p2, p1, p0}, 4);
    fb_index_destroy(index);
}

/* In page order a page goes directly behind its parent, and no other moves: not even where the
 * way up is broken by a pin. */
static void test_page_order_moves_one(void **state)
{
    uint16_t class_id;
    struct fb_index *index = index_make(8, &class_id);
    uint32_t p0 = put(index, 0, NONE, class_id);
    uint32_t p1 = put(index, 1, p0, class_id);
    uint32_t p2 = put(index, 2, p1, class_id);

    (void)state;
    fb_index_pin(index, p1);
    expect_drain(index, class_id, (uint32_t[]){put(index, 3, p2, class_id), p2}, 2);
    fb_index_unpin(index, p1);
    expect_drain(index, class_id, (uint32_t[]){p1, p0}, 2);
    fb_index_destroy(index);
}

static void test_touch(void **state)
{
    uint16_t class_id;
    struct fb_index *index = index_make(16, &class_id);
    uint32_t a[3], b[3];

    (void)state;
    for (uint32_t i = 0; i < 3; i++) {
        a[i] = put(index, i, i ? a[i - 1] : NONE, class_id);
    }
    for (uint32_t i = 0; i < 3; i++) {
        b[i] = put(index, 10 + i, i ? b[i - 1] : NONE, class_id);
    }
    assert_int_equal(fb_index_victim(index, class_id), a[2]);
    fb_index_touch(index, a, 3);
    assert_int_equal(fb_index_victim(index, class_id), b[2]);
    /* Touching pages from the middle takes those before along; a pinned page stays out. */
    fb_index_pin(index, a[0]);
    fb_index_touch(index, &b[1], 1);
    expect_drain(index, class_id, (uint32_t[]){b[2], a[2], a[1], b[1], b[0]}, 5);
    fb_index_unpin(index, a[0]);
    expect_drain(index, class_id, a, 1);
    fb_index_destroy(index);
}

static void test_priority(void **state)
{
    uint16_t class_id;
    struct fb_index *index = index_make(16, &class_id);
    uint32_t root = put(index, 0, NONE, class_id);
    uint32_t mid = put(index, 1, root, class_id);
    uint32_t leaf = put(index, 2, mid, class_id);
    uint32_t side = put(index, 3, mid, class_id);
    uint32_t low = put(index, 4, NONE, class_id);
    uint32_t low_child, pinned;

    (void)state;
    fb_index_set_priority(index, low, FB_PRIORITY_LOW);
    low_child = put(index, 5, low, class_id);
    assert_int_equal(fb_index_priority(index, low_child), FB_PRIORITY_LOW);
    fb_index_pin(index, mid);
    fb_index_set_priority(index, leaf, FB_PRIORITY_HIGH);
    fb_index_unpin(index, mid);
    assert_int_equal(fb_index_priority(index, mid), FB_PRIORITY_HIGH);
    assert_int_equal(fb_index_priority(index, root), FB_PRIORITY_HIGH);
    assert_int_equal(fb_index_priority(index, side), FB_PRIORITY_NORMAL);
    pinned = put(index, 6, NONE, class_id);
    fb_index_set_pinned(index, pinned, true);
    expect_drain(index, class_id, (uint32_t[]){low_child, low, side, leaf, mid, root}, 6);
    fb_index_set_pinned(index, pinned, false);
    expect_drain(index, class_id, &pinned, 1);
    fb_index_destroy(index);
}

static void test_classes(void **state)
{
    uint16_t a, b, c;
    struct fb_index *index = index_make(8, &a);
    uint32_t in_a, in_b;

    (void)state;
    assert_int_equal(fb_index_class_add(index, "lru", &b, NULL), FB_OK);
    assert_int_not_equal(a, b);
    in_a = put(index, 1, NONE, a);
    in_b = put(index, 2, in_a, b); /* its parent is in another order */
    assert_int_equal(fb_index_victim(index, a), NONE);
    assert_int_equal(fb_index_victim(index, b), in_b);
    fb_index_remove(index, in_b);
    in_b = put(index, 2, NONE, b);
    assert_int_equal(fb_index_victim(index, a), in_a);
    assert_int_equal(fb_index_victim(index, b), in_b);
    fb_index_remove(index, in_a);
    fb_index_class_remove(index, a);
    assert_int_equal(fb_index_class_add(index, "lru", &c, NULL), FB_OK);
    assert_int_equal(c, a);
    assert_int_equal(fb_index_victim(index, c), NONE);
    assert_true(fb_index_check(index));
    fb_index_destroy(index);
}

static void test_children(void **state)
{
    uint16_t class_id;
    struct fb_index *index = index_make(3, &class_id);
    uint32_t root = put(index, 1, NONE, class_id);
    uint32_t a = put_pinned(index, 2, root, class_id);
    uint32_t b = put(index, 3, root, class_id);

    (void)state;
    assert_int_equal(fb_index_children(index, root), 2);
    fb_index_detach(index, a); /* counts no more, though it is still in use */
    assert_int_equal(fb_index_children(index, root), 1);
    assert_int_equal(fb_index_parent(index, a), NONE);
    fb_index_unpin(index, a);
    fb_index_remove(index, a);
    assert_int_equal(fb_index_children(index, root), 1);

    /* A detached parent is still the parent; a removed one leaves room for as many as before. */
    fb_index_pin(index, root);
    fb_index_detach(index, root);
    assert_int_equal(fb_index_parent(index, b), root);
    assert_int_equal(fb_index_children(index, root), 1);
    fb_index_unpin(index, root);
    fb_index_remove(index, root);
    assert_int_equal(put(index, 4, b, class_id), a);
    assert_int_equal(put(index, 5, b, class_id), 3);
    assert_int_equal(fb_index_id_limit(index), 4);
    assert_int_equal(fb_index_children(index, b), 2);
    assert_true(fb_index_check(index));
    fb_index_destroy(index);
}

/* While a page is being written only its parent is pinned; the pages before are safe all the same.
 * They are in use, so they do not stand in the way of others either. */
static void test_victim_is_a_leaf(void **state)
{
    uint16_t class_id;
    struct fb_index *index = index_make(16, &class_id);
    uint32_t p0 = put(index, 0, NONE, class_id);
    uint32_t p1 = put(index, 1, p0, class_id);
    uint32_t p2 = put(index, 2, p1, class_id);
    uint32_t low = put(index, 3, NONE, class_id);
    uint32_t high = put(index, 4, low, class_id);
    uint32_t other, writing;

    (void)state;
    fb_index_pin(index, p2);
    writing = put_pinned(index, 5, p2, class_id);
    fb_index_set_priority(index, high, FB_PRIORITY_HIGH);
    fb_index_set_priority(index, low, FB_PRIORITY_LOW);
    other = put(index, 6, NONE, class_id);
    expect_drain(index, class_id, (uint32_t[]){other, high, low}, 3);
    assert_int_equal(fb_index_victim(index, class_id), NONE);

    fb_index_unpin(index, writing);
    fb_index_unpin(index, p2);
    expect_drain(index, class_id, (uint32_t[]){writing, p2, p1, p0}, 4);
    fb_index_destroy(index);
}

/* More extended pages than one search passes: the next search goes on behind them. */
static void test_victim_search_is_bounded(void **state)
{
    enum { CHAINS = 100 };
    uint16_t class_id;
    struct fb_index *index = index_make(2 * CHAINS + 1, &class_id);
    uint32_t parents[CHAINS], leaf;

    (void)state;
    for (uint32_t i = 0; i < CHAINS; i++) {
        parents[i] = put(index, i, NONE, class_id);
        put_pinned(index, CHAINS + i, parents[i], class_id);
    }
    leaf = put(index, 1000, NONE, class_id);
    assert_int_equal(fb_index_victim(index, class_id), NONE);
    assert_int_equal(fb_index_victim(index, class_id), leaf);
    assert_true(fb_index_check(index));
    fb_index_remove(index, leaf);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(fb_index_victim(index, class_id), NONE);
    }
    fb_index_destroy(index);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_create_refuses),
        cmocka_unit_test(test_visibility),
        cmocka_unit_test(test_capacity),
        cmocka_unit_test(test_growth),
        cmocka_unit_test(test_parent_gone),
        cmocka_unit_test(test_release_orders),
        cmocka_unit_test(test_commit_out_of_order),
        cmocka_unit_test(test_page_order_moves_one),
        cmocka_unit_test(test_touch),
        cmocka_unit_test(test_priority),
        cmocka_unit_test(test_classes),
        cmocka_unit_test(test_children),
        cmocka_unit_test(test_victim_is_a_leaf),
        cmocka_unit_test(test_victim_search_is_bounded),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
