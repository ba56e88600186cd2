/* Messages between libforebay and the daemon of its host, over a unix SOCK_SEQPACKET socket.
 *
 * Every message is one packet: a header, a fixed part that its type names, then arrays whose
 * lengths the fixed part gives. All numbers are little-endian. A request is answered by one reply
 * of the same type and id; the daemon also sends FB_MSG_NOTIFY unasked on a client's first
 * connection. Nothing in a packet is used before fb_wire_parse has checked version, type, length
 * and bounds; parsed messages point into the packet.
 * source: docs/protocol.md */
#ifndef FB_PROTO_WIRE_H
#define FB_PROTO_WIRE_H

#include "proto/chain.h"
#include "proto/family.h"

#define FB_WIRE_MAGIC      0x59424546u /* "FEBY" */
#define FB_WIRE_VERSION    1u
#define FB_WIRE_MAX_BYTES  (160u * 1024u)
#define FB_WIRE_MAX_KEYS   4096u /* over all spaces of a lookup */
#define FB_WIRE_MAX_LEASES 1024u
#define FB_WIRE_MAX_CLAIMS 1024u
#define FB_WIRE_MAX_SUMS   8192u            /* plane sums of a commit, all claims */
#define FB_WIRE_MAX_CHUNKS 64u              /* descriptors in one message */
#define FB_WIRE_MAX_HELD   FB_WIRE_MAX_KEYS /* leases and claims of one client */
#define FB_WIRE_NO_REPLY   1u               /* the client does not want to hear how it went */
#define FB_CLIENT_ID_BYTES 16

enum fb_msg {
    FB_MSG_HELLO = 1, /* carries the client's pidfd */
    FB_MSG_SPACE,
    FB_MSG_LOOKUP,
    FB_MSG_ATTACH,
    FB_MSG_RELEASE,
    FB_MSG_RENEW,
    FB_MSG_RESERVE,
    FB_MSG_COMMIT,
    FB_MSG_ABORT,
    FB_MSG_REJECT,
    FB_MSG_HINT,
    FB_MSG_CHUNKS, /* reply carries descriptors */
    FB_MSG_RESUME,
    FB_MSG_NOTIFY,
    FB_MSG_END,
};

#define FB_PACKED __attribute__((packed))

struct FB_PACKED fb_wire_header {
    uint32_t magic;
    uint16_t version;
    uint16_t type;
    uint32_t bytes;  /* of the whole packet */
    uint32_t status; /* replies; requests: 0, or FB_WIRE_NO_REPLY */
    uint64_t id;     /* of the request, chosen by the client */
};
_Static_assert(sizeof(struct fb_wire_header) == 24, "wire header");

struct FB_PACKED fb_wire_location {
    uint32_t chunk; /* FB_WIRE_NOWHERE: this page is not needed */
    uint32_t slot;
};
#define FB_WIRE_NOWHERE UINT32_MAX
_Static_assert(sizeof(struct fb_wire_location) == 8, "wire location");

/* --- requests: fixed parts; the arrays that follow are in the comments --- */

enum fb_hello_flag {
    FB_HELLO_CONTROL = 1, /* notifications go to this connection */
};

struct FB_PACKED fb_hello_request {
    uint16_t version_min;
    uint16_t version_max;
    uint32_t flags;
    uint8_t client[FB_CLIENT_ID_BYTES];
};

struct FB_PACKED fb_space_request {
    uint32_t manifest_bytes; /* then the manifest */
};

enum fb_lookup_flag {
    FB_LOOKUP_PREFETCH = 1, /* start to read ahead what is in slower tiers */
};

struct FB_PACKED fb_lookup_request {
    uint32_t space_count; /* then spaces [space_count] u32 */
    uint32_t page_count;  /* then keys [space_count][page_count][32] */
    uint32_t flags;
};

struct FB_PACKED fb_list_request {
    uint32_t count; /* ATTACH, RELEASE: leases u64; ABORT: claims u64; CHUNKS: chunk ids u32 */
};

struct FB_PACKED fb_renew_request {
    uint32_t lease_count;    /* then every lease the client holds, u64 */
    uint32_t claim_count;    /* then every claim it has not ended, u64 */
    uint32_t unmapped_count; /* then chunk ids it has unmapped, u32 */
};

struct FB_PACKED fb_reserve_request {
    uint32_t space;
    uint32_t count; /* then keys [count][32]: consecutive pages of one chain */
    uint32_t has_parent;
    uint32_t plane_first;
    uint32_t plane_count;
    uint32_t layer_first;
    uint32_t layer_count;
    uint64_t position; /* of the first key's page in its chain */
    uint8_t parent[FB_KEY_BYTES];
};

struct FB_PACKED fb_commit_request {
    uint32_t count;       /* then claims u64 */
    uint32_t plane_count; /* then sums [count][plane_count] u64: of the claim's planes and layers */
};

struct FB_PACKED fb_reject_request {
    uint32_t space;
    uint32_t count; /* then keys [count][32] */
};

enum fb_hint {
    FB_HINT_PRIORITY = 1, /* value: enum fb_priority */
    FB_HINT_TTL = 2,      /* value: seconds from now; 0 for ever */
    FB_HINT_PIN = 3,      /* value: 1 pin, 0 unpin */
};

struct FB_PACKED fb_hint_request {
    uint32_t space;
    uint32_t count; /* then keys [count][32], in page order */
    uint32_t hint;
    uint32_t value;
};

