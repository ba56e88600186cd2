/* Key reports: JSON to hashes, tokens and manifests. */
#include "pool/command/key_report.h"

#include "pool/command/key_extra.h"
#include "pool/command/output.h"

#include <errno.h>
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define WHERE_BYTES    64
#define EXPECTED_BYTES 128

/* Keeps the first error; what is taken after it is nothing. */
struct reader {
    const char *file;
    struct fb_error *error;
    enum fb_status status;
};

/* A place in the report: where is "" or ends in a dot, name is the field behind it. */
static void refuse(struct reader *r, const char *where, const char *name, const json_t *value,
                   const char *expected)
{
    if (r->status == FB_OK) {
        r->status = fb_error_set(r->error, FB_EINVAL, "%s: \"%s%s\" is %s; expected %s", r->file,
                                 where, name, value ? "wrong" : "missing", expected);
    }
}

static bool in_range(const json_t *value, uint64_t min, uint64_t max)
{
    json_int_t v = json_integer_value(value);

    return json_is_integer(value) && v >= 0 && (uint64_t)v >= min && (uint64_t)v <= max;
}

static uint64_t take_number(struct reader *r, const json_t *object, const char *where,
                            const char *name, uint64_t min, uint64_t max)
{
    const json_t *value = json_object_get(object, name);
    char expected[EXPECTED_BYTES];

    if (in_range(value, min, max)) {
        return (uint64_t)json_integer_value(value);
    }
    snprintf(expected, sizeof(expected), "a whole number from %" PRIu64 " to %" PRIu64, min, max);
    refuse(r, where, name, value, expected);
    return 0;
}

static uint32_t take_u32(struct reader *r, const json_t *object, const char *where,
                         const char *name)
{
    return (uint32_t)take_number(r, object, where, name, 0, UINT32_MAX);
}

static void take_text(struct reader *r, const json_t *object, const char *where, const char *name,
                      char *out, size_t capacity)
{
    const json_t *value = json_object_get(object, name);
    char expected[EXPECTED_BYTES];

    if (json_is_string(value) && json_string_length(value) < capacity) {
        memcpy(out, json_string_value(value), json_string_length(value) + 1);
        return;
    }
    snprintf(expected, sizeof(expected), "a text of up to %zu bytes", capacity - 1);
    refuse(r, where, name, value, expected);
}

static bool take_hex(struct reader *r, const json_t *value, const char *where, const char *name,
                     uint8_t *out, size_t bytes)
{
    char expected[EXPECTED_BYTES];

    if (json_is_string(value) && fb_hex_parse(json_string_value(value), out, bytes)) {
        return true;
    }
    snprintf(expected, sizeof(expected), "%zu hexadecimal digits", 2 * bytes);
    refuse(r, where, name, value, expected);
    return false;
}

/* An array of at most max items; NULL after an error. */
static const json_t *take_array(struct reader *r, const json_t *object, const char *where,
                                const char *name, size_t max, const char *expected)
{
    const json_t *value = json_object_get(object, name);

    if (json_is_array(value) && json_array_size(value) <= max) {
        return value;
    }
    refuse(r, where, name, value, expected);
    return NULL;
}

/* --- names --- */

typedef const char *(*name_fn)(uint32_t value);

static const char *rule_name(uint32_t v)
{
    return fb_rule_name((enum fb_rule)v);
}

static const char *kind_name(uint32_t v)
{
    return fb_section_kind_name((enum fb_section_kind)v);
}

static const char *elem_name(uint32_t v)
{
    return fb_elem_name((enum fb_elem)v);
}

static const char *codec_name(uint32_t v)
{
    return fb_codec_name((enum fb_codec)v);
}

/* A value by its name, in upper or lower case. */
static uint32_t take_name(struct reader *r, const json_t *object, const char *where,
                          const char *name, name_fn name_of)
{
    const json_t *value = json_object_get(object, name);
    char expected[EXPECTED_BYTES] = "one of";
    size_t at = strlen(expected);

    for (uint32_t v = 1; strcmp(name_of(v), "?") != 0; v++) {
        if (json_is_string(value) && !strcasecmp(json_string_value(value), name_of(v))) {
            return v;
        }
        at += (size_t)snprintf(expected + at, sizeof(expected) - at, " %s", name_of(v));
    }
    refuse(r, where, name, value, expected);
    return 0;
}

/* --- manifests --- */

static void take_layers(struct reader *r, const json_t *object, const char *where,
                        struct fb_manifest *m)
{
    static const char expected[] = "up to 1024 layer indices from 0 to 65535";
    const json_t *layers = take_array(r, object, where, "layers", FB_MAX_LAYERS, expected);

