/* Wire messages: one table says what each type holds, one parser checks packets against it. */
#include "proto/wire.h"

#include "proto/assert.h"

#include <string.h>

/* Arrays behind a fixed part: element counts and sizes, computed from the fixed part. */
struct arrays {
    uint64_t first_bytes;
    uint64_t second_bytes;
    bool over_limit;
};

typedef struct arrays (*arrays_fn)(const struct fb_wire_message *m);

struct message_row {
    const char *name;
    size_t request_bytes;
    size_t reply_bytes;
    arrays_fn request_arrays; /* NULL: none */
    arrays_fn reply_arrays;
};

static struct arrays one(uint64_t count, uint64_t size, uint64_t limit)
{
    return (struct arrays){.first_bytes = count * size, .over_limit = count > limit};
}

static struct arrays space_request(const struct fb_wire_message *m)
{
    return one(m->space.manifest_bytes, 1, FB_MANIFEST_MAX_BYTES);
}

static struct arrays lookup_request(const struct fb_wire_message *m)
{
    uint64_t spaces = m->lookup.space_count, pages = m->lookup.page_count;

    /* Both counts are 32 bits wide, so the product cannot overflow; times 32 it is capped. */
    return (struct arrays){
        .first_bytes = 4 * spaces,
        .second_bytes = spaces * pages > FB_WIRE_MAX_KEYS ? 0 : spaces * pages * FB_KEY_BYTES,
        .over_limit = spaces > FB_MAX_FAMILY || spaces * pages > FB_WIRE_MAX_KEYS,
    };
}

static struct arrays leases_request(const struct fb_wire_message *m)
{
    return one(m->list.count, 8, FB_WIRE_MAX_LEASES);
}

static struct arrays claims_request(const struct fb_wire_message *m)
{
    return one(m->list.count, 8, FB_WIRE_MAX_CLAIMS);
}

static struct arrays chunks_request(const struct fb_wire_message *m)
{
    return one(m->list.count, 4, FB_WIRE_MAX_CHUNKS);
}

static struct arrays renew_request(const struct fb_wire_message *m)
{
    uint64_t ids = (uint64_t)m->renew.lease_count + m->renew.claim_count;
    struct arrays a = one(ids, 8, FB_WIRE_MAX_HELD);

    a.second_bytes = 4ull * m->renew.unmapped_count;
    a.over_limit |= m->renew.unmapped_count > FB_WIRE_MAX_HELD;
    return a;
}

static struct arrays reserve_request(const struct fb_wire_message *m)
{
    return one(m->reserve.count, FB_KEY_BYTES, FB_WIRE_MAX_CLAIMS);
}

static struct arrays commit_request(const struct fb_wire_message *m)
{
    struct arrays a = one(m->commit.count, 8, FB_WIRE_MAX_CLAIMS);
    uint64_t sums = (uint64_t)m->commit.count * m->commit.plane_count;

    a.over_limit |= sums > FB_WIRE_MAX_SUMS || m->commit.plane_count > FB_MAX_PLANES;
    a.second_bytes = a.over_limit ? 0 : 8 * sums;
    return a;
}

static struct arrays reject_request(const struct fb_wire_message *m)
{
    return one(m->reject.count, FB_KEY_BYTES, FB_WIRE_MAX_KEYS);
}

static struct arrays hint_request(const struct fb_wire_message *m)
{
    return one(m->hint.count, FB_KEY_BYTES, FB_WIRE_MAX_KEYS);
}

static struct arrays resume_request(const struct fb_wire_message *m)
{
    return one(m->resume.count, sizeof(struct fb_wire_location), FB_WIRE_MAX_KEYS);
}

static struct arrays lookup_reply(const struct fb_wire_message *m)
{
    uint64_t n = (uint64_t)m->lookup_reply.space_count * m->lookup_reply.page_count;

    return one(n > FB_WIRE_MAX_KEYS ? FB_WIRE_MAX_KEYS + 1 : n, sizeof(struct fb_wire_location),
               FB_WIRE_MAX_KEYS);
}

static struct arrays statuses_reply(const struct fb_wire_message *m)
{
    return one(m->list_reply.count, 4, FB_WIRE_MAX_KEYS);
}

static struct arrays reserve_reply(const struct fb_wire_message *m)
{
    return one(m->list_reply.count, sizeof(struct fb_reserve_row), FB_WIRE_MAX_CLAIMS);
}

static struct arrays chunks_reply(const struct fb_wire_message *m)
{
    return one(m->list_reply.count, sizeof(struct fb_chunk_row), FB_WIRE_MAX_CHUNKS);
}

