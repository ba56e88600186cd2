/* libmicrohttpd with one polling thread, on a socket that we open ourselves: so that unix sockets
 * work too, and a port that is taken has a message. */
#include "pool/node/http.h"

#include "pool/node/config.h"

#include <errno.h>
#include <inttypes.h>
#include <microhttpd.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define CONNECTIONS_MAX   32
#define TIMEOUT_SECONDS   5
#define CONNECTION_MEMORY 8192 /* request line and headers, at most */

#define TYPE_TEXT    "text/plain; charset=utf-8"
#define TYPE_METRICS "text/plain; version=0.0.4; charset=utf-8"

struct fb_http {
    const struct fb_metrics *metrics;
    struct MHD_Daemon *daemon;
    struct fb_address address; /* its port is the actual one */
};

static uint64_t percent(uint64_t part, uint64_t whole)
{
    return whole ? (uint64_t)(100.0 * (double)part / (double)whole) : 0;
}

static void print_bytes(FILE *out, const char *name, uint64_t bytes)
{
    fprintf(out, "%-12s %10.1f MiB\n", name, (double)bytes / (1 << 20));
}

static void print_count(FILE *out, const char *name, uint64_t count)
{
    fprintf(out, "%-12s %10" PRIu64 "\n", name, count);
}

static void print_status(const struct fb_metrics *m, FILE *out)
{
    uint64_t bytes = fb_metrics_value(m, FB_METRIC_HOST_BYTES);
    uint64_t used = fb_metrics_value(m, FB_METRIC_HOST_USED_BYTES);
    uint64_t pages = fb_metrics_value(m, FB_METRIC_LOOKUP_PAGES);
    uint64_t hits = fb_metrics_value(m, FB_METRIC_LOOKUP_HIT_PAGES);

    fprintf(out, "forebayd: %s\n\n", fb_metrics_value(m, FB_METRIC_READY) ? "ready" : "not ready");
    print_bytes(out, "host tier", bytes);
    print_bytes(out, "used", used);
    fprintf(out, "%-12s %10" PRIu64 " %%\n", "", percent(used, bytes));
    print_bytes(out, "leased", fb_metrics_value(m, FB_METRIC_LEASED_BYTES));
    print_bytes(out, "reserved", fb_metrics_value(m, FB_METRIC_RESERVED_BYTES));
    print_bytes(out, "quarantined", fb_metrics_value(m, FB_METRIC_QUARANTINED_BYTES));
    print_bytes(out, "pinned", fb_metrics_value(m, FB_METRIC_PINNED_BYTES));
    print_bytes(out, "index", fb_metrics_value(m, FB_METRIC_INDEX_BYTES));
    fputc('\n', out);
    print_count(out, "blocks", fb_metrics_value(m, FB_METRIC_BLOCKS));
    print_count(out, "clients", fb_metrics_value(m, FB_METRIC_CLIENTS));
    print_count(out, "leases", fb_metrics_value(m, FB_METRIC_LEASES));
    print_count(out, "lookups", fb_metrics_value(m, FB_METRIC_LOOKUPS));
    fprintf(out, "%-12s %10" PRIu64 " %% of pages\n", "hits", percent(hits, pages));
    print_count(out, "committed", fb_metrics_value(m, FB_METRIC_COMMITTED_BLOCKS));
    print_count(out, "evicted", fb_metrics_value(m, FB_METRIC_EVICTED_BLOCKS));
    fputs("\n/metrics  /healthz  /readyz\n", out);
}

/* type  of the body that print writes */
static enum MHD_Result reply_printed(struct MHD_Connection *connection,
                                     const struct fb_metrics *metrics,
                                     void (*print)(const struct fb_metrics *, FILE *),
                                     const char *type)
{
    struct MHD_Response *response;
    enum MHD_Result result;
    char *body = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&body, &bytes);

    if (!out) {
        return MHD_NO;
    }
    print(metrics, out);
    if (fclose(out) != 0) {
        free(body);
        return MHD_NO;
    }
    response = MHD_create_response_from_buffer(bytes, body, MHD_RESPMEM_MUST_FREE);
    if (!response) {
        free(body);
        return MHD_NO;
    }
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, type);
    result = MHD_queue_response(connection, MHD_HTTP_OK, response);
    MHD_destroy_response(response);
    return result;
}

/* text  constant */
static enum MHD_Result reply_text(struct MHD_Connection *connection, unsigned int code,
                                  const char *text)
{
    struct MHD_Response *response =
        MHD_create_response_from_buffer(strlen(text), (void *)text, MHD_RESPMEM_PERSISTENT);
    enum MHD_Result result;

    if (!response) {
        return MHD_NO;
    }
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, TYPE_TEXT);
    if (code == MHD_HTTP_METHOD_NOT_ALLOWED) {
        MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
    }
    result = MHD_queue_response(connection, code, response);
    MHD_destroy_response(response);
    return result;
}

