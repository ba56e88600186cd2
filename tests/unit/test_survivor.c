/* Survivors: locks held by other processes, which live, die or come back. */
#include "pool/node/survivor.h"

#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define CLIENTS 3

struct fixture {
    char dir[64];
    struct fb_survivors survivors;
    pid_t pids[CLIENTS];
};

/* Ids that differ in their first byte. */
static void make_id(uint32_t n, uint8_t ret_id[FB_CLIENT_ID_BYTES])
{
    memset(ret_id, 0xab, FB_CLIENT_ID_BYTES);
    ret_id[0] = (uint8_t)n;
}

static void path_of(const struct fixture *f, uint32_t n, char *ret_path, size_t bytes)
{
    uint8_t id[FB_CLIENT_ID_BYTES];
    int at = snprintf(ret_path, bytes, "%s/clients/", f->dir);

    make_id(n, id);
    for (size_t i = 0; i < FB_CLIENT_ID_BYTES; i++) {
        at += snprintf(ret_path + at, bytes - (size_t)at, "%02x", id[i]);
    }
}

static bool has_file(const struct fixture *f, uint32_t n)
{
    char path[160];

    path_of(f, n, path, sizeof(path));
    return access(path, F_OK) == 0;
}

/* The child of a client: takes the lock, says so, and waits for its death. */
static void hold_lock(const char *path, int told_fd)
{
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);

    if (fd < 0 || flock(fd, LOCK_EX) < 0 || write(told_fd, "x", 1) != 1) {
        _exit(1);
    }
    for (;;) {
        pause();
    }
}

static void start_client(struct fixture *f, uint32_t n)
{
    char path[160], byte;
    int fds[2];

    path_of(f, n, path, sizeof(path));
    assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
    f->pids[n] = fork();
    assert_true(f->pids[n] >= 0);
    if (f->pids[n] == 0) {
        close(fds[0]);
        hold_lock(path, fds[1]);
    }
    close(fds[1]);
    assert_int_equal(read(fds[0], &byte, 1), 1);
    close(fds[0]);
}

static void kill_client(struct fixture *f, uint32_t n)
{
    if (f->pids[n] > 0) {
        kill(f->pids[n], SIGKILL);
        assert_int_equal(waitpid(f->pids[n], NULL, 0), f->pids[n]);
        f->pids[n] = 0;
    }
}

static void start_daemon(struct fixture *f)
{
    struct fb_error error;

    if (fb_survivors_init(&f->survivors, f->dir, 0770, -1, &error) != FB_OK) {
        fail_msg("%s", error.text);
    }
}

/* A daemon has been here before: its directory is there. */
static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));

    assert_non_null(f);
    strcpy(f->dir, "/tmp/test_survivor.XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    start_daemon(f);
    assert_int_equal(f->survivors.count, 0);
    fb_survivors_fini(&f->survivors);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    char command[128];

    for (uint32_t n = 0; n < CLIENTS; n++) {
        kill_client(f, n);
    }
    fb_survivors_fini(&f->survivors);
    snprintf(command, sizeof(command), "rm -rf %s", f->dir);
    assert_int_equal(system(command), 0);
    free(f);
    return 0;
}

static bool returned(struct fixture *f, uint32_t n)
{
    uint8_t id[FB_CLIENT_ID_BYTES];

    make_id(n, id);
    return fb_survivors_returned(&f->survivors, id);
}

static void living_are_awaited_until_they_die(void **state)
{
    struct fixture *f = *state;

    start_client(f, 0);
    start_client(f, 1);
    start_daemon(f);
    assert_int_equal(f->survivors.count, 2);
    assert_int_equal(fb_survivors_poll(&f->survivors), 0);
    kill_client(f, 0);
    assert_int_equal(fb_survivors_poll(&f->survivors), 1);
    assert_int_equal(f->survivors.count, 1);
    assert_false(has_file(f, 0));
    assert_true(has_file(f, 1));
    assert_int_equal(fb_survivors_poll(&f->survivors), 0);
    kill_client(f, 1);
    assert_int_equal(fb_survivors_poll(&f->survivors), 1);
    assert_int_equal(f->survivors.count, 0);
}

static void who_returns_is_awaited_no_more(void **state)
{
    struct fixture *f = *state;

    for (uint32_t n = 0; n < CLIENTS; n++) {
        start_client(f, n);
    }
    start_daemon(f);
    assert_int_equal(f->survivors.count, CLIENTS);
    assert_true(returned(f, 1));
    assert_false(returned(f, 1));
    assert_false(returned(f, 77)); /* a client that is new */
    assert_int_equal(f->survivors.count, CLIENTS - 1);
    assert_true(has_file(f, 1)); /* its own, while it lives */
    kill_client(f, 1);
    assert_int_equal(fb_survivors_poll(&f->survivors), 0);
    assert_true(returned(f, 0));
    assert_true(returned(f, 2));
    assert_int_equal(f->survivors.count, 0);
}

static void the_dead_are_not_awaited(void **state)
{
    struct fixture *f = *state;
    char path[160];

    start_client(f, 0);
    kill_client(f, 0);
    assert_true(has_file(f, 0));
    snprintf(path, sizeof(path), "%s/clients/README", f->dir);
    close(open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
    start_daemon(f);
    assert_int_equal(f->survivors.count, 0);
    assert_false(has_file(f, 0));
    assert_int_equal(access(path, F_OK), 0); /* not a client's: left alone */
}

/* Clients of the socket's group leave files there, and delete only their own. */
static void directory_is_for_the_group(void **state)
{
    struct fixture *f = *state;
    char path[96];
    struct stat st;

    start_daemon(f);
    snprintf(path, sizeof(path), "%s/clients", f->dir);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 07777, 01770);
}

static void directory_cannot_be_made(void **state)
{
    struct fb_survivors survivors;
    struct fb_error error;

    (void)state;
    assert_int_equal(fb_survivors_init(&survivors, "/nonexistent", 0700, -1, &error), FB_EIO);
    assert_int_equal(survivors.count, 0);
    fb_survivors_fini(&survivors);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(living_are_awaited_until_they_die),
        TEST(who_returns_is_awaited_no_more),
        TEST(the_dead_are_not_awaited),
        TEST(directory_is_for_the_group),
        cmocka_unit_test(directory_cannot_be_made),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
