/* The block index against a model, under random operations.
 *
 * The model is an array searched linearly, where a time stamp says how warm an entry is and a birth
 * number names it for good. After every operation both name the same victim of every class; every
 * so often every field, every lookup and the whole order are compared, and the order's invariant
 * is checked by itself. */
#include "tests/unit/index_util.h"

enum {
    MODEL_CAPACITY = 150,
    MODEL_KEYS = 240,
    MODEL_CLASSES = 3,
    MODEL_CHAIN = 12,
    MODEL_STEPS = 60000,
};
#define MODEL_TICK (1 << 20)

struct model_entry {
    bool live;
    uint32_t id;
    uint32_t key;    /* number of the key */
    uint64_t birth;  /* names the entry for good, as ids do not */
    uint64_t parent; /* birth of its parent, or 0 */
    uint32_t class_number;
    uint32_t refs;
    uint32_t flags;
    uint32_t priority;
    int64_t stamp; /* larger is warmer; 0: in no order */
};

struct model {
    struct fb_index *index;
    uint16_t classes[MODEL_CLASSES];
    struct model_entry entries[MODEL_CAPACITY];
    struct model_entry *last[MODEL_CLASSES];
    int64_t clock;
    uint64_t births;
    uint64_t random;
};

static uint32_t model_random(struct model *m, uint32_t below)
{
    m->random = mix(m->random);
    return (uint32_t)(m->random >> 32) % below;
}

/* A random live entry, or NULL. */
static struct model_entry *model_pick(struct model *m)
{
    for (int tries = 0; tries < 20; tries++) {
        struct model_entry *e = &m->entries[model_random(m, MODEL_CAPACITY)];

        if (e->live) {
            return e;
        }
    }
    return NULL;
}

static struct model_entry *model_by_key(struct model *m, uint32_t key)
{
    for (int i = 0; i < MODEL_CAPACITY; i++) {
        struct model_entry *e = &m->entries[i];

        if (e->live && e->key == key && !(e->flags & FB_ENTRY_DETACHED)) {
            return e;
        }
    }
    return NULL;
}

static struct model_entry *model_parent(struct model *m, const struct model_entry *e)
{
    for (int i = 0; i < MODEL_CAPACITY && e->parent; i++) {
        struct model_entry *p = &m->entries[i];

        if (p->live && p->birth == e->parent) {
            return p;
        }
    }
    return NULL;
}

static uint32_t model_children(const struct model *m, const struct model_entry *e)
{
    uint32_t n = 0;

    for (int i = 0; i < MODEL_CAPACITY; i++) {
        n += m->entries[i].live && m->entries[i].parent == e->birth;
    }
    return n;
}

/* The parent, where both are in the order of one class. */
static struct model_entry *model_parent_listed(struct model *m, const struct model_entry *e)
{
    struct model_entry *p = model_parent(m, e);

    return p && p->stamp && p->class_number == e->class_number ? p : NULL;
}

static void model_warm(struct model *m, struct model_entry *e)
{
    for (; e; e = model_parent_listed(m, e)) {
        e->stamp = m->clock += MODEL_TICK;
    }
}

static void model_take_out(struct model *m, struct model_entry *e)
{
    e->stamp = 0;
    if (m->last[e->class_number] == e) {
        m->last[e->class_number] = NULL;
    }
}

static void model_settle(struct model *m, struct model_entry *e)
{
    struct model_entry *p;

    if (!e->live || e->refs || e->flags) {
        model_take_out(m, e);
        return;
    }
    if (e->stamp) {
        return;
    }
    p = model_parent_listed(m, e);
    if (p && p == m->last[e->class_number] && p->priority == e->priority) {
        e->stamp = p->stamp - 1;
    } else {
        model_warm(m, e);
    }
    m->last[e->class_number] = e;
}

static struct model_entry *model_coldest(struct model *m, uint32_t class_number, uint32_t priority)
{
    struct model_entry *best = NULL;

