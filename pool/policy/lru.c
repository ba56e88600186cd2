/* "lru": least recently used by chain, deepest page first.
 *
 * One list per priority, from warm to cold; the victim is the cold end of the lowest list, unless
 * a page extends it.
 *
 * Invariant: of two entries of one list, of which one is the other's parent, the parent is the
 * warmer. So the cold end is a page that no other in its list extends. It holds because an entry
 * never moves to the warm end alone: its parent goes next, then the parent's parent, up to the
 * first that is not in the order (pinned, being written, of another class) or not there. Nothing
 * is then warmer than an entry just moved but ancestors of it, and what extends it is colder,
 * whatever the order in which a chain's pages are touched, pinned or unpinned.
 *
 * The walk costs what a touch of the chain costs. It is spared where it would change nothing:
 * when the parent is `last`, only ancestors are warmer than it, and the entry goes directly behind
 * it. So a chain that is let go in page order, or in the reverse, costs O(1) a page.
 *
 * The invariant is about links that hold. A page whose parent was inserted after it, or went and
 * came back, has no link, and its place is that of its own last use; the same goes for pages on
 * the two sides of one that is pinned. A page at the cold end may be extended by pages that are not
 * in its list. It is then in use through them, and warmed. Thread rule: that of the index. */
#include "pool/policy/policy.h"

/* A walk ends here at the latest, so that no use takes the reactor long: longer chains keep the
 * invariant only piecewise. */
#define LRU_MAX_WALK 65536u
#define LRU_MAX_SKIP 64u /* extended pages at a list's cold end that one search warms */

static bool is_candidate(const struct fb_entry *e, uint16_t class_id)
{
    return (e->flags & FB_ENTRY_LISTED) && e->class_id == class_id;
}

/* Link an entry directly behind (colder than) `warmer`, or at the warm end. */
static void list_link(struct fb_entry *entries, struct fb_lru *lru, uint32_t id, uint32_t warmer)
{
    struct fb_entry *e = &entries[id];
    struct fb_lru_list *list = &lru->lists[e->priority];
    uint32_t *from_warmer = warmer == FB_ENTRY_NONE ? &list->warm : &entries[warmer].colder;

    e->warmer = warmer;
    e->colder = *from_warmer;
    *from_warmer = id;
    *(e->colder == FB_ENTRY_NONE ? &list->cold : &entries[e->colder].warmer) = id;
}

static void list_unlink(struct fb_entry *entries, struct fb_lru *lru, uint32_t id)
{
    struct fb_entry *e = &entries[id];
    struct fb_lru_list *list = &lru->lists[e->priority];

    *(e->warmer == FB_ENTRY_NONE ? &list->warm : &entries[e->warmer].colder) = e->colder;
    *(e->colder == FB_ENTRY_NONE ? &list->cold : &entries[e->colder].warmer) = e->warmer;
}

/* Move a candidate and its ancestors, before `until`, to the warm ends of their lists. */
static void warm_chain(struct fb_entry *entries, struct fb_lru *lru, uint32_t id, uint32_t until)
{
    uint16_t class_id = entries[id].class_id;

    for (uint32_t steps = 0; steps < LRU_MAX_WALK; steps++) {
        if (id == FB_ENTRY_NONE || id == until || !is_candidate(&entries[id], class_id)) {
            return;
        }
        list_unlink(entries, lru, id);
        list_link(entries, lru, id, FB_ENTRY_NONE);
        id = fb_entry_parent(entries, id);
    }
}

static void lru_init(struct fb_order *order)
{
    for (int i = 0; i < FB_PRIORITIES; i++) {
        order->lru.lists[i] = (struct fb_lru_list){FB_ENTRY_NONE, FB_ENTRY_NONE};
    }
    order->lru.last = FB_ENTRY_NONE;
}

static void lru_insert(struct fb_entry *entries, struct fb_order *order, uint32_t id)
{
    struct fb_lru *lru = &order->lru;
    uint32_t parent = fb_entry_parent(entries, id);

    if (parent != FB_ENTRY_NONE && parent == lru->last &&
        entries[parent].priority == entries[id].priority) {
        list_link(entries, lru, id, parent);
    } else {
        list_link(entries, lru, id, FB_ENTRY_NONE);
        warm_chain(entries, lru, id, FB_ENTRY_NONE);
    }
    lru->last = id;
}

static void lru_touch(struct fb_entry *entries, struct fb_order *order, uint32_t id, uint32_t until)
{
    warm_chain(entries, &order->lru, id, until);
    order->lru.last = FB_ENTRY_NONE;
}

static void lru_remove(struct fb_entry *entries, struct fb_order *order, uint32_t id)
{
    list_unlink(entries, &order->lru, id);
    if (order->lru.last == id) {
        order->lru.last = FB_ENTRY_NONE;
    }
}

/* The coldest page of a list that none extends. Those that are met on the way go to the warm end,
 * with their chains; the search ends when it comes to the first of them again. */
static uint32_t list_victim(struct fb_entry *entries, struct fb_lru *lru,
                            const struct fb_lru_list *list)
{
    uint32_t first = list->cold;
    uint32_t id = first;

    for (uint32_t skipped = 0; skipped < LRU_MAX_SKIP; skipped++) {
        if (id == FB_ENTRY_NONE || entries[id].children == 0) {
            return id;
        }
        warm_chain(entries, lru, id, FB_ENTRY_NONE);
        lru->last = FB_ENTRY_NONE;
        id = list->cold;
        if (id == first) {
            break;
        }
    }
    return FB_ENTRY_NONE;
}

static uint32_t lru_victim(struct fb_entry *entries, struct fb_order *order)
{
    uint32_t id = FB_ENTRY_NONE;

    for (int i = 0; i < FB_PRIORITIES && id == FB_ENTRY_NONE; i++) {
        id = list_victim(entries, &order->lru, &order->lru.lists[i]);
    }
    return id;
}

static bool lru_check(const struct fb_entry *entries, const struct fb_order *order,
                      uint16_t class_id, uint32_t *ret_candidates)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < FB_PRIORITIES; i++) {
        uint32_t warmer = FB_ENTRY_NONE;
        uint32_t id = order->lru.lists[i].warm;

        for (; id != FB_ENTRY_NONE; warmer = id, id = entries[id].colder) {
            if (n++ == order->members || entries[id].warmer != warmer ||
                entries[id].priority != i || !is_candidate(&entries[id], class_id)) {
                return false;
            }
        }
        if (order->lru.lists[i].cold != warmer) {
            return false;
        }
    }
    *ret_candidates = n;
    return order->lru.last == FB_ENTRY_NONE || is_candidate(&entries[order->lru.last], class_id);
}

const struct fb_policy_ops fb_policy_lru = {
    .name = "lru",
    .init = lru_init,
    .insert = lru_insert,
    .touch = lru_touch,
    .remove = lru_remove,
    .victim = lru_victim,
    .check = lru_check,
};
