/* doctor: what the machine and its limits allow. */
#include "kernels/codec.h"
#include "pool/command/doctor.h"
#include "pool/command/output.h"

#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <liburing.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

#define CHUNKS       64u   /* of a tier, each mapped and held open */
#define FILES_WANTED 4096u /* chunks, sockets, and descriptors in flight */
#define MIB          (1024.0 * 1024.0)

static void look_kernel(const struct fb_doctor *doctor, struct fb_result *r)
{
    struct utsname u;
    int major = 0, minor = 0;

    (void)doctor;
    if (uname(&u) < 0 || sscanf(u.release, "%d.%d", &major, &minor) != 2) {
        fb_result_set(r, FB_FINDING_WARN, NULL, "unknown kernel version");
    } else if (major < 5 || (major == 5 && minor < 6)) {
        fb_result_set(r, FB_FINDING_FAIL, "use Linux 5.6 or newer (pidfd, io_uring)", "Linux %s",
                      u.release);
    } else {
        fb_result_set(r, FB_FINDING_OK, NULL, "Linux %s", u.release);
    }
}

static void look_cpu(const struct fb_doctor *doctor, struct fb_result *r)
{
    const struct fb_kernels *best = fb_kernels_best();
    bool is_reference = best == fb_kernels_get(FB_KERNELS_REF);

    (void)doctor;
    fb_result_set(
        r, is_reference ? FB_FINDING_WARN : FB_FINDING_OK,
        is_reference ? "codecs are slow here: use a processor with AVX2 or AVX-512" : NULL,
        "codecs use %s%s%s%s", fb_kernels_name(best), is_reference ? "" : "; the processor has",
        fb_kernels_get(FB_KERNELS_AVX2) ? " AVX2" : "",
        fb_kernels_get(FB_KERNELS_AVX512) ? " AVX-512" : "");
}

static void look_memlock(const struct fb_doctor *doctor, struct fb_result *r)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_MEMLOCK, &limit) < 0) {
        fb_result_set(r, FB_FINDING_WARN, NULL, "cannot read the limit: %s", strerror(errno));
    } else if (limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < doctor->config.host_bytes) {
        fb_result_set(r, FB_FINDING_WARN,
                      "needed only where memory is pinned for GPUs, RDMA or io_uring: ulimit -l "
                      "unlimited, or LimitMEMLOCK=infinity in the unit",
                      "locked memory up to %.1f MiB, the host tier has %.1f MiB",
                      (double)limit.rlim_cur / MIB, (double)doctor->config.host_bytes / MIB);
    } else {
        fb_result_set(r, FB_FINDING_OK, NULL, "enough locked memory is allowed");
    }
}

static void look_files(const struct fb_doctor *doctor, struct fb_result *r)
{
    struct rlimit limit;
    uint64_t wanted = FILES_WANTED + doctor->config.max_clients * 4ull;

    if (getrlimit(RLIMIT_NOFILE, &limit) < 0) {
        fb_result_set(r, FB_FINDING_WARN, NULL, "cannot read the limit: %s", strerror(errno));
    } else if (limit.rlim_cur < CHUNKS * 4) {
        fb_result_set(r, FB_FINDING_FAIL, "ulimit -n 65536, or LimitNOFILE=65536 in the unit",
                      "%" PRIu64 " open files allowed", (uint64_t)limit.rlim_cur);
    } else if (limit.rlim_cur < wanted) {
        fb_result_set(r, FB_FINDING_WARN, "ulimit -n 65536, or LimitNOFILE=65536 in the unit",
                      "%" PRIu64 " open files allowed; many clients need up to %" PRIu64,
                      (uint64_t)limit.rlim_cur, wanted);
    } else {
        fb_result_set(r, FB_FINDING_OK, NULL, "%" PRIu64 " open files allowed",
                      (uint64_t)limit.rlim_cur);
    }
}

