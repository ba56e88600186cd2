/* The daemon goes and comes back: blocks stay, memory stays within what was declared, and what
 * clients hold is theirs until they let go or die. */
#include "pool/node/chunk.h"
#include "tests/integration/actor.h"
#include "tests/integration/fixture.h"

#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#define HOST_BYTES (32ull << 20) /* of the harness */

static int setup(void **state)
{
    static struct fixture f;

    fixture_init(&f, NULL);
    *state = &f;
    return 0;
}

static int teardown(void **state)
{
    fixture_fini(*state);
    return 0;
}

/* Put until it is done: after a restart the daemon first waits for those who were there before. */
static void put_at_last(struct fixture *f, uint64_t seed)
{
    uint64_t until = clock_ms() + DAEMON_WAIT_MS;
    enum fb_status status;

    fixture_use(f, seed);
    do {
        status = engine_put(&f->from, f->pool, f->space, f->chain[0], 0, FIXTURE_PAGES);
    } while (status != FB_OK && clock_ms() < until);
    assert_int_equal(status, FB_OK);
}

/* Put so many chains that nothing is left of what was there before, but what is held. */
static void fill_pool(struct fixture *f, uint64_t seed)
{
    uint64_t chains = HOST_BYTES / (FIXTURE_PAGES * f->from.layout.block_bytes) + 1;

    for (uint64_t i = 0; i < chains; i++) {
        put_at_last(f, seed + i);
    }
    assert_true(daemon_metric(&f->daemon, "forebay_evicted_blocks_total") > 0);
}

static void restart(struct fixture *f)
{
    daemon_kill(&f->daemon);
    daemon_restart(&f->daemon);
    fixture_await_connected(f);
}

static void blocks_are_found_again(void **state)
{
    struct fixture *f = *state;

    for (uint64_t seed = 1; seed <= 10; seed++) {
        fixture_put(f, seed);
    }
    for (int i = 0; i < 3; i++) {
        restart(f);
        daemon_await_metric(&f->daemon, "forebay_recovered_blocks_total", 10 * FIXTURE_PAGES);
        for (uint64_t seed = 1; seed <= 10; seed++) {
            fixture_check(f, seed);
        }
    }
    daemon_signal(&f->daemon, SIGTERM);
    assert_int_equal(daemon_wait(&f->daemon), 0);
    daemon_restart(&f->daemon);
    fixture_await_connected(f);
    fixture_check(f, 10);
}

/* --- under load --- */

enum { LOADERS = 4, LOAD_SEEDS = 300, LOAD_MS = 3000, KILLS = 6 };

/* SOCKET NUMBER: put and get whatever works; what arrives must be right. */
static int act_load(char **args)
{
    uint64_t random = strtoull(args[1], NULL, 10), until = clock_ms() + LOAD_MS;
    struct fixture f = {0};
    uint32_t arrived, hits = 0;

    fixture_manifest(&f.manifest);
    ACTOR_CHECK(engine_init(&f.from, &f.manifest, 16, FIXTURE_PAGES) &&
                engine_init(&f.to, &f.manifest, 48, FIXTURE_PAGES));
    ACTOR_CHECK(fb_open(args[0], NULL, &f.pool, NULL) == FB_OK);
    ACTOR_CHECK(fb_pool_space_open(f.pool, &f.manifest, &f.space, NULL) == FB_OK);
    actor_say("started");
    while (clock_ms() < until) {
        fixture_use(&f, random_below(&random, LOAD_SEEDS));
        engine_put(&f.from, f.pool, f.space, f.chain[0], 0, FIXTURE_PAGES);
        fixture_use(&f, random_below(&random, LOAD_SEEDS));
        engine_get(&f.to, f.pool, f.space, f.chain[0], &arrived);
        if (arrived > 0) {
            struct part part = engine_all(&f.to);

            part.token_count = arrived * FIXTURE_PAGE;
            engine_round(&f.from);
            ACTOR_CHECK(engine_equal(&f.from, &f.to, part));
            hits++;
        }
    }
    ACTOR_CHECK(hits > 0);
    fb_close(f.pool);
    engine_fini(&f.from);
    engine_fini(&f.to);
    actor_say("done");
    return EXIT_SUCCESS;
}

