/* The entry, as the index and its policies share it. Internal to pool/policy.
 *
 * Entries are one array; an id is a place in it. A parent link is an id: `children` of an entry is
 * how many links name it, and an entry that has gone keeps its id from being used again until none
 * does. So a link names the parent it was made with or nothing, and links make no circle. Free ids
 * are threaded by `next`. Thread rule: that of the index. */
#ifndef FB_POLICY_ENTRY_H
#define FB_POLICY_ENTRY_H

#include "pool/policy/index.h"

/* Flags that the index keeps to itself, after those of enum fb_entry_flag. */
enum fb_entry_flag_internal {
    FB_ENTRY_GONE = 1u << 3,   /* removed; on the free list if no child names it */
    FB_ENTRY_LISTED = 1u << 4, /* in its class's order */
};
#define FB_ENTRY_FLAGS_PUBLIC (FB_ENTRY_DETACHED | FB_ENTRY_WRITING | FB_ENTRY_PINNED)
#define FB_ENTRY_MAX_REFS     ((1u << 24) - 1)

/*   0 key | 16 next | 20 refs, flags, priority       all that a lookup reads
 *  24 parent | 28 children | 32 warmer | 36 colder | 40 where | 48 space | 50 class */
struct fb_entry {
    uint8_t key[FB_INDEX_KEY_BYTES];
    uint32_t next; /* in its bucket's chain or in the free list */
    uint32_t refs : 24;
    uint32_t flags : 6;
    uint32_t priority : 2;
    uint32_t parent;   /* FB_ENTRY_NONE once this entry is detached */
    uint32_t children; /* entries whose parent this is */
    uint32_t warmer;   /* neighbours in the order */
    uint32_t colder;
    struct fb_location where;
    uint16_t space;
    uint16_t class_id;
};
_Static_assert(sizeof(struct fb_entry) == 52, "entry size");
#define FB_ENTRY_LOOKUP_BYTES 24

/* The entry of the page before, while it is there. */
static inline uint32_t fb_entry_parent(const struct fb_entry *entries, uint32_t id)
{
    uint32_t parent = entries[id].parent;

    return parent != FB_ENTRY_NONE && !(entries[parent].flags & FB_ENTRY_GONE) ? parent
                                                                               : FB_ENTRY_NONE;
}

#endif
