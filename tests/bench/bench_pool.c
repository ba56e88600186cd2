/* A daemon and its client on one host, each case beside what the machine gives for the same bytes.
 *
 *   bench_pool [--quick] [NAME...]    lookup_local, host_put, host_get, idle, restart
 *
 * The daemon is a child process of this one, in directories of its own on /dev/shm. CPU and shared
 * memory figures: no network, no device. */
#include "pool/client/forebay.h"
#include "pool/node/reactor.h"
#include "pool/policy/index.h"
#include "proto/assert.h"
#include "proto/wire.h"

#include <ftw.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MIB       (1024.0 * 1024.0)
#define LIST      128u
#define BATCH     32u
#define FOR_EVER  (60ull * 1000 * 1000 * 1000)
#define SPIN_NS   (10ull * 1000 * 1000)
#define MAX_TIMES 4096

struct daemon {
    pid_t pid;
    char dir[64];
    char socket[128];
};

static bool quick;
static char base_dir[] = "/dev/shm/forebay-bench-XXXXXX"; /* of all daemons; removed at exit */

static double now_s(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double quantile(double *times, uint32_t n, double q)
{
    qsort(times, n, sizeof(*times), by_value);
    return times[(uint32_t)(q * (n - 1))];
}

static void report(const char *bench, const char *name, double figure, double limit,
                   const char *unit, const char *better, double bar, const char *waited)
{
    printf("{\"bench\":\"%s\",\"case\":\"%s\",\"figure\":%.6g,\"limit\":%.6g,\"unit\":\"%s\","
           "\"ratio\":%.4f,\"better\":\"%s\",\"bar\":%g,\"threads\":1,\"waited\":\"%s\"}\n",
           bench, name, figure, limit, unit, figure / limit, better, bar, waited);
    fflush(stdout);
}

/* --- the daemon --- */

static void daemon_config(const struct daemon *d, uint64_t host_bytes, uint64_t spin_ns,
                          struct fb_config *config)
{
    fb_config_init(config);
    snprintf(config->run_dir, sizeof(config->run_dir), "%s/run", d->dir);
    snprintf(config->chunk_dir, sizeof(config->chunk_dir), "%s/chunks", d->dir);
    config->host_bytes = host_bytes;
    config->spin_ns = spin_ns;
    config->client_share_percent = 100;
}

static void daemon_main(const struct fb_config *config, int ready_fd)
{
    struct fb_reactor_options options = {.config = config,
                                         .log = {FB_LOG_WARN, FB_LOG_LOGFMT, STDERR_FILENO}};
    struct fb_reactor *reactor;
    struct fb_error error;

    FB_ASSERT(fb_metrics_create("bench", &options.metrics) == FB_OK);
    if (fb_reactor_create(&options, &reactor, &error) != FB_OK) {
        fprintf(stderr, "bench_pool: %s\n", error.text);
        _exit(1);
    }
    FB_ASSERT(write(ready_fd, "r", 1) == 1);
    fb_reactor_run(reactor);
    _exit(0);
}

/* Returns the seconds from fork to ready. */
static double daemon_start(struct daemon *d, uint64_t host_bytes, uint64_t spin_ns)
{
    double begun = now_s();
    struct fb_config config;
    int fds[2];
    char c;

    daemon_config(d, host_bytes, spin_ns, &config);
    FB_ASSERT(pipe(fds) == 0);
    d->pid = fork();
    FB_ASSERT(d->pid >= 0);
    if (d->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(fds[0]);
        daemon_main(&config, fds[1]);
    }
    close(fds[1]);
    if (read(fds[0], &c, 1) != 1) {
        fprintf(stderr, "bench_pool: the daemon did not start\n");
        exit(1);
    }
    close(fds[0]);
    snprintf(d->socket, sizeof(d->socket), "%s/run/default/forebay.sock", d->dir);
    return now_s() - begun;
}

static void daemon_kill(struct daemon *d)
{
    kill(d->pid, SIGKILL);
    waitpid(d->pid, NULL, 0);
}

static int remove_one(const char *path, const struct stat *st, int flag, struct FTW *ftw)
{
    (void)st;
    (void)flag;
    (void)ftw;
    return remove(path);
}

static void remove_tree(const char *path)
{
    nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static void remove_base(void)
{
    remove_tree(base_dir);
}

static void daemon_init(struct daemon *d)
{
    snprintf(d->dir, sizeof(d->dir), "%s/XXXXXX", base_dir);
    FB_ASSERT(mkdtemp(d->dir));
}

static void daemon_fini(struct daemon *d)
{
    daemon_kill(d);
    remove_tree(d->dir);
}

/* --- clients --- */

static struct fb_pool *open_pool(const struct daemon *d, uint64_t spin_ns)
{
    struct fb_open_options options = {.spin_ns = spin_ns};
    struct fb_error error;
    struct fb_pool *pool;

    if (fb_open(d->socket, &options, &pool, &error) != FB_OK) {
        fprintf(stderr, "bench_pool: %s\n", error.text);
        exit(1);
    }
    return pool;
}

/* Raw K and V of `layers` layers and `heads` heads of 128, or the smallest block there is. */
static struct fb_pool_space *open_space(struct fb_pool *pool, const char *model, enum fb_rule rule,
                                        uint32_t layers, uint32_t heads, uint32_t dim,
                                        uint32_t page_tokens)
{
    struct fb_manifest m = {
        .tenant = "default",
        .rule = rule,
        .window_tokens = rule == FB_RULE_WINDOW ? 4 * page_tokens : 0,
        .page_tokens = page_tokens,
        .layer_count = layers,
        .head_count = heads,
        .head_total = heads,
        .section_count = 2,
        .sections = {{FB_SECTION_K, FB_ELEM_BF16, FB_CODEC_RAW, 0, layers, dim, 0},
                     {FB_SECTION_V, FB_ELEM_BF16, FB_CODEC_RAW, 0, layers, dim, 0}},
    };
    struct fb_pool_space *space;
    struct fb_error error;

    snprintf(m.model, sizeof(m.model), "%s", model);
    for (uint32_t i = 0; i < layers; i++) {
        m.layers[i] = (uint16_t)i;
    }
    if (fb_pool_space_open(pool, &m, &space, &error) != FB_OK) {
        fprintf(stderr, "bench_pool: %s\n", error.text);
        exit(1);
    }
    return space;
}

static void make_chain(uint64_t number, uint32_t pages, uint8_t *chain)
{
    for (uint32_t i = 0; i < pages; i++) {
        uint32_t ids[4] = {(uint32_t)number, (uint32_t)(number >> 32), i, 7};

        fb_chain(i ? chain + (size_t)(i - 1) * FB_CHAIN_BYTES : NULL, ids, 4, NULL, 0,
                 chain + (size_t)i * FB_CHAIN_BYTES);
    }
}

/* --- lookup_local --- */

/* Blocks without contents: only the index counts here. */
static void fill_index(struct fb_pool *pool, struct fb_pool_space *space, uint32_t chains)
{
    uint8_t chain[LIST * FB_CHAIN_BYTES];
    const uint64_t sums[1] = {0};

    for (uint32_t c = 0; c < chains; c++) {
        enum fb_status statuses[LIST] = {FB_AGAIN};
        struct fb_put *put;

        make_chain(c, LIST, chain);
        /* FB_AGAIN: a new chunk took too long; once more for the rest. */
        for (int tries = 0; tries == 0 || statuses[LIST - 1] == FB_AGAIN; tries++) {
            enum fb_status status =
                fb_put_begin(pool, space, chain, LIST, NULL, 0, NULL, FOR_EVER, &put, statuses);

            FB_ASSERT(tries < 100 && (status == FB_OK || status == FB_MISS));
            for (uint32_t i = 0; i < LIST && status == FB_OK; i++) {
                FB_ASSERT(statuses[i] != FB_OK || fb_put_set_sums(put, i, sums) == FB_OK);
            }
            FB_ASSERT(status == FB_MISS || fb_put_commit(put, FOR_EVER, NULL) == FB_OK);
        }
    }
}

/* A peer that answers each packet with `bytes`, spinning or asleep. */
static void echo_main(int fd, size_t bytes, bool spin)
{
    static uint8_t buffer[FB_WIRE_MAX_BYTES];

    for (;;) {
        ssize_t n = recv(fd, buffer, sizeof(buffer), spin ? MSG_DONTWAIT : 0);

        if (n == 0) {
            _exit(0);
        }
        if (n > 0 && send(fd, buffer, bytes, MSG_NOSIGNAL) < 0) {
            _exit(0);
        }
    }
}

/* Times of `rounds` round trips. */
static void ping_pong(size_t request, size_t reply, bool spin, double *times, uint32_t rounds)
{
    static uint8_t buffer[FB_WIRE_MAX_BYTES];
    int fds[2];
    pid_t pid;

    FB_ASSERT(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, fds) == 0);
    pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(fds[0]);
        echo_main(fds[1], reply, spin);
    }
    close(fds[1]);
    for (uint32_t i = 0; i < rounds; i++) {
        double begun = now_s();

        FB_ASSERT(send(fds[0], buffer, request, 0) == (ssize_t)request);
        while (recv(fds[0], buffer, sizeof(buffer), spin ? MSG_DONTWAIT : 0) < 0) {
        }
        times[i] = now_s() - begun;
    }
    close(fds[0]);
    waitpid(pid, NULL, 0);
}

