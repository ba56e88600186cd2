/* Status codes and the message that goes with one.
 *
 * Codes are grouped by what is lost: nothing, the operation, the connection, the tier, the node.
 * FB_MISS is a result, not an error. FB_AGAIN means that nothing was done or queued. */
#ifndef FB_PROTO_STATUS_H
#define FB_PROTO_STATUS_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum fb_status {
    FB_OK = 0,
    FB_MISS = 1,

    /* the operation is lost */
    FB_AGAIN = 16,   /* no room or not ready now; try again later */
    FB_EXISTS,       /* the block is in the pool already */
    FB_BUSY,         /* somebody else is writing that block */
    FB_EINVAL,       /* an argument is wrong */
    FB_EGEOMETRY,    /* a block shape that overflows or cannot be stored */
    FB_ELIMIT,       /* over a declared limit */
    FB_ENOENT,       /* no such space, lease, reservation or file */
    FB_ESTATE,       /* the object is not in a state that allows this */
    FB_EPERM,        /* it belongs to another client or tenant */
    FB_ENOMEM,       /* out of memory */
    FB_ETIMEDOUT,    /* the deadline passed */
    FB_ECANCELED,    /* given up by its owner */
    FB_ECORRUPT,     /* bytes that do not match their sum */
    FB_ENONFINITE,   /* NaN or infinity where a codec cannot carry it */
    FB_EUNSUPPORTED, /* known, but not built in or not possible here */

    /* the connection is lost */
    FB_ECONN = 64, /* peer gone */
    FB_EPROTO,     /* peer sent something malformed */
    FB_EVERSION,   /* peer speaks a version that this side does not */

    /* the tier is lost */
    FB_EIO = 96,

    /* the node is lost */
    FB_EFATAL = 112,
};

/* Name of a status, such as "FB_AGAIN"; never NULL. */
const char *fb_status_name(enum fb_status status);

/* What a status means, in words for a person; never NULL. */
const char *fb_status_text(enum fb_status status);

/* Whether v is one of the codes above: used on values that came over a wire. */
bool fb_status_valid(uint32_t v);

#define FB_ERROR_TEXT_BYTES 320

/* A status with a message that says what was wrong, what was expected and what to do. */
struct fb_error {
    enum fb_status status;
    char text[FB_ERROR_TEXT_BYTES];
};

/* Fill error (NULL is allowed and ignored) and return status, so that callers can
 * `return fb_error_set(error, FB_EINVAL, "...")`. The text is cut at its capacity. */
enum fb_status fb_error_set(struct fb_error *error, enum fb_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#ifdef __cplusplus
}
#endif
#endif