static void kills_under_load_never_give_wrong_bytes(void **state)
{
    struct fixture *f = *state;
    struct actor actors[LOADERS];
    uint64_t begun;

    for (int i = 0; i < LOADERS; i++) {
        char number[16];

        snprintf(number, sizeof(number), "%d", i);
        actor_start(&actors[i], "load", (const char *[]){f->daemon.socket, number, NULL});
        actor_expect(&actors[i], "started");
    }
    begun = clock_ms();
    for (int i = 0; i < KILLS; i++) {
        while (clock_ms() < begun + (uint64_t)(i + 1) * LOAD_MS / (KILLS + 1)) {
            nap(); /* this is the load's time, not a wait for something */
        }
        assert_in_range(daemon_chunk_bytes(&f->daemon), 0, HOST_BYTES + (1 << 20));
        daemon_kill(&f->daemon);
        daemon_restart(&f->daemon);
        assert_true(daemon_metric(&f->daemon, "forebay_recovered_blocks_total") > 0);
    }
    for (int i = 0; i < LOADERS; i++) {
        actor_expect(&actors[i], "done");
        actor_join(&actors[i]);
    }
    assert_in_range(daemon_chunk_bytes(&f->daemon), 0, HOST_BYTES + (1 << 20));
    daemon_await_nothing_held(&f->daemon);
    fixture_await_connected(f);
    put_at_last(f, 1000);
    fixture_check(f, 1000);
}

/* --- memory --- */

/* Memory of its own, beside chunks. A sanitizer's daemon has much of that. */
static uint64_t own_bytes(pid_t pid)
{
    char path[64], line[256];
    unsigned long long kb = 0;
    FILE *file;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return 0;
#endif
    snprintf(path, sizeof(path), "/proc/%d/status", pid);
    file = fopen(path, "re");
    assert_non_null(file);
    while (fgets(line, sizeof(line), file)) {
        sscanf(line, "RssAnon: %llu kB", &kb);
    }
    fclose(file);
    return kb * 1024;
}

/* Bytes that a process maps of chunks whose files are gone. */
static uint64_t deleted_bytes(pid_t pid)
{
    unsigned long long from, to;
    char path[64], line[512];
    uint64_t bytes = 0;
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/maps", pid);
    file = fopen(path, "re");
    assert_non_null(file);
    while (fgets(line, sizeof(line), file)) {
        if (strstr(line, "/chunk-") && strstr(line, "(deleted)") &&
            sscanf(line, "%llx-%llx", &from, &to) == 2) {
            bytes += to - from;
        }
    }
    fclose(file);
    return bytes;
}

/* Chunks, those that only mappings keep, and the daemon's own memory. */
static uint64_t all_bytes(const struct daemon *d)
{
    return daemon_chunk_bytes(d) + deleted_bytes(d->pid) + deleted_bytes(getpid()) +
           own_bytes(d->pid);
}

static void restarts_do_not_add_memory(void **state)
{
    enum { LARGE_MIB = 256, RESTARTS = 10 };
    static const char *const flags[] = {"--host-bytes=256MiB", NULL};
    const uint64_t declared = (uint64_t)LARGE_MIB << 20;
    struct fixture *f = *state;
    struct fb_pool_space *small = f->space;
    struct engine small_from = f->from;
    struct fb_hit *hit;

    daemon_kill(&f->daemon);
    daemon_start(&f->daemon, flags);
    fixture_await_connected(f);
    put_at_last(f, 1);
    hit = fixture_lookup(f);
    /* Blocks of another size, so that the daemon also moves chunks between sizes. */
    manifest_make(&f->manifest, 8, 8, 128, FB_CODEC_RAW);
    assert_true(engine_init(&f->from, &f->manifest, 64, FIXTURE_PAGES));
    assert_int_equal(fb_pool_space_open(f->pool, &f->manifest, &f->space, NULL), FB_OK);
    for (uint64_t i = 0; i < RESTARTS; i++) {
        uint64_t chains = declared / (FIXTURE_PAGES * f->from.layout.block_bytes) / 4;

        for (uint64_t n = 0; n < chains; n++) {
            put_at_last(f, 100 * i + n);
        }
        restart(f);
        assert_in_range(all_bytes(&f->daemon), 0, declared + declared / 20);
    }
    assert_true(daemon_chunk_bytes(&f->daemon) > declared / 2);
    engine_fini(&f->from);
    f->from = small_from;
    f->space = small;
    fixture_manifest(&f->manifest);
    fb_hit_release(hit);
}

/* --- what clients hold --- */

