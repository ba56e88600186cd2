/* Key reports: what is refused and in which words, extras that are none, and one that is whole but
 * contradicts itself. */
#include "pool/command/key_extra.h"
#include "tests/unit/key_report_util.h"

static void test_sample(void **state)
{
    json_t *root = sample();
    struct fb_key_report *report = report_of(root);
    json_t *texts = fb_key_report_contradictions(report);
    json_t *parts = report->extras[1].parts;

    (void)state;
    assert_int_equal(json_array_size(texts), 0);
    assert_string_equal(report->request, "chat-7");
    assert_int_equal(report->page_tokens, 16);
    assert_int_equal(report->token_count, 56);
    assert_int_equal(report->pages, 3);
    assert_int_equal(report->space_count, 2);
    assert_string_equal(report->spaces[1].manifest.model, "example/model@0123abcd");
    assert_int_equal(json_object_size(parts), 3);
    assert_int_equal(json_array_size(json_object_get(parts, "multimodal")), 2);
    assert_non_null(strstr(
        json_string_value(json_array_get(json_object_get(parts, "multimodal"), 0)), " at -3"));
    assert_string_equal(json_string_value(json_object_get(report->extras[0].parts, "salt")),
                        "team-7");
    assert_int_equal(json_object_size(report->extras[2].parts), 0);
    json_decref(texts);
    fb_key_report_destroy(report);
    json_decref(root);
}

static void test_other_page_tokens(void **state)
{
    json_t *b = sample();
    struct fb_key_report *report;
    json_t *texts;

    (void)state;
    change(b, "spaces[1].manifest.page_tokens", "32");
    seal(b);
    report = report_of(b);
    texts = fb_key_report_contradictions(report);
    assert_int_equal(json_array_size(texts), 1);
    assert_non_null(strstr(json_string_value(json_array_get(texts, 0)),
                           "spaces[1].manifest.page_tokens is 32, page_tokens is 16"));
    json_decref(texts);
    fb_key_report_destroy(report);
    json_decref(b);
}

/* --- reports that are refused --- */

static void expect_refused(const json_t *root, enum fb_status expected, const char *words)
{
    struct fb_key_report *report = NULL;
    struct fb_error error;

    assert_int_equal(parse(root, &report, &error), expected);
    assert_null(report);
    if (!strstr(error.text, words) || strncmp(error.text, "r.json: ", 8) != 0) {
        fail_msg("'%s' does not say '%s'", error.text, words);
    }
}

static void test_missing_fields(void **state)
{
    static const char *const paths[] = {"forebay_keys",
                                        "request",
                                        "page_tokens",
                                        "tokens",
                                        "extras",
                                        "chain",
                                        "spaces",
                                        "spaces[1].id",
                                        "spaces[1].manifest",
                                        "spaces[1].manifest.tenant",
                                        "spaces[1].manifest.model",
                                        "spaces[1].manifest.quantization",
                                        "spaces[1].manifest.position",
                                        "spaces[1].manifest.arrangement",
                                        "spaces[1].manifest.engine_block_tokens",
                                        "spaces[1].manifest.rule",
                                        "spaces[1].manifest.window_tokens",
                                        "spaces[1].manifest.page_tokens",
                                        "spaces[1].manifest.layers",
                                        "spaces[1].manifest.head_first",
                                        "spaces[1].manifest.head_count",
                                        "spaces[1].manifest.head_total",
                                        "spaces[1].manifest.sections",
                                        "spaces[1].manifest.sections[1].kind",
                                        "spaces[1].manifest.sections[1].elem",
                                        "spaces[1].manifest.sections[1].codec",
                                        "spaces[1].manifest.sections[1].group",
                                        "spaces[1].manifest.sections[1].layer_first",
                                        "spaces[1].manifest.sections[1].layer_count",
                                        "spaces[1].manifest.sections[1].row_elems",
                                        "spaces[1].manifest.scales",
                                        "spaces[1].manifest.generation",
                                        "spaces[1].manifest.private"};

    (void)state;
    for (size_t i = 0; i < FB_COUNT_OF(paths); i++) {
        json_t *root = sample();
        char words[128];

        change(root, paths[i], NULL);
        snprintf(words, sizeof(words), "\"%s\" is missing; expected ", paths[i]);
        expect_refused(root, FB_EINVAL, words);
        json_decref(root);
    }
}

struct wrong {
    const char *path;
    const char *text;
    const char *words; /* NULL: that the path is wrong */
};

