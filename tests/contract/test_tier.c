/* Contract of tiers: one suite for the host tier, bare and inside a fault decorator that does
 * nothing; then what the host tier has besides, and what the decorator does when it does. */
#include "pool/node/host.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#define MIB         (1024ull * 1024)
#define CHUNK_BYTES (2 * MIB)
#define CHUNK_SLOTS 31 /* of 64 KiB */
#define SECOND_NS   (1000ull * 1000 * 1000)

static const struct fb_tier_class small = {.id = 0, .tenant = 0, .slot_bytes = 64 << 10};
static const struct fb_tier_class large = {.id = 1, .tenant = 0, .slot_bytes = 128 << 10};
static const struct fb_tier_class other = {.id = 2, .tenant = 1, .slot_bytes = 64 << 10};

struct fixture {
    char dir[64];
    int dir_fd;
    struct fb_tier *host;
    struct fb_tier *tier; /* host, or what is around it */
    struct fb_job *jobs;
    struct fb_job **tail;
    uint32_t changes;
    uint32_t failures;
};

/* What a completion says. */
struct outcome {
    uint32_t calls;
    enum fb_status status;
};

static void on_done(void *arg, enum fb_status status)
{
    struct outcome *o = arg;

    o->calls++;
    o->status = status;
}

static void submit(void *context, struct fb_job *job)
{
    struct fixture *f = context;

    job->next = NULL;
    *f->tail = job;
    f->tail = &job->next;
}

static void on_changed(void *context, uint16_t class_id, const struct fb_error *error)
{
    struct fixture *f = context;

    assert_true(class_id <= other.id);
    f->changes++;
    f->failures += error != NULL;
}

/* Returns how many there were. */
static uint32_t run_jobs(struct fixture *f)
{
    uint32_t n = 0;

    while (f->jobs) {
        struct fb_job *job = f->jobs;

        f->jobs = job->next;
        if (!f->jobs) {
            f->tail = &f->jobs;
        }
        job->work(job);
        job->mail.run(&job->mail);
        n++;
    }
    return n;
}

static void open_dir(struct fixture *f)
{
    snprintf(f->dir, sizeof(f->dir), "%s/test_tier.XXXXXX",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    assert_non_null(mkdtemp(f->dir));
    f->dir_fd = open(f->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    assert_true(f->dir_fd >= 0);
}

static int setup_host(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));
    struct fb_host_options options = {
        .capacity_bytes = 4 * CHUNK_BYTES,
        .huge_pages = FB_HUGE_PAGES_NEVER,
        .tenant_count = 2,
        .tenant_bytes = {3 * CHUNK_BYTES, 2 * CHUNK_BYTES},
        .tenant_names = {"first", "second"},
        .submit = submit,
        .context = f,
        .changed = on_changed,
        .changed_context = f,
    };

    assert_non_null(f);
    f->tail = &f->jobs;
    open_dir(f);
    options.dir_fd = f->dir_fd;
    assert_int_equal(fb_host_create(&options, &f->host), FB_OK);
    f->tier = f->host;
    *state = f;
    return 0;
}

static void wear(struct fixture *f, const struct fb_tier_faults *faults)
{
    assert_int_equal(fb_tier_fault(f->host, faults, &f->tier), FB_OK);
}

static int setup_fault(void **state)
{
    setup_host(state);
    wear(*state, &(struct fb_tier_faults){.seed = 1});
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    char command[128];

    run_jobs(f);
    f->tier->ops->destroy(f->tier);
    close(f->dir_fd);
    snprintf(command, sizeof(command), "rm -rf %s", f->dir);
    assert_int_equal(system(command), 0);
    free(f);
    return 0;
}

static enum fb_status reserve(struct fixture *f, const struct fb_tier_class *class,
                              struct fb_location *ret_where)
{
    return f->tier->ops->reserve(f->tier, class, ret_where);
}

/* Reserve, with a chunk made where one must be. */
static struct fb_location must_reserve(struct fixture *f, const struct fb_tier_class *class)
{
    struct fb_location where;
    enum fb_status status = reserve(f, class, &where);

    if (status == FB_AGAIN) {
        assert_int_equal(run_jobs(f), 1);
        status = reserve(f, class, &where);
    }
    assert_int_equal(status, FB_OK);
    return where;
}

static struct outcome commit(struct fixture *f, struct fb_location where)
{
    struct outcome o = {0};

    f->tier->ops->commit(f->tier, where, on_done, &o);
    return o;
}