    for (int i = 0; i < MODEL_CAPACITY; i++) {
        struct model_entry *e = &m->entries[i];

        if (e->stamp && e->class_number == class_number && e->priority == priority &&
            (!best || e->stamp < best->stamp)) {
            best = e;
        }
    }
    return best;
}

/* The search passes extended entries and makes them warm, so looking is an operation too. */
static uint32_t model_victim(struct model *m, uint32_t class_number)
{
    for (uint32_t priority = 0; priority < FB_PRIORITIES; priority++) {
        const struct model_entry *first = model_coldest(m, class_number, priority);

        for (int skipped = 0; skipped < 64; skipped++) {
            struct model_entry *e = model_coldest(m, class_number, priority);

            if (!e || (skipped > 0 && e == first)) {
                break;
            }
            if (model_children(m, e) == 0) {
                return e->id;
            }
            model_warm(m, e);
            m->last[class_number] = NULL;
        }
    }
    return NONE;
}

static void model_detach(struct model *m, struct model_entry *e)
{
    fb_index_detach(m->index, e->id);
    e->flags |= FB_ENTRY_DETACHED;
    e->parent = 0;
    model_settle(m, e);
}

static void model_remove(struct model *m, struct model_entry *e)
{
    fb_index_remove(m->index, e->id);
    e->live = false;
    model_settle(m, e);
}

/* The parent that key `k` is inserted with: always of a smaller key, so that there is no circle.
 * Mostly the page before, if it is there (also while it is written or detached). */
static struct model_entry *model_choose_parent(struct model *m, uint32_t k)
{
    struct model_entry *p = NULL;

    if (model_random(m, 8) == 0) {
        p = model_pick(m);
        return p && p->key < k ? p : NULL;
    }
    if (k % MODEL_CHAIN == 0) {
        return NULL;
    }
    for (int i = 0; i < MODEL_CAPACITY && !p; i++) {
        if (m->entries[i].live && m->entries[i].key == k - 1) {
            p = &m->entries[i];
        }
    }
    return p;
}

static void model_insert(struct model *m)
{
    uint32_t k = model_random(m, MODEL_KEYS);
    struct model_entry *old = model_by_key(m, k);
    struct model_entry *p = model_choose_parent(m, k);
    struct model_entry *e = m->entries;
    uint32_t class_number = p ? p->class_number : model_random(m, MODEL_CLASSES);
    uint32_t id = NONE;
    uint8_t key[FB_INDEX_KEY_BYTES];
    enum fb_status status;

    if (old) {
        model_detach(m, old);
    }
    key_make(key, k, 4);
    status = fb_index_insert(m->index, key, p ? p->id : NONE, m->classes[class_number], (uint16_t)k,
                             (struct fb_location){k, k + 1}, &id);
    while (e < m->entries + MODEL_CAPACITY && e->live) {
        e++;
    }
    if (e == m->entries + MODEL_CAPACITY) {
        assert_int_equal(status, FB_ENOMEM);
        return;
    }
    assert_int_equal(status, FB_OK);
    *e = (struct model_entry){
        .live = true,
        .id = id,
        .key = k,
        .birth = ++m->births,
        .parent = p ? p->birth : 0,
        .class_number = class_number,
        .refs = 1,
        .flags = FB_ENTRY_WRITING,
        .priority = p && p->priority == FB_PRIORITY_LOW ? FB_PRIORITY_LOW : FB_PRIORITY_NORMAL,
    };
}

static void model_unpin(struct model *m, struct model_entry *e)
{
    if (e->refs > 0) {
        e->refs--;
        assert_int_equal(fb_index_unpin(m->index, e->id), e->refs);
        model_settle(m, e);
    }
    if (e->refs == 0 && (e->flags & FB_ENTRY_DETACHED)) {
        model_remove(m, e);
    }
}

