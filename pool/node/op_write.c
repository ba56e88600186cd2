/* Requests of writers: reserve, commit, abort. */
#include "pool/node/state.h"

/* A writer waits this long for slots that are on their way. */
#define SPACE_WAIT_NS (500ull * 1000 * 1000)

static enum fb_status check_claim(const struct fb_space *space, const struct fb_reserve_request *r,
                                  struct fb_error *error)
{
    const struct fb_layout *l = &space->layout;

    if (r->plane_count == 0 || r->plane_first >= l->plane_count ||
        r->plane_count > l->plane_count - r->plane_first || r->layer_count == 0 ||
        r->layer_first >= l->layer_count || r->layer_count > l->layer_count - r->layer_first) {
        return fb_error_set(error, FB_EINVAL,
                            "reserve: planes %u+%u, layers %u+%u; this space has %u planes and %u "
                            "layers",
                            r->plane_first, r->plane_count, r->layer_first, r->layer_count,
                            l->plane_count, l->layer_count);
    }
    if (r->position > 0 && space->rule == FB_RULE_FULL && !r->has_parent) {
        return fb_error_set(error, FB_EINVAL,
                            "reserve: page %llu without a parent; a full space needs the page "
                            "before",
                            (unsigned long long)r->position);
    }
    return FB_OK;
}

static enum fb_status begin_reserve(struct fb_node *node, struct fb_op *op,
                                    struct fb_space **ret_space, struct fb_error *error)
{
    const struct fb_reserve_request *r = &op->message.reserve;
    uint16_t tenant = op->session->tenant->index;

    *ret_space = fb_space_by_handle(node, r->space, tenant);
    if (!*ret_space) {
        return fb_error_set(error, FB_ENOENT,
                            "reserve: space %u is not open; open it after every reconnect",
                            r->space);
    }
    /* One that waits when the drain begins still hears what it has got (its deadline is over). */
    if (node->state != FB_NODE_READY && op->deadline_ns == 0) {
        return fb_error_set(error, FB_AGAIN, "reserve: the daemon is draining");
    }
    if (r->count > 0 && !fb_op_rows(op, r->count * sizeof(struct fb_reserve_row))) {
        return fb_error_set(error, FB_ENOMEM, "reserve: out of memory");
    }
    if (op->deadline_ns == 0) {
        op->deadline_ns = node->now_ns + SPACE_WAIT_NS;
    }
    return check_claim(*ret_space, r, error);
}

static enum fb_status reply_reserve(struct fb_node *node, const struct fb_op *op,
                                    uint32_t *ret_bytes)
{
    struct fb_list_reply reply = {.count = op->message.reserve.count};
    struct fb_wire_writer w;

    fb_wire_begin(&w, node->tx, FB_MSG_RESERVE, op->message.header.id, FB_OK, &reply,
                  sizeof(reply));
    fb_wire_append(&w, op->rows, reply.count * sizeof(struct fb_reserve_row));
    *ret_bytes = fb_wire_end(&w);
    return FB_OK;
}

/* Page by page. One that gets no slot ends a full space's list: its successors would be of no use
 * to anybody. */
enum fb_status fb_op_reserve(struct fb_node *node, struct fb_op *op, uint32_t *ret_bytes,
                             struct fb_error *error)
{
    const struct fb_wire_message *m = &op->message;
    const struct fb_reserve_request *r = &m->reserve;
    struct fb_space *space;
    enum fb_status status = begin_reserve(node, op, &space, error);
    struct fb_reserve_row *rows = op->rows;

    if (status != FB_OK) {
        return status;
    }
    for (; op->next < r->count; op->next++) {
        uint32_t i = op->next;
        const uint8_t *key = m->first + (size_t)i * FB_KEY_BYTES;
        const uint8_t *parent = i > 0 ? key - FB_KEY_BYTES : r->has_parent ? r->parent : NULL;

        rows[i] = (struct fb_reserve_row){.where.chunk = FB_WIRE_NOWHERE};
        status = fb_fill_reserve(node, op->session->client, space, r, key, parent, r->position + i,
                                 &rows[i]);
        if (status == FB_AGAIN && node->now_ns < op->deadline_ns) {
            op->state = FB_OP_SPACE;
            return FB_AGAIN;
        }
        rows[i].status = (uint32_t)(status == FB_ELIMIT ? FB_AGAIN : status);
        if (rows[i].status == FB_AGAIN && space->rule == FB_RULE_FULL) {
            for (; i < r->count; i++) {
                rows[i] =
                    (struct fb_reserve_row){.status = FB_AGAIN, .where.chunk = FB_WIRE_NOWHERE};
            }
            fb_metrics_add(node->metrics, FB_METRIC_AGAIN, 1);
            break;
        }
    }
    return reply_reserve(node, op, ret_bytes);
}

enum fb_status fb_op_commit(struct fb_node *node, struct fb_op *op, uint32_t *ret_bytes,
                            struct fb_error *error)
{
    const struct fb_wire_message *m = &op->message;
    struct fb_list_reply reply = {.count = m->commit.count};
    uint32_t *statuses = fb_op_rows(op, m->commit.count * sizeof(uint32_t));
    struct fb_wire_writer w;

    if (m->commit.count > 0 && !statuses) {
        return fb_error_set(error, FB_ENOMEM, "commit: out of memory");
    }
    for (; op->next < m->commit.count; op->next++) {
        uint32_t i = op->next;
        enum fb_status status;

        /* Publication may complete, and set the row, before the call returns. */
        statuses[i] = FB_OK;
        status = fb_fill_commit(node, op->session->client, fb_wire_u64(m->first, i),
                                m->second + 8 * (size_t)i * m->commit.plane_count,
                                m->commit.plane_count, op, i);
        if (status != FB_OK) {
            statuses[i] = (uint32_t)status;
        }
    }
    if (op->pending > 0) {
        op->state = FB_OP_TIER;
        return FB_AGAIN;
    }
    fb_wire_begin(&w, node->tx, FB_MSG_COMMIT, m->header.id, FB_OK, &reply, sizeof(reply));
    fb_wire_append(&w, statuses, m->commit.count * sizeof(*statuses));
    *ret_bytes = fb_wire_end(&w);
    return FB_OK;
}

enum fb_status fb_op_abort(struct fb_node *node, struct fb_op *op, uint32_t *ret_bytes,
                           struct fb_error *error)
{
    const struct fb_wire_message *m = &op->message;
    struct fb_list_reply reply = {.count = m->list.count};
    struct fb_wire_writer w;

    (void)error;
    fb_wire_begin(&w, node->tx, FB_MSG_ABORT, m->header.id, FB_OK, &reply, sizeof(reply));
    for (uint32_t i = 0; i < m->list.count; i++) {
        uint32_t status =
            (uint32_t)fb_fill_abort(node, op->session->client, fb_wire_u64(m->first, i));

        fb_wire_append(&w, &status, sizeof(status));
    }
    *ret_bytes = fb_wire_end(&w);
    return FB_OK;
}