static void lease_outlives_the_daemon(void **state)
{
    enum fb_status statuses[FIXTURE_PAGES];
    struct fixture *f = *state;
    struct engine expected;
    struct fb_transfer t;
    const uint8_t *block;
    struct fb_hit *hit;

    assert_true(engine_init(&expected, &f->manifest, 16, FIXTURE_PAGES));
    fixture_put(f, 7);
    hit = fixture_lookup(f);
    assert_int_equal(fb_hit_map(hit, 0, 0, &block), FB_OK);
    engine_fill(&expected, 7);
    engine_round(&expected);
    for (uint64_t i = 0; i < 2; i++) {
        restart(f);
        fill_pool(f, 1000 * (i + 1));
        t = engine_transfer(&f->to, 0, FIXTURE_PAGES);
        engine_clear(&f->to, 0);
        assert_int_equal(fb_get(hit, &t, 0, statuses), FB_OK);
        assert_true(engine_equal(&expected, &f->to, engine_all(&f->to)));
        assert_int_equal(fb_block_check(fb_kernels_best(), &f->to.layout, block, 0, FIXTURE_HEADS),
                         FB_OK);
    }
    fb_hit_release(hit);
    daemon_await_nothing_held(&f->daemon);
    engine_fini(&expected);
}

static void put_does_not_outlive_the_daemon(void **state)
{
    enum fb_status statuses[FIXTURE_PAGES];
    struct fixture *f = *state;
    struct fb_transfer t;
    struct fb_put *put;
    uint64_t chains = HOST_BYTES / (FIXTURE_PAGES * f->from.layout.block_bytes);

    fixture_use(f, 7);
    assert_int_equal(fb_put_begin(f->pool, f->space, f->chain[0], FIXTURE_PAGES, NULL, 0, NULL,
                                  ENGINE_WAIT_NS, &put, statuses),
                     FB_OK);
    restart(f);
    fill_pool(f, 1000);
    /* Its slots are still its own: what it writes late harms nobody. */
    fixture_use(f, 7);
    t = engine_transfer(&f->from, 0, FIXTURE_PAGES);
    assert_int_equal(fb_put_encode(put, &t, statuses), FB_OK);
    for (uint64_t i = chains / 2; i < chains; i++) {
        fixture_check(f, 1000 + i);
    }
    assert_int_equal(fb_put_commit(put, ENGINE_WAIT_NS, statuses), FB_OK);
    for (int i = 0; i < FIXTURE_PAGES; i++) {
        assert_int_equal(statuses[i], FB_ESTATE);
    }
    daemon_await_nothing_held(&f->daemon);
    fixture_put(f, 7);
    fixture_check(f, 7);
}

/* SOCKET: hold a lease; when told, read what it is on. */
static _Noreturn void act_hold(char **args)
{
    enum fb_status statuses[FIXTURE_PAGES];
    struct fixture f = {0};
    struct fb_transfer t;
    struct fb_hit *hit;

    fixture_manifest(&f.manifest);
    ACTOR_CHECK(engine_init(&f.from, &f.manifest, 16, FIXTURE_PAGES) &&
                engine_init(&f.to, &f.manifest, 48, FIXTURE_PAGES));
    ACTOR_CHECK(fb_open(args[0], NULL, &f.pool, NULL) == FB_OK);
    ACTOR_CHECK(fb_pool_space_open(f.pool, &f.manifest, &f.space, NULL) == FB_OK);
    fixture_use(&f, 7);
    ACTOR_CHECK(fb_lookup(f.pool, &f.space, 1, f.chain[0], FIXTURE_PAGES, 0, ENGINE_WAIT_NS,
                          &hit) == FB_OK);
    t = engine_transfer(&f.to, 0, FIXTURE_PAGES);
    ACTOR_CHECK(fb_get(hit, &t, 0, statuses) == FB_OK);
    actor_say("holding");
    actor_wait();
    engine_round(&f.from);
    engine_clear(&f.to, 0);
    ACTOR_CHECK(fb_get(hit, &t, 0, statuses) == FB_OK);
    ACTOR_CHECK(engine_equal(&f.from, &f.to, engine_all(&f.to)));
    _exit(EXIT_SUCCESS); /* without a word */
}

