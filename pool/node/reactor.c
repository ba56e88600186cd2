/* Reactor: epoll, mailbox, time. */
#include "pool/node/reactor.h"

#include "proto/assert.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define EVENTS  64
#define POLLS   16
#define SOON_NS (100ull * 1000 * 1000)

struct drain_mail {
    struct fb_mail mail;
    struct fb_reactor *reactor;
    _Atomic uint64_t within_ns;
};

struct fb_reactor {
    int epoll_fd;
    /* A timer of its own, set once a tick: a time-out of epoll_wait would be set and cancelled with
     * every request. */
    int timer_fd;
    uint64_t tick_ns; /* when the node wants to be called; UINT64_MAX: not */
    struct fb_source timer_source;
    uint64_t spin_ns;
    struct fb_mailbox *mailbox;
    struct fb_source mail_source;
    struct fb_workers *workers;
    struct fb_node *node;
    struct drain_mail drain;
    _Atomic uint32_t drains; /* asked for */
    void (*round)(void *context);
    void *round_context;
    struct fb_tier *(*wrap_tier)(void *context, struct fb_tier *tier);
    void *wrap_context;
};

static uint64_t clock_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

/* --- what the node needs --- */

static void submit(void *context, struct fb_job *job)
{
    struct fb_reactor *r = context;

    fb_workers_submit(r->workers, job);
}

static enum fb_status watch(void *context, int fd, struct fb_source *source)
{
    struct fb_reactor *r = context;
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = source};

    return epoll_ctl(r->epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0 ? FB_OK : FB_EIO;
}

static void unwatch(void *context, int fd)
{
    struct fb_reactor *r = context;

    epoll_ctl(r->epoll_fd, EPOLL_CTL_DEL, fd, NULL);
}

static struct fb_tier *wrap(void *context, struct fb_tier *tier)
{
    struct fb_reactor *r = context;

    return r->wrap_tier ? r->wrap_tier(r->wrap_context, tier) : tier;
}

static void on_mail(struct fb_source *source)
{
    struct fb_reactor *r = source->owner;

    fb_mailbox_run(r->mailbox);
}

static void on_timer(struct fb_source *source)
{
    struct fb_reactor *r = source->owner;
    uint64_t count;
    ssize_t n = read(r->timer_fd, &count, sizeof(count));

    (void)n;
}

static void set_tick(struct fb_reactor *r, uint64_t tick_ns)
{
    struct itimerspec at = {0};

    r->tick_ns = tick_ns;
    if (tick_ns != UINT64_MAX) {
        at.it_value.tv_sec = (time_t)(tick_ns / 1000000000ull);
        at.it_value.tv_nsec = (long)(tick_ns % 1000000000ull);
    }
    timerfd_settime(r->timer_fd, TFD_TIMER_ABSTIME, &at, NULL);
}

static void on_drain(struct fb_mail *mail)
{
    struct drain_mail *d = (struct drain_mail *)mail;

    fb_node_drain(d->reactor->node, atomic_load(&d->within_ns));
}

/* --- life --- */

enum fb_status fb_reactor_create(const struct fb_reactor_options *options,
                                 struct fb_reactor **ret_reactor, struct fb_error *error)
{
    struct fb_reactor *r = calloc(1, sizeof(*r));
    struct fb_node_edges edges = {
        .context = r, .submit = submit, .watch = watch, .unwatch = unwatch, .wrap_tier = wrap};
    enum fb_status status = FB_ENOMEM;

    if (!r) {
        return fb_error_set(error, FB_ENOMEM, "out of memory");
    }
    r->spin_ns = options->config->spin_ns;
    r->wrap_tier = options->wrap_tier;
    r->wrap_context = options->wrap_context;
    r->mail_source = (struct fb_source){.ready = on_mail, .owner = r};
    r->timer_source = (struct fb_source){.ready = on_timer, .owner = r};
    r->drain.reactor = r;
    r->drain.mail.run = on_drain;
    r->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    r->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (r->epoll_fd < 0 || r->timer_fd < 0 || fb_mailbox_create(&r->mailbox) != FB_OK ||
        fb_workers_create(r->mailbox, &r->workers) != FB_OK ||
        watch(r, fb_mailbox_fd(r->mailbox), &r->mail_source) != FB_OK ||
        watch(r, r->timer_fd, &r->timer_source) != FB_OK) {
        fb_error_set(error, status, "cannot set up the reactor: %s", strerror(errno));
        goto err_destroy;
    }
    status = fb_node_create(options->config, &edges, options->metrics, &options->log, clock_ns(),
                            &r->node, error);
    if (status != FB_OK) {
        goto err_destroy;
    }
    status = fb_node_listen(r->node, error);
    if (status != FB_OK) {
        goto err_destroy;
    }
    *ret_reactor = r;
    return FB_OK;

err_destroy:
    fb_reactor_destroy(r);
    return status;
}

