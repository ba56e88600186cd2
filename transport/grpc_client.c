/* Every call has a completion queue of its own, from which it plucks by tag; a unary call is a
 * stream of one message with a deadline. Three batches make a call: SENT (the request, and the
 * server's initial metadata), STATUS (its end) and READ (one message, again and again). A batch
 * that was started is waited for before the call goes. */
#include "transport/grpc_client.h"

#include "proto/assert.h"
#include "transport/grpc_common.h"

#include <grpc/support/alloc.h>
#include <stdlib.h>

#define RECONNECT_MS     100
#define RECONNECT_MAX_MS 1000

enum tag { SENT = 1, STATUS, READ };

struct fb_rpc_client {
    grpc_channel *channel;
    char address[];
};

struct fb_rpc_stream {
    const struct fb_rpc_client *client;
    grpc_completion_queue *queue;
    grpc_call *call;
    grpc_metadata_array initial;
    grpc_metadata_array trailing;
    grpc_byte_buffer *message; /* where READ puts it */
    grpc_status_code code;     /* where STATUS puts it */
    grpc_slice text;
    bool reading;  /* READ is in flight */
    bool ended;    /* STATUS is done */
    bool answered; /* a message has come */
};

enum fb_status fb_rpc_client_create(const char *address, struct fb_rpc_client **ret_client,
                                    struct fb_error *error)
{
    grpc_arg args[] = {
        fb_rpc_arg(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, FB_RPC_MESSAGE_BYTES),
        fb_rpc_arg(GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, FB_RPC_MESSAGE_BYTES),
        fb_rpc_arg(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, RECONNECT_MS),
        fb_rpc_arg(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, RECONNECT_MAX_MS),
        fb_rpc_arg(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, RECONNECT_MAX_MS),
        fb_rpc_arg(GRPC_ARG_ENABLE_HTTP_PROXY, 0), /* the daemon is near; a proxy is not */
        fb_rpc_arg(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1),
    };
    grpc_channel_args all = {sizeof(args) / sizeof(args[0]), args};
    struct fb_rpc_client *client = malloc(sizeof(*client) + strlen(address) + 1);
    grpc_channel_credentials *credentials;

    if (!client) {
        return fb_error_set(error, FB_ENOMEM, "out of memory");
    }
    grpc_init();
    memcpy(client->address, address, strlen(address) + 1);
    credentials = grpc_insecure_credentials_create();
    client->channel = grpc_channel_create(address, credentials, &all);
    grpc_channel_credentials_release(credentials);
    *ret_client = client;
    return FB_OK;
}

void fb_rpc_client_destroy(struct fb_rpc_client *client)
{
    if (client) {
        grpc_channel_destroy(client->channel);
        grpc_shutdown_blocking();
        free(client);
    }
}

static gpr_timespec after_ms(uint32_t ms)
{
    return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(ms, GPR_TIMESPAN));
}

static bool pluck(struct fb_rpc_stream *stream, enum tag tag, gpr_timespec deadline)
{
    void *name = (void *)(uintptr_t)tag;

    return grpc_completion_queue_pluck(stream->queue, name, deadline, NULL).type ==
           GRPC_OP_COMPLETE;
}

static void start(struct fb_rpc_stream *stream, const grpc_op *ops, size_t count, enum tag tag)
{
    void *name = (void *)(uintptr_t)tag;
    grpc_call_error failed = grpc_call_start_batch(stream->call, ops, count, name, NULL);

    FB_ASSERT(failed == GRPC_CALL_OK); /* only a wrong sequence of operations can fail */
}

/* deadline  of the whole call
 * returns   NULL without memory */
static struct fb_rpc_stream *stream_open(const struct fb_rpc_client *client, const char *path,
                                         const uint8_t *request, size_t bytes,
                                         gpr_timespec deadline)
{
    struct fb_rpc_stream *stream = calloc(1, sizeof(*stream));
    grpc_byte_buffer *buffer;
    grpc_slice method;
    grpc_op send[4] = {{.op = GRPC_OP_SEND_INITIAL_METADATA},
                       {.op = GRPC_OP_SEND_MESSAGE},
                       {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT},
                       {.op = GRPC_OP_RECV_INITIAL_METADATA}};
    grpc_op end = {.op = GRPC_OP_RECV_STATUS_ON_CLIENT};

    if (!stream) {
        return NULL;
    }
    stream->client = client;
    stream->text = grpc_empty_slice();
    grpc_metadata_array_init(&stream->initial);
    grpc_metadata_array_init(&stream->trailing);
    method = grpc_slice_from_copied_string(path);
    stream->queue = grpc_completion_queue_create_for_pluck(NULL);
    stream->call = grpc_channel_create_call(client->channel, NULL, GRPC_PROPAGATE_DEFAULTS,
                                            stream->queue, method, NULL, deadline, NULL);
    grpc_slice_unref(method);
    buffer = fb_rpc_pack(request, bytes);
    send[1].data.send_message.send_message = buffer;
    send[3].data.recv_initial_metadata.recv_initial_metadata = &stream->initial;
    end.data.recv_status_on_client.trailing_metadata = &stream->trailing;
    end.data.recv_status_on_client.status = &stream->code;
    end.data.recv_status_on_client.status_details = &stream->text;
    start(stream, send, 4, SENT);
    start(stream, &end, 1, STATUS);
    grpc_byte_buffer_destroy(buffer);
    return stream;
}

