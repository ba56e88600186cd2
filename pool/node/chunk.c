/* Chunk files: creation, mapping, checks. */
#include "pool/node/chunk.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define NAME_BYTES 32
#define NAME_STEM  "chunk-"

static void make_name(char out[NAME_BYTES], uint32_t id, const char *suffix)
{
    snprintf(out, NAME_BYTES, NAME_STEM "%08x%s", id, suffix);
}

bool fb_chunk_is_name(const char *name)
{
    return strncmp(name, NAME_STEM, strlen(NAME_STEM)) == 0 && !strchr(name, '.');
}

enum fb_status fb_chunk_shape(uint64_t tier_bytes, uint64_t slot_bytes,
                              struct fb_chunk_shape *ret_shape, struct fb_error *error)
{
    uint64_t least = FB_CHUNK_HEADER_BYTES + FB_CHUNK_MIN_SLOTS * slot_bytes;
    uint64_t bytes = tier_bytes / 64;

    if (slot_bytes > FB_BLOCK_MAX_BYTES) {
        return fb_error_set(error, FB_EGEOMETRY,
                            "blocks of %llu bytes: at most %llu are possible; split the layers "
                            "over several spaces",
                            (unsigned long long)slot_bytes, FB_BLOCK_MAX_BYTES);
    }
    bytes = bytes / FB_CHUNK_ALIGN * FB_CHUNK_ALIGN;
    if (bytes < least) {
        bytes = (least + FB_CHUNK_ALIGN - 1) / FB_CHUNK_ALIGN * FB_CHUNK_ALIGN;
    }
    if (bytes > FB_CHUNK_MAX_BYTES) {
        bytes = FB_CHUNK_MAX_BYTES;
    }
    ret_shape->file_bytes = bytes;
    ret_shape->slot_count = (uint32_t)((bytes - FB_CHUNK_HEADER_BYTES) / slot_bytes);
    return FB_OK;
}

/* Map shared and, where allowed, with huge pages. */
static enum fb_status map_file(struct fb_chunk_file *f, enum fb_huge_pages huge,
                               struct fb_error *error)
{
    void *map = mmap(NULL, f->file_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, f->fd, 0);

    if (map == MAP_FAILED) {
        return fb_error_set(error, FB_EIO, "chunk %08x: cannot map %llu bytes: %s", f->id,
                            (unsigned long long)f->file_bytes, strerror(errno));
    }
    f->map = map;
    if (huge != FB_HUGE_PAGES_NEVER && madvise(map, f->file_bytes, MADV_HUGEPAGE) < 0 &&
        huge == FB_HUGE_PAGES_REQUIRE && errno != EINVAL) {
        fb_error_set(error, FB_EIO, "chunk %08x: huge pages are required, but: %s", f->id,
                     strerror(errno));
        munmap(map, f->file_bytes);
        f->map = NULL;
        return FB_EIO;
    }
    return FB_OK;
}

/* Touch every page, so that memory is there before it is promised. Older kernels do not know the
 * advice: writing a byte of each page does the same. */
static void touch(struct fb_chunk_file *f)
{
#ifdef MADV_POPULATE_WRITE
    if (madvise(f->map, f->file_bytes, MADV_POPULATE_WRITE) == 0) {
        return;
    }
#endif
    for (uint64_t at = 0; at < f->file_bytes; at += 4096) {
        ((volatile uint8_t *)f->map)[at] = 0;
    }
}

static void write_header(struct fb_chunk_file *f)
{
    struct fb_chunk_header *h = (void *)f->map;

    h->magic = FB_CHUNK_MAGIC;
    h->version = FB_CHUNK_VERSION;
    h->id = f->id;
    h->file_bytes = f->file_bytes;
    h->slot_bytes = f->slot_bytes;
    h->slot_count = f->slot_count;
    memcpy(h->tenant, f->tenant, sizeof(h->tenant));
    h->crc = fb_crc32c(h, offsetof(struct fb_chunk_header, crc));
}

/* hugetlbfs has no fallocate of plain tmpfs semantics but takes ftruncate and mmap. */
static enum fb_status allocate(struct fb_chunk_file *f, struct fb_error *error)
{
    if (ftruncate(f->fd, (off_t)f->file_bytes) < 0 ||
        (fallocate(f->fd, 0, 0, (off_t)f->file_bytes) < 0 && errno != EOPNOTSUPP)) {
        return fb_error_set(error, errno == ENOSPC ? FB_ENOMEM : FB_EIO,
                            "chunk %08x: cannot allocate %llu bytes in chunk_dir: %s; make the "
                            "file system larger or host_bytes smaller",
                            f->id, (unsigned long long)f->file_bytes, strerror(errno));
    }
    return FB_OK;
}

