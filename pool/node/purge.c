/* Purge: removing blocks by tenant, space or prefix. One pass over the tenant's slots; the pass is
 * bounded by the number of blocks (some tens of nanoseconds each). */
#include "pool/node/state.h"

#include <stdlib.h>

enum verdict { UNKNOWN, KEEP, GO };

struct purge {
    struct fb_node *node;
    const struct fb_space *space; /* NULL: every space of the tenant */
    uint32_t root;                /* the page with which all that extend it go, or NONE */
    uint8_t *verdicts;            /* by entry; with a root only */
    uint64_t blocks;
    uint64_t bytes;
};

/* Climb to the root or to an entry whose verdict is known, then tell all on the way. */
static enum verdict judge(struct purge *p, uint32_t entry)
{
    uint32_t at = entry;
    enum verdict verdict = KEEP;

    while (at != FB_ENTRY_NONE && p->verdicts[at] == UNKNOWN) {
        at = fb_index_parent(p->node->index, at);
    }
    if (at != FB_ENTRY_NONE) {
        verdict = (enum verdict)p->verdicts[at];
    }
    for (at = entry; at != FB_ENTRY_NONE && p->verdicts[at] == UNKNOWN;
         at = fb_index_parent(p->node->index, at)) {
        p->verdicts[at] = (uint8_t)verdict;
    }
    return verdict;
}

static bool is_meant(struct purge *p, uint32_t entry)
{
    uint32_t flags = fb_index_flags(p->node->index, entry);

    if (flags & (FB_ENTRY_WRITING | FB_ENTRY_DETACHED)) {
        return false;
    }
    if (p->space && fb_index_space(p->node->index, entry) != p->space->handle) {
        return false;
    }
    return p->root == FB_ENTRY_NONE || judge(p, entry) == GO;
}

/* Twice over the slots: verdicts need all parents, so nothing goes before they are complete. */
static void purge_chunk(struct purge *p, struct fb_chunk *chunk, bool remove)
{
    uint32_t id = chunk->file.id;

    for (uint32_t slot = 0; slot < chunk->file.slot_count; slot++) {
        uint32_t entry = chunk->entries[slot];

        if (entry == FB_ENTRY_NONE || !is_meant(p, entry) || !remove) {
            continue;
        }
        p->blocks++;
        p->bytes += chunk->file.slot_bytes;
        fb_block_drop(p->node, entry);
        if (!fb_host_chunk(p->node->host, id)) {
            return; /* that was the last of a retiring chunk */
        }
    }
}

static void purge_tenant(struct purge *p, uint16_t tenant, bool remove)
{
    for (uint32_t i = 0; i < p->node->class_count; i++) {
        struct fb_chunk *chunk, *next;

        if (p->node->classes[i].tier.tenant != tenant) {
            continue;
        }
        for (chunk = fb_host_next_in_class(p->node->host, (uint16_t)i, NULL); chunk; chunk = next) {
            next = fb_host_next_in_class(p->node->host, (uint16_t)i, chunk);
            purge_chunk(p, chunk, remove);
        }
    }
}

static struct fb_tenant *find_tenant(struct fb_node *node, const char *name)
{
    for (uint32_t i = 0; i < node->tenant_count; i++) {
        if (strcmp(node->tenants[i].name, name) == 0) {
            return &node->tenants[i];
        }
    }
    return NULL;
}

enum fb_status fb_node_purge(struct fb_node *node, const char *tenant_name, const uint8_t *space_id,
                             const uint8_t *key, uint64_t *ret_blocks, uint64_t *ret_bytes,
                             struct fb_error *error)
{
    struct purge p = {.node = node, .root = FB_ENTRY_NONE};
    struct fb_tenant *tenant = find_tenant(node, tenant_name);

    *ret_blocks = *ret_bytes = 0;
    if (!tenant) {
        return fb_error_set(error, FB_ENOENT, "purge: no tenant \"%s\" is configured", tenant_name);
    }
    if (space_id) {
        p.space = fb_space_by_id(node, space_id);
        if (!p.space || p.space->tenant != tenant->index) {
            return fb_error_set(error, FB_ENOENT,
                                "purge: tenant %s has no such space; `forebay spaces` lists them",
                                tenant_name);
        }
    }
    if (key) {
        p.root = fb_index_find_any(node->index, key);
        if (p.root == FB_ENTRY_NONE) {
            return FB_OK;
        }
        p.verdicts = calloc(fb_index_id_limit(node->index), 1);
        if (!p.verdicts) {
            return fb_error_set(error, FB_ENOMEM, "purge: out of memory");
        }
        p.verdicts[p.root] = GO;
        purge_tenant(&p, tenant->index, false);
    }
    purge_tenant(&p, tenant->index, true);
    free(p.verdicts);
    if (p.blocks > 0) {
        fb_metrics_add(node->metrics, FB_METRIC_PURGED_BLOCKS, p.blocks);
        fb_event_push(node, FB_EVENT_PURGED, tenant->index, space_id, key, p.blocks);
        fb_log(&node->log, FB_LOG_INFO, "purged", FB_KV_STR("tenant", tenant_name),
               FB_KV_U64("blocks", p.blocks), FB_KV_U64("bytes", p.bytes));
    }
    fb_op_run_woken(node);
    *ret_blocks = p.blocks;
    *ret_bytes = p.bytes;
    return FB_OK;
}