    m->layer_count = (uint32_t)json_array_size(layers);
    for (uint32_t i = 0; i < m->layer_count; i++) {
        const json_t *value = json_array_get(layers, i);

        if (!in_range(value, 0, UINT16_MAX)) {
            refuse(r, where, "layers", value, expected);
        }
        m->layers[i] = (uint16_t)json_integer_value(value);
    }
}

static void take_sections(struct reader *r, const json_t *object, const char *where,
                          struct fb_manifest *m)
{
    const json_t *sections =
        take_array(r, object, where, "sections", FB_MAX_SECTIONS, "up to 32 sections");

    m->section_count = (uint32_t)json_array_size(sections);
    for (uint32_t i = 0; i < m->section_count; i++) {
        const json_t *value = json_array_get(sections, i);
        struct fb_section *s = &m->sections[i];
        char at[2 * WHERE_BYTES];

        snprintf(at, sizeof(at), "%ssections[%u].", where, i);
        s->kind = (enum fb_section_kind)take_name(r, value, at, "kind", kind_name);
        s->elem = (enum fb_elem)take_name(r, value, at, "elem", elem_name);
        s->codec = (enum fb_codec)take_name(r, value, at, "codec", codec_name);
        s->group = take_u32(r, value, at, "group");
        s->layer_first = take_u32(r, value, at, "layer_first");
        s->layer_count = take_u32(r, value, at, "layer_count");
        s->row_elems = take_u32(r, value, at, "row_elems");
    }
}

static void take_scales(struct reader *r, const json_t *object, const char *where,
                        struct fb_manifest *m)
{
    static const char expected[] = "up to 2048 numbers of fp32";
    const json_t *scales = take_array(r, object, where, "scales", FB_MAX_SCALES, expected);

    m->scale_count = (uint32_t)json_array_size(scales);
    for (uint32_t i = 0; i < m->scale_count; i++) {
        const json_t *value = json_array_get(scales, i);

        if (!json_is_number(value) || fabs(json_number_value(value)) > FLT_MAX) {
            refuse(r, where, "scales", value, expected);
            return;
        }
        m->scales[i] = (float)json_number_value(value);
    }
}

static void take_private(struct reader *r, const json_t *object, const char *where,
                         struct fb_manifest *m)
{
    const json_t *value = json_object_get(object, "private");

    if (!json_is_string(value) || json_string_length(value) > 0) {
        m->is_private = take_hex(r, value, where, "private", m->private_id, FB_PRIVATE_BYTES);
    }
}

static void take_manifest(struct reader *r, const json_t *object, const char *where,
                          struct fb_manifest *m)
{
    take_text(r, object, where, "tenant", m->tenant, sizeof(m->tenant));
    take_text(r, object, where, "model", m->model, sizeof(m->model));
    take_text(r, object, where, "quantization", m->quantization, sizeof(m->quantization));
    take_text(r, object, where, "position", m->position, sizeof(m->position));
    take_text(r, object, where, "arrangement", m->arrangement, sizeof(m->arrangement));
    m->engine_block_tokens = take_u32(r, object, where, "engine_block_tokens");
    m->rule = (enum fb_rule)take_name(r, object, where, "rule", rule_name);
    m->window_tokens = take_u32(r, object, where, "window_tokens");
    m->page_tokens = take_u32(r, object, where, "page_tokens");
    take_layers(r, object, where, m);
    m->head_first = take_u32(r, object, where, "head_first");
    m->head_count = take_u32(r, object, where, "head_count");
    m->head_total = take_u32(r, object, where, "head_total");
    take_sections(r, object, where, m);
    take_scales(r, object, where, m);
    m->generation = take_number(r, object, where, "generation", 0, INT64_MAX);
    take_private(r, object, where, m);
}

static void take_space(struct reader *r, const json_t *object, size_t i, struct fb_key_space *space)
{
    uint8_t encoded[FB_MANIFEST_MAX_BYTES];
    const json_t *manifest = json_object_get(object, "manifest");
    char where[WHERE_BYTES], inner[WHERE_BYTES];
    struct fb_error why;
    size_t bytes;

    snprintf(where, sizeof(where), "spaces[%zu].", i);
    snprintf(inner, sizeof(inner), "spaces[%zu].manifest.", i);
    take_hex(r, json_object_get(object, "id"), where, "id", space->id, FB_SPACE_ID_BYTES);
    if (!json_is_object(manifest)) {
        refuse(r, where, "manifest", manifest, "an object, {...}");
        return;
    }
    take_manifest(r, manifest, inner, &space->manifest);
    if (r->status != FB_OK) {
        return;
    }
    if (fb_manifest_encode(&space->manifest, encoded, sizeof(encoded), &bytes, &why) != FB_OK) {
        r->status =
            fb_error_set(r->error, FB_EINVAL, "%s: \"spaces[%zu]\": %s", r->file, i, why.text);
        return;
    }
    fb_space_id(encoded, bytes, space->manifest_id);
}

