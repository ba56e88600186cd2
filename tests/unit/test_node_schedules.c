/* Seeded schedules of clients that share a small tier between spaces of three slot sizes: chunks
 * move from one to the other while they are read, mapped and written; the node stops or is killed,
 * and clients outlive it. After every step the structure is checked (node_util.c) and the oracle:
 *
 *   what a client leases has the bytes of its key until it lets go
 *   no slot is given to a writer while somebody reads it, or writes something else there
 *   a lookup names no slot that somebody writes
 *
 *   FOREBAY_SCHEDULES  how many (default 300)       FOREBAY_SEED  only this one */
#include "proto/sum.h"
#include "tests/unit/node_util.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { PEERS = 3, SPACES = 3, CHAINS = 3, PAGES = 5, STEPS = 200, MAX_HELD = 512 };
enum kind { LEASE, CLAIM, BARE /* a slot that a claim of the node before was for */ };

static const struct shape shapes[SPACES] = {
    {.row_bytes = LARGE_ROW},
    {.row_bytes = SMALL_ROW},
    {.rule = FB_RULE_WINDOW, .row_bytes = 1000, .window_tokens = 32},
};
static const uint32_t ranges[3][4] = {{0, PLANES, 0, LAYERS}, {0, 1, 0, LAYERS}, {1, 1, 0, LAYERS}};

/* One slot that a peer reads or writes, by the id of a lease or claim. */
struct held {
    enum kind kind;
    uint32_t peer;
    uint64_t id;
    uint32_t space, chain, page, range;
    struct fb_wire_location where;
};

struct actor {
    struct peer *peer;
    bool waits; /* for slots */
    struct pages asked;
    uint32_t asked_space, asked_range;
};

struct world {
    struct rig rig;
    uint64_t random;
    struct actor actors[PEERS];
    uint32_t handles[SPACES];
    struct held held[MAX_HELD];
    uint32_t held_count;
};

static char seed_line[64]; /* of the schedule that runs */

static void on_abort(int signal_number)
{
    ssize_t n = write(STDERR_FILENO, seed_line, strlen(seed_line));

    (void)signal_number;
    (void)n;
}

static uint32_t draw(struct world *w, uint32_t below)
{
    w->random = fb_mix64(w->random);
    return (uint32_t)(w->random % below);
}

static bool chance(struct world *w, uint32_t one_in)
{
    return draw(w, one_in) == 0;
}

static struct pages pages_of(const struct world *w, uint32_t space, uint32_t chain)
{
    return (struct pages){w->handles[space], space * 10 + chain, 0, PAGES};
}

/* --- the oracle --- */

static void held_key(const struct held *h, uint8_t ret_key[FB_KEY_BYTES])
{
    key_of(h->space * 10 + h->chain, h->page, ret_key);
}

static bool is_same(const struct held *a, const struct held *b)
{
    return a->where.chunk == b->where.chunk && a->where.slot == b->where.slot;
}

static void check_leases(const struct world *w)
{
    for (uint32_t i = 0; i < w->held_count; i++) {
        uint8_t key[FB_KEY_BYTES];

        held_key(&w->held[i], key);
        assert_true(w->held[i].kind != LEASE ||
                    rig_has(&w->rig, &shapes[w->held[i].space], w->held[i].where, key));
    }
}

static void hold(struct world *w, const struct held *h)
{
    for (uint32_t i = 0; i < w->held_count; i++) {
        const struct held *other = &w->held[i];

        if (!is_same(h, other)) {
            continue;
        }
        if (h->kind == CLAIM) { /* a writer: alone, but for those of the same block */
            assert_int_equal(other->kind, CLAIM);
            assert_true(other->space == h->space && other->chain == h->chain &&
                        other->page == h->page);
            assert_true(other->range + h->range == 3); /* one plane each */
        } else if (h->kind == LEASE) {
            assert_int_equal(other->kind, LEASE);
        }
    }
    assert_true(w->held_count < MAX_HELD);
    w->held[w->held_count++] = *h;
}

/* By id, or all of a peer (0). */
static void let_go(struct world *w, uint32_t peer, uint64_t id)
{
    for (uint32_t i = w->held_count; i-- > 0;) {
        if (w->held[i].peer == peer && (id == 0 || w->held[i].id == id)) {
            w->held[i] = w->held[--w->held_count];
        }
    }
}

