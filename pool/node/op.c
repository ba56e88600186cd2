/* Operations: one request of a session, from packet to reply.
 *
 *   IDLE -> RUN -> answered, IDLE
 *            |  ^
 *            v  |
 *          SPACE (slots are awaited, until a deadline) | TIER (completions are awaited)
 *
 * fb_op_advance is the only function that moves an operation on. A session has one operation at a
 * time, and is not read from while it waits. Sessions that die cancel theirs. */
#include "pool/node/state.h"

#include <stdlib.h>
#include <unistd.h>

static enum fb_status do_hello(struct fb_node *node, struct fb_op *op, uint32_t *ret_bytes,
                               struct fb_error *error)
{
    struct fb_session *session = op->session;
    bool existed = false;
    struct fb_hello_reply reply = {
        .version = FB_WIRE_VERSION,
        .lease_ms = (uint32_t)(node->config.lease_ns / 1000000),
        .reserve_ms = (uint32_t)(node->config.reserve_ns / 1000000),
        .incarnation = node->incarnation,
    };
    struct fb_wire_writer w;
    enum fb_status status = fb_client_hello(node, session, &op->message.hello,
                                            op->fd_count > 0 ? op->fds[0] : -1, &existed, error);

    if (status != FB_OK) {
        return status;
    }
    reply.client_existed = existed;
    memcpy(reply.tenant, session->tenant->name, sizeof(reply.tenant));
    fb_wire_begin(&w, node->tx, FB_MSG_HELLO, op->message.header.id, FB_OK, &reply, sizeof(reply));
    *ret_bytes = fb_wire_end(&w);
    return FB_OK;
}

static enum fb_status do_space(struct fb_node *node, struct fb_op *op, uint32_t *ret_bytes,
                               struct fb_error *error)
{
    struct fb_space_reply reply;
    struct fb_wire_writer w;
    struct fb_space *space;
    enum fb_status status = fb_space_open(node, op->session->tenant->index, op->message.first,
                                          op->message.space.manifest_bytes, &space, error);

    if (status != FB_OK) {
        return status;
    }
    fb_client_used_space(op->session->client, space);
    reply.space = space->handle;
    fb_wire_begin(&w, node->tx, FB_MSG_SPACE, op->message.header.id, FB_OK, &reply, sizeof(reply));
    *ret_bytes = fb_wire_end(&w);
    return FB_OK;
}

/* The reply carries a descriptor for each chunk of the tenant that was asked for. */
static enum fb_status do_chunks(struct fb_node *node, struct fb_op *op, uint32_t *ret_bytes,
                                struct fb_error *error)
{
    const struct fb_wire_message *m = &op->message;
    struct fb_list_reply reply = {.count = m->list.count};
    struct fb_wire_writer w;

    (void)error;
    fb_wire_begin(&w, node->tx, FB_MSG_CHUNKS, m->header.id, FB_OK, &reply, sizeof(reply));
    for (uint32_t i = 0; i < m->list.count; i++) {
        struct fb_chunk *chunk = fb_host_chunk(node->host, fb_wire_u32(m->first, i));
        struct fb_chunk_row row = {.status = FB_ENOENT, .chunk = fb_wire_u32(m->first, i)};

        if (chunk && chunk->tenant == op->session->tenant->index) {
            row.status = (uint32_t)fb_client_give_chunk(op->session->client, chunk);
            row.bytes = chunk->file.file_bytes;
            row.slot_bytes = chunk->file.slot_bytes;
            row.slots_offset = FB_CHUNK_HEADER_BYTES;
        }
        if (row.status == FB_OK) {
            op->reply_fds[op->reply_fd_count++] = chunk->file.fd;
        }
        fb_wire_append(&w, &row, sizeof(row));
    }
    *ret_bytes = fb_wire_end(&w);
    return FB_OK;
}

