/* Fills: blocks being written, by claims on planes and layers. */
#include "pool/node/state.h"

/* While a slot is written, its header's sequence names the fill. */
static struct fb_fill *fill_of_entry(struct fb_node *node, uint32_t entry)
{
    struct fb_block_header *header = fb_block_header(node, fb_index_location(node->index, entry));
    struct fb_fill *fill = fb_slab_get(&node->fills, header->sequence);

    return fill && fill->entry == entry ? fill : NULL;
}

static bool overlaps(const struct fb_claim *c, const struct fb_reserve_request *r)
{
    return c->plane_first < r->plane_first + r->plane_count &&
           r->plane_first < c->plane_first + c->plane_count &&
           c->layer_first < r->layer_first + r->layer_count &&
           r->layer_first < c->layer_first + c->layer_count;
}

/* The first claim on a plane and layer wins. */
static enum fb_status add_claim(struct fb_node *node, struct fb_fill *fill,
                                struct fb_client *client, const struct fb_reserve_request *r,
                                struct fb_reserve_row *ret_row)
{
    struct fb_claim *claim;

    LIST_FOREACH(claim, &fill->claims, in_fill) {
        if (overlaps(claim, r)) {
            return FB_BUSY;
        }
    }
    claim = fb_slab_alloc(&node->claims);
    if (!claim) {
        return FB_ENOMEM;
    }
    claim->client = client;
    claim->fill = fill;
    claim->plane_first = r->plane_first;
    claim->plane_count = r->plane_count;
    claim->layer_first = r->layer_first;
    claim->layer_count = r->layer_count;
    LIST_INSERT_HEAD(&client->claims, claim, in_client);
    LIST_INSERT_HEAD(&fill->claims, claim, in_fill);
    client->held_bytes += fill->space->layout.block_bytes;
    ret_row->where = (struct fb_wire_location){fill->where.chunk, fill->where.slot};
    ret_row->claim = claim->head.id;
    return FB_OK;
}

static void write_header(struct fb_fill *fill, struct fb_block_header *h, const uint8_t *key,
                         const uint8_t *parent_key, uint64_t position)
{
    const struct fb_layout *l = &fill->space->layout;

    memset(h, 0, sizeof(*h));
    h->magic = FB_BLOCK_MAGIC;
    h->version = FB_BLOCK_VERSION;
    h->state = FB_BLOCK_WRITING;
    memcpy(h->space, fill->space->id, sizeof(h->space));
    memcpy(h->key, key, sizeof(h->key));
    if (parent_key) {
        memcpy(h->parent, parent_key, sizeof(h->parent));
    }
    h->position = position;
    h->block_bytes = l->block_bytes;
    h->plane_bytes = l->plane_bytes;
    h->plane_count = l->plane_count;
    h->layer_count = l->layer_count;
    h->page_tokens = l->page_tokens;
    h->sequence = fill->head.id;
}

/* A new block: slot, entry, fill. */
static enum fb_status begin_fill(struct fb_node *node, struct fb_space *space, const uint8_t *key,
                                 const uint8_t *parent_key, uint32_t parent, uint64_t position,
                                 struct fb_fill **ret_fill)
{
    struct fb_class *class = &node->classes[space->class_id];
    struct fb_location where;
    struct fb_fill *fill;
    enum fb_status status;
    uint32_t entry;

    /* Making room must not take the page that this one extends. */
    if (parent != FB_ENTRY_NONE) {
        fb_block_pin(node, parent);
    }
    status = fb_block_take_slot(node, class, &where);
    if (status != FB_OK) {
        goto err_parent;
    }
    status = fb_index_insert(node->index, key, parent, class->order, (uint16_t)space->handle, where,
                             &entry);
    if (status != FB_OK) {
        goto err_slot;
    }
    fill = fb_slab_alloc(&node->fills);
    if (!fill) {
        status = FB_ENOMEM;
        goto err_entry;
    }
    fill->state = FB_FILL_OPEN;
    fill->node = node;
    fill->space = space;
    fill->where = where;
    fill->entry = entry;
    fill->parent = parent;
    fill->deadline_ns = node->now_ns + node->config.reserve_ns;
    fill->area_left = (uint64_t)space->layout.plane_count * space->layout.layer_count;
    TAILQ_INSERT_TAIL(&node->fill_list, fill, link);
    fb_block_set_entry(node, where, entry);
    fb_block_inserted(node, entry);
    write_header(fill, fb_block_header(node, where), key, parent_key, position);
    space->fills++;
    node->reserved_bytes += space->layout.block_bytes;
    fb_metrics_add(node->metrics, FB_METRIC_RESERVED_BLOCKS, 1);
    *ret_fill = fill;
    return FB_OK;

err_entry:
    fb_index_detach(node->index, entry);
    fb_index_unpin(node->index, entry);
    fb_index_remove(node->index, entry);
err_slot:
    node->tier->ops->free(node->tier, where);
err_parent:
    if (parent != FB_ENTRY_NONE) {
        fb_block_unpin(node, parent);
    }
    return status;
}