/* An index alone, of as many blocks as the daemon's. */
struct bare {
    struct fb_hasher *hasher;
    struct fb_index *index;
    uint8_t id[FB_SPACE_ID_BYTES];
};

static void bare_init(struct bare *b, uint32_t chains)
{
    uint8_t chain[LIST * FB_CHAIN_BYTES], keys[LIST * FB_KEY_BYTES];
    uint16_t class_id;
    uint32_t entry;

    *b = (struct bare){.id = {1}};
    FB_ASSERT(fb_hasher_create(&b->hasher) == FB_OK);
    FB_ASSERT(fb_index_create(chains * LIST + 1, &b->index, NULL) == FB_OK);
    FB_ASSERT(fb_index_class_add(b->index, "lru", &class_id, NULL) == FB_OK);
    for (uint32_t c = 0; c < chains; c++) {
        make_chain(c, LIST, chain);
        fb_pool_keys(b->hasher, b->id, chain, LIST, keys);
        for (uint32_t i = 0; i < LIST; i++) {
            FB_ASSERT(fb_index_insert(b->index, keys + i * FB_KEY_BYTES, FB_ENTRY_NONE, class_id, 0,
                                      (struct fb_location){0, i}, &entry) == FB_OK);
            fb_index_publish(b->index, entry);
            fb_index_unpin(b->index, entry);
        }
    }
}

