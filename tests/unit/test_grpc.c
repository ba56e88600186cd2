/* gRPC transport: unary calls, streams, the health service, cancellation, peers that do not read,
 * and ends in bounded time. Client and server are both ours, over loopback and a unix socket. */
#include "proto/health.pb-c.h"
#include "transport/grpc_client.h"
#include "transport/grpc_server.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#define TIMEOUT_MS 5000
#define LARGEST    (4 << 20)

/* The owner of the calls that handlers hand over. */
struct owner {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct fb_rpc_call *held; /* by /test.Test/Hold */
    uint64_t held_id;
    uint64_t canceled_id;
    uint32_t cancellations;
};

struct fixture {
    struct owner owner;
    struct fb_rpc_server *server;
    struct fb_rpc_client *client;
    char address[32];
};

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void echo_start(struct fb_rpc_call *call, const uint8_t *request, size_t bytes,
                       void *context)
{
    (void)context;
    fb_rpc_reply(call, request, bytes);
}

static void fail_start(struct fb_rpc_call *call, const uint8_t *request, size_t bytes,
                       void *context)
{
    (void)request;
    (void)bytes;
    (void)context;
    fb_rpc_finish(call, FB_ENOENT, "no space 00ff: forebay spaces lists them");
}

/* As many numbered messages as the request's first byte says. */
static void count_start(struct fb_rpc_call *call, const uint8_t *request, size_t bytes,
                        void *context)
{
    (void)context;
    for (uint8_t i = 0; bytes > 0 && i < request[0]; i++) {
        assert_int_equal(fb_rpc_send(call, &i, 1), FB_OK);
    }
    fb_rpc_finish(call, FB_OK, NULL);
}

static void hold_start(struct fb_rpc_call *call, const uint8_t *request, size_t bytes,
                       void *context)
{
    struct owner *owner = context;

    (void)request;
    (void)bytes;
    pthread_mutex_lock(&owner->lock);
    owner->held = call;
    owner->held_id = fb_rpc_call_id(call);
    pthread_cond_signal(&owner->changed);
    pthread_mutex_unlock(&owner->lock);
}

static void hold_canceled(uint64_t call_id, void *context)
{
    struct owner *owner = context;

    pthread_mutex_lock(&owner->lock);
    owner->canceled_id = call_id;
    owner->cancellations++;
    pthread_cond_signal(&owner->changed);
    pthread_mutex_unlock(&owner->lock);
}

static struct fb_rpc_call *wait_held(struct owner *owner)
{
    struct fb_rpc_call *call;

    pthread_mutex_lock(&owner->lock);
    while (!owner->held) {
        pthread_cond_wait(&owner->changed, &owner->lock);
    }
    call = owner->held;
    owner->held = NULL;
    pthread_mutex_unlock(&owner->lock);
    return call;
}

static void wait_canceled(struct owner *owner, uint32_t count)
{
    pthread_mutex_lock(&owner->lock);
    while (owner->cancellations < count) {
        pthread_cond_wait(&owner->changed, &owner->lock);
    }
    assert_int_equal(owner->cancellations, count);
    assert_int_equal(owner->canceled_id, owner->held_id);
    pthread_mutex_unlock(&owner->lock);
}

static const struct fb_rpc_method methods[] = {
    {"/test.Test/Echo", echo_start, NULL},
    {"/test.Test/Fail", fail_start, NULL},
    {"/test.Test/Count", count_start, NULL},
    {"/test.Test/Hold", hold_start, hold_canceled},
};

static struct fb_rpc_server *start_server(struct owner *owner, const char *address)
{
    struct fb_rpc_server_options options = {.address = address,
                                            .methods = methods,
                                            .method_count = sizeof(methods) / sizeof(methods[0]),
                                            .context = owner};
    struct fb_rpc_server *server;
    struct fb_error error = {0};

