/* Request traces as published with Mooncake: JSON lines
 *
 *   {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [page, ...]}
 *
 * A hash id names one page of FB_TRACE_PAGE_TOKENS tokens together with all before it; the last
 * page of a request counts whole. A line that says anything else is refused with its place and
 * what was expected. fb_prefix_set counts what a pool that never forgets would have hit.
 *
 * One thread at a time. */
#ifndef FB_COMMAND_TRACE_H
#define FB_COMMAND_TRACE_H

#include "proto/status.h"

#include <stddef.h>

#define FB_TRACE_PAGE_TOKENS 512u
#define FB_TRACE_MAX_PAGES   4096u /* of one request: what one lookup takes */

struct fb_request {
    uint64_t timestamp_ms;
    uint32_t input_tokens;
    uint32_t output_tokens;
    uint32_t pages;
    uint64_t ids[FB_TRACE_MAX_PAGES];
};

/* Parse one line.
 * file, number  its place, for messages
 * returns       FB_OK | FB_EINVAL */
enum fb_status fb_request_parse(const char *line, size_t bytes, const char *file, uint64_t number,
                                struct fb_request *ret_request, struct fb_error *error);

struct fb_trace;

/* path  borrowed until the trace is closed
 * returns FB_OK | FB_ENOENT, FB_EIO (in words) | FB_ENOMEM */
enum fb_status fb_trace_open(const char *path, struct fb_trace **ret_trace, struct fb_error *error);
void fb_trace_close(struct fb_trace *trace); /* NULL is allowed */

/* Read the next request; empty lines are skipped.
 * returns FB_OK | FB_MISS at the end | FB_EINVAL | FB_EIO */
enum fb_status fb_trace_next(struct fb_trace *trace, struct fb_request *ret_request,
                             struct fb_error *error);

/* Share of the file that has been read, 0 to 1. */
double fb_trace_progress(const struct fb_trace *trace);

/* The prefixes seen so far, exactly: a tree of pages whose edges are kept in a hash table. */
struct fb_prefix_set;

enum fb_status fb_prefix_set_create(struct fb_prefix_set **ret_set);
void fb_prefix_set_destroy(struct fb_prefix_set *set); /* NULL is allowed */

/* Count the leading pages that were there before, then add all.
 * returns FB_OK | FB_ENOMEM (some may have been added) */
enum fb_status fb_prefix_set_add(struct fb_prefix_set *set, const uint64_t *ids, uint32_t pages,
                                 uint32_t *ret_hit);

#endif