/* Called with a request's headers, then for each piece of its body, then once more to answer. */
static enum MHD_Result on_request(void *context, struct MHD_Connection *connection,
                                  const char *path, const char *method, const char *version,
                                  const char *body, size_t *body_bytes, void **state)
{
    struct fb_http *http = context;

    (void)version;
    (void)body;
    if (!*state) {
        *state = http;
        return MHD_YES;
    }
    if (*body_bytes) {
        *body_bytes = 0;
        return MHD_YES;
    }
    if (strcmp(method, MHD_HTTP_METHOD_GET) != 0 && strcmp(method, MHD_HTTP_METHOD_HEAD) != 0) {
        return reply_text(connection, MHD_HTTP_METHOD_NOT_ALLOWED, "only GET is possible here\n");
    }
    if (strcmp(path, "/metrics") == 0) {
        return reply_printed(connection, http->metrics, fb_metrics_print, TYPE_METRICS);
    }
    if (strcmp(path, "/healthz") == 0) {
        return reply_text(connection, MHD_HTTP_OK, "alive\n");
    }
    if (strcmp(path, "/readyz") == 0) {
        return fb_metrics_value(http->metrics, FB_METRIC_READY)
                   ? reply_text(connection, MHD_HTTP_OK, "ready\n")
                   : reply_text(connection, MHD_HTTP_SERVICE_UNAVAILABLE, "not ready\n");
    }
    if (strcmp(path, "/") == 0) {
        return reply_printed(connection, http->metrics, print_status, TYPE_TEXT);
    }
    return reply_text(connection, MHD_HTTP_NOT_FOUND, "there is /metrics, /healthz, /readyz, /\n");
}

/* Whether a socket file was left behind by a process that is gone. */
static bool is_stale(const struct sockaddr *name, socklen_t bytes)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool stale = fd >= 0 && connect(fd, name, bytes) != 0 && errno == ECONNREFUSED;

    if (fd >= 0) {
        close(fd);
    }
    return stale;
}

/* returns  a listening socket, or -1 with errno */
static int listen_on(const struct sockaddr *name, socklen_t bytes)
{
    int fd = socket(name->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int on = 1;
    int saved;

    if (fd < 0) {
        return -1;
    }
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(fd, name, bytes) == 0 && listen(fd, CONNECTIONS_MAX) == 0) {
        return fd;
    }
    saved = errno;
    close(fd);
    errno = saved;
    return -1;
}

static int listen_unix(const char *path)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    int fd;

    memcpy(name.sun_path, path, strlen(path) + 1);
    fd = listen_on((struct sockaddr *)&name, sizeof(name));
    if (fd < 0 && errno == EADDRINUSE && is_stale((struct sockaddr *)&name, sizeof(name))) {
        unlink(path);
        fd = listen_on((struct sockaddr *)&name, sizeof(name));
    }
    return fd;
}

static int listen_tcp(struct fb_address *address)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    struct addrinfo *found = NULL;
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } actual = {{0}};
    socklen_t bytes = sizeof(actual);
    char port[8];
    int fd;

    snprintf(port, sizeof(port), "%u", address->port);
    if (getaddrinfo(address->host, port, &hints, &found) != 0) {
        errno = EADDRNOTAVAIL;
        return -1;
    }
    fd = listen_on(found->ai_addr, found->ai_addrlen);
    freeaddrinfo(found);
    if (fd >= 0 && getsockname(fd, &actual.any, &bytes) == 0) {
        /* at the same place for IPv6 */
        address->port = ntohs(actual.v4.sin_port);
    }
    return fd;
}

enum fb_status fb_http_start(const char *address, const struct fb_metrics *metrics,
                             struct fb_http **ret_http, struct fb_error *error)
{
    struct fb_http *http = calloc(1, sizeof(*http));
    enum fb_status status;
    int fd;

    if (!http) {
        return fb_error_set(error, FB_ENOMEM, "http: out of memory");
    }
    http->metrics = metrics;
    if (fb_address_parse(address, &http->address) != FB_OK) {
        status = fb_error_set(error, FB_EINVAL,
                              "http: \"%s\" is not an address; expected host:port or unix:/path",
                              address);
        goto err_free;
    }
    fd = http->address.is_unix ? listen_unix(http->address.host) : listen_tcp(&http->address);
    if (fd < 0) {
        status = fb_error_set(error, FB_EIO,
                              "http: cannot listen on %s: %s; set http_listen to another address",
                              address, strerror(errno));
        goto err_free;
    }
    http->daemon = MHD_start_daemon(
        MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_AUTO, 0, NULL, NULL, on_request, http,
        MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_CONNECTION_LIMIT, (unsigned int)CONNECTIONS_MAX,
        MHD_OPTION_CONNECTION_TIMEOUT, (unsigned int)TIMEOUT_SECONDS,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)CONNECTION_MEMORY, MHD_OPTION_END);
    if (!http->daemon) {
        status = fb_error_set(error, FB_EFATAL, "http: cannot start its thread");
        goto err_close;
    }
    *ret_http = http;
    return FB_OK;

err_close:
    close(fd);
err_free:
    free(http);
    return status;
}

void fb_http_stop(struct fb_http *http)
{
    if (!http) {
        return;
    }
    MHD_stop_daemon(http->daemon);
    if (http->address.is_unix) {
        unlink(http->address.host);
    }
    free(http);
}

uint16_t fb_http_port(const struct fb_http *http)
{
    return http->address.port;
}
