/* Requests of readers: lookup, leases, reject, hints. */
#include "pool/node/state.h"

/* Which pages a space has. Past the first missing page nothing of a full space counts. */
static void find_pages(struct fb_node *node, const struct fb_space *space, const uint8_t *keys,
                       uint32_t pages, uint32_t *ids, uint8_t *present)
{
    struct fb_class *class = &node->classes[space->class_id];

    fb_index_find(node->index, keys, FB_KEY_BYTES, pages, ids);
    for (uint32_t i = 0; i < pages; i++) {
        present[i] =
            ids[i] != FB_ENTRY_NONE && fb_index_space(node->index, ids[i]) == space->handle;
        if (!present[i]) {
            ids[i] = FB_ENTRY_NONE;
            if (space->rule == FB_RULE_FULL) {
                fb_balance_missed(class, keys + (size_t)i * FB_KEY_BYTES, pages - i);
                memset(present + i, 0, pages - i);
                return;
            }
            fb_balance_missed(class, keys + (size_t)i * FB_KEY_BYTES, 1);
        }
    }
}

static void put_locations(struct fb_node *node, struct fb_wire_writer *w, const uint32_t *cells,
                          uint32_t n)
{
    uint8_t *at = fb_wire_append(w, NULL, n * sizeof(struct fb_wire_location));

    for (uint32_t i = 0; i < n; i++) {
        struct fb_wire_location out = {FB_WIRE_NOWHERE, 0};

        if (cells[i] != FB_ENTRY_NONE) {
            struct fb_location where = fb_index_location(node->index, cells[i]);

            out = (struct fb_wire_location){where.chunk, where.slot};
        }
        memcpy(at + i * sizeof(out), &out, sizeof(out));
    }
}

static enum fb_status get_spaces(struct fb_node *node, const struct fb_op *op,
                                 struct fb_space *spaces[FB_MAX_FAMILY], struct fb_error *error)
{
    const struct fb_wire_message *m = &op->message;

    for (uint32_t s = 0; s < m->lookup.space_count; s++) {
        uint32_t handle = fb_wire_u32(m->first, s);

        spaces[s] = fb_space_by_handle(node, handle, op->session->tenant->index);
        if (!spaces[s]) {
            return fb_error_set(error, FB_ENOENT,
                                "lookup: space %u is not open; open it after every reconnect",
                                handle);
        }
        if (spaces[s]->layout.page_tokens != spaces[0]->layout.page_tokens) {
            return fb_error_set(error, FB_EINVAL,
                                "lookup: spaces of %u and of %u tokens a page in one family",
                                spaces[0]->layout.page_tokens, spaces[s]->layout.page_tokens);
        }
    }
    return FB_OK;
}

/* Leave only the pages that a hit of `prefix` pages needs. Returns their bytes, and those of pages
 * that nobody has in use yet. */
static uint64_t trim_family(struct fb_node *node, struct fb_space *const *spaces, uint32_t count,
                            uint32_t pages, uint32_t prefix, uint64_t *ret_fresh)
{
    uint64_t bytes = 0;

    *ret_fresh = 0;
    for (uint32_t s = 0; s < count; s++) {
        uint32_t first = fb_family_first(spaces[s]->rule, spaces[s]->window_pages, prefix);
        uint32_t *ids = node->ids + (size_t)s * pages;

        for (uint32_t i = 0; i < first; i++) {
            ids[i] = FB_ENTRY_NONE;
        }
        for (uint32_t i = first; i < prefix; i++) {
            bytes += spaces[s]->layout.block_bytes;
            if (fb_index_refs(node->index, ids[i]) == 0) {
                *ret_fresh += spaces[s]->layout.block_bytes;
            }
        }
        node->classes[spaces[s]->class_id].hits += prefix - first;
    }
    return bytes;
}