    if (fb_rpc_server_create(&options, &server, &error) != FB_OK) {
        fail_msg("%s", error.text);
    }
    return server;
}

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof(*f));

    assert_non_null(f);
    pthread_mutex_init(&f->owner.lock, NULL);
    pthread_cond_init(&f->owner.changed, NULL);
    f->server = start_server(&f->owner, "127.0.0.1:0");
    snprintf(f->address, sizeof(f->address), "127.0.0.1:%u", fb_rpc_server_port(f->server));
    assert_int_equal(fb_rpc_client_create(f->address, &f->client, NULL), FB_OK);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;

    fb_rpc_client_destroy(f->client);
    fb_rpc_server_destroy(f->server, 1000);
    pthread_cond_destroy(&f->owner.changed);
    pthread_mutex_destroy(&f->owner.lock);
    free(f);
    return 0;
}

static void test_unary(void **state)
{
    static const size_t sizes[] = {0, 1, 5000, LARGEST - 100};
    struct fixture *f = *state;
    uint8_t *data = malloc(LARGEST);
    struct fb_rpc_message reply = {0};
    struct fb_error error = {0};

    assert_non_null(data);
    for (size_t i = 0; i < LARGEST; i++) {
        data[i] = (uint8_t)(i * 7);
    }
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        if (fb_rpc_client_call(f->client, "/test.Test/Echo", data, sizes[i], TIMEOUT_MS, &reply,
                               &error) != FB_OK) {
            fail_msg("%s", error.text);
        }
        assert_int_equal(reply.bytes, sizes[i]);
        assert_memory_equal(reply.data, data, sizes[i]);
        free(reply.data);
    }
    free(data);
}

static void test_refusals(void **state)
{
    struct fixture *f = *state;
    uint8_t *data = calloc(1, LARGEST + 1);
    struct fb_rpc_message reply = {0};
    struct fb_error error = {0};
    char words[120];

    assert_non_null(data);
    assert_int_equal(
        fb_rpc_client_call(f->client, "/test.Test/Fail", NULL, 0, TIMEOUT_MS, &reply, &error),
        FB_ENOENT);
    snprintf(words, sizeof(words), "%s: no space 00ff: forebay spaces lists them", f->address);
    assert_string_equal(error.text, words);
    assert_int_equal(
        fb_rpc_client_call(f->client, "/test.Test/Missing", NULL, 0, TIMEOUT_MS, &reply, &error),
        FB_EUNSUPPORTED);
    assert_non_null(strstr(error.text, "does not know this request"));
    assert_int_equal(fb_rpc_client_call(f->client, "/test.Test/Echo", data, LARGEST + 1, TIMEOUT_MS,
                                        &reply, &error),
                     FB_ELIMIT);
    assert_int_equal(
        fb_rpc_client_call(f->client, "/test.Test/Count", NULL, 0, TIMEOUT_MS, &reply, &error),
        FB_EPROTO); /* a stream without a message is no reply */
    free(data);
}

/* The deadline ends the client's wait and cancels at the server, whose late reply goes nowhere. */
static void test_deadline(void **state)
{
    struct fixture *f = *state;
    struct fb_rpc_message reply = {0};
    struct fb_error error = {0};
    struct fb_rpc_call *call;
    double start = now();

    assert_int_equal(fb_rpc_client_call(f->client, "/test.Test/Hold", NULL, 0, 100, &reply, &error),
                     FB_ETIMEDOUT);
    assert_true(now() - start < 2);
    assert_non_null(strstr(error.text, "did not answer in time"));
    call = wait_held(&f->owner);
    wait_canceled(&f->owner, 1);
    assert_int_equal(fb_rpc_send(call, (const uint8_t *)"x", 1), FB_ECANCELED);
    fb_rpc_reply(call, (const uint8_t *)"late", 4);
}

static void *reply_later(void *argument)
{
    struct fb_rpc_call *call = wait_held(argument);

    usleep(20000);
    fb_rpc_reply(call, (const uint8_t *)"later", 5);
    return NULL;
}

