/* why: every ingredient of a key, changed alone, is named, with the first page that it changes;
 * reports that contradict themselves; the command's output and exit status. */
#include "pool/command/cli.h"
#include "pool/command/why.h"
#include "tests/unit/key_report_util.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define NO_PAGE    (-1)
#define TEXT_BYTES 16384

static json_t *compare(const json_t *a, const json_t *b)
{
    struct fb_key_report *x = report_of(a), *y = report_of(b);
    json_t *result = fb_why_reports(x, y);

    assert_non_null(result);
    fb_key_report_destroy(x);
    fb_key_report_destroy(y);
    return result;
}

/* --- results --- */

static json_t *row_of(const json_t *result, const char *name)
{
    json_t *row;
    size_t i;

    json_array_foreach(json_object_get(result, "ingredients"), i, row)
    {
        if (!strcmp(json_string_value(json_object_get(row, "ingredient")), name)) {
            return row;
        }
    }
    fail_msg("no ingredient %s", name);
    return NULL;
}

static int64_t number_of(const json_t *object, const char *name)
{
    const json_t *value = json_object_get(object, name);

    assert_non_null(value);
    return json_is_null(value) ? NO_PAGE : json_integer_value(value);
}

/* How many ingredients differ, without the chain, which follows from others. */
static int count_differences(const json_t *result)
{
    json_t *row;
    size_t i;
    int n = 0;

    json_array_foreach(json_object_get(result, "ingredients"), i, row)
    {
        n += json_is_false(json_object_get(row, "same")) &&
             strncmp(json_string_value(json_object_get(row, "ingredient")), "chain", 5) != 0;
    }
    return n;
}

static bool is_equal(const json_t *result)
{
    return json_is_true(json_object_get(result, "equal"));
}

static void expect_conclusion(const json_t *result, const char *words)
{
    const char *text = json_string_value(json_object_get(result, "conclusion"));

    assert_non_null(text);
    if (!strstr(text, words)) {
        fail_msg("\"%s\" does not say \"%s\"", text, words);
    }
}

static void expect_side(const json_t *row, const char *side, const char *text)
{
    json_t *expected = value_of(text);

    if (!json_equal(json_object_get(row, side), expected)) {
        fail_msg("%s: expected %s", side, text);
    }
    json_decref(expected);
}

static void expect_consistent(const json_t *result)
{
    assert_int_equal(
        json_array_size(json_object_get(json_object_get(result, "a"), "contradictions")), 0);
    assert_int_equal(
        json_array_size(json_object_get(json_object_get(result, "b"), "contradictions")), 0);
}

/* Exactly this differs, and it is the cause. page NO_PAGE: no key differs. */
static void expect_only(const json_t *result, const char *name, int64_t page)
{
    json_t *row = row_of(result, name);

    assert_true(json_is_false(json_object_get(row, "same")));
    assert_int_equal(count_differences(result), 1);
    assert_int_equal(number_of(row, "page"), page);
    assert_int_equal(number_of(result, "first_page"), page);
    assert_int_equal(is_equal(result), page == NO_PAGE);
    if (page != NO_PAGE) {
        char words[128];

        snprintf(words, sizeof(words), "from page %d on: %s: A has ", (int)page, name);
        expect_conclusion(result, words);
    } else {
        expect_conclusion(result, "All keys of the 3 common pages are equal");
    }
}

/* --- one ingredient at a time --- */

struct difference {
    const char *path; /* in the report */
    const char *a;    /* set in A first, where the sample has another value */
    const char *b;
    const char *name; /* the ingredient */
    int64_t page;     /* the first that differs */
    const char *shown_a, *shown_b;
};

static void expect_difference(const struct difference *d)
{
    json_t *a = sample(), *b = sample();
    json_t *result;

    if (d->a) {
        change(a, d->path, d->a);
        seal(a);
    }
    change(b, d->path, d->b);
    seal(b);
    result = compare(a, b);
    expect_only(result, d->name, d->page);
    expect_consistent(result);
    if (d->shown_a) {
        expect_side(row_of(result, d->name), "a", d->shown_a);
        expect_side(row_of(result, d->name), "b", d->shown_b);
    }
    json_decref(result);
    json_decref(a);
    json_decref(b);
}

