/* Storage and printing of the metrics that metrics.def describes. */
#include "pool/node/metric.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum kind { COUNTER, GAUGE, HISTOGRAM, INFO };

struct row {
    const char *name;
    enum kind kind;
    const char *unit;
    const char *labels;
    const char *help;
};

static const struct row rows[FB_METRIC_COUNT] = {
#define METRIC(id, name, kind, unit, labels, help) \
    [FB_METRIC_##id] = {name, kind, unit, labels, help},
#include "pool/node/metrics.def"
#undef METRIC
};

static const char *const kind_names[] = {"counter", "gauge", "histogram", "gauge"};

/* Upper bounds of the buckets; one more bucket takes what is above the last. */
static const uint64_t bounds_ns[] = {1000,       2000,       5000,       /* 1 us */
                                     10000,      20000,      50000,      /**/
                                     100000,     200000,     500000,     /**/
                                     1000000,    2000000,    5000000,    /* 1 ms */
                                     10000000,   20000000,   50000000,   /**/
                                     100000000,  200000000,  500000000,  /**/
                                     1000000000, 2000000000, 5000000000, /* 1 s */
                                     10000000000};

#define BOUNDS (sizeof(bounds_ns) / sizeof(bounds_ns[0]))

struct histogram {
    _Atomic uint64_t buckets[BOUNDS + 1];
    _Atomic uint64_t sum_ns;
};

/* One cell of each kind per metric: the unused ones cost a few kilobytes and no second table. */
struct fb_metrics {
    char version[64];
    _Atomic uint64_t values[FB_METRIC_COUNT];
    struct histogram histograms[FB_METRIC_COUNT];
};

enum fb_status fb_metrics_create(const char *version, struct fb_metrics **ret_metrics)
{
    struct fb_metrics *metrics = calloc(1, sizeof(*metrics));

    if (!metrics) {
        return FB_ENOMEM;
    }
    snprintf(metrics->version, sizeof(metrics->version), "%s", version);
    metrics->values[FB_METRIC_BUILD_INFO] = 1;
    *ret_metrics = metrics;
    return FB_OK;
}

void fb_metrics_destroy(struct fb_metrics *metrics)
{
    free(metrics);
}

void fb_metrics_add(struct fb_metrics *metrics, enum fb_metric id, uint64_t n)
{
    atomic_fetch_add_explicit(&metrics->values[id], n, memory_order_relaxed);
}

void fb_metrics_set(struct fb_metrics *metrics, enum fb_metric id, uint64_t value)
{
    atomic_store_explicit(&metrics->values[id], value, memory_order_relaxed);
}

void fb_metrics_observe(struct fb_metrics *metrics, enum fb_metric id, uint64_t ns)
{
    struct histogram *h = &metrics->histograms[id];
    size_t i = 0;

    while (i < BOUNDS && ns > bounds_ns[i]) {
        i++;
    }
    atomic_fetch_add_explicit(&h->buckets[i], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&h->sum_ns, ns, memory_order_relaxed);
}

uint64_t fb_metrics_value(const struct fb_metrics *metrics, enum fb_metric id)
{
    uint64_t count = 0;

    if (rows[id].kind != HISTOGRAM) {
        return atomic_load_explicit(&metrics->values[id], memory_order_relaxed);
    }
    for (size_t i = 0; i <= BOUNDS; i++) {
        count += atomic_load_explicit(&metrics->histograms[id].buckets[i], memory_order_relaxed);
    }
    return count;
}

/* Help texts escape backslash and newline; label values the double quote as well. */
static void print_escaped(FILE *out, const char *s, const char *special)
{
    for (; *s; s++) {
        if (*s == '\n') {
            fputs("\\n", out);
        } else {
            fprintf(out, "%s%c", strchr(special, *s) ? "\\" : "", *s);
        }
    }
}

static void print_histogram(const struct histogram *h, const char *name, FILE *out)
{
    uint64_t sum_ns = atomic_load_explicit(&h->sum_ns, memory_order_relaxed);
    uint64_t count = 0;

    for (size_t i = 0; i < BOUNDS; i++) {
        count += atomic_load_explicit(&h->buckets[i], memory_order_relaxed);
        fprintf(out, "%s_bucket{le=\"%g\"} %" PRIu64 "\n", name, (double)bounds_ns[i] / 1e9, count);
    }
    count += atomic_load_explicit(&h->buckets[BOUNDS], memory_order_relaxed);
    fprintf(out, "%s_bucket{le=\"+Inf\"} %" PRIu64 "\n", name, count);
    fprintf(out, "%s_sum %" PRIu64 ".%09" PRIu64 "\n", name, sum_ns / 1000000000,
            sum_ns % 1000000000);
    fprintf(out, "%s_count %" PRIu64 "\n", name, count);
}

void fb_metrics_print(const struct fb_metrics *metrics, FILE *out)
{
    for (size_t i = 0; i < FB_METRIC_COUNT; i++) {
        const struct row *row = &rows[i];

        fprintf(out, "# HELP %s ", row->name);
        print_escaped(out, row->help, "\\");
        fprintf(out, "\n# TYPE %s %s\n", row->name, kind_names[row->kind]);
        if (row->kind == HISTOGRAM) {
            print_histogram(&metrics->histograms[i], row->name, out);
            continue;
        }
        fputs(row->name, out);
        if (row->kind == INFO) {
            fprintf(out, "{%s=\"", row->labels);
            print_escaped(out, metrics->version, "\\\"");
            fputs("\"}", out);
        }
        fprintf(out, " %" PRIu64 "\n", fb_metrics_value(metrics, (enum fb_metric)i));
    }
}

void fb_metrics_print_reference(FILE *out)
{
    fputs("| metric | kind | unit | labels | meaning |\n|---|---|---|---|---|\n", out);
    for (size_t i = 0; i < FB_METRIC_COUNT; i++) {
        fprintf(out, "| `%s` | %s | %s | %s | %s |\n", rows[i].name, kind_names[rows[i].kind],
                rows[i].unit, rows[i].labels, rows[i].help);
    }
}
