/* Status names and texts, one table. */
#include "proto/status.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

struct status_row {
    enum fb_status status;
    const char *name;
    const char *text;
};

#define ROW(code, words)   \
    {                      \
        code, #code, words \
    }

static const struct status_row rows[] = {
    ROW(FB_OK, "ok"),
    ROW(FB_MISS, "not in the pool"),
    ROW(FB_AGAIN, "no room or not ready now, try again later"),
    ROW(FB_EXISTS, "already in the pool"),
    ROW(FB_BUSY, "being written by another client"),
    ROW(FB_EINVAL, "invalid argument"),
    ROW(FB_EGEOMETRY, "impossible block geometry"),
    ROW(FB_ELIMIT, "over a declared limit"),
    ROW(FB_ENOENT, "no such object"),
    ROW(FB_ESTATE, "not possible in this state"),
    ROW(FB_EPERM, "belongs to another client or tenant"),
    ROW(FB_ENOMEM, "out of memory"),
    ROW(FB_ETIMEDOUT, "deadline passed"),
    ROW(FB_ECANCELED, "canceled"),
    ROW(FB_ECORRUPT, "bytes do not match their sum"),
    ROW(FB_ENONFINITE, "NaN or infinity in a row that would be quantized"),
    ROW(FB_EUNSUPPORTED, "not supported here"),
    ROW(FB_ECONN, "connection lost"),
    ROW(FB_EPROTO, "malformed message"),
    ROW(FB_EVERSION, "unsupported version"),
    ROW(FB_EIO, "input or output failed"),
    ROW(FB_EFATAL, "the node cannot go on"),
};

static const struct status_row *find_row(uint32_t v)
{
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        if ((uint32_t)rows[i].status == v) {
            return &rows[i];
        }
    }
    return NULL;
}

const char *fb_status_name(enum fb_status status)
{
    const struct status_row *row = find_row(status);
    return row ? row->name : "FB_UNKNOWN";
}

const char *fb_status_text(enum fb_status status)
{
    const struct status_row *row = find_row(status);
    return row ? row->text : "unknown status";
}

bool fb_status_valid(uint32_t v)
{
    return find_row(v) != NULL;
}

enum fb_status fb_error_set(struct fb_error *error, enum fb_status status, const char *format, ...)
{
    if (error) {
        va_list args;

        error->status = status;
        va_start(args, format);
        vsnprintf(error->text, sizeof(error->text), format, args);
        va_end(args);
    }
    return status;
}
