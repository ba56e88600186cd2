/* HTTP: codes, bodies, methods, and peers that misbehave. Talks to it over plain sockets. */
#include "pool/node/http.h"

#include <arpa/inet.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

struct fixture {
    struct fb_metrics *metrics;
    struct fb_http *http;
    char reply[65536];
};

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));
    struct fb_error error = {0};

    assert_non_null(f);
    assert_int_equal(fb_metrics_create("1.2.3", &f->metrics), FB_OK);
    if (fb_http_start("127.0.0.1:0", f->metrics, &f->http, &error) != FB_OK) {
        fail_msg("%s", error.text);
    }
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;

    fb_http_stop(f->http);
    fb_metrics_destroy(f->metrics);
    free(f);
    return 0;
}

static int connect_tcp(uint16_t port)
{
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_port = htons(port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);

    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    assert_int_equal(connect(fd, (struct sockaddr *)&name, sizeof(name)), 0);
    return fd;
}

static int connect_unix(const char *path)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);

    snprintf(name.sun_path, sizeof(name.sun_path), "%s", path);
    assert_int_equal(connect(fd, (struct sockaddr *)&name, sizeof(name)), 0);
    return fd;
}

/* Send a request as it is and take all that comes until the server closes; returns the code. */
static int exchange(struct fixture *f, int fd, const char *request)
{
    size_t have = 0;
    ssize_t n;

    assert_int_equal(send(fd, request, strlen(request), MSG_NOSIGNAL), strlen(request));
    while ((n = recv(fd, f->reply + have, sizeof(f->reply) - 1 - have, 0)) > 0) {
        have += (size_t)n;
    }
    f->reply[have] = 0;
    close(fd);
    return have > 12 ? atoi(f->reply + 9) : 0;
}

static int get(struct fixture *f, const char *path)
{
    char request[256];

    snprintf(request, sizeof(request), "GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
             path);
    return exchange(f, connect_tcp(fb_http_port(f->http)), request);
}

static void test_codes(void **state)
{
    struct fixture *f = *state;

    assert_int_equal(get(f, "/healthz"), 200);
    assert_int_equal(get(f, "/readyz"), 503);
    fb_metrics_set(f->metrics, FB_METRIC_READY, 1);
    assert_int_equal(get(f, "/readyz"), 200);
    fb_metrics_set(f->metrics, FB_METRIC_READY, 0);
    assert_int_equal(get(f, "/readyz"), 503);
    assert_int_equal(get(f, "/etc/passwd"), 404);
    assert_int_equal(get(f, "/metrics/"), 404);
}

static void test_bodies(void **state)
{
    struct fixture *f = *state;

    fb_metrics_add(f->metrics, FB_METRIC_LOOKUPS, 7);
    fb_metrics_set(f->metrics, FB_METRIC_HOST_BYTES, 200 << 20);
    fb_metrics_set(f->metrics, FB_METRIC_HOST_USED_BYTES, 50 << 20);
    assert_int_equal(get(f, "/metrics"), 200);
    assert_non_null(strstr(f->reply, "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"));
    assert_non_null(strstr(f->reply, "\nforebay_lookups_total 7\n"));
    assert_int_equal(get(f, "/metrics?x=y"), 200);
    assert_int_equal(get(f, "/"), 200);
    assert_non_null(strstr(f->reply, "forebayd: not ready\n"));
    assert_non_null(strstr(f->reply, "25 %\n"));
    assert_non_null(strstr(f->reply, "200.0 MiB\n"));
}

static void test_methods(void **state)
{
    struct fixture *f = *state;
    uint16_t port = fb_http_port(f->http);

    assert_int_equal(exchange(f, connect_tcp(port),
                              "POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n"
                              "Connection: close\r\n\r\nabc"),
                     405);
    assert_non_null(strstr(f->reply, "Allow: GET, HEAD\r\n"));
    assert_int_equal(
        exchange(f, connect_tcp(port), "DELETE / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"),
        405);
    assert_int_equal(exchange(f, connect_tcp(port),
                              "HEAD /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"),
                     200);
    assert_null(strstr(f->reply, "alive"));
}

/* What is no request or too long a one is refused or cut off; a connection that says nothing does
 * not matter. */
static void test_abuse(void **state)
{
    struct fixture *f = *state;
    uint16_t port = fb_http_port(f->http);
    int silent = connect_tcp(port);
    char *request = malloc(70000);
    int code;

    assert_non_null(request);
    memset(request, 'a', 69999);
    request[69999] = 0;
    memcpy(request, "GET /", 5);
    code = exchange(f, connect_tcp(port), request);
    assert_true(code == 0 || code == 414 || code == 431);
    code = exchange(f, connect_tcp(port), "nonsense\r\n\r\n");
    assert_true(code == 0 || code == 400);
    assert_int_equal(get(f, "/healthz"), 200);
    close(silent);
    free(request);
}

static void test_unix(void **state)
{
    struct fixture *f = *state;
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    char directory[] = "/tmp/forebay-test-http-XXXXXX";
    struct fb_http *http;
    struct fb_http *second;
    struct fb_error error = {0};
    struct stat st;
    char address[80];
    int stale = socket(AF_UNIX, SOCK_STREAM, 0);

    assert_non_null(mkdtemp(directory));
    snprintf(name.sun_path, sizeof(name.sun_path), "%s/s", directory);
    snprintf(address, sizeof(address), "unix:%s/s", directory);
    assert_int_equal(bind(stale, (struct sockaddr *)&name, sizeof(name)), 0);
    close(stale); /* as a process that was killed leaves it */

    assert_int_equal(fb_http_start(address, f->metrics, &http, &error), FB_OK);
    assert_int_equal(fb_http_port(http), 0);
    assert_int_equal(exchange(f, connect_unix(name.sun_path),
                              "GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"),
                     200);
    assert_int_equal(fb_http_start(address, f->metrics, &second, &error), FB_EIO);
    fb_http_stop(http);
    assert_int_not_equal(stat(name.sun_path, &st), 0);
    rmdir(directory);
}

static void test_refused_addresses(void **state)
{
    struct fixture *f = *state;
    struct fb_http *http;
    struct fb_error error = {0};
    char address[32];

    snprintf(address, sizeof(address), "127.0.0.1:%u", fb_http_port(f->http));
    assert_int_equal(fb_http_start(address, f->metrics, &http, &error), FB_EIO);
    assert_non_null(strstr(error.text, "Address already in use; set http_listen to another"));
    assert_int_equal(fb_http_start("nowhere", f->metrics, &http, &error), FB_EINVAL);
    assert_int_equal(fb_http_start("192.0.2.1:1", f->metrics, &http, &error), FB_EIO);
    fb_http_stop(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_codes),   cmocka_unit_test(test_bodies),
        cmocka_unit_test(test_methods), cmocka_unit_test(test_abuse),
        cmocka_unit_test(test_unix),    cmocka_unit_test(test_refused_addresses),
    };

    return cmocka_run_group_tests_name("http", tests, setup, teardown);
}
