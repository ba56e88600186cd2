/* Driving a node from a test. */
#include "tests/unit/node_util.h"

#include "proto/sum.h"

#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define PAGE_TOKENS 16

static const uint32_t whole[4] = {0, PLANES, 0, LAYERS};

/* --- the node --- */

static void submit(void *context, struct fb_job *job)
{
    struct rig *rig = context;

    job->next = NULL;
    *rig->last_job = job;
    rig->last_job = &job->next;
}

static enum fb_status watch(void *context, int fd, struct fb_source *source)
{
    struct rig *rig = context;

    (void)fd;
    rig->watched = source;
    return FB_OK;
}

static void unwatch(void *context, int fd)
{
    (void)context;
    (void)fd;
}

static struct fb_tier *wrap_tier(void *context, struct fb_tier *tier)
{
    struct rig *rig = context;

    rig->host = tier;
    if (rig->faults.seed) {
        assert_int_equal(fb_tier_fault(rig->host, &rig->faults, &tier), FB_OK);
    }
    return tier;
}

void rig_init(struct rig *rig)
{
    memset(rig, 0, sizeof(*rig));
    snprintf(rig->dir, sizeof(rig->dir), "%s/test_node.XXXXXX",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    assert_non_null(mkdtemp(rig->dir));
    fb_config_init(&rig->config);
    snprintf(rig->config.run_dir, sizeof(rig->config.run_dir), "%s/run", rig->dir);
    snprintf(rig->config.chunk_dir, sizeof(rig->config.chunk_dir), "%s/chunks", rig->dir);
    rig->config.host_bytes = TIER_OF(4);
    rig->config.huge_pages = FB_HUGE_PAGES_NEVER;
    rig->config.lease_ns = 10 * SECOND;
    rig->config.reserve_ns = 5 * SECOND;
    rig->now_ns = 100 * SECOND;
}

void rig_start(struct rig *rig)
{
    struct fb_node_edges edges = {.context = rig,
                                  .submit = submit,
                                  .watch = watch,
                                  .unwatch = unwatch,
                                  .wrap_tier = wrap_tier};
    struct fb_log log = {FB_LOG_ERROR, FB_LOG_LOGFMT, -1};
    struct fb_error error;

    rig->jobs = NULL;
    rig->last_job = &rig->jobs;
    assert_int_equal(fb_metrics_create("test", &rig->metrics), FB_OK);
    if (fb_node_create(&rig->config, &edges, rig->metrics, &log, rig->now_ns, &rig->node, &error) !=
        FB_OK) {
        fail_msg("%s", error.text);
    }
    rig->lives++;
    fb_node_check(rig->node);
}

void rig_stop(struct rig *rig)
{
    if (rig->node) {
        rig_run_jobs(rig);
        fb_node_destroy(rig->node);
        fb_metrics_destroy(rig->metrics);
        rig->node = NULL;
    }
}

/* A node's end clears nothing on disk, but its clients' ends do: the copy is made before. */
void rig_crash(struct rig *rig)
{
    char command[512], copy[FB_CONFIG_TEXT_BYTES];

    snprintf(copy, sizeof(copy), "%s/chunks-%u", rig->dir, rig->lives);
    snprintf(command, sizeof(command), "cp -r %s %s", rig->config.chunk_dir, copy);
    assert_int_equal(system(command), 0);
    rig_stop(rig);
    memcpy(rig->config.chunk_dir, copy, sizeof(copy));
}

static int remove_one(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    (void)st;
    (void)flag;
    (void)ftw;
    return remove(path);
}

void rig_fini(struct rig *rig)
{
    rig_stop(rig);
    nftw(rig->dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

void rig_pass(struct rig *rig, uint64_t ns)
{
    rig->now_ns += ns;
    fb_node_set_time(rig->node, rig->now_ns);
    fb_node_tick(rig->node);
    fb_node_collect(rig->node);
    fb_node_check(rig->node);
}

uint32_t rig_run_jobs(struct rig *rig)
{
    uint32_t n = 0;

    while (rig->jobs) {
        struct fb_job *job = rig->jobs;

        rig->jobs = job->next;
        if (!rig->jobs) {
            rig->last_job = &rig->jobs;
        }
        job->work(job);
        job->mail.run(&job->mail);
        n++;
    }
    fb_node_collect(rig->node);
    fb_node_check(rig->node);
    return n;
}

struct fb_node_status rig_status(struct rig *rig)
{
    struct fb_node_status status;

    fb_node_get_status(rig->node, &status);
    return status;
}

uint64_t rig_metric(const struct rig *rig, enum fb_metric metric)
{
    return fb_metrics_value(rig->metrics, metric);
}

/* --- spaces and blocks --- */

void shape_manifest(const struct shape *shape, struct fb_manifest *ret_manifest)
{
    *ret_manifest = (struct fb_manifest){
        .model = "test",
        .rule = shape->rule ? shape->rule : FB_RULE_FULL,
        .window_tokens = shape->window_tokens,
        .page_tokens = PAGE_TOKENS,
        .layer_count = LAYERS,
        .layers = {0, 1},
        .head_count = PLANES,
        .head_total = PLANES,
        .section_count = 1,
        .sections = {{shape->rule == FB_RULE_STATE ? FB_SECTION_STATE : FB_SECTION_K, FB_ELEM_BYTE,
                      FB_CODEC_RAW, 0, LAYERS, shape->row_bytes, 0}},
    };
    snprintf(ret_manifest->tenant, sizeof(ret_manifest->tenant), "%s",
             shape->tenant ? shape->tenant : "default");
}

static void shape_layout(const struct shape *shape, struct fb_layout *ret_layout)
{
    static struct fb_manifest m;

    shape_manifest(shape, &m);
    assert_int_equal(fb_layout_init(ret_layout, &m, NULL), FB_OK);
}

void key_of(uint32_t chain, uint32_t page, uint8_t ret_key[FB_KEY_BYTES])
{
    for (uint32_t i = 0; i < FB_KEY_BYTES / 8; i++) {
        uint64_t v = fb_mix64(((uint64_t)chain << 32 | page) * 8 + i);

        memcpy(ret_key + 8 * i, &v, sizeof(v));
    }
}

uint8_t *rig_slot(const struct rig *rig, struct fb_wire_location where)
{
    uint8_t *slot = rig->host->ops->map(rig->host, (struct fb_location){where.chunk, where.slot});

    assert_non_null(slot);
    return slot;
}

void rig_write(const struct rig *rig, const struct shape *shape, struct fb_wire_location where,
               const uint8_t key[FB_KEY_BYTES], const uint32_t range[4], uint64_t *ret_sums)
{
    static struct fb_layout l;
    uint8_t *slot = rig_slot(rig, where);

    shape_layout(shape, &l);
    for (uint32_t i = 0; i < range[1]; i++) {
        uint32_t plane = range[0] + i;

        ret_sums[i] = 0;
        for (uint32_t layer = range[2]; layer < range[2] + range[3]; layer++) {
            uint8_t *segment = slot + fb_layout_segment(&l, plane, layer);
            uint64_t at = fb_layout_sum_offset(&l, layer), sum;

            memset(segment, 0, l.segment_offset[layer + 1] - l.segment_offset[layer]);
            memcpy(segment, key, FB_KEY_BYTES);
            sum = fb_sum_seed(key, plane, layer) + fb_sum_ref(segment, at, 0);
            memcpy(segment + at, &sum, sizeof(sum));
            ret_sums[i] += sum;
        }
    }
}

bool rig_has(const struct rig *rig, const struct shape *shape, struct fb_wire_location where,
             const uint8_t key[FB_KEY_BYTES])
{
    static struct fb_layout l;
    const uint8_t *slot = rig_slot(rig, where);
    const struct fb_block_header *h = (const void *)slot;
    bool same = memcmp(h->key, key, FB_KEY_BYTES) == 0;

    shape_layout(shape, &l);
    for (uint32_t i = 0; i < PLANES * LAYERS; i++) {
        same = same &&
               memcmp(slot + fb_layout_segment(&l, i / LAYERS, i % LAYERS), key, FB_KEY_BYTES) == 0;
    }
    return same;
}

/* --- clients --- */

/* The lock that says it lives, as clients hold it. */
static int take_lock(const struct peer *p)
{
    const struct fb_config *c = &p->rig->config;
    char path[512];
    int at = snprintf(path, sizeof(path), "%s/%s/clients/", c->run_dir, c->tenants[p->tenant].name);
    int fd;

    for (size_t i = 0; i < FB_CLIENT_ID_BYTES; i++) {
        at += snprintf(path + at, sizeof(path) - (size_t)at, "%02x", p->id[i]);
    }
    fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(flock(fd, LOCK_EX | LOCK_NB), 0);
    return fd;
}

/* A child that holds a lock and waits. It keeps nothing else open, and the pipe's end tells that
 * it has got so far: else it would keep others' connections from ending. */
static pid_t spawn(int lock_fd)
{
    int ends[2];
    char byte;
    pid_t pid;

    assert_int_equal(pipe(ends), 0);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(lock_fd, STDIN_FILENO);
        close_range(STDERR_FILENO + 1, UINT_MAX, 0);
        for (;;) {
            pause();
        }
    }
    close(ends[1]);
    assert_int_equal(read(ends[0], &byte, 1), 0);
    close(ends[0]);
    return pid;
}

struct peer *peer_new(struct rig *rig, uint32_t tenant, uint8_t id)
{
    struct peer *p = calloc(1, sizeof(*p));
    int lock_fd;

    assert_non_null(p);
    p->rig = rig;
    p->tenant = tenant;
    p->id[0] = id;
    lock_fd = take_lock(p);
    p->pid = spawn(lock_fd);
    close(lock_fd);
    p->pidfd = (int)syscall(SYS_pidfd_open, p->pid, 0);
    assert_true(p->pidfd >= 0);
    peer_connect(p);
    return p;
}

bool peer_receive(struct peer *p)
{
    enum fb_status status = FB_OK;
    int fds[FB_CHANNEL_MAX_FDS];
    uint32_t fd_count;
    size_t bytes;

    while (p->channel) {
        status = fb_channel_recv(p->channel, p->rx, sizeof(p->rx), &bytes, fds, &fd_count);
        if (status != FB_OK) {
            break;
        }
        for (uint32_t i = 0; i < fd_count; i++) {
            close(fds[i]);
        }
        assert_int_equal(fb_wire_parse_reply(p->rx, bytes, &p->reply, NULL), FB_OK);
        if (p->reply.header.type != FB_MSG_NOTIFY) {
            return true;
        }
        p->notice = p->reply.notify;
        p->notices++;
    }
    if (status == FB_ECONN) {
        fb_channel_destroy(p->channel);
        p->channel = NULL;
    }
    return false;
}

static enum fb_status ask(struct peer *p, struct fb_wire_writer *w, const int *fds,
                          uint32_t fd_count)
{
    uint32_t bytes = fb_wire_end(w);
    uint16_t type = ((const struct fb_wire_header *)w->packet)->type;

    assert_int_equal(fb_channel_send(p->channel, w->packet, bytes, fds, fd_count), FB_OK);
    p->session->ready(p->session);
    fb_node_collect(p->rig->node);
    fb_node_check(p->rig->node);
    if (!peer_receive(p)) {
        return NOT_ANSWERED;
    }
    assert_int_equal(p->reply.header.type, type);
    return (enum fb_status)p->reply.header.status;
}

enum fb_status peer_send(struct peer *p, struct fb_wire_writer *w)
{
    return ask(p, w, NULL, 0);
}

static void begin(struct peer *p, struct fb_wire_writer *w, enum fb_msg type, const void *body,
                  size_t bytes)
{
    fb_wire_begin(w, p->tx, type, 1, FB_OK, body, bytes);
}

void peer_connect(struct peer *p)
{
    struct fb_hello_request hello = {FB_WIRE_VERSION, FB_WIRE_VERSION, FB_HELLO_CONTROL, {0}};
    struct fb_channel *ends[2];
    struct fb_wire_writer w;

    assert_int_equal(fb_unix_pair(ends), FB_OK);
    assert_int_equal(fb_node_connect(p->rig->node, p->tenant, ends[1]), FB_OK);
    p->channel = ends[0];
    p->session = p->rig->watched;
    memcpy(hello.client, p->id, sizeof(hello.client));
    begin(p, &w, FB_MSG_HELLO, &hello, sizeof(hello));
    assert_int_equal(ask(p, &w, &p->pidfd, 1), FB_OK);
    if (!p->reply.hello_reply.client_existed) {
        p->exit = p->rig->watched;
    }
}

void peer_close(struct peer *p)
{
    fb_channel_destroy(p->channel);
    p->channel = NULL;
    if (p->rig->node) {
        p->session->ready(p->session);
        fb_node_collect(p->rig->node);
        fb_node_check(p->rig->node);
    } else {
        p->exit = NULL;
    }
}

void peer_kill(struct peer *p)
{
    kill(p->pid, SIGKILL);
    assert_int_equal(waitpid(p->pid, NULL, 0), p->pid);
    p->pid = 0;
    if (p->rig->node && p->exit) {
        p->exit->ready(p->exit);
        fb_node_check(p->rig->node);
    }
    if (p->channel) {
        peer_close(p);
    }
}

void peer_free(struct peer *p)
{
    if (p->pid) {
        peer_kill(p);
    }
    close(p->pidfd);
    free(p);
}

/* --- requests --- */

uint32_t peer_space(struct peer *p, const struct shape *shape)
{
    uint8_t encoded[FB_MANIFEST_MAX_BYTES];
    static struct fb_manifest m;
    struct fb_space_request request;
    struct fb_wire_writer w;
    size_t bytes;

    shape_manifest(shape, &m);
    assert_int_equal(fb_manifest_encode(&m, encoded, sizeof(encoded), &bytes, NULL), FB_OK);
    request.manifest_bytes = (uint32_t)bytes;
    begin(p, &w, FB_MSG_SPACE, &request, sizeof(request));
    fb_wire_append(&w, encoded, bytes);
    assert_int_equal(peer_send(p, &w), FB_OK);
    return p->reply.space_reply.space;
}

static void append_keys(struct fb_wire_writer *w, struct pages pages)
{
    for (uint32_t i = 0; i < pages.count; i++) {
        key_of(pages.chain, pages.first + i, fb_wire_append(w, NULL, FB_KEY_BYTES));
    }
}

void peer_rows(const struct peer *p, struct fb_reserve_row *ret_rows, uint32_t count)
{
    assert_int_equal(p->reply.header.type, FB_MSG_RESERVE);
    assert_int_equal(p->reply.list_reply.count, count);
    memcpy(ret_rows, p->reply.first, count * sizeof(*ret_rows));
}

enum fb_status peer_reserve(struct peer *p, struct pages pages, const uint32_t range[4],
                            struct fb_reserve_row *ret_rows)
{
    const uint32_t *r = range ? range : whole;
    struct fb_reserve_request request = {.space = pages.space,
                                         .count = pages.count,
                                         .has_parent = pages.first > 0,
                                         .plane_first = r[0],
                                         .plane_count = r[1],
                                         .layer_first = r[2],
                                         .layer_count = r[3],
                                         .position = pages.first};
    struct fb_wire_writer w;
    enum fb_status status;

    if (pages.first > 0) {
        key_of(pages.chain, pages.first - 1, request.parent);
    }
    begin(p, &w, FB_MSG_RESERVE, &request, sizeof(request));
    append_keys(&w, pages);
    status = peer_send(p, &w);
    if (status == FB_OK) {
        peer_rows(p, ret_rows, pages.count);
    }
    return status;
}

enum fb_status peer_commit(struct peer *p, uint64_t claim, const uint64_t *sums, uint32_t n)
{
    struct fb_commit_request request = {1, n};
    struct fb_wire_writer w;
    enum fb_status status;

    begin(p, &w, FB_MSG_COMMIT, &request, sizeof(request));
    fb_wire_append(&w, &claim, sizeof(claim));
    fb_wire_append(&w, sums, n * sizeof(*sums));
    status = peer_send(p, &w);
    return status == FB_OK ? (enum fb_status)fb_wire_u32(p->reply.first, 0) : status;
}

/* The first status of a list of one element. */
static enum fb_status ask_one(struct peer *p, enum fb_msg type, const void *element, size_t bytes)
{
    struct fb_list_request request = {.count = 1};
    struct fb_wire_writer w;
    enum fb_status status;

    begin(p, &w, type, &request, sizeof(request));
    fb_wire_append(&w, element, bytes);
    status = peer_send(p, &w);
    return status == FB_OK ? (enum fb_status)fb_wire_u32(p->reply.first, 0) : status;
}

enum fb_status peer_abort(struct peer *p, uint64_t claim)
{
    return ask_one(p, FB_MSG_ABORT, &claim, sizeof(claim));
}

enum fb_status peer_attach(struct peer *p, uint64_t lease)
{
    return ask_one(p, FB_MSG_ATTACH, &lease, sizeof(lease));
}

enum fb_status peer_release(struct peer *p, uint64_t lease)
{
    return ask_one(p, FB_MSG_RELEASE, &lease, sizeof(lease));
}

enum fb_status peer_map(struct peer *p, uint32_t chunk)
{
    return ask_one(p, FB_MSG_CHUNKS, &chunk, sizeof(chunk));
}

void peer_put(struct peer *p, const struct shape *shape, struct pages pages)
{
    struct fb_reserve_row rows[MAX_PAGES] = {0};
    enum fb_status status = peer_reserve(p, pages, NULL, rows);

    while (status == NOT_ANSWERED) {
        assert_true(rig_run_jobs(p->rig) > 0);
        status = peer_receive(p) ? (enum fb_status)p->reply.header.status : NOT_ANSWERED;
        if (status == FB_OK) {
            peer_rows(p, rows, pages.count);
        }
    }
    assert_int_equal(status, FB_OK);
    for (uint32_t i = 0; i < pages.count; i++) {
        uint8_t key[FB_KEY_BYTES];
        uint64_t sums[PLANES];

        assert_int_equal(rows[i].status, FB_OK);
        key_of(pages.chain, pages.first + i, key);
        rig_write(p->rig, shape, rows[i].where, key, whole, sums);
        assert_int_equal(peer_commit(p, rows[i].claim, sums, PLANES), FB_OK);
    }
}

enum fb_status peer_lookup(struct peer *p, const struct pages *spaces, uint32_t count,
                           struct hit *ret_hit)
{
    struct fb_lookup_request request = {count, spaces[0].count, 0};
    struct fb_wire_writer w;
    enum fb_status status;

    begin(p, &w, FB_MSG_LOOKUP, &request, sizeof(request));
    for (uint32_t s = 0; s < count; s++) {
        fb_wire_append(&w, &spaces[s].space, sizeof(spaces[s].space));
    }
    for (uint32_t s = 0; s < count; s++) {
        append_keys(&w, spaces[s]);
    }
    status = peer_send(p, &w);
    if (status == FB_OK) {
        ret_hit->lease = p->reply.lookup_reply.lease;
        ret_hit->pages = p->reply.lookup_reply.page_count;
        memcpy(ret_hit->where, p->reply.first,
               (size_t)count * ret_hit->pages * sizeof(ret_hit->where[0]));
    }
    return status;
}

uint64_t peer_leases(struct peer *p, struct pages pages)
{
    static struct hit hit;

    assert_int_equal(peer_lookup(p, &pages, 1, &hit), FB_OK);
    assert_int_equal(hit.pages, pages.count);
    return hit.lease;
}

uint32_t peer_finds(struct peer *p, struct pages pages)
{
    static struct hit hit;

    assert_int_equal(peer_lookup(p, &pages, 1, &hit), FB_OK);
    if (hit.pages > 0) {
        assert_int_equal(peer_release(p, hit.lease), FB_OK);
    }
    return hit.pages;
}

enum fb_status peer_renew(struct peer *p, uint64_t lease, uint64_t claim, uint32_t unmapped)
{
    struct fb_renew_request request = {lease != 0, claim != 0, unmapped != 0};
    struct fb_wire_writer w;

    begin(p, &w, FB_MSG_RENEW, &request, sizeof(request));
    fb_wire_append(&w, &lease, request.lease_count * sizeof(lease));
    fb_wire_append(&w, &claim, request.claim_count * sizeof(claim));
    fb_wire_append(&w, &unmapped, request.unmapped_count * sizeof(unmapped));
    assert_int_equal(peer_send(p, &w), FB_OK);
    return lease ? (enum fb_status)fb_wire_u32(p->reply.first, 0) : FB_OK;
}

enum fb_status peer_reject(struct peer *p, struct pages page)
{
    struct fb_reject_request request = {page.space, 1};
    struct fb_wire_writer w;

    page.count = 1;
    begin(p, &w, FB_MSG_REJECT, &request, sizeof(request));
    append_keys(&w, page);
    assert_int_equal(peer_send(p, &w), FB_OK);
    return (enum fb_status)fb_wire_u32(p->reply.first, 0);
}

enum fb_status peer_hint(struct peer *p, struct pages page, enum fb_hint hint, uint32_t value)
{
    struct fb_hint_request request = {page.space, 1, hint, value};
    struct fb_wire_writer w;

    page.count = 1;
    begin(p, &w, FB_MSG_HINT, &request, sizeof(request));
    append_keys(&w, page);
    assert_int_equal(peer_send(p, &w), FB_OK);
    return (enum fb_status)fb_wire_u32(p->reply.first, 0);
}

enum fb_status peer_resume(struct peer *p, struct fb_wire_location where, uint64_t *ret_lease)
{
    struct fb_resume_request request = {1, 1};
    struct fb_wire_writer w;
    enum fb_status status;

    begin(p, &w, FB_MSG_RESUME, &request, sizeof(request));
    fb_wire_append(&w, &where, sizeof(where));
    status = peer_send(p, &w);
    if (status == FB_OK) {
        *ret_lease = p->reply.resume_reply.lease;
    }
    return status;
}
