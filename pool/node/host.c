/* Host tier: chunks by class, slots by bitmap. */
#include "pool/node/host.h"

#include "proto/assert.h"

#include <stdlib.h>
#include <string.h>

/* A chunk id is a place in the table and a generation, so that a stale location is seen. */
#define PLACE_BITS     16
#define PLACES         (1u << PLACE_BITS)
#define MAX_GENERATION 0xfffeu

/* After a chunk could not be made (the file system is full) the class does without for so long. */
#define RETRY_NS (1000ull * 1000 * 1000)

TAILQ_HEAD(chunk_list, fb_chunk);

struct host_class {
    struct chunk_list chunks;
    uint32_t chunk_count; /* not retiring */
    uint32_t slots_free;  /* in chunks that are not retiring */
    bool pending;         /* a chunk is being made */
    uint64_t retry_ns;    /* not before */
};

struct host_tier {
    struct fb_tier base;
    struct fb_host_options options;
    struct host_class *classes; /* [FB_MAX_CLASSES] */
    struct fb_chunk **places;   /* [PLACES] */
    uint16_t *generations;      /* [PLACES] */
    uint32_t next_place;
    uint64_t tenant_used[FB_TENANTS_MAX];
    uint32_t tenant_retiring[FB_TENANTS_MAX]; /* chunks */
    uint64_t used_bytes;
    uint32_t slots_used;
    uint64_t now_ns;
    uint32_t jobs;              /* on their way */
    struct fb_chunk being_made; /* marks a place that a job will fill */
};

struct create_job {
    struct fb_job job;
    struct host_tier *tier;
    uint16_t class_id;
    uint16_t tenant;
    uint32_t id;
    uint64_t slot_bytes;
    struct fb_chunk_shape shape;
    enum fb_status status;
    struct fb_error error;
    struct fb_chunk_file file;
};

static struct host_tier *host_of(const struct fb_tier *tier)
{
    return (struct host_tier *)(uintptr_t)tier;
}

/* --- chunks --- */

/* Not one whose name a file that was set aside has. */
static uint32_t new_chunk_id(struct host_tier *t)
{
    for (uint32_t i = 0; i < PLACES; i++) {
        uint32_t place = t->next_place++ % PLACES, id;

        if (t->places[place]) {
            continue;
        }
        t->generations[place] = (uint16_t)(t->generations[place] % MAX_GENERATION + 1);
        id = (uint32_t)t->generations[place] << PLACE_BITS | place;
        if (!fb_chunk_exists(t->options.dir_fd, id)) {
            return id;
        }
    }
    return 0;
}

static struct fb_chunk *make_chunk(const struct fb_chunk_file *file, uint16_t tenant,
                                   uint16_t class_id)
{
    uint32_t words = (file->slot_count + 63) / 64;
    struct fb_chunk *c = calloc(1, sizeof(*c));

    if (!c) {
        return NULL;
    }
    c->file = *file;
    c->tenant = tenant;
    c->class_id = class_id;
    c->taken = calloc(words, sizeof(*c->taken));
    c->entries = malloc(file->slot_count * sizeof(*c->entries));
    if (!c->taken || !c->entries) {
        free(c->taken);
        free(c->entries);
        free(c);
        return NULL;
    }
    memset(c->entries, 0xff, file->slot_count * sizeof(*c->entries));
    /* Bits beyond the last slot are taken for ever. */
    if (file->slot_count % 64 != 0) {
        c->taken[words - 1] = ~0ull << (file->slot_count % 64);
    }
    return c;
}

static void install_chunk(struct host_tier *t, struct fb_chunk *c)
{
    struct host_class *class = &t->classes[c->class_id];
    uint32_t place = c->file.id % PLACES;

    t->places[place] = c;
    t->generations[place] = (uint16_t)(c->file.id >> PLACE_BITS);
    TAILQ_INSERT_HEAD(&class->chunks, c, link);
    class->chunk_count++;
    class->slots_free += c->file.slot_count;
}

static void charge(struct host_tier *t, uint16_t tenant, int64_t bytes)
{
    t->tenant_used[tenant] += (uint64_t)bytes;
    t->used_bytes += (uint64_t)bytes;
}

