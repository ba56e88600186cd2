/* Clients: processes, known by an id they chose and watched through a pidfd they sent. */
#include "pool/node/state.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define MAX_SESSIONS_PER_CLIENT 64

bool fb_client_may_hold(const struct fb_client *client, uint64_t bytes, uint64_t fresh)
{
    uint64_t limit = client->tenant->client_limit_bytes;

    return client->held_bytes + bytes <= limit || client->tenant->used_bytes + fresh <= limit;
}

static struct fb_client *find_client(struct fb_node *node, const struct fb_tenant *tenant,
                                     const uint8_t id[FB_CLIENT_ID_BYTES])
{
    struct fb_client *client;

    TAILQ_FOREACH(client, &node->client_list, link) {
        if (client->tenant == tenant && memcmp(client->id, id, FB_CLIENT_ID_BYTES) == 0) {
            return client;
        }
    }
    return NULL;
}

/* A client may send any descriptor: only a pidfd tells of its death. */
static bool is_pidfd(int fd)
{
    char path[32], name[32];
    ssize_t n;

    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    n = readlink(path, name, sizeof(name) - 1);
    if (n < 0) {
        return false;
    }
    name[n] = 0;
    return strcmp(name, "anon_inode:[pidfd]") == 0 || strncmp(name, "pidfd:", 6) == 0;
}

static void on_exit_ready(struct fb_source *source)
{
    struct fb_client *client = source->owner;
    struct fb_node *node = source->context;
    struct pollfd p = {.fd = client->pidfd, .events = POLLIN};

    if (poll(&p, 1, 0) == 1) {
        fb_client_die(node, client);
        fb_op_run_woken(node);
        fb_session_sweep(node);
    }
}

/* Its death must be seen, since slots it may write to wait for that: no pidfd, no client. */
static struct fb_client *join(struct fb_node *node, struct fb_tenant *tenant,
                              const uint8_t id[FB_CLIENT_ID_BYTES], int pidfd,
                              struct fb_error *error)
{
    struct fb_client *client;

    if (pidfd < 0 || !is_pidfd(pidfd)) {
        fb_error_set(error, FB_EPROTO, "hello: the message must carry the client's pidfd");
        return NULL;
    }

    if (node->clients.used >= node->config.max_clients) {
        fb_error_set(error, FB_ELIMIT, "%u clients are connected already; raise max_clients",
                     node->clients.used);
        return NULL;
    }
    client = fb_slab_alloc(&node->clients);
    if (!client) {
        fb_error_set(error, FB_ENOMEM, "out of memory for another client");
        return NULL;
    }
    client->pidfd = fcntl(pidfd, F_DUPFD_CLOEXEC, 0);
    client->exit_source =
        (struct fb_source){.ready = on_exit_ready, .owner = client, .context = node};
    if (client->pidfd < 0 ||
        node->edges.watch(node->edges.context, client->pidfd, &client->exit_source) != FB_OK) {
        if (client->pidfd >= 0) {
            close(client->pidfd);
        }
        fb_slab_free(&node->clients, client);
        fb_error_set(error, FB_ELIMIT, "hello: out of descriptors; raise the open files limit");
        return NULL;
    }
    memcpy(client->id, id, FB_CLIENT_ID_BYTES);
    client->tenant = tenant;
    TAILQ_INSERT_TAIL(&node->client_list, client, link);
    fb_event_push(node, FB_EVENT_CLIENT_JOINED, tenant->index, NULL, id, 1);
    return client;
}

enum fb_status fb_client_hello(struct fb_node *node, struct fb_session *session,
                               const struct fb_hello_request *hello, int pidfd, bool *ret_existed,
                               struct fb_error *error)
{
    struct fb_client *client = find_client(node, session->tenant, hello->client);

    if (session->client) {
        return fb_error_set(error, FB_ESTATE, "hello: this connection has said hello already");
    }
    if (hello->version_min > FB_WIRE_VERSION || hello->version_max < FB_WIRE_VERSION) {
        return fb_error_set(error, FB_EVERSION,
                            "hello: the client speaks protocol %u to %u, this daemon %u; use "
                            "matching versions of forebayd and libforebay",
                            hello->version_min, hello->version_max, FB_WIRE_VERSION);
    }
    *ret_existed = client != NULL;
    if (!client) {
        client = join(node, session->tenant, hello->client, pidfd, error);
        if (!client) {
            return error->status;
        }
    }
    if (client->sessions >= MAX_SESSIONS_PER_CLIENT) {
        return fb_error_set(error, FB_ELIMIT, "hello: %u connections of one client are too many",
                            client->sessions);
    }
    client->sessions++;
    session->client = client;
    if (hello->flags & FB_HELLO_CONTROL) {
        client->control = session;
    }
    return FB_OK;
}

