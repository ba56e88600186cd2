/* The block index, full: bytes a block, lookups of lists, and the pair insert and evict.
 *
 *   bench_index [--quick]     10 million blocks, or 1 million
 *
 * One thread. Blocks form chains of 128 pages. Pages that follow each other are put far apart in
 * the index, as the reactor's interleaved clients would, so that every access is a cold one. */
#include "pool/policy/index.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CHAIN        128u
#define LIST         128u
#define LISTS        8192u
#define LIMIT_BYTES  64.0
#define LIMIT_LOOKUP 4e6
#define LIMIT_EVICT  1e6

struct bench {
    struct fb_index *index;
    uint16_t class_id;
    uint32_t count;
    const char *size; /* in words */
};

static void die(const char *what)
{
    fprintf(stderr, "bench_index: %s failed\n", what);
    exit(1);
}

static uint64_t splitmix64(uint64_t *state)
{
    uint64_t x = *state += 0x9e3779b97f4a7c15ull;

    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

static uint32_t random_below(uint64_t *state, uint32_t n)
{
    return (uint32_t)((splitmix64(state) >> 32) * n >> 32);
}

static void key_make(uint8_t *key, uint64_t number)
{
    uint64_t state = number * 0x632be59bd9b4e019ull;
    uint64_t halves[2] = {splitmix64(&state), splitmix64(&state)};

    memcpy(key, halves, sizeof(halves));
}

static double now_s(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint64_t resident_bytes(void)
{
    FILE *f = fopen("/proc/self/statm", "r");
    unsigned long long total = 0, resident = 0;

    if (!f || fscanf(f, "%llu %llu", &total, &resident) != 2) {
        die("reading /proc/self/statm");
    }
    fclose(f);
    return resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

static void report(const char *bench, const char *name, double figure, double limit,
                   const char *unit, const char *better)
{
    printf("{\"bench\":\"%s\",\"case\":\"%s\",\"figure\":%.6g,\"limit\":%.6g,\"unit\":\"%s\","
           "\"ratio\":%.4f,\"better\":\"%s\",\"bar\":1.0,\"threads\":1,\"waited\":\"none\"}\n",
           bench, name, figure, limit, unit, figure / limit, better);
    fflush(stdout);
}

static uint32_t put_pinned(struct bench *b, uint64_t number, uint32_t parent)
{
    uint8_t key[FB_INDEX_KEY_BYTES];
    struct fb_location where = {(uint32_t)(number >> 32), (uint32_t)number};
    uint32_t id;

    key_make(key, number);
    if (fb_index_insert(b->index, key, parent, b->class_id, 0, where, &id) != FB_OK) {
        die("fb_index_insert");
    }
    fb_index_publish(b->index, id);
    return id;
}

/* Page p of chain c is entry p * chains + c. Chains are let go in random order. */
static void fill(struct bench *b)
{
    uint32_t chains = b->count / CHAIN;
    uint32_t *order = calloc(chains, sizeof(*order));
    uint64_t random = 1;

    if (!order) {
        die("calloc");
    }
    for (uint32_t i = 0; i < b->count; i++) {
        if (put_pinned(b, i, i < chains ? FB_ENTRY_NONE : i - chains) != i) {
            die("expecting ids in order");
        }
    }
    for (uint32_t i = 0; i < chains; i++) {
        uint32_t j = random_below(&random, i + 1);

        order[i] = order[j];
        order[j] = i;
    }
    for (uint32_t i = 0; i < chains; i++) {
        for (uint32_t id = order[i]; id < b->count; id += chains) {
            fb_index_unpin(b->index, id);
        }
    }
    free(order);
}

static void bench_bytes(struct bench *b)
{
    uint64_t before = resident_bytes();
    double bytes;

    fill(b);
    bytes = (double)(resident_bytes() - before);
    if (bytes < (double)fb_index_bytes(b->index)) {
        bytes = (double)fb_index_bytes(b->index);
    }
    report("index_bytes", b->size, bytes / b->count, LIMIT_BYTES, "B", "lower");
}

static void bench_lookup(struct bench *b, const char *name, bool present)
{
    uint8_t *keys = malloc((size_t)LISTS * LIST * FB_INDEX_KEY_BYTES);
    uint32_t ids[LIST];
    uint64_t random = present ? 2 : 3;
    uint32_t found = 0;
    double start, seconds;

    if (!keys) {
        die("malloc");
    }
    for (uint32_t i = 0; i < LISTS * LIST; i++) {
        uint64_t number = random_below(&random, b->count);

        key_make(keys + (size_t)i * FB_INDEX_KEY_BYTES, number + (present ? 0 : b->count));
    }
    start = now_s();
    for (uint32_t l = 0; l < LISTS; l++) {
        fb_index_find(b->index, keys + (size_t)l * LIST * FB_INDEX_KEY_BYTES, FB_INDEX_KEY_BYTES,
                      LIST, ids);
        for (uint32_t i = 0; i < LIST; i++) {
            found += ids[i] != FB_ENTRY_NONE;
        }
    }
    seconds = now_s() - start;
    if (found != (present ? LISTS * LIST : 0)) {
        die("finding what is there, and only that");
    }
    report("index_ops", name, LISTS * LIST / seconds, LIMIT_LOOKUP, "op/s", "higher");
    free(keys);
}

/* The coldest block goes and a new one comes, in new chains. */
static void bench_evict(struct bench *b)
{
    uint32_t pairs = b->count / 5 / CHAIN * CHAIN;
    uint32_t parent = FB_ENTRY_NONE;
    double start = now_s();

    for (uint32_t i = 0; i < pairs; i++) {
        uint32_t victim = fb_index_victim(b->index, b->class_id);

        if (victim == FB_ENTRY_NONE) {
            die("fb_index_victim");
        }
        fb_index_remove(b->index, victim);
        parent = put_pinned(b, 2ull * b->count + i, i % CHAIN ? parent : FB_ENTRY_NONE);
        fb_index_unpin(b->index, parent);
    }
    report("index_ops", "insert+evict", pairs / (now_s() - start), LIMIT_EVICT, "op/s", "higher");
    if (fb_index_count(b->index) != b->count || !fb_index_check(b->index)) {
        die("fb_index_check");
    }
}

int main(int argc, char **argv)
{
    bool quick = argc == 2 && strcmp(argv[1], "--quick") == 0;
    struct bench b = {.count = (quick ? 1000000 : 10000000) / CHAIN * CHAIN,
                      .size = quick ? "1M" : "10M"};

    if (argc > 1 && !quick) {
        fprintf(stderr, "usage: bench_index [--quick]\n");
        return 2;
    }
    if (fb_index_create(b.count, &b.index, NULL) != FB_OK ||
        fb_index_class_add(b.index, "lru", &b.class_id, NULL) != FB_OK) {
        die("fb_index_create");
    }
    bench_bytes(&b);
    bench_lookup(&b, "lookup/128", true);
    bench_lookup(&b, "lookup/128 absent", false);
    bench_evict(&b);
    fb_index_destroy(b.index);
    return 0;
}