static void create_work(struct fb_job *job)
{
    struct create_job *j = (struct create_job *)job;
    const struct fb_host_options *o = &j->tier->options;

    j->status = fb_chunk_create(o->dir_fd, j->id, o->tenant_names[j->tenant], j->slot_bytes,
                                &j->shape, o->huge_pages, &j->file, &j->error);
}

static void create_done(struct fb_mail *mail)
{
    struct create_job *j = (struct create_job *)mail;
    struct host_tier *t = j->tier;
    struct fb_chunk *c = NULL;

    t->jobs--;
    t->classes[j->class_id].pending = false;
    t->places[j->id % PLACES] = NULL;
    if (j->status == FB_OK) {
        c = make_chunk(&j->file, j->tenant, j->class_id);
        if (c) {
            install_chunk(t, c);
        } else {
            fb_chunk_unlink(t->options.dir_fd, j->id);
            fb_chunk_close(&j->file);
            fb_error_set(&j->error, FB_ENOMEM, "chunk %08x: out of memory", j->id);
        }
    }
    if (!c) {
        charge(t, j->tenant, -(int64_t)j->shape.file_bytes);
        t->classes[j->class_id].retry_ns = t->now_ns + RETRY_NS;
    }
    t->options.changed(t->options.changed_context, j->class_id, c ? NULL : &j->error);
    free(j);
}

/* Reserves place and budget at once, so that nothing is promised twice. */
static enum fb_status begin_create(struct host_tier *t, const struct fb_tier_class *class)
{
    struct fb_chunk_shape shape;
    enum fb_status status =
        fb_chunk_shape(t->options.capacity_bytes, class->slot_bytes, &shape, NULL);
    struct create_job *j;

    if (status != FB_OK) {
        return status;
    }
    if (t->now_ns < t->classes[class->id].retry_ns ||
        t->tenant_used[class->tenant] + shape.file_bytes > t->options.tenant_bytes[class->tenant] ||
        t->used_bytes + shape.file_bytes > t->options.capacity_bytes) {
        return FB_ELIMIT;
    }
    j = calloc(1, sizeof(*j));
    if (!j) {
        return FB_ELIMIT;
    }
    *j = (struct create_job){.job.work = create_work,
                             .job.mail.run = create_done,
                             .tier = t,
                             .class_id = class->id,
                             .tenant = class->tenant,
                             .id = new_chunk_id(t),
                             .slot_bytes = class->slot_bytes,
                             .shape = shape};
    if (j->id == 0) {
        free(j);
        return FB_ELIMIT;
    }
    t->places[j->id % PLACES] = &t->being_made;
    t->classes[class->id].pending = true;
    t->jobs++;
    charge(t, class->tenant, (int64_t)shape.file_bytes);
    t->options.submit(t->options.context, &j->job);
    return FB_AGAIN;
}

struct fb_chunk *fb_host_chunk(const struct fb_tier *tier, uint32_t id)
{
    struct fb_chunk *c = host_of(tier)->places[id % PLACES];

    return c && c->file.map && c->file.id == id ? c : NULL;
}

enum fb_status fb_host_adopt(struct fb_tier *tier, const struct fb_chunk_file *file,
                             uint16_t tenant, uint16_t class_id, struct fb_chunk **ret_chunk)
{
    struct host_tier *t = host_of(tier);
    struct fb_chunk *c;

    if (t->places[file->id % PLACES]) {
        return FB_EXISTS;
    }
    c = make_chunk(file, tenant, class_id);
    if (!c) {
        return FB_ENOMEM;
    }
    install_chunk(t, c);
    charge(t, tenant, (int64_t)file->file_bytes);
    *ret_chunk = c;
    return FB_OK;
}

void fb_host_set_aside(struct fb_tier *tier, uint64_t bytes)
{
    host_of(tier)->used_bytes += bytes;
}

struct fb_chunk *fb_host_next_in_class(const struct fb_tier *tier, uint16_t class_id,
                                       struct fb_chunk *previous)
{
    return previous ? TAILQ_NEXT(previous, link)
                    : TAILQ_FIRST(&host_of(tier)->classes[class_id].chunks);
}

uint32_t fb_host_class_chunks(const struct fb_tier *tier, uint16_t class_id)
{
    const struct host_class *class = &host_of(tier)->classes[class_id];

    return class->chunk_count + class->pending;
}

