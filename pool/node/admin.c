/* Admin service. The gRPC thread posts each call to the reactor as mail; the reactor unpacks,
 * answers, and keeps those that last: drains and watchers. */
#include "pool/node/admin.h"

#include "proto/assert.h"
#include "proto/forebay.pb-c.h"
#include "transport/grpc_server.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

#define EVENTS_PER_ROUND 256

struct admin_call;
typedef void (*answer_fn)(struct fb_admin *admin, struct admin_call *call);

/* One call; from post to the end of the call the reactor's. */
struct admin_call {
    struct fb_mail mail;
    LIST_ENTRY(admin_call) link; /* drains and watchers */
    struct fb_admin *admin;
    struct fb_rpc_call *rpc;
    uint64_t rpc_id;
    answer_fn answer;
    uint64_t next_event;
    char tenant[FB_MAX_TENANT_CHARS + 1]; /* watchers: whose events; empty: all */
    size_t bytes;
    uint8_t request[];
};

LIST_HEAD(admin_calls, admin_call);

struct fb_admin {
    struct fb_rpc_server *server;
    struct fb_reactor *reactor;
    const struct fb_config *config;
    struct fb_metrics *metrics;
    struct admin_calls drains;
    struct admin_calls watchers;
    bool serving;
};

/* --- replies --- */

static void reply(struct admin_call *call, const ProtobufCMessage *message)
{
    size_t bytes = protobuf_c_message_get_packed_size(message);
    uint8_t *packed = malloc(bytes ? bytes : 1);

    if (packed) {
        protobuf_c_message_pack(message, packed);
        fb_rpc_reply(call->rpc, packed, bytes);
        free(packed);
    } else {
        fb_rpc_finish(call->rpc, FB_ENOMEM, NULL);
    }
    free(call);
}

static void fail(struct admin_call *call, enum fb_status status, const char *text)
{
    fb_rpc_finish(call->rpc, status, text);
    free(call);
}

/* While survivors are awaited lookups work but no slot is given out: that is still starting. */
static Forebay__V1__NodeState wire_state(enum fb_node_state state, uint32_t awaited)
{
    switch (state) {
    case FB_NODE_STARTING: return FOREBAY__V1__NODE_STATE__NODE_STATE_STARTING;
    case FB_NODE_READY:
        return awaited > 0 ? FOREBAY__V1__NODE_STATE__NODE_STATE_STARTING
                           : FOREBAY__V1__NODE_STATE__NODE_STATE_READY;
    case FB_NODE_DRAINING:
    case FB_NODE_DRAINED: break;
    }
    return FOREBAY__V1__NODE_STATE__NODE_STATE_DRAINING;
}

static void answer_status(struct fb_admin *admin, struct admin_call *call)
{
    Forebay__V1__StatusReply r = FOREBAY__V1__STATUS_REPLY__INIT;
    Forebay__V1__HostTier host = FOREBAY__V1__HOST_TIER__INIT;
    Forebay__V1__Counters counters = FOREBAY__V1__COUNTERS__INIT;
    Forebay__V1__TenantStatus rows[FB_TENANTS_MAX], *tenants[FB_TENANTS_MAX];
    struct fb_metrics *m = admin->metrics;
    struct fb_node_status s;

    fb_node_get_status(fb_reactor_node(admin->reactor), &s);
    host.bytes = s.host.capacity_bytes;
    host.used_bytes = s.host.used_bytes;
    host.blocks = s.blocks;
    counters.lookups = fb_metrics_value(m, FB_METRIC_LOOKUPS);
    counters.lookup_pages = fb_metrics_value(m, FB_METRIC_LOOKUP_PAGES);
    counters.hit_pages = fb_metrics_value(m, FB_METRIC_LOOKUP_HIT_PAGES);
    counters.committed_blocks = fb_metrics_value(m, FB_METRIC_COMMITTED_BLOCKS);
    counters.evicted_blocks = fb_metrics_value(m, FB_METRIC_EVICTED_BLOCKS);
    for (uint32_t i = 0; i < s.tenant_count; i++) {
        forebay__v1__tenant_status__init(&rows[i]);
        rows[i].name = s.tenants[i].name;
        rows[i].share_bytes = s.tenants[i].limit_bytes;
        rows[i].used_bytes = s.tenants[i].used_bytes;
        rows[i].blocks = s.tenants[i].blocks;
        rows[i].chunks = s.tenants[i].chunks;
        tenants[i] = &rows[i];
    }
    r.version = (char *)(uintptr_t)FOREBAY_VERSION;
    r.node_id = s.id;
    r.uptime_ms = s.uptime_ns / 1000000;
    r.state = wire_state(s.state, s.awaited);
    r.host = &host;
    r.index_bytes = s.index_bytes;
    r.clients = s.clients;
    r.leases = s.leases;
    r.leased_bytes = s.leased_bytes;
    r.reserved_bytes = s.reserved_bytes;
    r.quarantined_bytes = s.quarantined_bytes;
    r.pinned_bytes = s.pinned_bytes;
    r.n_tenants = s.tenant_count;
    r.tenants = tenants;
    r.counters = &counters;
    r.survivors_awaited = s.awaited;
    reply(call, &r.base);
}

