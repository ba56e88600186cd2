/* Histogram: exact small values, bounded error everywhere, quantiles against sorted values. */
#include "pool/command/histogram.h"
#include "pool/command/random.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define VALUES 10000

static struct fb_histogram *make(void)
{
    struct fb_histogram *h = calloc(1, sizeof(*h));

    assert_non_null(h);
    return h;
}

static void test_empty(void **state)
{
    struct fb_histogram *h = make();

    (void)state;
    assert_int_equal(fb_histogram_quantile(h, 0), 0);
    assert_int_equal(fb_histogram_quantile(h, 0.5), 0);
    assert_int_equal(fb_histogram_quantile(h, 1), 0);
    free(h);
}

static void test_small_values_are_exact(void **state)
{
    struct fb_histogram *h = make();

    (void)state;
    for (uint64_t v = 0; v < 100; v++) {
        fb_histogram_add(h, v);
    }
    assert_int_equal(fb_histogram_quantile(h, 0), 0);
    assert_int_equal(fb_histogram_quantile(h, 0.01), 0);
    assert_int_equal(fb_histogram_quantile(h, 0.5), 49);
    assert_int_equal(fb_histogram_quantile(h, 1), 99);
    assert_int_equal(h->count, 100);
    assert_int_equal(h->sum, 4950);
    free(h);
}

/* With a second, largest value the first one's bucket end shows. */
static uint64_t bucket_end(uint64_t value)
{
    struct fb_histogram *h = make();
    uint64_t end;

    fb_histogram_add(h, value);
    fb_histogram_add(h, UINT64_MAX);
    end = fb_histogram_quantile(h, 0.5);
    free(h);
    return end;
}

static void test_every_power_of_two(void **state)
{
    (void)state;
    for (uint32_t bit = 0; bit < 64; bit++) {
        for (int d = -1; d <= 1; d++) {
            uint64_t v = (1ull << bit) + (uint64_t)d;
            uint64_t end = bucket_end(v);

            assert_true(end >= v);
            assert_true(end - v <= v / 64);
        }
    }
    assert_true(bucket_end(UINT64_MAX) == UINT64_MAX);
}

static int compare(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return x < y ? -1 : x > y;
}

static void test_quantiles(void **state)
{
    static const double quantiles[] = {0.001, 0.1, 0.5, 0.9, 0.99, 0.999, 1};
    struct fb_histogram *h = make();
    uint64_t *values = calloc(VALUES, sizeof(*values));

    (void)state;
    assert_non_null(values);
    for (uint32_t i = 0; i < VALUES; i++) {
        values[i] = fb_mix64(i) >> fb_mix64(i + VALUES) % 60;
        fb_histogram_add(h, values[i]);
    }
    qsort(values, VALUES, sizeof(*values), compare);
    for (size_t i = 0; i < sizeof(quantiles) / sizeof(quantiles[0]); i++) {
        uint64_t exact = values[(size_t)(quantiles[i] * VALUES + 0.5) - 1];
        uint64_t got = fb_histogram_quantile(h, quantiles[i]);

        assert_true(got >= exact);
        assert_true(got - exact <= exact / 64);
    }
    assert_true(fb_histogram_quantile(h, 1) == values[VALUES - 1]);
    free(values);
    free(h);
}

static void test_merge(void **state)
{
    struct fb_histogram *all = make(), *even = make(), *odd = make();

    (void)state;
    for (uint64_t v = 0; v < 5000; v++) {
        fb_histogram_add(all, v * v);
        fb_histogram_add(v % 2 ? odd : even, v * v);
    }
    fb_histogram_merge(even, odd);
    assert_memory_equal(all, even, sizeof(*all));
    free(all);
    free(even);
    free(odd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_empty),
        cmocka_unit_test(test_small_values_are_exact),
        cmocka_unit_test(test_every_power_of_two),
        cmocka_unit_test(test_quantiles),
        cmocka_unit_test(test_merge),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
