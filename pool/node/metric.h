/* Counters, gauges and histograms of one node, in Prometheus' terms.
 *
 * metrics.def describes them once; identifiers, storage, exposition and the reference page follow
 * from it. Values are relaxed atomics: any thread may change and read any metric, and nothing is
 * ordered by them. A histogram's count is the sum of its buckets, so that one exposition agrees
 * with itself. */
#ifndef FB_NODE_METRIC_H
#define FB_NODE_METRIC_H

#include "proto/status.h"

#include <stdio.h>

enum fb_metric {
#define METRIC(id, name, kind, unit, labels, help) FB_METRIC_##id,
#include "pool/node/metrics.def"
#undef METRIC
    FB_METRIC_COUNT
};

struct fb_metrics;

/* version  label of forebay_build_info; copied, cut at 63 bytes */
enum fb_status fb_metrics_create(const char *version, struct fb_metrics **ret_metrics);
void fb_metrics_destroy(struct fb_metrics *metrics);

/* A counter goes up. */
void fb_metrics_add(struct fb_metrics *metrics, enum fb_metric id, uint64_t n);

/* A gauge is replaced. */
void fb_metrics_set(struct fb_metrics *metrics, enum fb_metric id, uint64_t value);

/* A histogram of seconds takes one duration. */
void fb_metrics_observe(struct fb_metrics *metrics, enum fb_metric id, uint64_t ns);

/* Value of a counter or gauge; count of a histogram. */
uint64_t fb_metrics_value(const struct fb_metrics *metrics, enum fb_metric id);

/* Text exposition, format 0.0.4. */
void fb_metrics_print(const struct fb_metrics *metrics, FILE *out);

/* Reference page: a Markdown table of all metrics. */
void fb_metrics_print_reference(FILE *out);

#endif