static void test_reply_from_elsewhere(void **state)
{
    struct fixture *f = *state;
    struct fb_rpc_message reply = {0};
    struct fb_error error = {0};
    pthread_t thread;

    assert_int_equal(pthread_create(&thread, NULL, reply_later, &f->owner), 0);
    assert_int_equal(
        fb_rpc_client_call(f->client, "/test.Test/Hold", NULL, 0, TIMEOUT_MS, &reply, &error),
        FB_OK);
    assert_int_equal(reply.bytes, 5);
    assert_memory_equal(reply.data, "later", 5);
    free(reply.data);
    pthread_join(thread, NULL);
    assert_int_equal(f->owner.cancellations, 0);
}

static void test_no_server(void **state)
{
    struct fb_rpc_client *client;
    struct fb_rpc_message reply = {0};
    struct fb_error error = {0};
    double start = now();

    (void)state;
    assert_int_equal(fb_rpc_client_create("127.0.0.1:1", &client, &error), FB_OK);
    assert_int_equal(
        fb_rpc_client_call(client, "/test.Test/Echo", NULL, 0, TIMEOUT_MS, &reply, &error),
        FB_ECONN);
    assert_true(now() - start < 3);
    assert_string_equal(error.text, "no daemon answers at 127.0.0.1:1: is forebayd running?");
    fb_rpc_client_destroy(client);
    fb_rpc_client_destroy(NULL);
}

static void test_stream(void **state)
{
    struct fixture *f = *state;
    struct fb_rpc_stream *stream;
    struct fb_rpc_message message = {0};
    struct fb_error error = {0};
    uint8_t count = 60;

    assert_int_equal(fb_rpc_stream_open(f->client, "/test.Test/Count", &count, 1, &stream, &error),
                     FB_OK);
    for (uint8_t i = 0; i < count; i++) {
        assert_int_equal(fb_rpc_stream_next(stream, TIMEOUT_MS, &message, &error), FB_OK);
        assert_int_equal(message.bytes, 1);
        assert_int_equal(message.data[0], i);
        free(message.data);
    }
    assert_int_equal(fb_rpc_stream_next(stream, TIMEOUT_MS, &message, &error), FB_MISS);
    assert_int_equal(fb_rpc_stream_next(stream, TIMEOUT_MS, &message, &error), FB_MISS);
    fb_rpc_stream_close(stream);

    assert_int_equal(fb_rpc_stream_open(f->client, "/test.Test/Fail", NULL, 0, &stream, &error),
                     FB_OK);
    assert_int_equal(fb_rpc_stream_next(stream, TIMEOUT_MS, &message, &error), FB_ENOENT);
    fb_rpc_stream_close(stream);
    fb_rpc_stream_close(NULL);
}

/* Waiting for a message can be given up and taken up again; closing cancels at the server. */
static void test_stream_wait_and_cancel(void **state)
{
    struct fixture *f = *state;
    struct fb_rpc_stream *stream;
    struct fb_rpc_message message = {0};
    struct fb_error error = {0};
    struct fb_rpc_call *call;

    assert_int_equal(fb_rpc_stream_open(f->client, "/test.Test/Hold", NULL, 0, &stream, &error),
                     FB_OK);
    call = wait_held(&f->owner);
    assert_int_equal(fb_rpc_stream_next(stream, 50, &message, &error), FB_ETIMEDOUT);
    assert_int_equal(fb_rpc_send(call, (const uint8_t *)"one", 3), FB_OK);
    assert_int_equal(fb_rpc_stream_next(stream, TIMEOUT_MS, &message, &error), FB_OK);
    assert_memory_equal(message.data, "one", 3);
    free(message.data);
    assert_int_equal(fb_rpc_stream_next(stream, 50, &message, &error), FB_ETIMEDOUT);
    fb_rpc_stream_close(stream);
    wait_canceled(&f->owner, 1);
    assert_int_equal(fb_rpc_send(call, (const uint8_t *)"two", 3), FB_ECANCELED);
    fb_rpc_finish(call, FB_ECANCELED, NULL);
}