enum fb_status fb_chunk_create(int dir_fd, uint32_t id, const char *tenant, uint64_t slot_bytes,
                               const struct fb_chunk_shape *shape, enum fb_huge_pages huge,
                               struct fb_chunk_file *ret_file, struct fb_error *error)
{
    struct fb_chunk_file f = {
        .id = id,
        .file_bytes = shape->file_bytes,
        .slot_bytes = slot_bytes,
        .slot_count = shape->slot_count,
    };
    char temporary[NAME_BYTES], name[NAME_BYTES];
    enum fb_status status;

    snprintf(f.tenant, sizeof(f.tenant), "%s", tenant);
    make_name(temporary, id, ".new");
    make_name(name, id, "");
    f.fd = openat(dir_fd, temporary, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (f.fd < 0) {
        return fb_error_set(error, FB_EIO, "chunk %08x: cannot create: %s", id, strerror(errno));
    }
    status = allocate(&f, error);
    if (status != FB_OK) {
        goto err_close;
    }
    status = map_file(&f, huge, error);
    if (status != FB_OK) {
        goto err_close;
    }
    touch(&f);
    write_header(&f);
    if (renameat(dir_fd, temporary, dir_fd, name) < 0) {
        status = fb_error_set(error, FB_EIO, "chunk %08x: cannot rename: %s", id, strerror(errno));
        goto err_unmap;
    }
    *ret_file = f;
    return FB_OK;

err_unmap:
    munmap(f.map, f.file_bytes);
err_close:
    close(f.fd);
    unlinkat(dir_fd, temporary, 0);
    return status;
}

static enum fb_status check_header(const struct fb_chunk_header *h, const char *name, off_t size,
                                   struct fb_error *error)
{
    if (h->magic != FB_CHUNK_MAGIC) {
        return fb_error_set(error, FB_ECORRUPT, "%s is no chunk", name);
    }
    if (h->version != FB_CHUNK_VERSION) {
        return fb_error_set(error, FB_EVERSION,
                            "%s has format version %u, this daemon knows %u; start a matching "
                            "daemon, or delete the file to give its memory back",
                            name, h->version, FB_CHUNK_VERSION);
    }
    if (h->crc != fb_crc32c(h, offsetof(struct fb_chunk_header, crc)) ||
        h->file_bytes != (uint64_t)size || h->slot_bytes < FB_BLOCK_HEADER_BYTES ||
        h->slot_bytes % FB_BLOCK_ALIGN != 0 || h->slot_bytes > FB_BLOCK_MAX_BYTES ||
        h->slot_count == 0 ||
        h->slot_count > (h->file_bytes - FB_CHUNK_HEADER_BYTES) / h->slot_bytes ||
        !memchr(h->tenant, 0, sizeof(h->tenant))) {
        return fb_error_set(error, FB_ECORRUPT, "%s has a damaged header", name);
    }
    return FB_OK;
}

enum fb_status fb_chunk_open(int dir_fd, const char *name, struct fb_chunk_file *ret_file,
                             struct fb_error *error)
{
    struct fb_chunk_file f = {.fd = openat(dir_fd, name, O_RDWR | O_CLOEXEC)};
    struct fb_chunk_header h;
    enum fb_status status;
    struct stat st;

    if (f.fd < 0 || fstat(f.fd, &st) < 0 || pread(f.fd, &h, sizeof(h), 0) != sizeof(h)) {
        status = fb_error_set(error, FB_ECORRUPT, "%s: cannot read its header: %s", name,
                              f.fd < 0 ? strerror(errno) : "too short");
        goto err_close;
    }
    status = check_header(&h, name, st.st_size, error);
    if (status != FB_OK) {
        goto err_close;
    }
    f.id = h.id;
    f.file_bytes = h.file_bytes;
    f.slot_bytes = h.slot_bytes;
    f.slot_count = h.slot_count;
    memcpy(f.tenant, h.tenant, sizeof(f.tenant));
    status = map_file(&f, FB_HUGE_PAGES_AUTO, error);
    if (status != FB_OK) {
        goto err_close;
    }
    *ret_file = f;
    return FB_OK;

err_close:
    if (f.fd >= 0) {
        close(f.fd);
    }
    return status;
}

void fb_chunk_close(struct fb_chunk_file *file)
{
    if (file->map) {
        munmap(file->map, file->file_bytes);
        close(file->fd);
        file->map = NULL;
    }
}

void fb_chunk_unlink(int dir_fd, uint32_t id)
{
    char name[NAME_BYTES];

    make_name(name, id, "");
    unlinkat(dir_fd, name, 0);
}

bool fb_chunk_exists(int dir_fd, uint32_t id)
{
    char name[NAME_BYTES];

    make_name(name, id, "");
    return faccessat(dir_fd, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
}