enum fb_status fb_op_lookup(struct fb_node *node, struct fb_op *op, uint32_t *ret_bytes,
                            struct fb_error *error)
{
    const struct fb_wire_message *m = &op->message;
    uint32_t count = m->lookup.space_count, pages = m->lookup.page_count, prefix;
    struct fb_lookup_reply reply = {.space_count = count};
    struct fb_family_member members[FB_MAX_FAMILY];
    struct fb_space *spaces[FB_MAX_FAMILY] = {NULL};
    struct fb_lease *lease;
    struct fb_wire_writer w;
    enum fb_status status;
    uint64_t bytes, fresh;

    if (count == 0 || pages == 0) {
        return fb_error_set(error, FB_EINVAL, "lookup: %u spaces, %u pages; expected 1 or more",
                            count, pages);
    }
    status = get_spaces(node, op, spaces, error);
    if (status != FB_OK) {
        return status;
    }
    for (uint32_t s = 0; s < count; s++) {
        size_t at = (size_t)s * pages;

        FB_ASSERT(spaces[s]);
        find_pages(node, spaces[s], m->second + at * FB_KEY_BYTES, pages, node->ids + at,
                   node->present + at);
        members[s] =
            (struct fb_family_member){spaces[s]->rule, spaces[s]->window_pages, node->present + at};
    }
    prefix = node->state == FB_NODE_READY ? fb_family_prefix(members, count, pages) : 0;
    fb_metrics_add(node->metrics, FB_METRIC_LOOKUPS, 1);
    fb_metrics_add(node->metrics, FB_METRIC_LOOKUP_PAGES, pages);
    if (prefix > 0) {
        bytes = trim_family(node, spaces, count, pages, prefix, &fresh);
        if (!fb_client_may_hold(op->session->client, bytes, fresh)) {
            return fb_error_set(error, FB_AGAIN,
                                "lookup: this client holds %llu bytes; release some leases",
                                (unsigned long long)op->session->client->held_bytes);
        }
        status = fb_lease_grant(node, op->session->client, count, prefix, node->ids, pages, bytes,
                                &lease);
        if (status != FB_OK) {
            return status;
        }
        op->granted = lease;
        fb_metrics_add(node->metrics, FB_METRIC_LOOKUP_HIT_PAGES, prefix);
        reply.page_count = prefix;
        reply.lease = lease->head.id;
        reply.lease_ms = (uint32_t)(node->config.lease_ns / 1000000);
    }
    fb_wire_begin(&w, node->tx, FB_MSG_LOOKUP, m->header.id, FB_OK, &reply, sizeof(reply));
    if (prefix > 0) {
        put_locations(node, &w, lease->cells, count * prefix);
    }
    *ret_bytes = fb_wire_end(&w);
    return FB_OK;
}

enum fb_status fb_op_attach(struct fb_node *node, struct fb_op *op, uint32_t *ret_bytes,
                            struct fb_error *error)
{
    const struct fb_wire_message *m = &op->message;
    struct fb_list_reply reply = {.count = m->list.count};
    struct fb_lease **leases = fb_op_rows(op, m->list.count * sizeof(struct fb_lease *));
    uint32_t cells = 0;
    struct fb_wire_writer w;

    if (m->list.count > 0 && !leases) {
        return FB_ENOMEM;
    }
    for (uint32_t i = 0; i < m->list.count; i++) {
        cells += fb_lease_cells(node, op->session->client, fb_wire_u64(m->first, i));
    }
    if (cells > FB_WIRE_MAX_KEYS) {
        return fb_error_set(error, FB_ELIMIT,
                            "attach: leases of %u pages in one message, %u are possible; attach "
                            "fewer at once",
                            cells, FB_WIRE_MAX_KEYS);
    }
    fb_wire_begin(&w, node->tx, FB_MSG_ATTACH, m->header.id, FB_OK, &reply, sizeof(reply));
    for (uint32_t i = 0; i < m->list.count; i++) {
        struct fb_attach_row row = {0};

        leases[i] = NULL;
        row.status = (uint32_t)fb_lease_attach(node, op->session->client, fb_wire_u64(m->first, i),
                                               &leases[i]);
        if (row.status == FB_OK) {
            row.space_count = leases[i]->space_count;
            row.page_count = leases[i]->page_count;
            row.lease_ms = (uint32_t)((leases[i]->deadline_ns - node->now_ns) / 1000000);
        }
        fb_wire_append(&w, &row, sizeof(row));
    }
    for (uint32_t i = 0; i < m->list.count; i++) {
        if (leases[i]) {
            put_locations(node, &w, leases[i]->cells,
                          leases[i]->space_count * leases[i]->page_count);
        }
    }
    *ret_bytes = fb_wire_end(&w);
    return FB_OK;
}