static struct held *pick(struct world *w, uint32_t peer, bool claims)
{
    uint32_t start = w->held_count ? draw(w, w->held_count) : 0;

    for (uint32_t i = 0; i < w->held_count; i++) {
        struct held *h = &w->held[(start + i) % w->held_count];

        if (h->peer == peer && (h->kind == CLAIM) == claims) {
            return h;
        }
    }
    return NULL;
}

/* --- what clients do --- */

static void take_rows(struct world *w, uint32_t n, const struct fb_reserve_row *rows)
{
    struct actor *a = &w->actors[n];

    a->waits = false;
    for (uint32_t i = 0; i < a->asked.count; i++) {
        struct held h = {CLAIM,
                         n,
                         rows[i].claim,
                         a->asked_space,
                         a->asked.chain % 10,
                         a->asked.first + i,
                         a->asked_range,
                         rows[i].where};

        if (rows[i].status == FB_OK) {
            hold(w, &h);
        }
    }
}

static void reserve(struct world *w, uint32_t n)
{
    struct actor *a = &w->actors[n];
    struct fb_reserve_row rows[PAGES];
    enum fb_status status;

    a->asked_space = draw(w, SPACES);
    a->asked_range = chance(w, 2) ? 0 : 1 + draw(w, 2);
    a->asked = pages_of(w, a->asked_space, draw(w, CHAINS));
    a->asked.first = chance(w, 3) ? draw(w, PAGES) : 0;
    a->asked.count = 1 + draw(w, PAGES - a->asked.first);
    status = peer_reserve(a->peer, a->asked, ranges[a->asked_range], rows);
    a->waits = status == NOT_ANSWERED;
    if (!a->waits) {
        assert_int_equal(status, FB_OK);
        take_rows(w, n, rows);
    }
}

static void hear(struct world *w, uint32_t n)
{
    struct fb_reserve_row rows[PAGES];
    struct peer *p = w->actors[n].peer;

    if (w->actors[n].waits && peer_receive(p)) {
        assert_int_equal(p->reply.header.status, FB_OK);
        peer_rows(p, rows, w->actors[n].asked.count);
        take_rows(w, n, rows);
    }
}

static void commit(struct world *w, uint32_t n)
{
    struct held *found = pick(w, n, true);
    uint8_t key[FB_KEY_BYTES];
    uint64_t sums[PLANES];
    struct held h;

    if (!found) {
        return;
    }
    h = *found;
    held_key(&h, key);
    rig_write(&w->rig, &shapes[h.space], h.where, key, ranges[h.range], sums);
    let_go(w, n, h.id);
    if (chance(w, 6)) {
        assert_int_equal(peer_abort(w->actors[n].peer, h.id), FB_OK);
    } else {
        enum fb_status status = peer_commit(w->actors[n].peer, h.id, sums, ranges[h.range][1]);

        assert_true(status == FB_OK || status == FB_ESTATE || status == FB_EIO);
    }
}

static void lookup(struct world *w, uint32_t n)
{
    static struct hit hit;
    uint32_t chain = draw(w, CHAINS), first = draw(w, SPACES), count = chance(w, 4) ? SPACES : 1;
    struct pages spaces[SPACES];
    enum fb_status status;

    for (uint32_t s = 0; s < count; s++) {
        spaces[s] = pages_of(w, (first + s) % SPACES, chain);
    }
    status = peer_lookup(w->actors[n].peer, spaces, count, &hit);
    assert_true(status == FB_OK || status == FB_AGAIN);
    for (uint32_t i = 0; status == FB_OK && i < count * hit.pages; i++) {
        struct held h = {LEASE,         n, hit.lease,   (first + i / hit.pages) % SPACES, chain,
                         i % hit.pages, 0, hit.where[i]};

        if (h.where.chunk != FB_WIRE_NOWHERE) {
            hold(w, &h);
        }
    }
    check_leases(w);
}

static void release(struct world *w, uint32_t n)
{
    struct held *h = pick(w, n, false);

    if (h) {
        uint64_t id = h->id;

        let_go(w, n, id);
        assert_int_equal(peer_release(w->actors[n].peer, id), FB_OK);
    }
}

/* Name everything, or nothing: then what has run out may be used again. A chunk that is to be
 * unmapped is, now or later. */