static void bare_fini(struct bare *b)
{
    fb_index_destroy(b->index);
    fb_hasher_destroy(b->hasher);
}

/* The chain of a round: one that was stored, or one that was not. */
static void round_chain(uint32_t round, uint32_t chains, bool present, uint8_t *chain)
{
    make_chain(present ? round * 7919u % chains : chains + round, LIST, chain);
}

/* Deriving the keys of a list, and as many probes. */
static double derive_and_probe(struct bare *b, uint32_t round, uint32_t chains, bool present)
{
    uint8_t chain[LIST * FB_CHAIN_BYTES], keys[LIST * FB_KEY_BYTES];
    uint32_t ids[LIST];
    double begun;

    round_chain(round, chains, present, chain);
    begun = now_s();
    fb_pool_keys(b->hasher, b->id, chain, LIST, keys);
    fb_index_find(b->index, keys, FB_KEY_BYTES, LIST, ids);
    FB_ASSERT((ids[0] != FB_ENTRY_NONE) == present);
    return now_s() - begun;
}

static double lookup_once(struct fb_pool *pool, struct fb_pool_space *space, uint32_t round,
                          uint32_t chains, bool present)
{
    uint8_t chain[LIST * FB_CHAIN_BYTES];
    struct fb_hit *hit = NULL;
    enum fb_status status;
    double begun, took;

    round_chain(round, chains, present, chain);
    begun = now_s();
    status = fb_lookup(pool, &space, 1, chain, LIST, 0, FOR_EVER, &hit);
    took = now_s() - begun;
    FB_ASSERT(status == (present ? FB_OK : FB_MISS));
    FB_ASSERT(!present || fb_hit_pages(hit) == LIST);
    if (present) {
        fb_hit_release(hit);
    }
    return took;
}

