/* HTTP for probes and people: /metrics (Prometheus), /healthz, /readyz, and / for a look.
 *
 * Read-only, without passwords; connections and their time are bounded. It has a thread of its
 * own, which reads the metrics and nothing else of the node. */
#ifndef FB_NODE_HTTP_H
#define FB_NODE_HTTP_H

#include "pool/node/metric.h"

struct fb_http;

/* address  host:port or unix:/path; port 0 takes any free one
 * metrics  borrowed until fb_http_stop */
enum fb_status fb_http_start(const char *address, const struct fb_metrics *metrics,
                             struct fb_http **ret_http, struct fb_error *error);

/* Ends the thread and all connections. NULL is allowed. */
void fb_http_stop(struct fb_http *http);

/* The port it listens on; 0 for a unix socket. */
uint16_t fb_http_port(const struct fb_http *http);

#endif
