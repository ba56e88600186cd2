/* Traces: lines to requests by jansson, and the tree of prefixes. */
#include "pool/command/trace.h"

#include "pool/command/random.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MAX_INPUT_TOKENS (FB_TRACE_MAX_PAGES * FB_TRACE_PAGE_TOKENS)

struct fb_trace {
    const char *path;
    FILE *file;
    char *line;
    size_t line_capacity;
    uint64_t number; /* of the last line */
    uint64_t bytes;  /* read so far */
    uint64_t file_bytes;
};

/* --- one line --- */

struct place {
    const char *file;
    uint64_t number;
};

static enum fb_status take_count(const json_t *object, const char *name, uint64_t min, uint64_t max,
                                 const struct place *at, uint64_t *ret_value,
                                 struct fb_error *error)
{
    const json_t *value = json_object_get(object, name);
    json_int_t v = json_integer_value(value);

    if (!value) {
        return fb_error_set(error, FB_EINVAL, "%s:%" PRIu64 ": \"%s\" is missing", at->file,
                            at->number, name);
    }
    if (!json_is_integer(value) || v < 0 || (uint64_t)v < min || (uint64_t)v > max) {
        return fb_error_set(error, FB_EINVAL,
                            "%s:%" PRIu64 ": \"%s\" is wrong; expected a whole number from %" PRIu64
                            " to %" PRIu64,
                            at->file, at->number, name, min, max);
    }
    *ret_value = (uint64_t)v;
    return FB_OK;
}

static enum fb_status take_ids(const json_t *object, const struct place *at, struct fb_request *r,
                               struct fb_error *error)
{
    const json_t *ids = json_object_get(object, "hash_ids");
    uint32_t expected = (r->input_tokens + FB_TRACE_PAGE_TOKENS - 1) / FB_TRACE_PAGE_TOKENS;

    if (!json_is_array(ids)) {
        return fb_error_set(error, FB_EINVAL,
                            "%s:%" PRIu64 ": \"hash_ids\" is missing or no list; expected the ids "
                            "of the request's pages",
                            at->file, at->number);
    }
    if (json_array_size(ids) != expected) {
        return fb_error_set(error, FB_EINVAL,
                            "%s:%" PRIu64 ": \"hash_ids\" has %zu ids; expected %u, one for every "
                            "%u tokens of the %u in \"input_length\"",
                            at->file, at->number, json_array_size(ids), expected,
                            FB_TRACE_PAGE_TOKENS, r->input_tokens);
    }
    for (r->pages = 0; r->pages < expected; r->pages++) {
        const json_t *id = json_array_get(ids, r->pages);

        if (!json_is_integer(id) || json_integer_value(id) < 0) {
            return fb_error_set(error, FB_EINVAL,
                                "%s:%" PRIu64 ": id %u of \"hash_ids\" is wrong; expected a whole "
                                "number, 0 or more",
                                at->file, at->number, r->pages + 1);
        }
        r->ids[r->pages] = (uint64_t)json_integer_value(id);
    }
    return FB_OK;
}

static enum fb_status take_request(const json_t *object, const struct place *at,
                                   struct fb_request *r, struct fb_error *error)
{
    uint64_t input = 0;
    uint64_t output = 0;
    enum fb_status status;

    if (!json_is_object(object)) {
        return fb_error_set(error, FB_EINVAL, "%s:%" PRIu64 ": expected an object, {...}, per line",
                            at->file, at->number);
    }
    status = take_count(object, "timestamp", 0, INT64_MAX, at, &r->timestamp_ms, error);
    if (status == FB_OK) {
        status = take_count(object, "input_length", 1, MAX_INPUT_TOKENS, at, &input, error);
    }
    if (status == FB_OK) {
        status = take_count(object, "output_length", 0, UINT32_MAX, at, &output, error);
    }
    if (status != FB_OK) {
        return status;
    }
    r->input_tokens = (uint32_t)input;
    r->output_tokens = (uint32_t)output;
    return take_ids(object, at, r, error);
}

enum fb_status fb_request_parse(const char *line, size_t bytes, const char *file, uint64_t number,
                                struct fb_request *ret_request, struct fb_error *error)
{
    const struct place at = {file, number};
    json_error_t json_error;
    json_t *object = json_loadb(line, bytes, JSON_REJECT_DUPLICATES, &json_error);
    enum fb_status status;

    if (!object) {
        return fb_error_set(error, FB_EINVAL, "%s:%" PRIu64 ": not JSON: %s at column %d", file,
                            number, json_error.text, json_error.column);
    }
    status = take_request(object, &at, ret_request, error);
    json_decref(object);
    return status;
}

/* --- the file --- */

enum fb_status fb_trace_open(const char *path, struct fb_trace **ret_trace, struct fb_error *error)
{
    struct fb_trace *trace = calloc(1, sizeof(*trace));
    struct stat st;