enum fb_status fb_op_release(struct fb_node *node, struct fb_op *op, uint32_t *ret_bytes,
                             struct fb_error *error)
{
    const struct fb_wire_message *m = &op->message;
    struct fb_list_reply reply = {.count = m->list.count};
    struct fb_wire_writer w;

    (void)error;
    fb_wire_begin(&w, node->tx, FB_MSG_RELEASE, m->header.id, FB_OK, &reply, sizeof(reply));
    for (uint32_t i = 0; i < m->list.count; i++) {
        uint32_t status =
            (uint32_t)fb_lease_release(node, op->session->client, fb_wire_u64(m->first, i));

        fb_wire_append(&w, &status, sizeof(status));
    }
    *ret_bytes = fb_wire_end(&w);
    return FB_OK;
}

/* The client names all that it holds; what has run out and is not named is thereby given back. */
enum fb_status fb_op_renew(struct fb_node *node, struct fb_op *op, uint32_t *ret_bytes,
                           struct fb_error *error)
{
    const struct fb_wire_message *m = &op->message;
    struct fb_client *client = op->session->client;
    struct fb_list_reply reply = {.count = m->renew.lease_count};
    struct fb_wire_writer w;

    (void)error;
    fb_wire_begin(&w, node->tx, FB_MSG_RENEW, m->header.id, FB_OK, &reply, sizeof(reply));
    for (uint32_t i = 0; i < m->renew.lease_count; i++) {
        uint32_t status = (uint32_t)fb_lease_renew(node, client, fb_wire_u64(m->first, i));

        fb_wire_append(&w, &status, sizeof(status));
    }
    fb_lease_confirm(node, client, m->first, m->renew.lease_count);
    fb_fill_confirm(node, client, m->first + 8 * (size_t)m->renew.lease_count,
                    m->renew.claim_count);
    for (uint32_t i = 0; i < m->renew.unmapped_count; i++) {
        fb_client_unmapped(node, client, fb_wire_u32(m->second, i));
    }
    if (fb_survivors_returned(&op->session->tenant->survivors, client->id)) {
        fb_op_wake_all(node);
    }
    *ret_bytes = fb_wire_end(&w);
    return FB_OK;
}

/* Pin what a client that outlived the daemon still uses: the block where there is one, else the
 * bare slot, under an entry that no lookup sees. */
static uint32_t adopt_slot(struct fb_node *node, const struct fb_tenant *tenant,
                           struct fb_location where, uint8_t *ret_is_new)
{
    struct fb_chunk *chunk = fb_host_chunk(node->host, where.chunk);
    static const uint8_t no_key[FB_INDEX_KEY_BYTES];
    uint32_t entry;

    *ret_is_new = false;
    if (!chunk || chunk->tenant != tenant->index || where.slot >= chunk->file.slot_count) {
        return FB_ENTRY_NONE;
    }
    if (chunk->entries[where.slot] != FB_ENTRY_NONE) {
        return chunk->entries[where.slot];
    }
    if (tenant->survivors.count == 0 || !fb_host_take(node->host, chunk, where.slot)) {
        return FB_ENTRY_NONE;
    }
    if (fb_index_insert(node->index, no_key, FB_ENTRY_NONE, node->classes[chunk->class_id].order, 0,
                        where, &entry) != FB_OK) {
        node->tier->ops->free(node->tier, where);
        return FB_ENTRY_NONE;
    }
    fb_index_detach(node->index, entry);
    chunk->entries[where.slot] = entry;
    fb_block_inserted(node, entry);
    *ret_is_new = true;
    return entry;
}

