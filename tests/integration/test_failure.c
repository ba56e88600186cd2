/* Others fail, the rest goes on: clients killed anywhere, a daemon that stops or is not there,
 * bytes that change, memory that is not there. */
#include "pool/node/chunk.h"
#include "tests/integration/actor.h"
#include "tests/integration/fixture.h"

#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static int setup(void **state)
{
    static const char *const flags[] = {"--lease=1s", NULL};
    static struct fixture f;

    fixture_init(&f, flags);
    *state = &f;
    return 0;
}

static int teardown(void **state)
{
    fixture_fini(*state);
    return 0;
}

/* --- clients that are killed --- */

enum { STORED = 7, NEW = 20 };

static const char *const stages[] = {"opened",   "looked-up", "reserved", "half",
                                     "encoding", "encoded",   "getting"};

static void read_for_ever(struct fixture *f)
{
    enum fb_status statuses[FIXTURE_PAGES];
    struct fb_transfer t = engine_transfer(&f->to, 0, FIXTURE_PAGES);
    struct fb_hit *hit;

    ACTOR_CHECK(fb_lookup(f->pool, &f->space, 1, f->chain[0], FIXTURE_PAGES, 0, ENGINE_WAIT_NS,
                          &hit) == FB_OK);
    actor_say("getting");
    while (fb_get(hit, &t, 0, statuses) == FB_OK) {
    }
}

static void write_for_ever(struct fixture *f, const char *stage)
{
    enum fb_status statuses[FIXTURE_PAGES];
    struct fb_transfer t = engine_transfer(&f->from, 0, FIXTURE_PAGES);
    struct fb_put *put;

    fixture_use(f, NEW);
    ACTOR_CHECK(fb_put_begin(f->pool, f->space, f->chain[0], FIXTURE_PAGES, NULL, 0, NULL,
                             ENGINE_WAIT_NS, &put, statuses) == FB_OK);
    if (strcmp(stage, "half") == 0) {
        t.page_count = 2;
    }
    if (strcmp(stage, "reserved") != 0) {
        ACTOR_CHECK(fb_put_encode(put, &t, statuses) == FB_OK);
    }
    actor_say(stage);
    while (strcmp(stage, "encoding") == 0) {
        fb_put_encode(put, &t, statuses);
    }
    actor_wait();
}

/* SOCKET STAGE: go as far as that, say so, and stay there. */
static int act_stage(char **args)
{
    const char *stage = args[1];
    struct fixture f = {0};
    struct fb_hit *hit;

    fixture_manifest(&f.manifest);
    ACTOR_CHECK(engine_init(&f.from, &f.manifest, 16, FIXTURE_PAGES) &&
                engine_init(&f.to, &f.manifest, 48, FIXTURE_PAGES));
    ACTOR_CHECK(fb_open(args[0], NULL, &f.pool, NULL) == FB_OK);
    ACTOR_CHECK(fb_pool_space_open(f.pool, &f.manifest, &f.space, NULL) == FB_OK);
    fixture_use(&f, STORED);
    if (strcmp(stage, "getting") == 0) {
        read_for_ever(&f);
    } else if (strcmp(stage, "looked-up") == 0) {
        ACTOR_CHECK(fb_lookup(f.pool, &f.space, 1, f.chain[0], FIXTURE_PAGES, 0, ENGINE_WAIT_NS,
                              &hit) == FB_OK);
    } else if (strcmp(stage, "opened") != 0) {
        write_for_ever(&f, stage);
    }
    actor_say(stage);
    actor_wait(); /* for its death */
    return EXIT_FAILURE;
}

static void killed_clients_leave_nothing(void **state)
{
    struct fixture *f = *state;
    enum fb_status statuses[FIXTURE_PAGES];
    struct fb_put *put;
    struct actor actor;

    fixture_put(f, STORED);
    for (size_t i = 0; i < sizeof(stages) / sizeof(stages[0]); i++) {
        actor_start(&actor, "stage", (const char *[]){f->daemon.socket, stages[i], NULL});
        actor_expect(&actor, stages[i]);
        daemon_await_metric(&f->daemon, "forebay_clients", 2);
        fixture_use(f, NEW);
        if (i >= 2 && i < 6) { /* it writes what we would */
            assert_int_equal(fb_put_begin(f->pool, f->space, f->chain[0], FIXTURE_PAGES, NULL, 0,
                                          NULL, ENGINE_WAIT_NS, &put, statuses),
                             FB_MISS);
            assert_int_equal(statuses[0], FB_BUSY);
        }
        actor_kill(&actor);
        daemon_await_metric(&f->daemon, "forebay_clients", 1);
        daemon_await_nothing_held(&f->daemon);
        fixture_check(f, STORED);
    }
    fixture_put(f, NEW);
    fixture_check(f, NEW);
    daemon_await_nothing_held(&f->daemon);
}

