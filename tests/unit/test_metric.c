/* Metrics: the exposition as a scraper reads it, and the reference page. */
#include "pool/node/metric.h"

#include <pthread.h>
#include <regex.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static char *print(const struct fb_metrics *metrics)
{
    char *text = NULL;
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);

    assert_non_null(out);
    fb_metrics_print(metrics, out);
    fclose(out);
    return text;
}

static void assert_has(const char *text, const char *part)
{
    if (!strstr(text, part)) {
        fail_msg("no \"%s\" in:\n%s", part, text);
    }
}

static void test_values(void **state)
{
    struct fb_metrics *metrics;
    char *text;

    (void)state;
    assert_int_equal(fb_metrics_create("1.0 \"x\\y\"\nz", &metrics), FB_OK);
    fb_metrics_add(metrics, FB_METRIC_LOOKUPS, 2);
    fb_metrics_add(metrics, FB_METRIC_LOOKUPS, 3);
    fb_metrics_set(metrics, FB_METRIC_HOST_BYTES, UINT64_C(1) << 40);
    fb_metrics_set(metrics, FB_METRIC_HOST_BYTES, UINT64_C(1) << 30);
    assert_int_equal(fb_metrics_value(metrics, FB_METRIC_LOOKUPS), 5);
    text = print(metrics);
    assert_has(text, "# TYPE forebay_build_info gauge\n"
                     "forebay_build_info{version=\"1.0 \\\"x\\\\y\\\"\\nz\"} 1\n");
    assert_has(text, "# HELP forebay_lookups_total Lookups answered.\n"
                     "# TYPE forebay_lookups_total counter\nforebay_lookups_total 5\n");
    assert_has(text, "# TYPE forebay_host_bytes gauge\nforebay_host_bytes 1073741824\n");
    assert_has(text, "\nforebay_clients 0\n");
    free(text);
    fb_metrics_destroy(metrics);
}

static void test_histogram(void **state)
{
    struct fb_metrics *metrics;
    char *text;

    (void)state;
    assert_int_equal(fb_metrics_create("1", &metrics), FB_OK);
    fb_metrics_observe(metrics, FB_METRIC_LOOKUP_SECONDS, 0);
    fb_metrics_observe(metrics, FB_METRIC_LOOKUP_SECONDS, 1000); /* a bound is inside its bucket */
    fb_metrics_observe(metrics, FB_METRIC_LOOKUP_SECONDS, 1001);
    fb_metrics_observe(metrics, FB_METRIC_LOOKUP_SECONDS, UINT64_C(11000000000));
    text = print(metrics);
    assert_has(text, "# TYPE forebay_lookup_seconds histogram\n"
                     "forebay_lookup_seconds_bucket{le=\"1e-06\"} 2\n"
                     "forebay_lookup_seconds_bucket{le=\"2e-06\"} 3\n");
    assert_has(text, "forebay_lookup_seconds_bucket{le=\"10\"} 3\n"
                     "forebay_lookup_seconds_bucket{le=\"+Inf\"} 4\n"
                     "forebay_lookup_seconds_sum 11.000002001\n"
                     "forebay_lookup_seconds_count 4\n");
    assert_int_equal(fb_metrics_value(metrics, FB_METRIC_LOOKUP_SECONDS), 4);
    free(text);
    fb_metrics_destroy(metrics);
}

/* Every line has the form that the format prescribes, and names end as their kind demands. */
static void test_form(void **state)
{
    struct fb_metrics *metrics;
    char *text;
    char *rest;
    regex_t form;

    (void)state;
    assert_int_equal(regcomp(&form,
                             "^(# HELP forebay_[a-z_]+ [^\n]+\\."
                             "|# TYPE forebay_[a-z_]+_total counter"
                             "|# TYPE forebay_[a-z_]+_seconds histogram"
                             "|# TYPE forebay_[a-z_]+ gauge"
                             "|forebay_[a-z_]+(\\{[a-z]+=\"[^\"]*\"\\})? [0-9.]+"
                             "|# HELP forebay_build_info .*)$",
                             REG_EXTENDED | REG_NOSUB),
                     0);
    assert_int_equal(fb_metrics_create("1.2.3", &metrics), FB_OK);
    text = print(metrics);
    assert_int_equal(text[strlen(text) - 1], '\n');
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        if (regexec(&form, line, 0, NULL, 0) != 0) {
            fail_msg("not of the format: %s", line);
        }
        if (strstr(line, "# TYPE")) {
            assert_false(strstr(line, "_total gauge"));
        }
    }
    regfree(&form);
    free(text);
    fb_metrics_destroy(metrics);
}

#define ROUNDS 20000

static void *count_up(void *argument)
{
    struct fb_metrics *metrics = argument;

    for (int i = 0; i < ROUNDS; i++) {
        fb_metrics_add(metrics, FB_METRIC_AGAIN, 1);
        fb_metrics_observe(metrics, FB_METRIC_COMMIT_SECONDS, (uint64_t)i);
    }
    return NULL;
}

static void test_threads(void **state)
{
    struct fb_metrics *metrics;
    pthread_t thread;

    (void)state;
    assert_int_equal(fb_metrics_create("1", &metrics), FB_OK);
    assert_int_equal(pthread_create(&thread, NULL, count_up, metrics), 0);
    free(print(metrics));
    count_up(metrics);
    pthread_join(thread, NULL);
    assert_int_equal(fb_metrics_value(metrics, FB_METRIC_AGAIN), 2 * ROUNDS);
    assert_int_equal(fb_metrics_value(metrics, FB_METRIC_COMMIT_SECONDS), 2 * ROUNDS);
    fb_metrics_destroy(metrics);
}

static void test_reference(void **state)
{
    char *text = NULL;
    size_t bytes;
    size_t lines = 0;
    FILE *out = open_memstream(&text, &bytes);

    (void)state;
    fb_metrics_print_reference(out);
    fclose(out);
    for (const char *p = text; *p; p++) {
        lines += *p == '\n';
    }
    assert_int_equal(lines, 2 + FB_METRIC_COUNT);
    assert_has(text, "| `forebay_lookup_seconds` | histogram | seconds |  | ");
    assert_has(text, "| `forebay_build_info` | gauge | 1 | version | ");
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),    cmocka_unit_test(test_histogram),
        cmocka_unit_test(test_form),      cmocka_unit_test(test_threads),
        cmocka_unit_test(test_reference),
    };

    return cmocka_run_group_tests_name("metric", tests, NULL, NULL);
}