static void renew(struct world *w, uint32_t n, bool all)
{
    struct peer *p = w->actors[n].peer;
    struct fb_renew_request r = {0};
    struct fb_wire_writer out;

    if (!all) {
        let_go(w, n, 0);
    }
    fb_wire_begin(&out, p->tx, FB_MSG_RENEW, 1, FB_OK, &r, sizeof(r));
    for (int claims = 0; claims < 2; claims++) {
        for (uint32_t i = 0; i < w->held_count; i++) {
            if (w->held[i].peer == n && (w->held[i].kind == CLAIM) == claims) {
                fb_wire_append(&out, &w->held[i].id, sizeof(uint64_t));
                r.claim_count += claims == 1;
                r.lease_count += claims == 0;
            }
        }
    }
    if (p->notices > 0 && chance(w, 2)) {
        fb_wire_append(&out, &p->notice.value, sizeof(uint32_t));
        r.unmapped_count = 1;
        p->notices = 0;
    }
    memcpy(p->tx + sizeof(struct fb_wire_header), &r, sizeof(r));
    assert_int_equal(peer_send(p, &out), FB_OK);
}

static void map(struct world *w, uint32_t n)
{
    struct held *h = pick(w, n, false);

    if (h) {
        assert_int_equal(peer_map(w->actors[n].peer, h->where.chunk), FB_OK);
    }
}

static void open_spaces(struct world *w, uint32_t n)
{
    for (uint32_t s = 0; s < SPACES; s++) {
        w->handles[s] = peer_space(w->actors[n].peer, &shapes[s]);
    }
}

/* The connection goes; who holds something is known when it comes back. */
static void reconnect(struct world *w, uint32_t n)
{
    struct peer *p = w->actors[n].peer;
    bool holds = pick(w, n, true) || pick(w, n, false);

    peer_close(p);
    w->actors[n].waits = false;
    peer_connect(p);
    assert_true(!holds || p->reply.hello_reply.client_existed);
}

static void replace(struct world *w, uint32_t n)
{
    let_go(w, n, 0);
    peer_free(w->actors[n].peer);
    w->actors[n] = (struct actor){.peer = peer_new(&w->rig, 0, (uint8_t)(n + 1))};
}

/* --- restarts --- */

/* What a survivor holds it names, slot by slot, and has it by new leases. */
static void resume(struct world *w, uint32_t n)
{
    peer_connect(w->actors[n].peer);
    open_spaces(w, n);
    lookup(w, n); /* at once, also while others are awaited */
    for (uint32_t i = 0; i < w->held_count; i++) {
        struct held *h = &w->held[i];

        if (h->peer == n && h->id < UINT32_MAX) {
            assert_int_equal(peer_resume(w->actors[n].peer, h->where, &h->id), FB_OK);
            h->kind = h->kind == CLAIM ? BARE : h->kind;
        }
    }
    renew(w, n, true);
}

static void restart(struct world *w)
{
    uint32_t alive = 0;

    (chance(w, 2) ? rig_crash : rig_stop)(&w->rig);
    for (uint32_t n = 0; n < PEERS; n++) {
        if (chance(w, 3)) {
            let_go(w, n, 0);
            peer_kill(w->actors[n].peer);
            continue;
        }
        peer_close(w->actors[n].peer);
        w->actors[n].waits = false;
        alive++;
    }
    for (uint32_t i = 0; i < w->held_count; i++) {
        w->held[i].id = i + 1; /* of the node before; real ones are larger */
    }
    rig_start(&w->rig);
    assert_int_equal(rig_status(&w->rig).awaited, alive);
    for (uint32_t n = 0; n < PEERS; n++) {
        if (w->actors[n].peer->pid) {
            resume(w, n);
        }
    }
    for (uint32_t n = 0; n < PEERS; n++) {
        if (!w->actors[n].peer->pid) {
            replace(w, n);
            open_spaces(w, n);
        }
    }
    assert_int_equal(rig_status(&w->rig).awaited, 0);
}

/* --- schedules --- */

