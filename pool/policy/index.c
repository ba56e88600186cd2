/* The block index: an array of entries, a hash table over them by linear hashing, a free list.
 *
 * Buckets are heads of chains that go through the entries. There are as many buckets as there have
 * ever been entries: each insertion that would have made it more splits the next bucket in two, so
 * chains are about one entry long and no insertion rehashes the table. Keys are digests; their
 * first 8 bytes are the hash.
 *
 * Invariants: an entry is live, or gone and on the free list, or gone and named by children, which
 * are live. (So there are at most as many of those as live ones.) A live entry is in exactly one
 * bucket's chain, unless it is detached. It is in its class's order if and only if nothing holds
 * it: settle sees to that after every change of pins or flags, and is the only caller of the
 * policy's insert. Thread rule: the reactor only. */
#include "pool/policy/index.h"

#include "pool/policy/policy.h"
#include "proto/assert.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define FIND_GROUP 32u /* lookups whose memory accesses overlap */

struct fb_index {
    struct fb_entry *entries; /* [used] of a reservation of max_ids */
    uint32_t *buckets;        /* [bucket_count] of a reservation of max_entries */
    struct fb_order *orders;  /* [order_count], by class id */
    uint32_t order_count;
    uint32_t max_entries;
    uint32_t max_ids;
    uint32_t used;  /* ids ever used; entries beyond were never touched */
    uint32_t count; /* live */
    uint32_t free_head;
    uint32_t bucket_count;
    uint32_t half; /* largest power of two that is at most bucket_count */
};

static void *reserve(uint64_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);

    if (p == MAP_FAILED) {
        return NULL;
    }
    madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}

enum fb_status fb_index_create(uint32_t max_entries, struct fb_index **ret_index,
                               struct fb_error *error)
{
    uint32_t max_ids = max_entries < FB_ENTRY_NONE / 2 ? 2 * max_entries : FB_ENTRY_NONE;
    struct fb_index *index;

    if (max_entries == 0 || max_entries == FB_ENTRY_NONE) {
        return fb_error_set(error, FB_EINVAL,
                            "an index of %u entries; expected 1 to %u: check the tier's size",
                            max_entries, FB_ENTRY_NONE - 1);
    }
    index = calloc(1, sizeof(*index));
    if (!index) {
        goto err;
    }
    index->entries = reserve((uint64_t)max_ids * sizeof(*index->entries));
    if (!index->entries) {
        goto err_free;
    }
    index->buckets = reserve((uint64_t)max_entries * sizeof(*index->buckets));
    if (!index->buckets) {
        goto err_entries;
    }
    index->max_entries = max_entries;
    index->max_ids = max_ids;
    index->free_head = FB_ENTRY_NONE;
    index->bucket_count = 1;
    index->half = 1;
    index->buckets[0] = FB_ENTRY_NONE;
    *ret_index = index;
    return FB_OK;

err_entries:
    munmap(index->entries, (uint64_t)max_ids * sizeof(*index->entries));
err_free:
    free(index);
err:
    return fb_error_set(error, FB_ENOMEM,
                        "cannot reserve address space for an index of %u entries: raise the limit "
                        "on virtual memory (ulimit -v) or make the tier smaller",
                        max_entries);
}

void fb_index_destroy(struct fb_index *index)
{
    if (!index) {
        return;
    }
    munmap(index->buckets, (uint64_t)index->max_entries * sizeof(*index->buckets));
    munmap(index->entries, (uint64_t)index->max_ids * sizeof(*index->entries));
    free(index->orders);
    free(index);
}

uint32_t fb_index_count(const struct fb_index *index)
{
    return index->count;
}

uint32_t fb_index_id_limit(const struct fb_index *index)
{
    return index->used;
}

uint64_t fb_index_bytes(const struct fb_index *index)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t entries = (uint64_t)index->used * sizeof(*index->entries);
    uint64_t buckets = (uint64_t)index->bucket_count * sizeof(*index->buckets);

    return (entries + page - 1) / page * page + (buckets + page - 1) / page * page;
}

/* --- hash table --- */

static uint64_t hash_of(const uint8_t *key)
{
    uint64_t h;

    memcpy(&h, key, sizeof(h));
    return h;
}

