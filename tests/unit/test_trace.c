/* The trace reader: what it refuses and in which words, files, and prefixes against a plain list.
 * The made-up contents: the same whenever they are made, different for different pages. */
#include "pool/command/content.h"
#include "pool/command/random.h"
#include "pool/command/trace.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define EXCERPT "tests/data/conversation_excerpt.jsonl"

static struct fb_request request;

static enum fb_status parse(const char *line, struct fb_error *error)
{
    error->text[0] = 0;
    return fb_request_parse(line, strlen(line), "t.jsonl", 7, &request, error);
}

static void test_good_lines(void **state)
{
    struct fb_error error;

    (void)state;
    assert_int_equal(parse("{\"timestamp\": 27482, \"input_length\": 1025, \"output_length\": 52, "
                           "\"hash_ids\": [46, 0, 9007199254740993]}\n",
                           &error),
                     FB_OK);
    assert_int_equal(request.timestamp_ms, 27482);
    assert_int_equal(request.input_tokens, 1025);
    assert_int_equal(request.output_tokens, 52);
    assert_int_equal(request.pages, 3);
    assert_true(request.ids[2] == 9007199254740993ull);

    /* a whole page, and fields of other tools */
    assert_int_equal(parse("{\"input_length\":512,\"timestamp\":0,\"output_length\":0,\"x\":null,"
                           "\"hash_ids\":[1]}",
                           &error),
                     FB_OK);
    assert_int_equal(request.pages, 1);
}

struct bad_line {
    const char *line;
    const char *words; /* that the message has */
};

static void test_bad_lines(void **state)
{
    static const struct bad_line bad[] = {
        {"", "not JSON"},
        {"{\"timestamp\": 1, ", "not JSON"},
        {"[1, 2]", "expected an object"},
        {"7", "not JSON"},
        {"{\"timestamp\":1,\"timestamp\":2,\"input_length\":1,\"output_length\":1,\"hash_ids\":[1]"
         "}",
         "duplicate"},
        {"{\"input_length\":1,\"output_length\":1,\"hash_ids\":[1]}", "\"timestamp\" is missing"},
        {"{\"timestamp\":1,\"output_length\":1,\"hash_ids\":[1]}", "\"input_length\" is missing"},
        {"{\"timestamp\":1,\"input_length\":1,\"hash_ids\":[1]}", "\"output_length\" is missing"},
        {"{\"timestamp\":1,\"input_length\":1,\"output_length\":1}", "\"hash_ids\" is missing"},
        {"{\"timestamp\":-1,\"input_length\":1,\"output_length\":1,\"hash_ids\":[1]}",
         "\"timestamp\" is wrong; expected a whole number from 0"},
        {"{\"timestamp\":1,\"input_length\":0,\"output_length\":1,\"hash_ids\":[]}",
         "\"input_length\" is wrong; expected a whole number from 1 to 2097152"},
        {"{\"timestamp\":1,\"input_length\":99999999999,\"output_length\":1,\"hash_ids\":[]}",
         "\"input_length\" is wrong"},
        {"{\"timestamp\":1,\"input_length\":1.5,\"output_length\":1,\"hash_ids\":[1]}",
         "\"input_length\" is wrong"},
        {"{\"timestamp\":1,\"input_length\":\"1\",\"output_length\":1,\"hash_ids\":[1]}",
         "\"input_length\" is wrong"},
        {"{\"timestamp\":1,\"input_length\":1,\"output_length\":-4,\"hash_ids\":[1]}",
         "\"output_length\" is wrong"},
        {"{\"timestamp\":1,\"input_length\":513,\"output_length\":1,\"hash_ids\":[1]}",
         "has 1 ids; expected 2, one for every 512 tokens of the 513"},
        {"{\"timestamp\":1,\"input_length\":512,\"output_length\":1,\"hash_ids\":[1,2]}",
         "has 2 ids; expected 1"},
        {"{\"timestamp\":1,\"input_length\":513,\"output_length\":1,\"hash_ids\":[1,-2]}",
         "id 2 of \"hash_ids\" is wrong"},
        {"{\"timestamp\":1,\"input_length\":1,\"output_length\":1,\"hash_ids\":[null]}",
         "id 1 of \"hash_ids\" is wrong"},
        {"{\"timestamp\":1,\"input_length\":1,\"output_length\":1,\"hash_ids\":{}}",
         "\"hash_ids\" is missing or no list"},
    };
    struct fb_error error;

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(parse(bad[i].line, &error), FB_EINVAL);
        assert_memory_equal(error.text, "t.jsonl:7: ", 11);
        if (!strstr(error.text, bad[i].words)) {
            fail_msg("line %zu: \"%s\" lacks \"%s\"", i, error.text, bad[i].words);
        }
    }
}