static void test_wrong_fields(void **state)
{
    static const struct wrong wrongs[] = {
        {"forebay_keys", "\"1\"", NULL},
        {"request", "7", NULL},
        {"page_tokens", "0", "expected a whole number from 1 to 4096"},
        {"page_tokens", "16.5", NULL},
        {"tokens", "{}", NULL},
        {"tokens[3]", "-1", "expected a token id from 0 to 4294967295"},
        {"tokens[3]", "4294967296", NULL},
        {"extras", "[]", "expected a list of 3, one for each whole page"},
        {"chain", "[]", "expected a list of 3, one for each whole page"},
        {"chain[1]", "\"00ff\"", "expected 64 hexadecimal digits"},
        {"chain[1]", "17", NULL},
        {"extras[1]", "\"a10461\"", "expected CBOR of adapter"},
        {"extras[1]", "\"a104616\"", "expected pairs of hexadecimal digits"},
        {"extras[1]", "\"a104616g\"", "expected pairs of hexadecimal digits"},
        {"extras[1]", "7", NULL},
        {"spaces", "[]", "expected a list of at least one space"},
        {"spaces[0]", "7", "\"spaces[0].id\" is missing"},
        {"spaces[0].id", "\"00\"", "expected 32 hexadecimal digits"},
        {"spaces[0].manifest", "[]", "expected an object"},
        {"spaces[0].manifest.tenant", "7", "expected a text of up to 63 bytes"},
        {"spaces[0].manifest.model", "null", "expected a text of up to 255 bytes"},
        {"spaces[0].manifest.rule", "\"ring\"", "expected one of full window state"},
        {"spaces[0].manifest.layers", "7", NULL},
        {"spaces[0].manifest.head_total", "null", NULL},
        {"spaces[0].manifest.sections[0].codec", "\"int3\"",
         "expected one of raw fp8_e4m3 fp8_e5m2 int8"},
        {"spaces[0].manifest.scales", "[1e39]", NULL},
        {"spaces[0].manifest.private", "\"00\"", "expected 32 hexadecimal digits"},
        {"spaces[0].manifest.window_tokens", "0", "\"spaces[0]\": manifest: window_tokens is 0"},
    };
    json_t *root = value_of("[]");

    (void)state;
    expect_refused(root, FB_EINVAL, "expected a key report, an object");
    json_decref(root);
    root = sample();
    change(root, "forebay_keys", "2");
    expect_refused(root, FB_EVERSION, "\"forebay_keys\" is 2; this program knows 1");
    json_decref(root);
    for (size_t i = 0; i < FB_COUNT_OF(wrongs); i++) {
        const struct wrong *w = &wrongs[i];
        char words[128];

        root = sample();
        change(root, w->path, w->text);
        snprintf(words, sizeof(words), "\"%s\" is wrong; expected ", w->path);
        expect_refused(root, FB_EINVAL, w->words ? w->words : words);
        json_decref(root);
    }
}

#define DIGEST "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"

/* What encodes no extra, and one that is cut at any byte. */
static void test_bad_extras(void **state)
{
    static const char *const bad[] = {
        "a0",                    /* nothing applies: then there is no extra */
        "a1056161",              /* a key that is not known */
        "a2046161046161",        /* twice */
        "a2046161035820" DIGEST, /* out of order */
        "a104616100",            /* more behind it */
        "a1014100",              /* too short for a digest */
        "a10280",                /* no items */
        "a102818141",            /* an item of one field */
        "a2028183"
        "5820" DIGEST "00046161",     /* an item of three fields */
        "a10281825820" DIGEST "4100", /* an offset that is no number */
        "8104",                       /* no map */
    };
    json_t *root = sample();
    struct fb_key_report *report = report_of(root);
    uint8_t extra[64];

    (void)state;
    for (size_t i = 0; i < FB_COUNT_OF(bad); i++) {
        size_t bytes = strlen(bad[i]) / 2;

        assert_true(fb_hex_parse(bad[i], extra, bytes));
        assert_null(fb_key_extra_parts(extra, bytes));
    }
    for (size_t bytes = 1; bytes < report->extras[1].bytes; bytes++) {
        uint8_t *cut = malloc(bytes); /* so that sanitizers see a read behind it */

        assert_non_null(cut);
        memcpy(cut, report->extras[1].data, bytes);
        assert_null(fb_key_extra_parts(cut, bytes));
        free(cut);
    }
    fb_key_report_destroy(report);
    json_decref(root);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sample),         cmocka_unit_test(test_other_page_tokens),
        cmocka_unit_test(test_missing_fields), cmocka_unit_test(test_wrong_fields),
        cmocka_unit_test(test_bad_extras),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