struct space_row {
    struct fb_node_space_status status;
    Forebay__V1__Space message;
};

static void fill_space(struct space_row *row)
{
    struct fb_node_space_status *s = &row->status;
    Forebay__V1__Space *m = &row->message;

    forebay__v1__space__init(m);
    m->id = (ProtobufCBinaryData){.len = sizeof(s->id), .data = s->id};
    m->tenant = s->tenant;
    m->model = s->model;
    m->rule = (Forebay__V1__Rule)s->rule; /* the same numbers */
    m->window_tokens = s->window_tokens;
    m->page_tokens = s->page_tokens;
    m->layers = s->layers;
    m->heads = s->heads;
    m->block_bytes = s->block_bytes;
    m->blocks = s->blocks;
    m->bytes = s->blocks * s->block_bytes;
    m->codec = s->codecs;
}

/* Whether a space is one of those that were asked for. */
static bool is_wanted(const Forebay__V1__SpacesRequest *q, const struct fb_node_space_status *s)
{
    return (!q->tenant[0] || !strcmp(q->tenant, s->tenant)) &&
           (q->space_id.len == 0 || !memcmp(q->space_id.data, s->id, sizeof(s->id)));
}

static void answer_spaces(struct fb_admin *admin, struct admin_call *call)
{
    Forebay__V1__SpacesRequest *q =
        forebay__v1__spaces_request__unpack(NULL, call->bytes, call->request);
    Forebay__V1__SpacesReply r = FOREBAY__V1__SPACES_REPLY__INIT;
    struct fb_node *node = fb_reactor_node(admin->reactor);
    uint8_t manifest[FB_MANIFEST_MAX_BYTES];
    enum fb_status status = FB_OK;
    struct fb_node_space_status s;
    struct space_row *rows = NULL;
    Forebay__V1__Space **messages = NULL;
    struct fb_error error;
    uint32_t n = 0, kept = 0;

    if (!q || (q->space_id.len != 0 && q->space_id.len != FB_SPACE_ID_BYTES)) {
        fail(call, q ? FB_EINVAL : FB_EPROTO,
             q ? "spaces: a space id has 16 bytes" : "malformed SpacesRequest");
        forebay__v1__spaces_request__free_unpacked(q, NULL);
        return;
    }
    while (fb_node_get_space(node, n, &s)) {
        n++;
    }
    rows = calloc(n + 1, sizeof(*rows));
    messages = calloc(n + 1, sizeof(*messages));
    for (uint32_t i = 0; rows && messages && i < n; i++) {
        struct space_row *row = &rows[kept];

        fb_node_get_space(node, i, &row->status);
        if (is_wanted(q, &row->status)) {
            fill_space(row);
            messages[kept++] = &row->message;
        }
    }
    if (kept == 1 && q->space_id.len > 0) {
        Forebay__V1__Space *m = &rows[0].message;

        m->manifest.data = manifest;
        status = fb_node_get_manifest(node, m->id.data, manifest, &m->manifest.len, &error);
    }
    r.n_spaces = kept;
    r.spaces = messages;
    if (status == FB_OK) {
        reply(call, &r.base);
    } else {
        fail(call, status, error.text);
    }
    free(rows);
    free(messages);
    forebay__v1__spaces_request__free_unpacked(q, NULL);
}

