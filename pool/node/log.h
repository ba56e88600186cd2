/* One log line per event, as logfmt or JSON.
 *
 * A line has a time, a level, an event and typed pairs; it is built on the stack and leaves in one
 * write(2), so that threads need no lock and lines do not mix. A pair that does not fit is left
 * out, and `cut=true` ends the line. Nothing allocates. Any thread may log.
 *
 *     fb_log(&log, FB_LOG_INFO, "drained", FB_KV_U64("blocks", n), FB_KV_STR("tenant", name)); */
#ifndef FB_NODE_LOG_H
#define FB_NODE_LOG_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum fb_log_level { FB_LOG_ERROR, FB_LOG_WARN, FB_LOG_INFO, FB_LOG_DEBUG };
enum fb_log_format { FB_LOG_LOGFMT, FB_LOG_JSON };

/* fd is borrowed. */
struct fb_log {
    enum fb_log_level level;
    enum fb_log_format format;
    int fd;
};

enum fb_kv_type {
    FB_KV_TYPE_END,
    FB_KV_TYPE_STR,
    FB_KV_TYPE_U64,
    FB_KV_TYPE_I64,
    FB_KV_TYPE_BOOL,
    FB_KV_TYPE_HEX
};

/* Keys are [a-z0-9_]+ and written as they are. Values are borrowed. */
struct fb_kv {
    enum fb_kv_type type;
    const char *key;
    union {
        const char *str; /* NULL is written as an empty value */
        uint64_t u64;
        int64_t i64;
        bool flag;
        struct {
            const void *data;
            size_t bytes;
        } hex;
    } value;
};

#define FB_KV_STR(name, v)                                      \
    {                                                           \
        .type = FB_KV_TYPE_STR, .key = (name), .value.str = (v) \
    }
#define FB_KV_U64(name, v)                                      \
    {                                                           \
        .type = FB_KV_TYPE_U64, .key = (name), .value.u64 = (v) \
    }
#define FB_KV_I64(name, v)                                      \
    {                                                           \
        .type = FB_KV_TYPE_I64, .key = (name), .value.i64 = (v) \
    }
#define FB_KV_BOOL(name, v)                                       \
    {                                                             \
        .type = FB_KV_TYPE_BOOL, .key = (name), .value.flag = (v) \
    }
#define FB_KV_HEX(name, p, n)                                                            \
    {                                                                                    \
        .type = FB_KV_TYPE_HEX, .key = (name), .value.hex = {.data = (p), .bytes = (n) } \
    }
#define FB_KV_END              \
    {                          \
        .type = FB_KV_TYPE_END \
    }

static inline bool fb_log_wants(const struct fb_log *log, enum fb_log_level level)
{
    return level <= log->level;
}

/* pairs  the event first (a FB_KV_STR), closed by FB_KV_END */
void fb_log_write(const struct fb_log *log, enum fb_log_level level, const struct fb_kv *pairs);

/* Arguments are not evaluated when the level is not wanted. No pairs at all are fine (the comma
 * before ## is GNU C). */
#define fb_log(log, level, event_name, ...)                                                        \
    do {                                                                                           \
        if (fb_log_wants((log), (level))) {                                                        \
            fb_log_write(                                                                          \
                (log), (level),                                                                    \
                (const struct fb_kv[]){FB_KV_STR("event", event_name), ##__VA_ARGS__, FB_KV_END}); \
        }                                                                                          \
    } while (0)

/* Lets one event through per interval and counts the others; kept by the owner of the event
 * site, zeroed apart from interval_ns. */
struct fb_log_limit {
    uint64_t interval_ns;
    _Atomic uint64_t next_ns;
    _Atomic uint64_t held_back;
};

/* ret_held_back  how many were held back since the last that passed; log it as a pair
 * returns        whether this one may be logged */
bool fb_log_limit_pass(struct fb_log_limit *limit, uint64_t now_ns, uint64_t *ret_held_back);

#endif