/* A trace file with that text; its path is for free() after unlink(). */
static char *write_file(const char *text)
{
    char *path = strdup("/tmp/test_trace_XXXXXX");
    int fd = mkstemp(path);

    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), strlen(text));
    close(fd);
    return path;
}

static void test_file(void **state)
{
    static const char text[] =
        "{\"timestamp\":1,\"input_length\":1,\"output_length\":1,\"hash_ids\":[1]}\n"
        "\n"
        "{\"timestamp\":2,\"input_length\":600,\"output_length\":1,\"hash_ids\":[1,2]}\n"
        "{\"timestamp\":3,\"input_length\":600,\"output_length\":1,\"hash_ids\":[1]}";
    char *path = write_file(text);
    struct fb_trace *trace;
    struct fb_error error;
    char place[64];

    (void)state;
    assert_int_equal(fb_trace_open(path, &trace, &error), FB_OK);
    assert_int_equal(fb_trace_next(trace, &request, &error), FB_OK);
    assert_int_equal(request.timestamp_ms, 1);
    assert_int_equal(fb_trace_next(trace, &request, &error), FB_OK);
    assert_int_equal(request.pages, 2);
    assert_int_equal(fb_trace_next(trace, &request, &error), FB_EINVAL);
    snprintf(place, sizeof(place), "%s:4: \"hash_ids\" has 1", path);
    assert_non_null(strstr(error.text, place));
    assert_int_equal(fb_trace_next(trace, &request, &error), FB_MISS);
    assert_true(fb_trace_progress(trace) == 1);
    fb_trace_close(trace);
    unlink(path);
    free(path);

    assert_int_equal(fb_trace_open("/nowhere/trace.jsonl", &trace, &error), FB_ENOENT);
    assert_non_null(strstr(error.text, "/nowhere/trace.jsonl: No such file"));
    assert_int_equal(fb_trace_open("/", &trace, &error), FB_OK);
    assert_int_equal(fb_trace_next(trace, &request, &error), FB_EIO);
    fb_trace_close(trace);
}

/* Hit of the naive rule: the longest common prefix with any request before. */
#define REQUESTS 300
#define MAX_IDS  12

static void test_prefixes(void **state)
{
    static uint64_t ids[REQUESTS][MAX_IDS];
    static uint32_t pages[REQUESTS];
    struct fb_prefix_set *set;

    (void)state;
    assert_int_equal(fb_prefix_set_create(&set), FB_OK);
    for (uint32_t r = 0; r < REQUESTS; r++) {
        uint32_t expected = 0, hit;

        pages[r] = 1 + (uint32_t)(fb_mix64(r) % MAX_IDS);
        for (uint32_t i = 0; i < pages[r]; i++) {
            ids[r][i] = fb_mix64(r * 64 + i) % 2;
        }
        for (uint32_t q = 0; q < r; q++) {
            uint32_t n = 0;

            while (n < pages[r] && n < pages[q] && ids[r][n] == ids[q][n]) {
                n++;
            }
            expected = n > expected ? n : expected;
        }
        assert_int_equal(fb_prefix_set_add(set, ids[r], pages[r], &hit), FB_OK);
        assert_int_equal(hit, expected);
    }
    fb_prefix_set_destroy(set);
}

/* More pages than the table has at first. */
static void test_prefixes_grow(void **state)
{
    struct fb_prefix_set *set;
    uint32_t hit;

    (void)state;
    assert_int_equal(fb_prefix_set_create(&set), FB_OK);
    for (uint32_t round = 0; round < 2; round++) {
        for (uint64_t r = 0; r < 5000; r++) {
            const uint64_t ids[] = {r % 10, r, 1};

            assert_int_equal(fb_prefix_set_add(set, ids, 3, &hit), FB_OK);
            assert_int_equal(hit, round ? 3 : r >= 10);
        }
    }
    fb_prefix_set_destroy(set);
}