/* The target of a purge, checked. */
static const char *purge_target(const Forebay__V1__PurgeRequest *q, const uint8_t **ret_space,
                                const uint8_t **ret_key)
{
    *ret_space = *ret_key = NULL;
    switch (q->target_case) {
    case FOREBAY__V1__PURGE_REQUEST__TARGET_ALL: return q->all ? NULL : "purge: `all` must be true";
    case FOREBAY__V1__PURGE_REQUEST__TARGET_SPACE_ID:
        *ret_space = q->space_id.data;
        return q->space_id.len == FB_SPACE_ID_BYTES ? NULL : "purge: a space id has 16 bytes";
    case FOREBAY__V1__PURGE_REQUEST__TARGET_PREFIX:
        *ret_space = q->prefix->space_id.data;
        *ret_key = q->prefix->key.data;
        return q->prefix->space_id.len == FB_SPACE_ID_BYTES && q->prefix->key.len == FB_KEY_BYTES
                   ? NULL
                   : "purge: a prefix is a space id of 16 bytes and a key of 32";
    default: return "purge: name a space, a prefix or all";
    }
}

static void answer_purge(struct fb_admin *admin, struct admin_call *call)
{
    Forebay__V1__PurgeRequest *q =
        forebay__v1__purge_request__unpack(NULL, call->bytes, call->request);
    Forebay__V1__PurgeReply r = FOREBAY__V1__PURGE_REPLY__INIT;
    const uint8_t *space, *key;
    struct fb_error error;
    const char *problem;
    enum fb_status status;

    if (!q) {
        fail(call, FB_EPROTO, "malformed PurgeRequest");
        return;
    }
    problem = purge_target(q, &space, &key);
    if (problem) {
        fail(call, FB_EINVAL, problem);
    } else {
        status = fb_node_purge(fb_reactor_node(admin->reactor), q->tenant, space, key, &r.blocks,
                               &r.bytes, &error);
        if (status == FB_OK) {
            reply(call, &r.base);
        } else {
            fail(call, status, error.text);
        }
    }
    forebay__v1__purge_request__free_unpacked(q, NULL);
}

static void answer_drain(struct fb_admin *admin, struct admin_call *call)
{
    Forebay__V1__DrainRequest *q =
        forebay__v1__drain_request__unpack(NULL, call->bytes, call->request);
    struct fb_node *node = fb_reactor_node(admin->reactor);

    if (!q) {
        fail(call, FB_EPROTO, "malformed DrainRequest");
        return;
    }
    LIST_INSERT_HEAD(&admin->drains, call, link);
    fb_node_drain(node, q->deadline_ms ? q->deadline_ms * 1000000ull : admin->config->drain_ns);
    forebay__v1__drain_request__free_unpacked(q, NULL);
}

static void answer_watch(struct fb_admin *admin, struct admin_call *call)
{
    Forebay__V1__WatchRequest *q =
        forebay__v1__watch_request__unpack(NULL, call->bytes, call->request);

    if (!q || strlen(q->tenant) > FB_MAX_TENANT_CHARS) {
        fail(call, q ? FB_EINVAL : FB_EPROTO, "malformed WatchRequest");
    } else {
        snprintf(call->tenant, sizeof(call->tenant), "%s", q->tenant);
        call->next_event = fb_node_event_count(fb_reactor_node(admin->reactor));
        LIST_INSERT_HEAD(&admin->watchers, call, link);
    }
    forebay__v1__watch_request__free_unpacked(q, NULL);
}

/* --- what lasts --- */

static Forebay__V1__EventKind wire_kind(enum fb_event_kind kind)
{
    static const Forebay__V1__EventKind kinds[] = {
        [FB_EVENT_STATE] = FOREBAY__V1__EVENT_KIND__EVENT_KIND_STATE,
        [FB_EVENT_COMMITTED] = FOREBAY__V1__EVENT_KIND__EVENT_KIND_COMMITTED,
        [FB_EVENT_EVICTED] = FOREBAY__V1__EVENT_KIND__EVENT_KIND_EVICTED,
        [FB_EVENT_PURGED] = FOREBAY__V1__EVENT_KIND__EVENT_KIND_PURGED,
        [FB_EVENT_REJECTED] = FOREBAY__V1__EVENT_KIND__EVENT_KIND_REJECTED,
        [FB_EVENT_CLIENT_JOINED] = FOREBAY__V1__EVENT_KIND__EVENT_KIND_CLIENT_JOINED,
        [FB_EVENT_CLIENT_DIED] = FOREBAY__V1__EVENT_KIND__EVENT_KIND_CLIENT_DIED,
        [FB_EVENT_CHUNK_MOVED] = FOREBAY__V1__EVENT_KIND__EVENT_KIND_CHUNK_MOVED,
    };

    return kinds[kind];
}