static const fb_op_handler handlers[FB_MSG_END] = {
    [FB_MSG_HELLO] = do_hello,        [FB_MSG_SPACE] = do_space,
    [FB_MSG_LOOKUP] = fb_op_lookup,   [FB_MSG_ATTACH] = fb_op_attach,
    [FB_MSG_RELEASE] = fb_op_release, [FB_MSG_RENEW] = fb_op_renew,
    [FB_MSG_RESERVE] = fb_op_reserve, [FB_MSG_COMMIT] = fb_op_commit,
    [FB_MSG_ABORT] = fb_op_abort,     [FB_MSG_REJECT] = fb_op_reject,
    [FB_MSG_HINT] = fb_op_hint,       [FB_MSG_CHUNKS] = do_chunks,
    [FB_MSG_RESUME] = fb_op_resume,
};

void *fb_op_rows(struct fb_op *op, size_t bytes)
{
    if (op->rows_bytes < bytes) {
        void *rows = realloc(op->rows, bytes);

        if (!rows) {
            return NULL;
        }
        op->rows = rows;
        op->rows_bytes = bytes;
    }
    return op->rows;
}

static void close_received(struct fb_op *op)
{
    for (uint32_t i = 0; i < op->fd_count; i++) {
        close(op->fds[i]);
    }
    op->fd_count = 0;
}

/* A reply that the socket does not take means a client that does not read: it is cut off. */
static void send_reply(struct fb_node *node, struct fb_op *op, uint32_t bytes)
{
    enum fb_status status = FB_OK;

    if (op->message.header.status != FB_WIRE_NO_REPLY) {
        status = fb_channel_send(op->session->channel, node->tx, bytes, op->reply_fds,
                                 op->reply_fd_count);
    }
    if (status != FB_OK) {
        fb_session_mark(node, op->session);
    }
}

static void observe(struct fb_node *node, const struct fb_op *op, enum fb_status status)
{
    static const enum fb_metric histograms[FB_MSG_END] = {
        [FB_MSG_LOOKUP] = FB_METRIC_LOOKUP_SECONDS,
        [FB_MSG_RESERVE] = FB_METRIC_RESERVE_SECONDS,
        [FB_MSG_COMMIT] = FB_METRIC_COMMIT_SECONDS,
    };
    uint16_t type = op->message.header.type;

    if (type < FB_MSG_END && histograms[type]) {
        fb_metrics_observe(node->metrics, histograms[type], fb_node_clock() - op->begun_ns);
    }
    if (status == FB_AGAIN) {
        fb_metrics_add(node->metrics, FB_METRIC_AGAIN, 1);
    }
    if (status == FB_EPROTO || status == FB_EVERSION) {
        fb_metrics_add(node->metrics, FB_METRIC_PROTOCOL_ERRORS, 1);
    }
}

static void log_failure(struct fb_node *node, const struct fb_op *op, const struct fb_error *error)
{
    uint64_t held_back;

    if (error->status != FB_AGAIN &&
        fb_log_limit_pass(&node->protocol_limit, node->now_ns, &held_back)) {
        fb_log(&node->log, FB_LOG_WARN, "request_failed",
               FB_KV_STR("tenant", op->session->tenant->name),
               FB_KV_U64("type", op->message.header.type), FB_KV_U64("id", op->message.header.id),
               FB_KV_STR("status", fb_status_name(error->status)), FB_KV_STR("why", error->text),
               FB_KV_U64("held_back", held_back));
    }
}

/* Keep the packet: the reactor's buffer goes to others while the op waits. */
static bool keep_packet(struct fb_op *op)
{
    uint8_t *kept;

    if (op->packet == op->kept) {
        return true;
    }
    kept = realloc(op->kept, op->packet_bytes);
    if (!kept) {
        return false;
    }
    memcpy(kept, op->packet, op->packet_bytes);
    op->kept = kept;
    op->packet = kept;
    return fb_wire_parse_request(kept, op->packet_bytes, &op->message, NULL) == FB_OK;
}