static void test_excerpt(void **state)
{
    struct fb_trace *trace;
    struct fb_prefix_set *set;
    struct fb_error error;
    uint64_t requests = 0, pages = 0, hits = 0;
    enum fb_status status;

    (void)state;
    if (access(EXCERPT, R_OK) < 0) {
        skip(); /* not run from the top of the tree */
    }
    assert_int_equal(fb_trace_open(EXCERPT, &trace, &error), FB_OK);
    assert_int_equal(fb_prefix_set_create(&set), FB_OK);
    while ((status = fb_trace_next(trace, &request, &error)) == FB_OK) {
        uint32_t hit;

        assert_int_equal(fb_prefix_set_add(set, request.ids, request.pages, &hit), FB_OK);
        requests++;
        pages += request.pages;
        hits += hit;
    }
    assert_int_equal(status, FB_MISS);
    assert_int_equal(requests, 586);
    assert_int_equal(pages, 13731);
    assert_int_equal(hits, 4708);
    fb_prefix_set_destroy(set);
    fb_trace_close(trace);
}

/* --- contents --- */

struct bench {
    struct fb_content *content;
    struct fb_layout layout;
    struct fb_engine engine;
};

static void bench_init(struct bench *b, enum fb_codec codec, uint32_t window)
{
    const struct fb_shape *shape = fb_shape_find("llama3-scaled");
    struct fb_manifest *m = malloc(sizeof(*m));
    struct fb_error error;

    fb_shape_manifest(shape, "default", codec, 64, m);
    assert_int_equal(fb_layout_init(&b->layout, m, &error), FB_OK);
    free(m);
    assert_int_equal(fb_content_create(shape, &b->content), FB_OK);
    assert_int_equal(fb_engine_init(&b->engine, b->content, &b->layout, window, 5 * window), FB_OK);
}

static void bench_fini(struct bench *b)
{
    fb_engine_fini(&b->engine);
    fb_content_destroy(b->content);
}

static void test_contents(void **state)
{
    struct bench b;
    char text[160];

    (void)state;
    bench_init(&b, FB_CODEC_RAW, 3);
    fb_engine_compute(&b.engine, 0, 11);
    fb_engine_compute(&b.engine, 1, 12);
    fb_engine_compute(&b.engine, 2, 11);
    assert_true(fb_engine_same(&b.engine, 0, &b.engine, 2));
    assert_false(fb_engine_same(&b.engine, 0, &b.engine, 1));

    /* pages a window apart share their place */
    assert_true(fb_engine_same(&b.engine, 0, &b.engine, 3));
    fb_engine_scrub(&b.engine, 3);
    assert_false(fb_engine_same(&b.engine, 0, &b.engine, 2));
    fb_engine_explain(&b.engine, 0, &b.engine, 2, text, sizeof(text));
    assert_memory_equal(text, "K of layer 0, head 0, token 0, channel 0: got 0xffff", 52);
    bench_fini(&b);
}

/* What the codecs see is finite, has outliers in K, and comes back nearly the same. */
static void test_round_trip(void **state)
{
    static const enum fb_codec codecs[] = {FB_CODEC_FP8_E4M3, FB_CODEC_FP8_E5M2, FB_CODEC_INT8};

    (void)state;
    for (size_t i = 0; i < sizeof(codecs) / sizeof(codecs[0]); i++) {
        struct bench b;
        uint8_t *scratch;

        bench_init(&b, codecs[i], 3);
        scratch = aligned_alloc(FB_BLOCK_ALIGN, b.layout.block_bytes);
        for (uint32_t page = 0; page < 3; page++) {
            fb_engine_compute(&b.engine, page, 11);
        }
        assert_int_equal(fb_engine_round_trip(&b.engine, 1, scratch), FB_OK);
        assert_false(fb_engine_same(&b.engine, 0, &b.engine, 1));
        assert_true(fb_engine_same(&b.engine, 0, &b.engine, 2));
        assert_int_equal(fb_engine_round_trip(&b.engine, 2, scratch), FB_OK);
        assert_true(fb_engine_same(&b.engine, 1, &b.engine, 2));
        free(scratch);
        bench_fini(&b);
    }
}

static void test_tokens(void **state)
{
    uint32_t a[64], b[64];

    (void)state;
    fb_page_tokens(fb_prompt_page(7, 0), 64, a);
    fb_page_tokens(fb_prompt_page(7, 0), 64, b);
    assert_memory_equal(a, b, sizeof(a));
    fb_page_tokens(fb_prompt_page(7, 1), 64, b);
    assert_memory_not_equal(a, b, sizeof(a));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_good_lines),    cmocka_unit_test(test_bad_lines),
        cmocka_unit_test(test_file),          cmocka_unit_test(test_prefixes),
        cmocka_unit_test(test_prefixes_grow), cmocka_unit_test(test_excerpt),
        cmocka_unit_test(test_contents),      cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_tokens),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