/* In slices, the three by turns, so that a busy neighbour slows the figure and its limit alike. */
static void lookup_case(struct fb_pool *pool, struct fb_pool_space *space, struct bare *bare,
                        const char *what, bool present, bool spin, uint32_t chains)
{
    static double lookups[MAX_TIMES], trips[MAX_TIMES], probes[MAX_TIMES];
    size_t request =
        sizeof(struct fb_wire_header) + sizeof(struct fb_lookup_request) + 4 + LIST * FB_KEY_BYTES;
    size_t reply = sizeof(struct fb_wire_header) + sizeof(struct fb_lookup_reply) +
                   (present ? LIST * sizeof(struct fb_wire_location) : 0);
    uint32_t slices = quick ? 4 : 16, slice = quick ? 125 : 250;
    char name[64];

    for (uint32_t at = 0; at < slices * slice; at += slice) {
        for (uint32_t i = at; i < at + slice; i++) {
            lookups[i] = lookup_once(pool, space, i, chains, present);
        }
        ping_pong(request, reply, spin, trips + at, slice);
        for (uint32_t i = at; i < at + slice; i++) {
            probes[i] = derive_and_probe(bare, i, chains, present);
        }
    }
    snprintf(name, sizeof(name), "%s, %s", what, spin ? "spinning" : "sleeping");
    report("lookup_local", name, quantile(lookups, slices * slice, 0.5) * 1e6,
           (quantile(trips, slices * slice, 0.5) + quantile(probes, slices * slice, 0.5)) * 1e6,
           "us", "lower", 1.3, spin ? "both spin" : "both sleep");
}

static void bench_lookup(void)
{
    uint32_t chains = (quick ? 100000 : 1000000) / LIST;
    struct bare bare;

    bare_init(&bare, chains);
    for (int spin = 0; spin < 2; spin++) {
        struct fb_pool_space *full, *window;
        struct fb_pool *pool;
        struct daemon d;

        daemon_init(&d);
        daemon_start(&d, (uint64_t)chains * LIST * 8192 * 5 / 4 + (64u << 20), spin ? SPIN_NS : 0);
        pool = open_pool(&d, spin ? SPIN_NS : 0);
        full = open_space(pool, "bench/full", FB_RULE_FULL, 1, 1, 8, 4);
        window = open_space(pool, "bench/window", FB_RULE_WINDOW, 1, 1, 8, 4);
        fill_index(pool, full, chains);
        lookup_case(pool, full, &bare, "all present", true, spin, chains);
        lookup_case(pool, full, &bare, "none in full", false, spin, chains);
        lookup_case(pool, window, &bare, "none in window", false, spin, chains);
        fb_close(pool);
        daemon_fini(&d);
    }
    bare_fini(&bare);
}

/* --- host_put, host_get --- */

enum { LAYERS = 4, HEADS = 8, DIM = 128, PAGE = 64 }; /* 1 MiB of raw K and V a page */

#define PAGE_BYTES ((size_t)LAYERS * 2 * HEADS * PAGE * DIM * 2)

/* An engine's cache: per layer [2, tokens, heads, dim] bf16, one block a page. */
struct engine {
    uint16_t *cache;
    uint32_t pages;
    int64_t *blocks;
    struct fb_paged_view views[LAYERS][2];
};

static void *map_bytes(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE,
                   -1, 0);

    FB_ASSERT(p != MAP_FAILED);
    return p;
}