/* How many locations follow is in the rows: `second` is checked once they can be read. */
static struct arrays attach_reply(const struct fb_wire_message *m)
{
    struct arrays a = one(m->list_reply.count, sizeof(struct fb_attach_row), FB_WIRE_MAX_LEASES);
    uint64_t locations = 0;

    if (!m->first || a.over_limit) {
        return a;
    }
    for (uint32_t i = 0; i < m->list_reply.count; i++) {
        struct fb_attach_row row;
        uint64_t n;

        memcpy(&row, m->first + i * sizeof(row), sizeof(row));
        n = (uint64_t)row.space_count * row.page_count;
        locations += n > FB_WIRE_MAX_KEYS ? FB_WIRE_MAX_KEYS + 1 : n;
        a.over_limit |= n > FB_WIRE_MAX_KEYS;
    }
    a.second_bytes = locations * sizeof(struct fb_wire_location);
    return a;
}

#define LIST sizeof(struct fb_list_reply)

static const struct message_row rows[FB_MSG_END] = {
    [FB_MSG_HELLO] = {"hello", sizeof(struct fb_hello_request), sizeof(struct fb_hello_reply), NULL,
                      NULL},
    [FB_MSG_SPACE] = {"space", sizeof(struct fb_space_request), sizeof(struct fb_space_reply),
                      space_request, NULL},
    [FB_MSG_LOOKUP] = {"lookup", sizeof(struct fb_lookup_request), sizeof(struct fb_lookup_reply),
                       lookup_request, lookup_reply},
    [FB_MSG_ATTACH] = {"attach", sizeof(struct fb_list_request), LIST, leases_request,
                       attach_reply},
    [FB_MSG_RELEASE] = {"release", sizeof(struct fb_list_request), LIST, leases_request,
                        statuses_reply},
    [FB_MSG_RENEW] = {"renew", sizeof(struct fb_renew_request), LIST, renew_request,
                      statuses_reply},
    [FB_MSG_RESERVE] = {"reserve", sizeof(struct fb_reserve_request), LIST, reserve_request,
                        reserve_reply},
    [FB_MSG_COMMIT] = {"commit", sizeof(struct fb_commit_request), LIST, commit_request,
                       statuses_reply},
    [FB_MSG_ABORT] = {"abort", sizeof(struct fb_list_request), LIST, claims_request,
                      statuses_reply},
    [FB_MSG_REJECT] = {"reject", sizeof(struct fb_reject_request), LIST, reject_request,
                       statuses_reply},
    [FB_MSG_HINT] = {"hint", sizeof(struct fb_hint_request), LIST, hint_request, statuses_reply},
    [FB_MSG_CHUNKS] = {"chunks", sizeof(struct fb_list_request), LIST, chunks_request,
                       chunks_reply},
    [FB_MSG_RESUME] = {"resume", sizeof(struct fb_resume_request), sizeof(struct fb_resume_reply),
                       resume_request, NULL},
    [FB_MSG_NOTIFY] = {"notify", 0, sizeof(struct fb_notify), NULL, NULL},
};

/* The largest fixed part fits the union. */
#define BODY(m) ((uint8_t *)&(m)->hello)

static enum fb_status parse_header(const uint8_t *packet, size_t bytes, struct fb_wire_message *m,
                                   struct fb_error *error)
{
    memset(m, 0, sizeof(*m));
    if (bytes < sizeof(m->header)) {
        return fb_error_set(error, FB_EPROTO, "message of %zu bytes; a header alone has %zu", bytes,
                            sizeof(m->header));
    }
    memcpy(&m->header, packet, sizeof(m->header));
    if (m->header.magic != FB_WIRE_MAGIC) {
        return fb_error_set(error, FB_EPROTO, "not a message of this protocol (magic %08x)",
                            m->header.magic);
    }
    if (m->header.version != FB_WIRE_VERSION) {
        return fb_error_set(error, FB_EVERSION,
                            "message of protocol version %u; this side speaks %u: use matching "
                            "versions of forebayd and libforebay",
                            m->header.version, FB_WIRE_VERSION);
    }
    if (m->header.type == 0 || m->header.type >= FB_MSG_END) {
        return fb_error_set(error, FB_EPROTO, "unknown message type %u", m->header.type);
    }
    if (m->header.bytes != bytes) {
        return fb_error_set(error, FB_EPROTO, "%s: %zu bytes arrived of %u announced",
                            rows[m->header.type].name, bytes, m->header.bytes);
    }
    return FB_OK;
}

static enum fb_status parse_arrays(const uint8_t *at, size_t left, arrays_fn arrays,
                                   struct fb_wire_message *m, struct fb_error *error)
{
    const char *name = rows[m->header.type].name;
    struct arrays a = arrays ? arrays(m) : (struct arrays){0};

