/* A gRPC client for the control plane, over the gRPC C core: calls block, with a deadline.
 *
 * A client may be used by several threads, a stream by one. The connection is made by the first
 * call and made again when needed. Errors say in words whether nobody answered, it took too long,
 * or the daemon refused. */
#ifndef FB_TRANSPORT_GRPC_CLIENT_H
#define FB_TRANSPORT_GRPC_CLIENT_H

#include "proto/status.h"

#include <stddef.h>

struct fb_rpc_client;
struct fb_rpc_stream;

/* data is released with free(). */
struct fb_rpc_message {
    uint8_t *data;
    size_t bytes;
};

/* address  host:port, [ipv6]:port or unix:/path; whether anyone is there shows with the first
 *          call */
enum fb_status fb_rpc_client_create(const char *address, struct fb_rpc_client **ret_client,
                                    struct fb_error *error);

/* Its streams must be closed. NULL is allowed. */
void fb_rpc_client_destroy(struct fb_rpc_client *client);

/* A unary call.
 * request  borrowed
 * returns  FB_OK | FB_ECONN | FB_ETIMEDOUT | what the method returned */
enum fb_status fb_rpc_client_call(struct fb_rpc_client *client, const char *path,
                                  const uint8_t *request, size_t bytes, uint32_t timeout_ms,
                                  struct fb_rpc_message *ret_reply, struct fb_error *error);

/* Begin a call that the server answers with a stream; it lasts until it is closed. */
enum fb_status fb_rpc_stream_open(struct fb_rpc_client *client, const char *path,
                                  const uint8_t *request, size_t bytes,
                                  struct fb_rpc_stream **ret_stream, struct fb_error *error);

/* Wait for the next message.
 * returns  FB_OK | FB_MISS the stream has ended well | FB_ETIMEDOUT nothing came yet, try again |
 *          what ended it */
enum fb_status fb_rpc_stream_next(struct fb_rpc_stream *stream, uint32_t timeout_ms,
                                  struct fb_rpc_message *ret_message, struct fb_error *error);

/* Also cancels. NULL is allowed. */
void fb_rpc_stream_close(struct fb_rpc_stream *stream);

#endif
