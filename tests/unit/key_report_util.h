/* A sample key report, to be changed and read. Its hashes and ids were computed apart from this
 * project's code. */
#ifndef FB_TESTS_KEY_REPORT_UTIL_H
#define FB_TESTS_KEY_REPORT_UTIL_H

#include "pool/command/key_report.h"
#include "pool/command/output.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define SAMPLE "tests/data/key_report.json"

static inline json_t *sample(void)
{
    json_t *root = json_load_file(SAMPLE, 0, NULL);

    assert_non_null(root);
    return root;
}

/* A new reference to the value of a JSON text. */
static inline json_t *value_of(const char *text)
{
    json_t *value = json_loads(text, JSON_DECODE_ANY, NULL);

    assert_non_null(value);
    return value;
}

/* Change what a path such as "spaces[0].manifest.model" leads to; text NULL removes it. */
static inline void change(json_t *root, const char *path, const char *text)
{
    char name[64];
    json_t *at = root;

    for (;;) {
        size_t chars = strcspn(path, ".[]");
        bool is_index = path[chars] == ']';
        bool is_last;

        memcpy(name, path, chars);
        name[chars] = 0;
        path += chars + is_index;
        path += *path != 0;
        is_last = *path == 0;
        if (is_last && is_index) {
            assert_int_equal(json_array_set_new(at, strtoul(name, NULL, 10), value_of(text)), 0);
        } else if (is_last && text) {
            assert_int_equal(json_object_set_new(at, name, value_of(text)), 0);
        } else if (is_last) {
            assert_int_equal(json_object_del(at, name), 0);
        } else {
            at = is_index ? json_array_get(at, strtoul(name, NULL, 10)) : json_object_get(at, name);
            assert_non_null(at);
            continue;
        }
        return;
    }
}

static inline enum fb_status parse(const json_t *root, struct fb_key_report **ret_report,
                                   struct fb_error *error)
{
    char *text = json_dumps(root, JSON_REAL_PRECISION(17));
    enum fb_status status;

    assert_non_null(text);
    error->text[0] = 0;
    status = fb_key_report_parse(text, strlen(text), "r.json", ret_report, error);
    free(text);
    return status;
}

static inline struct fb_key_report *report_of(const json_t *root)
{
    struct fb_key_report *report;
    struct fb_error error;

    if (parse(root, &report, &error) != FB_OK) {
        fail_msg("%s", error.text);
    }
    return report;
}

static inline void set_hex(json_t *root, const char *path, const uint8_t *data, size_t bytes)
{
    char hex[2 * FB_CHAIN_BYTES + 1], text[sizeof(hex) + 2];

    fb_hex_format(data, bytes, hex);
    snprintf(text, sizeof(text), "\"%s\"", hex);
    change(root, path, text);
}

/* Compute hashes and ids again, so that a changed report does not contradict itself. */
static inline void seal(json_t *root)
{
    struct fb_key_report *r = report_of(root);
    uint8_t hash[FB_CHAIN_BYTES];
    char path[64];

    for (size_t i = 0; i < r->pages; i++) {
        assert_int_equal(fb_chain(i > 0 ? hash : NULL, r->tokens + i * r->page_tokens,
                                  r->page_tokens, r->extras[i].data, r->extras[i].bytes, hash),
                         FB_OK);
        snprintf(path, sizeof(path), "chain[%zu]", i);
        set_hex(root, path, hash, sizeof(hash));
    }
    for (size_t i = 0; i < r->space_count; i++) {
        snprintf(path, sizeof(path), "spaces[%zu].id", i);
        set_hex(root, path, r->spaces[i].manifest_id, FB_SPACE_ID_BYTES);
    }
    fb_key_report_destroy(r);
}

#endif
