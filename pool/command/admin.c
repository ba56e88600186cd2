/* Commands of the control plane: status, spaces, watch, purge, drain. Each packs a request, makes
 * one call, and shows the reply. */
#include "pool/command/admin.h"

#include "pool/command/output.h"

#include "proto/forebay.pb-c.h"
#include "transport/grpc_client.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SERVICE         "/forebay.v1.Admin/"
#define CALL_MS         5000u
#define WATCH_MS        1000u
#define SPACE_ID_BYTES  16u
#define KEY_BYTES       32u
#define DRAIN_LONGEST   3600000u
#define DRAIN_MARGIN_MS 5000u /* for the answer, behind the drain's own deadline */

static const char *state_name(Forebay__V1__NodeState state)
{
    switch (state) {
    case FOREBAY__V1__NODE_STATE__NODE_STATE_STARTING: return "starting";
    case FOREBAY__V1__NODE_STATE__NODE_STATE_READY: return "ready";
    case FOREBAY__V1__NODE_STATE__NODE_STATE_DRAINING: return "draining";
    default: return "unknown";
    }
}

static const char *rule_name(Forebay__V1__Rule rule)
{
    switch (rule) {
    case FOREBAY__V1__RULE__RULE_FULL: return "full";
    case FOREBAY__V1__RULE__RULE_WINDOW: return "window";
    case FOREBAY__V1__RULE__RULE_STATE: return "state";
    default: return "unknown";
    }
}

static const char *event_name(Forebay__V1__EventKind kind)
{
    switch (kind) {
    case FOREBAY__V1__EVENT_KIND__EVENT_KIND_COMMITTED: return "committed";
    case FOREBAY__V1__EVENT_KIND__EVENT_KIND_EVICTED: return "evicted";
    case FOREBAY__V1__EVENT_KIND__EVENT_KIND_PURGED: return "purged";
    case FOREBAY__V1__EVENT_KIND__EVENT_KIND_REJECTED: return "rejected";
    case FOREBAY__V1__EVENT_KIND__EVENT_KIND_CLIENT_JOINED: return "client_joined";
    case FOREBAY__V1__EVENT_KIND__EVENT_KIND_CLIENT_DIED: return "client_died";
    case FOREBAY__V1__EVENT_KIND__EVENT_KIND_CHUNK_MOVED: return "chunk_moved";
    case FOREBAY__V1__EVENT_KIND__EVENT_KIND_STATE: return "state";
    default: return "unknown";
    }
}

/* A packed request, for free(); NULL when out of memory. */
static uint8_t *pack(const ProtobufCMessage *request, size_t *ret_bytes)
{
    size_t bytes = protobuf_c_message_get_packed_size(request);
    uint8_t *data = malloc(bytes + 1);

    if (data) {
        *ret_bytes = protobuf_c_message_pack(request, data);
    }
    return data;
}

/* One call. returns the reply, for protobuf_c_message_free_unpacked, or NULL after a message. */
static ProtobufCMessage *call(const struct fb_cli *cli, const char *path,
                              const ProtobufCMessage *request, uint32_t timeout_ms,
                              const ProtobufCMessageDescriptor *reply_type)
{
    struct fb_rpc_client *client = NULL;
    struct fb_rpc_message raw = {0};
    struct fb_error error = {.text = "out of memory"};
    ProtobufCMessage *reply = NULL;
    size_t bytes = 0;
    uint8_t *packed = pack(request, &bytes);
    enum fb_status status = packed ? fb_rpc_client_create(cli->grpc, &client, &error) : FB_ENOMEM;

    if (status == FB_OK) {
        status = fb_rpc_client_call(client, path, packed, bytes, timeout_ms, &raw, &error);
    }
    if (status != FB_OK) {
        fb_fail("%s", error.text);
    } else {
        reply = protobuf_c_message_unpack(reply_type, NULL, raw.bytes, raw.data);
        if (!reply) {
            fb_fail("%s sent a reply that is not understood; use a forebay of its version",
                    cli->grpc);
        }
    }
    free(raw.data);
    free(packed);
    fb_rpc_client_destroy(client);
    return reply;
}

/* --- status --- */