struct FB_PACKED fb_resume_request {
    uint64_t lease; /* the client's name for what follows until now */
    uint32_t count; /* then locations [count] that it still reads or writes */
};

/* --- replies --- */

struct FB_PACKED fb_hello_reply {
    uint16_t version;
    uint16_t reserved;
    uint32_t lease_ms;
    uint32_t reserve_ms;
    uint32_t client_existed; /* the daemon knew this client before this connection */
    uint64_t incarnation;
    char tenant[FB_MAX_TENANT_CHARS + 1];
};

struct FB_PACKED fb_space_reply {
    uint32_t space; /* handle for this incarnation of the daemon */
};

struct FB_PACKED fb_lookup_reply {
    uint32_t space_count;
    uint32_t page_count; /* pages of the hit; then locations [space_count][page_count] */
    uint64_t lease;      /* 0 when nothing was found */
    uint32_t lease_ms;
    uint32_t reserved;
};

struct FB_PACKED fb_attach_row {
    uint32_t status;
    uint32_t space_count;
    uint32_t page_count;
    uint32_t lease_ms;
};

struct FB_PACKED fb_list_reply {
    uint32_t count; /* RELEASE, RENEW (leases), COMMIT, ABORT, REJECT, HINT: statuses u32 [count];
                       RESERVE: fb_reserve_row [count]; CHUNKS: fb_chunk_row [count];
                       ATTACH: fb_attach_row [count], then all their locations in order */
    uint32_t reserved;
};

struct FB_PACKED fb_reserve_row {
    uint32_t status; /* FB_OK | FB_EXISTS | FB_BUSY | FB_AGAIN | ... */
    struct fb_wire_location where;
    uint64_t claim;
};

struct FB_PACKED fb_chunk_row {
    uint32_t status; /* a descriptor comes with each FB_OK */
    uint32_t chunk;
    uint64_t bytes;      /* of the file */
    uint64_t slot_bytes; /* slot i is at slots_offset + i * slot_bytes */
    uint64_t slots_offset;
};

struct FB_PACKED fb_resume_reply {
    uint64_t lease; /* holds those slots until it is released */
};

enum fb_notify_kind {
    FB_NOTIFY_UNMAP = 1,    /* value: chunk id; confirm in FB_MSG_RENEW */
    FB_NOTIFY_DRAINING = 2, /* the daemon will go; finish and release */
};

struct FB_PACKED fb_notify {
    uint32_t kind;
    uint32_t value;
};

/* A parsed packet. Pointers are into it; unaligned: read elements with fb_wire_u32/u64. */
struct fb_wire_message {
    struct fb_wire_header header;
    union {
        struct fb_hello_request hello;
        struct fb_space_request space;
        struct fb_lookup_request lookup;
        struct fb_list_request list;
        struct fb_renew_request renew;
        struct fb_reserve_request reserve;
        struct fb_commit_request commit;
        struct fb_reject_request reject;
        struct fb_hint_request hint;
        struct fb_resume_request resume;
        struct fb_hello_reply hello_reply;
        struct fb_space_reply space_reply;
        struct fb_lookup_reply lookup_reply;
        struct fb_list_reply list_reply;
        struct fb_resume_reply resume_reply;
        struct fb_notify notify;
    };
    const uint8_t *first;  /* first array */
    const uint8_t *second; /* second array, where there is one */
    const char *text;      /* replies that carry an error: its message, [text_bytes] */
    uint32_t text_bytes;
};

static inline uint32_t fb_wire_u32(const uint8_t *array, uint32_t i)
{
    uint32_t v;

    __builtin_memcpy(&v, array + 4 * (size_t)i, sizeof(v));
    return v;
}

static inline uint64_t fb_wire_u64(const uint8_t *array, uint32_t i)
{
    uint64_t v;

    __builtin_memcpy(&v, array + 8 * (size_t)i, sizeof(v));
    return v;
}

/* Parse a request or a reply. A reply whose status is no success has no body but a text.
 * returns FB_OK | FB_EPROTO | FB_EVERSION | FB_ELIMIT; ret_m->header is set once it was readable */
enum fb_status fb_wire_parse_request(const uint8_t *packet, size_t bytes,
                                     struct fb_wire_message *ret_m, struct fb_error *error);
enum fb_status fb_wire_parse_reply(const uint8_t *packet, size_t bytes,
                                   struct fb_wire_message *ret_m, struct fb_error *error);

/* Build packets in a caller's buffer of FB_WIRE_MAX_BYTES. */
struct fb_wire_writer {
    uint8_t *packet;
    uint32_t bytes;
};

/* Begin a packet with its fixed part (`body`, [body_bytes]; NULL leaves it unset). */
void fb_wire_begin(struct fb_wire_writer *w, uint8_t *packet, enum fb_msg type, uint64_t id,
                   enum fb_status status, const void *body, size_t body_bytes);

/* Append an array; returns where it is, so that a caller may fill it in place (data NULL). */
void *fb_wire_append(struct fb_wire_writer *w, const void *data, size_t bytes);

/* Mark a request as one that is not answered. */
void fb_wire_no_reply(struct fb_wire_writer *w);

/* Set the length; returns the packet's bytes. */
uint32_t fb_wire_end(struct fb_wire_writer *w);

/* Begin and end a reply that carries an error and its text. */
uint32_t fb_wire_fail(uint8_t *packet, enum fb_msg type, uint64_t id, const struct fb_error *error);

#endif
