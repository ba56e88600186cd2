/* The node's state machine under seeded schedules: several clients do random things in random
 * order, time jumps, jobs finish late, the tier fails and delays, processes die. After every step
 * the whole structure is checked, and an oracle that knows who may read and write what.
 *
 *   FOREBAY_SCHEDULES  how many (default 2000)       FOREBAY_SEED  only this one */
#include "pool/node/node.h"
#include "proto/assert.h"
#include "proto/sum.h"
#include "proto/wire.h"

#include <ftw.h>
#include <limits.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define CLIENTS    4
#define CHAINS     4
#define PAGES      6
#define STEPS      250
#define MAX_HELD   256
#define MAX_JOBS   64
#define MAX_FDS    4096
#define MAX_CHUNKS 64
#define SECOND     1000000000ull
#define LEASE_NS   (2 * SECOND)
#define RESERVE_NS (1 * SECOND)

/* What a client holds: a lease, or a claim. */
struct held {
    uint64_t id;
    bool is_claim;
    uint32_t count; /* of places; a claim has one */
    uint32_t planes;
    struct fb_wire_location where[PAGES];
    uint8_t keys[PAGES][FB_KEY_BYTES];
};

struct client {
    pid_t pid; /* a child that only waits to be killed */
    int pidfd;
    uint8_t id[FB_CLIENT_ID_BYTES];
    struct fb_channel *channel; /* NULL: not connected */
    int session_fd;             /* the node's end */
    bool waits;                 /* a request is unanswered */
    uint16_t asked;             /* its type */
    uint32_t chain, first, count, planes;
    uint64_t asked_id; /* a lease or claim that it is about */
    struct held held[MAX_HELD];
    uint32_t held_count;
};

struct world {
    uint64_t seed;
    uint64_t random;
    uint64_t now_ns;
    char dir[64];
    struct fb_metrics *metrics;
    struct fb_node *node;
    struct fb_tier *host; /* what lies under the decorator */
    struct fb_job *jobs[MAX_JOBS];
    uint32_t job_count;
    struct fb_source *sources[MAX_FDS]; /* by descriptor */
    struct client clients[CLIENTS];
    uint32_t space;
    struct fb_layout layout;
};

static uint64_t draw(struct world *w, uint64_t below)
{
    w->random = fb_mix64(w->random);
    return w->random % below;
}

static void fail_here(struct world *w, const char *what)
{
    fprintf(stderr, "seed %llu: %s\n", (unsigned long long)w->seed, what);
    abort();
}

