/* why: the ingredients of two sides' keys, and the one that differs. */
#include "pool/command/why.h"

#include "pool/command/admin.h"
#include "pool/command/manifest_json.h"
#include "pool/command/output.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PATH_BYTES 128
#define NO_PAGE    INT64_MAX /* no key of a common page depends on it */

/* --- rows --- */

static void add_same(json_t *rows, const char *name)
{
    json_array_append_new(rows, json_pack("{s:s, s:b}", "ingredient", name, "same", 1));
}

/* page  the first whose key this changes. NULL values are shown as nothing. */
static void add_difference(json_t *rows, const char *name, json_t *a, json_t *b, int64_t page)
{
    json_array_append_new(rows, json_pack("{s:s, s:b, s:O?, s:O?, s:o}", "ingredient", name, "same",
                                          0, "a", a, "b", b, "page",
                                          page == NO_PAGE ? json_null() : json_integer(page)));
}

/* A row for each leaf that differs; of a list of leaves only for the first. */
static void add_differences(json_t *rows, const char *path, json_t *a, json_t *b, int64_t page)
{
    char inner[PATH_BYTES];
    const char *key;
    json_t *value;

    if (json_is_object(a) && json_is_object(b)) {
        json_object_foreach(a, key, value)
        {
            json_t *other = json_object_get(b, key);

            snprintf(inner, sizeof(inner), "%s%s%s", path, *path ? "." : "", key);
            if (!json_equal(value, other)) {
                add_differences(rows, inner, value, other, page);
            }
        }
    } else if (json_is_array(a) && json_is_array(b)) {
        for (size_t i = 0; i < json_array_size(a) || i < json_array_size(b); i++) {
            json_t *x = json_array_get(a, i), *y = json_array_get(b, i);

            if (json_equal(x, y)) {
                continue;
            }
            snprintf(inner, sizeof(inner), "%s[%zu]", path, i);
            add_differences(rows, inner, x, y, page);
            if (!json_is_object(x)) {
                break;
            }
        }
    } else {
        add_difference(rows, path, a, b, page);
    }
}

static void add_numbers(json_t *rows, const char *name, uint64_t a, uint64_t b, int64_t page)
{
    json_t *x = json_integer((json_int_t)a), *y = json_integer((json_int_t)b);

    if (a == b) {
        add_same(rows, name);
    } else {
        add_difference(rows, name, x, y, page);
    }
    json_decref(x);
    json_decref(y);
}

static void add_bytes(json_t *rows, const char *name, const uint8_t *a, size_t a_bytes,
                      const uint8_t *b, size_t b_bytes, int64_t page)
{
    json_t *x = fb_hex_json(a, a_bytes), *y = fb_hex_json(b, b_bytes);

    add_difference(rows, name, x, y, page);
    json_decref(x);
    json_decref(y);
}

/* --- manifests --- */

json_t *fb_why_manifests(const struct fb_manifest *a, const struct fb_manifest *b)
{
    json_t *rows = json_array();
    json_t *x = fb_manifest_json(a), *y = fb_manifest_json(b);
    bool equal = json_equal(x, y);
    const char *key;
    json_t *value;

    json_object_foreach(x, key, value)
    {
        json_t *other = json_object_get(y, key);

        if (json_equal(value, other)) {
            add_same(rows, key);
        } else {
            add_differences(rows, key, value, other, NO_PAGE);
        }
    }
    json_decref(x);
    json_decref(y);
    return json_pack("{s:o, s:b, s:s}", "ingredients", rows, "equal", equal, "conclusion",
                     equal ? "Both ids name the same manifest."
                           : "The manifests differ: no block of one space is found in the other.");
}

/* --- spaces of two reports --- */

static bool is_same_part(const struct fb_key_space *a, const struct fb_key_space *b)
{
    const struct fb_manifest *m = &a->manifest, *n = &b->manifest;

    return m->rule == n->rule && m->layer_count == n->layer_count &&
           memcmp(m->layers, n->layers, m->layer_count * sizeof(m->layers[0])) == 0;
}

