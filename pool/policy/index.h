/* Index of a node's blocks and the order in which they are given up.
 *
 * One entry a block, at most 64 bytes all in: 16 bytes of the pool key, where the block is, which
 * page it extends and how many extend it, its place in its class's eviction order. Entries are
 * named by 32-bit ids that stay valid until fb_index_remove. An id is used again once no entry
 * names it as its parent any more. Buckets grow one at a time (linear hashing), so
 * that no insertion pauses. Virtual memory for max_entries is reserved at creation and touched as
 * entries come.
 *
 * The reader of a block checks all 32 bytes of its key: a collision of 16 is a miss there.
 * Not thread-safe: the reactor is the only user. No I/O, no clock: time is an argument. */
#ifndef FB_POLICY_INDEX_H
#define FB_POLICY_INDEX_H

#include "proto/status.h"

#include <stddef.h>

#define FB_INDEX_KEY_BYTES 16
#define FB_ENTRY_NONE      UINT32_MAX

struct fb_index;

/* Where a block is in its tier. */
struct fb_location {
    uint32_t chunk;
    uint32_t slot;
};

enum fb_entry_flag {
    FB_ENTRY_DETACHED = 1u << 0, /* not found by lookups any more; memory still in use */
    FB_ENTRY_WRITING = 1u << 1,  /* reserved, not committed: not found by lookups */
    FB_ENTRY_PINNED = 1u << 2,   /* by a hint: never a victim */
};

enum fb_priority {
    FB_PRIORITY_LOW = 0,
    FB_PRIORITY_NORMAL = 1,
    FB_PRIORITY_HIGH = 2,
};
#define FB_PRIORITIES 3

/* max_entries  capacity; the virtual reservation is 108 bytes each: twice the ids, for those that
 *              removed parents keep
 * returns      FB_OK | FB_EINVAL | FB_ENOMEM */
enum fb_status fb_index_create(uint32_t max_entries, struct fb_index **ret_index,
                               struct fb_error *error);
void fb_index_destroy(struct fb_index *index);

uint32_t fb_index_count(const struct fb_index *index);

/* One more than the largest id ever used: for arrays by id. */
uint32_t fb_index_id_limit(const struct fb_index *index);

/* Bytes of the pages that entries and buckets have touched: they stay when entries go. */
uint64_t fb_index_bytes(const struct fb_index *index);

/* Look up n keys: ret_ids[i] is an entry that lookups may see (committed and not detached) or
 * FB_ENTRY_NONE. Memory accesses of a list overlap. Touches nothing.
 * keys  n keys, `stride` bytes apart, of which the first 16 bytes count */
void fb_index_find(const struct fb_index *index, const uint8_t *keys, size_t stride, uint32_t n,
                   uint32_t *ret_ids);

/* One key, entries being written included. */
uint32_t fb_index_find_any(const struct fb_index *index, const uint8_t key[FB_INDEX_KEY_BYTES]);

/* Add an entry in state FB_ENTRY_WRITING, pinned once (refs = 1), in no eviction order. The key
 * must not be present. Its priority is normal, or its parent's if that is lower.
 * parent   entry of the page before, or FB_ENTRY_NONE. FB_ENTRY_NONE also where a page's use is
 *          not that of the pages before it (window, state): those behind the window then go first
 * class_id eviction order it will belong to (fb_index_class_add)
 * returns  FB_OK | FB_ENOMEM (max_entries are live; nothing has changed) */
enum fb_status fb_index_insert(struct fb_index *index, const uint8_t key[FB_INDEX_KEY_BYTES],
                               uint32_t parent, uint16_t class_id, uint16_t space,
                               struct fb_location where, uint32_t *ret_id);

/* The entry's block is whole: lookups see it. */
void fb_index_publish(struct fb_index *index, uint32_t id);

/* Make an entry invisible to lookups and no victim, at once: its key may be inserted anew, and it
 * extends its parent no more. Memory and id stay its own; the caller removes it when its last pin
 * has gone. */
void fb_index_detach(struct fb_index *index, uint32_t id);

/* Forget an entry, detached or not. Its refs must be 0. */
void fb_index_remove(struct fb_index *index, uint32_t id);

/* Pins keep an entry from being a victim. An entry whose last pin goes comes into its class's
 * order as if just used, and its ancestors there with it, so that a page is never given up before
 * one that extends it, in whatever order a chain is unpinned. Page order, or its reverse, costs
 * O(1) a page; others may cost up to the length of the chain.
 * fb_index_unpin returns the pins left. */
void fb_index_pin(struct fb_index *index, uint32_t id);
uint32_t fb_index_unpin(struct fb_index *index, uint32_t id);

/* The entries were used, as one chain in page order: the first page ends up warmest, behind only
 * the pages before it, where it has a parent. Pinned entries are skipped. */
void fb_index_touch(struct fb_index *index, const uint32_t *ids, uint32_t n);

/* Hints. Raising the priority of an entry raises its ancestors too; lowering it lowers that entry
 * alone, so a chain is lowered from its deepest page. A change counts as a use.
 * fb_index_set_pinned: this entry alone. */
void fb_index_set_priority(struct fb_index *index, uint32_t id, enum fb_priority priority);
void fb_index_set_pinned(struct fb_index *index, uint32_t id, bool pinned);

/* An eviction order. Policies are looked up by name in pool/policy/policy.h.
 * returns FB_OK | FB_EINVAL (unknown policy) | FB_ENOMEM */
enum fb_status fb_index_class_add(struct fb_index *index, const char *policy, uint16_t *ret_class,
                                  struct fb_error *error);
void fb_index_class_remove(struct fb_index *index, uint16_t class_id); /* must be empty */

/* Coldest entry of a class that may go, or FB_ENTRY_NONE; does not remove it. Never one that
 * another extends: an entry at the cold end whose children are pinned, being written or of another
 * class or priority is in use through them, and made warm. A search passes 64 such entries per
 * priority; where there are more it returns FB_ENTRY_NONE, and the next goes on behind them. */
uint32_t fb_index_victim(struct fb_index *index, uint16_t class_id);

/* Entry fields. Ids must be live. */
const uint8_t *fb_index_key(const struct fb_index *index, uint32_t id);
struct fb_location fb_index_location(const struct fb_index *index, uint32_t id);
uint16_t fb_index_space(const struct fb_index *index, uint32_t id);
uint16_t fb_index_class(const struct fb_index *index, uint32_t id);
/* NONE once the parent is removed or this entry detached. */
uint32_t fb_index_parent(const struct fb_index *index, uint32_t id);
/* Entries, not detached, that name this one as their parent. */
uint32_t fb_index_children(const struct fb_index *index, uint32_t id);
uint32_t fb_index_refs(const struct fb_index *index, uint32_t id);
uint32_t fb_index_flags(const struct fb_index *index, uint32_t id); /* of enum fb_entry_flag */
enum fb_priority fb_index_priority(const struct fb_index *index, uint32_t id);

/* Whether lists, buckets and counts agree; for tests and FB_CHECK_SLOW. O(entries). */
bool fb_index_check(const struct fb_index *index);

#endif
