/* Families: the longest prefix, against trying every one. */
#include "proto/family.h"
#include "tests/unit/proto_util.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

enum { MEMBERS = 5, PAGES = 24 };

static uint32_t prefix_of(enum fb_rule rule, uint32_t window_pages, const char *present)
{
    uint8_t pages[PAGES];
    struct fb_family_member m = {rule, window_pages, pages};
    uint32_t n = (uint32_t)strlen(present);

    for (uint32_t i = 0; i < n; i++) {
        pages[i] = present[i] == '1';
    }
    return fb_family_prefix(&m, 1, n);
}

static void test_each_rule(void **state)
{
    (void)state;
    assert_int_equal(prefix_of(FB_RULE_FULL, 0, "111011"), 3);
    assert_int_equal(prefix_of(FB_RULE_FULL, 0, "0111"), 0);
    assert_int_equal(prefix_of(FB_RULE_WINDOW, 2, "000011"), 6);
    assert_int_equal(prefix_of(FB_RULE_WINDOW, 2, "001101"), 4);
    assert_int_equal(prefix_of(FB_RULE_WINDOW, 2, "100101"), 1); /* a short prefix needs less */
    assert_int_equal(prefix_of(FB_RULE_WINDOW, 2, "010101"), 0);
    assert_int_equal(prefix_of(FB_RULE_STATE, 0, "010100"), 4);
    assert_int_equal(prefix_of(FB_RULE_STATE, 0, "0000"), 0);
    assert_int_equal(prefix_of(FB_RULE_FULL, 0, ""), 0);
}

/* Each member alone would take another prefix; what the last allows, the first does not. */
static void test_members_agree(void **state)
{
    static const uint8_t full[] = {1, 1, 1, 1, 1, 0}, window[] = {0, 1, 1, 0, 1, 1},
                         recurrent[] = {0, 0, 1, 0, 1, 1};
    const struct fb_family_member members[] = {
        {FB_RULE_FULL, 0, full}, {FB_RULE_WINDOW, 2, window}, {FB_RULE_STATE, 0, recurrent}};

    (void)state;
    assert_int_equal(fb_family_prefix(members, 3, 6), 3);
    assert_int_equal(fb_family_prefix(members, 3, 2), 0);
    assert_int_equal(fb_family_prefix(members, 1, 6), 5);
    assert_int_equal(fb_family_prefix(members, 0, 6), 0);
}

static void test_window_pages(void **state)
{
    struct fb_manifest m;

    (void)state;
    manifest_make(&m, 1, 1, 8, FB_CODEC_RAW);
    assert_int_equal(fb_window_pages(&m), 0);
    m.rule = FB_RULE_WINDOW;
    m.window_tokens = 1;
    assert_int_equal(fb_window_pages(&m), 1);
    m.window_tokens = 64;
    assert_int_equal(fb_window_pages(&m), 1);
    m.window_tokens = 65;
    assert_int_equal(fb_window_pages(&m), 2);
    m.window_tokens = UINT32_MAX;
    assert_int_equal(fb_window_pages(&m), 1u << 26);
}

/* The rules as their definition says them. */
static bool satisfies(const struct fb_family_member *m, uint32_t prefix)
{
    for (uint32_t page = 0; page < prefix; page++) {
        bool needed = m->rule == FB_RULE_FULL ||
                      (m->rule == FB_RULE_WINDOW && page + m->window_pages >= prefix) ||
                      (m->rule == FB_RULE_STATE && page + 1 == prefix);

        if (needed && !m->present[page]) {
            return false;
        }
        assert_int_equal(needed, page >= fb_family_first(m->rule, m->window_pages, prefix));
    }
    return true;
}

static uint32_t longest_by_trying(const struct fb_family_member *members, uint32_t count,
                                  uint32_t pages)
{
    for (uint32_t prefix = pages; prefix > 0; prefix--) {
        uint32_t agree = 0;

        while (agree < count && satisfies(&members[agree], prefix)) {
            agree++;
        }
        if (agree == count) {
            return prefix;
        }
    }
    return 0;
}

static void test_against_trying(void **state)
{
    uint8_t present[MEMBERS][PAGES];
    struct fb_family_member members[MEMBERS];
    uint64_t random = 1;
    uint32_t found = 0;

    (void)state;
    for (int round = 0; round < 100000; round++) {
        uint32_t count = 1 + random_below(&random, MEMBERS);
        uint32_t pages = random_below(&random, PAGES + 1);
        uint32_t missing_of_16 = random_below(&random, 8), expected;

        for (uint32_t i = 0; i < count; i++) {
            members[i] = (struct fb_family_member){
                .rule = (enum fb_rule)(1 + random_below(&random, 3)),
                .window_pages = 1 + random_below(&random, random_below(&random, 2) ? 4 : PAGES),
                .present = present[i],
            };
            for (uint32_t page = 0; page < pages; page++) {
                present[i][page] = random_below(&random, 16) >= missing_of_16;
            }
        }
        expected = longest_by_trying(members, count, pages);
        found += expected > 0 && expected < pages;
        assert_int_equal(fb_family_prefix(members, count, pages), expected);
    }
    assert_true(found > 30000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_rule),
        cmocka_unit_test(test_members_agree),
        cmocka_unit_test(test_window_pages),
        cmocka_unit_test(test_against_trying),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
