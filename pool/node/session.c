/* Sessions: one connection each, from accept to close. */
#include "pool/node/state.h"

#include <stdlib.h>

/* Requests taken from one connection before others have their turn. */
#define BURST 8

#define SESSIONS_PER_CLIENT 16

/* Returns whether there was anything to read. */
static bool read_session(struct fb_node *node, struct fb_session *session)
{
    struct fb_op *op = &session->op;
    int i;

    for (i = 0; i < BURST && !session->closed && op->state == FB_OP_IDLE; i++) {
        size_t bytes;
        enum fb_status status = fb_channel_recv(session->channel, node->rx, sizeof(node->rx),
                                                &bytes, op->fds, &op->fd_count);

        if (status == FB_AGAIN) {
            break;
        }
        if (status == FB_OK) {
            node->last_session = session;
            fb_op_start(node, session, bytes);
        } else {
            fb_session_mark(node, session);
        }
    }
    return i > 0;
}

/* While an operation waits the client has nothing to say: it has hung up or broken the protocol. */
static void on_ready(struct fb_source *source)
{
    struct fb_session *session = source->owner;
    struct fb_node *node = source->context;

    if (session->op.state != FB_OP_IDLE) {
        fb_session_mark(node, session);
    } else {
        read_session(node, session);
    }
    fb_op_run_woken(node);
    fb_session_sweep(node);
}

bool fb_node_poll(struct fb_node *node)
{
    struct fb_session *session = node->last_session;

    if (!session || session->op.state != FB_OP_IDLE || !read_session(node, session)) {
        return false;
    }
    fb_op_run_woken(node);
    fb_session_sweep(node);
    return true;
}

enum fb_status fb_node_connect(struct fb_node *node, uint32_t tenant, struct fb_channel *channel)
{
    struct fb_session *session;
    enum fb_status status;

    if (node->session_count >= node->config.max_clients * SESSIONS_PER_CLIENT) {
        fb_channel_destroy(channel);
        return FB_ELIMIT;
    }
    session = calloc(1, sizeof(*session));
    if (!session) {
        fb_channel_destroy(channel);
        return FB_ENOMEM;
    }
    session->channel = channel;
    session->tenant = &node->tenants[tenant];
    session->source = (struct fb_source){.ready = on_ready, .owner = session, .context = node};
    session->op.session = session;
    status = node->edges.watch(node->edges.context, fb_channel_fd(channel), &session->source);
    if (status != FB_OK) {
        fb_channel_destroy(channel);
        free(session);
        return status;
    }
    LIST_INSERT_HEAD(&node->sessions, session, link);
    node->session_count++;
    return FB_OK;
}

static void on_closed(struct fb_source *source)
{
    (void)source;
}

void fb_session_mark(struct fb_node *node, struct fb_session *session)
{
    session->closed = true;
    node->any_marked = true;
}

/* The struct stays until fb_node_collect: the reactor may hold an event for it. */
static void close_session(struct fb_node *node, struct fb_session *session)
{
    LIST_REMOVE(session, link);
    node->session_count--;
    if (node->last_session == session) {
        node->last_session = NULL;
    }
    fb_op_cancel(node, &session->op);
    fb_client_leave(node, session);
    node->edges.unwatch(node->edges.context, fb_channel_fd(session->channel));
    fb_channel_destroy(session->channel);
    session->channel = NULL;
    session->source.ready = on_closed;
    LIST_INSERT_HEAD(&node->closed_sessions, session, link);
}

void fb_session_sweep(struct fb_node *node)
{
    while (node->any_marked) {
        struct fb_session *session = LIST_FIRST(&node->sessions);

        node->any_marked = false;
        while (session) {
            struct fb_session *next = LIST_NEXT(session, link);

            /* Closing one may mark others (a client dies with its last connection), but only
             * marks them: next stays in the list. */
            if (session->closed) {
                close_session(node, session);
            }
            session = next;
        }
        fb_op_run_woken(node);
    }
}

void fb_node_collect(struct fb_node *node)
{
    struct fb_session *session;

    while ((session = LIST_FIRST(&node->closed_sessions))) {
        LIST_REMOVE(session, link);
        free(session);
    }
}