/* Buckets below half that have been split, and those split off, use one bit more. */
static uint32_t bucket_of(const struct fb_index *index, const uint8_t *key)
{
    uint64_t h = hash_of(key);
    uint64_t b = h & (2 * (uint64_t)index->half - 1);

    return (uint32_t)(b < index->bucket_count ? b : h & (index->half - 1));
}

/* Split the next bucket: those of its entries whose next hash bit is set move to a new one. */
static void bucket_split(struct fb_index *index)
{
    uint32_t *keep = &index->buckets[index->bucket_count - index->half];
    uint32_t *move = &index->buckets[index->bucket_count];
    uint32_t id = *keep;

    while (id != FB_ENTRY_NONE) {
        struct fb_entry *e = &index->entries[id];
        uint32_t **tail = hash_of(e->key) & index->half ? &move : &keep;

        **tail = id;
        *tail = &e->next;
        id = e->next;
    }
    *keep = FB_ENTRY_NONE;
    *move = FB_ENTRY_NONE;
    index->bucket_count++;
    if (index->bucket_count / 2 == index->half) {
        index->half *= 2;
    }
}

static void bucket_unlink(struct fb_index *index, uint32_t id)
{
    uint32_t *at = &index->buckets[bucket_of(index, index->entries[id].key)];

    while (*at != id) {
        FB_ASSERT(*at != FB_ENTRY_NONE);
        at = &index->entries[*at].next;
    }
    *at = index->entries[id].next;
}

static bool key_equal(const struct fb_entry *e, const uint8_t *key)
{
    return memcmp(e->key, key, FB_INDEX_KEY_BYTES) == 0;
}

static void prefetch_entry(const struct fb_entry *e)
{
    __builtin_prefetch(e);
    __builtin_prefetch((const char *)e + FB_ENTRY_LOOKUP_BYTES - 1);
}

/* Up to FIND_GROUP lookups. Each round takes every open lookup one entry further down its chain,
 * so that the misses of a round overlap. */
static void find_group(const struct fb_index *index, const uint8_t *keys, size_t stride, uint32_t n,
                       uint32_t *ret_ids)
{
    uint32_t at[FIND_GROUP];
    uint32_t open[FIND_GROUP];
    uint32_t open_count = 0;

    for (uint32_t i = 0; i < n; i++) {
        at[i] = bucket_of(index, keys + i * stride);
        __builtin_prefetch(&index->buckets[at[i]]);
    }
    for (uint32_t i = 0; i < n; i++) {
        at[i] = index->buckets[at[i]];
        ret_ids[i] = FB_ENTRY_NONE;
        if (at[i] != FB_ENTRY_NONE) {
            prefetch_entry(&index->entries[at[i]]);
            open[open_count++] = i;
        }
    }
    while (open_count > 0) {
        uint32_t left = 0;

        for (uint32_t j = 0; j < open_count; j++) {
            uint32_t i = open[j];
            const struct fb_entry *e = &index->entries[at[i]];

            if (key_equal(e, keys + i * stride)) {
                ret_ids[i] = e->flags & FB_ENTRY_WRITING ? FB_ENTRY_NONE : at[i];
            } else if (e->next != FB_ENTRY_NONE) {
                at[i] = e->next;
                prefetch_entry(&index->entries[e->next]);
                open[left++] = i;
            }
        }
        open_count = left;
    }
}

void fb_index_find(const struct fb_index *index, const uint8_t *keys, size_t stride, uint32_t n,
                   uint32_t *ret_ids)
{
    for (uint32_t i = 0; i < n; i += FIND_GROUP) {
        find_group(index, keys + i * stride, stride, n - i < FIND_GROUP ? n - i : FIND_GROUP,
                   ret_ids + i);
    }
}

uint32_t fb_index_find_any(const struct fb_index *index, const uint8_t key[FB_INDEX_KEY_BYTES])
{
    uint32_t id = index->buckets[bucket_of(index, key)];

    while (id != FB_ENTRY_NONE && !key_equal(&index->entries[id], key)) {
        id = index->entries[id].next;
    }
    return id;
}

/* --- entries --- */

static struct fb_entry *live(const struct fb_index *index, uint32_t id)
{
    FB_ASSERT(id < index->used && !(index->entries[id].flags & FB_ENTRY_GONE));
    return &index->entries[id];
}

static struct fb_order *order_of(const struct fb_index *index, uint16_t class_id)
{
    FB_ASSERT(class_id < index->order_count && index->orders[class_id].ops);
    return &index->orders[class_id];
}