static enum fb_status send_event(struct admin_call *call, struct fb_event *e)
{
    Forebay__V1__Event m = FOREBAY__V1__EVENT__INIT;
    uint8_t packed[512];
    size_t bytes;

    m.seq = e->sequence;
    m.unix_ms = e->unix_ms;
    m.kind = wire_kind(e->kind);
    m.tenant = e->tenant;
    m.space_id = (ProtobufCBinaryData){.len = sizeof(e->space), .data = e->space};
    m.key_prefix = (ProtobufCBinaryData){.len = sizeof(e->key), .data = e->key};
    m.count = e->count;
    if (e->kind == FB_EVENT_STATE) {
        m.state = wire_state((enum fb_node_state)e->count, 0);
    }
    bytes = protobuf_c_message_get_packed_size(&m.base);
    FB_ASSERT(bytes <= sizeof(packed));
    protobuf_c_message_pack(&m.base, packed);
    return fb_rpc_send(call->rpc, packed, bytes);
}

/* A watcher that does not keep up tries the same event again next round. */
static enum fb_status pump_watcher(struct fb_node *node, struct admin_call *call)
{
    struct fb_event event;

    for (int i = 0; i < EVENTS_PER_ROUND; i++) {
        uint64_t next = call->next_event;
        enum fb_status status;

        if (!fb_node_next_event(node, &next, &event)) {
            return FB_OK;
        }
        if (call->tenant[0] && strcmp(call->tenant, event.tenant) != 0) {
            call->next_event = next;
            continue;
        }
        status = send_event(call, &event);
        if (status == FB_AGAIN) {
            return FB_OK;
        }
        if (status != FB_OK) {
            return status;
        }
        call->next_event = next;
    }
    return FB_OK;
}

static void end_drains(struct fb_admin *admin, bool complete)
{
    Forebay__V1__DrainReply r = FOREBAY__V1__DRAIN_REPLY__INIT;
    struct fb_node_status s;
    struct admin_call *call;

    if (LIST_EMPTY(&admin->drains)) {
        return;
    }
    fb_node_get_status(fb_reactor_node(admin->reactor), &s);
    r.complete = complete && s.leases == 0;
    r.clients = s.clients;
    r.leases = s.leases;
    while ((call = LIST_FIRST(&admin->drains))) {
        LIST_REMOVE(call, link);
        reply(call, &r.base);
    }
}

static void on_round(void *context)
{
    struct fb_admin *admin = context;
    struct fb_node *node = fb_reactor_node(admin->reactor);
    bool serving = fb_node_state(node) == FB_NODE_READY;
    struct admin_call *call, *next;

    for (call = LIST_FIRST(&admin->watchers); call; call = next) {
        enum fb_status status = pump_watcher(node, call);

        next = LIST_NEXT(call, link);
        if (status != FB_OK) {
            LIST_REMOVE(call, link);
            fail(call, status, NULL);
        }
    }
    if (serving != admin->serving) {
        admin->serving = serving;
        fb_rpc_server_set_health(admin->server, serving);
    }
    if (fb_node_state(node) == FB_NODE_DRAINED) {
        end_drains(admin, true);
    }
}

/* --- from the gRPC thread to the reactor --- */

static void on_call(struct fb_mail *mail)
{
    struct admin_call *call = (struct admin_call *)mail;

    call->answer(call->admin, call);
}

static void post(struct fb_rpc_call *rpc, const uint8_t *request, size_t bytes, void *context,
                 answer_fn answer)
{
    struct fb_admin *admin = context;
    struct admin_call *call = calloc(1, sizeof(*call) + bytes);

    if (!call) {
        fb_rpc_finish(rpc, FB_ENOMEM, NULL);
        return;
    }
    call->mail.run = on_call;
    call->admin = admin;
    call->rpc = rpc;
    call->rpc_id = fb_rpc_call_id(rpc);
    call->answer = answer;
    call->bytes = bytes;
    if (bytes > 0) {
        memcpy(call->request, request, bytes);
    }
    fb_mailbox_post(fb_reactor_mailbox(admin->reactor), &call->mail);
}