static bool is_same_id(const struct fb_key_space *a, const struct fb_key_space *b)
{
    return memcmp(a->id, b->id, FB_SPACE_ID_BYTES) == 0;
}

/* Pair what is not paired yet. pairs [space_count of a]: the space of b, or NULL; taken [of b]. */
static void pair_spaces(const struct fb_key_report *a, const struct fb_key_report *b,
                        bool (*is_pair)(const struct fb_key_space *, const struct fb_key_space *),
                        const struct fb_key_space **pairs, bool *taken)
{
    for (size_t i = 0; i < a->space_count; i++) {
        for (size_t k = 0; !pairs[i] && k < b->space_count; k++) {
            if (!taken[k] && is_pair(&a->spaces[i], &b->spaces[k])) {
                pairs[i] = &b->spaces[k];
                taken[k] = true;
            }
        }
    }
}

static void add_label(json_t *labels, const struct fb_manifest *m)
{
    json_t *layers = fb_layers_json(m);

    json_array_append_new(
        labels, json_sprintf("%s, layers %s", fb_rule_name(m->rule), json_string_value(layers)));
    json_decref(layers);
}

static void compare_space(json_t *rows, size_t i, const struct fb_key_space *a,
                          const struct fb_key_space *b)
{
    json_t *x = fb_manifest_json(&a->manifest), *y = fb_manifest_json(&b->manifest);
    size_t before = json_array_size(rows);
    char path[PATH_BYTES];

    snprintf(path, sizeof(path), "spaces[%zu]", i);
    add_differences(rows, path, x, y, 0);
    if (json_array_size(rows) > before) {
        /* the fields say it */
    } else if (is_same_id(a, b)) {
        add_same(rows, path);
    } else {
        snprintf(path, sizeof(path), "spaces[%zu].id", i);
        add_bytes(rows, path, a->id, FB_SPACE_ID_BYTES, b->id, FB_SPACE_ID_BYTES, 0);
    }
    json_decref(x);
    json_decref(y);
}

static void compare_spaces(json_t *rows, const struct fb_key_report *a,
                           const struct fb_key_report *b)
{
    const struct fb_key_space **pairs = calloc(a->space_count + 1, sizeof(*pairs));
    bool *taken = calloc(b->space_count + 1, sizeof(*taken));
    json_t *only_a = json_array(), *only_b = json_array();

    if (pairs && taken) {
        pair_spaces(a, b, is_same_id, pairs, taken);
        pair_spaces(a, b, is_same_part, pairs, taken);
    }
    for (size_t i = 0; pairs && i < a->space_count; i++) {
        if (!pairs[i]) {
            add_label(only_a, &a->spaces[i].manifest);
        }
    }
    for (size_t k = 0; taken && k < b->space_count; k++) {
        if (!taken[k]) {
            add_label(only_b, &b->spaces[k].manifest);
        }
    }
    if (json_array_size(only_a) > 0 || json_array_size(only_b) > 0) {
        add_difference(rows, "spaces", only_a, only_b, 0);
    } else {
        add_same(rows, "spaces");
    }
    for (size_t i = 0; pairs && i < a->space_count; i++) {
        if (pairs[i]) {
            compare_space(rows, i, &a->spaces[i], pairs[i]);
        }
    }
    json_decref(only_a);
    json_decref(only_b);
    free(pairs);
    free(taken);
}

/* --- pages of two reports --- */

