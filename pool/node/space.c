/* Spaces and slot classes. Manifests are kept beside the chunks, one file each, so that a restart
 * knows what its blocks are. */
#include "pool/node/state.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define NAME_STEM  "space-"
#define NAME_BYTES (sizeof(NAME_STEM) + 2 * FB_SPACE_ID_BYTES + 8)

static void make_name(char out[NAME_BYTES], const uint8_t id[FB_SPACE_ID_BYTES], const char *suffix)
{
    size_t at = (size_t)snprintf(out, NAME_BYTES, NAME_STEM);

    for (size_t i = 0; i < FB_SPACE_ID_BYTES; i++) {
        at += (size_t)snprintf(out + at, NAME_BYTES - at, "%02x", id[i]);
    }
    snprintf(out + at, NAME_BYTES - at, "%s", suffix);
}

enum fb_status fb_class_get(struct fb_node *node, uint16_t tenant, uint64_t slot_bytes,
                            uint16_t *ret_class, struct fb_error *error)
{
    struct fb_chunk_shape shape;
    struct fb_class *class;
    enum fb_status status;
    uint64_t ghosts = 16;

    for (uint32_t i = 0; i < node->class_count; i++) {
        class = &node->classes[i];
        if (class->tier.tenant == tenant && class->tier.slot_bytes == slot_bytes) {
            *ret_class = (uint16_t)i;
            return FB_OK;
        }
    }
    if (node->class_count == FB_MAX_CLASSES) {
        return fb_error_set(error, FB_ELIMIT, "%d block sizes are in use already; purge some",
                            FB_MAX_CLASSES);
    }
    status = fb_chunk_shape(node->config.host_bytes, slot_bytes, &shape, error);
    if (status != FB_OK) {
        return status;
    }
    if (shape.file_bytes > fb_host_tenant_limit(node->host, tenant)) {
        return fb_error_set(error, FB_EGEOMETRY,
                            "blocks of %llu bytes come in chunks of %llu bytes, more than tenant "
                            "%s may use (%llu): raise host_bytes or the tenant's share, or use "
                            "shorter pages",
                            (unsigned long long)slot_bytes, (unsigned long long)shape.file_bytes,
                            node->tenants[tenant].name,
                            (unsigned long long)fb_host_tenant_limit(node->host, tenant));
    }
    class = &node->classes[node->class_count];
    *class = (struct fb_class){
        .tier = {.id = (uint16_t)node->class_count, .tenant = tenant, .slot_bytes = slot_bytes}};
    /* As many ghosts as one more chunk would hold. */
    while (ghosts < shape.slot_count / 8 && ghosts < 65536) {
        ghosts *= 2;
    }
    class->ghost_mask = ghosts - 1;
    class->ghosts = calloc(ghosts, sizeof(*class->ghosts));
    if (!class->ghosts) {
        return fb_error_set(error, FB_ENOMEM, "out of memory for another block size");
    }
    status = fb_index_class_add(node->index, node->config.policy, &class->order, error);
    if (status != FB_OK) {
        free(class->ghosts);
        return status;
    }
    *ret_class = (uint16_t)node->class_count++;
    return FB_OK;
}