    if (arrays && !a.over_limit && a.first_bytes <= left) {
        m->first = at;
        a = arrays(m);
    }
    if (a.over_limit) {
        return fb_error_set(error, FB_ELIMIT,
                            "%s: a list is over its limit (%u keys, %u leases, %u claims, %u sums, "
                            "%u chunks a message): split the request",
                            name, FB_WIRE_MAX_KEYS, FB_WIRE_MAX_LEASES, FB_WIRE_MAX_CLAIMS,
                            FB_WIRE_MAX_SUMS, FB_WIRE_MAX_CHUNKS);
    }
    if (a.first_bytes > left || a.second_bytes != left - a.first_bytes) {
        return fb_error_set(error, FB_EPROTO, "%s: its lists do not fill the message exactly",
                            name);
    }
    m->second = at + a.first_bytes;
    return FB_OK;
}

static enum fb_status parse_body(const uint8_t *packet, size_t bytes, size_t fixed,
                                 arrays_fn arrays, struct fb_wire_message *m,
                                 struct fb_error *error)
{
    size_t left = bytes - sizeof(m->header);

    if (left < fixed) {
        return fb_error_set(error, FB_EPROTO, "%s: %zu bytes of %zu", rows[m->header.type].name,
                            left, fixed);
    }
    memcpy(BODY(m), packet + sizeof(m->header), fixed);
    return parse_arrays(packet + sizeof(m->header) + fixed, left - fixed, arrays, m, error);
}

enum fb_status fb_wire_parse_request(const uint8_t *packet, size_t bytes,
                                     struct fb_wire_message *ret_m, struct fb_error *error)
{
    enum fb_status status = parse_header(packet, bytes, ret_m, error);
    const struct message_row *row;

    if (status != FB_OK) {
        return status;
    }
    row = &rows[ret_m->header.type];
    if (row->request_bytes == 0) {
        return fb_error_set(error, FB_EPROTO, "%s is not a request", row->name);
    }
    return parse_body(packet, bytes, row->request_bytes, row->request_arrays, ret_m, error);
}

enum fb_status fb_wire_parse_reply(const uint8_t *packet, size_t bytes,
                                   struct fb_wire_message *ret_m, struct fb_error *error)
{
    enum fb_status status = parse_header(packet, bytes, ret_m, error);
    const struct message_row *row;

    if (status != FB_OK) {
        return status;
    }
    if (!fb_status_valid(ret_m->header.status)) {
        return fb_error_set(error, FB_EPROTO, "unknown status %u", ret_m->header.status);
    }
    if (ret_m->header.status >= FB_AGAIN) {
        ret_m->text = (const char *)packet + sizeof(ret_m->header);
        ret_m->text_bytes = (uint32_t)(bytes - sizeof(ret_m->header));
        return FB_OK;
    }
    row = &rows[ret_m->header.type];
    return parse_body(packet, bytes, row->reply_bytes, row->reply_arrays, ret_m, error);
}

void fb_wire_begin(struct fb_wire_writer *w, uint8_t *packet, enum fb_msg type, uint64_t id,
                   enum fb_status status, const void *body, size_t body_bytes)
{
    struct fb_wire_header header = {
        .magic = FB_WIRE_MAGIC,
        .version = FB_WIRE_VERSION,
        .type = (uint16_t)type,
        .status = (uint32_t)status,
        .id = id,
    };

    w->packet = packet;
    w->bytes = 0;
    fb_wire_append(w, &header, sizeof(header));
    fb_wire_append(w, body, body_bytes);
}

void *fb_wire_append(struct fb_wire_writer *w, const void *data, size_t bytes)
{
    void *at = w->packet + w->bytes;

    FB_ASSERT(bytes <= FB_WIRE_MAX_BYTES - w->bytes);
    if (data && bytes > 0) {
        memcpy(at, data, bytes);
    }
    w->bytes += (uint32_t)bytes;
    return at;
}

void fb_wire_no_reply(struct fb_wire_writer *w)
{
    uint32_t status = FB_WIRE_NO_REPLY;

    memcpy(w->packet + offsetof(struct fb_wire_header, status), &status, sizeof(status));
}

uint32_t fb_wire_end(struct fb_wire_writer *w)
{
    memcpy(w->packet + offsetof(struct fb_wire_header, bytes), &w->bytes, sizeof(w->bytes));
    return w->bytes;
}

uint32_t fb_wire_fail(uint8_t *packet, enum fb_msg type, uint64_t id, const struct fb_error *error)
{
    struct fb_wire_writer w;

    fb_wire_begin(&w, packet, type, id, error->status, NULL, 0);
    fb_wire_append(&w, error->text, strnlen(error->text, sizeof(error->text)));
    return fb_wire_end(&w);
}
