/* Lines are built in a fixed buffer by appenders that do nothing once the buffer is full; a pair
 * that filled it is taken back whole, so that a line is well formed whatever its values are. */
#include "pool/node/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LINE_BYTES 4096 /* what a pipe takes without mixing (PIPE_BUF) */
#define TAIL_BYTES 16   /* kept free for the end of the line */

struct line {
    enum fb_log_format format;
    bool full;
    size_t length;
    size_t limit;
    char text[LINE_BYTES];
};

static const char *const level_names[] = {"error", "warn", "info", "debug"};

static void line_put(struct line *line, const char *s, size_t n)
{
    if (line->full || n > line->limit - line->length) {
        line->full = true;
        return;
    }
    memcpy(line->text + line->length, s, n);
    line->length += n;
}

static void line_puts(struct line *line, const char *s)
{
    line_put(line, s, strlen(s));
}

__attribute__((format(printf, 2, 3))) static void line_printf(struct line *line, const char *format,
                                                              ...)
{
    char buffer[64];
    va_list args;

    va_start(args, format);
    vsnprintf(buffer, sizeof(buffer), format, args);
    va_end(args);
    line_puts(line, buffer);
}

/* Length of the well-formed UTF-8 sequence of two bytes or more that starts s, or 0. */
static size_t utf8_length(const unsigned char *s)
{
    size_t n = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;

    if (s[0] < 0xc2 || s[0] > 0xf4) {
        return 0;
    }
    for (size_t i = 1; i < n; i++) {
        if ((s[i] & 0xc0) != 0x80) { /* a terminating zero ends up here, too */
            return 0;
        }
    }
    /* overlong forms, surrogates, beyond U+10FFFF */
    if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f) ||
        (s[0] == 0xf0 && s[1] < 0x90) || (s[0] == 0xf4 && s[1] > 0x8f)) {
        return 0;
    }
    return n;
}

/* Quoted by the rules of JSON, which readers of logfmt understand as well. */
static void line_put_quoted(struct line *line, const char *s)
{
    const unsigned char *p = (const unsigned char *)s;

    line_puts(line, "\"");
    while (*p && !line->full) {
        size_t n = *p < 0x80 ? 1 : utf8_length(p);

        if (*p == '"' || *p == '\\') {
            line_printf(line, "\\%c", *p);
        } else if (*p == '\n') {
            line_puts(line, "\\n");
        } else if (*p < 0x20 || *p == 0x7f) {
            line_printf(line, "\\u%04x", *p);
        } else if (n == 0) {
            line_puts(line, "\\ufffd");
        } else {
            line_put(line, (const char *)p, n);
        }
        p += n ? n : 1;
    }
    line_puts(line, "\"");
}

/* Whether logfmt can carry s without quotes. */
static bool is_bare(const char *s)
{
    if (!*s) {
        return false;
    }
    for (; *s; s++) {
        if (*s <= ' ' || *s >= 0x7f || *s == '"' || *s == '=' || *s == '\\') {
            return false;
        }
    }
    return true;
}

static void line_put_string(struct line *line, const char *s)
{
    s = s ? s : "";
    if (line->format == FB_LOG_LOGFMT && is_bare(s)) {
        line_puts(line, s);
    } else {
        line_put_quoted(line, s);
    }
}

static void line_put_hex(struct line *line, const uint8_t *data, size_t bytes)
{
    const char *quote = line->format == FB_LOG_JSON ? "\"" : "";

    line_puts(line, quote);
    for (size_t i = 0; i < bytes && !line->full; i++) {
        line_printf(line, "%02x", data[i]);
    }
    line_puts(line, quote);
}

static void line_put_key(struct line *line, const char *key)
{
    if (line->format == FB_LOG_JSON) {
        line_printf(line, "%s\"", line->length ? "," : "{");
        line_puts(line, key);
        line_puts(line, "\":");
    } else {
        line_puts(line, line->length ? " " : "");
        line_puts(line, key);
        line_puts(line, "=");
    }
}

static void line_put_value(struct line *line, const struct fb_kv *pair)
{
    switch (pair->type) {
    case FB_KV_TYPE_STR: line_put_string(line, pair->value.str); break;
    case FB_KV_TYPE_U64: line_printf(line, "%llu", (unsigned long long)pair->value.u64); break;
    case FB_KV_TYPE_I64: line_printf(line, "%lld", (long long)pair->value.i64); break;
    case FB_KV_TYPE_BOOL: line_puts(line, pair->value.flag ? "true" : "false"); break;
    case FB_KV_TYPE_HEX: line_put_hex(line, pair->value.hex.data, pair->value.hex.bytes); break;
    case FB_KV_TYPE_END: break;
    }
}

/* Add a pair whole or not at all. */
static bool line_put_pair(struct line *line, const struct fb_kv *pair)
{
    size_t before = line->length;

    line_put_key(line, pair->key);
    line_put_value(line, pair);
    if (line->full) {
        line->length = before;
        line->full = false;
        return false;
    }
    return true;
}

static void line_put_time(struct line *line)
{
    struct timespec now;
    struct tm utc;
    char text[40];
    size_t n;

    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    n = strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%S", &utc);
    snprintf(text + n, sizeof(text) - n, ".%03dZ", (int)(now.tv_nsec / 1000000));
    line_put_pair(line, &(struct fb_kv)FB_KV_STR("ts", text));
}

void fb_log_write(const struct fb_log *log, enum fb_log_level level, const struct fb_kv *pairs)
{
    struct line line;
    bool whole = true;

    line.format = log->format;
    line.full = false;
    line.length = 0;
    line.limit = LINE_BYTES - TAIL_BYTES;
    line_put_time(&line);
    line_put_pair(&line, &(struct fb_kv)FB_KV_STR("level", level_names[level]));
    for (; pairs->type != FB_KV_TYPE_END; pairs++) {
        whole &= line_put_pair(&line, pairs);
    }
    line.limit = LINE_BYTES;
    if (!whole) {
        line_put_pair(&line, &(struct fb_kv)FB_KV_BOOL("cut", true));
    }
    line_puts(&line, log->format == FB_LOG_JSON ? "}\n" : "\n");
    while (write(log->fd, line.text, line.length) < 0 && errno == EINTR) {
    }
}

bool fb_log_limit_pass(struct fb_log_limit *limit, uint64_t now_ns, uint64_t *ret_held_back)
{
    uint64_t next = atomic_load_explicit(&limit->next_ns, memory_order_relaxed);

    if (now_ns < next || !atomic_compare_exchange_strong_explicit(
                             &limit->next_ns, &next, now_ns + limit->interval_ns,
                             memory_order_relaxed, memory_order_relaxed)) {
        atomic_fetch_add_explicit(&limit->held_back, 1, memory_order_relaxed);
        return false;
    }
    *ret_held_back = atomic_exchange_explicit(&limit->held_back, 0, memory_order_relaxed);
    return true;
}
