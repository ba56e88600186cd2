/* Families: the longest prefix that satisfies the rules of all spaces a request needs.
 *
 * A hit of p pages needs, in a space of rule
 *   full       pages [0, p)
 *   window(w)  the pages that cover the trailing w tokens: [max(0, p - ceil(w / page_tokens)), p)
 *   state      page p - 1
 * Pure functions. source: docs/formats.md, "Families" */
#ifndef FB_PROTO_FAMILY_H
#define FB_PROTO_FAMILY_H

#include "proto/manifest.h"

#ifdef __cplusplus
extern "C" {
#endif

#define FB_MAX_FAMILY 16 /* spaces of one family */

struct fb_family_member {
    enum fb_rule rule;
    uint32_t window_pages;  /* FB_RULE_WINDOW: ceil(window_tokens / page_tokens) */
    const uint8_t *present; /* [pages] 1 where the space has the page */
};

static inline uint32_t fb_window_pages(const struct fb_manifest *m)
{
    return m->rule == FB_RULE_WINDOW
               ? (uint32_t)(((uint64_t)m->window_tokens + m->page_tokens - 1) / m->page_tokens)
               : 0;
}

/* First page that a hit of `prefix` pages needs in that space; it needs all from there on. */
static inline uint32_t fb_family_first(enum fb_rule rule, uint32_t window_pages, uint32_t prefix)
{
    uint32_t needed = rule == FB_RULE_FULL ? prefix : rule == FB_RULE_WINDOW ? window_pages : 1;

    return needed < prefix ? prefix - needed : 0;
}

/* Longest prefix in pages, at most `pages`, that satisfies every member. */
uint32_t fb_family_prefix(const struct fb_family_member *members, uint32_t count, uint32_t pages);

#ifdef __cplusplus
}
#endif
#endif
