/* Recovery: chunks of an earlier incarnation, and the blocks in them. */
#include "pool/node/state.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

struct found {
    uint64_t sequence;
    struct fb_location where;
};

struct finds {
    struct found *list;
    size_t count;
    size_t capacity;
};

static bool add_find(struct finds *f, uint64_t sequence, uint32_t chunk, uint32_t slot)
{
    if (f->count == f->capacity) {
        size_t capacity = f->capacity ? 2 * f->capacity : 4096;
        struct found *list = realloc(f->list, capacity * sizeof(*list));

        if (!list) {
            return false;
        }
        f->list = list;
        f->capacity = capacity;
    }
    f->list[f->count++] = (struct found){sequence, {chunk, slot}};
    return true;
}

/* Whether a slot has a whole block of a known space that fits it. */
static bool is_block(struct fb_node *node, const struct fb_chunk *chunk,
                     const struct fb_block_header *h)
{
    const struct fb_space *space;

    if (fb_block_header_check(h, NULL) != FB_OK || h->block_bytes != chunk->file.slot_bytes) {
        return false;
    }
    space = fb_space_by_id(node, h->space);
    return space && space->tenant == chunk->tenant &&
           fb_block_header_match(h, space->id, h->key, &space->layout) == FB_OK;
}

static enum fb_status scan_chunk(struct fb_node *node, const struct fb_chunk *chunk,
                                 struct finds *f)
{
    for (uint32_t slot = 0; slot < chunk->file.slot_count; slot++) {
        const struct fb_block_header *h = (const void *)fb_chunk_slot(&chunk->file, slot);

        if (is_block(node, chunk, h) && !add_find(f, h->sequence, chunk->file.id, slot)) {
            return FB_ENOMEM;
        }
    }
    return FB_OK;
}

static int find_tenant(const struct fb_node *node, const char *name)
{
    for (uint32_t i = 0; i < node->tenant_count; i++) {
        if (strcmp(node->tenants[i].name, name) == 0) {
            return (int)i;
        }
    }
    return -1;
}

/* Left where it is, never misread, never deleted; its memory counts. */
static void set_aside(struct fb_node *node, const char *name, const struct fb_error *why)
{
    struct stat st;

    if (fstatat(node->dir_fd, name, &st, 0) == 0) {
        fb_host_set_aside(node->host, (uint64_t)st.st_size);
    }
    fb_metrics_add(node->metrics, FB_METRIC_SET_ASIDE_CHUNKS, 1);
    fb_log(&node->log, FB_LOG_WARN, "chunk_set_aside", FB_KV_STR("file", name),
           FB_KV_STR("why", why->text));
}

static enum fb_status open_chunk(struct fb_node *node, const char *name, struct finds *f,
                                 struct fb_error *error)
{
    struct fb_chunk_file file;
    struct fb_chunk *chunk;
    enum fb_status status = fb_chunk_open(node->dir_fd, name, &file, error);
    uint16_t class_id;
    int tenant;

    if (status != FB_OK) {
        return status;
    }
    tenant = find_tenant(node, file.tenant);
    if (tenant < 0) {
        status = fb_error_set(error, FB_ENOENT, "%s: tenant %s is not configured any more", name,
                              file.tenant);
        goto err_close;
    }
    if (fb_host_tenant_used(node->host, (uint16_t)tenant) + file.file_bytes >
        fb_host_tenant_limit(node->host, (uint16_t)tenant)) {
        /* The tier or the share was made smaller: the chunk is beyond it, its memory goes. */
        fb_chunk_unlink(node->dir_fd, file.id);
        fb_chunk_close(&file);
        fb_log(&node->log, FB_LOG_WARN, "chunk_beyond_limit", FB_KV_STR("file", name));
        return FB_OK;
    }
    status = fb_class_get(node, (uint16_t)tenant, file.slot_bytes, &class_id, error);
    if (status == FB_OK) {
        status = fb_host_adopt(node->host, &file, (uint16_t)tenant, class_id, &chunk);
        if (status != FB_OK) {
            fb_error_set(error, status, "%s: %s", name, fb_status_text(status));
        }
    }
    if (status != FB_OK) {
        goto err_close;
    }
    return scan_chunk(node, chunk, f);

err_close:
    fb_chunk_close(&file);
    return status;
}