static void run(struct fb_node *node, struct fb_op *op)
{
    struct fb_error error = {.status = FB_OK};
    uint16_t type = op->message.header.type;
    uint32_t bytes = 0;
    enum fb_status status;

    if (!op->session->client && type != FB_MSG_HELLO) {
        status = fb_error_set(&error, FB_ESTATE, "the first message must be hello");
    } else {
        status = handlers[type](node, op, &bytes, &error);
    }
    if (status == FB_AGAIN && (op->state == FB_OP_SPACE || op->state == FB_OP_TIER)) {
        if (keep_packet(op)) {
            if (op->state == FB_OP_SPACE) {
                TAILQ_INSERT_TAIL(&node->waiting, op, link);
            }
            return;
        }
        status = fb_error_set(&error, FB_ENOMEM, "out of memory");
    }
    close_received(op);
    if (status != FB_OK) {
        if (error.status == FB_OK) {
            fb_error_set(&error, status, "%s", fb_status_text(status));
        }
        log_failure(node, op, &error);
        bytes = fb_wire_fail(node->tx, (enum fb_msg)type, op->message.header.id, &error);
    }
    observe(node, op, status);
    send_reply(node, op, bytes);
    /* The client need not wait for its pins: nothing else runs on this thread before they are set.
     */
    if (op->granted) {
        fb_lease_pin(node, op->granted);
        op->granted = NULL;
    }
    op->state = FB_OP_IDLE;
}

void fb_op_advance(struct fb_node *node, struct fb_op *op)
{
    if (op->state == FB_OP_RUN) {
        run(node, op);
    }
}

void fb_op_start(struct fb_node *node, struct fb_session *session, size_t packet_bytes)
{
    struct fb_op *op = &session->op;
    struct fb_error error;
    enum fb_status status;

    op->session = session;
    op->packet = node->rx;
    op->packet_bytes = packet_bytes;
    op->begun_ns = fb_node_clock();
    op->deadline_ns = 0;
    op->next = 0;
    op->pending = 0;
    op->reply_fd_count = 0;
    status = fb_wire_parse_request(node->rx, packet_bytes, &op->message, &error);
    if (status == FB_OK) {
        op->state = FB_OP_RUN;
        fb_op_advance(node, op);
        return;
    }
    close_received(op);
    observe(node, op, status);
    log_failure(node, op, &error);
    send_reply(node, op,
               fb_wire_fail(node->tx, (enum fb_msg)op->message.header.type, op->message.header.id,
                            &error));
    /* After a message that breaks the protocol nothing on this connection can be believed; a list
     * over its limit is an honest mistake. */
    if (status != FB_ELIMIT) {
        fb_session_mark(node, session);
    }
}

void fb_op_cancel(struct fb_node *node, struct fb_op *op)
{
    if (op->state == FB_OP_SPACE) {
        TAILQ_REMOVE(&node->waiting, op, link);
    }
    if (op->message.header.type == FB_MSG_RESERVE && op->state == FB_OP_SPACE &&
        op->session->client) {
        /* Nobody will ever hear of these claims. */
        const struct fb_reserve_row *rows = op->rows;

        for (uint32_t i = 0; i < op->next; i++) {
            if (rows[i].status == FB_OK) {
                fb_fill_abort(node, op->session->client, rows[i].claim);
            }
        }
    }
    fb_fill_forget_op(node, op);
    op->state = FB_OP_IDLE;
    free(op->kept);
    free(op->rows);
    op->kept = NULL;
    op->rows = NULL;
    op->rows_bytes = 0;
}

void fb_op_wake_all(struct fb_node *node)
{
    node->woken = true;
}

void fb_op_run_woken(struct fb_node *node)
{
    struct fb_op_list list;
    struct fb_op *op;

    while (node->woken && !TAILQ_EMPTY(&node->waiting)) {
        node->woken = false;
        TAILQ_INIT(&list);
        TAILQ_CONCAT(&list, &node->waiting, link);
        while ((op = TAILQ_FIRST(&list))) {
            TAILQ_REMOVE(&list, op, link);
            op->state = FB_OP_RUN;
            fb_op_advance(node, op);
        }
    }
    node->woken = false;
}

void fb_op_tick(struct fb_node *node)
{
    struct fb_op *op;

    TAILQ_FOREACH(op, &node->waiting, link) {
        if (op->deadline_ns <= node->now_ns) {
            fb_op_wake_all(node);
        }
    }
}