static void look_huge_pages(const struct fb_doctor *doctor, struct fb_result *r)
{
    char shmem[128];
    char reserved[32] = "0";
    bool may_use;

    (void)doctor;
    if (!fb_doctor_read_line("/sys/kernel/mm/transparent_hugepage/shmem_enabled", shmem,
                             sizeof(shmem))) {
        snprintf(shmem, sizeof(shmem), "not in this kernel");
    }
    fb_doctor_read_line("/proc/sys/vm/nr_hugepages", reserved, sizeof(reserved));
    may_use = !strstr(shmem, "[never]") && !strstr(shmem, "[deny]") && strchr(shmem, '[');
    fb_result_set(r, may_use || atol(reserved) > 0 ? FB_FINDING_OK : FB_FINDING_WARN,
                  may_use || atol(reserved) > 0
                      ? NULL
                      : "faster with: echo advise > "
                        "/sys/kernel/mm/transparent_hugepage/shmem_enabled, or chunk_dir on a "
                        "hugetlbfs with pages reserved",
                  "tmpfs: %s; reserved (hugetlbfs): %s", shmem, reserved);
}

static void look_memory(const struct fb_doctor *doctor, struct fb_result *r)
{
    char limit[64] = "max";
    double total = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    bool is_limited = fb_doctor_read_line("/sys/fs/cgroup/memory.max", limit, sizeof(limit)) &&
                      strcmp(limit, "max") != 0;
    double usable = is_limited && strtod(limit, NULL) < total ? strtod(limit, NULL) : total;
    double tier = (double)doctor->config.host_bytes;

    if (tier > usable) {
        fb_result_set(r, FB_FINDING_FAIL, "make host_bytes smaller, or give it more memory",
                      "the host tier has %.1f MiB, but %s allows %.1f MiB", tier / MIB,
                      is_limited ? "the cgroup" : "the machine", usable / MIB);
    } else if (tier > usable * 0.9) {
        fb_result_set(r, FB_FINDING_WARN, "leave memory for the engines and the page cache",
                      "the host tier takes %.0f %% of %.1f MiB", 100 * tier / usable, usable / MIB);
    } else {
        fb_result_set(r, FB_FINDING_OK, NULL, "%.1f MiB %s, the host tier has %.1f MiB",
                      usable / MIB, is_limited ? "in the cgroup" : "in the machine", tier / MIB);
    }
}

/* Nodes that a list such as "0-1,4" names. */
static int count_listed(const char *list)
{
    int count = 0;

    while (*list) {
        char *end;
        long first = strtol(list, &end, 10);
        long last = *end == '-' ? strtol(end + 1, &end, 10) : first;

        count += (int)(last - first + 1);
        list = *end == ',' ? end + 1 : "";
    }
    return count;
}

static bool read_status_value(const char *name, char *out, size_t capacity)
{
    FILE *file = fopen("/proc/self/status", "re");
    size_t chars = strlen(name);
    char line[512];
    bool found = false;

    while (file && !found && fgets(line, sizeof(line), file)) {
        found = !strncmp(line, name, chars) && line[chars] == ':';
    }
    if (found) {
        const char *value = line + chars + 1 + strspn(line + chars + 1, " \t");

        snprintf(out, capacity, "%.*s", (int)strcspn(value, "\n"), value);
    }
    if (file) {
        fclose(file);
    }
    return found;
}

static void look_numa(const struct fb_doctor *doctor, struct fb_result *r)
{
    char nodes[128];
    char allowed[512];
    int count, usable;

    (void)doctor;
    if (!fb_doctor_read_line("/sys/devices/system/node/has_memory", nodes, sizeof(nodes)) ||
        !read_status_value("Mems_allowed_list", allowed, sizeof(allowed))) {
        fb_result_set(r, FB_FINDING_OK, NULL, "no NUMA in this kernel");
        return;
    }
    count = count_listed(nodes);
    usable = count_listed(allowed);
    fb_result_set(r, usable < count ? FB_FINDING_WARN : FB_FINDING_OK,
                  usable < count ? "allow all nodes in the cgroup (cpuset.mems), so that memory "
                                   "lies near each engine"
                                 : NULL,
                  "%d node%s with memory, this process may use %d", count, count == 1 ? "" : "s",
                  usable < count ? usable : count);
}

