/* Starting, watching and ending forebayd for tests. */
#include "tests/integration/daemon.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#define MAX_ARGS     32
#define NEEDED_BYTES (1024ull << 20) /* of /dev/shm; containers often have 64 MiB */

uint64_t clock_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

void nap(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
}

/* --- directories --- */

static const char *chunk_parent(void)
{
    struct statvfs v;

    if (statvfs("/dev/shm", &v) == 0 && (uint64_t)v.f_bavail * v.f_frsize > NEEDED_BYTES) {
        return "/dev/shm";
    }
    return "/tmp";
}

static void remove_tree(const char *path)
{
    DIR *dir = opendir(path);
    struct dirent *entry;
    char child[512];

    while (dir && (entry = readdir(dir))) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) {
            continue;
        }
        snprintf(child, sizeof(child), "%s/%s", path, entry->d_name);
        if (unlink(child) < 0) {
            remove_tree(child);
        }
    }
    if (dir) {
        closedir(dir);
    }
    rmdir(path);
}

void daemon_init(struct daemon *d)
{
    *d = (struct daemon){0};
    snprintf(d->dir, sizeof(d->dir), "/tmp/forebay-test-XXXXXX");
    snprintf(d->chunk_dir, sizeof(d->chunk_dir), "%s/forebay-test-XXXXXX", chunk_parent());
    assert_non_null(mkdtemp(d->dir));
    assert_non_null(mkdtemp(d->chunk_dir));
    snprintf(d->socket, sizeof(d->socket), "%.40s/default/forebay.sock", d->dir);
    snprintf(d->http, sizeof(d->http), "%.40s/http", d->dir);
    snprintf(d->log, sizeof(d->log), "%.40s/log", d->dir);
}

void daemon_fini(struct daemon *d)
{
    if (d->pid) {
        daemon_kill(d);
    }
    remove_tree(d->dir);
    remove_tree(d->chunk_dir);
}

/* --- life --- */