static size_t tenant_fields(const Forebay__V1__TenantStatus *t, struct fb_field *out)
{
    const struct fb_field fields[] = {
        FB_FIELD_TEXT("name", "TENANT", t->name),
        FB_FIELD_BYTES("share_bytes", "SHARE", t->share_bytes),
        FB_FIELD_BYTES("used_bytes", "USED", t->used_bytes),
        FB_FIELD_COUNT("blocks", "BLOCKS", t->blocks),
        FB_FIELD_COUNT("chunks", "CHUNKS", t->chunks),
    };

    memcpy(out, fields, sizeof(fields));
    return FB_COUNT_OF(fields);
}

static size_t space_fields(const Forebay__V1__Space *s, struct fb_field *out)
{
    const struct fb_field fields[] = {
        FB_FIELD_TEXT("id", "SPACE", NULL), /* set by the caller, who keeps the text */
        FB_FIELD_TEXT("tenant", "TENANT", s->tenant),
        FB_FIELD_TEXT("model", "MODEL", s->model),
        FB_FIELD_TEXT("rule", "RULE", rule_name(s->rule)),
        FB_FIELD_COUNT("window_tokens", "WINDOW", s->window_tokens),
        FB_FIELD_COUNT("page_tokens", "PAGE", s->page_tokens),
        FB_FIELD_COUNT("layers", "LAYERS", s->layers),
        FB_FIELD_COUNT("heads", "HEADS", s->heads),
        FB_FIELD_TEXT("codec", "CODEC", s->codec),
        FB_FIELD_BYTES("block_bytes", "BLOCK", s->block_bytes),
        FB_FIELD_COUNT("blocks", "BLOCKS", s->blocks),
        FB_FIELD_BYTES("bytes", "BYTES", s->bytes),
    };

    memcpy(out, fields, sizeof(fields));
    return FB_COUNT_OF(fields);
}

#define MAX_COLUMNS 12

/* Rows as a table, or as an array of objects. */
static json_t *rows_json(const struct fb_field *fields, size_t rows, size_t columns)
{
    json_t *array = json_array();

    for (size_t r = 0; r < rows; r++) {
        json_array_append_new(array, fb_fields_json(fields + r * columns, columns));
    }
    return array;
}

static void show_status(const struct fb_cli *cli, const Forebay__V1__StatusReply *r,
                        const struct fb_field *tenants, size_t columns)
{
    const Forebay__V1__HostTier none = FOREBAY__V1__HOST_TIER__INIT;
    const Forebay__V1__Counters zero = FOREBAY__V1__COUNTERS__INIT;
    const Forebay__V1__HostTier *host = r->host ? r->host : &none;
    const Forebay__V1__Counters *n = r->counters ? r->counters : &zero;
    double pages = n->lookup_pages ? (double)n->lookup_pages : 1;
    const struct fb_field fields[] = {
        FB_FIELD_TEXT("version", "Version", r->version),
        FB_FIELD_TEXT("node_id", "Node", r->node_id),
        FB_FIELD_TEXT("state", "State", state_name(r->state)),
        FB_FIELD_NS("uptime_ns", "Up", r->uptime_ms * 1000000),
        FB_FIELD_BYTES("host_bytes", "Host tier", host->bytes),
        FB_FIELD_BYTES("host_used_bytes", "  used", host->used_bytes),
        FB_FIELD_COUNT("host_blocks", "  blocks", host->blocks),
        FB_FIELD_BYTES("index_bytes", "Index", r->index_bytes),
        FB_FIELD_COUNT("clients", "Clients", r->clients),
        FB_FIELD_COUNT("survivors_awaited", "  awaited", r->survivors_awaited),
        FB_FIELD_COUNT("leases", "Leases", r->leases),
        FB_FIELD_BYTES("leased_bytes", "Leased", r->leased_bytes),
        FB_FIELD_BYTES("reserved_bytes", "Reserved", r->reserved_bytes),
        FB_FIELD_BYTES("quarantined_bytes", "Quarantined", r->quarantined_bytes),
        FB_FIELD_BYTES("pinned_bytes", "Pinned", r->pinned_bytes),
        FB_FIELD_COUNT("lookups", "Lookups", n->lookups),
        FB_FIELD_COUNT("lookup_pages", "  pages asked", n->lookup_pages),
        FB_FIELD_COUNT("hit_pages", "  pages hit", n->hit_pages),
        FB_FIELD_SHARE("hit_rate", "  hit rate", (double)n->hit_pages / pages),
        FB_FIELD_COUNT("committed_blocks", "Committed", n->committed_blocks),
        FB_FIELD_COUNT("evicted_blocks", "Evicted", n->evicted_blocks),
    };

    if (cli->json) {
        json_t *object = fb_fields_json(fields, FB_COUNT_OF(fields));

        json_object_set_new(object, "tenants", rows_json(tenants, r->n_tenants, columns));
        fb_json_print(object, false);
        return;
    }
    fb_fields_print(fields, FB_COUNT_OF(fields));
    putchar('\n');
    fb_table_print(tenants, r->n_tenants, columns);
}

