/* The daemon as a program: how it ends, what it refuses to start with, and that there is one. */
#include "tests/integration/fixture.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

enum { DRAIN_MS = 2000, SLACK_MS = 2000 }; /* the harness starts daemons with --drain=2s */

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

/* --- ending --- */

static void idle_daemon_ends_at_once(void **state)
{
    static const int signals[] = {SIGTERM, SIGINT};
    struct fixture *f = *state;
    uint64_t begun;

    for (size_t i = 0; i < sizeof(signals) / sizeof(signals[0]); i++) {
        fixture_put(f, 7);
        begun = clock_ms();
        daemon_signal(&f->daemon, signals[i]);
        assert_int_equal(daemon_wait(&f->daemon), 0);
        assert_in_range(clock_ms() - begun, 0, DRAIN_MS - 1);
        assert_true(daemon_log_has(&f->daemon, "event=stopped"));
        daemon_restart(&f->daemon);
        fixture_await_connected(f);
        fixture_check(f, 7);
    }
}

static void drain_waits_for_readers_and_refuses_writers(void **state)
{
    enum fb_status statuses[FIXTURE_PAGES];
    struct fixture *f = *state;
    struct fb_transfer t;
    struct fb_put *put;
    struct fb_hit *hit;
    uint64_t begun;

    fixture_put(f, 7);
    hit = fixture_lookup(f);
    begun = clock_ms();
    daemon_signal(&f->daemon, SIGTERM);
    daemon_await_metric(&f->daemon, "forebay_ready", 0);
    t = engine_transfer(&f->to, 0, FIXTURE_PAGES);
    assert_int_equal(fb_get(hit, &t, 0, statuses), FB_OK);
    fixture_use(f, 8);
    assert_int_equal(fb_put_begin(f->pool, f->space, f->chain[0], FIXTURE_PAGES, NULL, 0, NULL, 0,
                                  &put, statuses),
                     FB_AGAIN);
    fb_hit_release(hit);
    assert_int_equal(daemon_wait(&f->daemon), 0);
    assert_in_range(clock_ms() - begun, 0, DRAIN_MS);
    daemon_restart(&f->daemon);
    fixture_await_connected(f);
    fixture_check(f, 7);
}

static void drain_ends_also_while_a_lease_is_held(void **state)
{
    enum fb_status statuses[FIXTURE_PAGES];
    struct fixture *f = *state;
    struct fb_transfer t;
    struct fb_hit *hit;
    uint64_t begun;

    fixture_put(f, 7);
    hit = fixture_lookup(f);
    begun = clock_ms();
    daemon_signal(&f->daemon, SIGTERM);
    assert_int_equal(daemon_wait(&f->daemon), 0);
    assert_in_range(clock_ms() - begun, DRAIN_MS - 10, DRAIN_MS + SLACK_MS);
    daemon_restart(&f->daemon);
    fixture_await_connected(f);
    t = engine_transfer(&f->to, 0, FIXTURE_PAGES);
    assert_int_equal(fb_get(hit, &t, 0, statuses), FB_OK);
    fb_hit_release(hit);
    daemon_await_nothing_held(&f->daemon);
}

static void second_signal_ends_at_once(void **state)
{
    struct fixture *f = *state;
    struct fb_hit *hit;
    uint64_t begun;

    fixture_put(f, 7);
    hit = fixture_lookup(f);
    begun = clock_ms();
    daemon_signal(&f->daemon, SIGTERM);
    daemon_await_metric(&f->daemon, "forebay_ready", 0);
    daemon_signal(&f->daemon, SIGTERM);
    assert_int_equal(daemon_wait(&f->daemon), 0);
    assert_in_range(clock_ms() - begun, 0, DRAIN_MS - 100);
    daemon_restart(&f->daemon);
    fixture_await_connected(f);
    fixture_check(f, 7);
    fb_hit_release(hit);
}

/* --- starting --- */

/* Another daemon that shares a directory with the first one. */
static void expect_refused(struct fixture *f, struct daemon *second, const char *const *flags,
                           const char *why)
{
    daemon_launch(second, flags);
    assert_int_equal(daemon_wait(second), 1);
    assert_true(daemon_log_has(second, why));
    daemon_await_metric(&f->daemon, "forebay_ready", 1);
    fixture_check(f, 7);
    fixture_put(f, 8);
}

static void second_daemon_is_refused(void **state)
{
    struct fixture *f = *state;
    char run_dir[128], chunk_dir[128];
    struct daemon second;

    fixture_put(f, 7);
    daemon_init(&second);
    snprintf(run_dir, sizeof(run_dir), "--run-dir=%s", f->daemon.dir);
    snprintf(chunk_dir, sizeof(chunk_dir), "--chunk-dir=%s", f->daemon.chunk_dir);
    expect_refused(f, &second, (const char *[]){chunk_dir, NULL}, "belongs to a running daemon");
    expect_refused(f, &second, (const char *[]){run_dir, NULL}, "forebay.sock");
    daemon_fini(&second);
}

static void wrong_configuration_is_said(void **state)
{
    static const struct {
        const char *flag;
        const char *why;
    } cases[] = {
        {"--host-bytes=1KiB", "expected 16MiB or more"},
        {"--host-bytes=1000TiB", "host_bytes"},
        {"--lease=soon", "\"soon\" is not a duration"},
        {"--tenants=a=60,b=60", "add up to 120%"},
        {"--socket-group=no-such-group", "no group"},
        {"--chunk-dir=/proc/forebay", "/proc/forebay"},
        {"--http-listen=0.0.0.0:7401", "listen_remote"},
        {"--http-listen=unix:/no/such/directory/http", "/no/such/directory"},
        {"--config=/no/such/file.yaml", "/no/such/file.yaml"},
    };
    struct daemon d;

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        daemon_init(&d);
        daemon_launch(&d, (const char *[]){cases[i].flag, NULL});
        assert_int_equal(daemon_wait(&d), 1);
        if (!daemon_log_has(&d, cases[i].why)) {
            daemon_show_log(&d);
            fail_msg("%s: the message should have: %s", cases[i].flag, cases[i].why);
        }
        daemon_fini(&d);
    }
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    static const struct CMUnitTest tests[] = {
        TEST(idle_daemon_ends_at_once),
        TEST(drain_waits_for_readers_and_refuses_writers),
        TEST(drain_ends_also_while_a_lease_is_held),
        TEST(second_signal_ends_at_once),
        TEST(second_daemon_is_refused),
        cmocka_unit_test(wrong_configuration_is_said),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