/* A process that does not come back may still read: nothing is reused before it does or dies. */
static void daemon_waits_for_a_stopped_client(void **state)
{
    struct fixture *f = *state;
    struct actor actor;

    for (int dies = 0; dies < 2; dies++) {
        fixture_put(f, 7);
        actor_start(&actor, "hold", (const char *[]){f->daemon.socket, NULL});
        actor_expect(&actor, "holding");
        assert_int_equal(kill(actor.pid, SIGSTOP), 0);
        restart(f);
        fixture_check(f, 7); /* lookups work at once */
        fixture_use(f, 8 + (uint64_t)dies);
        assert_int_equal(engine_put(&f->from, f->pool, f->space, f->chain[0], 0, FIXTURE_PAGES),
                         FB_AGAIN);
        if (dies) {
            actor_kill(&actor);
            put_at_last(f, 9);
        } else {
            assert_int_equal(kill(actor.pid, SIGCONT), 0);
            fill_pool(f, 1000);
            actor_tell(&actor);
            actor_join(&actor);
        }
        daemon_await_nothing_held(&f->daemon);
    }
}

/* --- files that are not as they were --- */

/* Change bytes of a chunk's header while no daemon runs; reseal says whether its CRC is right. */
static void change_header(const char *path, size_t offset, bool reseal)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct fb_chunk_header h;

    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &h, sizeof(h), 0), sizeof(h));
    ((uint8_t *)&h)[offset] ^= 2;
    if (reseal) {
        h.crc = fb_crc32c(&h, offsetof(struct fb_chunk_header, crc));
    }
    assert_int_equal(pwrite(fd, &h, sizeof(h), 0), sizeof(h));
    close(fd);
}

static void unknown_chunk_is_set_aside(void **state)
{
    static const struct {
        size_t offset;
        bool reseal;
        const char *why;
    } cases[] = {
        {offsetof(struct fb_chunk_header, version), true, "format version"},
        {offsetof(struct fb_chunk_header, slot_count), false, "damaged header"},
        {offsetof(struct fb_chunk_header, magic), true, "is no chunk"},
    };
    struct fixture *f = *state;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char path[256];

        put_at_last(f, 7);
        daemon_kill(&f->daemon);
        assert_true(daemon_find_chunk(&f->daemon, path, sizeof(path)));
        change_header(path, cases[i].offset, cases[i].reseal);
        daemon_restart(&f->daemon);
        fixture_await_connected(f);
        assert_true(daemon_log_has(&f->daemon, "chunk_set_aside"));
        assert_true(daemon_log_has(&f->daemon, cases[i].why));
        daemon_await_metric(&f->daemon, "forebay_set_aside_chunks_total", 1);
        assert_int_equal(access(path, F_OK), 0);
        fill_pool(f, 1000); /* its memory counts */
        assert_in_range(daemon_chunk_bytes(&f->daemon), 0, HOST_BYTES + (1 << 20));
        fixture_check(f, 1000 + HOST_BYTES / (FIXTURE_PAGES * f->from.layout.block_bytes));
        assert_int_equal(unlink(path), 0);
    }
}

static void damaged_manifest_loses_its_blocks_only(void **state)
{
    struct fixture *f = *state;
    const uint8_t *id = fb_pool_space_id(f->space);
    uint32_t arrived;
    char path[256];
    int fd, at;

    fixture_put(f, 7);
    at = snprintf(path, sizeof(path), "%s/space-", f->daemon.chunk_dir);
    for (size_t i = 0; i < FB_SPACE_ID_BYTES; i++) {
        at += snprintf(path + at, sizeof(path) - (size_t)at, "%02x", id[i]);
    }
    daemon_kill(&f->daemon);
    fd = open(path, O_WRONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, "\xff\xff\xff", 3, 5), 3);
    close(fd);
    daemon_restart(&f->daemon);
    fixture_await_connected(f);
    assert_true(daemon_log_has(&f->daemon, "manifest_skipped"));
    fixture_use(f, 7);
    assert_int_equal(engine_get(&f->to, f->pool, f->space, f->chain[0], &arrived), FB_MISS);
    put_at_last(f, 7);
    restart(f);
    fixture_check(f, 7); /* the manifest was kept anew */
}

int main(int argc, char **argv)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    static const struct CMUnitTest tests[] = {
        TEST(blocks_are_found_again),          TEST(kills_under_load_never_give_wrong_bytes),
        TEST(restarts_do_not_add_memory),      TEST(lease_outlives_the_daemon),
        TEST(put_does_not_outlive_the_daemon), TEST(daemon_waits_for_a_stopped_client),
        TEST(unknown_chunk_is_set_aside),      TEST(damaged_manifest_loses_its_blocks_only),
    };

    if (argc > 2 && strcmp(argv[1], "load") == 0) {
        return act_load(argv + 2);
    }
    if (argc > 2 && strcmp(argv[1], "hold") == 0) {
        act_hold(argv + 2);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