/* Fill the way to a peer that does not read; returns how many messages it took. */
static int fill(struct fb_rpc_call *call, size_t bytes)
{
    uint8_t *data = calloc(1, bytes);
    double end = now() + TIMEOUT_MS / 1e3;
    int count = 0;
    int refused = 0;

    assert_non_null(data);
    while (refused < 20 && now() < end) { /* what is full may drain a little more */
        if (fb_rpc_send(call, data, bytes) == FB_OK) {
            count++;
            refused = 0;
        } else {
            refused++;
            usleep(2000);
        }
    }
    free(data);
    assert_int_equal(refused, 20);
    return count;
}

static void test_slow_reader(void **state)
{
    struct fixture *f = *state;
    struct fb_rpc_stream *stream;
    struct fb_rpc_message message = {0};
    struct fb_error error = {0};
    struct fb_rpc_call *call;
    int count;

    assert_int_equal(fb_rpc_stream_open(f->client, "/test.Test/Hold", NULL, 0, &stream, &error),
                     FB_OK);
    call = wait_held(&f->owner);
    count = fill(call, 100000);
    assert_in_range(count, 2, 400);
    fb_rpc_finish(call, FB_OK, NULL);
    for (int i = 0; i < count; i++) { /* nothing that was queued is lost */
        assert_int_equal(fb_rpc_stream_next(stream, TIMEOUT_MS, &message, &error), FB_OK);
        assert_int_equal(message.bytes, 100000);
        free(message.data);
    }
    assert_int_equal(fb_rpc_stream_next(stream, TIMEOUT_MS, &message, &error), FB_MISS);
    fb_rpc_stream_close(stream);
}

/* The end waits no longer than its grace for a peer that never reads, and an owner may end its
 * call when the server is gone. */
static void test_destroy_with_peer_that_never_reads(void **state)
{
    struct fixture *f = *state;
    struct fb_rpc_stream *stream;
    struct fb_rpc_message message = {0};
    struct fb_error error = {0};
    struct fb_rpc_call *call;
    enum fb_status status;
    double start;

    assert_int_equal(fb_rpc_stream_open(f->client, "/test.Test/Hold", NULL, 0, &stream, &error),
                     FB_OK);
    call = wait_held(&f->owner);
    fill(call, 100000);
    start = now();
    fb_rpc_server_destroy(f->server, 200);
    f->server = NULL;
    assert_true(now() - start >= 0.19);
    assert_true(now() - start < 2);
    wait_canceled(&f->owner, 1);
    do {
        status = fb_rpc_stream_next(stream, TIMEOUT_MS, &message, &error);
        if (status == FB_OK) {
            free(message.data);
        }
    } while (status == FB_OK);
    assert_true(status == FB_ECONN || status == FB_ECANCELED);
    fb_rpc_stream_close(stream);
    fb_rpc_client_destroy(f->client); /* with it the C core has shut down */
    f->client = NULL;
    assert_int_equal(fb_rpc_send(call, (const uint8_t *)"x", 1), FB_ECANCELED);
    fb_rpc_finish(call, FB_OK, NULL);
}

/* Calls in progress get their answer within the grace; new ones are refused. */
static void test_destroy_lets_calls_end(void **state)
{
    struct fixture *f = *state;
    struct fb_rpc_message message = {0};
    struct fb_error error = {0};
    struct fb_rpc_stream *stream;
    pthread_t thread;
    double start;

    assert_int_equal(fb_rpc_stream_open(f->client, "/test.Test/Hold", NULL, 0, &stream, &error),
                     FB_OK);
    assert_int_equal(pthread_create(&thread, NULL, reply_later, &f->owner), 0);
    usleep(10000);
    start = now();
    fb_rpc_server_destroy(f->server, TIMEOUT_MS);
    f->server = NULL;
    assert_true(now() - start < 2);
    assert_int_equal(fb_rpc_stream_next(stream, TIMEOUT_MS, &message, &error), FB_OK);
    free(message.data);
    assert_int_equal(fb_rpc_stream_next(stream, TIMEOUT_MS, &message, &error), FB_MISS);
    fb_rpc_stream_close(stream);
    pthread_join(thread, NULL);
    assert_int_equal(
        fb_rpc_client_call(f->client, "/test.Test/Echo", NULL, 0, TIMEOUT_MS, &message, &error),
        FB_ECONN);
}