static void end_claim(struct fb_node *node, struct fb_claim *claim)
{
    if (claim->client) {
        claim->client->held_bytes -= claim->fill->space->layout.block_bytes;
        LIST_REMOVE(claim, in_client);
    }
    LIST_REMOVE(claim, in_fill);
    fb_slab_free(&node->claims, claim);
}

/* Forget the fill. Its entry's pin goes last: with it an aborted block's slot. */
static void end_fill(struct fb_node *node, struct fb_fill *fill)
{
    uint32_t entry = fill->entry, parent = fill->parent;

    while (!LIST_EMPTY(&fill->claims)) {
        end_claim(node, LIST_FIRST(&fill->claims));
    }
    if (fill->state == FB_FILL_ABORTED) {
        node->quarantined_bytes -= fill->space->layout.block_bytes;
    } else {
        node->reserved_bytes -= fill->space->layout.block_bytes;
    }
    fill->space->fills--;
    fb_slab_free(&node->fills, fill);
    if (parent != FB_ENTRY_NONE) {
        fb_block_unpin(node, parent);
    }
    fb_block_unpin(node, entry);
    fb_op_wake_all(node);
}

/* The slot stays until every claim has ended: a process may still write to it. */
static void end_if_unclaimed(struct fb_node *node, struct fb_fill *fill)
{
    struct fb_claim *claim;

    LIST_FOREACH(claim, &fill->claims, in_fill) {
        if (claim->client) {
            return;
        }
    }
    end_fill(node, fill);
}

static void abort_fill(struct fb_node *node, struct fb_fill *fill)
{
    if (fill->state == FB_FILL_OPEN) {
        TAILQ_REMOVE(&node->fill_list, fill, link);
        fill->state = FB_FILL_ABORTED;
        node->reserved_bytes -= fill->space->layout.block_bytes;
        node->quarantined_bytes += fill->space->layout.block_bytes;
        fb_block_drop(node, fill->entry);
        fb_metrics_add(node->metrics, FB_METRIC_ABORTED_BLOCKS, 1);
    }
}

/* Entry of the page before; FB_ENOENT where the rule needs it and it is not there. */
static enum fb_status find_parent(struct fb_node *node, const struct fb_space *space,
                                  const uint8_t *parent_key, uint32_t *ret_parent)
{
    *ret_parent = FB_ENTRY_NONE;
    if (space->rule != FB_RULE_FULL || !parent_key) {
        return FB_OK;
    }
    *ret_parent = fb_index_find_any(node->index, parent_key);
    return *ret_parent == FB_ENTRY_NONE ? FB_ENOENT : FB_OK;
}

enum fb_status fb_fill_reserve(struct fb_node *node, struct fb_client *client,
                               struct fb_space *space, const struct fb_reserve_request *request,
                               const uint8_t *key, const uint8_t *parent_key, uint64_t position,
                               struct fb_reserve_row *ret_row)
{
    uint32_t entry = fb_index_find_any(node->index, key);
    struct fb_fill *fill = NULL;
    enum fb_status status;
    uint32_t parent;

    if (entry != FB_ENTRY_NONE) {
        if (!(fb_index_flags(node->index, entry) & FB_ENTRY_WRITING)) {
            return FB_EXISTS;
        }
        fill = fill_of_entry(node, entry);
        if (!fill || fill->state != FB_FILL_OPEN || fill->space != space) {
            return FB_BUSY;
        }
    }
    if (!fb_client_may_hold(client, space->layout.block_bytes,
                            fill ? 0 : space->layout.block_bytes)) {
        return FB_ELIMIT;
    }
    if (!fill) {
        status = find_parent(node, space, parent_key, &parent);
        if (status == FB_OK) {
            status = begin_fill(node, space, key, parent_key, parent, position, &fill);
        }
        if (status != FB_OK) {
            return status;
        }
    }
    status = add_claim(node, fill, client, request, ret_row);
    if (status != FB_OK && LIST_EMPTY(&fill->claims)) {
        abort_fill(node, fill);
        end_fill(node, fill);
    }
    return status;
}

static void published(void *arg, enum fb_status status)
{
    struct fb_fill *fill = arg;
    struct fb_node *node = fill->node;
    struct fb_space *space = fill->space;
    struct fb_op *op = fill->op;
    uint32_t row = fill->op_row;

    if (status == FB_OK) {
        fb_index_publish(node->index, fill->entry);
        space->blocks++;
        fb_metrics_add(node->metrics, FB_METRIC_COMMITTED_BLOCKS, 1);
        fb_event_push(node, FB_EVENT_COMMITTED, space->tenant, space->id,
                      fb_index_key(node->index, fill->entry), 1);
        /* The others went when the chunk was given up; this one would keep it from going. */
        if (fb_host_chunk(node->host, fill->where.chunk)->retiring) {
            fb_block_drop(node, fill->entry);
        }
    } else {
        fb_block_drop(node, fill->entry);
        fb_metrics_add(node->metrics, FB_METRIC_ABORTED_BLOCKS, 1);
    }
    end_fill(node, fill);
    if (op) {
        ((uint32_t *)op->rows)[row] = (uint32_t)status;
        op->pending--;
        if (op->state == FB_OP_TIER && op->pending == 0) {
            op->state = FB_OP_RUN;
            fb_op_advance(node, op);
        }
    }
}