    if (!trace) {
        return fb_error_set(error, FB_ENOMEM, "out of memory");
    }
    trace->path = path;
    trace->file = fopen(path, "re");
    if (!trace->file || fstat(fileno(trace->file), &st) < 0) {
        enum fb_status status = errno == ENOENT ? FB_ENOENT : FB_EIO;

        fb_error_set(error, status, "%s: %s; expected a trace to read", path, strerror(errno));
        fb_trace_close(trace);
        return status;
    }
    trace->file_bytes = (uint64_t)st.st_size;
    *ret_trace = trace;
    return FB_OK;
}

void fb_trace_close(struct fb_trace *trace)
{
    if (trace) {
        if (trace->file) {
            fclose(trace->file);
        }
        free(trace->line);
        free(trace);
    }
}

enum fb_status fb_trace_next(struct fb_trace *trace, struct fb_request *ret_request,
                             struct fb_error *error)
{
    ssize_t bytes;

    do {
        bytes = getline(&trace->line, &trace->line_capacity, trace->file);
        if (bytes < 0) {
            return feof(trace->file)
                       ? FB_MISS
                       : fb_error_set(error, FB_EIO, "%s: %s", trace->path, strerror(errno));
        }
        trace->number++;
        trace->bytes += (uint64_t)bytes;
    } while (strspn(trace->line, " \t\r\n") == (size_t)bytes);
    return fb_request_parse(trace->line, (size_t)bytes, trace->path, trace->number, ret_request,
                            error);
}

double fb_trace_progress(const struct fb_trace *trace)
{
    return trace->file_bytes ? (double)trace->bytes / (double)trace->file_bytes : 0;
}

/* --- prefixes --- */

#define PREFIX_ROOT   0u
#define PREFIX_SLOTS0 4096u

/* An edge of the tree; `child` 0 is an empty slot, since the root is nobody's child. */
struct prefix_edge {
    uint64_t id;
    uint32_t parent;
    uint32_t child;
};

struct fb_prefix_set {
    struct prefix_edge *edges; /* open addressing, at most half full */
    uint32_t slots;            /* a power of two */
    uint32_t nodes;            /* without the root */
};

enum fb_status fb_prefix_set_create(struct fb_prefix_set **ret_set)
{
    struct fb_prefix_set *set = calloc(1, sizeof(*set));

    if (!set) {
        return FB_ENOMEM;
    }
    set->slots = PREFIX_SLOTS0;
    set->edges = calloc(set->slots, sizeof(*set->edges));
    if (!set->edges) {
        free(set);
        return FB_ENOMEM;
    }
    *ret_set = set;
    return FB_OK;
}

void fb_prefix_set_destroy(struct fb_prefix_set *set)
{
    if (set) {
        free(set->edges);
        free(set);
    }
}

/* The edge of a page after a node, or the empty slot where it belongs. */
static struct prefix_edge *find_edge(const struct fb_prefix_set *set, uint32_t parent, uint64_t id)
{
    uint32_t i = (uint32_t)fb_mix64(id ^ fb_mix64(parent));

    for (;; i++) {
        struct prefix_edge *edge = &set->edges[i & (set->slots - 1)];

        if (edge->child == 0 || (edge->parent == parent && edge->id == id)) {
            return edge;
        }
    }
}

static enum fb_status grow(struct fb_prefix_set *set)
{
    struct fb_prefix_set larger = {.slots = set->slots * 2, .nodes = set->nodes};

    larger.edges = larger.slots ? calloc(larger.slots, sizeof(*larger.edges)) : NULL;
    if (!larger.edges) {
        return FB_ENOMEM;
    }
    for (uint32_t i = 0; i < set->slots; i++) {
        if (set->edges[i].child != 0) {
            *find_edge(&larger, set->edges[i].parent, set->edges[i].id) = set->edges[i];
        }
    }
    free(set->edges);
    *set = larger;
    return FB_OK;
}

enum fb_status fb_prefix_set_add(struct fb_prefix_set *set, const uint64_t *ids, uint32_t pages,
                                 uint32_t *ret_hit)
{
    uint32_t node = PREFIX_ROOT;
    uint32_t hit = 0;

    for (uint32_t i = 0; i < pages; i++) {
        struct prefix_edge *edge;

        if (set->nodes >= set->slots / 2 && grow(set) != FB_OK) {
            return FB_ENOMEM;
        }
        edge = find_edge(set, node, ids[i]);
        if (edge->child == 0) {
            *edge = (struct prefix_edge){.id = ids[i], .parent = node, .child = ++set->nodes};
        } else {
            hit++; /* below a new node every edge is new, so hits lead */
        }
        node = edge->child;
    }
    *ret_hit = hit;
    return FB_OK;
}
