/* What the command prints: fields described once, as a table for people or as JSON.
 *
 * A key names its unit where it has one ("get_p50_ns"); people see the label and a rounded figure.
 * Errors and progress go to stderr, results to stdout. */
#ifndef FB_COMMAND_OUTPUT_H
#define FB_COMMAND_OUTPUT_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum fb_unit {
    FB_UNIT_TEXT,
    FB_UNIT_BOOL,
    FB_UNIT_COUNT,
    FB_UNIT_BYTES,
    FB_UNIT_NS,
    FB_UNIT_SHARE, /* 0 to 1, shown in percent */
    FB_UNIT_TIMES, /* a factor */
    FB_UNIT_GBPS,  /* 10^9 bytes a second */
};

struct fb_field {
    const char *key;
    const char *label;
    enum fb_unit unit;
    const char *text; /* TEXT; borrowed */
    uint64_t count;   /* BOOL, COUNT, BYTES, NS */
    double real;      /* SHARE, TIMES, GBPS */
};

#define FB_FIELD_TEXT(k, l, v)                                      \
    {                                                               \
        .key = (k), .label = (l), .unit = FB_UNIT_TEXT, .text = (v) \
    }
#define FB_FIELD_BOOL(k, l, v)                                       \
    {                                                                \
        .key = (k), .label = (l), .unit = FB_UNIT_BOOL, .count = (v) \
    }
#define FB_FIELD_COUNT(k, l, v)                                       \
    {                                                                 \
        .key = (k), .label = (l), .unit = FB_UNIT_COUNT, .count = (v) \
    }
#define FB_FIELD_BYTES(k, l, v)                                       \
    {                                                                 \
        .key = (k), .label = (l), .unit = FB_UNIT_BYTES, .count = (v) \
    }
#define FB_FIELD_NS(k, l, v)                                       \
    {                                                              \
        .key = (k), .label = (l), .unit = FB_UNIT_NS, .count = (v) \
    }
#define FB_FIELD_SHARE(k, l, v)                                      \
    {                                                                \
        .key = (k), .label = (l), .unit = FB_UNIT_SHARE, .real = (v) \
    }
#define FB_FIELD_TIMES(k, l, v)                                      \
    {                                                                \
        .key = (k), .label = (l), .unit = FB_UNIT_TIMES, .real = (v) \
    }
#define FB_FIELD_GBPS(k, l, v)                                      \
    {                                                               \
        .key = (k), .label = (l), .unit = FB_UNIT_GBPS, .real = (v) \
    }

#define FB_COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

/* A field's value for a person, into out [FB_TEXT_BYTES]. */
#define FB_TEXT_BYTES 64
void fb_field_format(const struct fb_field *field, char *out);

/* One field a line: label, value. */
void fb_fields_print(const struct fb_field *fields, size_t count);

/* A table: fields [rows, columns], with the labels of the first row on top. */
void fb_table_print(const struct fb_field *fields, size_t rows, size_t columns);

/* An object of the fields, for json_decref; NULL when out of memory. */
json_t *fb_fields_json(const struct fb_field *fields, size_t count);

/* Write an object and a line end, then drop it. */
void fb_json_print(json_t *object, bool compact);

/* Fields in the form that was asked for. */
void fb_fields_show(const struct fb_field *fields, size_t count, bool json);

/* Write "forebay: ..." to stderr. returns 1, the exit status */
int fb_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Bytes as lower-case hex, into out [2 * bytes + 1]; and back: false unless exactly that. */
void fb_hex_format(const uint8_t *data, size_t bytes, char *out);
bool fb_hex_parse(const char *text, uint8_t *out, size_t bytes);

uint64_t fb_now_ns(void); /* monotonic */

/* Progress: nothing in the first second; then a line rewritten where stderr is a terminal, else a
 * line every five seconds. */
struct fb_progress {
    bool quiet;
    bool is_terminal;
    bool shown; /* a line waits to be rewritten */
    uint64_t started_ns;
    uint64_t next_ns;
};

void fb_progress_init(struct fb_progress *p, bool quiet);
void fb_progress_show(struct fb_progress *p, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
void fb_progress_end(struct fb_progress *p);

#endif
