/* Contract of channels: one suite for a connection through a listening socket, for a socket pair
 * and for a fault decorator that does nothing; then listening, and what the decorator does. */
#include "transport/channel.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#define PACKET_BYTES 65536
#define PACKETS      3000 /* through a decorator */

/* Two ends, a buffer and its fill. */
struct fixture {
    char dir[64];
    struct fb_channel *a, *b;
    uint8_t out[PACKET_BYTES];
    uint8_t in[PACKET_BYTES];
    size_t bytes;
    int fds[FB_CHANNEL_MAX_FDS];
    uint32_t fd_count;
};

static void make_dir(char dir[64])
{
    snprintf(dir, 64, "/tmp/test_channel.XXXXXX");
    assert_non_null(mkdtemp(dir));
}

static struct fixture *make_fixture(void)
{
    struct fixture *f = calloc(1, sizeof(*f));

    assert_non_null(f);
    return f;
}

static int setup_listener(void **state)
{
    struct fixture *f = make_fixture();
    struct fb_error error;
    char path[96];
    int fd;

    make_dir(f->dir);
    snprintf(path, sizeof(path), "%s/socket", f->dir);
    assert_int_equal(fb_unix_listen(path, 0600, (gid_t)-1, &fd, &error), FB_OK);
    assert_int_equal(fb_unix_connect(path, &f->a, &error), FB_OK);
    assert_int_equal(fb_unix_accept(fd, &f->b), FB_OK);
    close(fd);
    unlink(path);
    rmdir(f->dir);
    *state = f;
    return 0;
}

static int setup_pair(void **state)
{
    struct fixture *f = make_fixture();
    struct fb_channel *ends[2];

    assert_int_equal(fb_unix_pair(ends), FB_OK);
    f->a = ends[0];
    f->b = ends[1];
    *state = f;
    return 0;
}

/* The sending end gets the faults. */
static void wear(struct fixture *f, const struct fb_channel_faults *faults)
{
    assert_int_equal(fb_channel_fault(f->a, faults, &f->a), FB_OK);
}

static int setup_fault(void **state)
{
    struct fixture *f;

    setup_pair(state);
    f = *state;
    wear(f, &(struct fb_channel_faults){.seed = 1});
    assert_int_equal(fb_channel_fault(f->b, &(struct fb_channel_faults){0}, &f->b), FB_OK);
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;

    fb_channel_destroy(f->a);
    fb_channel_destroy(f->b);
    free(f);
    return 0;
}

/* Packet number n: its length and bytes follow from n. */
static size_t make_packet(struct fixture *f, uint32_t n)
{
    size_t bytes = sizeof(n) + n * 2654435761u % 3000;

    memset(f->out, (int)(n % 251), bytes);
    memcpy(f->out, &n, sizeof(n));
    return bytes;
}

static enum fb_status send_number(struct fixture *f, struct fb_channel *to, uint32_t n)
{
    size_t bytes = make_packet(f, n);

    return fb_channel_send(to, f->out, bytes, NULL, 0);
}

static enum fb_status receive(struct fixture *f, struct fb_channel *from)
{
    return fb_channel_recv(from, f->in, sizeof(f->in), &f->bytes, f->fds, &f->fd_count);
}

static void assert_number(struct fixture *f, struct fb_channel *from, uint32_t n)
{
    size_t bytes = make_packet(f, n);

    assert_int_equal(receive(f, from), FB_OK);
    assert_int_equal(f->fd_count, 0);
    assert_int_equal(f->bytes, bytes);
    assert_memory_equal(f->in, f->out, bytes);
}

static uint32_t open_descriptors(void)
{
    DIR *dir = opendir("/proc/self/fd");
    uint32_t n = 0;

    assert_non_null(dir);
    while (readdir(dir)) {
        n++;
    }
    closedir(dir);
    return n;
}

/* --- every channel --- */

static void packets_keep_order_and_bounds(void **state)
{
    struct fixture *f = *state;

    for (uint32_t n = 0; n < 500; n += 5) {
        for (uint32_t i = n; i < n + 5; i++) {
            assert_int_equal(send_number(f, f->a, i), FB_OK);
            assert_int_equal(send_number(f, f->b, i + 1000), FB_OK);
        }
        for (uint32_t i = n; i < n + 5; i++) {
            assert_number(f, f->b, i);
            assert_number(f, f->a, i + 1000);
        }
    }
    assert_int_equal(receive(f, f->a), FB_AGAIN);
    assert_int_equal(receive(f, f->b), FB_AGAIN);
}