/* Each part where it differs first. */
static void compare_extras(json_t *rows, const struct fb_key_report *a,
                           const struct fb_key_report *b, size_t pages)
{
    static const char *const names[] = {"adapter", "multimodal", "embeddings", "salt"};
    size_t before = json_array_size(rows);
    char path[PATH_BYTES];

    for (size_t n = 0; n < FB_COUNT_OF(names); n++) {
        for (size_t i = 0; i < pages; i++) {
            json_t *x = json_object_get(a->extras[i].parts, names[n]);
            json_t *y = json_object_get(b->extras[i].parts, names[n]);

            if (x != y && !json_equal(x, y)) {
                snprintf(path, sizeof(path), "extras[%zu].%s", i, names[n]);
                add_differences(rows, path, x, y, (int64_t)i);
                break;
            }
        }
    }
    /* The same parts, written differently. */
    for (size_t i = 0; i < pages && json_array_size(rows) == before; i++) {
        const struct fb_key_extra *x = &a->extras[i], *y = &b->extras[i];

        if (x->bytes != y->bytes || memcmp(x->data, y->data, x->bytes) != 0) {
            snprintf(path, sizeof(path), "extras[%zu]", i);
            add_bytes(rows, path, x->data, x->bytes, y->data, y->bytes, (int64_t)i);
        }
    }
    if (json_array_size(rows) == before) {
        add_same(rows, "extras");
    }
}

/* The first that differs of those that both have; tokens behind the common pages are in no key
 * that both have. */
static void compare_tokens(json_t *rows, const struct fb_key_report *a,
                           const struct fb_key_report *b, size_t pages)
{
    size_t common = a->token_count < b->token_count ? a->token_count : b->token_count;
    char path[PATH_BYTES];
    size_t i = 0;

    while (i < common && a->tokens[i] == b->tokens[i]) {
        i++;
    }
    if (i == common) {
        add_same(rows, "tokens");
    } else {
        size_t page = i / a->page_tokens;

        snprintf(path, sizeof(path), "tokens[%zu]", i);
        add_numbers(rows, path, a->tokens[i], b->tokens[i],
                    page < pages && a->page_tokens == b->page_tokens ? (int64_t)page : NO_PAGE);
    }
    add_numbers(rows, "length", a->token_count, b->token_count, NO_PAGE);
}

static void compare_chain(json_t *rows, const struct fb_key_report *a,
                          const struct fb_key_report *b, size_t pages)
{
    char path[PATH_BYTES];

    for (size_t i = 0; i < pages; i++) {
        const uint8_t *x = a->chain + i * FB_CHAIN_BYTES, *y = b->chain + i * FB_CHAIN_BYTES;

        if (memcmp(x, y, FB_CHAIN_BYTES) != 0) {
            snprintf(path, sizeof(path), "chain[%zu]", i);
            add_bytes(rows, path, x, FB_CHAIN_BYTES, y, FB_CHAIN_BYTES, (int64_t)i);
            return;
        }
    }
    add_same(rows, "chain");
}

/* --- the conclusion --- */

static void print_value(FILE *out, const json_t *value)
{
    char *text = json_is_null(value) ? NULL : json_dumps(value, JSON_ENCODE_ANY);

    fputs(text ? text : "nothing", out);
    free(text);
}

static void print_difference(FILE *out, const json_t *row)
{
    fputs("A has ", out);
    print_value(out, json_object_get(row, "a"));
    fputs(", B has ", out);
    print_value(out, json_object_get(row, "b"));
}

static const char *row_name(const json_t *row)
{
    return json_string_value(json_object_get(row, "ingredient"));
}

static int64_t row_page(const json_t *row)
{
    const json_t *page = json_object_get(row, "page");

    return json_is_integer(page) ? json_integer_value(page) : NO_PAGE;
}

/* What made the keys differ: keys are hashes of spaces and chain, so tokens and extras count where
 * the chain differs, and the chain itself is the effect. */
static void print_causes(FILE *out, json_t *rows, int64_t first_page)
{
    const char *separator = ": ";
    json_t *row;
    size_t i;

    fprintf(out, "The keys differ from page %" PRId64 " on", first_page);
    json_array_foreach(rows, i, row)
    {
        if (row_page(row) == first_page && strncmp(row_name(row), "chain", 5) != 0) {
            fprintf(out, "%s%s: ", separator, row_name(row));
            print_difference(out, row);
            separator = "; ";
        }
    }
    fputs(*separator == ':' ? ", though tokens and extras of that page are the same: one of the "
                              "reports contradicts itself."
                            : ".",
          out);
}