static void act(struct world *w, uint32_t n)
{
    if (w->actors[n].waits) {
        if (chance(w, 20)) {
            reconnect(w, n);
        }
        return;
    }
    switch (draw(w, 16)) {
    case 0:
    case 1:
    case 2: reserve(w, n); break;
    case 3:
    case 4:
    case 5:
    case 6:
    case 7: commit(w, n); break;
    case 8:
    case 9:
    case 10: lookup(w, n); break;
    case 11:
    case 12: release(w, n); break;
    case 13: renew(w, n, !chance(w, 5)); break;
    case 14: map(w, n); break;
    case 15: reconnect(w, n); break;
    }
}

static void purge(struct world *w)
{
    uint8_t key[FB_KEY_BYTES];
    uint64_t blocks, bytes;

    key_of(draw(w, SPACES) * 10 + draw(w, CHAINS), draw(w, PAGES), key);
    assert_int_equal(fb_node_purge(w->rig.node, "default", NULL, chance(w, 6) ? NULL : key, &blocks,
                                   &bytes, NULL),
                     FB_OK);
}

static void step(struct world *w)
{
    uint32_t what = draw(w, 100);

    if (what < 76) {
        act(w, draw(w, PEERS));
    } else if (what < 86) {
        rig_run_jobs(&w->rig);
    } else if (what < 95) {
        rig_pass(&w->rig, draw(w, 4) ? SECOND / 10 : 2 * SECOND);
    } else if (what < 97) {
        purge(w);
    } else if (what < 98) {
        replace(w, draw(w, PEERS));
    } else if (what == 98 && chance(w, 2)) {
        restart(w);
    }
    fb_node_check(w->rig.node);
    for (uint32_t n = 0; n < PEERS; n++) {
        hear(w, n);
    }
    check_leases(w);
}

static void wind_down(struct world *w)
{
    struct fb_node_status s;

    for (uint32_t n = 0; n < PEERS; n++) {
        peer_free(w->actors[n].peer);
        rig_run_jobs(&w->rig);
    }
    rig_pass(&w->rig, w->rig.config.reserve_ns); /* halves of blocks */
    s = rig_status(&w->rig);
    assert_int_equal(s.clients, 0);
    assert_int_equal(s.leases, 0);
    assert_int_equal(s.leased_bytes + s.reserved_bytes + s.quarantined_bytes, 0);
    assert_int_equal(s.blocks, s.host.slots_used);
}

static void run_schedule(struct world *w, uint64_t seed, uint64_t *moves)
{
    memset(w, 0, sizeof(*w));
    w->random = seed;
    snprintf(seed_line, sizeof(seed_line), "seed %llu\n", (unsigned long long)seed);
    rig_init(&w->rig);
    w->rig.config.host_bytes = TIER_OF(2);
    w->rig.config.client_share_percent = 60;
    w->rig.config.lease_ns = 5 * SECOND;
    w->rig.config.reserve_ns = 3 * SECOND;
    if (seed % 2) {
        w->rig.faults =
            (struct fb_tier_faults){.seed = seed, .fail_reserve = 30, .fail_commit = 20};
    }
    rig_start(&w->rig);
    for (uint32_t n = 0; n < PEERS; n++) {
        w->actors[n].peer = peer_new(&w->rig, 0, (uint8_t)(n + 1));
        open_spaces(w, n);
    }
    for (uint32_t i = 0; i < STEPS; i++) {
        step(w);
    }
    *moves += rig_metric(&w->rig, FB_METRIC_CHUNKS_MOVED);
    wind_down(w);
    rig_fini(&w->rig);
}

static void test_schedules(void **state)
{
    const char *seed = getenv("FOREBAY_SEED"), *count = getenv("FOREBAY_SCHEDULES");
    uint64_t first = seed ? strtoull(seed, NULL, 10) : 1, moves = 0;
    uint64_t n = seed ? 1 : count ? strtoull(count, NULL, 10) : 300;
    struct world *w = calloc(1, sizeof(*w));

    (void)state;
    assert_non_null(w);
    for (uint64_t i = 0; i < n; i++) {
        run_schedule(w, first + i, &moves);
    }
    seed_line[0] = 0;
    free(w);
    print_message("%llu schedules, %llu chunks moved\n", (unsigned long long)n,
                  (unsigned long long)moves);
    assert_true(seed || moves > n / 4); /* it is about those */
}

static int teardown(void **state)
{
    (void)state;
    if (seed_line[0]) {
        print_error("%s", seed_line);
    }
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test_teardown(test_schedules, teardown)};

    signal(SIGABRT, on_abort);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
