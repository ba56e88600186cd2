/* Log lines: both formats, what needs escaping, what does not fit, and the rate limit. */
#include "pool/node/log.h"

#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

struct sink {
    int fds[2];
    struct fb_log log;
    char line[8192];
};

static void sink_open(struct sink *sink, enum fb_log_format format)
{
    assert_int_equal(pipe(sink->fds), 0);
    sink->log = (struct fb_log){.level = FB_LOG_INFO, .format = format, .fd = sink->fds[1]};
}

/* What one write brought. */
static const char *sink_read(struct sink *sink)
{
    ssize_t n = read(sink->fds[0], sink->line, sizeof(sink->line) - 1);

    assert_true(n > 0);
    assert_int_equal(sink->line[n - 1], '\n');
    sink->line[n] = 0;
    return sink->line;
}

static void sink_close(struct sink *sink)
{
    close(sink->fds[0]);
    close(sink->fds[1]);
}

static void test_logfmt(void **state)
{
    static const uint8_t key[] = {0x00, 0xab, 0xff};
    struct sink sink;
    const char *line;

    (void)state;
    sink_open(&sink, FB_LOG_LOGFMT);
    fb_log(&sink.log, FB_LOG_WARN, "commit", FB_KV_U64("blocks", UINT64_MAX),
           FB_KV_STR("tenant", "a-1"), FB_KV_I64("delta", -3), FB_KV_BOOL("whole", true),
           FB_KV_HEX("key", key, sizeof(key)), FB_KV_STR("none", ""), FB_KV_STR("null", NULL));
    line = sink_read(&sink);
    assert_memory_equal(line, "ts=20", 5);
    assert_string_equal(strchr(line, ' '),
                        " level=warn event=commit blocks=18446744073709551615 tenant=a-1 delta=-3 "
                        "whole=true key=00abff none=\"\" null=\"\"\n");
    assert_int_equal(line[strlen("ts=2026-01-01T00:00:00.000")], 'Z');

    fb_log(&sink.log, FB_LOG_INFO, "quoting", FB_KV_STR("a", "two words"), FB_KV_STR("b", "x=y"),
           FB_KV_STR("c", "say \"no\"\n\tor \\"));
    assert_string_equal(strstr(sink_read(&sink), "a="),
                        "a=\"two words\" b=\"x=y\" c=\"say \\\"no\\\"\\n\\u0009or \\\\\"\n");
    fb_log(&sink.log, FB_LOG_INFO, "alone");
    assert_string_equal(strstr(sink_read(&sink), "event"), "event=alone\n");
    sink_close(&sink);
}

static void test_level(void **state)
{
    struct sink sink;
    int evaluated = 0;

    (void)state;
    sink_open(&sink, FB_LOG_LOGFMT);
    fb_log(&sink.log, FB_LOG_DEBUG, "hidden", FB_KV_I64("n", ++evaluated));
    assert_int_equal(evaluated, 0);
    fb_log(&sink.log, FB_LOG_ERROR, "shown", FB_KV_I64("n", ++evaluated));
    assert_non_null(strstr(sink_read(&sink), "level=error event=shown n=1"));
    sink_close(&sink);
}

static void test_json(void **state)
{
    static const char hard[] = "\"q\" \\ \n\r\t\x01\x7f/ \xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80";
    struct sink sink;
    json_t *root;

    (void)state;
    sink_open(&sink, FB_LOG_JSON);
    fb_log(&sink.log, FB_LOG_ERROR, "event one", FB_KV_STR("text", hard), FB_KV_U64("n", 42),
           FB_KV_BOOL("flag", false), FB_KV_HEX("key", "\x12\x34", 2), FB_KV_I64("i", INT64_MIN));
    root = json_loads(sink_read(&sink), 0, NULL);
    assert_non_null(root);
    assert_string_equal(json_string_value(json_object_get(root, "level")), "error");
    assert_string_equal(json_string_value(json_object_get(root, "event")), "event one");
    assert_string_equal(json_string_value(json_object_get(root, "text")), hard);
    assert_int_equal(json_integer_value(json_object_get(root, "n")), 42);
    assert_true(json_is_false(json_object_get(root, "flag")));
    assert_string_equal(json_string_value(json_object_get(root, "key")), "1234");
    assert_true(json_integer_value(json_object_get(root, "i")) == INT64_MIN);
    assert_int_equal(strlen(json_string_value(json_object_get(root, "ts"))), 24);
    json_decref(root);
    sink_close(&sink);
}