static void peer_that_does_not_read(void **state)
{
    struct fixture *f = *state;
    enum fb_status status;
    uint32_t sent = 0;

    while ((status = send_number(f, f->a, sent)) == FB_OK) {
        sent++;
        assert_true(sent < 100000);
    }
    assert_int_equal(status, FB_AGAIN);
    assert_true(sent > 0);
    for (uint32_t n = 0; n < sent; n++) {
        assert_number(f, f->b, n);
    }
    assert_int_equal(receive(f, f->b), FB_AGAIN); /* what was refused did not come */
    assert_int_equal(send_number(f, f->a, 1), FB_OK);
    assert_number(f, f->b, 1);
}

static void descriptor_tells_of_packets(void **state)
{
    struct fixture *f = *state;
    struct pollfd p = {.fd = fb_channel_fd(f->b), .events = POLLIN};

    assert_int_equal(poll(&p, 1, 0), 0);
    assert_int_equal(send_number(f, f->a, 1), FB_OK);
    assert_int_equal(poll(&p, 1, 1000), 1);
    assert_number(f, f->b, 1);
    assert_int_equal(poll(&p, 1, 0), 0);
}

static void descriptors_pass(void **state)
{
    struct fixture *f = *state;
    int pipes[2], borrowed[FB_CHANNEL_MAX_FDS + 1];
    uint32_t before = open_descriptors();
    char byte = 0;

    assert_int_equal(pipe(pipes), 0);
    for (uint32_t i = 0; i <= FB_CHANNEL_MAX_FDS; i++) {
        borrowed[i] = pipes[1];
    }
    assert_int_equal(fb_channel_send(f->a, "x", 1, borrowed, FB_CHANNEL_MAX_FDS + 1), FB_ELIMIT);
    assert_int_equal(fb_channel_send(f->a, "x", 1, borrowed, FB_CHANNEL_MAX_FDS), FB_OK);
    assert_int_equal(send_number(f, f->a, 5), FB_OK);
    close(pipes[1]);
    assert_int_equal(receive(f, f->b), FB_OK);
    assert_int_equal(f->bytes, 1);
    assert_int_equal(f->fd_count, FB_CHANNEL_MAX_FDS);
    for (uint32_t i = 0; i < FB_CHANNEL_MAX_FDS; i++) {
        assert_true(fcntl(f->fds[i], F_GETFD) & FD_CLOEXEC);
        assert_int_equal(write(f->fds[i], "y", 1), 1);
        assert_int_equal(read(pipes[0], &byte, 1), 1);
        assert_int_equal(byte, 'y');
        close(f->fds[i]);
    }
    close(pipes[0]);
    assert_number(f, f->b, 5); /* without any */
    assert_int_equal(open_descriptors(), before);
}

static void oversize_is_refused(void **state)
{
    struct fixture *f = *state;
    size_t bytes = 64u << 20;
    uint8_t *packet = calloc(1, bytes);

    assert_non_null(packet);
    assert_int_equal(fb_channel_send(f->a, packet, bytes, NULL, 0), FB_ELIMIT);
    free(packet);
    assert_int_equal(receive(f, f->b), FB_AGAIN);
    assert_int_equal(send_number(f, f->a, 1), FB_OK);
    assert_number(f, f->b, 1);
}

static void cut_packet_leaks_nothing(void **state)
{
    struct fixture *f = *state;
    uint32_t before = open_descriptors();
    int borrowed[2] = {0, 1};

    assert_int_equal(fb_channel_send(f->a, f->out, 100, borrowed, 2), FB_OK);
    assert_int_equal(send_number(f, f->a, 7), FB_OK);
    assert_int_equal(fb_channel_recv(f->b, f->in, 99, &f->bytes, f->fds, &f->fd_count), FB_EPROTO);
    assert_int_equal(open_descriptors(), before);
    assert_number(f, f->b, 7);
}

static void packets_outlive_their_sender(void **state)
{
    struct fixture *f = *state;

    assert_int_equal(send_number(f, f->b, 3), FB_OK);
    fb_channel_destroy(f->b);
    f->b = NULL;
    assert_number(f, f->a, 3);
    assert_int_equal(receive(f, f->a), FB_ECONN);
    assert_int_equal(receive(f, f->a), FB_ECONN);
    assert_int_equal(send_number(f, f->a, 4), FB_ECONN); /* and no SIGPIPE */
}