void fb_reactor_destroy(struct fb_reactor *reactor)
{
    if (!reactor) {
        return;
    }
    if (reactor->node) {
        fb_node_drain(reactor->node, 0); /* from here on it submits nothing */
    }
    fb_workers_destroy(reactor->workers);
    if (reactor->mailbox && reactor->node) {
        fb_mailbox_run(reactor->mailbox); /* results of the jobs that were left */
    }
    fb_node_destroy(reactor->node);
    fb_mailbox_destroy(reactor->mailbox);
    if (reactor->epoll_fd >= 0) {
        close(reactor->epoll_fd);
    }
    if (reactor->timer_fd >= 0) {
        close(reactor->timer_fd);
    }
    free(reactor);
}

/* One round: returns how many sources were ready. */
static int run_round(struct fb_reactor *r, int timeout_ms)
{
    struct epoll_event events[EVENTS];
    int n = epoll_wait(r->epoll_fd, events, EVENTS, timeout_ms);

    if (n > 0) {
        fb_node_set_time(r->node, clock_ns());
    }
    for (int i = 0; i < n; i++) {
        struct fb_source *source = events[i].data.ptr;

        source->ready(source);
    }
    if (n > 0) {
        fb_node_collect(r->node);
        if (r->round) {
            r->round(r->round_context);
        }
    }
    return n;
}

/* Between the rounds of a spinning reactor. Few at a time, so that the other sources do not wait.
 */
static bool poll_last(struct fb_reactor *r)
{
    for (int i = 0; i < POLLS; i++) {
        fb_node_set_time(r->node, clock_ns());
        if (fb_node_poll(r->node)) {
            fb_node_collect(r->node);
            if (r->round) {
                r->round(r->round_context);
            }
            return true;
        }
    }
    return false;
}

static void run_tick(struct fb_reactor *r, uint64_t now)
{
    uint64_t next;

    fb_node_set_time(r->node, now);
    next = fb_node_tick(r->node);
    fb_node_collect(r->node);
    set_tick(r, next == UINT64_MAX ? UINT64_MAX : now + next);
    if (r->round) {
        r->round(r->round_context);
    }
}

void fb_reactor_run(struct fb_reactor *reactor)
{
    struct fb_reactor *r = reactor;
    uint64_t now = clock_ns(), busy_ns = now;
    bool spin;

    while (fb_node_state(r->node) != FB_NODE_DRAINED && atomic_load(&r->drains) < 2) {
        if (now >= r->tick_ns) {
            run_tick(r, now);
        }
        spin = now - busy_ns < r->spin_ns;
        if (run_round(r, spin ? 0 : -1) > 0 || (spin && poll_last(r))) {
            busy_ns = clock_ns();
            if (r->tick_ns > busy_ns + SOON_NS) {
                set_tick(r, busy_ns + SOON_NS); /* something may wait for time now */
            }
        }
        now = clock_ns();
    }
}

void fb_reactor_drain(struct fb_reactor *reactor, uint64_t within_ns)
{
    if (atomic_fetch_add(&reactor->drains, 1) == 0) {
        atomic_store(&reactor->drain.within_ns, within_ns);
        fb_mailbox_post(reactor->mailbox, &reactor->drain.mail);
    }
}

enum fb_status fb_reactor_watch(struct fb_reactor *reactor, int fd, struct fb_source *source)
{
    return watch(reactor, fd, source);
}

struct fb_node *fb_reactor_node(struct fb_reactor *reactor)
{
    return reactor->node;
}

struct fb_mailbox *fb_reactor_mailbox(struct fb_reactor *reactor)
{
    return reactor->mailbox;
}

void fb_reactor_on_round(struct fb_reactor *reactor, void (*round)(void *context), void *context)
{
    reactor->round = round;
    reactor->round_context = context;
}
