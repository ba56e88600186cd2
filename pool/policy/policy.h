/* Eviction policies: one ops table each, found by name, chosen once per class.
 *
 * The index decides which entries are candidates (whole, not pinned, not detached) and says so by
 * insert and remove (FB_ENTRY_LISTED is set in between); the policy keeps them in an order by
 * `warmer` and `colder` of the entry, and names the next to go. An entry's priority changes only
 * while it is out of the order. All entries of the table are required. Policies
 * allocate nothing. Internal to pool/policy. */
#ifndef FB_POLICY_POLICY_H
#define FB_POLICY_POLICY_H

#include "pool/policy/entry.h"

/* pool/policy/lru.c */
struct fb_lru {
    struct fb_lru_list {
        uint32_t warm;
        uint32_t cold;
    } lists[FB_PRIORITIES];
    uint32_t last; /* the entry inserted last, where no other has been moved since */
};

/* The order of one class. */
struct fb_order {
    const struct fb_policy_ops *ops; /* NULL: the class id is free */
    uint32_t members;                /* entries of the class, candidates or not */
    union {
        struct fb_lru lru;
    };
};

struct fb_policy_ops {
    const char *name;

    void (*init)(struct fb_order *order);

    /* The entry becomes a candidate: it was just used. */
    void (*insert)(struct fb_entry *entries, struct fb_order *order, uint32_t id);

    /* A candidate was used. Of a chain the deepest page comes first.
     * until  the page that the caller goes on with, or FB_ENTRY_NONE */
    void (*touch)(struct fb_entry *entries, struct fb_order *order, uint32_t id, uint32_t until);

    /* The entry is no candidate any more. */
    void (*remove)(struct fb_entry *entries, struct fb_order *order, uint32_t id);

    /* The next to go, never one with children; or FB_ENTRY_NONE. */
    uint32_t (*victim)(struct fb_entry *entries, struct fb_order *order);

    /* Whether the order is sound and holds only its class's candidates, and how many. */
    bool (*check)(const struct fb_entry *entries, const struct fb_order *order, uint16_t class_id,
                  uint32_t *ret_candidates);
};

extern const struct fb_policy_ops fb_policy_lru;

/* The policy of that name, or NULL. */
const struct fb_policy_ops *fb_policy_find(const char *name);

/* The i-th policy's name, or NULL behind the last. */
const char *fb_policy_name(uint32_t i);

#endif