int fb_run_status(struct fb_cli *cli, int argc, char **argv)
{
    const Forebay__V1__StatusRequest request = FOREBAY__V1__STATUS_REQUEST__INIT;
    ProtobufCMessage *message;
    const Forebay__V1__StatusReply *reply;
    struct fb_field *tenants;
    size_t columns = MAX_COLUMNS;

    fb_cli_parse_plain(cli, argc, argv, "Show one node at a glance.");
    message =
        call(cli, SERVICE "Status", &request.base, CALL_MS, &forebay__v1__status_reply__descriptor);
    if (!message) {
        return EXIT_FAILURE;
    }
    reply = (const Forebay__V1__StatusReply *)message;
    tenants = calloc(reply->n_tenants + 1, columns * sizeof(*tenants));
    if (tenants) {
        struct fb_field *next = tenants;

        for (size_t i = 0; i < reply->n_tenants; i++) {
            columns = tenant_fields(reply->tenants[i], next);
            next += columns;
        }
        show_status(cli, reply, tenants, columns);
    }
    free(tenants);
    protobuf_c_message_free_unpacked(message, NULL);
    return tenants ? EXIT_SUCCESS : fb_fail("out of memory");
}

/* --- spaces --- */

struct space_text {
    char id[2 * SPACE_ID_BYTES + 1];
};

static int show_spaces(const struct fb_cli *cli, const Forebay__V1__SpacesReply *reply)
{
    size_t columns = MAX_COLUMNS;
    struct fb_field *fields = calloc(reply->n_spaces + 1, columns * sizeof(*fields));
    struct space_text *texts = calloc(reply->n_spaces + 1, sizeof(*texts));
    struct fb_field *next = fields;

    if (!fields || !texts) {
        free(fields);
        free(texts);
        return fb_fail("out of memory");
    }
    for (size_t i = 0; i < reply->n_spaces; i++) {
        const ProtobufCBinaryData *id = &reply->spaces[i]->id;

        fb_hex_format(id->data, id->len < SPACE_ID_BYTES ? id->len : SPACE_ID_BYTES, texts[i].id);
        columns = space_fields(reply->spaces[i], next);
        next->text = texts[i].id;
        next += columns;
    }
    if (cli->json) {
        json_t *object = json_object();

        json_object_set_new(object, "spaces", rows_json(fields, reply->n_spaces, columns));
        fb_json_print(object, false);
    } else if (reply->n_spaces == 0) {
        puts("no spaces yet: an engine or `forebay put` opens one");
    } else {
        fb_table_print(fields, reply->n_spaces, columns);
    }
    free(fields);
    free(texts);
    return EXIT_SUCCESS;
}

struct admin_input {
    struct fb_cli_input base;
    char *tenant;
    const char *space_hex;
    const char *key_hex;
    bool all;
    uint32_t deadline_ms;
    uint8_t space[SPACE_ID_BYTES];
    uint8_t key[KEY_BYTES];
};

#define OPTION_TENANT                                      \
    {                                                      \
        "tenant", 't', "NAME", 0, "Of this tenant only", 0 \
    }