static void publish(struct fb_node *node, struct fb_fill *fill, struct fb_op *op, uint32_t op_row)
{
    struct fb_block_header *header = fb_block_header(node, fill->where);

    TAILQ_REMOVE(&node->fill_list, fill, link);
    fill->state = FB_FILL_PUBLISHING;
    fill->op = op;
    fill->op_row = op_row;
    op->pending++;
    header->sequence = ++node->sequence;
    header->state = FB_BLOCK_COMMITTED;
    fb_block_header_seal(header);
    node->tier->ops->commit(node->tier, fill->where, published, fill);
}

static struct fb_claim *find_claim(struct fb_node *node, const struct fb_client *client,
                                   uint64_t id, enum fb_status *ret_status)
{
    struct fb_claim *claim = fb_slab_get(&node->claims, id);

    if (!claim || !claim->client) {
        *ret_status = FB_ENOENT;
        return NULL;
    }
    if (claim->client != client) {
        *ret_status = FB_EPERM;
        return NULL;
    }
    return claim;
}

enum fb_status fb_fill_commit(struct fb_node *node, struct fb_client *client, uint64_t claim_id,
                              const uint8_t *sums, uint32_t sum_count, struct fb_op *op,
                              uint32_t op_row)
{
    enum fb_status status = FB_OK;
    struct fb_claim *claim = find_claim(node, client, claim_id, &status);
    struct fb_block_header *header;
    struct fb_fill *fill;

    if (!claim) {
        return status;
    }
    fill = claim->fill;
    if (sum_count != claim->plane_count) {
        return FB_EINVAL;
    }
    if (fill->state != FB_FILL_OPEN) {
        end_claim(node, claim);
        end_if_unclaimed(node, fill);
        return FB_ESTATE;
    }
    header = fb_block_header(node, fill->where);
    for (uint32_t i = 0; i < sum_count; i++) {
        header->plane_sums[claim->plane_first + i] += fb_wire_u64(sums, i);
    }
    client->held_bytes -= fill->space->layout.block_bytes;
    LIST_REMOVE(claim, in_client);
    claim->client = NULL;
    fill->area_left -= (uint64_t)claim->plane_count * claim->layer_count;
    if (fill->area_left == 0) {
        publish(node, fill, op, op_row);
    }
    return FB_OK;
}

enum fb_status fb_fill_abort(struct fb_node *node, struct fb_client *client, uint64_t claim_id)
{
    enum fb_status status = FB_OK;
    struct fb_claim *claim = find_claim(node, client, claim_id, &status);
    struct fb_fill *fill;

    if (!claim) {
        return status;
    }
    fill = claim->fill;
    abort_fill(node, fill);
    end_claim(node, claim);
    end_if_unclaimed(node, fill);
    return FB_OK;
}

void fb_fill_drop_client(struct fb_node *node, struct fb_client *client)
{
    while (!LIST_EMPTY(&client->claims)) {
        fb_fill_abort(node, client, LIST_FIRST(&client->claims)->head.id);
    }
}

void fb_fill_confirm(struct fb_node *node, struct fb_client *client, const uint8_t *held,
                     uint32_t n)
{
    struct fb_claim *claim = LIST_FIRST(&client->claims);

    while (claim) {
        struct fb_claim *next = LIST_NEXT(claim, in_client);
        uint32_t i = 0;

        while (i < n && fb_wire_u64(held, i) != claim->head.id) {
            i++;
        }
        if (claim->fill->state == FB_FILL_ABORTED && i == n) {
            fb_fill_abort(node, client, claim->head.id);
        }
        claim = next;
    }
}

void fb_fill_forget_op(struct fb_node *node, struct fb_op *op)
{
    struct fb_slab *slab = &node->fills;

    if (op->pending == 0) {
        return;
    }
    for (uint32_t i = 0; i < slab->page_count * FB_SLAB_PAGE_ITEMS; i++) {
        struct fb_fill *fill = fb_slab_at(slab, i);

        if (fill->head.id != 0 && fill->op == op) {
            fill->op = NULL;
        }
    }
    op->pending = 0;
}

void fb_fill_tick(struct fb_node *node)
{
    struct fb_fill *fill;

    while ((fill = TAILQ_FIRST(&node->fill_list)) && fill->deadline_ns <= node->now_ns) {
        abort_fill(node, fill);
        end_if_unclaimed(node, fill);
    }
}
