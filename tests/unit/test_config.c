/* Configuration: what is refused and in which words, which source wins, and that the sample file
 * says the defaults. */
#include "pool/node/config.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define GIB (UINT64_C(1) << 30)

static char path[] = "/tmp/forebay-test-config-XXXXXX";

static void write_file(const char *text)
{
    FILE *out = fopen(path, "w");

    assert_non_null(out);
    fputs(text, out);
    fclose(out);
}

static int setup(void **state)
{
    int fd = mkstemp(path);

    (void)state;
    close(fd);
    return fd < 0;
}

static int teardown(void **state)
{
    (void)state;
    return unlink(path);
}

static void assert_file_refused(const char *text, const char *words)
{
    struct fb_config config;
    struct fb_error error;
    char expected[FB_ERROR_TEXT_BYTES];

    snprintf(expected, sizeof(expected), "%s:%s", path, words);
    write_file(text);
    fb_config_init(&config);
    assert_int_equal(fb_config_load_file(&config, path, &error), FB_EINVAL);
    assert_string_equal(error.text, expected);
}

static void test_defaults(void **state)
{
    struct fb_config config;

    (void)state;
    fb_config_init(&config);
    assert_string_equal(config.run_dir, "/run/forebay");
    assert_string_equal(config.chunk_dir, "/dev/shm/forebay");
    assert_string_equal(config.socket_group, "");
    assert_int_equal(config.socket_mode, 0660);
    assert_int_equal(config.host_bytes, GIB);
    assert_int_equal(config.huge_pages, FB_HUGE_PAGES_AUTO);
    assert_string_equal(config.grpc_listen, "127.0.0.1:7400");
    assert_false(config.listen_remote);
    assert_true(config.lease_ns == UINT64_C(30000000000));
    assert_true(config.reserve_ns == UINT64_C(10000000000));
    assert_int_equal(config.spin_ns, 50000);
    assert_int_equal(config.client_share_percent, 50);
    assert_int_equal(config.max_clients, 256);
    assert_string_equal(config.policy, "lru");
    assert_int_equal(config.log_level, FB_LOG_INFO);
    assert_int_equal(config.tenant_count, 1);
    assert_string_equal(config.tenants[0].name, "default");
    assert_int_equal(config.tenants[0].share_percent, 100);
}

static void test_sample(void **state)
{
    struct fb_config defaults;
    struct fb_config config;
    struct fb_error error = {0};
    FILE *out = fopen(path, "w");

    (void)state;
    fb_config_print_sample(out);
    fclose(out);
    fb_config_init(&defaults);
    memset(&config, 0, sizeof(config));
    if (fb_config_load_file(&config, path, &error) != FB_OK) {
        fail_msg("%s", error.text);
    }
    assert_memory_equal(&config, &defaults, sizeof(config));
}

static void test_file(void **state)
{
    struct fb_config config;
    struct fb_error error = {0};

    (void)state;
    write_file("host_bytes: 64GiB\nlease: 1500ms\nhuge_pages: require\nlisten_remote: true\n"
               "grpc_listen: \"\"\nhttp_listen: unix:/run/x\nlog_format: json\npin_share: 10%\n"
               "socket_mode: \"0600\"\ntenants:\n  - name: a\n    share: 60\n"
               "  - {share: 40%, name: b-2}\n");
    fb_config_init(&config);
    if (fb_config_load_file(&config, path, &error) != FB_OK) {
        fail_msg("%s", error.text);
    }
    assert_true(config.host_bytes == 64 * GIB);
    assert_true(config.lease_ns == 1500000000);
    assert_int_equal(config.huge_pages, FB_HUGE_PAGES_REQUIRE);
    assert_true(config.listen_remote);
    assert_string_equal(config.grpc_listen, "");
    assert_string_equal(config.http_listen, "unix:/run/x");
    assert_int_equal(config.log_format, FB_LOG_JSON);
    assert_int_equal(config.pin_share_percent, 10);
    assert_int_equal(config.socket_mode, 0600);
    assert_int_equal(config.tenant_count, 2);
    assert_string_equal(config.tenants[1].name, "b-2");
    assert_int_equal(config.tenants[1].share_percent, 40);

    write_file("# nothing but a comment\n");
    assert_int_equal(fb_config_load_file(&config, path, &error), FB_OK);
    assert_int_equal(fb_config_load_file(&config, "/nonexistent/x.yaml", &error), FB_ENOENT);
    assert_string_equal(error.text, "/nonexistent/x.yaml: cannot read the configuration: No such "
                                    "file or directory");
}