/* --- a daemon that does not answer --- */

enum { LOOKUPS = 100, THREADS = 4 };

static void *look_up_often(void *arg)
{
    struct fixture *f = arg;
    struct fb_hit *hit;

    for (int i = 0; i < LOOKUPS; i++) {
        if (fb_lookup(f->pool, &f->space, 1, f->chain[0], FIXTURE_PAGES, 0, 0, &hit) == FB_OK) {
            fb_hit_release(hit);
        }
    }
    return NULL;
}

static void stopped_daemon_costs_one_deadline(void **state)
{
    enum fb_status statuses[FIXTURE_PAGES];
    struct fb_pool_info before, after;
    struct fixture *f = *state;
    struct fb_transfer t;
    struct fb_hit *hit;
    uint64_t begun;

    fixture_put(f, STORED);
    hit = fixture_lookup(f);
    t = engine_transfer(&f->to, 0, FIXTURE_PAGES);
    assert_int_equal(fb_get(hit, &t, 0, statuses), FB_OK);
    fb_pool_get_info(f->pool, &before);
    daemon_signal(&f->daemon, SIGSTOP);
    begun = clock_ms();
    look_up_often(f);
    assert_in_range(clock_ms() - begun, 2, 150); /* one of 2 ms; the machine is busy */
    fb_pool_get_info(f->pool, &after);
    assert_int_equal(after.deadlines_missed - before.deadlines_missed, 1);
    assert_int_equal(after.calls_skipped - before.calls_skipped, LOOKUPS - 1);
    /* What is mapped can be read; all else ends at once. */
    begun = clock_ms();
    assert_int_equal(fb_get(hit, &t, 0, statuses), FB_OK);
    fb_hit_release(hit);
    assert_in_range(clock_ms() - begun, 0, 150);
    daemon_signal(&f->daemon, SIGCONT);
    begun = clock_ms();
    fixture_await_connected(f);
    assert_in_range(clock_ms() - begun, 0, 3000);
    fixture_check(f, STORED);
    daemon_await_nothing_held(&f->daemon);
}

/* Also where each thread would need a connection of its own first. */
static void stopped_daemon_costs_threads_one_deadline(void **state)
{
    struct fb_pool_info before, after;
    struct fixture *f = *state;
    pthread_t threads[THREADS];
    uint64_t begun;

    fixture_put(f, STORED);
    fb_pool_get_info(f->pool, &before);
    daemon_signal(&f->daemon, SIGSTOP);
    begun = clock_ms();
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, look_up_often, f), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    assert_in_range(clock_ms() - begun, 2, 150);
    fb_pool_get_info(f->pool, &after);
    assert_int_equal(after.deadlines_missed - before.deadlines_missed, 1);
    daemon_signal(&f->daemon, SIGCONT);
    fixture_await_connected(f);
    fixture_check(f, STORED);
}

/* A connection that must be made first is part of the deadline, and opens the breaker as well. */
static void stopped_daemon_is_noticed_by_a_new_connection(void **state)
{
    struct fb_pool_info info;
    struct fixture *f = *state;
    struct fb_pool *pool;
    struct fb_hit *hit;
    uint64_t begun;

    fixture_use(f, STORED);
    assert_int_equal(fb_open(f->daemon.socket, NULL, &pool, NULL), FB_OK);
    daemon_signal(&f->daemon, SIGSTOP);
    begun = clock_ms();
    for (int i = 0; i < LOOKUPS; i++) {
        assert_int_not_equal(fb_lookup(pool, &f->space, 1, f->chain[0], FIXTURE_PAGES, 0, 0, &hit),
                             FB_OK);
    }
    assert_in_range(clock_ms() - begun, 2, 150);
    fb_pool_get_info(pool, &info);
    assert_int_equal(info.deadlines_missed, 1);
    daemon_signal(&f->daemon, SIGCONT);
    fb_close(pool);
}

