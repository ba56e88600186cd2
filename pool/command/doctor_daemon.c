/* doctor: the daemon, its sockets, and where its chunks live. */
#include "pool/command/doctor.h"
#include "pool/command/output.h"
#include "proto/forebay.pb-c.h"
#include "transport/grpc_client.h"

#include <errno.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#define MIB       (1024.0 * 1024.0)
#define STATUS_MS 2000u

/* Statistics of the nearest directory that exists. */
static bool stat_nearest(const char *path, char *ret_dir, size_t capacity, struct statfs *ret_fs)
{
    snprintf(ret_dir, capacity, "%s", path);
    while (statfs(ret_dir, ret_fs) < 0) {
        char *slash = strrchr(ret_dir, '/');

        if (errno != ENOENT || !slash || !strcmp(ret_dir, "/")) {
            return false;
        }
        slash[slash == ret_dir] = 0;
    }
    return true;
}

static void look_chunk_dir(const struct fb_doctor *doctor, struct fb_result *r)
{
    const char *path = doctor->config.chunk_dir;
    char dir[FB_CONFIG_TEXT_BYTES];
    struct statfs fs;

    if (!stat_nearest(path, dir, sizeof(dir), &fs)) {
        fb_result_set(r, FB_FINDING_FAIL, "choose another chunk_dir", "%s: %s", path,
                      strerror(errno));
    } else if (fs.f_type != TMPFS_MAGIC && fs.f_type != HUGETLBFS_MAGIC) {
        fb_result_set(
            r, FB_FINDING_FAIL, "chunks are memory: put chunk_dir on a tmpfs or a hugetlbfs",
            "%s is on neither tmpfs nor hugetlbfs (type 0x%lx)", path, (unsigned long)fs.f_type);
    } else if (!strncmp(path, "/dev/shm", 8) && (strlen(path) == 8 || path[8] == '/')) {
        fb_result_set(r, FB_FINDING_OK,
                      "systemd empties /dev/shm of users that log out (RemoveIPC): run the daemon "
                      "as a system user, or mount a tmpfs of its own",
                      "%s%s on tmpfs", path, strcmp(path, dir) ? " (to be made)" : "");
    } else {
        fb_result_set(r, FB_FINDING_OK, NULL, "%s%s on %s", path,
                      strcmp(path, dir) ? " (to be made)" : "",
                      fs.f_type == TMPFS_MAGIC ? "tmpfs" : "hugetlbfs");
    }
}

static void look_chunk_space(const struct fb_doctor *doctor, struct fb_result *r)
{
    double wanted = (double)doctor->config.host_bytes;
    char dir[FB_CONFIG_TEXT_BYTES];
    struct statfs fs;
    double total, room;
    bool is_running = access(doctor->config.chunk_dir, F_OK) == 0;

    if (!stat_nearest(doctor->config.chunk_dir, dir, sizeof(dir), &fs)) {
        fb_result_set(r, FB_FINDING_FAIL, NULL, "%s cannot be looked at", dir);
        return;
    }
    total = (double)fs.f_blocks * (double)fs.f_bsize;
    room = (double)fs.f_bavail * (double)fs.f_bsize;
    if (total > 0 && total < wanted) {
        fb_result_set(r, FB_FINDING_FAIL,
                      "make it larger (mount -o remount,size=...; docker --shm-size; an emptyDir "
                      "of medium Memory) or host_bytes smaller",
                      "%s has room for %.1f MiB, the host tier needs %.1f MiB; containers give "
                      "/dev/shm 64 MiB",
                      dir, total / MIB, wanted / MIB);
    } else if (total > 0 && room < wanted && !is_running) {
        fb_result_set(r, FB_FINDING_FAIL, "free memory there, or make host_bytes smaller",
                      "%.1f MiB free in %s, the host tier needs %.1f MiB", room / MIB, dir,
                      wanted / MIB);
    } else {
        fb_result_set(r, FB_FINDING_OK, NULL, "%.1f MiB free, the host tier has %.1f MiB%s",
                      room / MIB, wanted / MIB, is_running ? " (some of it there already)" : "");
    }
}

static void look_socket(const struct fb_doctor *doctor, struct fb_result *r)
{
    const char *path = doctor->cli->socket;
    struct stat st;

    if (stat(path, &st) < 0) {
        fb_result_set(r, FB_FINDING_FAIL, "start forebayd, or name its socket with --socket",
                      "%s: %s", path, strerror(errno));
    } else if (!S_ISSOCK(st.st_mode)) {
        fb_result_set(r, FB_FINDING_FAIL, "name the daemon's socket with --socket",
                      "%s is no socket", path);
    } else if (access(path, R_OK | W_OK) < 0) {
        fb_result_set(r, FB_FINDING_FAIL,
                      "join its group (socket_group of the daemon), or set socket_mode",
                      "%s may not be used by this user (mode %04o, group %u)", path,
                      (unsigned)(st.st_mode & 07777), (unsigned)st.st_gid);
    } else {
        fb_result_set(r, FB_FINDING_OK, NULL, "%s may be used", path);
    }
}

static enum fb_status ask_status(const char *address, struct fb_rpc_message *ret_reply,
                                 struct fb_error *error)
{
    struct fb_rpc_client *client = NULL;
    enum fb_status status = fb_rpc_client_create(address, &client, error);

    if (status == FB_OK) {
        status = fb_rpc_client_call(client, "/forebay.v1.Admin/Status", (const uint8_t *)"", 0,
                                    STATUS_MS, ret_reply, error);
    }
    fb_rpc_client_destroy(client);
    return status;
}

static void look_daemon(const struct fb_doctor *doctor, struct fb_result *r)
{
    struct fb_error error = {.text = "out of memory"};
    struct fb_rpc_message raw = {0};
    Forebay__V1__StatusReply *reply;

    if (ask_status(doctor->cli->grpc, &raw, &error) != FB_OK) {
        fb_result_set(r, FB_FINDING_FAIL, "start forebayd, or name its grpc_listen with --grpc",
                      "%s", error.text);
        return;
    }
    reply = forebay__v1__status_reply__unpack(NULL, raw.bytes, raw.data);
    free(raw.data);
    if (!reply) {
        fb_result_set(r, FB_FINDING_FAIL, "use a forebay of the daemon's version",
                      "its answer is not understood");
        return;
    }
    fb_result_set(r,
                  reply->state == FOREBAY__V1__NODE_STATE__NODE_STATE_READY ? FB_FINDING_OK
                                                                            : FB_FINDING_WARN,
                  reply->state == FOREBAY__V1__NODE_STATE__NODE_STATE_READY
                      ? NULL
                      : "it is starting or draining: ask again, or start it anew",
                  "%s at %s, %u clients", reply->version, doctor->cli->grpc, reply->clients);
    forebay__v1__status_reply__free_unpacked(reply, NULL);
}

const struct fb_check fb_daemon_checks[] = {
    {"chunk_dir", look_chunk_dir},
    {"chunk space", look_chunk_space},
    {"socket", look_socket},
    {"daemon", look_daemon},
};
const size_t fb_daemon_check_count = FB_COUNT_OF(fb_daemon_checks);