static struct outcome read_block(struct fixture *f, struct fb_location where, void *into,
                                 uint64_t bytes)
{
    struct outcome o = {0};

    f->tier->ops->read(f->tier, where, into, bytes, on_done, &o);
    return o;
}

static void *map(struct fixture *f, struct fb_location where)
{
    return f->tier->ops->map(f->tier, where);
}

static struct fb_tier_stats stats(struct fixture *f)
{
    struct fb_tier_stats s;

    f->tier->ops->stats(f->tier, &s);
    return s;
}

static void assert_outcome(struct outcome o, enum fb_status status)
{
    assert_int_equal(o.calls, 1);
    assert_int_equal(o.status, status);
}

/* --- every tier --- */

static void space_is_made_once(void **state)
{
    struct fixture *f = *state;
    struct fb_location where;

    assert_int_equal(stats(f).capacity_bytes, 4 * CHUNK_BYTES);
    assert_int_equal(stats(f).used_bytes, 0);
    assert_int_equal(reserve(f, &small, &where), FB_AGAIN);
    assert_int_equal(reserve(f, &small, &where), FB_AGAIN);
    assert_int_equal(stats(f).used_bytes, CHUNK_BYTES); /* promised already */
    assert_int_equal(stats(f).slots_free, 0);
    assert_int_equal(run_jobs(f), 1);
    assert_int_equal(f->changes, 1);
    assert_int_equal(f->failures, 0);
    assert_int_equal(stats(f).slots_free, CHUNK_SLOTS);
    assert_int_equal(reserve(f, &small, &where), FB_OK);
    assert_int_equal(stats(f).slots_used, 1);
    assert_int_equal(stats(f).slots_free, CHUNK_SLOTS - 1);
}

static void slots_do_not_overlap(void **state)
{
    struct fixture *f = *state;
    struct fb_location where[2 * CHUNK_SLOTS];

    for (uint32_t i = 0; i < 2 * CHUNK_SLOTS; i++) {
        where[i] = must_reserve(f, &small);
        assert_int_equal((uintptr_t)map(f, where[i]) % FB_BLOCK_ALIGN, 0);
        memset(map(f, where[i]), (int)i, small.slot_bytes);
    }
    for (uint32_t i = 0; i < 2 * CHUNK_SLOTS; i++) {
        const uint8_t *slot = map(f, where[i]);

        assert_int_equal(slot[0], i);
        assert_memory_equal(slot, slot + 1, small.slot_bytes - 1);
    }
}

static void committed_bytes_are_read(void **state)
{
    struct fixture *f = *state;
    struct fb_location where = must_reserve(f, &small);
    uint8_t *into = malloc(small.slot_bytes + 1);

    assert_non_null(into);
    memset(map(f, where), 0x5a, small.slot_bytes);
    assert_outcome(commit(f, where), FB_OK);
    assert_outcome(read_block(f, where, into, small.slot_bytes), FB_OK);
    assert_memory_equal(into, map(f, where), small.slot_bytes);
    assert_outcome(read_block(f, where, into, small.slot_bytes + 1), FB_EIO);
    free(into);
}

static void places_that_are_not_there(void **state)
{
    struct fixture *f = *state;
    struct fb_location where = must_reserve(f, &small);
    struct fb_location wrong[] = {{where.chunk + (1u << 16), where.slot},
                                  {where.chunk + 1, where.slot},
                                  {0, 0},
                                  {UINT32_MAX, 0},
                                  {where.chunk, CHUNK_SLOTS},
                                  {where.chunk, UINT32_MAX}};
    uint8_t byte;

    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        assert_null(map(f, wrong[i]));
        assert_outcome(read_block(f, wrong[i], &byte, 1), FB_EIO);
    }
    where.chunk += 1u << 16;
    assert_outcome(commit(f, where), FB_EIO);
}

static void limits_hold(void **state)
{
    struct fixture *f = *state;
    struct fb_location where[3 * CHUNK_SLOTS], one;

    for (uint32_t i = 0; i < 3 * CHUNK_SLOTS; i++) {
        where[i] = must_reserve(f, &small);
    }
    assert_int_equal(reserve(f, &small, &one), FB_ELIMIT); /* the tenant's */
    assert_int_equal(reserve(f, &large, &one), FB_ELIMIT);
    for (uint32_t i = 0; i < CHUNK_SLOTS; i++) {
        must_reserve(f, &other);
    }
    assert_int_equal(reserve(f, &other, &one), FB_ELIMIT); /* the tier's */
    assert_int_equal(stats(f).used_bytes, 4 * CHUNK_BYTES);
    assert_int_equal(stats(f).slots_free, 0);
    assert_null(f->jobs);

    f->tier->ops->free(f->tier, where[40]);
    one = must_reserve(f, &small);
    assert_memory_equal(&one, &where[40], sizeof(one));
    assert_int_equal(reserve(f, &small, &one), FB_ELIMIT);
}