static enum fb_status store_manifest(struct fb_node *node, const uint8_t id[FB_SPACE_ID_BYTES],
                                     const uint8_t *manifest, size_t bytes, struct fb_error *error)
{
    char temporary[NAME_BYTES], name[NAME_BYTES];
    ssize_t n;
    int fd;

    make_name(temporary, id, ".new");
    make_name(name, id, "");
    fd = openat(node->dir_fd, temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    n = fd >= 0 ? write(fd, manifest, bytes) : -1;
    if (fd >= 0) {
        close(fd);
    }
    if (n != (ssize_t)bytes || renameat(node->dir_fd, temporary, node->dir_fd, name) < 0) {
        unlinkat(node->dir_fd, temporary, 0);
        return fb_error_set(error, FB_EIO, "cannot keep the manifest in chunk_dir: %s",
                            strerror(errno));
    }
    return FB_OK;
}

static uint32_t free_handle(struct fb_node *node)
{
    for (uint32_t i = 0; i < FB_MAX_SPACES; i++) {
        if (!node->spaces[i]) {
            return i;
        }
    }
    return FB_MAX_SPACES;
}

static enum fb_status add_space(struct fb_node *node, uint16_t tenant,
                                const uint8_t id[FB_SPACE_ID_BYTES], const struct fb_manifest *m,
                                struct fb_space **ret_space, struct fb_error *error)
{
    struct fb_space *space = calloc(1, sizeof(*space));
    enum fb_status status;

    if (!space) {
        return fb_error_set(error, FB_ENOMEM, "out of memory for another space");
    }
    status = fb_layout_init(&space->layout, m, error);
    if (status == FB_OK) {
        status = fb_class_get(node, tenant, space->layout.block_bytes, &space->class_id, error);
    }
    space->handle = free_handle(node);
    if (status == FB_OK && space->handle == FB_MAX_SPACES) {
        fb_space_forget_unused(node);
        space->handle = free_handle(node);
    }
    if (status == FB_OK && space->handle == FB_MAX_SPACES) {
        status = fb_error_set(error, FB_ELIMIT, "%d spaces have blocks already; purge some",
                              FB_MAX_SPACES);
    }
    if (status != FB_OK) {
        free(space);
        return status;
    }
    memcpy(space->id, id, FB_SPACE_ID_BYTES);
    memcpy(space->model, m->model, sizeof(space->model));
    space->tenant = tenant;
    space->rule = m->rule;
    space->window_pages = fb_window_pages(m);
    space->window_tokens = m->window_tokens;
    node->spaces[space->handle] = space;
    HASH_ADD(hh, node->spaces_by_id, id, FB_SPACE_ID_BYTES, space);
    *ret_space = space;
    return FB_OK;
}

struct fb_space *fb_space_by_id(struct fb_node *node, const uint8_t id[FB_SPACE_ID_BYTES])
{
    struct fb_space *space;

    HASH_FIND(hh, node->spaces_by_id, id, FB_SPACE_ID_BYTES, space);
    return space;
}

struct fb_space *fb_space_by_handle(struct fb_node *node, uint32_t handle, uint16_t tenant)
{
    struct fb_space *space = handle < FB_MAX_SPACES ? node->spaces[handle] : NULL;

    return space && space->tenant == tenant ? space : NULL;
}

enum fb_status fb_space_open(struct fb_node *node, uint16_t tenant, const uint8_t *manifest,
                             size_t bytes, struct fb_space **ret_space, struct fb_error *error)
{
    uint8_t id[FB_SPACE_ID_BYTES];
    struct fb_manifest m;
    enum fb_status status;

    fb_space_id(manifest, bytes, id);
    *ret_space = fb_space_by_id(node, id);
    if (*ret_space && (*ret_space)->tenant == tenant) {
        return FB_OK;
    }
    status = fb_manifest_decode(manifest, bytes, &m, error);
    if (status != FB_OK) {
        return status;
    }
    if (strcmp(m.tenant, node->tenants[tenant].name) != 0) {
        return fb_error_set(error, FB_EPERM,
                            "the manifest names tenant %s, but this is the socket of %s: open the "
                            "socket of the manifest's tenant",
                            m.tenant, node->tenants[tenant].name);
    }
    status = add_space(node, tenant, id, &m, ret_space, error);
    if (status == FB_OK) {
        status = store_manifest(node, id, manifest, bytes, error);
    }
    return status;
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

static enum fb_status read_manifest(struct fb_node *node, const char *name,
                                    uint8_t out[FB_MANIFEST_MAX_BYTES], size_t *ret_bytes,
                                    struct fb_error *error)
{
    int fd = openat(node->dir_fd, name, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, out, FB_MANIFEST_MAX_BYTES) : -1;

    if (fd >= 0) {
        close(fd);
    }
    if (n <= 0) {
        return fb_error_set(error, FB_EIO, "cannot read %s", name);
    }
    *ret_bytes = (size_t)n;
    return FB_OK;
}

enum fb_status fb_node_get_manifest(struct fb_node *node, const uint8_t id[FB_SPACE_ID_BYTES],
                                    uint8_t ret_manifest[FB_MANIFEST_MAX_BYTES], size_t *ret_bytes,
                                    struct fb_error *error)
{
    char name[NAME_BYTES];

    make_name(name, id, "");
    return read_manifest(node, name, ret_manifest, ret_bytes, error);
}

/* A manifest that cannot be used is left alone: its blocks then have no space and are free. */
static enum fb_status load_one(struct fb_node *node, const char *name, struct fb_error *error)
{
    uint8_t manifest[FB_MANIFEST_MAX_BYTES], id[FB_SPACE_ID_BYTES];
    struct fb_space *space;
    struct fb_manifest m;
    enum fb_status status;
    size_t bytes = 0;
    int tenant;

    status = read_manifest(node, name, manifest, &bytes, error);
    if (status == FB_OK) {
        status = fb_manifest_decode(manifest, bytes, &m, error);
    }
    if (status != FB_OK) {
        return status;
    }
    tenant = find_tenant(node, m.tenant);
    if (tenant < 0) {
        return fb_error_set(error, FB_ENOENT, "%s: tenant %s is not configured any more", name,
                            m.tenant);
    }
    fb_space_id(manifest, bytes, id);
    return add_space(node, (uint16_t)tenant, id, &m, &space, error);
}

enum fb_status fb_space_load_all(struct fb_node *node, struct fb_error *error)
{
    int fd = openat(node->dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    struct dirent *entry;

    if (!dir) {
        return fb_error_set(error, FB_EIO, "cannot list chunk_dir: %s", strerror(errno));
    }
    while ((entry = readdir(dir))) {
        struct fb_error why;

        if (strncmp(entry->d_name, NAME_STEM, strlen(NAME_STEM)) != 0 ||
            strchr(entry->d_name, '.')) {
            continue;
        }
        if (load_one(node, entry->d_name, &why) != FB_OK) {
            fb_log(&node->log, FB_LOG_WARN, "manifest_skipped", FB_KV_STR("file", entry->d_name),
                   FB_KV_STR("why", why.text));
        }
    }
    closedir(dir);
    return FB_OK;
}

static void free_space(struct fb_node *node, struct fb_space *space)
{
    HASH_DEL(node->spaces_by_id, space); /* NOLINT(clang-analyzer-*) */
    node->spaces[space->handle] = NULL;
    free(space);
}

void fb_space_forget_unused(struct fb_node *node)
{
    for (uint32_t i = 0; i < FB_MAX_SPACES; i++) {
        struct fb_space *space = node->spaces[i];
        char name[NAME_BYTES];

        if (space && space->blocks == 0 && space->fills == 0 && space->users == 0) {
            make_name(name, space->id, "");
            unlinkat(node->dir_fd, name, 0);
            free_space(node, space);
        }
    }
}

void fb_space_destroy_all(struct fb_node *node)
{
    for (uint32_t i = 0; i < FB_MAX_SPACES; i++) {
        if (node->spaces[i]) {
            free_space(node, node->spaces[i]);
        }
    }
    for (uint32_t i = 0; i < node->class_count; i++) {
        free(node->classes[i].ghosts);
    }
}