/* The first page whose keys differ: by its spaces or by its chain. */
static int64_t find_first_page(json_t *rows)
{
    int64_t first = NO_PAGE;
    json_t *row;
    size_t i;

    json_array_foreach(rows, i, row)
    {
        bool decides = !strncmp(row_name(row), "spaces", 6) ||
                       !strncmp(row_name(row), "chain", 5) || !strcmp(row_name(row), "page_tokens");

        if (decides && row_page(row) < first) {
            first = row_page(row);
        }
    }
    return first;
}

static json_t *conclude(json_t *rows, size_t pages, int64_t first_page)
{
    char *text = NULL;
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);
    json_t *value = NULL;

    if (!out) {
        return NULL;
    }
    if (first_page != NO_PAGE) {
        print_causes(out, rows, first_page);
    } else if (pages == 0) {
        fputs("There is no page that both have: only whole pages have keys.", out);
    } else {
        fprintf(out,
                "All keys of the %zu common pages are equal: a miss has another cause (was it "
                "stored? evicted? see forebay lookup).",
                pages);
    }
    if (fclose(out) == 0) {
        value = json_string(text);
    }
    free(text);
    return value;
}

static json_t *describe(const struct fb_key_report *report)
{
    return json_pack("{s:o, s:s, s:I, s:I, s:o}", "file", fb_text_json(report->file), "request",
                     report->request, "tokens", (json_int_t)report->token_count, "pages",
                     (json_int_t)report->pages, "contradictions",
                     fb_key_report_contradictions(report));
}

json_t *fb_why_reports(const struct fb_key_report *a, const struct fb_key_report *b)
{
    size_t pages = a->pages < b->pages ? a->pages : b->pages;
    json_t *rows = json_array();
    int64_t first_page;

    add_numbers(rows, "page_tokens", a->page_tokens, b->page_tokens, 0);
    compare_spaces(rows, a, b);
    compare_extras(rows, a, b, pages);
    compare_tokens(rows, a, b, pages);
    compare_chain(rows, a, b, pages);
    first_page = find_first_page(rows);
    return json_pack("{s:o, s:o, s:I, s:o, s:b, s:o, s:o}", "a", describe(a), "b", describe(b),
                     "common_pages", (json_int_t)pages, "ingredients", rows, "equal",
                     pages > 0 && first_page == NO_PAGE, "first_page",
                     first_page == NO_PAGE ? json_null() : json_integer(first_page), "conclusion",
                     conclude(rows, pages, first_page));
}

/* --- the command --- */

/* A report, or the id of a space. */
static void show_side(const char *side, const json_t *value)
{
    json_t *text;
    size_t i;

    if (json_is_string(value)) {
        printf("%s  %s\n", side, json_string_value(value));
        return;
    }
    printf("%s  %s: request %s, %" JSON_INTEGER_FORMAT " tokens, %" JSON_INTEGER_FORMAT " pages\n",
           side, json_string_value(json_object_get(value, "file")),
           json_string_value(json_object_get(value, "request")),
           json_integer_value(json_object_get(value, "tokens")),
           json_integer_value(json_object_get(value, "pages")));
    json_array_foreach(json_object_get(value, "contradictions"), i, text)
    {
        printf("   contradicts itself: %s\n", json_string_value(text));
    }
}

static void show_rows(json_t *rows)
{
    json_t *row;
    size_t width = 0, i;

    json_array_foreach(rows, i, row)
    {
        width = strlen(row_name(row)) > width ? strlen(row_name(row)) : width;
    }
    json_array_foreach(rows, i, row)
    {
        printf("%-*s  ", (int)width, row_name(row));
        if (json_is_true(json_object_get(row, "same"))) {
            puts("same");
            continue;
        }
        fputs("differs", stdout);
        if (row_page(row) != NO_PAGE) {
            printf(" from page %" PRId64 " on", row_page(row));
        }
        fputs(": ", stdout);
        print_difference(stdout, row);
        putchar('\n');
    }
    putchar('\n');
}

