/* A gRPC server for the control plane, over the gRPC C core.
 *
 * One thread drives it and calls the handlers, which must not block: a handler starts the work and
 * returns. The call then belongs to whom the handler gives it, and ends when that one calls
 * fb_rpc_reply or fb_rpc_finish, once, from any thread, also when the peer is gone or the server
 * is: until then the pointer is good. A unary method replies; a stream sends and then finishes.
 *
 * Messages, calls in progress and what waits to be sent are bounded, so that a peer that does not
 * read costs a bounded amount of memory. The standard health service is built in. */
#ifndef FB_TRANSPORT_GRPC_SERVER_H
#define FB_TRANSPORT_GRPC_SERVER_H

#include "proto/status.h"

#include <stddef.h>

struct fb_rpc_call;
struct fb_rpc_server;

/* start     takes the call; request is borrowed until it returns
 * canceled  may be NULL. Told once when the peer has gone, given up or timed out, or the server
 *           ends, before the call's end by its owner. Meanwhile the owner may be ending it: hence
 *           an id, which is never used twice */
struct fb_rpc_method {
    const char *path; /* such as "/forebay.v1.Admin/Status" */
    void (*start)(struct fb_rpc_call *call, const uint8_t *request, size_t bytes, void *context);
    void (*canceled)(uint64_t call_id, void *context);
};

/* All borrowed until the server is destroyed. */
struct fb_rpc_server_options {
    const char *address; /* host:port (0: any free one), [ipv6]:port or unix:/path */
    const struct fb_rpc_method *methods;
    size_t method_count;
    void *context; /* of the handlers */
};

enum fb_status fb_rpc_server_create(const struct fb_rpc_server_options *options,
                                    struct fb_rpc_server **ret_server, struct fb_error *error);

/* Refuse new calls, let those in progress end for grace_ms, cancel the rest. Handlers may be
 * called until it returns, never after. NULL is allowed. */
void fb_rpc_server_destroy(struct fb_rpc_server *server, uint32_t grace_ms);

/* What the health service answers, and tells its watchers. At first: not serving. */
void fb_rpc_server_set_health(struct fb_rpc_server *server, bool serving);

/* The port it listens on; 0 for a unix socket. */
uint16_t fb_rpc_server_port(const struct fb_rpc_server *server);

uint64_t fb_rpc_call_id(const struct fb_rpc_call *call);

/* Send the one message of a unary call and end it with FB_OK. The message is copied. */
void fb_rpc_reply(struct fb_rpc_call *call, const uint8_t *message, size_t bytes);

/* Send one more message of a stream; it is copied.
 * returns  FB_OK queued | FB_AGAIN the peer reads too slowly: nothing was queued |
 *          FB_ELIMIT too large a message | FB_ECANCELED the peer is gone: finish the call */
enum fb_status fb_rpc_send(struct fb_rpc_call *call, const uint8_t *message, size_t bytes);

/* End a call once what was queued is sent.
 * text  for the peer; NULL: the words of the status */
void fb_rpc_finish(struct fb_rpc_call *call, enum fb_status status, const char *text);

#endif