static void engine_init(struct engine *e, uint32_t pages)
{
    int64_t row = DIM, token = HEADS * row, block = PAGE * token;
    size_t section = (size_t)pages * PAGE * HEADS * DIM;

    e->pages = pages;
    e->cache = map_bytes(pages * PAGE_BYTES);
    memset(e->cache, 0x3c, pages * PAGE_BYTES);
    e->blocks = malloc(pages * sizeof(*e->blocks));
    FB_ASSERT(e->blocks);
    for (uint32_t i = 0; i < pages; i++) {
        e->blocks[i] = i;
    }
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (uint32_t kv = 0; kv < 2; kv++) {
            e->views[layer][kv] =
                (struct fb_paged_view){e->cache + (layer * 2 + kv) * section, block, token, row, 1};
        }
    }
}

static struct fb_transfer engine_pages(const struct engine *e, uint32_t first, uint32_t count)
{
    return (struct fb_transfer){
        .page_count = count,
        .plane_count = HEADS,
        .layer_count = LAYERS,
        .views = e->views[0],
        .map = {.block_ids = e->blocks + first, .block_count = count, .block_tokens = PAGE},
    };
}

static double put_batch(struct fb_pool *pool, struct fb_pool_space *space, const struct engine *e,
                        uint32_t batch)
{
    struct fb_transfer t = engine_pages(e, batch * BATCH % e->pages, BATCH);
    uint8_t chain[BATCH * FB_CHAIN_BYTES];
    enum fb_status statuses[BATCH];
    struct fb_put *put;
    double begun;

    make_chain(batch, BATCH, chain);
    begun = now_s();
    /* FB_AGAIN: a new chunk took too long; once more for the rest. */
    for (int tries = 0; tries == 0 || statuses[BATCH - 1] == FB_AGAIN; tries++) {
        enum fb_status status =
            fb_put_begin(pool, space, chain, BATCH, NULL, 0, NULL, FOR_EVER, &put, statuses);

        FB_ASSERT(tries < 100 && (status == FB_OK || status == FB_MISS));
        if (status == FB_OK) {
            FB_ASSERT(fb_put_encode(put, &t, statuses) == FB_OK);
            FB_ASSERT(fb_put_commit(put, FOR_EVER, statuses) == FB_OK);
        }
    }
    return now_s() - begun;
}

/* Lookup, then every byte read and summed in place. */
static double get_batch(struct fb_pool *pool, struct fb_pool_space *space, uint32_t batch)
{
    const struct fb_kernels *k = fb_kernels_best();
    const struct fb_layout *l = fb_pool_space_layout(space);
    uint8_t chain[BATCH * FB_CHAIN_BYTES];
    struct fb_hit *hit;
    double begun, took;

    make_chain(batch, BATCH, chain);
    begun = now_s();
    FB_ASSERT(fb_lookup(pool, &space, 1, chain, BATCH, 0, FOR_EVER, &hit) == FB_OK);
    for (uint32_t i = 0; i < BATCH; i++) {
        const uint8_t *block;

        FB_ASSERT(fb_hit_map(hit, 0, i, &block) == FB_OK);
        FB_ASSERT(fb_block_check(k, l, block, 0, HEADS) == FB_OK);
    }
    took = now_s() - begun;
    fb_hit_release(hit);
    return took;
}

static double copy_batch(const struct engine *e, uint8_t *to, uint32_t batch)
{
    size_t at = (batch * BATCH % e->pages) * PAGE_BYTES;
    double begun = now_s();

    memcpy(to + at, (const uint8_t *)e->cache + at, BATCH * PAGE_BYTES);
    return now_s() - begun;
}