uint32_t fb_host_tenant_retiring(const struct fb_tier *tier, uint16_t tenant)
{
    return host_of(tier)->tenant_retiring[tenant];
}

struct fb_chunk *fb_host_unused_chunk(const struct fb_tier *tier, uint16_t class_id)
{
    const struct host_class *class = &host_of(tier)->classes[class_id];
    struct fb_chunk *c;

    if (class->slots_free == 0) {
        return NULL;
    }
    TAILQ_FOREACH(c, &class->chunks, link) {
        if (c->used == 0 && !c->retiring) {
            return c;
        }
    }
    return NULL;
}

uint64_t fb_host_tenant_used(const struct fb_tier *tier, uint16_t tenant)
{
    return host_of(tier)->tenant_used[tenant];
}

uint64_t fb_host_tenant_limit(const struct fb_tier *tier, uint16_t tenant)
{
    return host_of(tier)->options.tenant_bytes[tenant];
}

static void destroy_chunk(struct host_tier *t, struct fb_chunk *c)
{
    TAILQ_REMOVE(&t->classes[c->class_id].chunks, c, link);
    t->places[c->file.id % PLACES] = NULL;
    fb_chunk_close(&c->file);
    free(c->taken);
    free(c->entries);
    free(c);
}

bool fb_host_reap(struct fb_tier *tier, struct fb_chunk *chunk)
{
    struct host_tier *t = host_of(tier);

    if (!chunk->retiring || chunk->used > 0 || chunk->given > 0) {
        return false;
    }
    fb_chunk_unlink(t->options.dir_fd, chunk->file.id);
    charge(t, chunk->tenant, -(int64_t)chunk->file.file_bytes);
    t->tenant_retiring[chunk->tenant]--;
    destroy_chunk(t, chunk);
    return true;
}

/* --- slots --- */

/* To the front of its class's list, where reserve looks, or to the back. */
static void move_chunk(struct host_tier *t, struct fb_chunk *c, bool front)
{
    struct chunk_list *list = &t->classes[c->class_id].chunks;

    TAILQ_REMOVE(list, c, link);
    if (front) {
        TAILQ_INSERT_HEAD(list, c, link);
    } else {
        TAILQ_INSERT_TAIL(list, c, link);
    }
}

static void mark_taken(struct host_tier *t, struct fb_chunk *c, uint32_t slot)
{
    c->taken[slot / 64] |= 1ull << (slot % 64);
    c->used++;
    t->slots_used++;
    if (!c->retiring) {
        t->classes[c->class_id].slots_free--;
        if (c->used == c->file.slot_count) {
            move_chunk(t, c, false);
        }
    }
}

void fb_host_retire(struct fb_tier *tier, struct fb_chunk *chunk)
{
    struct host_class *class = &host_of(tier)->classes[chunk->class_id];

    if (!chunk->retiring) {
        chunk->retiring = true;
        host_of(tier)->tenant_retiring[chunk->tenant]++;
        class->chunk_count--;
        class->slots_free -= chunk->file.slot_count - chunk->used;
        move_chunk(host_of(tier), chunk, false);
    }
}

bool fb_host_take(struct fb_tier *tier, struct fb_chunk *chunk, uint32_t slot)
{
    if (slot >= chunk->file.slot_count || (chunk->taken[slot / 64] >> (slot % 64) & 1)) {
        return false;
    }
    mark_taken(host_of(tier), chunk, slot);
    return true;
}

/* The list begins with chunks that have room: full and retiring ones are behind them. */
static enum fb_status host_reserve(struct fb_tier *tier, const struct fb_tier_class *class,
                                   struct fb_location *ret_where)
{
    struct host_tier *t = host_of(tier);
    struct host_class *hc = &t->classes[class->id];
    struct fb_chunk *c = TAILQ_FIRST(&hc->chunks);
    uint32_t words;

    if (hc->slots_free == 0) {
        return hc->pending ? FB_AGAIN : begin_create(t, class);
    }
    words = (c->file.slot_count + 63) / 64;
    while (~c->taken[c->scan] == 0) {
        c->scan = (c->scan + 1) % words;
    }
    *ret_where = (struct fb_location){
        .chunk = c->file.id,
        .slot = c->scan * 64 + (uint32_t)__builtin_ctzll(~c->taken[c->scan]),
    };
    mark_taken(t, c, ret_where->slot);
    return FB_OK;
}