/* --- the report --- */

static void take_version(struct reader *r, const json_t *root)
{
    const json_t *value = json_object_get(root, "forebay_keys");

    if (!json_is_integer(value)) {
        refuse(r, "", "forebay_keys", value, "the version of a key report, 1");
    } else if (json_integer_value(value) != FB_KEY_REPORT_VERSION) {
        r->status = fb_error_set(r->error, FB_EVERSION,
                                 "%s: \"forebay_keys\" is %" JSON_INTEGER_FORMAT
                                 "; this program knows %d: use matching versions",
                                 r->file, json_integer_value(value), FB_KEY_REPORT_VERSION);
    }
}

static void take_tokens(struct reader *r, const json_t *root, struct fb_key_report *report)
{
    const json_t *tokens = take_array(r, root, "", "tokens", SIZE_MAX, "a list of token ids");

    report->token_count = json_array_size(tokens);
    report->pages = report->token_count / (report->page_tokens ? report->page_tokens : 1);
    report->tokens = calloc(report->token_count + 1, sizeof(*report->tokens));
    for (size_t i = 0; report->tokens && i < report->token_count; i++) {
        const json_t *value = json_array_get(tokens, i);
        char name[WHERE_BYTES];

        if (!in_range(value, 0, UINT32_MAX)) {
            snprintf(name, sizeof(name), "tokens[%zu]", i);
            refuse(r, "", name, value, "a token id from 0 to 4294967295");
        }
        report->tokens[i] = (uint32_t)json_integer_value(value);
    }
}

static void take_extra(struct reader *r, const json_t *value, size_t page,
                       struct fb_key_extra *extra)
{
    size_t bytes = json_string_length(value) / 2;
    char name[WHERE_BYTES];

    snprintf(name, sizeof(name), "extras[%zu]", page);
    extra->data = malloc(bytes + 1);
    extra->bytes = bytes;
    if (!extra->data) {
        r->status = fb_error_set(r->error, FB_ENOMEM, "out of memory");
    } else if (!json_is_string(value) || bytes > FB_CHAIN_MAX_EXTRA ||
               !fb_hex_parse(json_string_value(value), extra->data, bytes)) {
        refuse(r, "", name, value, "pairs of hexadecimal digits, up to 4096, or \"\" for none");
    } else if (!(extra->parts = fb_key_extra_parts(extra->data, bytes))) {
        refuse(r, "", name, value,
               "CBOR of adapter, multimodal items, embeddings and salt, as docs/formats.md has it");
    }
}

/* Chain and extras: one of each for every whole page. */
static void take_pages(struct reader *r, const json_t *root, struct fb_key_report *report)
{
    const json_t *chain = json_object_get(root, "chain");
    const json_t *extras = json_object_get(root, "extras");
    char expected[EXPECTED_BYTES], name[WHERE_BYTES];

    snprintf(expected, sizeof(expected), "a list of %zu, one for each whole page of tokens",
             report->pages);
    if (!json_is_array(chain) || json_array_size(chain) != report->pages) {
        refuse(r, "", "chain", chain, expected);
    }
    if (!json_is_array(extras) || json_array_size(extras) != report->pages) {
        refuse(r, "", "extras", extras, expected);
    }
    report->chain = calloc(report->pages + 1, FB_CHAIN_BYTES);
    report->extras = calloc(report->pages + 1, sizeof(*report->extras));
    for (size_t i = 0; report->chain && report->extras && r->status == FB_OK && i < report->pages;
         i++) {
        snprintf(name, sizeof(name), "chain[%zu]", i);
        take_hex(r, json_array_get(chain, i), "", name, report->chain + i * FB_CHAIN_BYTES,
                 FB_CHAIN_BYTES);
        take_extra(r, json_array_get(extras, i), i, &report->extras[i]);
    }
}

static void take_report(struct reader *r, const json_t *root, struct fb_key_report *report)
{
    const json_t *request = json_object_get(root, "request");
    const json_t *spaces = json_object_get(root, "spaces");

    if (!json_is_object(root)) {
        r->status = fb_error_set(r->error, FB_EINVAL,
                                 "%s: expected a key report, an object {\"forebay_keys\": 1, ...}",
                                 r->file);
        return;
    }
    take_version(r, root);
    if (!json_is_string(request)) {
        refuse(r, "", "request", request, "a text that names the request");
    }
    report->page_tokens = (uint32_t)take_number(r, root, "", "page_tokens", 1, FB_MAX_PAGE_TOKENS);
    take_tokens(r, root, report);
    take_pages(r, root, report);
    if (!json_is_array(spaces) || json_array_size(spaces) == 0) {
        refuse(r, "", "spaces", spaces, "a list of at least one space");
    }
    report->space_count = json_array_size(spaces);
    report->spaces = calloc(report->space_count + 1, sizeof(*report->spaces));
    for (size_t i = 0; report->spaces && r->status == FB_OK && i < report->space_count; i++) {
        take_space(r, json_array_get(spaces, i), i, &report->spaces[i]);
    }
    report->request = strdup(json_is_string(request) ? json_string_value(request) : "");
    if (r->status == FB_OK && (!report->tokens || !report->chain || !report->extras ||
                               !report->spaces || !report->request)) {
        r->status = fb_error_set(r->error, FB_ENOMEM, "out of memory");
    }
}