/* Bytes that are not UTF-8 must not make a line unreadable. */
static void test_json_bad_utf8(void **state)
{
    static const char *const bad[] = {"\x80",
                                      "\xc0\xaf",
                                      "\xc3",
                                      "\xe0\x80\x80",
                                      "\xed\xa0\x80",
                                      "\xe2\x82",
                                      "\xf0\x80\x80\x80",
                                      "\xf4\x90\x80\x80",
                                      "\xff\xfe"};
    struct sink sink;

    (void)state;
    sink_open(&sink, FB_LOG_JSON);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        json_t *root;

        fb_log(&sink.log, FB_LOG_INFO, "bad", FB_KV_STR("text", bad[i]));
        root = json_loads(sink_read(&sink), 0, NULL);
        assert_non_null(root);
        assert_memory_equal(json_string_value(json_object_get(root, "text")), "\xef\xbf\xbd", 3);
        json_decref(root);
    }
    sink_close(&sink);
}

static void test_cut(void **state)
{
    char longer[6000];
    char fits[3600];
    struct sink sink;
    json_t *root;

    (void)state;
    memset(longer, '"', sizeof(longer) - 1);
    longer[sizeof(longer) - 1] = 0;
    memset(fits, 'x', sizeof(fits) - 1);
    fits[sizeof(fits) - 1] = 0;
    sink_open(&sink, FB_LOG_JSON);
    fb_log(&sink.log, FB_LOG_INFO, "cut", FB_KV_STR("fits", fits), FB_KV_STR("long", longer),
           FB_KV_U64("after", 1));
    root = json_loads(sink_read(&sink), 0, NULL);
    assert_non_null(root);
    assert_true(strlen(sink.line) <= 4096);
    assert_string_equal(json_string_value(json_object_get(root, "fits")), fits);
    assert_null(json_object_get(root, "long"));
    assert_int_equal(json_integer_value(json_object_get(root, "after")), 1);
    assert_true(json_is_true(json_object_get(root, "cut")));
    json_decref(root);

    sink.log.format = FB_LOG_LOGFMT;
    fb_log(&sink.log, FB_LOG_INFO, "cut", FB_KV_STR("long", longer));
    assert_non_null(strstr(sink_read(&sink), " event=cut cut=true\n"));
    sink_close(&sink);
}

static void test_limit(void **state)
{
    struct fb_log_limit limit = {.interval_ns = 1000};
    uint64_t held_back = 99;

    (void)state;
    assert_true(fb_log_limit_pass(&limit, 5000, &held_back));
    assert_int_equal(held_back, 0);
    assert_false(fb_log_limit_pass(&limit, 5001, &held_back));
    assert_false(fb_log_limit_pass(&limit, 5999, &held_back));
    assert_true(fb_log_limit_pass(&limit, 6000, &held_back));
    assert_int_equal(held_back, 2);
    assert_true(fb_log_limit_pass(&limit, 9000, &held_back));
    assert_int_equal(held_back, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_logfmt), cmocka_unit_test(test_level),
        cmocka_unit_test(test_json),   cmocka_unit_test(test_json_bad_utf8),
        cmocka_unit_test(test_cut),    cmocka_unit_test(test_limit),
    };

    return cmocka_run_group_tests_name("log", tests, NULL, NULL);
}