static void test_bad_values(void **state)
{
    static const char size[] = "expected 16MiB or more, such as 64GiB";
    char words[200];

    (void)state;
    snprintf(words, sizeof(words), "2: host_bytes: \"-5\" is not a size; %s", size);
    assert_file_refused("# a\nhost_bytes: -5\n", words);
    snprintf(words, sizeof(words), "1: host_bytes: \"64GB\" is not a size; %s", size);
    assert_file_refused("host_bytes: 64GB\n", words);
    snprintf(words, sizeof(words), "1: host_bytes: \"\" is not a size; %s", size);
    assert_file_refused("host_bytes:\n", words);
    snprintf(words, sizeof(words), "1: host_bytes: \"1MiB\" is out of range; %s", size);
    assert_file_refused("host_bytes: 1MiB\n", words);
    snprintf(words, sizeof(words), "1: host_bytes: \"99999999999GiB\" is out of range; %s", size);
    assert_file_refused("host_bytes: 99999999999GiB\n", words);
    snprintf(words, sizeof(words), "1: host_bytes: \"99999999999999999999999\" is out of range; %s",
             size);
    assert_file_refused("host_bytes: 99999999999999999999999\n", words);
    snprintf(words, sizeof(words), "1: host_bytes: a list is not possible here; %s", size);
    assert_file_refused("host_bytes: [1GiB]\n", words);
    assert_file_refused("lease: 30\n", "1: lease: \"30\" is not a duration; expected 100ms to "
                                       "3600s, such as 30s");
    assert_file_refused("lease: 1ms\n", "1: lease: \"1ms\" is out of range; expected 100ms to "
                                        "3600s, such as 30s");
    assert_file_refused("max_clients: many\n",
                        "1: max_clients: \"many\" is not a count; expected 1 to 4096");
    assert_file_refused("client_share: 0\n",
                        "1: client_share: \"0\" is out of range; expected 1% to 100%");
    assert_file_refused("listen_remote: maybe\n",
                        "1: listen_remote: \"maybe\" is not a yes or no; expected true or false");
    assert_file_refused("huge_pages: sometimes\n", "1: huge_pages: \"sometimes\" is not a choice; "
                                                   "expected one of auto|never|require");
    assert_file_refused("socket_mode: \"0999\"\n",
                        "1: socket_mode: \"0999\" is not a file mode; expected octal digits such "
                        "as \"0660\"");
    assert_file_refused("run_dir: here\n", "1: run_dir: \"here\" is not a path; expected an "
                                           "absolute path of at most 127 characters");
    assert_file_refused("grpc_listen: 7400\n",
                        "1: grpc_listen: \"7400\" is not an address; expected host:port, "
                        "[ipv6]:port, unix:/path, or \"\" for none");
}

static void test_bad_files(void **state)
{
    (void)state;
    assert_file_refused("\n\nhost_byte: 1GiB\n",
                        "3: unknown option \"host_byte\"; did you mean host_bytes?");
    assert_file_refused("frobnicate_everything: 1\n",
                        "1: unknown option \"frobnicate_everything\"; forebayd --print-config "
                        "shows those there are");
    assert_file_refused("lease: 1s\nspin: 1ms\nlease: 2s\n",
                        "3: lease: is there twice; remove one");
    assert_file_refused("- a\n- b\n",
                        "1: expected options such as \"host_bytes: 64GiB\", one a line");
    assert_file_refused("lease: 1s\n---\nlease: 2s\n", "3: a second document; expected one");
    assert_file_refused("lease: [1s\n", "2: this is not YAML: did not find expected ',' or ']'");
    assert_file_refused("policy: \"a\\0b\"\n", "1: policy: the value has a zero byte; expected 1 "
                                               "to 127 characters");
}