/* The same kind of bytes in the same memory, whose places are known: read and summed. */
static double sum_batch(struct fb_pool *pool, struct fb_pool_space *space, uint32_t batch)
{
    uint64_t block_bytes = fb_pool_space_layout(space)->block_bytes, sum = 0;
    uint8_t chain[BATCH * FB_CHAIN_BYTES];
    const uint8_t *blocks[BATCH];
    struct fb_hit *hit;
    double begun, took;

    make_chain(batch, BATCH, chain);
    FB_ASSERT(fb_lookup(pool, &space, 1, chain, BATCH, 0, FOR_EVER, &hit) == FB_OK);
    for (uint32_t i = 0; i < BATCH; i++) {
        FB_ASSERT(fb_hit_map(hit, 0, i, &blocks[i]) == FB_OK);
    }
    begun = now_s();
    for (uint32_t i = 0; i < BATCH; i++) {
        sum += fb_sum_copy(fb_kernels_best(), NULL, blocks[i] + FB_BLOCK_HEADER_BYTES,
                           block_bytes - FB_BLOCK_HEADER_BYTES, 0);
    }
    took = now_s() - begun;
    FB_ASSERT(sum != 0);
    fb_hit_release(hit);
    return took;
}

static void bench_put_get(bool put_wanted, bool get_wanted)
{
    uint32_t batches = quick ? 16 : 48, pages = batches * BATCH, full = 2 * batches;
    double puts[64], gets[64], copies[64], sums[64], bytes = BATCH * PAGE_BYTES;
    struct fb_pool_space *space;
    struct fb_pool *pool;
    struct engine engine;
    struct daemon d;
    uint8_t *to;

    daemon_init(&d);
    daemon_start(&d, 2ull * pages * PAGE_BYTES, SPIN_NS);
    pool = open_pool(&d, SPIN_NS);
    space = open_space(pool, "bench/raw", FB_RULE_FULL, LAYERS, HEADS, DIM, PAGE);
    engine_init(&engine, pages);
    to = map_bytes(pages * PAGE_BYTES);
    /* The first puts make chunks and map them: that is start-up, not speed. Then the tier is full,
     * and each put evicts what it needs. */
    for (uint32_t i = 0; i < full; i++) {
        put_batch(pool, space, &engine, i);
    }
    nanosleep(&(struct timespec){1, 0}, NULL); /* the library fills its page tables meanwhile */
    for (uint32_t i = 0; i < batches; i++) {
        copies[i] = copy_batch(&engine, to, i);
        puts[i] = put_batch(pool, space, &engine, full + i);
        sums[i] = sum_batch(pool, space, full + i - batches / 2);
        gets[i] = get_batch(pool, space, full + i - batches / 4);
    }
    if (put_wanted) {
        report("host_put", "raw 1 MiB x 32", bytes / quantile(puts, batches, 0.5) / 1e9,
               bytes / quantile(copies, batches, 0.5) / 1e9, "GB/s", "higher", 0.7, "both spin");
    }
    if (get_wanted) {
        report("host_get", "raw 1 MiB x 32", bytes / quantile(gets, batches, 0.5) / 1e9,
               bytes / quantile(sums, batches, 0.5) / 1e9, "GB/s", "higher", 0.9, "both spin");
    }
    munmap(to, pages * PAGE_BYTES);
    munmap(engine.cache, pages * PAGE_BYTES);
    free(engine.blocks);
    fb_close(pool);
    daemon_fini(&d);
}

/* --- idle --- */

static double cpu_seconds(pid_t pid)
{
    unsigned long long user = 0, system = 0;
    char path[64], line[512];
    char *at;
    FILE *f;

    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    f = fopen(path, "re");
    FB_ASSERT(f && fgets(line, sizeof(line), f));
    fclose(f);
    at = strrchr(line, ')');
    FB_ASSERT(at && sscanf(at + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu", &user,
                           &system) == 2);
    return (double)(user + system) / (double)sysconf(_SC_CLK_TCK);
}

