/* Output: formatting, tables, JSON, progress. */
#include "pool/command/output.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SECOND_NS UINT64_C(1000000000)

struct scale {
    double factor;
    const char *name;
};

/* Ascending, so that the last one that fits is taken. */
static const struct scale byte_scales[] = {
    {1, "B"}, {1024.0, "KiB"}, {1048576.0, "MiB"}, {1073741824.0, "GiB"}, {1099511627776.0, "TiB"}};
static const struct scale ns_scales[] = {{1, "ns"}, {1e3, "us"}, {1e6, "ms"}, {1e9, "s"}};

static void format_scaled(uint64_t value, const struct scale *scales, size_t count, char *out)
{
    size_t i = count - 1;

    while (i > 0 && (double)value < scales[i].factor) {
        i--;
    }
    snprintf(out, FB_TEXT_BYTES, "%.*f %s", i > 0 ? 1 : 0, (double)value / scales[i].factor,
             scales[i].name);
}

void fb_field_format(const struct fb_field *field, char *out)
{
    switch (field->unit) {
    case FB_UNIT_TEXT: snprintf(out, FB_TEXT_BYTES, "%s", field->text); break;
    case FB_UNIT_BOOL: snprintf(out, FB_TEXT_BYTES, "%s", field->count ? "yes" : "no"); break;
    case FB_UNIT_COUNT: snprintf(out, FB_TEXT_BYTES, "%" PRIu64, field->count); break;
    case FB_UNIT_BYTES:
        format_scaled(field->count, byte_scales, FB_COUNT_OF(byte_scales), out);
        break;
    case FB_UNIT_NS: format_scaled(field->count, ns_scales, FB_COUNT_OF(ns_scales), out); break;
    case FB_UNIT_SHARE: snprintf(out, FB_TEXT_BYTES, "%.1f %%", field->real * 100); break;
    case FB_UNIT_TIMES: snprintf(out, FB_TEXT_BYTES, "%.2f x", field->real); break;
    case FB_UNIT_GBPS: snprintf(out, FB_TEXT_BYTES, "%.2f GB/s", field->real); break;
    }
}

void fb_fields_print(const struct fb_field *fields, size_t count)
{
    char text[FB_TEXT_BYTES];
    size_t width = 0;

    for (size_t i = 0; i < count; i++) {
        size_t chars = strlen(fields[i].label);

        width = chars > width ? chars : width;
    }
    for (size_t i = 0; i < count; i++) {
        const char *value = fields[i].text;

        if (fields[i].unit != FB_UNIT_TEXT) {
            fb_field_format(&fields[i], text);
            value = text;
        }
        printf("%-*s  %s\n", (int)width, fields[i].label, value);
    }
}

/* Words to the left, figures to the right. */
static void print_cell(const char *text, enum fb_unit unit, size_t width, bool is_last)
{
    int chars = (int)width;

    printf("%*s%s",
           unit > FB_UNIT_BOOL ? chars
           : is_last           ? 0
                               : -chars,
           text, is_last ? "\n" : "  ");
}

static size_t column_width(const struct fb_field *fields, size_t rows, size_t columns, size_t c)
{
    size_t width = strlen(fields[c].label);

    for (size_t r = 0; r < rows; r++) {
        char text[FB_TEXT_BYTES];
        size_t chars;

        fb_field_format(&fields[r * columns + c], text);
        chars = strlen(text);
        width = chars > width ? chars : width;
    }
    return width;
}

void fb_table_print(const struct fb_field *fields, size_t rows, size_t columns)
{
    size_t *widths = calloc(columns, sizeof(*widths));

    if (!widths || rows == 0) {
        free(widths);
        return;
    }
    for (size_t c = 0; c < columns; c++) {
        widths[c] = column_width(fields, rows, columns, c);
        print_cell(fields[c].label, fields[c].unit, widths[c], c + 1 == columns);
    }
    for (size_t i = 0; i < rows * columns; i++) {
        size_t c = i % columns;
        char text[FB_TEXT_BYTES];

        fb_field_format(&fields[i], text);
        print_cell(text, fields[i].unit, widths[c], c + 1 == columns);
    }
    free(widths);
}

static json_t *field_json(const struct fb_field *field)
{
    switch (field->unit) {
    case FB_UNIT_TEXT: return json_string(field->text);
    case FB_UNIT_BOOL: return json_boolean(field->count);
    case FB_UNIT_SHARE:
    case FB_UNIT_TIMES:
    case FB_UNIT_GBPS: return json_real(field->real);
    default: return json_integer((json_int_t)field->count);
    }
}

json_t *fb_fields_json(const struct fb_field *fields, size_t count)
{
    json_t *object = json_object();

    for (size_t i = 0; i < count; i++) {
        if (json_object_set_new(object, fields[i].key, field_json(&fields[i])) < 0) {
            json_decref(object);
            return NULL;
        }
    }
    return object;
}

void fb_json_print(json_t *object, bool compact)
{
    size_t flags = JSON_REAL_PRECISION(9) | (compact ? JSON_COMPACT : JSON_INDENT(2));

    if (json_dumpf(object, stdout, flags) < 0) {
        fb_fail("cannot write JSON: out of memory or output closed");
    }
    putchar('\n');
    json_decref(object);
}

void fb_fields_show(const struct fb_field *fields, size_t count, bool json)
{
    if (json) {
        fb_json_print(fb_fields_json(fields, count), false);
    } else {
        fb_fields_print(fields, count);
    }
}

int fb_fail(const char *format, ...)
{
    va_list args;

    fflush(stdout);
    fputs("forebay: ", stderr);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    return EXIT_FAILURE;
}

void fb_hex_format(const uint8_t *data, size_t bytes, char *out)
{
    for (size_t i = 0; i < bytes; i++) {
        snprintf(out + 2 * i, 3, "%02x", data[i]);
    }
    out[2 * bytes] = 0;
}

bool fb_hex_parse(const char *text, uint8_t *out, size_t bytes)
{
    if (strlen(text) != 2 * bytes || strspn(text, "0123456789abcdefABCDEF") != 2 * bytes) {
        return false;
    }
    for (size_t i = 0; i < bytes; i++) {
        char digits[3] = {text[2 * i], text[2 * i + 1], 0};

        out[i] = (uint8_t)strtoul(digits, NULL, 16);
    }
    return true;
}

uint64_t fb_now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * SECOND_NS + (uint64_t)t.tv_nsec;
}

void fb_progress_init(struct fb_progress *p, bool quiet)
{
    uint64_t now = fb_now_ns();
    bool is_terminal = isatty(STDERR_FILENO);

    *p = (struct fb_progress){
        .quiet = quiet,
        .is_terminal = is_terminal,
        .started_ns = now,
        .next_ns = now + (is_terminal ? 1 : 5) * SECOND_NS,
    };
}

void fb_progress_show(struct fb_progress *p, const char *format, ...)
{
    uint64_t now = fb_now_ns();
    va_list args;

    if (p->quiet || now < p->next_ns) {
        return;
    }
    fprintf(stderr, "%s%3" PRIu64 " s  ", p->is_terminal ? "\r\033[K" : "",
            (now - p->started_ns) / SECOND_NS);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    if (!p->is_terminal) {
        fputc('\n', stderr);
    }
    fflush(stderr);
    p->shown = p->is_terminal;
    p->next_ns = now + (p->is_terminal ? SECOND_NS / 5 : 5 * SECOND_NS);
}

void fb_progress_end(struct fb_progress *p)
{
    if (p->shown) {
        fputs("\r\033[K", stderr);
        p->shown = false;
    }
}