#define MANIFEST(i, field, b, a_text, b_text)                                                 \
    {                                                                                         \
        "spaces[" #i "].manifest." field, NULL, b, "spaces[" #i "]." field, 0, a_text, b_text \
    }

static void test_manifests(void **state)
{
    static const struct difference differences[] = {
        MANIFEST(0, "tenant", "\"batch\"", "\"default\"", "\"batch\""),
        MANIFEST(0, "model", "\"example/model@4567\"", "\"example/model@0123abcd\"",
                 "\"example/model@4567\""),
        MANIFEST(0, "quantization", "\"\"", "\"awq-w4a16\"", "\"\""),
        MANIFEST(0, "position", "\"rope theta=10000\"", NULL, NULL),
        MANIFEST(0, "arrangement", "\"amx 2\"", "\"amx\"", "\"amx 2\""),
        MANIFEST(0, "engine_block_tokens", "32", "16", "32"),
        MANIFEST(0, "window_tokens", "256", "128", "256"),
        MANIFEST(0, "head_first", "2", "0", "2"),
        MANIFEST(0, "head_count", "1", "2", "1"),
        MANIFEST(0, "head_total", "8", "4", "8"),
        MANIFEST(0, "sections[0].kind", "\"latent\"", "\"K\"", "\"latent\""),
        MANIFEST(1, "sections[0].elem", "\"fp16\"", "\"bf16\"", "\"fp16\""),
        MANIFEST(1, "sections[0].codec", "\"fp8_e5m2\"", "\"fp8_e4m3\"", "\"fp8_e5m2\""),
        MANIFEST(1, "sections[1].group", "16", "32", "16"),
        MANIFEST(0, "sections[1].layer_first", "0", "1", "0"),
        MANIFEST(0, "sections[1].layer_count", "2", "3", "2"),
        MANIFEST(0, "sections[1].row_elems", "128", "64", "128"),
        MANIFEST(0, "scales[1]", "-3.5", "\"-3.25\"", "\"-3.5\""),
        MANIFEST(0, "scales[2]", "-0.0", "\"0\"", "\"-0\""),
        MANIFEST(0, "generation", "4", "\"3\"", "\"4\""),
        MANIFEST(0, "private", "\"000102030405060708090a0b0c0d0eff\"", "\"\"",
                 "\"000102030405060708090a0b0c0d0eff\""),
        {"spaces[0].manifest.scales", NULL, "[0.5, -3.25]", "spaces[0].scales[2]", 0, "\"0\"",
         "null"},
        /* by rule and layers spaces find their counterparts */
        {"spaces[0].manifest.layers", NULL, "[0, 1, 2, 9]", "spaces", 0,
         "[\"window, layers 0,2,4,6\"]", "[\"window, layers 0-2,9\"]"},
    };

    (void)state;
    for (size_t i = 0; i < FB_COUNT_OF(differences); i++) {
        expect_difference(&differences[i]);
    }
}

static void test_rule(void **state)
{
    json_t *a = sample(), *b = sample();
    json_t *result;

    (void)state;
    change(b, "spaces[0].manifest.rule", "\"FULL\"");
    change(b, "spaces[0].manifest.window_tokens", "0");
    seal(b);
    result = compare(a, b);
    expect_only(result, "spaces", 0);
    expect_side(row_of(result, "spaces"), "b", "[\"full, layers 0,2,4,6\"]");
    json_decref(result);
    json_decref(a);
    json_decref(b);
}

static void test_space_count(void **state)
{
    json_t *a = sample(), *b = sample();
    json_t *result;

    (void)state;
    json_array_remove(json_object_get(b, "spaces"), 0);
    result = compare(a, b);
    expect_only(result, "spaces", 0);
    expect_side(row_of(result, "spaces"), "a", "[\"window, layers 0,2,4,6\"]");
    expect_side(row_of(result, "spaces"), "b", "[]");
    json_decref(result);
    result = compare(b, a);
    expect_only(result, "spaces", 0);
    json_decref(result);
    json_decref(a);
    json_decref(b);
}