enum fb_status fb_rpc_stream_open(struct fb_rpc_client *client, const char *path,
                                  const uint8_t *request, size_t bytes,
                                  struct fb_rpc_stream **ret_stream, struct fb_error *error)
{
    struct fb_rpc_stream *stream =
        stream_open(client, path, request, bytes, gpr_inf_future(GPR_CLOCK_MONOTONIC));

    if (!stream) {
        return fb_error_set(error, FB_ENOMEM, "out of memory");
    }
    *ret_stream = stream;
    return FB_OK;
}

void fb_rpc_stream_close(struct fb_rpc_stream *stream)
{
    gpr_timespec never = gpr_inf_future(GPR_CLOCK_MONOTONIC);

    if (!stream) {
        return;
    }
    grpc_call_cancel(stream->call, NULL); /* completes what is in flight, at once */
    pluck(stream, SENT, never);
    if (!stream->ended) {
        pluck(stream, STATUS, never);
    }
    if (stream->reading) {
        pluck(stream, READ, never);
        grpc_byte_buffer_destroy(stream->message);
    }
    grpc_call_unref(stream->call);
    grpc_completion_queue_shutdown(stream->queue);
    grpc_completion_queue_destroy(stream->queue);
    grpc_metadata_array_destroy(&stream->initial);
    grpc_metadata_array_destroy(&stream->trailing);
    grpc_slice_unref(stream->text);
    free(stream);
}

static enum fb_status timed_out(const struct fb_rpc_stream *stream, struct fb_error *error)
{
    return fb_error_set(error, FB_ETIMEDOUT, "%s did not answer in time", stream->client->address);
}

/* How a call ended, once no more messages come. */
static enum fb_status stream_end(struct fb_rpc_stream *stream, gpr_timespec deadline,
                                 struct fb_error *error)
{
    const char *address = stream->client->address;
    enum fb_status status;
    char *text;

    stream->ended = stream->ended || pluck(stream, STATUS, deadline);
    if (!stream->ended || stream->code == GRPC_STATUS_DEADLINE_EXCEEDED) {
        return timed_out(stream, error);
    }
    status = fb_rpc_status_of(stream->code);
    switch (status) {
    case FB_OK: return FB_MISS;
    case FB_ECONN:
        return stream->answered
                   ? fb_error_set(error, status, "the connection to %s was lost", address)
                   : fb_error_set(error, status, "no daemon answers at %s: is forebayd running?",
                                  address);
    case FB_EUNSUPPORTED:
        return fb_error_set(error, status,
                            "the daemon at %s does not know this request: is it of an older "
                            "version?",
                            address);
    default: break;
    }
    text = grpc_slice_to_c_string(stream->text);
    fb_error_set(error, status, "%s: %s", address, text);
    gpr_free(text);
    return status;
}

static enum fb_status take_message(struct fb_rpc_stream *stream, struct fb_rpc_message *ret_message,
                                   struct fb_error *error)
{
    grpc_slice slice = fb_rpc_unpack(stream->message);
    size_t bytes = GRPC_SLICE_LENGTH(slice);
    uint8_t *data = malloc(bytes ? bytes : 1);

    grpc_byte_buffer_destroy(stream->message);
    stream->message = NULL;
    if (data) {
        memcpy(data, GRPC_SLICE_START_PTR(slice), bytes);
        *ret_message = (struct fb_rpc_message){data, bytes};
    }
    grpc_slice_unref(slice);
    return data ? FB_OK : fb_error_set(error, FB_ENOMEM, "out of memory");
}

static enum fb_status stream_next(struct fb_rpc_stream *stream, gpr_timespec deadline,
                                  struct fb_rpc_message *ret_message, struct fb_error *error)
{
    grpc_op read = {.op = GRPC_OP_RECV_MESSAGE, .data.recv_message.recv_message = &stream->message};

    if (stream->ended) {
        return stream_end(stream, deadline, error);
    }
    if (!stream->reading) {
        start(stream, &read, 1, READ);
        stream->reading = true;
    }
    if (!pluck(stream, READ, deadline)) {
        return timed_out(stream, error);
    }
    stream->reading = false;
    if (!stream->message) {
        return stream_end(stream, deadline, error);
    }
    stream->answered = true;
    return take_message(stream, ret_message, error);
}

enum fb_status fb_rpc_stream_next(struct fb_rpc_stream *stream, uint32_t timeout_ms,
                                  struct fb_rpc_message *ret_message, struct fb_error *error)
{
    return stream_next(stream, after_ms(timeout_ms), ret_message, error);
}

enum fb_status fb_rpc_client_call(struct fb_rpc_client *client, const char *path,
                                  const uint8_t *request, size_t bytes, uint32_t timeout_ms,
                                  struct fb_rpc_message *ret_reply, struct fb_error *error)
{
    gpr_timespec never = gpr_inf_future(GPR_CLOCK_MONOTONIC);
    struct fb_rpc_message reply = {0};
    struct fb_rpc_stream *stream;
    enum fb_status status;

    /* the call's own deadline ends every wait */
    stream = stream_open(client, path, request, bytes, after_ms(timeout_ms));
    if (!stream) {
        return fb_error_set(error, FB_ENOMEM, "out of memory");
    }
    status = stream_next(stream, never, &reply, error);
    if (status == FB_MISS) {
        status = fb_error_set(error, FB_EPROTO, "%s answered without a message", client->address);
    } else if (status == FB_OK) {
        status = stream_end(stream, never, error);
        status = status == FB_MISS ? FB_OK : status;
    }
    fb_rpc_stream_close(stream);
    if (status == FB_OK) {
        *ret_reply = reply;
    } else {
        free(reply.data);
    }
    return status;
}