/* Two clients are connected, one holds a lease. */
static void bench_idle(void)
{
    struct timespec nap = {quick ? 2 : 20, 0};
    struct fb_pool *pools[2];
    struct fb_pool_space *space;
    struct engine engine;
    struct fb_hit *hit;
    uint8_t chain[FB_CHAIN_BYTES];
    struct daemon d;
    double before;

    daemon_init(&d);
    daemon_start(&d, 512u << 20, 50000);
    pools[0] = open_pool(&d, 0);
    pools[1] = open_pool(&d, 0);
    space = open_space(pools[0], "bench/raw", FB_RULE_FULL, LAYERS, HEADS, DIM, PAGE);
    engine_init(&engine, BATCH);
    put_batch(pools[0], space, &engine, 0);
    make_chain(0, 1, chain);
    FB_ASSERT(fb_lookup(pools[0], &space, 1, chain, 1, 0, FOR_EVER, &hit) == FB_OK);
    before = cpu_seconds(d.pid);
    nanosleep(&nap, NULL);
    report("idle", "two clients, one lease",
           100 * (cpu_seconds(d.pid) - before) / (double)nap.tv_sec, 1.0, "% of a core", "lower",
           1.0, "asleep");
    fb_hit_release(hit);
    munmap(engine.cache, engine.pages * PAGE_BYTES);
    free(engine.blocks);
    fb_close(pools[0]);
    fb_close(pools[1]);
    daemon_fini(&d);
}

/* --- restart --- */

static void bench_restart(void)
{
    uint32_t blocks = quick ? 1024 : 6144;
    uint64_t host_bytes = 2 * (uint64_t)blocks * PAGE_BYTES;
    struct fb_pool_space *space;
    double times[7], empty[7];
    struct fb_pool *pool;
    struct engine engine;
    struct daemon d, none;

    daemon_init(&d);
    daemon_start(&d, host_bytes, 50000);
    pool = open_pool(&d, 0);
    space = open_space(pool, "bench/raw", FB_RULE_FULL, LAYERS, HEADS, DIM, PAGE);
    engine_init(&engine, BATCH);
    for (uint32_t i = 0; i < blocks / BATCH; i++) {
        put_batch(pool, space, &engine, i);
    }
    fb_close(pool);
    for (int i = 0; i < 7; i++) {
        daemon_kill(&d);
        times[i] = daemon_start(&d, host_bytes, 50000);
        daemon_init(&none);
        empty[i] = daemon_start(&none, host_bytes, 50000);
        daemon_fini(&none);
    }
    /* Every block must be there again. */
    pool = open_pool(&d, 0);
    space = open_space(pool, "bench/raw", FB_RULE_FULL, LAYERS, HEADS, DIM, PAGE);
    for (uint32_t i = 0; i < blocks / BATCH; i++) {
        get_batch(pool, space, i);
    }
    fb_close(pool);
    /* What does not grow with the blocks (fork, sockets) is counted once, not extrapolated. */
    report("restart", "512 GiB of 1 MiB blocks, extrapolated",
           quantile(empty, 7, 0.5) +
               (quantile(times, 7, 0.5) - quantile(empty, 7, 0.5)) * 524288.0 / blocks,
           5.0, "s", "lower", 1.0, "none");
    munmap(engine.cache, engine.pages * PAGE_BYTES);
    free(engine.blocks);
    daemon_fini(&d);
}

int main(int argc, char **argv)
{
    bool any = false;

    FB_ASSERT(mkdtemp(base_dir));
    atexit(remove_base);
    for (int i = 1; i < argc; i++) {
        quick |= strcmp(argv[i], "--quick") == 0;
        any |= argv[i][0] != '-';
    }
    for (int i = any ? 1 : 0; i < (any ? argc : 1); i++) {
        const char *name = any ? argv[i] : "";

        if (!any || strcmp(name, "lookup_local") == 0) {
            bench_lookup();
        }
        if (!any || strcmp(name, "host_put") == 0 || strcmp(name, "host_get") == 0) {
            bench_put_get(!any || strcmp(name, "host_put") == 0,
                          !any || strcmp(name, "host_get") == 0);
        }
        if (!any || strcmp(name, "idle") == 0) {
            bench_idle();
        }
        if (!any || strcmp(name, "restart") == 0) {
            bench_restart();
        }
    }
    return 0;
}