static bool is_held(const struct fb_entry *e)
{
    return e->refs > 0 || (e->flags & FB_ENTRY_FLAGS_PUBLIC);
}

static void take_from_order(struct fb_index *index, uint32_t id)
{
    struct fb_entry *e = &index->entries[id];

    if (e->flags & FB_ENTRY_LISTED) {
        struct fb_order *order = order_of(index, e->class_id);

        order->ops->remove(index->entries, order, id);
        e->flags &= ~FB_ENTRY_LISTED;
    }
}

/* Put an entry into its order, or take it out, as its pins and flags now say. */
static void settle(struct fb_index *index, uint32_t id)
{
    struct fb_entry *e = &index->entries[id];

    if (is_held(e)) {
        take_from_order(index, id);
    } else if (!(e->flags & FB_ENTRY_LISTED)) {
        struct fb_order *order = order_of(index, e->class_id);

        e->flags |= FB_ENTRY_LISTED;
        order->ops->insert(index->entries, order, id);
    }
}

static bool has_room(const struct fb_index *index)
{
    return index->count < index->max_entries &&
           (index->free_head != FB_ENTRY_NONE || index->used < index->max_ids);
}

static uint32_t take_id(struct fb_index *index)
{
    uint32_t id = index->free_head;

    if (id == FB_ENTRY_NONE) {
        return index->used++;
    }
    index->free_head = index->entries[id].next;
    return id;
}

/* An id that has gone and that no child names may be used again. */
static void give_id(struct fb_index *index, uint32_t id)
{
    struct fb_entry *e = &index->entries[id];

    if ((e->flags & FB_ENTRY_GONE) && e->children == 0) {
        e->next = index->free_head;
        index->free_head = id;
    }
}

static void leave_parent(struct fb_index *index, struct fb_entry *e)
{
    uint32_t parent = e->parent;

    if (parent != FB_ENTRY_NONE) {
        e->parent = FB_ENTRY_NONE;
        index->entries[parent].children--;
        give_id(index, parent);
    }
}

enum fb_status fb_index_insert(struct fb_index *index, const uint8_t key[FB_INDEX_KEY_BYTES],
                               uint32_t parent, uint16_t class_id, uint16_t space,
                               struct fb_location where, uint32_t *ret_id)
{
    struct fb_entry *before = parent == FB_ENTRY_NONE ? NULL : live(index, parent);
    struct fb_order *order = order_of(index, class_id);
    struct fb_entry *e;
    uint32_t *head;
    uint32_t id;

    FB_CHECK_SLOW(fb_index_find_any(index, key) == FB_ENTRY_NONE);
    if (!has_room(index)) {
        return FB_ENOMEM;
    }
    index->count++;
    order->members++;
    if (index->count > index->bucket_count) {
        bucket_split(index);
    }
    id = take_id(index);
    head = &index->buckets[bucket_of(index, key)];
    e = &index->entries[id];
    *e = (struct fb_entry){
        .next = *head,
        .refs = 1,
        .flags = FB_ENTRY_WRITING,
        .priority = FB_PRIORITY_NORMAL,
        .parent = parent,
        .where = where,
        .space = space,
        .class_id = class_id,
    };
    memcpy(e->key, key, FB_INDEX_KEY_BYTES);
    if (before) {
        before->children++;
        e->priority = before->priority < FB_PRIORITY_NORMAL ? before->priority : FB_PRIORITY_NORMAL;
    }
    *head = id;
    *ret_id = id;
    return FB_OK;
}

void fb_index_publish(struct fb_index *index, uint32_t id)
{
    live(index, id)->flags &= ~FB_ENTRY_WRITING;
    settle(index, id);
}

void fb_index_detach(struct fb_index *index, uint32_t id)
{
    struct fb_entry *e = live(index, id);

    if (!(e->flags & FB_ENTRY_DETACHED)) {
        bucket_unlink(index, id);
        e->flags |= FB_ENTRY_DETACHED;
        settle(index, id);
        leave_parent(index, e);
    }
}

void fb_index_remove(struct fb_index *index, uint32_t id)
{
    struct fb_entry *e = live(index, id);

    FB_ASSERT(e->refs == 0);
    fb_index_detach(index, id);
    order_of(index, e->class_id)->members--;
    index->count--;
    e->flags = FB_ENTRY_GONE;
    give_id(index, id);
}