static void absent_daemon_costs_nothing(void **state)
{
    enum fb_status statuses[FIXTURE_PAGES];
    uint8_t key[FB_KEY_BYTES];
    struct fixture *f = *state;
    struct fb_pool_space *space;
    struct fb_pool_info info;
    struct fb_pool *pool;
    struct fb_put *put;
    struct fb_hit *hit;
    uint64_t begun;

    fixture_use(f, STORED);
    daemon_kill(&f->daemon);
    begun = clock_ms();
    assert_int_equal(fb_open(f->daemon.socket, NULL, &pool, NULL), FB_OK);
    assert_int_equal(fb_pool_space_open(pool, &f->manifest, &space, NULL), FB_OK);
    for (int i = 0; i < LOOKUPS; i++) {
        assert_int_equal(fb_lookup(pool, &space, 1, f->chain[0], FIXTURE_PAGES, 0, 0, &hit),
                         FB_ECONN);
        assert_int_equal(
            fb_put_begin(pool, space, f->chain[0], FIXTURE_PAGES, NULL, 0, NULL, 0, &put, statuses),
            FB_ECONN);
        assert_int_equal(fb_prefetch(pool, &space, 1, f->chain[0], FIXTURE_PAGES, 0), FB_ECONN);
        assert_int_equal(
            fb_hint_pages(pool, space, f->chain[0], 1, FB_HINT_KIND_TTL, 1, 0, statuses), FB_ECONN);
    }
    fb_pool_key(space, f->chain[0], key);
    assert_int_equal(fb_reject(pool, space, key, 1, 0), FB_ECONN);
    assert_in_range(clock_ms() - begun, 0, 150);
    fb_pool_get_info(pool, &info);
    assert_false(info.connected);
    assert_int_equal(info.deadlines_missed, 0);
    fb_close(f->pool);
    f->pool = pool;
    f->space = space;
    daemon_restart(&f->daemon);
    fixture_await_connected(f);
    fixture_put(f, STORED);
    fixture_check(f, STORED);
}

/* --- bytes that change --- */

/* Offset in the chunk file of a block of this pool key. */
static off_t find_block(int fd, const uint8_t key[FB_KEY_BYTES])
{
    struct fb_block_header block;
    struct fb_chunk_header h;

    assert_int_equal(pread(fd, &h, sizeof(h), 0), sizeof(h));
    for (uint32_t slot = 0; slot < h.slot_count; slot++) {
        off_t at = (off_t)(FB_CHUNK_HEADER_BYTES + slot * h.slot_bytes);

        assert_int_equal(pread(fd, &block, sizeof(block), at), sizeof(block));
        if (memcmp(block.key, key, FB_KEY_BYTES) == 0) {
            return at;
        }
    }
    fail_msg("the chunk has no such block");
    return -1;
}