static void host_commit(struct fb_tier *tier, struct fb_location where, fb_tier_done done,
                        void *arg)
{
    done(arg, fb_host_chunk(tier, where.chunk) ? FB_OK : FB_EIO);
}

static void *host_map(struct fb_tier *tier, struct fb_location where)
{
    struct fb_chunk *c = fb_host_chunk(tier, where.chunk);

    return c && where.slot < c->file.slot_count ? fb_chunk_slot(&c->file, where.slot) : NULL;
}

static void host_read(struct fb_tier *tier, struct fb_location where, void *into, uint64_t bytes,
                      fb_tier_done done, void *arg)
{
    struct fb_chunk *c = fb_host_chunk(tier, where.chunk);
    bool ok = c && where.slot < c->file.slot_count && bytes <= c->file.slot_bytes;

    if (ok) {
        memcpy(into, fb_chunk_slot(&c->file, where.slot), bytes);
    }
    done(arg, ok ? FB_OK : FB_EIO);
}

static void host_free(struct fb_tier *tier, struct fb_location where)
{
    struct host_tier *t = host_of(tier);
    struct fb_chunk *c = fb_host_chunk(tier, where.chunk);

    FB_ASSERT(c && where.slot < c->file.slot_count);
    FB_ASSERT(c->taken[where.slot / 64] >> (where.slot % 64) & 1);
    c->taken[where.slot / 64] &= ~(1ull << (where.slot % 64));
    c->entries[where.slot] = FB_ENTRY_NONE;
    t->slots_used--;
    if (!c->retiring) {
        t->classes[c->class_id].slots_free++;
        if (c->used == c->file.slot_count) {
            move_chunk(t, c, true);
        }
    }
    c->used--;
}

static void host_stats(const struct fb_tier *tier, struct fb_tier_stats *ret_stats)
{
    const struct host_tier *t = host_of(tier);

    *ret_stats = (struct fb_tier_stats){.capacity_bytes = t->options.capacity_bytes,
                                        .used_bytes = t->used_bytes,
                                        .slots_used = t->slots_used};
    for (uint32_t i = 0; i < FB_MAX_CLASSES; i++) {
        ret_stats->slots_free += t->classes[i].slots_free;
    }
}

static void host_tick(struct fb_tier *tier, uint64_t now_ns)
{
    host_of(tier)->now_ns = now_ns;
}

static void host_destroy(struct fb_tier *tier)
{
    struct host_tier *t = host_of(tier);

    FB_ASSERT(t->jobs == 0);
    for (uint32_t i = 0; i < PLACES; i++) {
        if (t->places[i]) {
            destroy_chunk(t, t->places[i]);
        }
    }
    free(t->classes);
    free(t->places);
    free(t->generations);
    free(t);
}

static const struct fb_tier_ops host_ops = {
    .name = "host",
    .reserve = host_reserve,
    .commit = host_commit,
    .read = host_read,
    .free = host_free,
    .stats = host_stats,
    .map = host_map,
    .tick = host_tick,
    .destroy = host_destroy,
};

enum fb_status fb_host_create(const struct fb_host_options *options, struct fb_tier **ret_tier)
{
    struct host_tier *t = calloc(1, sizeof(*t));

    if (!t) {
        return FB_ENOMEM;
    }
    t->base.ops = &host_ops;
    t->options = *options;
    t->classes = calloc(FB_MAX_CLASSES, sizeof(*t->classes));
    t->places = calloc(PLACES, sizeof(struct fb_chunk *));
    t->generations = calloc(PLACES, sizeof(*t->generations));
    if (!t->classes || !t->places || !t->generations) {
        free(t->classes);
        free(t->places);
        free(t->generations);
        free(t);
        return FB_ENOMEM;
    }
    for (uint32_t i = 0; i < FB_MAX_CLASSES; i++) {
        TAILQ_INIT(&t->classes[i].chunks);
    }
    *ret_tier = &t->base;
    return FB_OK;
}