/* Ids from `e` up its parents, in page order, some left out if `holes`. */
static uint32_t model_chain(struct model *m, struct model_entry *e, bool holes, uint32_t *ids)
{
    uint32_t up[MODEL_CAPACITY];
    uint32_t n = 0;

    for (; e; e = model_parent(m, e)) {
        if (!holes || model_random(m, 3) > 0) {
            up[n++] = e->id;
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        ids[i] = up[n - 1 - i];
    }
    return n;
}

static struct model_entry *model_by_id(struct model *m, uint32_t id)
{
    struct model_entry *e = m->entries;

    while (!e->live || e->id != id) {
        e++;
        assert_true(e < m->entries + MODEL_CAPACITY);
    }
    return e;
}

static void model_touch(struct model *m, struct model_entry *e)
{
    uint32_t ids[MODEL_CAPACITY];
    uint32_t n = model_chain(m, e, model_random(m, 2), ids);

    fb_index_touch(m->index, ids, n);
    for (uint32_t i = n; i-- > 0;) {
        e = model_by_id(m, ids[i]);
        if (e->stamp) {
            model_warm(m, e);
            m->last[e->class_number] = NULL;
        }
    }
}

/* Pin or unpin a whole chain: in page order, in the reverse, or in a random order. */
static void model_lease(struct model *m, struct model_entry *e, bool pin)
{
    uint32_t ids[MODEL_CAPACITY];
    uint32_t n = model_chain(m, e, false, ids);
    uint32_t order = model_random(m, 3);

    for (uint32_t i = 0; i < n; i++) {
        uint32_t j = order == 0 ? i : order == 1 ? n - 1 - i : i + model_random(m, n - i);
        uint32_t id = ids[j];

        if (order == 2) {
            ids[j] = ids[i];
        }
        e = model_by_id(m, id);
        if (pin) {
            fb_index_pin(m->index, id);
            e->refs++;
            model_settle(m, e);
        } else {
            model_unpin(m, e);
        }
    }
}

static void model_set_priority(struct model *m, struct model_entry *e)
{
    uint32_t priority = model_random(m, FB_PRIORITIES);
    struct model_entry *changed[MODEL_CAPACITY];
    uint32_t n = 0;

    fb_index_set_priority(m->index, e->id, priority);
    if (e->priority == priority) {
        return;
    }
    do {
        model_take_out(m, e);
        e->priority = priority;
        changed[n++] = e;
        e = model_parent(m, e);
    } while (e && e->priority < priority);
    for (uint32_t i = 0; i < n; i++) {
        model_settle(m, changed[i]);
    }
}

static void model_set_pinned(struct model *m, struct model_entry *e)
{
    bool pinned = model_random(m, 3) == 0;

    fb_index_set_pinned(m->index, e->id, pinned);
    e->flags = pinned ? e->flags | FB_ENTRY_PINNED : e->flags & ~(uint32_t)FB_ENTRY_PINNED;
    model_settle(m, e);
}

/* Give up `count` entries, checking that none goes before one that extends it. */
static void model_evict(struct model *m, uint32_t class_number, uint32_t count)
{
    for (; count > 0; count--) {
        uint32_t id = fb_index_victim(m->index, m->classes[class_number]);

        assert_int_equal(id, model_victim(m, class_number));
        if (id == NONE) {
            return;
        }
        assert_int_equal(fb_index_children(m->index, id), 0);
        model_remove(m, model_by_id(m, id));
    }
}

static void model_step(struct model *m)
{
    uint32_t what = model_random(m, 100);
    struct model_entry *e = what < 22 ? NULL : model_pick(m);

    if (!e) {
        model_insert(m);
    } else if (what < 40) {
        fb_index_publish(m->index, e->id);
        e->flags &= ~(uint32_t)FB_ENTRY_WRITING;
        model_settle(m, e);
    } else if (what < 62) {
        model_unpin(m, e);
    } else if (what < 72) {
        model_lease(m, e, what < 65);
    } else if (what < 80) {
        model_touch(m, e);
    } else if (what < 84) {
        model_set_priority(m, e);
    } else if (what < 88) {
        model_set_pinned(m, e);
    } else if (what < 92) {
        model_detach(m, e);
    } else if (what < 94) {
        if (e->refs == 0) {
            model_remove(m, e);
        }
    } else {
        model_evict(m, e->class_number, model_random(m, 6));
    }
}

/* Every field of every entry, every lookup, and the invariant of the order. */
static void model_compare(struct model *m)
{
    uint8_t keys[MODEL_KEYS][FB_INDEX_KEY_BYTES];
    uint32_t ids[MODEL_KEYS];
    uint32_t count = 0;

    assert_true(fb_index_check(m->index));
    for (uint32_t k = 0; k < MODEL_KEYS; k++) {
        key_make(keys[k], k, 4);
    }
    fb_index_find(m->index, keys[0], FB_INDEX_KEY_BYTES, MODEL_KEYS, ids);
    for (uint32_t k = 0; k < MODEL_KEYS; k++) {
        const struct model_entry *e = model_by_key(m, k);

        assert_int_equal(fb_index_find_any(m->index, keys[k]), e ? e->id : NONE);
        assert_int_equal(ids[k], e && !(e->flags & FB_ENTRY_WRITING) ? e->id : NONE);
    }
    for (int i = 0; i < MODEL_CAPACITY; i++) {
        const struct model_entry *e = &m->entries[i];
        const struct model_entry *p;

        if (!e->live) {
            continue;
        }
        count++;
        p = model_parent(m, e);
        assert_int_equal(fb_index_parent(m->index, e->id), p ? p->id : NONE);
        assert_int_equal(fb_index_children(m->index, e->id), model_children(m, e));
        assert_true(e->id < fb_index_id_limit(m->index));
        assert_memory_equal(fb_index_key(m->index, e->id), keys[e->key], FB_INDEX_KEY_BYTES);
        assert_int_equal(fb_index_location(m->index, e->id).chunk, e->key);
        assert_int_equal(fb_index_location(m->index, e->id).slot, e->key + 1);
        assert_int_equal(fb_index_space(m->index, e->id), e->key);
        assert_int_equal(fb_index_class(m->index, e->id), m->classes[e->class_number]);
        assert_int_equal(fb_index_refs(m->index, e->id), e->refs);
        assert_int_equal(fb_index_flags(m->index, e->id), e->flags);
        assert_int_equal(fb_index_priority(m->index, e->id), e->priority);
        p = e->stamp ? model_parent_listed(m, e) : NULL;
        assert_false(p && p->priority == e->priority && p->stamp <= e->stamp);
    }
    assert_int_equal(fb_index_count(m->index), count);
    assert_true(fb_index_id_limit(m->index) <= 2 * MODEL_CAPACITY);
}

static void run_model(uint64_t seed)
{
    struct model m = {.random = seed};

    m.index = index_make(MODEL_CAPACITY, &m.classes[0]);
    for (int c = 1; c < MODEL_CLASSES; c++) {
        assert_int_equal(fb_index_class_add(m.index, "lru", &m.classes[c], NULL), FB_OK);
    }
    for (uint32_t step = 0; step < MODEL_STEPS; step++) {
        model_step(&m);
        for (uint32_t c = 0; c < MODEL_CLASSES; c++) {
            assert_int_equal(fb_index_victim(m.index, m.classes[c]), model_victim(&m, c));
        }
        if (step % 16 == 0) {
            model_compare(&m);
        }
        if (step % 4096 == 4095) {
            model_evict(&m, step / 4096 % MODEL_CLASSES, MODEL_CAPACITY);
        }
    }
    fb_index_destroy(m.index);
}

static void test_model(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 4; seed++) {
        print_message("model, seed %llu\n", (unsigned long long)seed);
        run_model(seed);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
