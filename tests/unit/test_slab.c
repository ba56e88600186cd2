/* Slabs: ids that are valid once, objects that stay where they are. */
#include "pool/node/slab.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define ITEMS (3 * FB_SLAB_PAGE_ITEMS + 1)

struct item {
    struct fb_slab_head head;
    uint64_t value;
    uint8_t rest[40];
};

static void objects_stay_under_their_ids(void **state)
{
    struct item *items[ITEMS];
    struct fb_slab slab;

    (void)state;
    fb_slab_init(&slab, sizeof(struct item));
    for (uint32_t i = 0; i < ITEMS; i++) {
        items[i] = fb_slab_alloc(&slab);
        assert_non_null(items[i]);
        assert_true(items[i]->head.id != 0);
        items[i]->value = i;
    }
    assert_int_equal(slab.used, ITEMS);
    for (uint32_t i = 0; i < ITEMS; i++) {
        assert_ptr_equal(fb_slab_get(&slab, items[i]->head.id), items[i]);
        assert_ptr_equal(fb_slab_at(&slab, (uint32_t)items[i]->head.id), items[i]);
        assert_int_equal(items[i]->value, i);
    }
    fb_slab_fini(&slab);
}

static void objects_come_zeroed(void **state)
{
    static const struct item zero;
    struct fb_slab slab;

    (void)state;
    fb_slab_init(&slab, sizeof(struct item));
    for (uint32_t i = 0; i < 10; i++) {
        struct item *item = fb_slab_alloc(&slab);

        assert_memory_equal(&item->value, &zero.value, sizeof(item->value));
        assert_memory_equal(item->rest, zero.rest, sizeof(item->rest));
        item->value = i + 1;
        memset(item->rest, 0xff, sizeof(item->rest));
        fb_slab_free(&slab, item);
    }
    assert_int_equal(slab.used, 0);
    assert_int_equal(slab.page_count, 1);
    fb_slab_fini(&slab);
}

static int compare(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return x < y ? -1 : x > y;
}

/* One place, used again and again. */
static void no_id_comes_back(void **state)
{
    uint64_t *ids = calloc(ITEMS, sizeof(*ids));
    struct fb_slab slab;

    (void)state;
    assert_non_null(ids);
    fb_slab_init(&slab, sizeof(struct item));
    for (uint32_t i = 0; i < ITEMS; i++) {
        struct item *item = fb_slab_alloc(&slab);

        ids[i] = item->head.id;
        assert_ptr_equal(fb_slab_get(&slab, ids[i]), item);
        if (i > 0) {
            assert_null(fb_slab_get(&slab, ids[i - 1]));
        }
        fb_slab_free(&slab, item);
        assert_null(fb_slab_get(&slab, ids[i]));
    }
    qsort(ids, ITEMS, sizeof(*ids), compare);
    for (uint32_t i = 1; i < ITEMS; i++) {
        assert_true(ids[i] != ids[i - 1]);
    }
    free(ids);
    fb_slab_fini(&slab);
}

static void strange_ids_name_nothing(void **state)
{
    static const uint64_t strange[] = {0, 1, UINT32_MAX, UINT64_MAX, 1ull << 32, 5ull << 32 | 300};
    struct fb_slab slab, later;
    struct item *item;

    (void)state;
    fb_slab_init(&slab, sizeof(struct item));
    fb_slab_init(&later, sizeof(struct item));
    assert_null(fb_slab_get(&slab, 1)); /* nothing was allocated yet */
    item = fb_slab_alloc(&slab);
    assert_non_null(fb_slab_alloc(&later));
    for (size_t i = 0; i < sizeof(strange) / sizeof(strange[0]); i++) {
        if (strange[i] != item->head.id) {
            assert_null(fb_slab_get(&slab, strange[i]));
        }
    }
    /* Of another incarnation: the same place, another id. */
    assert_null(fb_slab_get(&later, item->head.id));
    fb_slab_fini(&slab);
    fb_slab_fini(&later);
}

/* Freed places are found as such by who walks over all of them, and are used before more memory. */
static void places_are_used_again(void **state)
{
    struct item *items[ITEMS];
    struct fb_slab slab;
    uint32_t live = 0, pages;

    (void)state;
    fb_slab_init(&slab, sizeof(struct item));
    for (uint32_t i = 0; i < ITEMS; i++) {
        items[i] = fb_slab_alloc(&slab);
    }
    pages = slab.page_count;
    for (uint32_t i = 0; i < ITEMS; i += 2) {
        fb_slab_free(&slab, items[i]);
    }
    for (uint32_t i = 0; i < slab.page_count * FB_SLAB_PAGE_ITEMS; i++) {
        live += ((struct fb_slab_head *)fb_slab_at(&slab, i))->id != 0;
    }
    assert_int_equal(live, ITEMS / 2);
    assert_int_equal(slab.used, ITEMS / 2);
    for (uint32_t i = 0; i < ITEMS; i += 2) {
        assert_non_null(fb_slab_alloc(&slab));
    }
    assert_int_equal(slab.page_count, pages);
    fb_slab_fini(&slab);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(objects_stay_under_their_ids),
        cmocka_unit_test(objects_come_zeroed),
        cmocka_unit_test(no_id_comes_back),
        cmocka_unit_test(strange_ids_name_nothing),
        cmocka_unit_test(places_are_used_again),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