/* The order of spaces is nobody's business; two of one rule and the same layers are told apart. */
static void test_space_order(void **state)
{
    json_t *a = sample(), *b = sample();
    json_t *spaces = json_object_get(b, "spaces");
    json_t *result;

    (void)state;
    json_array_append(spaces, json_array_get(spaces, 0));
    json_array_remove(spaces, 0);
    result = compare(a, b);
    assert_true(is_equal(result));
    assert_int_equal(count_differences(result), 0);
    json_decref(result);

    change(a, "spaces[1].manifest", "{}");
    json_object_update(json_object_get(json_array_get(json_object_get(a, "spaces"), 1), "manifest"),
                       json_object_get(json_array_get(spaces, 1), "manifest"));
    change(a, "spaces[1].manifest.head_total", "5");
    seal(a);
    json_decref(b);
    b = json_deep_copy(a);
    spaces = json_object_get(b, "spaces");
    json_array_append(spaces, json_array_get(spaces, 0));
    json_array_remove(spaces, 0);
    result = compare(a, b);
    assert_true(is_equal(result));
    json_decref(result);
    json_decref(a);
    json_decref(b);
}

#define DIGEST_A "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
#define DIGEST_B "ff0102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"

static void test_extras(void **state)
{
    static const struct difference differences[] = {
        {"extras[1]", "\"a1015820" DIGEST_A "\"", "\"a1015820" DIGEST_B "\"", "extras[1].adapter",
         1, "\"" DIGEST_A "\"", "\"" DIGEST_B "\""},
        {"extras[1]", "\"\"", "\"a1015820" DIGEST_B "\"", "extras[1].adapter", 1, "null",
         "\"" DIGEST_B "\""},
        {"extras[2]", "\"a10281825820" DIGEST_A "05\"", "\"a10281825820" DIGEST_B "05\"",
         "extras[2].multimodal[0]", 2, "\"" DIGEST_A " at 5\"", "\"" DIGEST_B " at 5\""},
        {"extras[2]", "\"a10282825820" DIGEST_A "00825820" DIGEST_A "22\"",
         "\"a10282825820" DIGEST_A "00825820" DIGEST_A "390100\"", "extras[2].multimodal[1]", 2,
         "\"" DIGEST_A " at -3\"", "\"" DIGEST_A " at -257\""},
        {"extras[2]", "\"a10281825820" DIGEST_A "00\"",
         "\"a10282825820" DIGEST_A "00825820" DIGEST_A "01\"", "extras[2].multimodal[1]", 2, "null",
         "\"" DIGEST_A " at 1\""},
        {"extras[2]", "\"a1035820" DIGEST_A "\"", "\"a1035820" DIGEST_B "\"",
         "extras[2].embeddings", 2, "\"" DIGEST_A "\"", "\"" DIGEST_B "\""},
        {"extras[0]", "\"a1046161\"", "\"a1046162\"", "extras[0].salt", 0, "\"a\"", "\"b\""},
        /* the same salt, in a longer form than CBOR needs */
        {"extras[0]", "\"a1046161\"", "\"a104780161\"", "extras[0]", 0, "\"a1046161\"",
         "\"a104780161\""},
    };

    (void)state;
    for (size_t i = 0; i < FB_COUNT_OF(differences); i++) {
        expect_difference(&differences[i]);
    }
}

static void test_tokens(void **state)
{
    static const struct difference differences[] = {
        {"tokens[0]", "1", "2", "tokens[0]", 0, "1", "2"},
        {"tokens[16]", "1", "4294967295", "tokens[16]", 1, "1", "4294967295"},
        {"tokens[47]", "1", "2", "tokens[47]", 2, "1", "2"},
        /* behind the last whole page */
        {"tokens[48]", "1", "2", "tokens[48]", NO_PAGE, "1", "2"},
        {"tokens[55]", "1", "2", "tokens[55]", NO_PAGE, "1", "2"},
    };

    (void)state;
    for (size_t i = 0; i < FB_COUNT_OF(differences); i++) {
        expect_difference(&differences[i]);
    }
}