#define HOLDS(w, condition)           \
    do {                              \
        if (!(condition)) {           \
            fail_here(w, #condition); \
        }                             \
    } while (0)

static void key_of(uint32_t chain, uint32_t page, uint8_t key[FB_KEY_BYTES])
{
    for (uint32_t i = 0; i < FB_KEY_BYTES / 8; i++) {
        uint64_t v = fb_mix64(chain * 1000 + page * 10 + i + 77);

        memcpy(key + 8 * i, &v, sizeof(v));
    }
}

/* --- edges --- */

static void submit(void *context, struct fb_job *job)
{
    struct world *w = context;

    HOLDS(w, w->job_count < MAX_JOBS);
    w->jobs[w->job_count++] = job;
}

static enum fb_status watch(void *context, int fd, struct fb_source *source)
{
    struct world *w = context;

    HOLDS(w, fd < MAX_FDS);
    w->sources[fd] = source;
    return FB_OK;
}

static void unwatch(void *context, int fd)
{
    struct world *w = context;

    HOLDS(w, fd < MAX_FDS && w->sources[fd]);
    w->sources[fd] = NULL;
}

static struct fb_tier *wrap_tier(void *context, struct fb_tier *tier)
{
    struct world *w = context;
    struct fb_tier_faults faults = {.seed = w->seed, .delay_ns = SECOND / 3};
    struct fb_tier *wrapped;

    w->host = tier;
    if (w->seed % 3 == 0) {
        return tier;
    }
    faults.fail_reserve = 1 + (uint32_t)draw(w, 30);
    faults.fail_commit = 1 + (uint32_t)draw(w, 30);
    faults.delay = (uint32_t)draw(w, 4);
    HOLDS(w, fb_tier_fault(tier, &faults, &wrapped) == FB_OK);
    return wrapped;
}

static void run_job(struct world *w, uint32_t i)
{
    struct fb_job *job = w->jobs[i];

    w->jobs[i] = w->jobs[--w->job_count];
    job->work(job);
    job->mail.run(&job->mail);
}

/* --- the oracle --- */

static uint8_t *slot_bytes(struct world *w, struct fb_wire_location where)
{
    return w->host->ops->map(w->host, (struct fb_location){where.chunk, where.slot});
}

/* A marker in the first plane: what was written under a key. */
static uint8_t *marker(struct world *w, struct fb_wire_location where)
{
    return slot_bytes(w, where) + FB_BLOCK_HEADER_BYTES;
}

/* The client has said that this ends, and has not read yet whether it did. */
static bool is_ending(const struct client *c, const struct held *h)
{
    return c->waits && h->id == c->asked_id &&
           (c->asked == FB_MSG_COMMIT || c->asked == FB_MSG_ABORT || c->asked == FB_MSG_RELEASE);
}

static bool is_held(struct world *w, struct fb_wire_location where, bool claims, const uint8_t *key)
{
    for (uint32_t c = 0; c < CLIENTS; c++) {
        for (uint32_t i = 0; i < w->clients[c].held_count; i++) {
            const struct held *h = &w->clients[c].held[i];

            for (uint32_t p = 0; p < h->count; p++) {
                if (h->is_claim == claims && !is_ending(&w->clients[c], h) &&
                    h->where[p].chunk == where.chunk && h->where[p].slot == where.slot &&
                    (!key || memcmp(h->keys[p], key, FB_KEY_BYTES) != 0)) {
                    return true;
                }
            }
        }
    }
    return false;
}

/* What is leased is what was committed, for as long as it is leased. */
static void check_leases(struct world *w)
{
    for (uint32_t c = 0; c < CLIENTS; c++) {
        for (uint32_t i = 0; i < w->clients[c].held_count; i++) {
            const struct held *h = &w->clients[c].held[i];

            for (uint32_t p = 0; p < h->count && !h->is_claim && !is_ending(&w->clients[c], h);
                 p++) {
                HOLDS(w, memcmp(marker(w, h->where[p]), h->keys[p], FB_KEY_BYTES) == 0);
            }
        }
    }
}

static void drop_held(struct client *c, uint32_t i)
{
    c->held[i] = c->held[--c->held_count];
}

static bool drop_id(struct client *c, uint64_t id)
{
    for (uint32_t i = 0; i < c->held_count; i++) {
        if (c->held[i].id == id) {
            drop_held(c, i);
            return true;
        }
    }
    return false;
}

/* --- clients --- */

static void spawn(struct world *w, struct client *c)
{
    c->pid = fork();
    HOLDS(w, c->pid >= 0);
    if (c->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close_range(3, UINT_MAX, 0); /* a copy of a socket would keep its connection open */
        for (;;) {
            pause();
        }
    }
    c->pidfd = (int)syscall(SYS_pidfd_open, c->pid, 0);
    HOLDS(w, c->pidfd >= 0);
}

static void wake_node(struct world *w, struct client *c)
{
    struct fb_source *source = w->sources[c->session_fd];

    if (source) { /* the node has not closed it yet */
        source->ready(source);
    }
}

static void send_packet(struct world *w, struct client *c, struct fb_wire_writer *p,
                        enum fb_msg type, const int *fds, uint32_t fd_count)
{
    c->waits = true;
    c->asked = (uint16_t)type;
    if (fb_channel_send(c->channel, p->packet, fb_wire_end(p), fds, fd_count) == FB_OK) {
        wake_node(w, c);
    }
}

static void connect_client(struct world *w, struct client *c)
{
    struct fb_hello_request hello = {1, 1, FB_HELLO_CONTROL, {0}};
    static uint8_t packet[FB_WIRE_MAX_BYTES];
    struct fb_channel *ends[2];
    struct fb_wire_writer p;

    HOLDS(w, fb_unix_pair(ends) == FB_OK);
    c->channel = ends[0];
    c->session_fd = fb_channel_fd(ends[1]);
    HOLDS(w, fb_node_connect(w->node, 0, ends[1]) == FB_OK);
    memcpy(hello.client, c->id, sizeof(hello.client));
    fb_wire_begin(&p, packet, FB_MSG_HELLO, 1, FB_OK, &hello, sizeof(hello));
    send_packet(w, c, &p, FB_MSG_HELLO, &c->pidfd, 1);
}

/* The connection goes, the process stays: what it holds stays held. Whether a request that was not
 * answered has ended a lease or a claim is not known. */
static void close_client(struct world *w, struct client *c)
{
    if (c->waits &&
        (c->asked == FB_MSG_COMMIT || c->asked == FB_MSG_ABORT || c->asked == FB_MSG_RELEASE)) {
        drop_id(c, c->asked_id);
    }
    if (c->channel) {
        fb_channel_destroy(c->channel);
        c->channel = NULL;
        c->waits = false;
        wake_node(w, c);
        fb_node_collect(w->node);
    }
}

static void kill_client(struct world *w, struct client *c)
{
    struct fb_source *exits[MAX_FDS];
    uint32_t n = 0;

    kill(c->pid, SIGKILL);
    waitpid(c->pid, NULL, 0);
    c->held_count = 0;
    /* The node learns it from its copy of the pidfd, which is any of those it watches. */
    for (uint32_t fd = 0; fd < MAX_FDS; fd++) {
        if (w->sources[fd] && (int)fd != c->session_fd) {
            char path[64], name[64] = {0};

            snprintf(path, sizeof(path), "/proc/self/fd/%u", fd);
            if (readlink(path, name, sizeof(name) - 1) > 0 && strstr(name, "pidfd")) {
                exits[n++] = w->sources[fd];
            }
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        exits[i]->ready(exits[i]);
    }
    if (c->channel) {
        fb_channel_destroy(c->channel);
        c->channel = NULL;
        c->waits = false;
        wake_node(w, c);
    }
    fb_node_collect(w->node);
    close(c->pidfd);
    fb_node_check(w->node);
    spawn(w, c);
}

/* --- answers --- */

static void take_lookup(struct world *w, struct client *c, const struct fb_wire_message *m)
{
    uint32_t pages = m->lookup_reply.page_count;
    struct held *h = &c->held[c->held_count];

    if (pages == 0) {
        return;
    }
    HOLDS(w, c->held_count < MAX_HELD && pages <= PAGES);
    *h = (struct held){.id = m->lookup_reply.lease, .count = pages};
    for (uint32_t p = 0; p < pages; p++) {
        const struct fb_block_header *header;

        memcpy(&h->where[p], m->first + p * sizeof(h->where[p]), sizeof(h->where[p]));
        key_of(c->chain, p, h->keys[p]);
        header = (const void *)slot_bytes(w, h->where[p]);
        HOLDS(w, header && fb_block_header_check(header, NULL) == FB_OK);
        HOLDS(w, memcmp(header->key, h->keys[p], FB_KEY_BYTES) == 0);
        HOLDS(w, !is_held(w, h->where[p], true, NULL)); /* nobody may write it any more */
    }
    c->held_count++;
    check_leases(w);
}

static void take_reserve(struct world *w, struct client *c, const struct fb_wire_message *m)
{
    HOLDS(w, m->list_reply.count == c->count);
    for (uint32_t i = 0; i < c->count; i++) {
        struct fb_reserve_row row;
        struct held *h = &c->held[c->held_count];

        memcpy(&row, m->first + i * sizeof(row), sizeof(row));
        if (row.status != FB_OK) {
            continue;
        }
        HOLDS(w, c->held_count < MAX_HELD);
        *h = (struct held){.id = row.claim,
                           .is_claim = true,
                           .count = 1,
                           .planes = c->planes,
                           .where = {row.where}};
        key_of(c->chain, c->first + i, h->keys[0]);
        HOLDS(w, !is_held(w, row.where, false, NULL)); /* no lease covers it */
        HOLDS(w, !is_held(w, row.where, true, h->keys[0]));
        memcpy(marker(w, row.where), h->keys[0], FB_KEY_BYTES);
        c->held_count++;
    }
}

static void take_attach(struct world *w, struct client *c, const struct fb_wire_message *m)
{
    struct fb_attach_row row;

    memcpy(&row, m->first, sizeof(row));
    if (row.status != FB_OK) {
        return;
    }
    for (uint32_t i = 0; i < CLIENTS; i++) {
        for (uint32_t j = 0; j < w->clients[i].held_count; j++) {
            const struct held *h = &w->clients[i].held[j];

            if (h->id == c->asked_id && &w->clients[i] != c) {
                HOLDS(w, c->held_count < MAX_HELD);
                c->held[c->held_count++] = *h;
                return;
            }
        }
    }
}

static void take_reply(struct world *w, struct client *c, const uint8_t *packet, size_t bytes)
{
    struct fb_wire_message m;

    HOLDS(w, fb_wire_parse_reply(packet, bytes, &m, NULL) == FB_OK);
    if (m.header.type == FB_MSG_NOTIFY) {
        return;
    }
    HOLDS(w, c->waits && m.header.type == c->asked);
    c->waits = false;
    if (m.header.status >= FB_AGAIN) {
        HOLDS(w, m.header.status == FB_AGAIN || m.header.status == FB_ENOENT ||
                     m.header.status == FB_ELIMIT);
        return;
    }
    switch (m.header.type) {
    case FB_MSG_LOOKUP: take_lookup(w, c, &m); break;
    case FB_MSG_RESERVE: take_reserve(w, c, &m); break;
    case FB_MSG_ATTACH: take_attach(w, c, &m); break;
    case FB_MSG_COMMIT:
    case FB_MSG_ABORT:
    case FB_MSG_RELEASE: drop_id(c, c->asked_id); break;
    default: break;
    }
}

static void read_replies(struct world *w)
{
    static uint8_t packet[FB_WIRE_MAX_BYTES];

    for (uint32_t i = 0; i < CLIENTS; i++) {
        struct client *c = &w->clients[i];
        int fds[FB_CHANNEL_MAX_FDS];
        uint32_t fd_count;
        size_t bytes;

        while (c->channel && fb_channel_recv(c->channel, packet, sizeof(packet), &bytes, fds,
                                             &fd_count) == FB_OK) {
            HOLDS(w, fd_count == 0);
            take_reply(w, c, packet, bytes);
        }
    }
}

/* --- requests --- */

static void ask_lookup(struct world *w, struct client *c)
{
    struct fb_lookup_request request = {1, PAGES, 0};
    static uint8_t packet[FB_WIRE_MAX_BYTES];
    struct fb_wire_writer p;

    c->chain = (uint32_t)draw(w, CHAINS);
    fb_wire_begin(&p, packet, FB_MSG_LOOKUP, 2, FB_OK, &request, sizeof(request));
    fb_wire_append(&p, &w->space, sizeof(w->space));
    for (uint32_t i = 0; i < PAGES; i++) {
        key_of(c->chain, i, fb_wire_append(&p, NULL, FB_KEY_BYTES));
    }
    send_packet(w, c, &p, FB_MSG_LOOKUP, NULL, 0);
}

static void ask_reserve(struct world *w, struct client *c)
{
    struct fb_reserve_request request = {.space = w->space, .layer_count = 2};
    static uint8_t packet[FB_WIRE_MAX_BYTES];
    struct fb_wire_writer p;

    c->chain = (uint32_t)draw(w, CHAINS);
    c->first = draw(w, 3) == 0 ? (uint32_t)draw(w, PAGES) : 0;
    c->count = 1 + (uint32_t)draw(w, PAGES - c->first);
    request.count = c->count;
    request.position = c->first;
    request.has_parent = c->first > 0;
    if (c->first > 0) {
        key_of(c->chain, c->first - 1, request.parent);
    }
    /* Whole blocks, or half of the planes as one of two ranks. */
    request.plane_first = draw(w, 3) == 0;
    request.plane_count = request.plane_first || draw(w, 3) == 0 ? 1 : 2;
    fb_wire_begin(&p, packet, FB_MSG_RESERVE, 3, FB_OK, &request, sizeof(request));
    for (uint32_t i = 0; i < c->count; i++) {
        key_of(c->chain, c->first + i, fb_wire_append(&p, NULL, FB_KEY_BYTES));
    }
    c->planes = request.plane_count;
    send_packet(w, c, &p, FB_MSG_RESERVE, NULL, 0);
}

static struct held *pick(struct world *w, struct client *c, bool is_claim)
{
    uint32_t start = c->held_count ? (uint32_t)draw(w, c->held_count) : 0;

    for (uint32_t i = 0; i < c->held_count; i++) {
        struct held *h = &c->held[(start + i) % c->held_count];

        if (h->is_claim == is_claim) {
            return h;
        }
    }
    return NULL;
}

static void ask_commit(struct world *w, struct client *c)
{
    const struct held *h = pick(w, c, true);
    struct fb_commit_request request = {1, 2};
    static uint8_t packet[FB_WIRE_MAX_BYTES];
    const uint64_t sums[2] = {5, 6};
    struct fb_wire_writer p;

    if (!h) {
        return;
    }
    /* A wrong number of sums is refused, and the claim stays. */
    request.plane_count = draw(w, 8) == 0 ? 1 + (uint32_t)draw(w, 2) : h->planes;
    c->asked_id = 0;
    memcpy(marker(w, h->where[0]), h->keys[0], FB_KEY_BYTES);
    fb_wire_begin(&p, packet, FB_MSG_COMMIT, 4, FB_OK, &request, sizeof(request));
    fb_wire_append(&p, &h->id, sizeof(h->id));
    fb_wire_append(&p, sums, request.plane_count * sizeof(*sums));
    c->asked_id = h->id;
    send_packet(w, c, &p, FB_MSG_COMMIT, NULL, 0);
}

static void ask_with_id(struct world *w, struct client *c, enum fb_msg type, uint64_t id)
{
    struct fb_list_request request = {1};
    static uint8_t packet[FB_WIRE_MAX_BYTES];
    struct fb_wire_writer p;

    c->asked_id = id;
    fb_wire_begin(&p, packet, type, 5, FB_OK, &request, sizeof(request));
    fb_wire_append(&p, &id, sizeof(id));
    send_packet(w, c, &p, type, NULL, 0);
}

static void ask_attach(struct world *w, struct client *c)
{
    struct client *other = &w->clients[draw(w, CLIENTS)];
    struct held *h = other != c ? pick(w, other, false) : NULL;

    if (h && !drop_id(c, h->id)) {
        ask_with_id(w, c, FB_MSG_ATTACH, h->id);
    } else if (h) {
        /* It holds that lease already; it does again. */
        c->held[c->held_count++] = *h;
    }
}

/* Name everything, or nothing: then what has run out is given back, and may be reused at once. */
static void ask_renew(struct world *w, struct client *c)
{
    struct fb_renew_request request = {0};
    static uint8_t packet[FB_WIRE_MAX_BYTES];
    bool all = draw(w, 3) > 0;
    struct fb_wire_writer p;

    fb_wire_begin(&p, packet, FB_MSG_RENEW, 6, FB_OK, &request, sizeof(request));
    for (int claims = 0; claims < 2 && all; claims++) {
        for (uint32_t i = 0; i < c->held_count; i++) {
            if (c->held[i].is_claim == claims) {
                fb_wire_append(&p, &c->held[i].id, sizeof(uint64_t));
                request.claim_count += claims;
                request.lease_count += !claims;
            }
        }
    }
    memcpy(packet + sizeof(struct fb_wire_header), &request, sizeof(request));
    if (!all) {
        c->held_count = 0;
    }
    send_packet(w, c, &p, FB_MSG_RENEW, NULL, 0);
}

static void ask_keys(struct world *w, struct client *c, enum fb_msg type)
{
    struct fb_reject_request reject = {w->space, 1};
    struct fb_hint_request hint = {w->space, 1, 1 + (uint32_t)draw(w, 3), (uint32_t)draw(w, 2)};
    static uint8_t packet[FB_WIRE_MAX_BYTES];
    struct fb_wire_writer p;

    fb_wire_begin(&p, packet, type, 7, FB_OK,
                  type == FB_MSG_HINT ? (const void *)&hint : (const void *)&reject,
                  type == FB_MSG_HINT ? sizeof(hint) : sizeof(reject));
    key_of((uint32_t)draw(w, CHAINS), (uint32_t)draw(w, PAGES),
           fb_wire_append(&p, NULL, FB_KEY_BYTES));
    send_packet(w, c, &p, type, NULL, 0);
}

static void purge(struct world *w)
{
    uint8_t key[FB_KEY_BYTES];
    uint64_t blocks, bytes;
    struct fb_node_space_status s;

    key_of((uint32_t)draw(w, CHAINS), (uint32_t)draw(w, PAGES), key);
    HOLDS(w, fb_node_get_space(w->node, 0, &s));
    HOLDS(w, fb_node_purge(w->node, "default", s.id, draw(w, 4) ? key : NULL, &blocks, &bytes,
                           NULL) == FB_OK);
}

/* --- schedules --- */

static void client_step(struct world *w, struct client *c)
{
    struct held *h;

    if (!c->channel) {
        connect_client(w, c);
        return;
    }
    if (c->waits) {
        if (draw(w, 12) == 0) {
            close_client(w, c);
        }
        return;
    }
    switch (draw(w, 16)) {
    case 0:
    case 1:
    case 2:
    case 3: ask_lookup(w, c); break;
    case 4:
    case 5:
    case 6: ask_reserve(w, c); break;
    case 7:
    case 8:
    case 9:
    case 10: ask_commit(w, c); break;
    case 11:
        h = pick(w, c, true);
        if (h) {
            ask_with_id(w, c, FB_MSG_ABORT, h->id);
        }
        break;
    case 12:
        h = pick(w, c, false);
        if (h) {
            ask_with_id(w, c, FB_MSG_RELEASE, h->id);
        }
        break;
    case 13: ask_attach(w, c); break;
    case 14: ask_renew(w, c); break;
    case 15: ask_keys(w, c, draw(w, 2) ? FB_MSG_HINT : FB_MSG_REJECT); break;
    }
}

static void pass_time(struct world *w, uint64_t ns)
{
    w->now_ns += ns;
    fb_node_set_time(w->node, w->now_ns);
    fb_node_tick(w->node);
}

static void step(struct world *w)
{
    uint64_t what = draw(w, 40);

    if (w->job_count > 0 && draw(w, 3) == 0) {
        run_job(w, (uint32_t)draw(w, w->job_count));
    } else if (what < 33) {
        client_step(w, &w->clients[draw(w, CLIENTS)]);
    } else if (what < 37) {
        pass_time(w, draw(w, draw(w, 4) ? SECOND / 10 : SECOND));
    } else if (what == 37) {
        close_client(w, &w->clients[draw(w, CLIENTS)]);
    } else if (what == 38 && draw(w, 3) == 0) {
        kill_client(w, &w->clients[draw(w, CLIENTS)]);
    } else if (what == 39 && draw(w, 2) == 0) {
        purge(w);
    }
    read_replies(w);
    fb_node_collect(w->node);
    fb_node_check(w->node);
    check_leases(w);
}

/* Blocks of which a chunk of 2 MiB holds just eight: 2 planes, 2 layers, raw bytes. */
static void open_space(struct world *w)
{
    struct fb_manifest m = {
        .tenant = "default",
        .model = "schedules",
        .rule = FB_RULE_FULL,
        .page_tokens = 16,
        .layer_count = 2,
        .layers = {0, 1},
        .head_count = 2,
        .head_total = 2,
        .section_count = 1,
        .sections = {{FB_SECTION_K, FB_ELEM_BYTE, FB_CODEC_RAW, 0, 2, 3900, 0}},
    };
    struct client *c = &w->clients[0];
    static uint8_t packet[FB_WIRE_MAX_BYTES], manifest[FB_MANIFEST_MAX_BYTES];
    struct fb_space_request request = {0};
    struct fb_wire_writer p;
    size_t bytes;

    HOLDS(w, fb_layout_init(&w->layout, &m, NULL) == FB_OK);
    HOLDS(w, fb_manifest_encode(&m, manifest, sizeof(manifest), &bytes, NULL) == FB_OK);
    request.manifest_bytes = (uint32_t)bytes;
    connect_client(w, c);
    read_replies(w);
    fb_wire_begin(&p, packet, FB_MSG_SPACE, 8, FB_OK, &request, sizeof(request));
    fb_wire_append(&p, manifest, bytes);
    send_packet(w, c, &p, FB_MSG_SPACE, NULL, 0);
    read_replies(w);
    HOLDS(w, !c->waits);
    w->space = 0; /* the first handle */
}

static void create_node(struct world *w)
{
    struct fb_node_edges edges = {
        .context = w, .submit = submit, .watch = watch, .unwatch = unwatch, .wrap_tier = wrap_tier};
    struct fb_log log = {FB_LOG_ERROR, FB_LOG_LOGFMT, -1}; /* rejects are part of it */
    struct fb_config config;
    struct fb_error error;

    fb_config_init(&config);
    snprintf(config.run_dir, sizeof(config.run_dir), "%s/run", w->dir);
    snprintf(config.chunk_dir, sizeof(config.chunk_dir), "%s/chunks", w->dir);
    config.host_bytes = 8 << 20;
    config.lease_ns = LEASE_NS;
    config.reserve_ns = RESERVE_NS;
    w->now_ns = SECOND;
    if (fb_node_create(&config, &edges, w->metrics, &log, w->now_ns, &w->node, &error) != FB_OK) {
        fail_here(w, error.text);
    }
}

/* Everybody goes; then nothing may be held. */
static void wind_down(struct world *w)
{
    struct fb_node_status s;

    for (uint32_t i = 0; i < CLIENTS; i++) {
        kill_client(w, &w->clients[i]);
        while (w->job_count > 0) {
            run_job(w, 0);
        }
    }
    for (int i = 0; i < 4; i++) {
        pass_time(w, 2 * SECOND);
    }
    fb_node_check(w->node);
    fb_node_get_status(w->node, &s);
    HOLDS(w, s.clients == 0 && s.leases == 0);
    HOLDS(w, s.leased_bytes == 0 && s.reserved_bytes == 0 && s.quarantined_bytes == 0);
    HOLDS(w, s.blocks == s.host.slots_used);
    fb_node_destroy(w->node);
}

static int remove_one(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    (void)st;
    (void)flag;
    (void)ftw;
    return remove(path);
}

static uint64_t run_schedule(uint64_t seed, struct client clients[CLIENTS])
{
    static struct world w;
    uint64_t committed;

    memset(&w, 0, sizeof(w));
    w.seed = seed;
    w.random = seed;
    snprintf(w.dir, sizeof(w.dir), "/dev/shm/forebay-schedule-XXXXXX");
    HOLDS(&w, mkdtemp(w.dir));
    HOLDS(&w, fb_metrics_create("test", &w.metrics) == FB_OK);
    memcpy(w.clients, clients, sizeof(w.clients));
    for (uint32_t i = 0; i < CLIENTS; i++) {
        w.clients[i].id[0] = (uint8_t)(i + 1);
    }
    create_node(&w);
    open_space(&w);
    for (int i = 0; i < STEPS; i++) {
        step(&w);
    }
    committed = fb_metrics_value(w.metrics, FB_METRIC_COMMITTED_BLOCKS);
    wind_down(&w);
    for (uint32_t i = 0; i < CLIENTS; i++) {
        clients[i].pid = w.clients[i].pid;
        clients[i].pidfd = w.clients[i].pidfd;
    }
    fb_metrics_destroy(w.metrics);
    nftw(w.dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    return committed;
}

static void test_schedules(void **state)
{
    const char *seed = getenv("FOREBAY_SEED"), *count = getenv("FOREBAY_SCHEDULES");
    uint64_t first = seed ? strtoull(seed, NULL, 10) : 1;
    uint64_t n = seed ? 1 : count ? strtoull(count, NULL, 10) : 2000;
    struct client clients[CLIENTS] = {0};
    struct world w = {0};
    uint64_t committed = 0;

    (void)state;
    for (uint32_t i = 0; i < CLIENTS; i++) {
        spawn(&w, &clients[i]);
    }
    for (uint64_t i = 0; i < n; i++) {
        committed += run_schedule(first + i, clients);
    }
    for (uint32_t i = 0; i < CLIENTS; i++) {
        kill(clients[i].pid, SIGKILL);
        waitpid(clients[i].pid, NULL, 0);
        close(clients[i].pidfd);
    }
    printf("%llu schedules, %llu blocks committed\n", (unsigned long long)n,
           (unsigned long long)committed);
    assert_true(committed > n); /* the schedules do something */
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_schedules)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
