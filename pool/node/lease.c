/* Leases: who reads what, until when. */
#include "pool/node/state.h"

#include <stdlib.h>

/* Cells come in powers of two and are kept for the next lease. */
static uint32_t cell_class(uint32_t n)
{
    uint32_t i = 0;

    while (i + 1 < FB_CELL_CLASSES && (32u << i) < n) {
        i++;
    }
    return i;
}

static uint32_t *take_cells(struct fb_node *node, uint32_t n)
{
    uint32_t i = cell_class(n);
    struct fb_free_cells *cells = node->free_cells[i];

    _Static_assert((32u << (FB_CELL_CLASSES - 1)) >= FB_WIRE_MAX_KEYS, "cells of a full lookup");
    if (!cells) {
        return malloc((32u << i) * sizeof(uint32_t));
    }
    node->free_cells[i] = cells->next;
    return (uint32_t *)cells;
}

static void give_cells(struct fb_node *node, uint32_t *cells, uint32_t n)
{
    struct fb_free_cells *free_cells = (struct fb_free_cells *)cells;
    uint32_t i = cell_class(n);

    free_cells->next = node->free_cells[i];
    node->free_cells[i] = free_cells;
}

static bool add_hold(struct fb_node *node, struct fb_client *client, struct fb_lease *lease)
{
    struct fb_hold *hold = fb_slab_alloc(&node->holds);

    if (!hold) {
        return false;
    }
    hold->client = client;
    hold->lease = lease;
    LIST_INSERT_HEAD(&client->holds, hold, in_client);
    LIST_INSERT_HEAD(&lease->holds, hold, in_lease);
    client->held_bytes += lease->bytes;
    return true;
}

enum fb_status fb_lease_grant(struct fb_node *node, struct fb_client *client, uint32_t space_count,
                              uint32_t page_count, const uint32_t *cells, uint32_t stride,
                              uint64_t bytes, struct fb_lease **ret_lease)
{
    uint32_t n = space_count * page_count;
    struct fb_lease *lease = fb_slab_alloc(&node->leases);

    if (!lease) {
        return FB_ENOMEM;
    }
    lease->cells = take_cells(node, n);
    lease->bytes = bytes;
    if (!lease->cells || !add_hold(node, client, lease)) {
        if (lease->cells) {
            give_cells(node, lease->cells, n);
        }
        fb_slab_free(&node->leases, lease);
        return FB_ENOMEM;
    }
    lease->tenant = client->tenant;
    lease->space_count = space_count;
    lease->page_count = page_count;
    lease->deadline_ns = node->now_ns + node->config.lease_ns;
    for (uint32_t s = 0; s < space_count; s++) {
        for (uint32_t p = 0; p < page_count; p++) {
            lease->cells[s * page_count + p] = cells[s * stride + p];
        }
    }
    TAILQ_INSERT_TAIL(&node->lease_list, lease, link);
    node->leased_bytes += bytes;
    fb_metrics_add(node->metrics, FB_METRIC_LEASES_GRANTED, 1);
    *ret_lease = lease;
    return FB_OK;
}

void fb_lease_pin(struct fb_node *node, const struct fb_lease *lease)
{
    uint32_t n = lease->space_count * lease->page_count;

    for (uint32_t i = 0; i < n; i++) {
        if (lease->cells[i] != FB_ENTRY_NONE) {
            fb_block_pin(node, lease->cells[i]);
        }
    }
}

/* The first page goes first, so that each lands directly behind its parent. */
static void end_lease(struct fb_node *node, struct fb_lease *lease)
{
    uint32_t n = lease->space_count * lease->page_count;

    if (lease->expired) {
        node->quarantined_bytes -= lease->bytes;
    } else {
        TAILQ_REMOVE(&node->lease_list, lease, link);
        node->leased_bytes -= lease->bytes;
    }
    for (uint32_t i = 0; i < n; i++) {
        if (lease->cells[i] != FB_ENTRY_NONE) {
            fb_block_unpin(node, lease->cells[i]);
        }
    }
    give_cells(node, lease->cells, n);
    fb_slab_free(&node->leases, lease);
    fb_op_wake_all(node);
}

