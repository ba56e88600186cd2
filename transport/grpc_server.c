/* The server's thread takes events from one completion queue; an event names a tag, a tag names
 * what to do. All state is under the server's lock, which is never held while a handler runs.
 *
 * A call lives while the C core works for it (batches > 0) or somebody owns it:
 *
 *     requested -> arrived -> received -> started (owned) -> finishing -> settled -> freed
 *
 * One batch, `closed`, is in flight from arrival to the end, so that `batches` reaches 0 exactly
 * when the C core has no more to say; then its objects are released (settled), even if an owner
 * still holds the pointer. A call that is `dead` starts no batch any more. When the shutdown has
 * come through the queue all calls are dead: that makes it safe to shut the queue. */
#include "transport/grpc_server.h"

#include "proto/assert.h"
#include "transport/grpc_common.h"
#include "transport/grpc_health.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#define CALLS_MAX      256         /* in progress */
#define STREAMS_MAX    64          /* of one connection */
#define QUEUE_MESSAGES 64          /* waiting to be sent in one call */
#define QUEUE_BYTES    (256 << 10) /* likewise; one message may be larger */
#define KEEPALIVE_MS   30000
#define SILENCE_MS     10000 /* a peer that leaves a ping unanswered for so long is gone */

enum event { ARRIVED, RECEIVED, SENT, CLOSED, DOWN };

struct tag {
    enum event event;
    struct fb_rpc_call *call; /* NULL for DOWN */
};

struct message {
    grpc_byte_buffer *buffer;
    size_t bytes;
};

struct fb_rpc_call {
    struct fb_rpc_server *server;
    struct fb_rpc_call *previous; /* among the server's calls, from arrival until settled */
    struct fb_rpc_call *next;
    uint64_t id;
    const struct fb_rpc_method *method;
    void *context;

    grpc_call *grpc; /* NULL before arrival and once settled */
    grpc_call_details details;
    grpc_metadata_array metadata;
    grpc_byte_buffer *request;
    struct tag arrived;
    struct tag received;
    struct tag sent;
    struct tag closed;
    int cancelled; /* where the C core puts it */

    uint32_t batches; /* in flight */
    bool owned;
    bool dead;      /* no batch may start */
    bool sending;   /* the send batch is in flight */
    bool begun;     /* initial metadata is sent */
    bool finishing; /* status below is to follow the queue */
    bool finished;  /* it is sent */

    grpc_status_code status;
    grpc_slice text;
    struct message queue[QUEUE_MESSAGES];
    uint32_t head;
    uint32_t queued;
    size_t queued_bytes;
};

struct fb_rpc_server {
    struct fb_rpc_server_options options;
    struct fb_rpc_health health;
    grpc_server *grpc;
    grpc_completion_queue *queue;
    pthread_t thread;
    struct tag down;
    uint16_t port;

    pthread_mutex_t lock;
    pthread_cond_t settled; /* a call did */
    uint32_t refs;          /* the server's user, and every call */
    bool stopped;           /* the queue may be shut */
    uint64_t next_id;
    struct fb_rpc_call *calls;
    uint32_t call_count;
};

/* ---- lifetimes: all with the lock held ---- */

/* Drops one reference and the lock. */
static void server_unlock_unref(struct fb_rpc_server *server)
{
    bool last = --server->refs == 0;

    pthread_mutex_unlock(&server->lock);
    if (last) {
        fb_rpc_health_fini(&server->health);
        pthread_cond_destroy(&server->settled);
        pthread_mutex_destroy(&server->lock);
        free(server);
    }
}

static struct fb_rpc_call *call_create(struct fb_rpc_server *server)
{
    struct fb_rpc_call *call = calloc(1, sizeof(*call));

    if (call) {
        call->server = server;
        call->text = grpc_empty_slice();
        call->arrived = (struct tag){ARRIVED, call};
        call->received = (struct tag){RECEIVED, call};
        call->sent = (struct tag){SENT, call};
        call->closed = (struct tag){CLOSED, call};
        server->refs++;
    }
    return call;
}