enum fb_status fb_op_resume(struct fb_node *node, struct fb_op *op, uint32_t *ret_bytes,
                            struct fb_error *error)
{
    const struct fb_wire_message *m = &op->message;
    struct fb_resume_reply reply;
    struct fb_wire_writer w;
    struct fb_lease *lease;
    enum fb_status status;
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < m->resume.count; i++) {
        struct fb_wire_location where;

        memcpy(&where, m->first + i * sizeof(where), sizeof(where));
        node->ids[i] = adopt_slot(node, op->session->tenant,
                                  (struct fb_location){where.chunk, where.slot}, &node->present[i]);
        if (node->ids[i] != FB_ENTRY_NONE) {
            bytes += fb_host_chunk(node->host, where.chunk)->file.slot_bytes;
        }
    }
    status = fb_lease_grant(node, op->session->client, 1, m->resume.count, node->ids,
                            m->resume.count, bytes, &lease);
    if (status == FB_OK) {
        fb_lease_pin(node, lease);
    }
    /* A bare slot came with the pin of its insertion; the lease has its own. */
    for (uint32_t i = 0; i < m->resume.count; i++) {
        if (node->present[i]) {
            fb_block_unpin(node, node->ids[i]);
        }
    }
    if (status != FB_OK) {
        return fb_error_set(error, status, "resume: %s", fb_status_text(status));
    }
    reply.lease = lease->head.id;
    fb_wire_begin(&w, node->tx, FB_MSG_RESUME, m->header.id, FB_OK, &reply, sizeof(reply));
    *ret_bytes = fb_wire_end(&w);
    return FB_OK;
}

/* Every segment of every plane, by the CPU: rejects are rare, and a false one must cost nothing. */
static bool is_good(struct fb_node *node, const struct fb_space *space, const uint8_t *key,
                    uint32_t entry)
{
    struct fb_location where = fb_index_location(node->index, entry);
    const struct fb_block_header *header = fb_block_header(node, where);

    /* The index finds by the beginning of a key; its end may be the report's mistake. */
    return fb_block_header_check(header, NULL) == FB_OK &&
           memcmp(header->key, key, FB_INDEX_KEY_BYTES) == 0 &&
           fb_block_header_match(header, space->id, header->key, &space->layout) == FB_OK &&
           fb_block_check(fb_kernels_best(), &space->layout, (const uint8_t *)header, 0,
                          space->layout.plane_count) == FB_OK;
}

enum fb_status fb_op_reject(struct fb_node *node, struct fb_op *op, uint32_t *ret_bytes,
                            struct fb_error *error)
{
    const struct fb_wire_message *m = &op->message;
    struct fb_space *space = fb_space_by_handle(node, m->reject.space, op->session->tenant->index);
    struct fb_list_reply reply = {.count = m->reject.count};
    struct fb_wire_writer w;

    if (!space) {
        return fb_error_set(error, FB_ENOENT, "reject: space %u is not open", m->reject.space);
    }
    fb_wire_begin(&w, node->tx, FB_MSG_REJECT, m->header.id, FB_OK, &reply, sizeof(reply));
    for (uint32_t i = 0; i < m->reject.count; i++) {
        const uint8_t *key = m->first + (size_t)i * FB_KEY_BYTES;
        uint32_t entry, status = FB_MISS;

        fb_index_find(node->index, key, FB_KEY_BYTES, 1, &entry);
        if (entry != FB_ENTRY_NONE && fb_index_space(node->index, entry) == space->handle) {
            status = FB_OK;
            if (!is_good(node, space, key, entry)) {
                fb_log(&node->log, FB_LOG_ERROR, "block_rejected",
                       FB_KV_STR("tenant", op->session->tenant->name), FB_KV_HEX("key", key, 8));
                fb_event_push(node, FB_EVENT_REJECTED, space->tenant, space->id, key, 1);
                fb_metrics_add(node->metrics, FB_METRIC_REJECTED_BLOCKS, 1);
                fb_block_drop(node, entry);
                status = FB_ECORRUPT;
            }
        }
        fb_wire_append(&w, &status, sizeof(status));
    }
    *ret_bytes = fb_wire_end(&w);
    return FB_OK;
}