static int by_sequence(const void *a, const void *b)
{
    uint64_t x = ((const struct found *)a)->sequence, y = ((const struct found *)b)->sequence;

    return x < y ? -1 : x > y;
}

/* In order of commits, so that parents are mostly there before what extends them. */
static enum fb_status index_block(struct fb_node *node, const struct found *f)
{
    static const uint8_t no_parent[FB_KEY_BYTES];
    struct fb_chunk *chunk = fb_host_chunk(node->host, f->where.chunk);
    const struct fb_block_header *h = fb_block_header(node, f->where);
    struct fb_space *space = fb_space_by_id(node, h->space);
    uint32_t entry, parent = FB_ENTRY_NONE;

    if (fb_index_find_any(node->index, h->key) != FB_ENTRY_NONE) {
        return FB_OK; /* written twice; the slot stays free */
    }
    if (space->rule == FB_RULE_FULL && memcmp(h->parent, no_parent, FB_KEY_BYTES) != 0) {
        parent = fb_index_find_any(node->index, h->parent);
    }
    if (fb_index_insert(node->index, h->key, parent, node->classes[space->class_id].order,
                        (uint16_t)space->handle, f->where, &entry) != FB_OK) {
        return FB_ENOMEM;
    }
    FB_ASSERT(fb_host_take(node->host, chunk, f->where.slot));
    chunk->entries[f->where.slot] = entry;
    fb_index_publish(node->index, entry);
    fb_index_unpin(node->index, entry);
    space->blocks++;
    node->sequence = f->sequence > node->sequence ? f->sequence : node->sequence;
    return FB_OK;
}

static enum fb_status open_all(struct fb_node *node, struct finds *f, struct fb_error *error)
{
    int fd = openat(node->dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    enum fb_status status = FB_OK;
    struct dirent *entry;

    if (!dir) {
        return fb_error_set(error, FB_EIO, "cannot list chunk_dir: %s", strerror(errno));
    }
    while (status == FB_OK && (entry = readdir(dir))) {
        struct fb_error why;

        if (strstr(entry->d_name, ".new")) {
            unlinkat(node->dir_fd, entry->d_name, 0); /* never completed */
            continue;
        }
        if (!fb_chunk_is_name(entry->d_name)) {
            continue;
        }
        status = open_chunk(node, entry->d_name, f, &why);
        if (status != FB_OK && status != FB_ENOMEM) {
            set_aside(node, entry->d_name, &why);
            status = FB_OK;
        }
    }
    closedir(dir);
    return status;
}

enum fb_status fb_recover(struct fb_node *node, struct fb_error *error)
{
    uint64_t begun = fb_node_clock();
    struct finds f = {0};
    enum fb_status status = open_all(node, &f, error);

    if (status == FB_OK && f.count > 0) {
        qsort(f.list, f.count, sizeof(*f.list), by_sequence);
        for (size_t i = 0; i < f.count && status == FB_OK; i++) {
            status = index_block(node, &f.list[i]);
        }
        fb_metrics_add(node->metrics, FB_METRIC_RECOVERED_BLOCKS, f.count);
        fb_log(&node->log, FB_LOG_INFO, "recovered", FB_KV_U64("blocks", f.count),
               FB_KV_U64("microseconds", (fb_node_clock() - begun) / 1000));
    }
    if (status == FB_ENOMEM) {
        fb_error_set(error, status, "out of memory while indexing %zu blocks", f.count);
    }
    free(f.list);
    return status;
}