static size_t health_request(const char *service, uint8_t out[64])
{
    Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;

    request.service = (char *)service;
    return grpc__health__v1__health_check_request__pack(&request, out);
}

static int health_status(struct fb_rpc_message *message)
{
    Grpc__Health__V1__HealthCheckResponse *reply =
        grpc__health__v1__health_check_response__unpack(NULL, message->bytes, message->data);
    int status;

    assert_non_null(reply);
    status = (int)reply->status;
    grpc__health__v1__health_check_response__free_unpacked(reply, NULL);
    free(message->data);
    return status;
}

static enum fb_status check(struct fixture *f, const char *service, int *ret_status)
{
    struct fb_rpc_message message = {0};
    uint8_t request[64];
    size_t bytes = health_request(service, request);
    enum fb_status status = fb_rpc_client_call(f->client, "/grpc.health.v1.Health/Check", request,
                                               bytes, TIMEOUT_MS, &message, NULL);

    if (status == FB_OK) {
        *ret_status = health_status(&message);
    }
    return status;
}

static void test_health_check(void **state)
{
    struct fixture *f = *state;
    struct fb_rpc_message message = {0};
    int status = -1;

    assert_int_equal(check(f, "", &status), FB_OK);
    assert_int_equal(status, 2); /* NOT_SERVING */
    fb_rpc_server_set_health(f->server, true);
    assert_int_equal(check(f, "", &status), FB_OK);
    assert_int_equal(status, 1); /* SERVING */
    assert_int_equal(check(f, "test.Test", &status), FB_OK);
    assert_int_equal(status, 1);
    assert_int_equal(check(f, "test.Tes", &status), FB_ENOENT);
    assert_int_equal(check(f, "test.Test/Echo", &status), FB_ENOENT);
    assert_int_equal(fb_rpc_client_call(f->client, "/grpc.health.v1.Health/Check",
                                        (const uint8_t *)"\xff\xff", 2, TIMEOUT_MS, &message, NULL),
                     FB_EINVAL);
}

static void test_health_watch(void **state)
{
    struct fixture *f = *state;
    struct fb_rpc_stream *streams[2];
    struct fb_rpc_message message = {0};
    struct fb_error error = {0};
    uint8_t request[64];
    size_t bytes;

    for (int i = 0; i < 2; i++) {
        bytes = health_request(i == 0 ? "test.Test" : "other", request);
        assert_int_equal(fb_rpc_stream_open(f->client, "/grpc.health.v1.Health/Watch", request,
                                            bytes, &streams[i], &error),
                         FB_OK);
        assert_int_equal(fb_rpc_stream_next(streams[i], TIMEOUT_MS, &message, &error), FB_OK);
        assert_int_equal(health_status(&message), i == 0 ? 2 : 3); /* 3: SERVICE_UNKNOWN */
    }
    fb_rpc_server_set_health(f->server, true);
    fb_rpc_server_set_health(f->server, true);
    fb_rpc_server_set_health(f->server, false);
    for (int expected = 1; expected <= 2; expected++) {
        assert_int_equal(fb_rpc_stream_next(streams[0], TIMEOUT_MS, &message, &error), FB_OK);
        assert_int_equal(health_status(&message), expected);
    }
    assert_int_equal(fb_rpc_stream_next(streams[1], 20, &message, &error), FB_ETIMEDOUT);
    fb_rpc_stream_close(streams[1]);

    fb_rpc_server_destroy(f->server, TIMEOUT_MS);
    f->server = NULL;
    assert_int_equal(fb_rpc_stream_next(streams[0], TIMEOUT_MS, &message, &error), FB_ECONN);
    assert_string_equal(strstr(error.text, " was lost"), " was lost");
    fb_rpc_stream_close(streams[0]);
}

