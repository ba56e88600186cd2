/* What both ends of the gRPC transport share: the only place where its codes and buffers are
 * translated. Private to transport/grpc_*.c. */
#ifndef FB_TRANSPORT_GRPC_COMMON_H
#define FB_TRANSPORT_GRPC_COMMON_H

#include "proto/status.h"

#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/support/time.h>
#include <stddef.h>
#include <string.h>

#define FB_RPC_MESSAGE_BYTES (4 << 20) /* largest message, either way */

/* The first row with a code translates it back: UNAVAILABLE is what the C core itself says when
 * nobody answers, so again-later travels as ABORTED. */
static const struct fb_rpc_code {
    enum fb_status status;
    grpc_status_code code;
} fb_rpc_codes[] = {
    {FB_OK, GRPC_STATUS_OK},
    {FB_EINVAL, GRPC_STATUS_INVALID_ARGUMENT},
    {FB_EGEOMETRY, GRPC_STATUS_INVALID_ARGUMENT},
    {FB_ENOENT, GRPC_STATUS_NOT_FOUND},
    {FB_MISS, GRPC_STATUS_NOT_FOUND},
    {FB_EXISTS, GRPC_STATUS_ALREADY_EXISTS},
    {FB_EPERM, GRPC_STATUS_PERMISSION_DENIED},
    {FB_EPERM, GRPC_STATUS_UNAUTHENTICATED},
    {FB_ELIMIT, GRPC_STATUS_RESOURCE_EXHAUSTED},
    {FB_ENOMEM, GRPC_STATUS_RESOURCE_EXHAUSTED},
    {FB_ESTATE, GRPC_STATUS_FAILED_PRECONDITION},
    {FB_AGAIN, GRPC_STATUS_ABORTED},
    {FB_BUSY, GRPC_STATUS_ABORTED},
    {FB_ECANCELED, GRPC_STATUS_CANCELLED},
    {FB_ETIMEDOUT, GRPC_STATUS_DEADLINE_EXCEEDED},
    {FB_EUNSUPPORTED, GRPC_STATUS_UNIMPLEMENTED},
    {FB_EVERSION, GRPC_STATUS_UNIMPLEMENTED},
    {FB_ECONN, GRPC_STATUS_UNAVAILABLE},
    {FB_ECORRUPT, GRPC_STATUS_DATA_LOSS},
    {FB_EFATAL, GRPC_STATUS_INTERNAL},
};

#define FB_RPC_CODES (sizeof(fb_rpc_codes) / sizeof(fb_rpc_codes[0]))

static inline grpc_status_code fb_rpc_code_of(enum fb_status status)
{
    for (size_t i = 0; i < FB_RPC_CODES; i++) {
        if (fb_rpc_codes[i].status == status) {
            return fb_rpc_codes[i].code;
        }
    }
    return GRPC_STATUS_INTERNAL;
}

static inline enum fb_status fb_rpc_status_of(grpc_status_code code)
{
    for (size_t i = 0; i < FB_RPC_CODES; i++) {
        if (fb_rpc_codes[i].code == code) {
            return fb_rpc_codes[i].status;
        }
    }
    return FB_EPROTO;
}

/* returns  a buffer with a copy, for grpc_byte_buffer_destroy */
static inline grpc_byte_buffer *fb_rpc_pack(const uint8_t *data, size_t bytes)
{
    grpc_slice slice = grpc_slice_from_copied_buffer((const char *)data, bytes);
    grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(&slice, 1);

    grpc_slice_unref(slice);
    return buffer;
}

/* returns  all of a buffer in one piece, for grpc_slice_unref; empty if it cannot be read */
static inline grpc_slice fb_rpc_unpack(grpc_byte_buffer *buffer)
{
    grpc_slice slice = grpc_empty_slice();
    grpc_byte_buffer_reader reader;

    if (grpc_byte_buffer_reader_init(&reader, buffer)) {
        slice = grpc_byte_buffer_reader_readall(&reader);
        grpc_byte_buffer_reader_destroy(&reader);
    }
    return slice;
}

/* Arguments of channels and servers are mutable pointers in the API and are only read. */
static inline grpc_arg fb_rpc_arg(const char *key, int value)
{
    return (grpc_arg){.type = GRPC_ARG_INTEGER, .key = (char *)key, .value.integer = value};
}

#endif