/* --- listening --- */

static void one_listens_at_a_path(void **state)
{
    char dir[64], path[96];
    struct fb_channel *channel;
    struct fb_error error;
    struct stat st;
    int fd, second;

    (void)state;
    make_dir(dir);
    snprintf(path, sizeof(path), "%s/socket", dir);
    assert_int_equal(fb_unix_connect(path, &channel, &error), FB_ECONN);
    assert_int_equal(fb_unix_listen(path, 0620, (gid_t)-1, &fd, &error), FB_OK);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0620);
    assert_int_equal(fb_unix_accept(fd, &channel), FB_AGAIN);
    assert_int_equal(fb_unix_listen(path, 0600, (gid_t)-1, &second, &error), FB_BUSY);
    close(fd);

    /* The file is still there, and nobody listens. */
    assert_int_equal(fb_unix_connect(path, &channel, &error), FB_ECONN);
    assert_int_equal(error.status, FB_ECONN);
    assert_int_equal(fb_unix_listen(path, 0600, (gid_t)-1, &fd, &error), FB_OK);
    close(fd);
    unlink(path);
    rmdir(dir);
}

static void paths_have_a_limit(void **state)
{
    struct fb_channel *channel;
    struct fb_error error;
    char path[200];
    int fd;

    (void)state;
    memset(path, 'x', sizeof(path));
    memcpy(path, "/tmp/", 5);
    path[sizeof(path) - 1] = 0;
    assert_int_equal(fb_unix_connect(path, &channel, &error), FB_EINVAL);
    assert_int_equal(fb_unix_listen(path, 0600, (gid_t)-1, &fd, &error), FB_EINVAL);
    assert_int_equal(fb_unix_listen("/nonexistent/socket", 0600, (gid_t)-1, &fd, &error), FB_EIO);
}

static void full_backlog_is_again(void **state)
{
    char dir[64], path[96];
    struct fb_channel *channels[1024];
    struct fb_error error;
    enum fb_status status = FB_OK;
    uint32_t n = 0;
    int fd;

    (void)state;
    make_dir(dir);
    snprintf(path, sizeof(path), "%s/socket", dir);
    assert_int_equal(fb_unix_listen(path, 0600, (gid_t)-1, &fd, &error), FB_OK);
    while (n < 500 && (status = fb_unix_connect(path, &channels[n], &error)) == FB_OK) {
        n++;
    }
    assert_int_equal(status, FB_AGAIN);
    assert_true(n > 100);
    while (n > 0) {
        fb_channel_destroy(channels[--n]);
    }
    close(fd);
    unlink(path);
    rmdir(dir);
}

/* --- the decorator --- */

/* Send numbers 0 to PACKETS - 1 and note how often each comes, in order. */
static void send_through(struct fixture *f, uint8_t came[PACKETS])
{
    uint32_t last = 0, n;

    memset(came, 0, PACKETS);
    for (uint32_t i = 0; i < PACKETS; i++) {
        assert_int_equal(fb_channel_send(f->a, &i, sizeof(i), NULL, 0), FB_OK);
        while (receive(f, f->b) == FB_OK) {
            assert_int_equal(f->bytes, sizeof(n));
            memcpy(&n, f->in, sizeof(n));
            assert_true(n >= last && n < PACKETS);
            last = n;
            came[n]++;
        }
    }
}

static uint32_t count(const uint8_t came[PACKETS], uint8_t times)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < PACKETS; i++) {
        n += came[i] == times;
    }
    return n;
}

static void some_are_dropped(void **state)
{
    struct fixture *f = *state;
    uint8_t came[PACKETS];

    wear(f, &(struct fb_channel_faults){.seed = 3, .drop = 10});
    send_through(f, came);
    assert_in_range(count(came, 0), PACKETS / 15, PACKETS / 7);
    assert_int_equal(count(came, 0) + count(came, 1), PACKETS);
}

static void some_come_twice(void **state)
{
    struct fixture *f = *state;
    uint8_t came[PACKETS];

    wear(f, &(struct fb_channel_faults){.seed = 3, .duplicate = 10});
    send_through(f, came);
    assert_in_range(count(came, 2), PACKETS / 15, PACKETS / 7);
    assert_int_equal(count(came, 1) + count(came, 2), PACKETS);
}

