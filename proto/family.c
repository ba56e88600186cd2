/* Longest prefix of a family. */
#include "proto/family.h"

/* Longest prefix of at most `limit` pages that satisfies one member. Walks down: `run` is how many
 * pages directly before `end` are present. */
static uint32_t member_prefix(const struct fb_family_member *m, uint32_t limit)
{
    uint32_t prefix = limit;

    if (m->rule == FB_RULE_FULL) {
        for (prefix = 0; prefix < limit && m->present[prefix]; prefix++) {
        }
        return prefix;
    }
    while (prefix > 0) {
        uint32_t first = fb_family_first(m->rule, m->window_pages, prefix);
        uint32_t page = prefix;

        while (page > first && m->present[page - 1]) {
            page--;
        }
        if (page == first) {
            return prefix;
        }
        /* page - 1 is missing: every longer prefix that needs it fails too. */
        prefix = page - 1;
    }
    return 0;
}

uint32_t fb_family_prefix(const struct fb_family_member *members, uint32_t count, uint32_t pages)
{
    uint32_t prefix = pages;
    bool changed = count > 0;

    /* A shorter limit from one member may break another: repeat until all agree. */
    while (changed) {
        changed = false;
        for (uint32_t i = 0; i < count; i++) {
            uint32_t p = member_prefix(&members[i], prefix);

            changed |= p != prefix;
            prefix = p;
        }
    }
    return count > 0 ? prefix : 0;
}
