/* Chunk: the unit of host memory, a named file on tmpfs or hugetlbfs that the daemon and its
 * tenant's clients map.
 *
 *   header page  4096 B: magic, version, id, tenant, slot size and count, CRC32C
 *   slot 0 | slot 1 | ...   each slot_bytes, a multiple of 4096
 *
 * Creation preallocates and touches all memory, so it takes a while: it runs on a worker. Files
 * appear under their name only when they are complete. */
#ifndef FB_NODE_CHUNK_H
#define FB_NODE_CHUNK_H

#include "pool/node/config.h"
#include "proto/block.h"

#define FB_CHUNK_MAGIC        0x4b4e484359414246ull /* "FBAYCHNK" */
#define FB_CHUNK_VERSION      1u
#define FB_CHUNK_HEADER_BYTES 4096u
#define FB_CHUNK_ALIGN        (2ull << 20)
#define FB_CHUNK_MAX_BYTES    (1ull << 30)
#define FB_CHUNK_MIN_SLOTS    8

struct __attribute__((packed)) fb_chunk_header {
    uint64_t magic;
    uint32_t version;
    uint32_t id;
    uint64_t file_bytes;
    uint64_t slot_bytes;
    uint32_t slot_count;
    char tenant[FB_MAX_TENANT_CHARS + 1];
    uint8_t pad[FB_CHUNK_HEADER_BYTES - 36 - (FB_MAX_TENANT_CHARS + 1) - 4];
    uint32_t crc;
};
_Static_assert(sizeof(struct fb_chunk_header) == FB_CHUNK_HEADER_BYTES, "chunk header");

/* An open, mapped chunk file. */
struct fb_chunk_file {
    int fd;
    uint8_t *map;
    uint32_t id;
    uint64_t file_bytes;
    uint64_t slot_bytes;
    uint32_t slot_count;
    char tenant[FB_MAX_TENANT_CHARS + 1];
};

struct fb_chunk_shape {
    uint64_t file_bytes;
    uint32_t slot_count;
};

/* File size and slots of a chunk: a 64th of the tier, at least 2 MiB and 8 slots, at most 1 GiB.
 * returns FB_OK | FB_EGEOMETRY (8 slots do not fit 1 GiB) */
enum fb_status fb_chunk_shape(uint64_t tier_bytes, uint64_t slot_bytes,
                              struct fb_chunk_shape *ret_shape, struct fb_error *error);

/* Create, preallocate, touch and map. On failure nothing is left in the directory.
 * returns FB_OK | FB_ENOMEM (no space in the file system) | FB_EIO */
enum fb_status fb_chunk_create(int dir_fd, uint32_t id, const char *tenant, uint64_t slot_bytes,
                               const struct fb_chunk_shape *shape, enum fb_huge_pages huge,
                               struct fb_chunk_file *ret_file, struct fb_error *error);

/* Open and map an existing file by name.
 * returns FB_OK | FB_EVERSION, FB_ECORRUPT (to be set aside) | FB_EIO */
enum fb_status fb_chunk_open(int dir_fd, const char *name, struct fb_chunk_file *ret_file,
                             struct fb_error *error);

/* Unmap and close; unlink removes the file's name (its memory goes with the last mapping). */
void fb_chunk_close(struct fb_chunk_file *file);
void fb_chunk_unlink(int dir_fd, uint32_t id);

/* Whether a file has the name of that chunk: one set aside keeps it. */
bool fb_chunk_exists(int dir_fd, uint32_t id);

/* Whether a directory entry is called like a chunk. */
bool fb_chunk_is_name(const char *name);

static inline uint8_t *fb_chunk_slot(const struct fb_chunk_file *file, uint32_t slot)
{
    return file->map + FB_CHUNK_HEADER_BYTES + (uint64_t)slot * file->slot_bytes;
}

#endif
