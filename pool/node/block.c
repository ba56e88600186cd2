/* Entries and their slots: taking, evicting, dropping. */
#include "pool/node/state.h"

struct fb_block_header *fb_block_header(struct fb_node *node, struct fb_location where)
{
    return node->host->ops->map(node->host, where);
}

void fb_block_set_entry(struct fb_node *node, struct fb_location where, uint32_t entry)
{
    fb_host_chunk(node->host, where.chunk)->entries[where.slot] = entry;
}

uint32_t fb_block_entry_at(struct fb_node *node, struct fb_location where)
{
    const struct fb_chunk *chunk = fb_host_chunk(node->host, where.chunk);

    return chunk && where.slot < chunk->file.slot_count ? chunk->entries[where.slot]
                                                        : FB_ENTRY_NONE;
}

/* The slot's header says nothing any more, so that a restart does not bring the block back. */
static void clear_header(struct fb_node *node, struct fb_location where)
{
    struct fb_block_header *header = fb_block_header(node, where);

    FB_ASSERT(header);
    header->state = 0;
}

static void remove_entry(struct fb_node *node, uint32_t entry)
{
    struct fb_location where = fb_index_location(node->index, entry);

    if (fb_index_flags(node->index, entry) & FB_ENTRY_PINNED) {
        const struct fb_space *space = node->spaces[fb_index_space(node->index, entry)];

        node->tenants[space->tenant].pinned_bytes -= space->layout.block_bytes;
    }
    fb_expiry_forget(node, entry);
    fb_index_remove(node->index, entry);
    node->tier->ops->free(node->tier, where);
    fb_balance_try_reap(node, fb_host_chunk(node->host, where.chunk));
}

/* Count a block in or out of what its tenant has in use. */
static void count_use(struct fb_node *node, uint32_t entry, bool in)
{
    const struct fb_chunk *chunk =
        fb_host_chunk(node->host, fb_index_location(node->index, entry).chunk);
    uint64_t *bytes = &node->tenants[chunk->tenant].used_bytes;

    *bytes += in ? chunk->file.slot_bytes : -chunk->file.slot_bytes;
}

void fb_block_inserted(struct fb_node *node, uint32_t entry)
{
    count_use(node, entry, true);
}

void fb_block_pin(struct fb_node *node, uint32_t entry)
{
    if (fb_index_refs(node->index, entry) == 0) {
        count_use(node, entry, true);
    }
    fb_index_pin(node->index, entry);
}

void fb_block_unpin(struct fb_node *node, uint32_t entry)
{
    bool detached = fb_index_flags(node->index, entry) & FB_ENTRY_DETACHED;
    bool last = fb_index_unpin(node->index, entry) == 0;

    if (last) {
        count_use(node, entry, false);
    }
    if (last && detached) {
        remove_entry(node, entry);
    }
}

void fb_block_drop(struct fb_node *node, uint32_t entry)
{
    uint32_t flags = fb_index_flags(node->index, entry);

    if (flags & FB_ENTRY_DETACHED) {
        return;
    }
    if (!(flags & FB_ENTRY_WRITING)) {
        node->spaces[fb_index_space(node->index, entry)]->blocks--;
    }
    clear_header(node, fb_index_location(node->index, entry));
    fb_index_detach(node->index, entry);
    if (fb_index_refs(node->index, entry) == 0) {
        remove_entry(node, entry);
    }
}

/* Evict the coldest block of the class; false when all are in use. */
static bool evict_one(struct fb_node *node, struct fb_class *class)
{
    uint32_t entry = fb_index_victim(node->index, class->order);
    const struct fb_space *space;

    if (entry == FB_ENTRY_NONE) {
        return false;
    }
    space = node->spaces[fb_index_space(node->index, entry)];
    fb_event_push(node, FB_EVENT_EVICTED, space->tenant, space->id,
                  fb_index_key(node->index, entry), 1);
    fb_balance_evicted(class, fb_index_key(node->index, entry));
    fb_metrics_add(node->metrics, FB_METRIC_EVICTED_BLOCKS, 1);
    fb_block_drop(node, entry);
    return true;
}

enum fb_status fb_block_take_slot(struct fb_node *node, struct fb_class *class,
                                  struct fb_location *ret_where)
{
    enum fb_status status;

    /* Until every survivor has named what it uses, a slot that looks free may not be. */
    if (node->tenants[class->tier.tenant].survivors.count > 0) {
        return FB_AGAIN;
    }
    status = node->tier->ops->reserve(node->tier, &class->tier, ret_where);
    if (status != FB_ELIMIT) {
        return status;
    }
    if (fb_balance_ask(node, class)) {
        status = node->tier->ops->reserve(node->tier, &class->tier, ret_where);
        if (status != FB_ELIMIT) {
            return status;
        }
        status = FB_AGAIN; /* a chunk is on its way */
    }
    if (!evict_one(node, class)) {
        return status;
    }
    return node->tier->ops->reserve(node->tier, &class->tier, ret_where);
}
