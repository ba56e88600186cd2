/* Chunk files: shapes, a round trip, and what is refused. */
#include "pool/node/chunk.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <cmocka.h>

#define MIB  (1024ull * 1024)
#define GIB  (1024 * MIB)
#define ID   0x00010002u
#define NAME "chunk-00010002"
#define SLOT (64ull << 10)

struct fixture {
    char dir[64];
    int fd;
};

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));

    assert_non_null(f);
    snprintf(f->dir, sizeof(f->dir), "%s/test_chunk.XXXXXX",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    assert_non_null(mkdtemp(f->dir));
    f->fd = open(f->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    assert_true(f->fd >= 0);
    *state = f;
    return 0;
}

/* Also checks that nothing but the chunk was left. */
static int teardown(void **state)
{
    struct fixture *f = *state;

    fb_chunk_unlink(f->fd, ID);
    close(f->fd);
    assert_int_equal(rmdir(f->dir), 0);
    free(f);
    return 0;
}

static struct fb_chunk_shape shape_of(uint64_t tier_bytes, uint64_t slot_bytes)
{
    struct fb_chunk_shape shape;

    assert_int_equal(fb_chunk_shape(tier_bytes, slot_bytes, &shape, NULL), FB_OK);
    return shape;
}

static struct fb_chunk_file create(struct fixture *f)
{
    struct fb_chunk_shape shape = shape_of(64 * MIB, SLOT);
    struct fb_chunk_file file;

    assert_int_equal(
        fb_chunk_create(f->fd, ID, "team-a", SLOT, &shape, FB_HUGE_PAGES_AUTO, &file, NULL), FB_OK);
    return file;
}

/* --- shapes --- */

static void shapes_follow_the_rules(void **state)
{
    static const struct {
        uint64_t tier_bytes;
        uint64_t slot_bytes;
        uint64_t file_bytes;
    } rows[] = {
        {16 * GIB, SLOT, 256 * MIB},             /* a 64th */
        {16 * GIB + 100 * MIB, SLOT, 256 * MIB}, /* in steps of 2 MiB */
        {16 * GIB + 128 * MIB, SLOT, 258 * MIB}, /* likewise */
        {16 * MIB, 8192, 2 * MIB},               /* at least 2 MiB */
        {0, 8192, 2 * MIB},                      /* likewise */
        {64 * MIB, MIB, 10 * MIB},               /* at least 8 slots and the header */
        {1024 * GIB, SLOT, GIB},                 /* at most 1 GiB */
        {64 * MIB, FB_BLOCK_MAX_BYTES, GIB},     /* 8 slots fit that just so */
        {1024 * GIB, FB_BLOCK_MAX_BYTES, GIB},   /* likewise */
        {64 * MIB, (2 * MIB - 4096) / 8 / 4096 * 4096, 2 * MIB}, /* 8 slots fit 2 MiB just so */
    };

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct fb_chunk_shape shape = shape_of(rows[i].tier_bytes, rows[i].slot_bytes);

        assert_int_equal(shape.file_bytes, rows[i].file_bytes);
        assert_true(shape.slot_count >= FB_CHUNK_MIN_SLOTS);
        assert_int_equal(shape.slot_count,
                         (shape.file_bytes - FB_CHUNK_HEADER_BYTES) / rows[i].slot_bytes);
    }
}

static void blocks_may_be_too_large(void **state)
{
    struct fb_chunk_shape shape;
    struct fb_error error;

    (void)state;
    assert_int_equal(fb_chunk_shape(64 * GIB, FB_BLOCK_MAX_BYTES + 4096, &shape, &error),
                     FB_EGEOMETRY);
    assert_non_null(strstr(error.text, "split the layers"));
    assert_int_equal(fb_chunk_shape(64 * GIB, UINT64_MAX / 4096 * 4096, &shape, NULL),
                     FB_EGEOMETRY);
}

static void names_of_chunks(void **state)
{
    (void)state;
    assert_true(fb_chunk_is_name(NAME));
    assert_false(fb_chunk_is_name(NAME ".new"));
    assert_false(fb_chunk_is_name("lock"));
    assert_false(fb_chunk_is_name("."));
}

/* --- files --- */

static void what_was_written_is_found(void **state)
{
    struct fixture *f = *state;
    struct fb_chunk_file made = create(f), found;
    uint32_t last = made.slot_count - 1;
    struct stat st;

    assert_int_equal(made.slot_count, 31);
    assert_int_equal(fstat(made.fd, &st), 0);
    assert_int_equal(st.st_size, made.file_bytes);
    assert_true((uint64_t)st.st_blocks * 512 >= made.file_bytes); /* memory is there already */
    assert_int_equal(st.st_mode & 0777, 0600);
    memset(fb_chunk_slot(&made, last), 0x77, SLOT);
    fb_chunk_close(&made);
    fb_chunk_close(&made);

    assert_true(fb_chunk_exists(f->fd, ID));
    assert_int_equal(fb_chunk_open(f->fd, NAME, &found, NULL), FB_OK);
    assert_int_equal(found.id, ID);
    assert_int_equal(found.slot_bytes, SLOT);
    assert_int_equal(found.slot_count, last + 1);
    assert_int_equal(found.file_bytes, st.st_size);
    assert_string_equal(found.tenant, "team-a");
    assert_int_equal(fb_chunk_slot(&found, last)[0], 0x77);
    assert_int_equal(fb_chunk_slot(&found, last)[SLOT - 1], 0x77);
    assert_int_equal(fb_chunk_slot(&found, last - 1)[SLOT - 1], 0);
    fb_chunk_unlink(f->fd, ID);
    assert_false(fb_chunk_exists(f->fd, ID));
    fb_chunk_slot(&found, 0)[0] = 1; /* memory outlives the name */
    fb_chunk_close(&found);
}