static enum fb_status pin(struct fb_node *node, struct fb_tenant *tenant, uint32_t entry,
                          bool pinned, uint64_t block_bytes)
{
    bool is = fb_index_flags(node->index, entry) & FB_ENTRY_PINNED;

    if (is == pinned) {
        return FB_OK;
    }
    if (pinned && tenant->pinned_bytes + block_bytes > tenant->pin_limit_bytes) {
        return FB_ELIMIT;
    }
    tenant->pinned_bytes += pinned ? block_bytes : -block_bytes;
    fb_index_set_pinned(node->index, entry, pinned);
    return FB_OK;
}

/* Hints count for a page and its ancestors: pins are set along the parents as far as they go. */
static enum fb_status hint_one(struct fb_node *node, struct fb_tenant *tenant,
                               const struct fb_space *space, uint32_t entry, uint32_t hint,
                               uint32_t value)
{
    uint32_t at = entry;

    switch (hint) {
    case FB_HINT_PRIORITY:
        fb_index_set_priority(node->index, entry, (enum fb_priority)value);
        return FB_OK;
    case FB_HINT_TTL: return fb_expiry_set(node, entry, value);
    case FB_HINT_PIN:
        if (!value) {
            return pin(node, tenant, entry, false, space->layout.block_bytes);
        }
        while (at != FB_ENTRY_NONE && !(fb_index_flags(node->index, at) & FB_ENTRY_PINNED)) {
            enum fb_status status = pin(node, tenant, at, true, space->layout.block_bytes);

            if (status != FB_OK) {
                return status;
            }
            at = fb_index_parent(node->index, at);
        }
        return FB_OK;
    }
    return FB_EINVAL;
}

enum fb_status fb_op_hint(struct fb_node *node, struct fb_op *op, uint32_t *ret_bytes,
                          struct fb_error *error)
{
    const struct fb_wire_message *m = &op->message;
    struct fb_space *space = fb_space_by_handle(node, m->hint.space, op->session->tenant->index);
    struct fb_list_reply reply = {.count = m->hint.count};
    struct fb_wire_writer w;

    if (!space) {
        return fb_error_set(error, FB_ENOENT, "hint: space %u is not open", m->hint.space);
    }
    if (m->hint.hint < FB_HINT_PRIORITY || m->hint.hint > FB_HINT_PIN ||
        (m->hint.hint == FB_HINT_PRIORITY && m->hint.value >= FB_PRIORITIES)) {
        return fb_error_set(error, FB_EINVAL,
                            "hint: kind %u with value %u; expected priority 0 to 2, a time to "
                            "live in seconds, or pin 0 or 1",
                            m->hint.hint, m->hint.value);
    }
    fb_wire_begin(&w, node->tx, FB_MSG_HINT, m->header.id, FB_OK, &reply, sizeof(reply));
    for (uint32_t i = 0; i < m->hint.count; i++) {
        uint32_t entry, status = FB_MISS;

        fb_index_find(node->index, m->first + (size_t)i * FB_KEY_BYTES, FB_KEY_BYTES, 1, &entry);
        if (entry != FB_ENTRY_NONE && fb_index_space(node->index, entry) == space->handle) {
            status = (uint32_t)hint_one(node, op->session->tenant, space, entry, m->hint.hint,
                                        m->hint.value);
        }
        fb_wire_append(&w, &status, sizeof(status));
    }
    *ret_bytes = fb_wire_end(&w);
    return FB_OK;
}
