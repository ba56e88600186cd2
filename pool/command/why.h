/* Why two sides do not share a block: the ingredients of their keys side by side. */
#ifndef FB_COMMAND_WHY_H
#define FB_COMMAND_WHY_H

#include "pool/command/key_report.h"

/* Compare two requests as their engines reported them.
 * returns  the object that docs/commands.md, "why", describes; for json_decref */
json_t *fb_why_reports(const struct fb_key_report *a, const struct fb_key_report *b);

/* The same of two manifests; "a" and "b" are for the caller to add. */
json_t *fb_why_manifests(const struct fb_manifest *a, const struct fb_manifest *b);

#endif