static void end_hold(struct fb_node *node, struct fb_hold *hold)
{
    struct fb_lease *lease = hold->lease;

    LIST_REMOVE(hold, in_client);
    LIST_REMOVE(hold, in_lease);
    hold->client->held_bytes -= lease->bytes;
    fb_slab_free(&node->holds, hold);
    if (LIST_EMPTY(&lease->holds)) {
        end_lease(node, lease);
    }
}

static struct fb_hold *find_hold(const struct fb_lease *lease, const struct fb_client *client)
{
    struct fb_hold *hold;

    LIST_FOREACH(hold, &lease->holds, in_lease) {
        if (hold->client == client) {
            return hold;
        }
    }
    return NULL;
}

static struct fb_lease *find_lease(struct fb_node *node, const struct fb_client *client,
                                   uint64_t id)
{
    struct fb_lease *lease = fb_slab_get(&node->leases, id);

    return lease && lease->tenant == client->tenant ? lease : NULL;
}

uint32_t fb_lease_cells(struct fb_node *node, const struct fb_client *client, uint64_t id)
{
    const struct fb_lease *lease = find_lease(node, client, id);

    return lease ? lease->space_count * lease->page_count : 0;
}

enum fb_status fb_lease_attach(struct fb_node *node, struct fb_client *client, uint64_t id,
                               struct fb_lease **ret_lease)
{
    struct fb_lease *lease = find_lease(node, client, id);

    if (!lease || lease->deadline_ns <= node->now_ns) {
        return FB_ENOENT;
    }
    if (!find_hold(lease, client)) {
        if (!fb_client_may_hold(client, lease->bytes, 0)) {
            return FB_AGAIN;
        }
        if (!add_hold(node, client, lease)) {
            return FB_ENOMEM;
        }
    }
    *ret_lease = lease;
    return FB_OK;
}

enum fb_status fb_lease_release(struct fb_node *node, struct fb_client *client, uint64_t id)
{
    struct fb_lease *lease = find_lease(node, client, id);
    struct fb_hold *hold = lease ? find_hold(lease, client) : NULL;

    if (!hold) {
        return FB_ENOENT;
    }
    end_hold(node, hold);
    return FB_OK;
}

enum fb_status fb_lease_renew(struct fb_node *node, struct fb_client *client, uint64_t id)
{
    struct fb_lease *lease = find_lease(node, client, id);

    if (!lease || lease->expired || !find_hold(lease, client)) {
        return FB_ENOENT;
    }
    lease->deadline_ns = node->now_ns + node->config.lease_ns;
    TAILQ_REMOVE(&node->lease_list, lease, link);
    TAILQ_INSERT_TAIL(&node->lease_list, lease, link);
    return FB_OK;
}

void fb_lease_drop_client(struct fb_node *node, struct fb_client *client)
{
    while (!LIST_EMPTY(&client->holds)) {
        end_hold(node, LIST_FIRST(&client->holds));
    }
}

static bool contains(const uint8_t *ids, uint32_t n, uint64_t id)
{
    for (uint32_t i = 0; i < n; i++) {
        if (fb_wire_u64(ids, i) == id) {
            return true;
        }
    }
    return false;
}

void fb_lease_confirm(struct fb_node *node, struct fb_client *client, const uint8_t *held,
                      uint32_t n)
{
    struct fb_hold *hold = LIST_FIRST(&client->holds);

    while (hold) {
        struct fb_hold *next = LIST_NEXT(hold, in_client);

        if (hold->lease->expired && !contains(held, n, hold->lease->head.id)) {
            end_hold(node, hold);
        }
        hold = next;
    }
}

void fb_lease_tick(struct fb_node *node)
{
    struct fb_lease *lease;

    while ((lease = TAILQ_FIRST(&node->lease_list)) && lease->deadline_ns <= node->now_ns) {
        TAILQ_REMOVE(&node->lease_list, lease, link);
        lease->expired = true;
        node->leased_bytes -= lease->bytes;
        node->quarantined_bytes += lease->bytes;
        fb_metrics_add(node->metrics, FB_METRIC_LEASES_EXPIRED, 1);
    }
}
