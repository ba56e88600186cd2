/* Manifests as a daemon tells them over gRPC, before and after a restart. */
#include "pool/command/admin.h"
#include "tests/integration/fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static void space_id(const struct fb_manifest *m, uint8_t ret_id[FB_SPACE_ID_BYTES])
{
    uint8_t encoded[FB_MANIFEST_MAX_BYTES];
    size_t bytes;

    assert_int_equal(fb_manifest_encode(m, encoded, sizeof(encoded), &bytes, NULL), FB_OK);
    fb_space_id(encoded, bytes, ret_id);
}

static void expect_manifest(const struct fb_cli *cli, const struct fb_manifest *m)
{
    uint8_t id[FB_SPACE_ID_BYTES], got_id[FB_SPACE_ID_BYTES];
    struct fb_manifest got;

    space_id(m, id);
    assert_true(fb_admin_get_manifest(cli, id, &got));
    assert_string_equal(got.position, m->position);
    space_id(&got, got_id);
    assert_memory_equal(got_id, id, sizeof(id));
}

static void test_manifests(void **state)
{
    char address[DAEMON_PATH_BYTES + 16], flag[DAEMON_PATH_BYTES + 32];
    const char *const flags[] = {flag, NULL};
    struct fb_cli cli = {.grpc = address};
    uint8_t id[FB_SPACE_ID_BYTES];
    struct fb_pool_space *space;
    struct fb_manifest m, other;
    struct fb_error error;
    struct fb_pool *pool;
    struct daemon daemon;

    (void)state;
    daemon_init(&daemon);
    snprintf(address, sizeof(address), "unix:%s/grpc", daemon.dir);
    snprintf(flag, sizeof(flag), "--grpc-listen=%s", address);
    daemon_start(&daemon, flags);
    assert_int_equal(fb_open(daemon.socket, NULL, &pool, &error), FB_OK);
    fixture_manifest(&m);
    other = m;
    strcpy(other.position, "rope theta=10000");
    assert_int_equal(fb_pool_space_open(pool, &m, &space, &error), FB_OK);
    assert_int_equal(fb_pool_space_open(pool, &other, &space, &error), FB_OK);
    fb_close(pool);

    expect_manifest(&cli, &m);
    expect_manifest(&cli, &other);
    daemon_kill(&daemon);
    daemon_restart(&daemon);
    expect_manifest(&cli, &other);

    memset(id, 0x5a, sizeof(id));
    assert_false(fb_admin_get_manifest(&cli, id, &m));
    daemon_kill(&daemon);
    space_id(&other, id);
    assert_false(fb_admin_get_manifest(&cli, id, &m));
    daemon_fini(&daemon);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_manifests),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
