/* Tier: where blocks live. One ops table, worn by every tier and by the fault decorator.
 *
 * A slot class is what slots must share to be exchanged for each other: tenant and slot size. All
 * calls come from the reactor; a completion runs on it too, possibly before the call returns. */
#ifndef FB_NODE_TIER_H
#define FB_NODE_TIER_H

#include "pool/policy/index.h"
#include "proto/block.h"

struct fb_tier;

struct fb_tier_class {
    uint16_t id;
    uint16_t tenant; /* index among the node's tenants */
    uint64_t slot_bytes;
};

struct fb_tier_stats {
    uint64_t capacity_bytes;
    uint64_t used_bytes; /* of memory or disk taken, free slots included */
    uint32_t slots_used;
    uint32_t slots_free;
};

typedef void (*fb_tier_done)(void *arg, enum fb_status status);

struct fb_tier_ops {
    const char *name;

    /* Take a free slot of a class.
     * returns FB_OK | FB_AGAIN (space is being made: the tier's owner is woken) | FB_ELIMIT
     * (nothing free and no room to grow: evict) | FB_EGEOMETRY | FB_EIO */
    enum fb_status (*reserve)(struct fb_tier *tier, const struct fb_tier_class *class,
                              struct fb_location *ret_where);

    /* Make the block in a reserved slot last: its header is complete. done is called once. */
    void (*commit)(struct fb_tier *tier, struct fb_location where, fb_tier_done done, void *arg);

    /* Read a committed block whole. into: [block_bytes], pinned until done. done is called once,
     * FB_EIO when the bytes could not be had. */
    void (*read)(struct fb_tier *tier, struct fb_location where, void *into, uint64_t bytes,
                 fb_tier_done done, void *arg);

    /* Give a slot back, in any state. */
    void (*free)(struct fb_tier *tier, struct fb_location where);

    void (*stats)(const struct fb_tier *tier, struct fb_tier_stats *ret_stats);

    /* Optional: the slot's bytes where the tier is memory; NULL for a stale location. */
    void *(*map)(struct fb_tier *tier, struct fb_location where);

    /* Optional: time passed. */
    void (*tick)(struct fb_tier *tier, uint64_t now_ns);

    void (*destroy)(struct fb_tier *tier);
};

struct fb_tier {
    const struct fb_tier_ops *ops;
};

/* Fault decorator: fails or delays what passes through, as one in n calls (0: never). */
struct fb_tier_faults {
    uint64_t seed;
    uint32_t fail_reserve;
    uint32_t fail_commit;
    uint32_t fail_read;
    uint32_t delay; /* commits and reads complete only in a later tick */
    uint64_t delay_ns;
};

/* Takes `inner`, which the decorator destroys. */
enum fb_status fb_tier_fault(struct fb_tier *inner, const struct fb_tier_faults *faults,
                             struct fb_tier **ret_tier);

#endif