void fb_index_pin(struct fb_index *index, uint32_t id)
{
    struct fb_entry *e = live(index, id);

    FB_ASSERT(e->refs < FB_ENTRY_MAX_REFS);
    e->refs++;
    settle(index, id);
}

uint32_t fb_index_unpin(struct fb_index *index, uint32_t id)
{
    struct fb_entry *e = live(index, id);

    FB_ASSERT(e->refs > 0);
    e->refs--;
    settle(index, id);
    return e->refs;
}

void fb_index_touch(struct fb_index *index, const uint32_t *ids, uint32_t n)
{
    for (uint32_t i = n; i-- > 0;) {
        const struct fb_entry *e = live(index, ids[i]);

        if (e->flags & FB_ENTRY_LISTED) {
            struct fb_order *order = order_of(index, e->class_id);

            order->ops->touch(index->entries, order, ids[i], i > 0 ? ids[i - 1] : FB_ENTRY_NONE);
        }
    }
}

/* --- hints --- */

void fb_index_set_priority(struct fb_index *index, uint32_t id, enum fb_priority priority)
{
    uint32_t at = id;
    uint32_t changed = 0;

    if (live(index, id)->priority == priority) {
        return;
    }
    do {
        take_from_order(index, at);
        index->entries[at].priority = priority;
        changed++;
        at = fb_entry_parent(index->entries, at);
    } while (at != FB_ENTRY_NONE && index->entries[at].priority < priority);

    /* Back when all of them are out, deepest first: each moves once, to above the one before. */
    for (at = id; changed > 0; changed--) {
        settle(index, at);
        at = fb_entry_parent(index->entries, at);
    }
}

void fb_index_set_pinned(struct fb_index *index, uint32_t id, bool pinned)
{
    struct fb_entry *e = live(index, id);

    if (pinned) {
        e->flags |= FB_ENTRY_PINNED;
    } else {
        e->flags &= ~FB_ENTRY_PINNED;
    }
    settle(index, id);
}

/* --- classes --- */

static uint32_t find_free_class(const struct fb_index *index)
{
    uint32_t i = 0;

    while (i < index->order_count && index->orders[i].ops) {
        i++;
    }
    return i;
}

enum fb_status fb_index_class_add(struct fb_index *index, const char *policy, uint16_t *ret_class,
                                  struct fb_error *error)
{
    const struct fb_policy_ops *ops = fb_policy_find(policy);
    uint32_t class_id = find_free_class(index);

    if (!ops) {
        return fb_error_set(error, FB_EINVAL, "unknown eviction policy '%s'; expected '%s'", policy,
                            fb_policy_name(0));
    }
    if (class_id > UINT16_MAX) {
        return fb_error_set(error, FB_ENOMEM, "%u eviction orders are the most there can be",
                            UINT16_MAX + 1u);
    }
    if (class_id == index->order_count) {
        struct fb_order *orders = realloc(index->orders, (class_id + 1) * sizeof(*orders));

        if (!orders) {
            return fb_error_set(error, FB_ENOMEM, "no memory for eviction order %u", class_id);
        }
        index->orders = orders;
        index->order_count++;
    }
    index->orders[class_id] = (struct fb_order){.ops = ops};
    ops->init(&index->orders[class_id]);
    *ret_class = (uint16_t)class_id;
    return FB_OK;
}

void fb_index_class_remove(struct fb_index *index, uint16_t class_id)
{
    struct fb_order *order = order_of(index, class_id);

    FB_ASSERT(order->members == 0);
    order->ops = NULL;
}

uint32_t fb_index_victim(struct fb_index *index, uint16_t class_id)
{
    struct fb_order *order = order_of(index, class_id);

    return order->ops->victim(index->entries, order);
}

/* --- fields --- */

const uint8_t *fb_index_key(const struct fb_index *index, uint32_t id)
{
    return live(index, id)->key;
}

struct fb_location fb_index_location(const struct fb_index *index, uint32_t id)
{
    return live(index, id)->where;
}

uint16_t fb_index_space(const struct fb_index *index, uint32_t id)
{
    return live(index, id)->space;
}

uint16_t fb_index_class(const struct fb_index *index, uint32_t id)
{
    return live(index, id)->class_id;
}

uint32_t fb_index_parent(const struct fb_index *index, uint32_t id)
{
    (void)live(index, id);
    return fb_entry_parent(index->entries, id);
}

