/* Configuration of a node: values only, so that a struct fb_config is copied and dropped freely.
 *
 * Every option is described once, in the table of config.c: from it come the YAML file, the
 * environment (FOREBAY_HOST_BYTES), the flags (--host-bytes), --help and the sample file. A flag
 * wins over the environment, that over the file, that over the default. Whatever an option says
 * wrong is refused with its place, its name, what was given and what was expected.
 *
 * Used while a process starts, by one thread. */
#ifndef FB_NODE_CONFIG_H
#define FB_NODE_CONFIG_H

#include "pool/node/log.h"
#include "proto/manifest.h"

#include <stdio.h>

#define FB_CONFIG_TEXT_BYTES 128
#define FB_TENANTS_MAX       100 /* each has a percent at least */

enum fb_huge_pages { FB_HUGE_PAGES_AUTO, FB_HUGE_PAGES_NEVER, FB_HUGE_PAGES_REQUIRE };

struct fb_tenant_config {
    char name[FB_MAX_TENANT_CHARS + 1]; /* of [a-z0-9-] */
    uint32_t share_percent;
};

struct fb_config {
    char run_dir[FB_CONFIG_TEXT_BYTES];
    char chunk_dir[FB_CONFIG_TEXT_BYTES];
    char socket_group[FB_CONFIG_TEXT_BYTES]; /* empty: the daemon's own */
    uint32_t socket_mode;
    uint64_t host_bytes;
    enum fb_huge_pages huge_pages;
    char grpc_listen[FB_CONFIG_TEXT_BYTES]; /* an address, or empty: off */
    char http_listen[FB_CONFIG_TEXT_BYTES]; /* likewise */
    bool listen_remote;
    uint64_t lease_ns;
    uint64_t reserve_ns;
    uint64_t drain_ns;
    uint64_t spin_ns;
    uint32_t client_share_percent;
    uint32_t pin_share_percent;
    uint32_t max_clients;
    char policy[FB_CONFIG_TEXT_BYTES];
    enum fb_log_format log_format;
    enum fb_log_level log_level;
    struct fb_tenant_config tenants[FB_TENANTS_MAX];
    uint32_t tenant_count;
};

/* What the command line asks for. */
enum fb_config_action {
    FB_CONFIG_RUN,
    FB_CONFIG_CHECK,   /* --check-config: say whether the configuration is good, and end */
    FB_CONFIG_PRINT,   /* --print-config: fb_config_print_sample, and end */
    FB_CONFIG_VERSION, /* --version */
};

/* The defaults. */
void fb_config_init(struct fb_config *config);

/* Set one option from text, as the environment and flags do.
 * name  as in the file, such as "host_bytes" */
enum fb_status fb_config_set(struct fb_config *config, const char *name, const char *value,
                             struct fb_error *error);

/* Take the options that a YAML file has. On an error config is half changed. */
enum fb_status fb_config_load_file(struct fb_config *config, const char *path,
                                   struct fb_error *error);

/* Take the options that FOREBAY_* variables of the environment have. Other variables of that
 * prefix are left to others. */
enum fb_status fb_config_load_env(struct fb_config *config, struct fb_error *error);

/* All of it: defaults, the file that --config or FOREBAY_CONFIG names, environment, flags. For
 * --print-config and --version nothing is loaded. --help and unknown flags print and end the
 * process, as argp does. */
enum fb_status fb_config_load(struct fb_config *config, int argc, char **argv,
                              enum fb_config_action *ret_action, struct fb_error *error);

/* What no option can know alone: the tier against the machine's memory, addresses against
 * listen_remote.
 * memory_bytes  physical memory of this machine, or what a cgroup leaves of it */
enum fb_status fb_config_check(const struct fb_config *config, uint64_t memory_bytes,
                               struct fb_error *error);

/* A commented YAML file that says the defaults. */
void fb_config_print_sample(FILE *out);

/* Where to listen or connect: host:port, [ipv6]:port or unix:/path. */
struct fb_address {
    bool is_unix;
    bool is_local;                   /* a unix socket or a loopback address: this machine only */
    uint16_t port;                   /* 0: any free one */
    char host[FB_CONFIG_TEXT_BYTES]; /* or the path */
};

/* returns  FB_OK | FB_EINVAL */
enum fb_status fb_address_parse(const char *text, struct fb_address *ret_address);

#endif
