/* forebayd: the daemon of a host. */
#include "pool/node/admin.h"
#include "pool/node/http.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

struct daemon {
    struct fb_config config;
    struct fb_log log;
    struct fb_metrics *metrics;
    struct fb_reactor *reactor;
    struct fb_admin *admin;
    struct fb_http *http;
    struct fb_source signals;
    int signal_fd;
};

/* Physical memory, or what a cgroup leaves of it. */
static uint64_t memory_bytes(void)
{
    uint64_t bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    FILE *file = fopen("/sys/fs/cgroup/memory.max", "re");
    unsigned long long limit;

    if (file) {
        if (fscanf(file, "%llu", &limit) == 1 && limit < bytes) {
            bytes = limit;
        }
        fclose(file);
    }
    return bytes;
}

/* The first signal drains, a second one ends at once. */
static void on_signal(struct fb_source *source)
{
    struct daemon *d = source->owner;
    struct signalfd_siginfo info;

    while (read(d->signal_fd, &info, sizeof(info)) == sizeof(info)) {
        fb_log(&d->log, FB_LOG_INFO, "signal", FB_KV_U64("number", info.ssi_signo));
        fb_reactor_drain(d->reactor, d->config.drain_ns);
    }
}

static enum fb_status watch_signals(struct daemon *d, struct fb_error *error)
{
    sigset_t set;

    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    d->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    d->signals = (struct fb_source){.ready = on_signal, .owner = d};
    if (d->signal_fd < 0) {
        return fb_error_set(error, FB_EIO, "signalfd: %s", strerror(errno));
    }
    return fb_reactor_watch(d->reactor, d->signal_fd, &d->signals);
}

/* Before any thread starts, so that all of them leave these signals to the reactor. */
static void block_signals(void)
{
    sigset_t set;

    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigprocmask(SIG_BLOCK, &set, NULL);
    signal(SIGPIPE, SIG_IGN);
}

static enum fb_status start(struct daemon *d, struct fb_error *error)
{
    enum fb_status status = fb_metrics_create(FOREBAY_VERSION, &d->metrics);
    struct fb_reactor_options options = {.config = &d->config, .log = d->log};

    if (status != FB_OK) {
        return fb_error_set(error, status, "out of memory");
    }
    options.metrics = d->metrics;
    status = fb_reactor_create(&options, &d->reactor, error);
    if (status == FB_OK) {
        status = watch_signals(d, error);
    }
    if (status == FB_OK && d->config.grpc_listen[0]) {
        status = fb_admin_create(d->config.grpc_listen, d->reactor, &d->config, d->metrics,
                                 &d->admin, error);
    }
    if (status == FB_OK && d->config.http_listen[0]) {
        status = fb_http_start(d->config.http_listen, d->metrics, &d->http, error);
    }
    return status;
}

static void stop(struct daemon *d)
{
    fb_http_stop(d->http);
    fb_admin_destroy(d->admin);
    fb_reactor_destroy(d->reactor);
    fb_metrics_destroy(d->metrics);
    if (d->signal_fd >= 0) {
        close(d->signal_fd);
    }
}

static int run(struct daemon *d)
{
    struct fb_error error;

    d->log = (struct fb_log){d->config.log_level, d->config.log_format, STDERR_FILENO};
    d->signal_fd = -1;
    block_signals();
    if (fb_config_check(&d->config, memory_bytes(), &error) != FB_OK || start(d, &error) != FB_OK) {
        fb_log(&d->log, FB_LOG_ERROR, "start_failed",
               FB_KV_STR("status", fb_status_name(error.status)), FB_KV_STR("why", error.text));
        stop(d);
        return EXIT_FAILURE;
    }
    fb_log(&d->log, FB_LOG_INFO, "ready", FB_KV_STR("version", FOREBAY_VERSION),
           FB_KV_STR("run_dir", d->config.run_dir), FB_KV_STR("chunk_dir", d->config.chunk_dir),
           FB_KV_U64("host_bytes", d->config.host_bytes), FB_KV_STR("grpc", d->config.grpc_listen),
           FB_KV_STR("http", d->config.http_listen));
    fb_reactor_run(d->reactor);
    stop(d);
    fb_log(&d->log, FB_LOG_INFO, "stopped");
    return EXIT_SUCCESS;
}

int main(int argc, char **argv)
{
    static struct daemon daemon;
    enum fb_config_action action;
    struct fb_error error;

    if (fb_config_load(&daemon.config, argc, argv, &action, &error) != FB_OK) {
        fprintf(stderr, "forebayd: %s\n", error.text);
        return EXIT_FAILURE;
    }
    switch (action) {
    case FB_CONFIG_PRINT: fb_config_print_sample(stdout); return EXIT_SUCCESS;
    case FB_CONFIG_VERSION: printf("forebayd %s\n", FOREBAY_VERSION); return EXIT_SUCCESS;
    case FB_CONFIG_CHECK:
        if (fb_config_check(&daemon.config, memory_bytes(), &error) != FB_OK ||
            fb_node_check_config(&daemon.config, &error) != FB_OK) {
            fprintf(stderr, "forebayd: %s\n", error.text);
            return EXIT_FAILURE;
        }
        printf("the configuration is good\n");
        return EXIT_SUCCESS;
    case FB_CONFIG_RUN: break;
    }
    return run(&daemon);
}