/* Only pages that both have count. */
static void test_length(void **state)
{
    json_t *a = sample(), *b = sample();
    json_t *result;

    (void)state;
    json_array_append_new(json_object_get(b, "tokens"), json_integer(5));
    result = compare(a, b);
    expect_only(result, "length", NO_PAGE);
    expect_side(row_of(result, "length"), "a", "56");
    expect_side(row_of(result, "length"), "b", "57");
    json_decref(result);

    while (json_array_size(json_object_get(b, "tokens")) > 31) {
        json_array_remove(json_object_get(b, "tokens"), 31);
    }
    for (int i = 0; i < 2; i++) {
        json_array_remove(json_object_get(b, "chain"), 1);
        json_array_remove(json_object_get(b, "extras"), 1);
    }
    result = compare(a, b);
    assert_true(is_equal(result));
    expect_conclusion(result, "All keys of the 1 common pages are equal");
    json_decref(result);

    while (json_array_size(json_object_get(b, "tokens")) > 15) {
        json_array_remove(json_object_get(b, "tokens"), 15);
    }
    json_array_clear(json_object_get(b, "chain"));
    json_array_clear(json_object_get(b, "extras"));
    result = compare(a, b);
    assert_false(is_equal(result));
    expect_conclusion(result, "no page that both have");
    json_decref(result);
    json_decref(a);
    json_decref(b);
}

static void test_page_tokens(void **state)
{
    json_t *a = sample(), *b = sample();
    json_t *result;

    (void)state;
    change(b, "page_tokens", "20");
    change(b, "tokens[17]", "5");
    change(b, "spaces[0].manifest.page_tokens", "20");
    change(b, "spaces[1].manifest.page_tokens", "20");
    json_array_remove(json_object_get(b, "chain"), 2);
    json_array_remove(json_object_get(b, "extras"), 2);
    seal(b);
    result = compare(a, b);
    expect_consistent(result);
    assert_int_equal(number_of(result, "first_page"), 0);
    assert_int_equal(count_differences(result), 4);
    assert_int_equal(number_of(row_of(result, "page_tokens"), "page"), 0);
    assert_int_equal(number_of(row_of(result, "tokens[17]"), "page"), NO_PAGE);
    assert_int_equal(number_of(row_of(result, "spaces[0].page_tokens"), "page"), 0);
    expect_conclusion(result, "from page 0 on: page_tokens: A has 16, B has 20; spaces[0]");
    json_decref(result);
    json_decref(a);
    json_decref(b);
}

static void test_equal(void **state)
{
    json_t *a = sample();
    json_t *result = compare(a, a);

    (void)state;
    expect_consistent(result);
    assert_true(is_equal(result));
    assert_int_equal(count_differences(result), 0);
    assert_true(json_is_true(json_object_get(row_of(result, "chain"), "same")));
    assert_int_equal(number_of(result, "first_page"), NO_PAGE);
    assert_int_equal(number_of(result, "common_pages"), 3);
    expect_conclusion(result, "a miss has another cause");
    json_decref(result);
    json_decref(a);
}

/* --- contradictions --- */

static void expect_contradiction(const char *path, const char *text, const char *words,
                                 const char *conclusion)
{
    json_t *a = sample(), *b = sample();
    json_t *result, *texts;

    change(b, path, text);
    result = compare(a, b);
    texts = json_object_get(json_object_get(result, "b"), "contradictions");
    assert_int_equal(json_array_size(texts), 1);
    assert_non_null(strstr(json_string_value(json_array_get(texts, 0)), words));
    assert_int_equal(
        json_array_size(json_object_get(json_object_get(result, "a"), "contradictions")), 0);
    expect_conclusion(result, conclusion);
    json_decref(result);
    json_decref(a);
    json_decref(b);
}

static void test_contradictions(void **state)
{
    (void)state;
    expect_contradiction("chain[2]", "\"" DIGEST_A "\"", "chain[2] does not follow",
                         "from page 2 on, though tokens and extras of that page are the same");
    expect_contradiction("tokens[20]", "31999", "chain[1] does not follow", "All keys");
    expect_contradiction("extras[2]", "\"a1015820" DIGEST_A "\"", "chain[2] does not follow",
                         "All keys");
    expect_contradiction("spaces[1].id", "\"000102030405060708090a0b0c0d0e0f\"",
                         "spaces[1].id is not that of its manifest",
                         "from page 0 on: spaces[1].id: A has ");
}

/* --- manifests of spaces --- */