static void faults_repeat_by_seed(void **state)
{
    struct fixture *f;
    uint8_t came[3][PACKETS];
    static const uint64_t seeds[3] = {4, 4, 6};

    for (int i = 0; i < 3; i++) {
        teardown(state);
        setup_pair(state);
        f = *state;
        wear(f, &(struct fb_channel_faults){.seed = seeds[i], .drop = 4, .duplicate = 4});
        send_through(f, came[i]);
    }
    assert_memory_equal(came[0], came[1], PACKETS);
    assert_memory_not_equal(came[0], came[2], PACKETS);
}

static void half_a_packet_comes(void **state)
{
    struct fixture *f = *state;

    wear(f, &(struct fb_channel_faults){.seed = 5, .truncate = 1});
    for (uint32_t n = 1; n < 100; n++) {
        size_t bytes = make_packet(f, n);

        assert_int_equal(fb_channel_send(f->a, f->out, bytes, NULL, 0), FB_OK);
        assert_int_equal(receive(f, f->b), FB_OK);
        assert_int_equal(f->bytes, bytes / 2);
        assert_memory_equal(f->in, f->out, bytes / 2);
    }
}

static void one_bit_is_flipped(void **state)
{
    struct fixture *f = *state;

    wear(f, &(struct fb_channel_faults){.seed = 6, .flip = 1});
    for (uint32_t n = 1; n < 100; n++) {
        size_t bytes = make_packet(f, n);
        int bits = 0;

        assert_int_equal(fb_channel_send(f->a, f->out, bytes, NULL, 0), FB_OK);
        assert_int_equal(receive(f, f->b), FB_OK);
        assert_int_equal(f->bytes, bytes);
        for (size_t i = 0; i < bytes; i++) {
            bits += __builtin_popcount(f->in[i] ^ f->out[i]);
        }
        assert_int_equal(bits, 1);
    }
}

static void connection_is_cut_for_good(void **state)
{
    struct fixture *f = *state;
    uint32_t sent = 0;

    wear(f, &(struct fb_channel_faults){.seed = 7, .cut = 20});
    assert_int_equal(send_number(f, f->b, 1), FB_OK);
    while (send_number(f, f->a, sent) == FB_OK) {
        assert_number(f, f->b, sent);
        sent++;
        assert_true(sent < PACKETS);
    }
    for (int i = 0; i < 100; i++) {
        assert_int_equal(send_number(f, f->a, 0), FB_ECONN);
        assert_int_equal(receive(f, f->a), FB_ECONN);
    }
    assert_int_equal(receive(f, f->b), FB_AGAIN);
}

#define SUITE(setup)                                                                   \
    cmocka_unit_test_setup_teardown(packets_keep_order_and_bounds, setup, teardown),   \
        cmocka_unit_test_setup_teardown(peer_that_does_not_read, setup, teardown),     \
        cmocka_unit_test_setup_teardown(descriptor_tells_of_packets, setup, teardown), \
        cmocka_unit_test_setup_teardown(descriptors_pass, setup, teardown),            \
        cmocka_unit_test_setup_teardown(oversize_is_refused, setup, teardown),         \
        cmocka_unit_test_setup_teardown(cut_packet_leaks_nothing, setup, teardown),    \
        cmocka_unit_test_setup_teardown(packets_outlive_their_sender, setup, teardown)

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup_pair, teardown)

int main(void)
{
    const struct CMUnitTest listener[] = {SUITE(setup_listener)};
    const struct CMUnitTest pair[] = {SUITE(setup_pair)};
    const struct CMUnitTest decorated[] = {SUITE(setup_fault)};
    const struct CMUnitTest listening[] = {
        cmocka_unit_test(one_listens_at_a_path),
        cmocka_unit_test(paths_have_a_limit),
        cmocka_unit_test(full_backlog_is_again),
    };
    const struct CMUnitTest faults[] = {
        TEST(some_are_dropped),    TEST(some_come_twice),    TEST(faults_repeat_by_seed),
        TEST(half_a_packet_comes), TEST(one_bit_is_flipped), TEST(connection_is_cut_for_good),
    };
    int failed = cmocka_run_group_tests_name("unix", listener, NULL, NULL);

    failed += cmocka_run_group_tests_name("socket pair", pair, NULL, NULL);
    failed += cmocka_run_group_tests_name("pair in fault decorators", decorated, NULL, NULL);
    failed += cmocka_run_group_tests_name("listening", listening, NULL, NULL);
    failed += cmocka_run_group_tests_name("fault decorator", faults, NULL, NULL);
    return failed;
}