static void classes_share_no_chunk(void **state)
{
    struct fixture *f = *state;
    struct fb_location a = must_reserve(f, &small), b = must_reserve(f, &large),
                       c = must_reserve(f, &other);

    assert_int_not_equal(a.chunk, b.chunk);
    assert_int_not_equal(a.chunk, c.chunk);
    assert_int_not_equal(b.chunk, c.chunk);
}

static void blocks_may_be_too_large(void **state)
{
    struct fb_tier_class huge = {.id = 0, .tenant = 0, .slot_bytes = FB_BLOCK_MAX_BYTES + 4096};
    struct fb_location where;

    assert_int_equal(reserve(*state, &huge, &where), FB_EGEOMETRY);
    /* possible, but not in a tier as small as this one */
    huge.slot_bytes = FB_BLOCK_MAX_BYTES;
    assert_int_equal(reserve(*state, &huge, &where), FB_ELIMIT);
}

/* The directory goes while a chunk is made: the class does without for a second. */
static void space_cannot_be_made(void **state)
{
    struct fixture *f = *state;
    struct fb_location where;
    int fd;

    f->tier->ops->tick(f->tier, SECOND_NS);
    assert_int_equal(reserve(f, &small, &where), FB_AGAIN);
    assert_int_equal(rmdir(f->dir), 0);
    run_jobs(f);
    assert_int_equal(f->failures, 1);
    assert_int_equal(stats(f).used_bytes, 0);
    assert_int_equal(reserve(f, &small, &where), FB_ELIMIT);

    assert_int_equal(mkdir(f->dir, 0700), 0);
    fd = open(f->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    assert_true(fd >= 0 && dup2(fd, f->dir_fd) == f->dir_fd);
    close(fd);
    f->tier->ops->tick(f->tier, 2 * SECOND_NS - 1);
    assert_int_equal(reserve(f, &small, &where), FB_ELIMIT);
    f->tier->ops->tick(f->tier, 2 * SECOND_NS);
    must_reserve(f, &small);
    assert_int_equal(f->failures, 1);
}

/* Slots come and go at random; a model says which are out. */
static void churn(void **state)
{
    struct fixture *f = *state;
    struct fb_location out[3 * CHUNK_SLOTS];
    uint32_t n = 0, random = 1;

    for (int step = 0; step < 20000; step++) {
        random = random * 1664525u + 1013904223u;
        if (n < 3 * CHUNK_SLOTS && (random >> 16) % 100 < 55) {
            out[n] = must_reserve(f, &small);
            for (uint32_t i = 0; i < n; i++) {
                assert_false(out[i].chunk == out[n].chunk && out[i].slot == out[n].slot);
            }
            n++;
        } else if (n > 0) {
            uint32_t i = (random >> 8) % n;

            f->tier->ops->free(f->tier, out[i]);
            out[i] = out[--n];
        }
        assert_int_equal(stats(f).slots_used, n);
    }
    assert_int_equal(stats(f).slots_used + stats(f).slots_free, 3 * CHUNK_SLOTS);
}

/* --- the host tier: chunks --- */

static void retired_chunk_goes_when_unused(void **state)
{
    struct fixture *f = *state;
    struct fb_location a = must_reserve(f, &small), b;
    struct fb_chunk *chunk = fb_host_chunk(f->host, a.chunk);

    chunk->given = 1;
    fb_host_retire(f->host, chunk);
    fb_host_retire(f->host, chunk);
    assert_int_equal(fb_host_tenant_retiring(f->host, 0), 1);
    assert_int_equal(fb_host_class_chunks(f->host, small.id), 0);
    assert_int_equal(stats(f).slots_free, 0);
    b = must_reserve(f, &small);
    assert_int_not_equal(a.chunk, b.chunk);

    assert_false(fb_host_reap(f->host, chunk));
    f->tier->ops->free(f->tier, a);
    assert_false(fb_host_reap(f->host, chunk)); /* a client may map it */
    assert_non_null(map(f, a));
    chunk->given = 0;
    assert_true(fb_host_reap(f->host, chunk));
    assert_int_equal(fb_host_tenant_retiring(f->host, 0), 0);
    assert_null(map(f, a));
    assert_null(fb_host_chunk(f->host, a.chunk));
    assert_false(fb_chunk_exists(f->dir_fd, a.chunk));
    assert_int_equal(stats(f).used_bytes, CHUNK_BYTES);
    assert_int_equal(fb_host_tenant_used(f->host, 0), CHUNK_BYTES);
}

static void chunk_in_use_is_kept(void **state)
{
    struct fixture *f = *state;
    struct fb_location first = must_reserve(f, &small);
    struct fb_chunk *chunk = fb_host_chunk(f->host, first.chunk);

    assert_false(fb_host_reap(f->host, chunk)); /* not retiring */
    assert_null(fb_host_unused_chunk(f->host, small.id));
    f->tier->ops->free(f->tier, first);
    assert_ptr_equal(fb_host_unused_chunk(f->host, small.id), chunk);
    assert_false(fb_host_reap(f->host, chunk));
    assert_ptr_equal(fb_host_next_in_class(f->host, small.id, NULL), chunk);
    assert_null(fb_host_next_in_class(f->host, small.id, chunk));
}

static void found_chunk_is_adopted(void **state)
{
    struct fixture *f = *state;
    struct fb_chunk_shape shape = {CHUNK_BYTES, CHUNK_SLOTS};
    struct fb_chunk_file file;
    struct fb_chunk *chunk, *second;
    struct fb_location where;

    assert_int_equal(fb_chunk_create(f->dir_fd, 0x00070000, "first", small.slot_bytes, &shape,
                                     FB_HUGE_PAGES_NEVER, &file, NULL),
                     FB_OK);
    assert_int_equal(fb_host_adopt(f->host, &file, 0, small.id, &chunk), FB_OK);
    assert_int_equal(fb_host_adopt(f->host, &file, 0, small.id, &second), FB_EXISTS);
    assert_int_equal(fb_host_tenant_used(f->host, 0), CHUNK_BYTES);
    assert_true(fb_host_take(f->host, chunk, 0));
    assert_false(fb_host_take(f->host, chunk, 0));
    assert_false(fb_host_take(f->host, chunk, CHUNK_SLOTS));
    for (uint32_t i = 1; i < CHUNK_SLOTS; i++) {
        assert_int_equal(reserve(f, &small, &where), FB_OK);
        assert_int_equal(where.chunk, file.id);
        assert_int_not_equal(where.slot, 0);
    }
    assert_int_equal(reserve(f, &small, &where), FB_AGAIN);
}

/* It keeps its bytes and its name, whatever chunks are made. */
static void file_set_aside_is_left_alone(void **state)
{
    struct fixture *f = *state;
    struct stat st;
    char name[32];

    for (uint32_t place = 0; place < 8; place++) {
        snprintf(name, sizeof(name), "chunk-%08x", 1u << 16 | place);
        close(openat(f->dir_fd, name, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
    }
    fb_host_set_aside(f->host, 2 * CHUNK_BYTES);
    must_reserve(f, &small);
    must_reserve(f, &large);
    for (uint32_t place = 0; place < 8; place++) {
        snprintf(name, sizeof(name), "chunk-%08x", 1u << 16 | place);
        assert_int_equal(fstatat(f->dir_fd, name, &st, 0), 0);
        assert_int_equal(st.st_size, 0);
    }
    /* Its memory counts. */
    assert_int_equal(stats(f).used_bytes, 4 * CHUNK_BYTES);
    assert_int_equal(reserve(f, &other, &(struct fb_location){0}), FB_ELIMIT);
}

/* --- the decorator --- */

static void reserve_fails(void **state)
{
    struct fixture *f = *state;
    struct fb_location where;

    wear(f, &(struct fb_tier_faults){.seed = 1, .fail_reserve = 1});
    assert_int_equal(reserve(f, &small, &where), FB_EIO);
    assert_null(f->jobs);
    assert_int_equal(stats(f).used_bytes, 0);
}

static void commit_and_read_fail(void **state)
{
    struct fixture *f = *state;
    struct fb_location where;
    uint8_t byte;

    wear(f, &(struct fb_tier_faults){.seed = 1, .fail_commit = 1, .fail_read = 1});
    where = must_reserve(f, &small);
    assert_outcome(commit(f, where), FB_EIO);
    assert_outcome(read_block(f, where, &byte, 1), FB_EIO);
    f->tier->ops->free(f->tier, where);
    assert_int_equal(stats(f).slots_used, 0);
}

/* Bit i: whether the i-th of 64 commits to a tier of its own failed. */
static uint64_t failures(uint64_t seed)
{
    struct fb_location where;
    struct fixture *f;
    uint64_t failed = 0;
    void *state;

    setup_host(&state);
    f = state;
    wear(f, &(struct fb_tier_faults){.seed = seed, .fail_commit = 3});
    where = must_reserve(f, &small);
    for (int i = 0; i < 64; i++) {
        struct outcome o = commit(f, where);

        assert_int_equal(o.calls, 1);
        failed |= (uint64_t)(o.status != FB_OK) << i;
    }
    teardown(&state);
    return failed;
}

static void faults_repeat_by_seed(void **state)
{
    uint64_t failed = failures(7);

    (void)state;
    assert_in_range(__builtin_popcountll(failed), 8, 36);
    assert_true(failures(7) == failed);
    assert_true(failures(8) != failed);
    assert_in_range(__builtin_popcountll(failures(0)), 8, 36);
}

static void delayed_calls_wait_for_a_tick(void **state)
{
    struct fixture *f = *state;
    struct outcome committed = {0}, was_read = {0}, left = {0};
    struct fb_location where;
    uint8_t byte;

    wear(f, &(struct fb_tier_faults){.seed = 1, .delay = 1, .delay_ns = 100});
    f->tier->ops->tick(f->tier, 1000);
    where = must_reserve(f, &small);
    f->tier->ops->commit(f->tier, where, on_done, &committed);
    f->tier->ops->tick(f->tier, 1050);
    f->tier->ops->read(f->tier, where, &byte, 1, on_done, &was_read);
    f->tier->ops->tick(f->tier, 1099);
    assert_int_equal(committed.calls, 0);
    f->tier->ops->tick(f->tier, 1100);
    assert_outcome(committed, FB_OK);
    assert_int_equal(was_read.calls, 0);
    f->tier->ops->tick(f->tier, 5000);
    assert_outcome(committed, FB_OK);
    assert_outcome(was_read, FB_OK);

    /* One is under way when the tier goes: nobody is told. */
    f->tier->ops->commit(f->tier, where, on_done, &left);
    assert_int_equal(left.calls, 0);
}

#define SUITE(setup)                                                                 \
    cmocka_unit_test_setup_teardown(space_is_made_once, setup, teardown),            \
        cmocka_unit_test_setup_teardown(slots_do_not_overlap, setup, teardown),      \
        cmocka_unit_test_setup_teardown(committed_bytes_are_read, setup, teardown),  \
        cmocka_unit_test_setup_teardown(places_that_are_not_there, setup, teardown), \
        cmocka_unit_test_setup_teardown(limits_hold, setup, teardown),               \
        cmocka_unit_test_setup_teardown(classes_share_no_chunk, setup, teardown),    \
        cmocka_unit_test_setup_teardown(blocks_may_be_too_large, setup, teardown),   \
        cmocka_unit_test_setup_teardown(space_cannot_be_made, setup, teardown),      \
        cmocka_unit_test_setup_teardown(churn, setup, teardown)

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup_host, teardown)

int main(void)
{
    const struct CMUnitTest host[] = {SUITE(setup_host)};
    const struct CMUnitTest decorated[] = {SUITE(setup_fault)};
    const struct CMUnitTest chunks[] = {
        TEST(retired_chunk_goes_when_unused),
        TEST(chunk_in_use_is_kept),
        TEST(found_chunk_is_adopted),
        TEST(file_set_aside_is_left_alone),
    };
    const struct CMUnitTest faults[] = {
        TEST(reserve_fails),
        TEST(commit_and_read_fail),
        cmocka_unit_test(faults_repeat_by_seed),
        TEST(delayed_calls_wait_for_a_tick),
    };
    int failed = cmocka_run_group_tests_name("host", host, NULL, NULL);

    failed += cmocka_run_group_tests_name("host in fault decorator", decorated, NULL, NULL);
    failed += cmocka_run_group_tests_name("host's chunks", chunks, NULL, NULL);
    failed += cmocka_run_group_tests_name("fault decorator", faults, NULL, NULL);
    return failed;
}