static void start_status(struct fb_rpc_call *rpc, const uint8_t *request, size_t bytes,
                         void *context)
{
    post(rpc, request, bytes, context, answer_status);
}

static void start_spaces(struct fb_rpc_call *rpc, const uint8_t *request, size_t bytes,
                         void *context)
{
    post(rpc, request, bytes, context, answer_spaces);
}

static void start_purge(struct fb_rpc_call *rpc, const uint8_t *request, size_t bytes,
                        void *context)
{
    post(rpc, request, bytes, context, answer_purge);
}

static void start_drain(struct fb_rpc_call *rpc, const uint8_t *request, size_t bytes,
                        void *context)
{
    post(rpc, request, bytes, context, answer_drain);
}

static void start_watch(struct fb_rpc_call *rpc, const uint8_t *request, size_t bytes,
                        void *context)
{
    post(rpc, request, bytes, context, answer_watch);
}

/* The reactor finds the call by its id: it may have ended it meanwhile. */
struct cancel_mail {
    struct fb_mail mail;
    struct fb_admin *admin;
    uint64_t rpc_id;
};

static void on_cancel(struct fb_mail *mail)
{
    struct cancel_mail *cancel = (struct cancel_mail *)mail;
    struct admin_call *call;

    LIST_FOREACH(call, &cancel->admin->watchers, link) {
        if (call->rpc_id == cancel->rpc_id) {
            LIST_REMOVE(call, link);
            fail(call, FB_ECANCELED, NULL);
            break;
        }
    }
    free(cancel);
}

static void canceled(uint64_t rpc_id, void *context)
{
    struct fb_admin *admin = context;
    struct cancel_mail *cancel = calloc(1, sizeof(*cancel));

    /* Without memory the watcher is found out at its next event. */
    if (cancel) {
        *cancel = (struct cancel_mail){{.run = on_cancel}, admin, rpc_id};
        fb_mailbox_post(fb_reactor_mailbox(admin->reactor), &cancel->mail);
    }
}

static const struct fb_rpc_method methods[] = {
    {"/forebay.v1.Admin/Status", start_status, NULL},
    {"/forebay.v1.Admin/Spaces", start_spaces, NULL},
    {"/forebay.v1.Admin/Purge", start_purge, NULL},
    {"/forebay.v1.Admin/Drain", start_drain, NULL},
    {"/forebay.v1.Admin/Watch", start_watch, canceled},
};

enum fb_status fb_admin_create(const char *address, struct fb_reactor *reactor,
                               const struct fb_config *config, struct fb_metrics *metrics,
                               struct fb_admin **ret_admin, struct fb_error *error)
{
    struct fb_admin *admin = calloc(1, sizeof(*admin));
    struct fb_rpc_server_options options = {
        .address = address,
        .methods = methods,
        .method_count = sizeof(methods) / sizeof(methods[0]),
        .context = admin,
    };
    enum fb_status status;

    if (!admin) {
        return fb_error_set(error, FB_ENOMEM, "out of memory");
    }
    admin->reactor = reactor;
    admin->config = config;
    admin->metrics = metrics;
    LIST_INIT(&admin->drains);
    LIST_INIT(&admin->watchers);
    status = fb_rpc_server_create(&options, &admin->server, error);
    if (status != FB_OK) {
        free(admin);
        return status;
    }
    fb_reactor_on_round(reactor, on_round, admin);
    *ret_admin = admin;
    return FB_OK;
}

void fb_admin_destroy(struct fb_admin *admin)
{
    struct admin_call *call;

    if (!admin) {
        return;
    }
    fb_rpc_server_set_health(admin->server, false);
    /* Calls that came while the reactor stopped are answered as it now is. */
    fb_mailbox_run(fb_reactor_mailbox(admin->reactor));
    end_drains(admin, true);
    while ((call = LIST_FIRST(&admin->watchers))) {
        LIST_REMOVE(call, link);
        fail(call, FB_ECANCELED, "the daemon ends");
    }
    fb_reactor_on_round(admin->reactor, NULL, NULL);
    fb_rpc_server_destroy(admin->server, 200);
    fb_mailbox_run(fb_reactor_mailbox(admin->reactor));
    end_drains(admin, true);
    while ((call = LIST_FIRST(&admin->watchers))) {
        LIST_REMOVE(call, link);
        fail(call, FB_ECANCELED, NULL);
    }
    free(admin);
}