static void test_bad_tenants(void **state)
{
    (void)state;
    assert_file_refused("tenants: a=60\n", "1: tenants: expected a list with entries such as "
                                           "{name: default, share: 100}");
    assert_file_refused("tenants: []\n", "1: tenants: expected a list with entries such as "
                                         "{name: default, share: 100}");
    assert_file_refused("tenants:\n  - a\n", "2: tenants: expected entries such as {name: "
                                             "default, share: 100}");
    assert_file_refused("tenants:\n  - name: A_b\n    share: 5\n",
                        "3: tenants: \"A_b\" is not a tenant's name; expected 1 to 63 of a-z, "
                        "0-9, -");
    assert_file_refused("tenants:\n  - {name: a, share: 0}\n",
                        "2: tenants: \"0\" is not a share for tenant a; expected 1 to 100 (%)");
    assert_file_refused("tenants:\n  - {name: a, share: 60}\n  - {name: b, share: 41}\n",
                        "3: tenants: with tenant b the shares add up to 101%; expected at most "
                        "100%");
    assert_file_refused("tenants:\n  - {name: a, share: 6}\n  - {name: a, share: 4}\n",
                        "3: tenants: tenant a is there twice; remove one");
    assert_file_refused("tenants:\n  - {name: a}\n",
                        "2: tenants: an entry without share; expected name and share");
    assert_file_refused("tenants:\n  - {name: a, shares: 5}\n",
                        "2: tenants: \"shares\" is unknown; expected name and share");
    assert_file_refused("tenants:\n  - {name: a, name: b}\n",
                        "2: tenants: \"name\" is there twice; expected name and share");
}

static void test_set(void **state)
{
    struct fb_config config;
    struct fb_error error = {0};

    (void)state;
    fb_config_init(&config);
    assert_int_equal(fb_config_set(&config, "tenants", "a=60,b=40", &error), FB_OK);
    assert_int_equal(config.tenant_count, 2);
    assert_string_equal(config.tenants[0].name, "a");
    assert_int_equal(config.tenants[1].share_percent, 40);
    assert_int_equal(fb_config_set(&config, "tenants", "a=60,", &error), FB_EINVAL);
    assert_string_equal(error.text, "tenants: \"a=60,\" is not a list of tenants; expected "
                                    "name=percent, such as a=60,b=40");
    assert_int_equal(fb_config_set(&config, "spin", "0us", &error), FB_OK);
    assert_int_equal(config.spin_ns, 0);
    assert_int_equal(fb_config_set(&config, "host_bytes", "16777216", &error), FB_OK);
    assert_int_equal(config.host_bytes, 16777216);
    assert_int_equal(fb_config_set(&config, "leese", "1s", &error), FB_EINVAL);
    assert_string_equal(error.text, "unknown option \"leese\"; did you mean lease?");
}

static void test_precedence(void **state)
{
    char file_flag[64];
    char *argv[] = {"forebayd", file_flag, "--lease", "3s", "--listen-remote", NULL};
    enum fb_config_action action;
    struct fb_config config;
    struct fb_error error = {0};

    (void)state;
    snprintf(file_flag, sizeof(file_flag), "--config=%s", path);
    write_file("lease: 1s\nreserve: 1s\ndrain: 1s\n");
    setenv("FOREBAY_LEASE", "2s", 1);
    setenv("FOREBAY_RESERVE", "2s", 1);
    if (fb_config_load(&config, 5, argv, &action, &error) != FB_OK) {
        fail_msg("%s", error.text);
    }
    assert_int_equal(action, FB_CONFIG_RUN);
    assert_true(config.lease_ns == UINT64_C(3000000000));
    assert_true(config.reserve_ns == UINT64_C(2000000000));
    assert_true(config.drain_ns == UINT64_C(1000000000));
    assert_int_equal(config.spin_ns, 50000);
    assert_true(config.listen_remote);

    setenv("FOREBAY_RESERVE", "soon", 1);
    assert_int_equal(fb_config_load(&config, 5, argv, &action, &error), FB_EINVAL);
    assert_string_equal(error.text, "FOREBAY_RESERVE: \"soon\" is not a duration; expected 100ms "
                                    "to 3600s, such as 10s");
    unsetenv("FOREBAY_RESERVE");
    unsetenv("FOREBAY_LEASE");
    argv[3] = "later";
    assert_int_equal(fb_config_load(&config, 5, argv, &action, &error), FB_EINVAL);
    assert_string_equal(error.text, "--lease: \"later\" is not a duration; expected 100ms to "
                                    "3600s, such as 30s");

    setenv("FOREBAY_CONFIG", path, 1);
    assert_int_equal(fb_config_load(&config, 1, argv, &action, &error), FB_OK);
    assert_true(config.lease_ns == UINT64_C(1000000000));
    unsetenv("FOREBAY_CONFIG");
}