static void exec_daemon(const struct daemon *d, const char *const *flags)
{
    char run_dir[128], chunk_dir[128], http[128];
    const char *args[MAX_ARGS] = {
        FOREBAYD, run_dir, chunk_dir, http, "--grpc-listen=", "--host-bytes=32MiB", "--drain=2s"};
    int n = 7, log_fd = open(d->log, O_WRONLY | O_CREAT | O_APPEND, 0600);

    snprintf(run_dir, sizeof(run_dir), "--run-dir=%s", d->dir);
    snprintf(chunk_dir, sizeof(chunk_dir), "--chunk-dir=%s", d->chunk_dir);
    snprintf(http, sizeof(http), "--http-listen=unix:%s", d->http);
    while (flags && *flags && n + 1 < MAX_ARGS) {
        args[n++] = *flags++;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(log_fd, STDOUT_FILENO);
    dup2(log_fd, STDERR_FILENO);
    execv(FOREBAYD, (char **)(uintptr_t)args);
    dprintf(STDERR_FILENO, "cannot run %s: %s\n", FOREBAYD, strerror(errno));
    _exit(127);
}

void daemon_launch(struct daemon *d, const char *const *flags)
{
    d->flags = flags;
    d->pid = fork();
    assert_true(d->pid >= 0);
    if (d->pid == 0) {
        exec_daemon(d, flags);
    }
}

void daemon_show_log(const struct daemon *d)
{
    char line[1024];
    FILE *file = fopen(d->log, "re");

    while (file && fgets(line, sizeof(line), file)) {
        print_message("  log: %s", line);
    }
    if (file) {
        fclose(file);
    }
}

/* It is ready when its metrics say so: sockets of the one before it may still lie about. */
void daemon_start(struct daemon *d, const char *const *flags)
{
    uint64_t until = clock_ms() + DAEMON_WAIT_MS;

    daemon_launch(d, flags);
    while (daemon_metric(d, "forebay_ready") != 1) {
        if (clock_ms() > until || waitpid(d->pid, NULL, WNOHANG) != 0) {
            daemon_show_log(d);
            fail_msg("forebayd did not start");
        }
        nap();
    }
}

void daemon_restart(struct daemon *d)
{
    daemon_start(d, d->flags);
}

void daemon_signal(const struct daemon *d, int number)
{
    assert_true(d->pid > 0);
    assert_int_equal(kill(d->pid, number), 0);
}

int daemon_wait(struct daemon *d)
{
    uint64_t until = clock_ms() + DAEMON_WAIT_MS;
    int status = 0;
    pid_t pid;

    while ((pid = waitpid(d->pid, &status, WNOHANG)) == 0 && clock_ms() < until) {
        nap();
    }
    if (pid == 0) {
        daemon_show_log(d);
        fail_msg("forebayd did not end");
    }
    d->pid = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : DAEMON_GONE;
}

void daemon_kill(struct daemon *d)
{
    kill(d->pid, SIGKILL);
    waitpid(d->pid, NULL, 0);
    d->pid = 0;
}

/* --- looking --- */

/* The whole page of metrics; empty when nobody serves it. */
static void fetch_metrics(const struct daemon *d, char *out, size_t capacity)
{
    static const char request[] = "GET /metrics HTTP/1.0\r\n\r\n";
    struct timeval patience = {.tv_sec = DAEMON_WAIT_MS / 1000};
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    size_t have = 0;
    ssize_t n;

    snprintf(name.sun_path, sizeof(name.sun_path), "%s", d->http);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    if (connect(fd, (struct sockaddr *)&name, sizeof(name)) == 0 &&
        send(fd, request, sizeof(request) - 1, MSG_NOSIGNAL) == (ssize_t)sizeof(request) - 1) {
        while (have + 1 < capacity && (n = recv(fd, out + have, capacity - 1 - have, 0)) > 0) {
            have += (size_t)n;
        }
    }
    out[have] = 0;
    close(fd);
}

uint64_t daemon_metric(const struct daemon *d, const char *name)
{
    char page[65536], line[128];
    const char *at;

    fetch_metrics(d, page, sizeof(page));
    snprintf(line, sizeof(line), "\n%s ", name);
    at = strstr(page, line);
    return at ? strtoull(at + strlen(line), NULL, 10) : DAEMON_NO_METRIC;
}

void daemon_await_metric(const struct daemon *d, const char *name, uint64_t value)
{
    uint64_t until = clock_ms() + DAEMON_WAIT_MS, is;

    while ((is = daemon_metric(d, name)) != value) {
        if (clock_ms() > until) {
            daemon_show_log(d);
            fail_msg("%s is %llu, not %llu", name, (unsigned long long)is,
                     (unsigned long long)value);
        }
        nap();
    }
}

void daemon_await_nothing_held(const struct daemon *d)
{
    daemon_await_metric(d, "forebay_leased_bytes", 0);
    daemon_await_metric(d, "forebay_reserved_bytes", 0);
    daemon_await_metric(d, "forebay_quarantined_bytes", 0);
}

bool daemon_log_has(const struct daemon *d, const char *text)
{
    FILE *file = fopen(d->log, "re");
    char line[1024];
    bool has = false;

    while (file && !has && fgets(line, sizeof(line), file)) {
        has = strstr(line, text) != NULL;
    }
    if (file) {
        fclose(file);
    }
    return has;
}

void daemon_await_log(const struct daemon *d, const char *text)
{
    uint64_t until = clock_ms() + DAEMON_WAIT_MS;

    while (!daemon_log_has(d, text)) {
        if (clock_ms() > until) {
            daemon_show_log(d);
            fail_msg("the log does not say \"%s\"", text);
        }
        nap();
    }
}

uint64_t daemon_chunk_bytes(const struct daemon *d)
{
    DIR *dir = opendir(d->chunk_dir);
    struct dirent *entry;
    uint64_t bytes = 0;
    struct stat st;

    assert_non_null(dir);
    while ((entry = readdir(dir))) {
        if (fstatat(dirfd(dir), entry->d_name, &st, 0) == 0 && S_ISREG(st.st_mode)) {
            bytes += (uint64_t)st.st_blocks * 512;
        }
    }
    closedir(dir);
    return bytes;
}

bool daemon_find_chunk(const struct daemon *d, char *out, size_t capacity)
{
    DIR *dir = opendir(d->chunk_dir);
    struct dirent *entry;
    bool found = false;

    assert_non_null(dir);
    while (!found && (entry = readdir(dir))) {
        found = strncmp(entry->d_name, "chunk-", 6) == 0;
        if (found) {
            snprintf(out, capacity, "%s/%s", d->chunk_dir, entry->d_name);
        }
    }
    closedir(dir);
    return found;
}
