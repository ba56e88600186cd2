/* A key report: what an engine's connector made the keys of one request from, as one JSON object.
 * docs/commands.md, "why", lists its fields.
 *
 * A report is refused when a field is missing, malformed or out of range. One that is well formed
 * may still contradict itself, since its hashes and ids were computed by whoever wrote it. */
#ifndef FB_COMMAND_KEY_REPORT_H
#define FB_COMMAND_KEY_REPORT_H

#include "proto/chain.h"
#include "proto/manifest.h"

#include <jansson.h>
#include <stddef.h>

#define FB_KEY_REPORT_VERSION 1

/* What a page depends on besides tokens. */
struct fb_key_extra {
    uint8_t *data; /* [bytes] as it goes into the hash */
    size_t bytes;
    json_t *parts; /* by fb_key_extra_parts */
};

struct fb_key_space {
    uint8_t id[FB_SPACE_ID_BYTES];          /* as reported */
    uint8_t manifest_id[FB_SPACE_ID_BYTES]; /* that of the manifest */
    struct fb_manifest manifest;
};

struct fb_key_report {
    const char *file;
    char *request;
    uint32_t page_tokens;
    size_t token_count;
    uint32_t *tokens;            /* [token_count] */
    size_t pages;                /* whole ones */
    uint8_t *chain;              /* [pages, FB_CHAIN_BYTES], as reported */
    struct fb_key_extra *extras; /* [pages] */
    size_t space_count;
    struct fb_key_space *spaces; /* [space_count] */
};

/* file     its name, for messages; borrowed until the report is destroyed
 * returns  FB_OK | FB_EINVAL, FB_EVERSION (in words) | FB_ENOMEM */
enum fb_status fb_key_report_parse(const char *text, size_t bytes, const char *file,
                                   struct fb_key_report **ret_report, struct fb_error *error);

/* The same of a file; besides that
 * returns  FB_ENOENT, FB_EIO (in words) */
enum fb_status fb_key_report_load(const char *path, struct fb_key_report **ret_report,
                                  struct fb_error *error);

void fb_key_report_destroy(struct fb_key_report *report); /* NULL is allowed */

/* Where a report contradicts itself: an array of texts, for json_decref. Of the chain the first
 * page only. */
json_t *fb_key_report_contradictions(const struct fb_key_report *report);

#endif