/* Flip one bit of a page's block, at an offset in it. */
static void flip(struct fixture *f, uint32_t page, uint64_t offset)
{
    uint8_t key[FB_KEY_BYTES], byte;
    char path[256];
    off_t at;
    int fd;

    assert_true(daemon_find_chunk(&f->daemon, path, sizeof(path)));
    fd = open(path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    fb_pool_key(f->space, f->chain[page], key);
    at = find_block(fd, key) + (off_t)offset;
    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= 0x10;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

static void flipped_byte_fails_its_page(void **state)
{
    const struct part before = {0, 2, 0, 2, 0, FIXTURE_PAGE};
    const struct part after = {0, 2, 0, 2, 2 * FIXTURE_PAGE, 2 * FIXTURE_PAGE};
    const struct part segment = {1, 1, 0, 1, FIXTURE_PAGE, FIXTURE_PAGE};
    enum fb_status statuses[FIXTURE_PAGES];
    struct fixture *f = *state;
    struct fb_transfer t;
    struct fb_hit *hit;

    fixture_put(f, STORED);
    engine_round(&f->from);
    engine_clear(&f->to, 0xa5);
    flip(f, 1, fb_layout_segment(&f->to.layout, 0, 1) + 333);
    hit = fixture_lookup(f);
    t = engine_transfer(&f->to, 0, FIXTURE_PAGES);
    assert_int_equal(fb_get(hit, &t, 0, statuses), FB_ECORRUPT);
    assert_int_equal(statuses[0], FB_OK);
    assert_int_equal(statuses[1], FB_ECORRUPT);
    assert_int_equal(statuses[2], FB_OK);
    assert_int_equal(statuses[3], FB_OK);
    assert_true(engine_equal(&f->from, &f->to, before));
    assert_true(engine_equal(&f->from, &f->to, after));
    assert_true(engine_is_clear(&f->to, segment, 0xa5));
    daemon_await_metric(&f->daemon, "forebay_rejected_blocks_total", 1);
    daemon_await_log(&f->daemon, "block_rejected");
    fb_hit_release(hit);
    hit = fixture_lookup(f);
    assert_int_equal(fb_hit_pages(hit), 1);
    fb_hit_release(hit);
    fixture_put(f, STORED);
    fixture_check(f, STORED);
    daemon_await_nothing_held(&f->daemon);
}

static void flipped_header_fails_its_page(void **state)
{
    enum fb_status statuses[FIXTURE_PAGES];
    struct fixture *f = *state;
    struct fb_transfer t = engine_transfer(&f->to, 0, FIXTURE_PAGES);
    struct fb_hit *hit;

    fixture_put(f, STORED);
    flip(f, 2, offsetof(struct fb_block_header, plane_sums));
    hit = fixture_lookup(f);
    assert_int_equal(fb_get(hit, &t, 0, statuses), FB_ECORRUPT);
    assert_int_equal(statuses[1], FB_OK);
    assert_int_equal(statuses[2], FB_ECORRUPT);
    assert_int_equal(statuses[3], FB_OK);
    fb_hit_release(hit);
    daemon_await_metric(&f->daemon, "forebay_rejected_blocks_total", 1);
    fixture_put(f, STORED);
    fixture_check(f, STORED);
}

/* --- memory that is not there --- */

static void full_file_system_is_said_and_survived(void **state)
{
    enum { SEEDS = 200 };
    enum fb_status status = FB_OK;
    struct fixture f = {0};
    uint64_t stored = 0;

    (void)state;
    daemon_init(&f.daemon);
    if (mount("tmpfs", f.daemon.chunk_dir, "tmpfs", 0, "size=6m") < 0) {
        daemon_fini(&f.daemon);
        print_message("mounting a small tmpfs is not allowed here\n");
        skip();
    }
    fixture_manifest(&f.manifest);
    daemon_start(&f.daemon, NULL); /* 32 MiB are declared */
    assert_true(engine_init(&f.from, &f.manifest, 16, FIXTURE_PAGES));
    assert_true(engine_init(&f.to, &f.manifest, 16, FIXTURE_PAGES));
    assert_int_equal(fb_open(f.daemon.socket, NULL, &f.pool, NULL), FB_OK);
    assert_int_equal(fb_pool_space_open(f.pool, &f.manifest, &f.space, NULL), FB_OK);
    for (uint64_t seed = 0; seed < SEEDS && status == FB_OK; seed++) {
        fixture_use(&f, seed);
        status = engine_put(&f.from, f.pool, f.space, f.chain[0], 0, FIXTURE_PAGES);
        stored = status == FB_OK ? seed : stored;
    }
    assert_true(status == FB_OK || status == FB_AGAIN);
    daemon_await_log(&f.daemon, "make the file system larger or host_bytes smaller");
    fixture_check(&f, stored);
    daemon_await_nothing_held(&f.daemon);
    fb_close(f.pool);
    f.pool = NULL;
    daemon_signal(&f.daemon, SIGTERM);
    assert_int_equal(daemon_wait(&f.daemon), 0);
    assert_int_equal(umount(f.daemon.chunk_dir), 0);
    engine_fini(&f.from);
    engine_fini(&f.to);
    daemon_fini(&f.daemon);
}

int main(int argc, char **argv)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    static const struct CMUnitTest tests[] = {
        TEST(killed_clients_leave_nothing),
        TEST(stopped_daemon_costs_one_deadline),
        TEST(stopped_daemon_costs_threads_one_deadline),
        TEST(stopped_daemon_is_noticed_by_a_new_connection),
        TEST(absent_daemon_costs_nothing),
        TEST(flipped_byte_fails_its_page),
        TEST(flipped_header_fails_its_page),
        cmocka_unit_test(full_file_system_is_said_and_survived),
    };

    if (argc > 1 && strcmp(argv[1], "stage") == 0) {
        return act_stage(argv + 2);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