/* Show and drop a result. returns the exit status */
static int show(const struct fb_cli *cli, json_t *result)
{
    const json_t *a = json_object_get(result, "a"), *b = json_object_get(result, "b");
    bool found = !json_is_true(json_object_get(result, "equal")) ||
                 json_array_size(json_object_get(a, "contradictions")) > 0 ||
                 json_array_size(json_object_get(b, "contradictions")) > 0;

    if (!result) {
        return fb_fail("out of memory");
    }
    if (cli->json) {
        fb_json_print(result, false);
        return found;
    }
    show_side("A", a);
    show_side("B", b);
    putchar('\n');
    show_rows(json_object_get(result, "ingredients"));
    puts(json_string_value(json_object_get(result, "conclusion")));
    json_decref(result);
    return found;
}

struct why_input {
    struct fb_cli_input base;
    const char *sides[2];
    uint8_t ids[2][FB_SPACE_ID_BYTES];
    bool spaces;
};

static error_t parse_why(int key, char *arg, struct argp_state *state)
{
    struct why_input *input = state->input;

    switch (key) {
    case ARGP_KEY_INIT: fb_cli_init_child(state); return 0;
    case 'S': input->spaces = true; return 0;
    case ARGP_KEY_ARG:
        if (state->arg_num >= FB_COUNT_OF(input->sides)) {
            return ARGP_ERR_UNKNOWN;
        }
        input->sides[state->arg_num] = arg;
        return 0;
    case ARGP_KEY_END:
        if (state->arg_num != FB_COUNT_OF(input->sides)) {
            argp_error(state, "expected two key reports, or --space and two space ids");
        }
        for (size_t i = 0; input->spaces && i < FB_COUNT_OF(input->sides); i++) {
            if (!fb_hex_parse(input->sides[i], input->ids[i], FB_SPACE_ID_BYTES)) {
                argp_error(state,
                           "\"%s\" is no space id; expected 32 hexadecimal digits, as "
                           "`forebay spaces` shows",
                           input->sides[i]);
            }
        }
        return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static int why_reports(const struct fb_cli *cli, const struct why_input *input)
{
    struct fb_key_report *a = NULL, *b = NULL;
    struct fb_error error;
    int status = argp_err_exit_status;

    if (fb_key_report_load(input->sides[0], &a, &error) != FB_OK ||
        fb_key_report_load(input->sides[1], &b, &error) != FB_OK) {
        fb_fail("%s", error.text);
    } else {
        status = show(cli, fb_why_reports(a, b));
    }
    fb_key_report_destroy(a);
    fb_key_report_destroy(b);
    return status;
}

int fb_run_why(struct fb_cli *cli, int argc, char **argv)
{
    static const struct argp_option options[] = {
        {"space", 'S', NULL, 0, "Compare the manifests of two spaces of a daemon", 0}, {0}};
    const struct argp argp = {.options = options,
                              .parser = parse_why,
                              .args_doc = "A.json B.json\n--space ID ID",
                              .doc =
                                  "Show what the keys of two key reports are made from, and name "
                                  "what differs. Exits with 0 when nothing does, with 1 when "
                                  "something does.",
                              .children = fb_cli_children};
    struct why_input input = {.base = {cli}};
    struct fb_manifest a, b;
    json_t *result;

    argp_parse(&argp, argc, argv, 0, NULL, &input);
    if (!input.spaces) {
        return why_reports(cli, &input);
    }
    if (!fb_admin_get_manifest(cli, input.ids[0], &a) ||
        !fb_admin_get_manifest(cli, input.ids[1], &b)) {
        return EXIT_FAILURE;
    }
    result = fb_why_manifests(&a, &b);
    json_object_set_new(result, "a", json_string(input.sides[0]));
    json_object_set_new(result, "b", json_string(input.sides[1]));
    return show(cli, result);
}