uint32_t fb_index_children(const struct fb_index *index, uint32_t id)
{
    return live(index, id)->children;
}

uint32_t fb_index_refs(const struct fb_index *index, uint32_t id)
{
    return live(index, id)->refs;
}

uint32_t fb_index_flags(const struct fb_index *index, uint32_t id)
{
    return live(index, id)->flags & FB_ENTRY_FLAGS_PUBLIC;
}

enum fb_priority fb_index_priority(const struct fb_index *index, uint32_t id)
{
    return live(index, id)->priority;
}

/* --- check --- */

/* Chains hold what belongs there, each key once; ret_entries is how many. */
static bool check_buckets(const struct fb_index *index, uint32_t *ret_entries)
{
    uint32_t n = 0;

    for (uint32_t b = 0; b < index->bucket_count; b++) {
        for (uint32_t id = index->buckets[b]; id != FB_ENTRY_NONE; id = index->entries[id].next) {
            const struct fb_entry *e = &index->entries[id];

            if (id >= index->used || n++ == index->count ||
                (e->flags & (FB_ENTRY_GONE | FB_ENTRY_DETACHED)) || bucket_of(index, e->key) != b ||
                fb_index_find_any(index, e->key) != id) {
                return false;
            }
        }
    }
    *ret_entries = n;
    return true;
}

/* The list holds all that has gone but what children name. */
static bool check_free_list(const struct fb_index *index)
{
    uint32_t n = index->used - index->count;

    for (uint32_t id = 0; id < index->used; id++) {
        n -= (index->entries[id].flags & FB_ENTRY_GONE) && index->entries[id].children > 0;
    }
    for (uint32_t id = index->free_head; id != FB_ENTRY_NONE; id = index->entries[id].next) {
        const struct fb_entry *e = &index->entries[id];

        if (id >= index->used || n-- == 0 || !(e->flags & FB_ENTRY_GONE) || e->children > 0) {
            return false;
        }
    }
    return n == 0;
}

/* Every count of children is that of the links; only live entries that are not detached have one.
 * True where there is no memory to count. */
static bool check_children(const struct fb_index *index)
{
    uint32_t *left = calloc(index->used, sizeof(*left));
    bool right = true;

    for (uint32_t id = 0; left && id < index->used; id++) {
        const struct fb_entry *e = &index->entries[id];

        left[id] += e->children;
        if (e->parent != FB_ENTRY_NONE) {
            right &= e->parent < index->used && !(e->flags & (FB_ENTRY_GONE | FB_ENTRY_DETACHED));
            left[right ? e->parent : id]--;
        }
    }
    for (uint32_t id = 0; left && id < index->used; id++) {
        right &= left[id] == 0;
    }
    free(left);
    return right;
}

/* Orders are sound; ret_candidates and ret_members are their totals. */
static bool check_orders(const struct fb_index *index, uint32_t *ret_candidates,
                         uint32_t *ret_members)
{
    uint32_t candidates = 0;
    uint32_t members = 0;

    for (uint32_t i = 0; i < index->order_count; i++) {
        const struct fb_order *order = &index->orders[i];
        uint32_t n = 0;

        if (order->ops && !order->ops->check(index->entries, order, (uint16_t)i, &n)) {
            return false;
        }
        candidates += n;
        members += order->ops ? order->members : 0;
    }
    *ret_candidates = candidates;
    *ret_members = members;
    return true;
}

bool fb_index_check(const struct fb_index *index)
{
    uint32_t live_count = 0, detached = 0, listed = 0;
    uint32_t in_buckets, candidates, members;

    if (!check_buckets(index, &in_buckets) || !check_free_list(index) || !check_children(index) ||
        !check_orders(index, &candidates, &members)) {
        return false;
    }
    for (uint32_t id = 0; id < index->used; id++) {
        const struct fb_entry *e = &index->entries[id];

        if (e->flags & FB_ENTRY_GONE) {
            continue;
        }
        if (is_held(e) == !!(e->flags & FB_ENTRY_LISTED)) {
            return false;
        }
        live_count++;
        detached += !!(e->flags & FB_ENTRY_DETACHED);
        listed += !!(e->flags & FB_ENTRY_LISTED);
    }
    return live_count == index->count && in_buckets + detached == index->count &&
           listed == candidates && members == index->count;
}
