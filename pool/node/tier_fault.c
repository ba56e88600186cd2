/* Fault decorator for tiers. */
#include "pool/node/tier.h"
#include "proto/sum.h"

#include <stdlib.h>

struct delayed {
    struct delayed *next;
    uint64_t at_ns;
    fb_tier_done done;
    void *arg;
    enum fb_status status;
};

struct fault_tier {
    struct fb_tier base;
    struct fb_tier *inner;
    struct fb_tier_faults faults;
    uint64_t random;
    uint64_t now_ns;
    struct delayed *delayed;
};

/* Remembers whom to call, and whether to spoil the result, while the inner tier works. */
struct call {
    struct fault_tier *tier;
    fb_tier_done done;
    void *arg;
    bool fail;
    bool delay;
};

static bool strikes(struct fault_tier *t, uint32_t one_in)
{
    t->random = fb_mix64(t->random);
    return one_in > 0 && t->random % one_in == 0;
}

static void call_done(void *arg, enum fb_status status)
{
    struct call *c = arg;
    struct delayed *d = c->delay ? malloc(sizeof(*d)) : NULL;

    if (c->fail) {
        status = FB_EIO;
    }
    if (d) {
        *d = (struct delayed){.next = c->tier->delayed,
                              .at_ns = c->tier->now_ns + c->tier->faults.delay_ns,
                              .done = c->done,
                              .arg = c->arg,
                              .status = status};
        c->tier->delayed = d;
    } else {
        c->done(c->arg, status);
    }
    free(c);
}

/* NULL without memory: the caller then reports that. */
static struct call *make_call(struct fault_tier *t, uint32_t fail, fb_tier_done done, void *arg)
{
    struct call *c = malloc(sizeof(*c));

    if (c) {
        *c = (struct call){.tier = t,
                           .done = done,
                           .arg = arg,
                           .fail = strikes(t, fail),
                           .delay = strikes(t, t->faults.delay)};
    }
    return c;
}

static enum fb_status fault_reserve(struct fb_tier *tier, const struct fb_tier_class *class,
                                    struct fb_location *ret_where)
{
    struct fault_tier *t = (struct fault_tier *)tier;

    if (strikes(t, t->faults.fail_reserve)) {
        return FB_EIO;
    }
    return t->inner->ops->reserve(t->inner, class, ret_where);
}

static void fault_commit(struct fb_tier *tier, struct fb_location where, fb_tier_done done,
                         void *arg)
{
    struct fault_tier *t = (struct fault_tier *)tier;
    struct call *c = make_call(t, t->faults.fail_commit, done, arg);

    if (!c) {
        done(arg, FB_ENOMEM);
        return;
    }
    t->inner->ops->commit(t->inner, where, call_done, c);
}

static void fault_read(struct fb_tier *tier, struct fb_location where, void *into, uint64_t bytes,
                       fb_tier_done done, void *arg)
{
    struct fault_tier *t = (struct fault_tier *)tier;
    struct call *c = make_call(t, t->faults.fail_read, done, arg);

    if (!c) {
        done(arg, FB_ENOMEM);
        return;
    }
    t->inner->ops->read(t->inner, where, into, bytes, call_done, c);
}

static void fault_free(struct fb_tier *tier, struct fb_location where)
{
    struct fault_tier *t = (struct fault_tier *)tier;

    t->inner->ops->free(t->inner, where);
}

static void fault_stats(const struct fb_tier *tier, struct fb_tier_stats *ret_stats)
{
    const struct fault_tier *t = (const struct fault_tier *)tier;

    t->inner->ops->stats(t->inner, ret_stats);
}

static void *fault_map(struct fb_tier *tier, struct fb_location where)
{
    struct fault_tier *t = (struct fault_tier *)tier;

    return t->inner->ops->map ? t->inner->ops->map(t->inner, where) : NULL;
}

static void fault_tick(struct fb_tier *tier, uint64_t now_ns)
{
    struct fault_tier *t = (struct fault_tier *)tier;
    struct delayed **link = &t->delayed;

    t->now_ns = now_ns;
    if (t->inner->ops->tick) {
        t->inner->ops->tick(t->inner, now_ns);
    }
    while (*link) {
        struct delayed *d = *link;

        if (d->at_ns > now_ns) {
            link = &d->next;
            continue;
        }
        *link = d->next;
        d->done(d->arg, d->status);
        free(d);
        link = &t->delayed; /* done may have added calls */
    }
}

static void fault_destroy(struct fb_tier *tier)
{
    struct fault_tier *t = (struct fault_tier *)tier;

    while (t->delayed) {
        struct delayed *d = t->delayed;

        t->delayed = d->next;
        free(d);
    }
    t->inner->ops->destroy(t->inner);
    free(t);
}

static const struct fb_tier_ops fault_ops = {
    .name = "fault",
    .reserve = fault_reserve,
    .commit = fault_commit,
    .read = fault_read,
    .free = fault_free,
    .stats = fault_stats,
    .map = fault_map,
    .tick = fault_tick,
    .destroy = fault_destroy,
};

enum fb_status fb_tier_fault(struct fb_tier *inner, const struct fb_tier_faults *faults,
                             struct fb_tier **ret_tier)
{
    struct fault_tier *t = calloc(1, sizeof(*t));

    if (!t) {
        return FB_ENOMEM;
    }
    *t = (struct fault_tier){
        .base.ops = &fault_ops, .inner = inner, .faults = *faults, .random = faults->seed};
    *ret_tier = &t->base;
    return FB_OK;
}
