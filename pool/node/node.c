/* Node: putting together, time, draining, status. */
#include "pool/node/state.h"
#include "pool/policy/policy.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define TICK_NS         (100ull * 1000 * 1000)
#define SMALLEST_BLOCK  8192u
#define FULL_LOG_NS     (10ull * 1000 * 1000 * 1000)
#define PROTOCOL_LOG_NS (1ull * 1000 * 1000 * 1000)
#define NODE_FILE       "node"
#define SOCKET_NAME     "forebay.sock"

/* --- directories --- */

static enum fb_status make_dirs(const char *path, struct fb_error *error)
{
    char partial[512];

    snprintf(partial, sizeof(partial), "%s", path);
    for (char *at = partial + 1;; at++) {
        char c = *at;

        if (c != '/' && c != 0) {
            continue;
        }
        *at = 0;
        if (mkdir(partial, 0755) < 0 && errno != EEXIST) {
            return fb_error_set(error, FB_EIO, "cannot create %s: %s", partial, strerror(errno));
        }
        *at = c;
        if (c == 0) {
            return FB_OK;
        }
    }
}

static enum fb_status open_chunk_dir(struct fb_node *node, struct fb_error *error)
{
    enum fb_status status = make_dirs(node->config.chunk_dir, error);

    if (status != FB_OK) {
        return status;
    }
    node->dir_fd = open(node->config.chunk_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (node->dir_fd < 0) {
        return fb_error_set(error, FB_EIO, "cannot open chunk_dir %s: %s", node->config.chunk_dir,
                            strerror(errno));
    }
    node->lock_fd = openat(node->dir_fd, "lock", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (node->lock_fd < 0) {
        return fb_error_set(error, FB_EIO, "cannot create a lock in %s: %s", node->config.chunk_dir,
                            strerror(errno));
    }
    if (flock(node->lock_fd, LOCK_EX | LOCK_NB) < 0) {
        return fb_error_set(error, FB_BUSY,
                            "chunk_dir %s belongs to a running daemon; stop it, or give this one "
                            "a directory of its own",
                            node->config.chunk_dir);
    }
    return FB_OK;
}

/* The node's name stays with its chunks. */
static enum fb_status load_id(struct fb_node *node, struct fb_error *error)
{
    int fd = openat(node->dir_fd, NODE_FILE, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    size_t bytes = sizeof(node->id) - 1;
    uint8_t random[16];
    bool ok = fd >= 0;

    if (ok && read(fd, node->id, bytes) != (ssize_t)bytes) {
        FB_ASSERT(getrandom(random, sizeof(random), 0) == sizeof(random));
        for (size_t i = 0; i < sizeof(random); i++) {
            snprintf(node->id + 2 * i, 3, "%02x", random[i]);
        }
        ok = pwrite(fd, node->id, bytes, 0) == (ssize_t)bytes;
    }
    node->id[bytes] = 0;
    if (fd >= 0) {
        close(fd);
    }
    return ok ? FB_OK
              : fb_error_set(error, FB_EIO, "cannot keep the node's id in %s: %s",
                             node->config.chunk_dir, strerror(errno));
}

static enum fb_status find_group(const struct fb_config *config, gid_t *ret_gid,
                                 struct fb_error *error)
{
    struct group *group;

    *ret_gid = (gid_t)-1;
    if (!config->socket_group[0]) {
        return FB_OK;
    }
    group = getgrnam(config->socket_group);
    if (!group) {
        return fb_error_set(error, FB_EINVAL, "socket_group: no group \"%s\" on this system",
                            config->socket_group);
    }
    *ret_gid = group->gr_gid;
    return FB_OK;
}

/* To the last byte: a chunk that just fits must fit. */
static uint64_t percent_of(uint64_t bytes, uint32_t percent)
{
    return bytes / 100 * percent + bytes % 100 * percent / 100;
}

static void socket_dir(const struct fb_node *node, const struct fb_tenant *tenant, char out[384])
{
    snprintf(out, 384, "%s/%s", node->config.run_dir, tenant->name);
}

static enum fb_status init_tenant(struct fb_node *node, uint32_t i, gid_t gid,
                                  struct fb_error *error)
{
    const struct fb_tenant_config *c = &node->config.tenants[i];
    struct fb_tenant *tenant = &node->tenants[i];
    uint64_t limit = percent_of(node->config.host_bytes, c->share_percent);
    enum fb_status status;
    char dir[384];

    *tenant = (struct fb_tenant){
        .index = (uint16_t)i,
        .pin_limit_bytes = percent_of(limit, node->config.pin_share_percent),
        .client_limit_bytes = percent_of(limit, node->config.client_share_percent),
        .survivors.dir_fd = -1,
        .listen_fd = -1,
    };
    memcpy(tenant->name, c->name, sizeof(tenant->name));
    node->tenant_count = i + 1;
    socket_dir(node, tenant, dir);
    status = make_dirs(dir, error);
    if (status == FB_OK) {
        status =
            fb_survivors_init(&tenant->survivors, dir, node->config.socket_mode, (int)gid, error);
    }
    return status;
}

enum fb_status fb_node_check_config(const struct fb_config *config, struct fb_error *error)
{
    const size_t most = sizeof(((struct sockaddr_un *)0)->sun_path) - 1;

    if (!fb_policy_find(config->policy)) {
        return fb_error_set(error, FB_EINVAL, "policy: \"%s\" is not one; expected %s",
                            config->policy, fb_policy_name(0));
    }
    for (uint32_t i = 0; i < config->tenant_count; i++) {
        size_t length =
            strlen(config->run_dir) + strlen(config->tenants[i].name) + strlen("//" SOCKET_NAME);

        if (length > most) {
            return fb_error_set(error, FB_EINVAL,
                                "run_dir: the socket of tenant %s would have a path of %zu "
                                "characters; at most %zu are possible: use a shorter directory",
                                config->tenants[i].name, length, most);
        }
    }
    return FB_OK;
}

/* --- putting together --- */

static void on_chunk_changed(void *context, uint16_t class_id, const struct fb_error *error)
{
    struct fb_node *node = context;
    uint64_t held_back;

    (void)class_id;
    if (error && fb_log_limit_pass(&node->full_limit, node->now_ns, &held_back)) {
        fb_log(&node->log, FB_LOG_ERROR, "chunk_failed", FB_KV_STR("why", error->text),
               FB_KV_U64("held_back", held_back));
    }
    fb_op_wake_all(node);
    fb_op_run_woken(node);
    fb_session_sweep(node);
}

static enum fb_status create_host(struct fb_node *node, struct fb_error *error)
{
    struct fb_host_options *o = calloc(1, sizeof(*o));
    enum fb_status status;

    if (!o) {
        return fb_error_set(error, FB_ENOMEM, "out of memory");
    }
    o->dir_fd = node->dir_fd;
    o->capacity_bytes = node->config.host_bytes;
    o->huge_pages = node->config.huge_pages;
    o->tenant_count = node->tenant_count;
    for (uint32_t i = 0; i < node->tenant_count; i++) {
        o->tenant_bytes[i] =
            percent_of(node->config.host_bytes, node->config.tenants[i].share_percent);
        memcpy(o->tenant_names[i], node->tenants[i].name, sizeof(o->tenant_names[i]));
    }
    o->submit = node->edges.submit;
    o->changed = on_chunk_changed;
    o->context = node->edges.context;
    o->changed_context = node;
    status = fb_host_create(o, &node->host);
    free(o);
    if (status != FB_OK) {
        return fb_error_set(error, status, "out of memory for the host tier");
    }
    node->tier = node->host;
    if (node->edges.wrap_tier) {
        node->tier = node->edges.wrap_tier(node->edges.context, node->host);
    }
    return FB_OK;
}

static void init_lists(struct fb_node *node)
{
    TAILQ_INIT(&node->client_list);
    TAILQ_INIT(&node->lease_list);
    TAILQ_INIT(&node->fill_list);
    TAILQ_INIT(&node->waiting);
    LIST_INIT(&node->sessions);
    LIST_INIT(&node->closed_sessions);
    fb_slab_init(&node->clients, sizeof(struct fb_client));
    fb_slab_init(&node->leases, sizeof(struct fb_lease));
    fb_slab_init(&node->holds, sizeof(struct fb_hold));
    fb_slab_init(&node->fills, sizeof(struct fb_fill));
    fb_slab_init(&node->claims, sizeof(struct fb_claim));
}

static enum fb_status build(struct fb_node *node, struct fb_error *error)
{
    uint64_t entries = node->config.host_bytes / SMALLEST_BLOCK + 1024;
    enum fb_status status = fb_node_check_config(&node->config, error);
    gid_t gid = (gid_t)-1;

    if (status == FB_OK) {
        status = open_chunk_dir(node, error);
    }
    if (status == FB_OK) {
        status = load_id(node, error);
    }
    if (status == FB_OK) {
        status = find_group(&node->config, &gid, error);
    }
    for (uint32_t i = 0; status == FB_OK && i < node->config.tenant_count; i++) {
        status = init_tenant(node, i, gid, error);
    }
    if (status == FB_OK) {
        status = fb_index_create(entries < FB_ENTRY_NONE ? (uint32_t)entries : FB_ENTRY_NONE - 1,
                                 &node->index, error);
    }
    if (status == FB_OK) {
        status = create_host(node, error);
    }
    if (status == FB_OK) {
        status = fb_space_load_all(node, error);
    }
    if (status == FB_OK) {
        status = fb_recover(node, error);
    }
    return status;
}

enum fb_status fb_node_create(const struct fb_config *config, const struct fb_node_edges *edges,
                              struct fb_metrics *metrics, const struct fb_log *log, uint64_t now_ns,
                              struct fb_node **ret_node, struct fb_error *error)
{
    struct fb_node *node = calloc(1, sizeof(*node));
    enum fb_status status;

    if (!node) {
        return fb_error_set(error, FB_ENOMEM, "out of memory");
    }
    node->config = *config;
    node->edges = *edges;
    node->metrics = metrics;
    node->log = *log;
    node->now_ns = node->started_ns = node->decayed_ns = node->expired_ns = now_ns;
    node->dir_fd = node->lock_fd = -1;
    node->full_limit.interval_ns = FULL_LOG_NS;
    node->protocol_limit.interval_ns = PROTOCOL_LOG_NS;
    init_lists(node);
    FB_ASSERT(getrandom(&node->incarnation, sizeof(node->incarnation), 0) ==
              sizeof(node->incarnation));
    status = build(node, error);
    if (status != FB_OK) {
        fb_node_destroy(node);
        return status;
    }
    node->state = FB_NODE_READY;
    fb_event_push(node, FB_EVENT_STATE, UINT16_MAX, NULL, NULL, FB_NODE_READY);
    *ret_node = node;
    return FB_OK;
}

static void destroy_tenants(struct fb_node *node)
{
    for (uint32_t i = 0; i < node->tenant_count; i++) {
        fb_survivors_fini(&node->tenants[i].survivors);
        if (node->tenants[i].listen_fd >= 0) {
            close(node->tenants[i].listen_fd);
        }
    }
}

static void destroy_clients(struct fb_node *node)
{
    struct fb_session *session;

    LIST_FOREACH(session, &node->sessions, link) {
        fb_session_mark(node, session);
    }
    fb_session_sweep(node);
    fb_node_collect(node);
    while (!TAILQ_EMPTY(&node->client_list)) {
        fb_client_die(node, TAILQ_FIRST(&node->client_list));
    }
}

void fb_node_destroy(struct fb_node *node)
{
    if (!node) {
        return;
    }
    node->state = FB_NODE_DRAINED;
    destroy_clients(node);
    destroy_tenants(node);
    fb_expiry_destroy_all(node);
    fb_space_destroy_all(node);
    if (node->tier) {
        node->tier->ops->destroy(node->tier);
    }
    fb_index_destroy(node->index);
    for (uint32_t i = 0; i < FB_CELL_CLASSES; i++) {
        while (node->free_cells[i]) {
            struct fb_free_cells *cells = node->free_cells[i];

            node->free_cells[i] = cells->next;
            free(cells);
        }
    }
    fb_slab_fini(&node->clients);
    fb_slab_fini(&node->leases);
    fb_slab_fini(&node->holds);
    fb_slab_fini(&node->fills);
    fb_slab_fini(&node->claims);
    if (node->lock_fd >= 0) {
        close(node->lock_fd);
    }
    if (node->dir_fd >= 0) {
        close(node->dir_fd);
    }
    free(node);
}

/* --- sockets --- */

static void on_accept(struct fb_source *source)
{
    struct fb_tenant *tenant = source->owner;
    struct fb_node *node = source->context;
    struct fb_channel *channel;

    while (fb_unix_accept(tenant->listen_fd, &channel) == FB_OK) {
        if (fb_node_connect(node, tenant->index, channel) != FB_OK) {
            fb_metrics_add(node->metrics, FB_METRIC_AGAIN, 1);
        }
    }
}

enum fb_status fb_node_listen(struct fb_node *node, struct fb_error *error)
{
    gid_t gid;
    enum fb_status status = find_group(&node->config, &gid, error);

    for (uint32_t i = 0; status == FB_OK && i < node->tenant_count; i++) {
        struct fb_tenant *tenant = &node->tenants[i];
        char dir[384], path[512];

        socket_dir(node, tenant, dir);
        snprintf(path, sizeof(path), "%s/" SOCKET_NAME, dir);
        status = fb_unix_listen(path, node->config.socket_mode, gid, &tenant->listen_fd, error);
        if (status == FB_OK) {
            tenant->accept_source =
                (struct fb_source){.ready = on_accept, .owner = tenant, .context = node};
            status =
                node->edges.watch(node->edges.context, tenant->listen_fd, &tenant->accept_source);
        }
    }
    return status;
}

/* --- time --- */

void fb_node_set_time(struct fb_node *node, uint64_t now_ns)
{
    node->now_ns = now_ns;
}

static void poll_survivors(struct fb_node *node)
{
    for (uint32_t i = 0; i < node->tenant_count; i++) {
        struct fb_survivors *s = &node->tenants[i].survivors;

        if (s->count > 0 && fb_survivors_poll(s) > 0) {
            fb_op_wake_all(node);
        }
    }
}

static bool is_awaited(const struct fb_node *node)
{
    for (uint32_t i = 0; i < node->tenant_count; i++) {
        if (node->tenants[i].survivors.count > 0) {
            return true;
        }
    }
    return false;
}

static void set_gauges(struct fb_node *node)
{
    struct fb_node_status s;

    fb_node_get_status(node, &s);
    fb_metrics_set(node->metrics, FB_METRIC_HOST_BYTES, s.host.capacity_bytes);
    fb_metrics_set(node->metrics, FB_METRIC_HOST_USED_BYTES, s.host.used_bytes);
    fb_metrics_set(node->metrics, FB_METRIC_BLOCKS, s.blocks);
    fb_metrics_set(node->metrics, FB_METRIC_INDEX_BYTES, s.index_bytes);
    fb_metrics_set(node->metrics, FB_METRIC_LEASED_BYTES, s.leased_bytes);
    fb_metrics_set(node->metrics, FB_METRIC_RESERVED_BYTES, s.reserved_bytes);
    fb_metrics_set(node->metrics, FB_METRIC_QUARANTINED_BYTES, s.quarantined_bytes);
    fb_metrics_set(node->metrics, FB_METRIC_PINNED_BYTES, s.pinned_bytes);
    fb_metrics_set(node->metrics, FB_METRIC_CLIENTS, s.clients);
    fb_metrics_set(node->metrics, FB_METRIC_LEASES, s.leases);
    fb_metrics_set(node->metrics, FB_METRIC_READY, s.state == FB_NODE_READY);
}

static bool in_flight(const struct fb_node *node)
{
    return node->leases.used > 0 || node->fills.used > 0 || !TAILQ_EMPTY(&node->waiting);
}

uint64_t fb_node_tick(struct fb_node *node)
{
    fb_lease_tick(node);
    fb_fill_tick(node);
    fb_expiry_tick(node);
    fb_balance_tick(node);
    fb_op_tick(node);
    poll_survivors(node);
    if (node->tier->ops->tick) {
        node->tier->ops->tick(node->tier, node->now_ns);
    }
    fb_op_run_woken(node);
    fb_session_sweep(node);
    if (node->state == FB_NODE_DRAINING &&
        (!in_flight(node) || node->now_ns >= node->drain_deadline_ns)) {
        node->state = FB_NODE_DRAINED;
    }
    set_gauges(node);
    if (node->state != FB_NODE_READY || in_flight(node) || is_awaited(node) || node->expiries) {
        return TICK_NS;
    }
    return node->client_list.tqh_first ? 10 * TICK_NS : UINT64_MAX;
}

void fb_node_drain(struct fb_node *node, uint64_t within_ns)
{
    struct fb_notify notify = {.kind = FB_NOTIFY_DRAINING};
    uint8_t packet[sizeof(struct fb_wire_header) + sizeof(notify)];
    struct fb_wire_writer w;
    struct fb_client *client;
    struct fb_op *op;

    if (node->state != FB_NODE_READY) {
        return;
    }
    node->state = FB_NODE_DRAINING;
    node->drain_deadline_ns = node->now_ns + within_ns;
    fb_event_push(node, FB_EVENT_STATE, UINT16_MAX, NULL, NULL, FB_NODE_DRAINING);
    fb_log(&node->log, FB_LOG_INFO, "draining", FB_KV_U64("leases", node->leases.used),
           FB_KV_U64("fills", node->fills.used));
    fb_wire_begin(&w, packet, FB_MSG_NOTIFY, 0, FB_OK, &notify, sizeof(notify));
    fb_wire_end(&w);
    TAILQ_FOREACH(client, &node->client_list, link) {
        if (client->control) {
            fb_channel_send(client->control->channel, packet, w.bytes, NULL, 0);
        }
    }
    TAILQ_FOREACH(op, &node->waiting, link) {
        op->deadline_ns = node->now_ns;
    }
    fb_op_wake_all(node);
    fb_op_run_woken(node);
}

enum fb_node_state fb_node_state(const struct fb_node *node)
{
    return node->state;
}

/* --- status --- */

static void tenant_status(struct fb_node *node, uint32_t i, struct fb_node_tenant_status *t)
{
    memcpy(t->name, node->tenants[i].name, sizeof(t->name));
    t->limit_bytes = fb_host_tenant_limit(node->host, (uint16_t)i);
    t->used_bytes = fb_host_tenant_used(node->host, (uint16_t)i);
    t->chunks = 0;
    for (uint32_t c = 0; c < node->class_count; c++) {
        if (node->classes[c].tier.tenant == i) {
            t->chunks += fb_host_class_chunks(node->host, (uint16_t)c);
        }
    }
    t->blocks = 0;
}

void fb_node_get_status(struct fb_node *node, struct fb_node_status *ret_status)
{
    struct fb_node_status *s = ret_status;

    memset(s, 0, sizeof(*s));
    memcpy(s->id, node->id, sizeof(s->id));
    s->state = node->state;
    s->uptime_ns = node->now_ns - node->started_ns;
    node->tier->ops->stats(node->tier, &s->host);
    s->index_bytes = fb_index_bytes(node->index);
    s->clients = node->clients.used;
    s->leases = node->leases.used;
    s->leased_bytes = node->leased_bytes;
    s->reserved_bytes = node->reserved_bytes;
    s->quarantined_bytes = node->quarantined_bytes;
    s->tenant_count = node->tenant_count;
    for (uint32_t i = 0; i < node->tenant_count; i++) {
        tenant_status(node, i, &s->tenants[i]);
        s->awaited += node->tenants[i].survivors.count;
        s->pinned_bytes += node->tenants[i].pinned_bytes;
    }
    for (uint32_t i = 0; i < FB_MAX_SPACES; i++) {
        const struct fb_space *space = node->spaces[i];

        if (space) {
            s->tenants[space->tenant].blocks += space->blocks;
            s->blocks += space->blocks;
        }
    }
}

/* Such as "K fp8_e4m3, V int8". */
static void describe_codecs(const struct fb_layout *l, char *out, size_t capacity)
{
    size_t at = 0;

    out[0] = 0;
    for (uint32_t i = 0; i < l->section_count && at < capacity; i++) {
        at += (size_t)snprintf(out + at, capacity - at, "%s%s %s", i ? ", " : "",
                               fb_section_kind_name(l->sections[i].kind),
                               fb_codec_name(l->sections[i].codec));
    }
}

bool fb_node_get_space(struct fb_node *node, uint32_t n, struct fb_node_space_status *ret_space)
{
    for (uint32_t i = 0; i < FB_MAX_SPACES; i++) {
        const struct fb_space *space = node->spaces[i];

        if (!space || n-- > 0) {
            continue;
        }
        *ret_space = (struct fb_node_space_status){
            .rule = space->rule,
            .window_tokens = space->window_tokens,
            .page_tokens = space->layout.page_tokens,
            .layers = space->layout.layer_count,
            .heads = space->layout.plane_count,
            .block_bytes = space->layout.block_bytes,
            .blocks = space->blocks,
        };
        memcpy(ret_space->id, space->id, sizeof(space->id));
        memcpy(ret_space->tenant, node->tenants[space->tenant].name, sizeof(ret_space->tenant));
        memcpy(ret_space->model, space->model, sizeof(space->model));
        describe_codecs(&space->layout, ret_space->codecs, sizeof(ret_space->codecs));
        return true;
    }
    return false;
}

/* --- whole-structure check --- */

static void check_class(struct fb_node *node, uint16_t class_id, uint32_t *entries,
                        uint64_t used_bytes[FB_TENANTS_MAX])
{
    struct fb_chunk *chunk = NULL;

    while ((chunk = fb_host_next_in_class(node->host, class_id, chunk))) {
        uint32_t used = 0;

        for (uint32_t slot = 0; slot < chunk->file.slot_count; slot++) {
            uint32_t entry = chunk->entries[slot];
            struct fb_location where;

            if (!(chunk->taken[slot / 64] >> (slot % 64) & 1)) {
                FB_ASSERT(entry == FB_ENTRY_NONE);
                continue;
            }
            used++;
            FB_ASSERT(entry != FB_ENTRY_NONE);
            where = fb_index_location(node->index, entry);
            FB_ASSERT(where.chunk == chunk->file.id && where.slot == slot);
            if (fb_index_refs(node->index, entry) > 0) {
                used_bytes[chunk->tenant] += chunk->file.slot_bytes;
            }
        }
        FB_ASSERT(used == chunk->used);
        *entries += used;
    }
}

void fb_node_check(struct fb_node *node)
{
    uint64_t leased = 0, tenant_used = 0, used_bytes[FB_TENANTS_MAX] = {0};
    struct fb_tier_stats stats;
    struct fb_lease *lease;
    uint32_t entries = 0;

    FB_ASSERT(fb_index_check(node->index));
    for (uint32_t i = 0; i < node->class_count; i++) {
        check_class(node, (uint16_t)i, &entries, used_bytes);
    }
    FB_ASSERT(entries == fb_index_count(node->index));
    TAILQ_FOREACH(lease, &node->lease_list, link) {
        leased += lease->bytes;
        FB_ASSERT(!LIST_EMPTY(&lease->holds));
    }
    FB_ASSERT(leased == node->leased_bytes);
    node->tier->ops->stats(node->tier, &stats);
    FB_ASSERT(stats.used_bytes <= stats.capacity_bytes);
    FB_ASSERT(stats.slots_used == entries);
    for (uint32_t i = 0; i < node->tenant_count; i++) {
        tenant_used = fb_host_tenant_used(node->host, (uint16_t)i);
        FB_ASSERT(tenant_used <= fb_host_tenant_limit(node->host, (uint16_t)i));
        FB_ASSERT(used_bytes[i] == node->tenants[i].used_bytes);
    }
}
