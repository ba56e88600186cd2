/* Host tier: slots in chunks of host memory.
 *
 * Chunks come as classes need them, each prepared by a worker, up to the tenant's share of the
 * tier. A chunk goes by being retired: no new slots, its blocks evicted by the owner, then, once
 * every client that was given it has unmapped it, its memory. Reactor only. */
#ifndef FB_NODE_HOST_H
#define FB_NODE_HOST_H

#include "pool/node/chunk.h"
#include "pool/node/tier.h"
#include "pool/node/worker.h"

#include <sys/queue.h>

#define FB_MAX_CLASSES 1024

struct fb_chunk {
    struct fb_chunk_file file;
    TAILQ_ENTRY(fb_chunk) link; /* in its class */
    uint16_t class_id;
    uint16_t tenant;
    bool retiring;
    uint32_t used;     /* slots */
    uint32_t given;    /* clients that may map it */
    uint32_t scan;     /* word of the bitmap to look at first */
    uint64_t *taken;   /* bitmap of slots */
    uint32_t *entries; /* index entry of each taken slot, or FB_ENTRY_NONE */
};

struct fb_host_options {
    int dir_fd; /* borrowed */
    uint64_t capacity_bytes;
    enum fb_huge_pages huge_pages;
    uint32_t tenant_count;
    uint64_t tenant_bytes[FB_TENANTS_MAX];
    char tenant_names[FB_TENANTS_MAX][FB_MAX_TENANT_CHARS + 1];

    /* Run a job and its mail later; the reactor's workers, or a test's own. */
    void (*submit)(void *context, struct fb_job *job);
    void *context;
    /* A chunk came, or could not be made: error is NULL unless that. From the job's mail, so no
     * operation is on the stack. */
    void (*changed)(void *context, uint16_t class_id, const struct fb_error *error);
    void *changed_context;
};

enum fb_status fb_host_create(const struct fb_host_options *options, struct fb_tier **ret_tier);

/* Take over a chunk file found at start. Its slots are free until fb_host_take.
 * returns FB_OK | FB_EXISTS (another chunk has its place) | FB_ENOMEM */
enum fb_status fb_host_adopt(struct fb_tier *tier, const struct fb_chunk_file *file,
                             uint16_t tenant, uint16_t class_id, struct fb_chunk **ret_chunk);

/* Bytes that are not the tier's to give: files set aside in the same directory. */
void fb_host_set_aside(struct fb_tier *tier, uint64_t bytes);

/* Take a particular free slot (recovery, slots a surviving client still uses); false if taken. */
bool fb_host_take(struct fb_tier *tier, struct fb_chunk *chunk, uint32_t slot);

/* The live chunk of that id, or NULL. */
struct fb_chunk *fb_host_chunk(const struct fb_tier *tier, uint32_t id);

/* Chunks of a class, and all chunks of a tenant, retiring ones included: start with NULL. */
struct fb_chunk *fb_host_next_in_class(const struct fb_tier *tier, uint16_t class_id,
                                       struct fb_chunk *previous);
uint32_t fb_host_class_chunks(const struct fb_tier *tier, uint16_t class_id);
uint64_t fb_host_tenant_used(const struct fb_tier *tier, uint16_t tenant);
uint64_t fb_host_tenant_limit(const struct fb_tier *tier, uint16_t tenant);

/* Chunks of the tenant that are being given up. */
uint32_t fb_host_tenant_retiring(const struct fb_tier *tier, uint16_t tenant);

/* A chunk of the class with no slot taken, or NULL. */
struct fb_chunk *fb_host_unused_chunk(const struct fb_tier *tier, uint16_t class_id);

/* Begin to give a chunk up; its memory goes in fb_host_reap, when it is unused and unmapped. */
void fb_host_retire(struct fb_tier *tier, struct fb_chunk *chunk);

/* Destroy the chunk if it is retiring, has no slot taken and is given to nobody; true if so. */
bool fb_host_reap(struct fb_tier *tier, struct fb_chunk *chunk);

#endif