static void look_seccomp(const struct fb_doctor *doctor, struct fb_result *r)
{
    char mode[16];

    (void)doctor;
    if (!read_status_value("Seccomp", mode, sizeof(mode))) {
        fb_result_set(r, FB_FINDING_OK, NULL, "not in this kernel");
    } else {
        fb_result_set(r, FB_FINDING_OK, NULL, "%s",
                      !strcmp(mode, "0")   ? "off"
                      : !strcmp(mode, "2") ? "a filter is on, as in containers"
                                           : "strict");
    }
}

static void look_io_uring(const struct fb_doctor *doctor, struct fb_result *r)
{
    struct io_uring ring;
    char disabled[16] = "0";
    int error = io_uring_queue_init(8, &ring, 0);

    (void)doctor;
    fb_doctor_read_line("/proc/sys/kernel/io_uring_disabled", disabled, sizeof(disabled));
    if (error == 0) {
        io_uring_queue_exit(&ring);
        fb_result_set(r, FB_FINDING_OK, NULL, "available");
    } else if (strcmp(disabled, "0") != 0) {
        fb_result_set(r, FB_FINDING_WARN, "sysctl kernel.io_uring_disabled=0",
                      "switched off: kernel.io_uring_disabled is %s", disabled);
    } else if (error == -EPERM) {
        fb_result_set(r, FB_FINDING_WARN,
                      "a container's seccomp profile forbids it: allow io_uring_setup, "
                      "io_uring_enter and io_uring_register",
                      "not permitted");
    } else {
        fb_result_set(r, FB_FINDING_WARN, NULL, "not available: %s", strerror(-error));
    }
}

static void look_gpu(const struct fb_doctor *doctor, struct fb_result *r)
{
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    int (*init)(unsigned) = cuda ? (int (*)(unsigned))dlsym(cuda, "cuInit") : NULL;
    int (*count_devices)(int *) = cuda ? (int (*)(int *))dlsym(cuda, "cuDeviceGetCount") : NULL;
    int (*get_version)(int *) = cuda ? (int (*)(int *))dlsym(cuda, "cuDriverGetVersion") : NULL;
    int devices = 0, version = 0, error;

    (void)doctor;
    if (!init || !count_devices || !get_version) {
        fb_result_set(r, FB_FINDING_OK, NULL, "no GPU driver: fine, the GPU tier stays off");
    } else if ((error = init(0)) != 0 || (error = count_devices(&devices)) != 0) {
        fb_result_set(r, FB_FINDING_WARN,
                      "give the process its GPUs (in containers: the NVIDIA runtime), or ignore "
                      "this where none are used",
                      "a GPU driver is installed, but says error %d", error);
    } else {
        get_version(&version);
        fb_result_set(r, FB_FINDING_OK, NULL, "%d GPU%s, driver for CUDA %d.%d", devices,
                      devices == 1 ? "" : "s", version / 1000, version % 1000 / 10);
    }
    if (cuda) {
        dlclose(cuda);
    }
}

const struct fb_check fb_machine_checks[] = {
    {"kernel", look_kernel},     {"processor", look_cpu},
    {"memory", look_memory},     {"locked memory", look_memlock},
    {"open files", look_files},  {"huge pages", look_huge_pages},
    {"numa", look_numa},         {"seccomp", look_seccomp},
    {"io_uring", look_io_uring}, {"gpu", look_gpu},
};
const size_t fb_machine_check_count = FB_COUNT_OF(fb_machine_checks);