static void test_actions(void **state)
{
    static const struct {
        char *flag;
        enum fb_config_action action;
    } cases[] = {{"--check-config", FB_CONFIG_CHECK},
                 {"--print-config", FB_CONFIG_PRINT},
                 {"--version", FB_CONFIG_VERSION}};
    struct fb_config config;
    struct fb_error error = {0};

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char *argv[] = {"forebayd", cases[i].flag, NULL};
        enum fb_config_action action = FB_CONFIG_RUN;

        assert_int_equal(fb_config_load(&config, 2, argv, &action, &error), FB_OK);
        assert_int_equal(action, cases[i].action);
    }
}

static void test_check(void **state)
{
    struct fb_config config;
    struct fb_error error = {0};

    (void)state;
    fb_config_init(&config);
    assert_int_equal(fb_config_check(&config, GIB, &error), FB_OK);
    config.host_bytes = 1024 * GIB;
    assert_int_equal(fb_config_check(&config, 31 * GIB / 2, &error), FB_EINVAL);
    assert_string_equal(error.text, "host_bytes: 1TiB is more than the 15.5GiB of memory there "
                                    "is; expected less than that, with room for all else that "
                                    "runs here");
    config.host_bytes = GIB;
    assert_int_equal(fb_config_set(&config, "http_listen", "0.0.0.0:80", &error), FB_OK);
    assert_int_equal(fb_config_check(&config, GIB, &error), FB_EINVAL);
    assert_string_equal(error.text,
                        "http_listen: 0.0.0.0:80 can be reached from other machines, and no "
                        "password is asked there; use 127.0.0.1 or unix:/path, or set "
                        "listen_remote to true");
    config.listen_remote = true;
    assert_int_equal(fb_config_check(&config, GIB, &error), FB_OK);
}

static void test_address(void **state)
{
    static const struct {
        const char *text;
        const char *host; /* NULL: no address */
        uint16_t port;
        bool local;
    } cases[] = {
        {"127.0.0.1:7400", "127.0.0.1", 7400, true},
        {"127.9.9.9:0", "127.9.9.9", 0, true},
        {"localhost:1", "localhost", 1, true},
        {"[::1]:65535", "::1", 65535, true},
        {"[::]:1", "::", 1, false},
        {"0.0.0.0:1", "0.0.0.0", 1, false},
        {"localhost.evil.example:1", "localhost.evil.example", 1, false},
        {"unix:/run/a b", "/run/a b", 0, true},
        {"unix:relative", NULL, 0, false},
        {"unix:/1234567890123456789012345678901234567890123456789012345678901234567890123456789012"
         "34567890123456789012345678",
         NULL, 0, false},
        {"::1:7400", NULL, 0, false},
        {":7400", NULL, 0, false},
        {"host:", NULL, 0, false},
        {"host:65536", NULL, 0, false},
        {"host:-1", NULL, 0, false},
        {"", NULL, 0, false},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct fb_address address;

        assert_int_equal(fb_address_parse(cases[i].text, &address),
                         cases[i].host ? FB_OK : FB_EINVAL);
        if (cases[i].host) {
            assert_string_equal(address.host, cases[i].host);
            assert_int_equal(address.port, cases[i].port);
            assert_int_equal(address.is_local, cases[i].local);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),  cmocka_unit_test(test_sample),
        cmocka_unit_test(test_file),      cmocka_unit_test(test_bad_values),
        cmocka_unit_test(test_bad_files), cmocka_unit_test(test_bad_tenants),
        cmocka_unit_test(test_set),       cmocka_unit_test(test_precedence),
        cmocka_unit_test(test_actions),   cmocka_unit_test(test_check),
        cmocka_unit_test(test_address),
    };

    return cmocka_run_group_tests_name("config", tests, setup, teardown);
}