static void test_two_manifests(void **state)
{
    json_t *root = sample();
    struct fb_key_report *report = report_of(root);
    struct fb_manifest m = report->spaces[0].manifest;
    json_t *result = fb_why_manifests(&m, &report->spaces[0].manifest);

    (void)state;
    assert_true(is_equal(result));
    assert_int_equal(count_differences(result), 0);
    expect_conclusion(result, "the same manifest");
    json_decref(result);

    m.rule = FB_RULE_FULL;
    m.window_tokens = 0;
    m.layers[3] = 7;
    memcpy(m.model, "\xff", 2); /* no UTF-8 */
    result = fb_why_manifests(&m, &report->spaces[0].manifest);
    assert_false(is_equal(result));
    assert_int_equal(count_differences(result), 4);
    expect_side(row_of(result, "rule"), "a", "\"full\"");
    expect_side(row_of(result, "window_tokens"), "b", "128");
    expect_side(row_of(result, "layers"), "a", "\"0,2,4,7\"");
    expect_side(row_of(result, "model"), "a", "\"ff\"");
    assert_true(json_is_true(json_object_get(row_of(result, "scales"), "same")));
    expect_conclusion(result, "no block of one space is found in the other");
    json_decref(result);
    fb_key_report_destroy(report);
    json_decref(root);
}

/* --- the command --- */

/* Run it in a process of its own. returns its exit status; output: what it wrote */
static int run(char *output, bool json, const char *a, const char *b)
{
    char *argv[] = {(char[]){"why"}, (char *)(uintptr_t)a, (char *)(uintptr_t)b, NULL};
    struct fb_cli cli = {.grpc = FB_DEFAULT_GRPC, .json = json};
    FILE *file = tmpfile();
    int status;
    pid_t pid;

    assert_non_null(file);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        dup2(fileno(file), STDOUT_FILENO);
        dup2(fileno(file), STDERR_FILENO);
        status = fb_run_why(&cli, b ? 3 : 2, argv);
        fflush(stdout);
        _exit(status);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    rewind(file);
    output[fread(output, 1, TEXT_BYTES - 1, file)] = 0;
    fclose(file);
    return WEXITSTATUS(status);
}

static void test_command(void **state)
{
    char output[TEXT_BYTES], path[] = "/tmp/forebay-test-why-XXXXXX";
    json_t *b = sample(), *result;
    int fd = mkstemp(path);

    (void)state;
    assert_true(fd >= 0);
    close(fd);
    assert_int_equal(run(output, false, SAMPLE, SAMPLE), 0);
    assert_non_null(strstr(output, "All keys of the 3 common pages are equal"));

    change(b, "tokens[20]", "31999");
    assert_int_equal(json_dump_file(b, path, 0), 0);
    assert_int_equal(run(output, false, SAMPLE, path), 1);
    assert_non_null(strstr(output, "contradicts itself: chain[1]"));
    seal(b);
    assert_int_equal(json_dump_file(b, path, 0), 0);
    assert_int_equal(run(output, false, SAMPLE, path), 1);
    assert_null(strstr(output, "contradicts itself"));
    assert_non_null(strstr(output, "page_tokens  same\n"));
    assert_non_null(strstr(output, "tokens[20]   differs from page 1 on: A has "));
    assert_non_null(strstr(output, "B has 31999"));
    assert_int_equal(run(output, true, SAMPLE, path), 1);
    result = value_of(output);
    assert_int_equal(number_of(result, "first_page"), 1);
    json_decref(result);
    json_decref(b);

    assert_int_equal(truncate(path, 0), 0);
    assert_int_equal(run(output, false, SAMPLE, path), 64);
    assert_non_null(strstr(output, "not JSON"));
    unlink(path);
    assert_int_equal(run(output, false, path, SAMPLE), 64);
    assert_non_null(strstr(output, "No such file or directory; expected a key report"));
    assert_int_equal(run(output, false, "/tmp", SAMPLE), 64);
    assert_non_null(strstr(output, "/tmp: Is a directory; expected a key report"));
    assert_int_equal(run(output, false, SAMPLE, NULL), 64);
    assert_non_null(strstr(output, "expected two key reports"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_equal),         cmocka_unit_test(test_manifests),
        cmocka_unit_test(test_rule),          cmocka_unit_test(test_space_count),
        cmocka_unit_test(test_space_order),   cmocka_unit_test(test_extras),
        cmocka_unit_test(test_tokens),        cmocka_unit_test(test_length),
        cmocka_unit_test(test_page_tokens),   cmocka_unit_test(test_contradictions),
        cmocka_unit_test(test_two_manifests), cmocka_unit_test(test_command),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