static void call_link(struct fb_rpc_call *call)
{
    struct fb_rpc_server *server = call->server;

    call->id = ++server->next_id;
    call->next = server->calls;
    if (call->next) {
        call->next->previous = call;
    }
    server->calls = call;
    server->call_count++;
}

static void call_unlink(struct fb_rpc_call *call)
{
    struct fb_rpc_server *server = call->server;

    if (call->previous) {
        call->previous->next = call->next;
    } else {
        server->calls = call->next;
    }
    if (call->next) {
        call->next->previous = call->previous;
    }
    server->call_count--;
    pthread_cond_signal(&server->settled);
}

static struct message queue_pop(struct fb_rpc_call *call)
{
    struct message message = call->queue[call->head];

    call->head = (call->head + 1) % QUEUE_MESSAGES;
    call->queued--;
    call->queued_bytes -= message.bytes;
    return message;
}

/* The peer is gone, or the server ends. */
static void call_kill(struct fb_rpc_call *call)
{
    call->dead = true;
    while (call->queued > 0) {
        grpc_byte_buffer_destroy(queue_pop(call).buffer);
    }
}

/* Release what has ended, and the lock. The call may be gone afterwards. */
static void call_unlock_settle(struct fb_rpc_call *call)
{
    struct fb_rpc_server *server = call->server;

    if (call->batches == 0 && call->grpc) {
        call_kill(call);
        call_unlink(call);
        grpc_byte_buffer_destroy(call->request);
        grpc_slice_unref(call->text);
        grpc_metadata_array_destroy(&call->metadata);
        grpc_call_details_destroy(&call->details);
        grpc_call_unref(call->grpc);
        call->grpc = NULL;
    }
    if (call->batches == 0 && !call->owned) {
        free(call);
        server_unlock_unref(server);
    } else {
        pthread_mutex_unlock(&server->lock);
    }
}

/* ---- batches: with the lock held ---- */

static void start_batch(struct fb_rpc_call *call, const grpc_op *ops, size_t count, struct tag *tag)
{
    grpc_call_error failed = grpc_call_start_batch(call->grpc, ops, count, tag, NULL);

    FB_ASSERT(failed == GRPC_CALL_OK); /* only a wrong sequence of operations can fail */
    call->batches++;
}

/* Send what comes next, if anything, and if nothing is being sent. */
static void call_pump(struct fb_rpc_call *call)
{
    struct message message = {0};
    grpc_op ops[3] = {{0}};
    size_t n = 0;

    if (call->dead || call->sending || call->finished || (call->queued == 0 && !call->finishing)) {
        return;
    }
    if (!call->begun) {
        call->begun = true;
        ops[n++].op = GRPC_OP_SEND_INITIAL_METADATA;
    }
    if (call->queued > 0) {
        message = queue_pop(call);
        ops[n].op = GRPC_OP_SEND_MESSAGE;
        ops[n++].data.send_message.send_message = message.buffer;
    }
    if (call->finishing && call->queued == 0) {
        call->finished = true;
        ops[n].op = GRPC_OP_SEND_STATUS_FROM_SERVER;
        ops[n].data.send_status_from_server.status = call->status;
        ops[n++].data.send_status_from_server.status_details = &call->text;
    }
    call->sending = true;
    start_batch(call, ops, n, &call->sent);
    grpc_byte_buffer_destroy(message.buffer);
}

static void call_end(struct fb_rpc_call *call, enum fb_status status, const char *text)
{
    if (!call->dead) {
        call->finishing = true;
        call->status = fb_rpc_code_of(status);
        call->text = grpc_slice_from_copied_string(text ? text : fb_status_text(status));
        call_pump(call);
    }
}

static enum fb_status call_queue(struct fb_rpc_call *call, grpc_byte_buffer *buffer, size_t bytes)
{
    if (call->dead) {
        return FB_ECANCELED;
    }
    if (call->queued == QUEUE_MESSAGES ||
        (call->queued > 0 && call->queued_bytes + bytes > QUEUE_BYTES)) {
        return FB_AGAIN;
    }
    call->queue[(call->head + call->queued) % QUEUE_MESSAGES] = (struct message){buffer, bytes};
    call->queued++;
    call->queued_bytes += bytes;
    return FB_OK;
}