static error_t parse_tenant(int key, char *arg, struct argp_state *state)
{
    struct admin_input *input = state->input;

    switch (key) {
    case ARGP_KEY_INIT: fb_cli_init_child(state); return 0;
    case 't': input->tenant = arg; return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option tenant_options[] = {OPTION_TENANT, {0}};

int fb_run_spaces(struct fb_cli *cli, int argc, char **argv)
{
    const struct argp argp = {.options = tenant_options,
                              .parser = parse_tenant,
                              .doc = "List the spaces that a node knows.",
                              .children = fb_cli_children};
    struct admin_input input = {.base = {cli}, .tenant = (char[]){""}};
    Forebay__V1__SpacesRequest request = FOREBAY__V1__SPACES_REQUEST__INIT;
    ProtobufCMessage *reply;
    int status;

    argp_parse(&argp, argc, argv, 0, NULL, &input);
    request.tenant = input.tenant;
    reply =
        call(cli, SERVICE "Spaces", &request.base, CALL_MS, &forebay__v1__spaces_reply__descriptor);
    if (!reply) {
        return EXIT_FAILURE;
    }
    status = show_spaces(cli, (const Forebay__V1__SpacesReply *)reply);
    protobuf_c_message_free_unpacked(reply, NULL);
    return status;
}

bool fb_admin_get_manifest(const struct fb_cli *cli, const uint8_t id[FB_SPACE_ID_BYTES],
                           struct fb_manifest *ret_manifest)
{
    Forebay__V1__SpacesRequest request = FOREBAY__V1__SPACES_REQUEST__INIT;
    char hex[2 * FB_SPACE_ID_BYTES + 1];
    const Forebay__V1__SpacesReply *reply;
    const ProtobufCBinaryData *manifest;
    ProtobufCMessage *message;
    struct fb_error error;
    bool found = false;

    request.space_id = (ProtobufCBinaryData){FB_SPACE_ID_BYTES, (uint8_t *)(uintptr_t)id};
    message =
        call(cli, SERVICE "Spaces", &request.base, CALL_MS, &forebay__v1__spaces_reply__descriptor);
    if (!message) {
        return false;
    }
    reply = (const Forebay__V1__SpacesReply *)message;
    manifest = reply->n_spaces == 1 ? &reply->spaces[0]->manifest : NULL;
    fb_hex_format(id, FB_SPACE_ID_BYTES, hex);
    if (reply->n_spaces == 0) {
        fb_fail("%s has no space %s; `forebay spaces` lists those it has", cli->grpc, hex);
    } else if (!manifest || manifest->len == 0) {
        fb_fail("%s does not tell manifests; use a forebayd of this version", cli->grpc);
    } else if (fb_manifest_decode(manifest->data, manifest->len, ret_manifest, &error) != FB_OK) {
        fb_fail("%s: space %s: %s", cli->grpc, hex, error.text);
    } else {
        found = true;
    }
    protobuf_c_message_free_unpacked(message, NULL);
    return found;
}

/* --- purge --- */

static error_t parse_purge(int key, char *arg, struct argp_state *state)
{
    struct admin_input *input = state->input;

    switch (key) {
    case 'a': input->all = true; return 0;
    case 'S': input->space_hex = arg; return 0;
    case 'k': input->key_hex = arg; return 0;
    case ARGP_KEY_END:
        if (!*input->tenant) {
            argp_error(state, "--tenant is needed");
        }
        if (input->all == (input->space_hex != NULL)) {
            argp_error(state, "say either --all or --space ID [--key KEY]");
        }
        if (input->key_hex && !input->space_hex) {
            argp_error(state, "--key needs its --space");
        }
        if (input->space_hex && !fb_hex_parse(input->space_hex, input->space, SPACE_ID_BYTES)) {
            argp_error(state, "--space: expected 32 hexadecimal digits, as `spaces` shows");
        }
        if (input->key_hex && !fb_hex_parse(input->key_hex, input->key, KEY_BYTES)) {
            argp_error(state, "--key: expected the 64 hexadecimal digits of a pool key");
        }
        return 0;
    default: return parse_tenant(key, arg, state);
    }
}

int fb_run_purge(struct fb_cli *cli, int argc, char **argv)
{
    static const struct argp_option options[] = {
        OPTION_TENANT,
        {"all", 'a', NULL, 0, "All blocks of the tenant", 0},
        {"space", 'S', "ID", 0, "All blocks of a space", 0},
        {"key", 'k', "KEY", 0, "In the space: a block and all that extend it", 0},
        {0},
    };
    const struct argp argp = {.options = options,
                              .parser = parse_purge,
                              .doc = "Make blocks unfindable at once. Their memory comes back when "
                                     "the last reader is done.",
                              .children = fb_cli_children};
    struct admin_input input = {.base = {cli}, .tenant = (char[]){""}};
    Forebay__V1__PurgeRequest request;
    Forebay__V1__Prefix prefix = FOREBAY__V1__PREFIX__INIT;
    ProtobufCMessage *message;
    const Forebay__V1__PurgeReply *reply;

    argp_parse(&argp, argc, argv, 0, NULL, &input);
    forebay__v1__purge_request__init(&request);
    request.tenant = input.tenant;
    prefix.space_id = (ProtobufCBinaryData){SPACE_ID_BYTES, input.space};
    prefix.key = (ProtobufCBinaryData){KEY_BYTES, input.key};
    if (input.all) {
        request.target_case = FOREBAY__V1__PURGE_REQUEST__TARGET_ALL;
        request.all = true;
    } else if (input.key_hex) {
        request.target_case = FOREBAY__V1__PURGE_REQUEST__TARGET_PREFIX;
        request.prefix = &prefix;
    } else {
        request.target_case = FOREBAY__V1__PURGE_REQUEST__TARGET_SPACE_ID;
        request.space_id = prefix.space_id;
    }
    message =
        call(cli, SERVICE "Purge", &request.base, CALL_MS, &forebay__v1__purge_reply__descriptor);
    if (!message) {
        return EXIT_FAILURE;
    }
    reply = (const Forebay__V1__PurgeReply *)message;
    fb_fields_show((const struct fb_field[]){FB_FIELD_COUNT("blocks", "Purged", reply->blocks),
                                             FB_FIELD_BYTES("bytes", "Bytes", reply->bytes)},
                   2, cli->json);
    protobuf_c_message_free_unpacked(message, NULL);
    return EXIT_SUCCESS;
}

/* --- drain --- */

static error_t parse_drain(int key, char *arg, struct argp_state *state)
{
    struct admin_input *input = state->input;

    switch (key) {
    case ARGP_KEY_INIT: fb_cli_init_child(state); return 0;
    case 'd':
        input->deadline_ms = (uint32_t)fb_cli_number(state, "--deadline", arg, 1, DRAIN_LONGEST);
        return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

int fb_run_drain(struct fb_cli *cli, int argc, char **argv)
{
    static const struct argp_option options[] = {
        {"deadline", 'd', "MS", 0, "Wait this long at most (default: as the daemon says)", 0}, {0}};
    const struct argp argp = {.options = options,
                              .parser = parse_drain,
                              .doc = "Refuse new work, let running work finish, keep the blocks. "
                                     "Exits with 1 when the deadline passed first.",
                              .children = fb_cli_children};
    struct admin_input input = {.base = {cli}};
    Forebay__V1__DrainRequest request = FOREBAY__V1__DRAIN_REQUEST__INIT;
    ProtobufCMessage *message;
    Forebay__V1__DrainReply reply;

    argp_parse(&argp, argc, argv, 0, NULL, &input);
    request.deadline_ms = input.deadline_ms;
    message = call(cli, SERVICE "Drain", &request.base,
                   (input.deadline_ms ? input.deadline_ms : DRAIN_LONGEST) + DRAIN_MARGIN_MS,
                   &forebay__v1__drain_reply__descriptor);
    if (!message) {
        return EXIT_FAILURE;
    }
    reply = *(const Forebay__V1__DrainReply *)message;
    protobuf_c_message_free_unpacked(message, NULL);
    fb_fields_show((const struct fb_field[]){FB_FIELD_BOOL("complete", "Complete", reply.complete),
                                             FB_FIELD_COUNT("clients", "Clients", reply.clients),
                                             FB_FIELD_COUNT("leases", "Leases", reply.leases)},
                   3, cli->json);
    return reply.complete ? EXIT_SUCCESS
                          : fb_fail("the deadline passed while %u leases were held; their engines "
                                    "still run",
                                    reply.leases);
}

/* --- watch --- */

static void show_event(const struct fb_cli *cli, const Forebay__V1__Event *e)
{
    char space[2 * SPACE_ID_BYTES + 1];
    char key[2 * KEY_BYTES + 1];
    char when[32];
    time_t seconds = (time_t)(e->unix_ms / 1000);
    struct tm tm;

    fb_hex_format(e->space_id.data, e->space_id.len < SPACE_ID_BYTES ? e->space_id.len : 16, space);
    fb_hex_format(e->key_prefix.data, e->key_prefix.len < KEY_BYTES ? e->key_prefix.len : 32, key);
    if (cli->json) {
        const struct fb_field fields[] = {
            FB_FIELD_COUNT("seq", "", e->seq),
            FB_FIELD_COUNT("unix_ms", "", e->unix_ms),
            FB_FIELD_TEXT("kind", "", event_name(e->kind)),
            FB_FIELD_TEXT("tenant", "", e->tenant),
            FB_FIELD_TEXT("space", "", space),
            FB_FIELD_TEXT("key_prefix", "", key),
            FB_FIELD_COUNT("count", "", e->count),
            FB_FIELD_TEXT("state", "", state_name(e->state)),
        };
        size_t count = FB_COUNT_OF(fields);

        if (e->kind != FOREBAY__V1__EVENT_KIND__EVENT_KIND_STATE) {
            count--;
        }
        fb_json_print(fb_fields_json(fields, count), true);
        return;
    }
    strftime(when, sizeof(when), "%H:%M:%S", localtime_r(&seconds, &tm));
    printf("%s.%03u  %-13s  %-12s  %6" PRIu64 "  %s  %s\n", when, (unsigned)(e->unix_ms % 1000),
           event_name(e->kind), e->tenant, e->count,
           e->kind == FOREBAY__V1__EVENT_KIND__EVENT_KIND_STATE ? state_name(e->state) : space,
           key);
}

/* Show events until the stream ends; gaps in seq are said. */
static enum fb_status watch_events(const struct fb_cli *cli, struct fb_rpc_stream *stream,
                                   struct fb_error *error)
{
    uint64_t last_seq = 0;

    for (;;) {
        struct fb_rpc_message raw;
        Forebay__V1__Event *event;
        enum fb_status status = fb_rpc_stream_next(stream, WATCH_MS, &raw, error);

        if (status == FB_ETIMEDOUT) {
            continue;
        }
        if (status != FB_OK) {
            return status;
        }
        event = forebay__v1__event__unpack(NULL, raw.bytes, raw.data);
        free(raw.data);
        if (!event) {
            return fb_error_set(error, FB_EPROTO, "%s sent an event that is not understood",
                                cli->grpc);
        }
        if (last_seq && event->seq > last_seq + 1 && !cli->json) {
            printf("(%" PRIu64 " events of others, or lost)\n", event->seq - last_seq - 1);
        }
        last_seq = event->seq;
        show_event(cli, event);
        fflush(stdout);
        forebay__v1__event__free_unpacked(event, NULL);
        if (ferror(stdout)) {
            return FB_MISS;
        }
    }
}

int fb_run_watch(struct fb_cli *cli, int argc, char **argv)
{
    const struct argp argp = {.options = tenant_options,
                              .parser = parse_tenant,
                              .doc = "Print what happens from now on, an event a line.",
                              .children = fb_cli_children};
    struct admin_input input = {.base = {cli}, .tenant = (char[]){""}};
    Forebay__V1__WatchRequest request = FOREBAY__V1__WATCH_REQUEST__INIT;
    struct fb_rpc_client *client = NULL;
    struct fb_rpc_stream *stream = NULL;
    struct fb_error error = {.text = "out of memory"};
    size_t bytes = 0;
    uint8_t *packed;
    enum fb_status status;

    argp_parse(&argp, argc, argv, 0, NULL, &input);
    request.tenant = input.tenant;
    packed = pack(&request.base, &bytes);
    status = packed ? fb_rpc_client_create(cli->grpc, &client, &error) : FB_ENOMEM;
    if (status == FB_OK) {
        status = fb_rpc_stream_open(client, SERVICE "Watch", packed, bytes, &stream, &error);
    }
    if (status == FB_OK) {
        status = watch_events(cli, stream, &error);
    }
    fb_rpc_stream_close(stream);
    fb_rpc_client_destroy(client);
    free(packed);
    return status == FB_MISS ? EXIT_SUCCESS : fb_fail("%s", error.text);
}