static void test_health_watch_bounded(void **state)
{
    struct fixture *f = *state;
    struct fb_rpc_stream *streams[33];
    struct fb_rpc_message message = {0};
    struct fb_error error = {0};

    for (int i = 0; i < 33; i++) {
        assert_int_equal(fb_rpc_stream_open(f->client, "/grpc.health.v1.Health/Watch", NULL, 0,
                                            &streams[i], &error),
                         FB_OK);
        assert_int_equal(fb_rpc_stream_next(streams[i], TIMEOUT_MS, &message, &error),
                         i < 32 ? FB_OK : FB_ELIMIT);
        if (i < 32) {
            free(message.data);
        }
    }
    /* watchers that never read are dropped, the server goes on */
    for (int i = 0; i < 4000; i++) {
        fb_rpc_server_set_health(f->server, i % 2 == 0);
    }
    assert_int_equal(
        fb_rpc_client_call(f->client, "/test.Test/Echo", NULL, 0, TIMEOUT_MS, &message, &error),
        FB_OK);
    free(message.data);
    for (int i = 0; i < 33; i++) {
        fb_rpc_stream_close(streams[i]);
    }
}

static void test_unix_socket(void **state)
{
    struct fixture *f = *state;
    char directory[] = "/tmp/forebay-test-grpc-XXXXXX";
    struct fb_rpc_server *server;
    struct fb_rpc_client *client;
    struct fb_rpc_message reply = {0};
    struct fb_error error = {0};
    char address[80];

    assert_non_null(mkdtemp(directory));
    snprintf(address, sizeof(address), "unix:%s/grpc", directory);
    server = start_server(&f->owner, address);
    assert_int_equal(fb_rpc_server_port(server), 0);
    assert_int_equal(fb_rpc_client_create(address, &client, &error), FB_OK);
    assert_int_equal(fb_rpc_client_call(client, "/test.Test/Echo", (const uint8_t *)"hi", 2,
                                        TIMEOUT_MS, &reply, &error),
                     FB_OK);
    free(reply.data);
    fb_rpc_client_destroy(client);
    fb_rpc_server_destroy(server, 1000);
    assert_int_equal(rmdir(directory), 0); /* the socket went with the server */
}

static void test_port_taken(void **state)
{
    struct fixture *f = *state;
    struct fb_rpc_server_options options = {.address = f->address};
    struct fb_rpc_server *server;
    struct fb_error error = {0};

    assert_int_equal(fb_rpc_server_create(&options, &server, &error), FB_EIO);
    assert_non_null(strstr(error.text, "set grpc_listen to another"));
    fb_rpc_server_destroy(NULL, 0);
}

#define CALLERS      4
#define CALLS        100
#define CALL_SECONDS 30

static void *call_often(void *argument)
{
    struct fixture *f = argument;

    for (int i = 0; i < CALLS; i++) {
        struct fb_rpc_message reply = {0};

        assert_int_equal(fb_rpc_client_call(f->client, "/test.Test/Echo", (const uint8_t *)&i,
                                            sizeof(i), CALL_SECONDS * 1000, &reply, NULL),
                         FB_OK);
        assert_memory_equal(reply.data, &i, sizeof(i));
        free(reply.data);
    }
    return NULL;
}

static void test_many_callers(void **state)
{
    pthread_t threads[CALLERS];

    for (int i = 0; i < CALLERS; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, call_often, *state), 0);
    }
    for (int i = 0; i < CALLERS; i++) {
        pthread_join(threads[i], NULL);
    }
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_unary),
        TEST(test_refusals),
        TEST(test_deadline),
        TEST(test_reply_from_elsewhere),
        TEST(test_no_server),
        TEST(test_stream),
        TEST(test_stream_wait_and_cancel),
        TEST(test_slow_reader),
        TEST(test_destroy_with_peer_that_never_reads),
        TEST(test_destroy_lets_calls_end),
        TEST(test_health_check),
        TEST(test_health_watch),
        TEST(test_health_watch_bounded),
        TEST(test_unix_socket),
        TEST(test_port_taken),
        TEST(test_many_callers),
    };

    return cmocka_run_group_tests_name("grpc", tests, NULL, NULL);
}