void fb_client_leave(struct fb_node *node, struct fb_session *session)
{
    struct fb_client *client = session->client;

    if (!client) {
        return;
    }
    session->client = NULL;
    client->sessions--;
    if (client->control == session) {
        client->control = NULL;
    }
    if (client->sessions > 0) {
        return;
    }
    /* A process that lives may come back for what it holds; with nothing held it is just gone. */
    if (LIST_EMPTY(&client->holds) && LIST_EMPTY(&client->claims)) {
        fb_client_die(node, client);
    }
}

static void close_sessions(struct fb_node *node, struct fb_client *client)
{
    struct fb_session *session;

    LIST_FOREACH(session, &node->sessions, link) {
        if (session->client == client) {
            session->client = NULL;
            fb_session_mark(node, session);
        }
    }
}

void fb_client_die(struct fb_node *node, struct fb_client *client)
{
    close_sessions(node, client);
    fb_lease_drop_client(node, client);
    fb_fill_drop_client(node, client);
    while (client->chunk_count > 0) {
        fb_client_unmapped(node, client, client->chunks[client->chunk_count - 1]);
    }
    for (uint32_t i = 0; i < client->space_count; i++) {
        node->spaces[client->spaces[i]]->users--;
    }
    node->edges.unwatch(node->edges.context, client->pidfd);
    close(client->pidfd);
    client->pidfd = -1; /* the reactor may hold an event of it: on_exit_ready then sees nothing */
    fb_metrics_add(node->metrics, FB_METRIC_CLIENTS_DIED, 1);
    fb_event_push(node, FB_EVENT_CLIENT_DIED, client->tenant->index, NULL, client->id, 1);
    TAILQ_REMOVE(&node->client_list, client, link);
    free(client->chunks);
    free(client->spaces);
    fb_slab_free(&node->clients, client);
    fb_op_wake_all(node);
}

/* Append to a small list that grows by doubling. */
static bool append(uint32_t **list, uint32_t *count, uint32_t value)
{
    /* Capacity is the next power of two. */
    if ((*count & (*count - 1)) == 0) {
        uint32_t *grown = realloc(*list, (*count ? *count * 2 : 1) * sizeof(**list));

        if (!grown) {
            return false;
        }
        *list = grown;
    }
    (*list)[(*count)++] = value;
    return true;
}

enum fb_status fb_client_give_chunk(struct fb_client *client, struct fb_chunk *chunk)
{
    for (uint32_t i = 0; i < client->chunk_count; i++) {
        if (client->chunks[i] == chunk->file.id) {
            return FB_OK;
        }
    }
    if (!append(&client->chunks, &client->chunk_count, chunk->file.id)) {
        return FB_ENOMEM;
    }
    chunk->given++;
    return FB_OK;
}

void fb_client_unmapped(struct fb_node *node, struct fb_client *client, uint32_t chunk_id)
{
    struct fb_chunk *chunk = fb_host_chunk(node->host, chunk_id);

    for (uint32_t i = 0; i < client->chunk_count; i++) {
        if (client->chunks[i] == chunk_id) {
            client->chunks[i] = client->chunks[--client->chunk_count];
            if (chunk) {
                chunk->given--;
                fb_balance_try_reap(node, chunk);
            }
            return;
        }
    }
}

void fb_client_notify_unmap(struct fb_node *node, struct fb_chunk *chunk)
{
    struct fb_notify notify = {.kind = FB_NOTIFY_UNMAP, .value = chunk->file.id};
    uint8_t packet[sizeof(struct fb_wire_header) + sizeof(notify)];
    struct fb_wire_writer w;
    struct fb_client *client;

    fb_wire_begin(&w, packet, FB_MSG_NOTIFY, 0, FB_OK, &notify, sizeof(notify));
    fb_wire_end(&w);
    TAILQ_FOREACH(client, &node->client_list, link) {
        for (uint32_t i = 0; i < client->chunk_count; i++) {
            if (client->chunks[i] == chunk->file.id && client->control) {
                fb_channel_send(client->control->channel, packet, w.bytes, NULL, 0);
            }
        }
    }
}

void fb_client_used_space(struct fb_client *client, struct fb_space *space)
{
    for (uint32_t i = 0; i < client->space_count; i++) {
        if (client->spaces[i] == space->handle) {
            return;
        }
    }
    if (append(&client->spaces, &client->space_count, space->handle)) {
        space->users++;
    }
}