/* ---- events: on the server's thread; entered with the lock held, left without it ---- */

/* Ask the C core for a call. */
static void request_call(struct fb_rpc_server *server, struct fb_rpc_call *call)
{
    call->batches++;
    grpc_call_details_init(&call->details);
    grpc_metadata_array_init(&call->metadata);
    grpc_server_request_call(server->grpc, &call->grpc, &call->details, &call->metadata,
                             server->queue, server->queue, &call->arrived);
}

static void release_arrived(struct fb_rpc_call *call)
{
    grpc_metadata_array_destroy(&call->metadata);
    grpc_call_details_destroy(&call->details);
    if (call->grpc) {
        grpc_call_unref(call->grpc);
        call->grpc = NULL;
    }
}

static const struct fb_rpc_method *find_method(const struct fb_rpc_method *methods, size_t count,
                                               grpc_slice path)
{
    for (size_t i = 0; i < count; i++) {
        if (grpc_slice_str_cmp(path, methods[i].path) == 0) {
            return &methods[i];
        }
    }
    return NULL;
}

/* Ask for the peer's end and, if the call can be served, for its message. */
static void call_begin(struct fb_rpc_call *call)
{
    struct fb_rpc_server *server = call->server;
    grpc_op close = {.op = GRPC_OP_RECV_CLOSE_ON_SERVER,
                     .data.recv_close_on_server.cancelled = &call->cancelled};
    grpc_op receive = {.op = GRPC_OP_RECV_MESSAGE,
                       .data.recv_message.recv_message = &call->request};

    call_link(call);
    call->context = server->options.context;
    call->method =
        find_method(server->options.methods, server->options.method_count, call->details.method);
    if (!call->method) {
        call->context = &server->health;
        call->method =
            find_method(fb_rpc_health_methods, FB_RPC_HEALTH_METHODS, call->details.method);
    }
    start_batch(call, &close, 1, &call->closed);
    if (!call->method) {
        call_end(call, FB_EUNSUPPORTED, "no such method");
    } else if (server->call_count > CALLS_MAX) {
        call_end(call, FB_ELIMIT, "too many calls in progress");
    } else {
        start_batch(call, &receive, 1, &call->received);
    }
}

static void on_arrived(struct fb_rpc_call *call, bool ok)
{
    struct fb_rpc_server *server = call->server;
    struct fb_rpc_call *next;

    call->batches--;
    if (!ok || server->stopped) {
        release_arrived(call);
        call_unlock_settle(call);
        return;
    }
    next = call_create(server);
    if (next) {
        call_begin(call);
    } else { /* no memory: drop this one and use its place for the next */
        release_arrived(call);
        next = call;
    }
    request_call(server, next);
    pthread_mutex_unlock(&server->lock);
}

static void on_received(struct fb_rpc_call *call, bool ok)
{
    struct fb_rpc_server *server = call->server;
    grpc_slice request;

    if (ok && call->request && !call->dead) {
        call->owned = true;
        pthread_mutex_unlock(&server->lock);
        /* this batch still counts: the call stays, whatever its owner does meanwhile */
        request = fb_rpc_unpack(call->request);
        call->method->start(call, GRPC_SLICE_START_PTR(request), GRPC_SLICE_LENGTH(request),
                            call->context);
        grpc_slice_unref(request);
        pthread_mutex_lock(&server->lock);
    } else {
        call_end(call, FB_EINVAL, "a request message was expected");
    }
    call->batches--;
    call_unlock_settle(call);
}

static void on_sent(struct fb_rpc_call *call, bool ok)
{
    call->batches--;
    call->sending = false;
    if (!ok) {
        call_kill(call);
    }
    call_pump(call);
    call_unlock_settle(call);
}