enum fb_status fb_key_report_parse(const char *text, size_t bytes, const char *file,
                                   struct fb_key_report **ret_report, struct fb_error *error)
{
    struct reader r = {.file = file, .error = error, .status = FB_OK};
    struct fb_key_report *report;
    json_error_t json_error;
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &json_error);

    if (!root) {
        return fb_error_set(error, FB_EINVAL, "%s: not JSON: %s at line %d, column %d", file,
                            json_error.text, json_error.line, json_error.column);
    }
    report = calloc(1, sizeof(*report));
    if (report) {
        report->file = file;
        take_report(&r, root, report);
    } else {
        r.status = fb_error_set(error, FB_ENOMEM, "out of memory");
    }
    json_decref(root);
    if (r.status != FB_OK) {
        fb_key_report_destroy(report);
        return r.status;
    }
    *ret_report = report;
    return FB_OK;
}

enum fb_status fb_key_report_load(const char *path, struct fb_key_report **ret_report,
                                  struct fb_error *error)
{
    FILE *file = fopen(path, "re");
    char *text = NULL;
    size_t capacity = 0;
    enum fb_status status;
    ssize_t bytes = -1;

    /* No JSON has a NUL: this reads all of it. */
    if (file) {
        bytes = getdelim(&text, &capacity, 0, file);
    }
    if (!file || (bytes < 0 && !feof(file))) {
        status = fb_error_set(error, errno == ENOENT ? FB_ENOENT : FB_EIO,
                              "%s: %s; expected a key report to read", path, strerror(errno));
    } else {
        status = fb_key_report_parse(text ? text : "", bytes > 0 ? (size_t)bytes : 0, path,
                                     ret_report, error);
    }
    if (file) {
        fclose(file);
    }
    free(text);
    return status;
}

void fb_key_report_destroy(struct fb_key_report *report)
{
    if (!report) {
        return;
    }
    for (size_t i = 0; report->extras && i < report->pages; i++) {
        free(report->extras[i].data);
        json_decref(report->extras[i].parts);
    }
    free(report->request);
    free(report->tokens);
    free(report->chain);
    free(report->extras);
    free(report->spaces);
    free(report);
}

/* --- contradictions --- */

/* Each page is checked against the reported hash before it, so that the first wrong one shows. */
static void check_chain(const struct fb_key_report *report, json_t *texts)
{
    for (size_t i = 0; i < report->pages; i++) {
        const uint8_t *hash = report->chain + i * FB_CHAIN_BYTES;
        uint8_t expected[FB_CHAIN_BYTES];
        char hex[2 * FB_CHAIN_BYTES + 1];

        if (fb_chain(i > 0 ? hash - FB_CHAIN_BYTES : NULL, report->tokens + i * report->page_tokens,
                     report->page_tokens, report->extras[i].data, report->extras[i].bytes,
                     expected) == FB_OK &&
            memcmp(hash, expected, FB_CHAIN_BYTES) != 0) {
            fb_hex_format(expected, FB_CHAIN_BYTES, hex);
            json_array_append_new(texts, json_sprintf("chain[%zu] does not follow from the hash "
                                                      "before it, tokens and extras: these give %s",
                                                      i, hex));
            return;
        }
    }
}

json_t *fb_key_report_contradictions(const struct fb_key_report *report)
{
    json_t *texts = json_array();

    check_chain(report, texts);
    for (size_t i = 0; i < report->space_count; i++) {
        const struct fb_key_space *space = &report->spaces[i];
        char hex[2 * FB_SPACE_ID_BYTES + 1];

        if (memcmp(space->id, space->manifest_id, FB_SPACE_ID_BYTES) != 0) {
            fb_hex_format(space->manifest_id, FB_SPACE_ID_BYTES, hex);
            json_array_append_new(
                texts, json_sprintf("spaces[%zu].id is not that of its manifest, %s", i, hex));
        }
        if (space->manifest.page_tokens != report->page_tokens) {
            json_array_append_new(
                texts, json_sprintf("spaces[%zu].manifest.page_tokens is %u, page_tokens is %u", i,
                                    space->manifest.page_tokens, report->page_tokens));
        }
    }
    return texts;
}