/* Change a sealed header, and seal it again if the change is to be believed. */
static void forge(struct fixture *f, const struct fb_chunk_header *good, size_t at, uint8_t by,
                  bool seal)
{
    struct fb_chunk_header h = *good;
    int fd = openat(f->fd, NAME, O_WRONLY | O_CLOEXEC);

    ((uint8_t *)&h)[at] ^= by;
    if (seal) {
        h.crc = fb_crc32c(&h, offsetof(struct fb_chunk_header, crc));
    }
    assert_int_equal(pwrite(fd, &h, sizeof(h), 0), sizeof(h));
    close(fd);
}

static void assert_refused(struct fixture *f, enum fb_status status)
{
    struct fb_chunk_file file;
    struct fb_error error = {.status = FB_OK};

    assert_int_equal(fb_chunk_open(f->fd, NAME, &file, &error), status);
    assert_int_equal(error.status, status);
    assert_non_null(strstr(error.text, NAME));
}

static void damaged_headers_are_refused(void **state)
{
    static const size_t sealed[] = {
        offsetof(struct fb_chunk_header, file_bytes),
        offsetof(struct fb_chunk_header, slot_bytes),     /* not aligned */
        offsetof(struct fb_chunk_header, slot_bytes) + 7, /* far too large */
        offsetof(struct fb_chunk_header, slot_count) + 1, /* more than fit */
    };
    struct fixture *f = *state;
    struct fb_chunk_file file = create(f);
    struct fb_chunk_header good;

    memcpy(&good, file.map, sizeof(good));
    fb_chunk_close(&file);
    for (size_t at = 0; at < sizeof(good); at++) {
        bool is_version = at >= offsetof(struct fb_chunk_header, version) &&
                          at < offsetof(struct fb_chunk_header, id);

        forge(f, &good, at, 1, false);
        assert_refused(f, is_version ? FB_EVERSION : FB_ECORRUPT);
    }
    for (size_t i = 0; i < sizeof(sealed) / sizeof(sealed[0]); i++) {
        forge(f, &good, sealed[i], 1, true);
        assert_refused(f, FB_ECORRUPT);
    }
    memset(good.tenant, 'x', sizeof(good.tenant)); /* without an end */
    forge(f, &good, 0, 0, true);
    assert_refused(f, FB_ECORRUPT);
}

static void other_versions_are_told_apart(void **state)
{
    struct fixture *f = *state;
    struct fb_chunk_file file = create(f);
    struct fb_chunk_header good;

    memcpy(&good, file.map, sizeof(good));
    fb_chunk_close(&file);
    forge(f, &good, offsetof(struct fb_chunk_header, version), 2, true);
    assert_refused(f, FB_EVERSION);
}

static void other_sizes_are_refused(void **state)
{
    struct fixture *f = *state;
    struct fb_chunk_file file = create(f);
    static const off_t sizes[] = {2 * MIB - 4096, 2 * MIB + 4096, 4096, 4095, 0};

    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        int fd = openat(f->fd, NAME, O_WRONLY | O_CLOEXEC);

        assert_int_equal(ftruncate(fd, sizes[i]), 0);
        close(fd);
        assert_refused(f, FB_ECORRUPT);
    }
    fb_chunk_close(&file);
    fb_chunk_unlink(f->fd, ID);
    assert_refused(f, FB_ECORRUPT);
}

/* The file system has no room: told so, and nothing is left (teardown looks). */
static void directory_is_full(void **state)
{
    struct fixture *f = *state;
    struct fb_chunk_shape shape = {0};
    struct fb_chunk_file file;
    struct fb_error error;
    struct statfs fs;

    assert_int_equal(fstatfs(f->fd, &fs), 0);
    if (fs.f_type != TMPFS_MAGIC || fs.f_blocks == 0) {
        skip(); /* only a tmpfs with a size says at once that it is too small */
    }
    shape.file_bytes =
        ((uint64_t)fs.f_blocks * (uint64_t)fs.f_bsize / FB_CHUNK_ALIGN + 1) * FB_CHUNK_ALIGN;
    shape.slot_count = 8;
    assert_int_equal(
        fb_chunk_create(f->fd, ID, "team-a", SLOT, &shape, FB_HUGE_PAGES_AUTO, &file, &error),
        FB_ENOMEM);
    assert_non_null(strstr(error.text, "host_bytes"));
    assert_false(fb_chunk_exists(f->fd, ID));
}

static void directory_is_gone(void **state)
{
    struct fixture *f = *state;
    struct fb_chunk_shape shape = shape_of(0, SLOT);
    struct fb_chunk_file file;
    struct fb_error error;

    assert_int_equal(rmdir(f->dir), 0);
    assert_int_equal(
        fb_chunk_create(f->fd, ID, "team-a", SLOT, &shape, FB_HUGE_PAGES_AUTO, &file, &error),
        FB_EIO);
    assert_int_equal(mkdir(f->dir, 0700), 0); /* for teardown */
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shapes_follow_the_rules),
        cmocka_unit_test(blocks_may_be_too_large),
        cmocka_unit_test(names_of_chunks),
        TEST(what_was_written_is_found),
        TEST(damaged_headers_are_refused),
        TEST(other_versions_are_told_apart),
        TEST(other_sizes_are_refused),
        TEST(directory_is_full),
        TEST(directory_is_gone),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