static void on_closed(struct fb_rpc_call *call)
{
    const struct fb_rpc_method *method = call->method;
    void *context = call->context;
    uint64_t id = call->id;
    bool tell = call->owned && method->canceled;

    call->batches--;
    call_kill(call);
    call_unlock_settle(call);
    if (tell) {
        method->canceled(id, context);
    }
}

static void on_down(struct fb_rpc_server *server)
{
    server->stopped = true;
    for (struct fb_rpc_call *call = server->calls; call; call = call->next) {
        call_kill(call);
    }
    pthread_mutex_unlock(&server->lock);
    grpc_completion_queue_shutdown(server->queue);
}

static void handle_event(struct fb_rpc_server *server, const struct tag *tag, bool ok)
{
    pthread_mutex_lock(&server->lock); /* before the tag is read, too */
    switch (tag->event) {
    case ARRIVED: on_arrived(tag->call, ok); break;
    case RECEIVED: on_received(tag->call, ok); break;
    case SENT: on_sent(tag->call, ok); break;
    case CLOSED: on_closed(tag->call); break;
    case DOWN: on_down(server); break;
    }
}

static void *serve(void *argument)
{
    struct fb_rpc_server *server = argument;
    grpc_event event;

    do {
        event =
            grpc_completion_queue_next(server->queue, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
        if (event.type == GRPC_OP_COMPLETE) {
            handle_event(server, event.tag, event.success != 0);
        }
    } while (event.type != GRPC_QUEUE_SHUTDOWN);
    return NULL;
}

/* ---- the owners' side: any thread ---- */

uint64_t fb_rpc_call_id(const struct fb_rpc_call *call)
{
    return call->id;
}

enum fb_status fb_rpc_send(struct fb_rpc_call *call, const uint8_t *message, size_t bytes)
{
    grpc_byte_buffer *buffer;
    enum fb_status status;

    if (bytes > FB_RPC_MESSAGE_BYTES) {
        return FB_ELIMIT;
    }
    buffer = fb_rpc_pack(message, bytes);
    pthread_mutex_lock(&call->server->lock);
    status = call_queue(call, buffer, bytes);
    if (status == FB_OK) {
        call_pump(call);
    }
    pthread_mutex_unlock(&call->server->lock);
    if (status != FB_OK) {
        grpc_byte_buffer_destroy(buffer);
    }
    return status;
}

void fb_rpc_reply(struct fb_rpc_call *call, const uint8_t *message, size_t bytes)
{
    grpc_byte_buffer *buffer;

    if (bytes > FB_RPC_MESSAGE_BYTES) {
        fb_rpc_finish(call, FB_ELIMIT, "the reply is too large for one message");
        return;
    }
    buffer = fb_rpc_pack(message, bytes);
    pthread_mutex_lock(&call->server->lock);
    if (call_queue(call, buffer, bytes) != FB_OK) { /* the peer is gone */
        grpc_byte_buffer_destroy(buffer);
    }
    call_end(call, FB_OK, "");
    call->owned = false;
    call_unlock_settle(call);
}

void fb_rpc_finish(struct fb_rpc_call *call, enum fb_status status, const char *text)
{
    pthread_mutex_lock(&call->server->lock);
    call_end(call, status, text);
    call->owned = false;
    call_unlock_settle(call);
}

/* ---- the server ---- */

static grpc_server *create_grpc_server(void)
{
    grpc_arg args[] = {
        fb_rpc_arg(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, FB_RPC_MESSAGE_BYTES),
        fb_rpc_arg(GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, FB_RPC_MESSAGE_BYTES),
        fb_rpc_arg(GRPC_ARG_MAX_CONCURRENT_STREAMS, STREAMS_MAX),
        fb_rpc_arg(GRPC_ARG_KEEPALIVE_TIME_MS, KEEPALIVE_MS),
        fb_rpc_arg(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, SILENCE_MS),
        fb_rpc_arg(GRPC_ARG_ALLOW_REUSEPORT, 0), /* two daemons on one port would share it */
    };
    grpc_channel_args all = {sizeof(args) / sizeof(args[0]), args};

    return grpc_server_create(&all, NULL);
}

static enum fb_status listen_and_start(struct fb_rpc_server *server, const char *address,
                                       struct fb_error *error)
{
    grpc_server_credentials *credentials = grpc_insecure_server_credentials_create();
    struct fb_rpc_call *call;
    int port = grpc_server_add_http2_port(server->grpc, address, credentials);

    grpc_server_credentials_release(credentials);
    if (port == 0) {
        return fb_error_set(error, FB_EIO,
                            "grpc: cannot listen on %s: it is taken or not an address of this "
                            "machine; set grpc_listen to another",
                            address);
    }
    server->port = strncmp(address, "unix:", 5) == 0 ? 0 : (uint16_t)port;
    grpc_server_start(server->grpc);
    pthread_mutex_lock(&server->lock);
    call = call_create(server);
    if (call) {
        request_call(server, call);
    }
    pthread_mutex_unlock(&server->lock);
    return call ? FB_OK : fb_error_set(error, FB_ENOMEM, "grpc: out of memory");
}

enum fb_status fb_rpc_server_create(const struct fb_rpc_server_options *options,
                                    struct fb_rpc_server **ret_server, struct fb_error *error)
{
    struct fb_rpc_server *server = calloc(1, sizeof(*server));
    pthread_condattr_t monotonic;
    enum fb_status status;

    if (!server) {
        return fb_error_set(error, FB_ENOMEM, "grpc: out of memory");
    }
    grpc_init();
    server->options = *options;
    server->refs = 1;
    server->down.event = DOWN;
    fb_rpc_health_init(&server->health, &server->options);
    pthread_mutex_init(&server->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&server->settled, &monotonic);
    pthread_condattr_destroy(&monotonic);
    server->queue = grpc_completion_queue_create_for_next(NULL);
    server->grpc = create_grpc_server();
    grpc_server_register_completion_queue(server->grpc, server->queue, NULL);
    if (pthread_create(&server->thread, NULL, serve, server) != 0) {
        status = fb_error_set(error, FB_EFATAL, "grpc: cannot start its thread");
        goto err_queue;
    }
    status = listen_and_start(server, options->address, error);
    if (status != FB_OK) {
        fb_rpc_server_destroy(server, 0);
        return status;
    }
    *ret_server = server;
    return FB_OK;

err_queue:
    grpc_completion_queue_shutdown(server->queue);
    grpc_server_destroy(server->grpc);
    grpc_completion_queue_destroy(server->queue);
    grpc_shutdown_blocking();
    pthread_mutex_lock(&server->lock);
    server_unlock_unref(server);
    return status;
}

static struct timespec after_ms(uint32_t ms)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += ms / 1000;
    t.tv_nsec += (long)(ms % 1000) * 1000000;
    if (t.tv_nsec >= 1000000000) {
        t.tv_sec++;
        t.tv_nsec -= 1000000000;
    }
    return t;
}

void fb_rpc_server_destroy(struct fb_rpc_server *server, uint32_t grace_ms)
{
    struct timespec deadline = after_ms(grace_ms);

    if (!server) {
        return;
    }
    grpc_server_shutdown_and_notify(server->grpc, server->queue, &server->down);
    fb_rpc_health_end(&server->health);
    pthread_mutex_lock(&server->lock);
    while (server->call_count > 0 &&
           pthread_cond_timedwait(&server->settled, &server->lock, &deadline) != ETIMEDOUT) {
    }
    pthread_mutex_unlock(&server->lock);
    grpc_server_cancel_all_calls(server->grpc);
    pthread_join(server->thread, NULL);
    grpc_server_destroy(server->grpc);
    grpc_completion_queue_destroy(server->queue);
    grpc_shutdown_blocking();
    pthread_mutex_lock(&server->lock);
    server_unlock_unref(server);
}

void fb_rpc_server_set_health(struct fb_rpc_server *server, bool serving)
{
    fb_rpc_health_set(&server->health, serving);
}

uint16_t fb_rpc_server_port(const struct fb_rpc_server *server)
{
    return server->port;
}
