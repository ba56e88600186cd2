/* Wire messages: every type there and back, cut short, with lengths that lie, over its limits. */
#include "proto/wire.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define MAX_BODY sizeof(struct fb_hello_reply)

/* A packet as it should be: a fixed part, then arrays that it announces. */
struct sample {
    enum fb_msg type;
    bool is_reply;
    size_t body_bytes;
    size_t first_bytes;
    size_t second_bytes;
    uint8_t body[MAX_BODY];
};

#define SAMPLE(type_, reply, first, second, body_type, ...)                     \
    do {                                                                        \
        struct body_type body_ = __VA_ARGS__;                                   \
        struct sample *s_ = &samples[n++];                                      \
                                                                                \
        *s_ = (struct sample){type_, reply, sizeof(body_), first, second, {0}}; \
        memcpy(s_->body, &body_, sizeof(body_));                                \
    } while (0)

#define MAX_SAMPLES 40

static uint32_t requests_make(struct sample samples[MAX_SAMPLES])
{
    uint32_t n = 0;

    SAMPLE(FB_MSG_HELLO, false, 0, 0, fb_hello_request, {1, 1, FB_HELLO_CONTROL, "client"});
    SAMPLE(FB_MSG_SPACE, false, 77, 0, fb_space_request, {77});
    SAMPLE(FB_MSG_LOOKUP, false, 3 * 4, 3 * 5 * 32, fb_lookup_request, {3, 5, FB_LOOKUP_PREFETCH});
    SAMPLE(FB_MSG_LOOKUP, false, 0, 0, fb_lookup_request, {0, 0, 0});
    SAMPLE(FB_MSG_ATTACH, false, 2 * 8, 0, fb_list_request, {2});
    SAMPLE(FB_MSG_RELEASE, false, 3 * 8, 0, fb_list_request, {3});
    SAMPLE(FB_MSG_RENEW, false, 3 * 8, 4 * 4, fb_renew_request, {1, 2, 4});
    SAMPLE(FB_MSG_RENEW, false, 0, 0, fb_renew_request, {0, 0, 0});
    SAMPLE(FB_MSG_RESERVE, false, 2 * 32, 0, fb_reserve_request,
           {7, 2, 1, 0, 8, 0, 32, 1ull << 33, "parent"});
    SAMPLE(FB_MSG_COMMIT, false, 2 * 8, 2 * 3 * 8, fb_commit_request, {2, 3});
    SAMPLE(FB_MSG_ABORT, false, 8, 0, fb_list_request, {1});
    SAMPLE(FB_MSG_REJECT, false, 2 * 32, 0, fb_reject_request, {1, 2});
    SAMPLE(FB_MSG_HINT, false, 32, 0, fb_hint_request, {1, 1, FB_HINT_TTL, 60});
    SAMPLE(FB_MSG_CHUNKS, false, 3 * 4, 0, fb_list_request, {3});
    SAMPLE(FB_MSG_RESUME, false, 2 * 8, 0, fb_resume_request, {99, 2});
    return n;
}

static uint32_t replies_make(struct sample samples[MAX_SAMPLES])
{
    uint32_t n = 0;

    SAMPLE(FB_MSG_HELLO, true, 0, 0, fb_hello_reply, {1, 0, 5000, 5000, 1, 42, "tenant"});
    SAMPLE(FB_MSG_SPACE, true, 0, 0, fb_space_reply, {3});
    SAMPLE(FB_MSG_LOOKUP, true, 2 * 3 * 8, 0, fb_lookup_reply, {2, 3, 77, 5000, 0});
    SAMPLE(FB_MSG_LOOKUP, true, 0, 0, fb_lookup_reply, {2, 0, 0, 0, 0});
    SAMPLE(FB_MSG_ATTACH, true, 0, 0, fb_list_reply, {0, 0});
    SAMPLE(FB_MSG_RELEASE, true, 3 * 4, 0, fb_list_reply, {3, 0});
    SAMPLE(FB_MSG_RENEW, true, 2 * 4, 0, fb_list_reply, {2, 0});
    SAMPLE(FB_MSG_RESERVE, true, 2 * sizeof(struct fb_reserve_row), 0, fb_list_reply, {2, 0});
    SAMPLE(FB_MSG_COMMIT, true, 4, 0, fb_list_reply, {1, 0});
    SAMPLE(FB_MSG_ABORT, true, 4, 0, fb_list_reply, {1, 0});
    SAMPLE(FB_MSG_REJECT, true, 4, 0, fb_list_reply, {1, 0});
    SAMPLE(FB_MSG_HINT, true, 4, 0, fb_list_reply, {1, 0});
    SAMPLE(FB_MSG_CHUNKS, true, 2 * sizeof(struct fb_chunk_row), 0, fb_list_reply, {2, 0});
    SAMPLE(FB_MSG_RESUME, true, 0, 0, fb_resume_reply, {99});
    SAMPLE(FB_MSG_NOTIFY, true, 0, 0, fb_notify, {FB_NOTIFY_UNMAP, 4});
    return n;
}

static uint32_t samples_make(struct sample samples[MAX_SAMPLES])
{
    uint32_t n = requests_make(samples);

    return n + replies_make(samples + n);
}

static uint32_t sample_write(const struct sample *s, uint8_t *packet)
{
    struct fb_wire_writer w;
    uint8_t *at;

    fb_wire_begin(&w, packet, s->type, 0x1122334455667788ull, FB_OK, s->body, s->body_bytes);
    at = fb_wire_append(&w, NULL, s->first_bytes + s->second_bytes);
    for (size_t i = 0; i < s->first_bytes + s->second_bytes; i++) {
        at[i] = (uint8_t)(i + 1);
    }
    return fb_wire_end(&w);
}

/* From memory of exactly that size, so that reading behind its end is seen. */
static enum fb_status parse(const struct sample *s, const uint8_t *packet, size_t bytes,
                            struct fb_wire_message *m, struct fb_error *error)
{
    uint8_t *exact = malloc(bytes + (bytes == 0));
    enum fb_status status;

    if (bytes > 0) {
        memcpy(exact, packet, bytes);
    }
    status = s->is_reply ? fb_wire_parse_reply(exact, bytes, m, error)
                         : fb_wire_parse_request(exact, bytes, m, error);
    free(exact);
    return status;
}

static void set_u32(uint8_t *packet, size_t offset, uint32_t v)
{
    memcpy(packet + offset, &v, sizeof(v));
}

static void test_sizes_are_fixed(void **state)
{
    (void)state;
    assert_int_equal(sizeof(struct fb_hello_request), 24);
    assert_int_equal(sizeof(struct fb_lookup_request), 12);
    assert_int_equal(sizeof(struct fb_renew_request), 12);
    assert_int_equal(sizeof(struct fb_reserve_request), 68);
    assert_int_equal(sizeof(struct fb_hint_request), 16);
    assert_int_equal(sizeof(struct fb_resume_request), 12);
    assert_int_equal(sizeof(struct fb_hello_reply), 88);
    assert_int_equal(sizeof(struct fb_lookup_reply), 24);
    assert_int_equal(sizeof(struct fb_attach_row), 16);
    assert_int_equal(sizeof(struct fb_reserve_row), 20);
    assert_int_equal(sizeof(struct fb_chunk_row), 32);
    assert_int_equal(sizeof(struct fb_notify), 8);
}

static void test_round_trips(void **state)
{
    static uint8_t packet[FB_WIRE_MAX_BYTES];
    struct sample samples[MAX_SAMPLES];
    uint32_t n = samples_make(samples);

    (void)state;
    for (uint32_t i = 0; i < n; i++) {
        const struct sample *s = &samples[i];
        uint32_t bytes = sample_write(s, packet);
        struct fb_wire_message m;

        assert_int_equal(bytes,
                         sizeof(m.header) + s->body_bytes + s->first_bytes + s->second_bytes);
        assert_int_equal(
            (s->is_reply ? fb_wire_parse_reply : fb_wire_parse_request)(packet, bytes, &m, NULL),
            FB_OK);
        assert_int_equal(m.header.type, s->type);
        assert_int_equal(m.header.bytes, bytes);
        assert_true(m.header.id == 0x1122334455667788ull);
        assert_memory_equal(&m.hello, s->body, s->body_bytes);
        if (m.first) {
            assert_ptr_equal(m.first, packet + sizeof(m.header) + s->body_bytes);
        }
        assert_ptr_equal(m.second, packet + bytes - s->second_bytes);
        assert_null(m.text);
    }
}

/* Every type has a sample, so that what follows is about all of them. */
static void test_samples_are_complete(void **state)
{
    struct sample samples[MAX_SAMPLES];
    uint32_t seen[2] = {0}, n = samples_make(samples);

    (void)state;
    for (uint32_t i = 0; i < n; i++) {
        seen[samples[i].is_reply] |= 1u << samples[i].type;
    }
    assert_int_equal(seen[1], (1u << FB_MSG_END) - 2);
    assert_int_equal(seen[0], seen[1] & ~(1u << FB_MSG_NOTIFY));
}

static void test_wrong_lengths(void **state)
{
    static uint8_t packet[FB_WIRE_MAX_BYTES];
    struct sample samples[MAX_SAMPLES];
    uint32_t n = samples_make(samples);
    struct fb_wire_message m;
    struct fb_error error;

    (void)state;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t bytes = sample_write(&samples[i], packet);

        for (uint32_t cut = 0; cut < bytes; cut++) {
            /* as it comes, and with a length that agrees with the cut */
            set_u32(packet, 8, bytes);
            assert_int_equal(parse(&samples[i], packet, cut, &m, &error), FB_EPROTO);
            set_u32(packet, 8, cut);
            assert_int_equal(parse(&samples[i], packet, cut, &m, &error), FB_EPROTO);
        }
        packet[bytes] = 0;
        set_u32(packet, 8, bytes);
        assert_int_equal(parse(&samples[i], packet, bytes + 1, &m, &error), FB_EPROTO);
        assert_non_null(strstr(error.text, "announced"));
        set_u32(packet, 8, bytes + 1);
        assert_int_equal(parse(&samples[i], packet, bytes + 1, &m, &error), FB_EPROTO);
        assert_non_null(strstr(error.text, "do not fill the message exactly"));
    }
}

static void expect_header(size_t offset, uint32_t bytes, uint32_t v, enum fb_status status,
                          const char *text)
{
    static const struct sample release = {FB_MSG_RELEASE, false, 4, 8, 0, {1}};
    struct fb_error error = {0};
    struct fb_wire_message m;
    uint8_t packet[64];
    uint32_t size = sample_write(&release, packet);

    memcpy(packet + offset, &v, bytes);
    assert_int_equal(parse(&release, packet, size, &m, &error), status);
    if (!strstr(error.text, text)) {
        fail_msg("'%s' does not say '%s'", error.text, text);
    }
}

static void test_wrong_headers(void **state)
{
    (void)state;
    expect_header(0, 4, 0x12345678, FB_EPROTO, "(magic 12345678)");
    expect_header(4, 2, 2, FB_EVERSION, "protocol version 2; this side speaks 1");
    expect_header(6, 2, 0, FB_EPROTO, "unknown message type 0");
    expect_header(6, 2, FB_MSG_END, FB_EPROTO, "unknown message type 15");
    expect_header(6, 2, UINT16_MAX, FB_EPROTO, "unknown message type 65535");
    expect_header(6, 2, FB_MSG_NOTIFY, FB_EPROTO, "notify is not a request");
    expect_header(8, 4, 0, FB_EPROTO, "release: 36 bytes arrived of 0 announced");
    expect_header(8, 4, UINT32_MAX, FB_EPROTO, "of 4294967295 announced");
    expect_header(24, 4, 0, FB_EPROTO, "do not fill the message exactly");
    expect_header(24, 4, 2, FB_EPROTO, "do not fill the message exactly");
    expect_header(24, 4, UINT32_MAX, FB_ELIMIT, "release: a list is over its limit");
}

/* --- limits --- */

/* A fixed part alone, its counts announcing what is not there. */
static enum fb_status parse_counts(enum fb_msg type, bool is_reply, const void *body, size_t bytes)
{
    struct sample s = {type, is_reply, bytes, 0, 0, {0}};
    struct fb_error error = {0};
    struct fb_wire_message m;
    uint8_t packet[128];

    memcpy(s.body, body, bytes);
    return parse(&s, packet, sample_write(&s, packet), &m, &error);
}

/* At the limit a list is only not all there; one more is over it. */
#define LIMIT(type, is_reply, body_type, field, limit, ...)                               \
    do {                                                                                  \
        struct body_type body_ = __VA_ARGS__;                                             \
                                                                                          \
        body_.field = (limit);                                                            \
        assert_int_equal(parse_counts(type, is_reply, &body_, sizeof(body_)), FB_EPROTO); \
        body_.field = (limit) + 1;                                                        \
        assert_int_equal(parse_counts(type, is_reply, &body_, sizeof(body_)), FB_ELIMIT); \
        body_.field = UINT32_MAX;                                                         \
        assert_int_equal(parse_counts(type, is_reply, &body_, sizeof(body_)), FB_ELIMIT); \
    } while (0)

static void test_request_limits(void **state)
{
    (void)state;
    LIMIT(FB_MSG_SPACE, false, fb_space_request, manifest_bytes, FB_MANIFEST_MAX_BYTES, {0});
    LIMIT(FB_MSG_LOOKUP, false, fb_lookup_request, space_count, FB_MAX_FAMILY, {0});
    LIMIT(FB_MSG_LOOKUP, false, fb_lookup_request, page_count, FB_WIRE_MAX_KEYS / 4, {4, 0, 0});
    LIMIT(FB_MSG_ATTACH, false, fb_list_request, count, FB_WIRE_MAX_LEASES, {0});
    LIMIT(FB_MSG_RELEASE, false, fb_list_request, count, FB_WIRE_MAX_LEASES, {0});
    LIMIT(FB_MSG_ABORT, false, fb_list_request, count, FB_WIRE_MAX_CLAIMS, {0});
    LIMIT(FB_MSG_CHUNKS, false, fb_list_request, count, FB_WIRE_MAX_CHUNKS, {0});
    LIMIT(FB_MSG_RENEW, false, fb_renew_request, lease_count, FB_WIRE_MAX_HELD, {0});
    LIMIT(FB_MSG_RENEW, false, fb_renew_request, claim_count, FB_WIRE_MAX_HELD - 5, {5, 0, 0});
    LIMIT(FB_MSG_RENEW, false, fb_renew_request, unmapped_count, FB_WIRE_MAX_HELD, {0});
    LIMIT(FB_MSG_RESERVE, false, fb_reserve_request, count, FB_WIRE_MAX_CLAIMS, {0});
    LIMIT(FB_MSG_COMMIT, false, fb_commit_request, count, FB_WIRE_MAX_CLAIMS, {0});
    LIMIT(FB_MSG_COMMIT, false, fb_commit_request, count, FB_WIRE_MAX_SUMS / 64, {0, 64});
    LIMIT(FB_MSG_COMMIT, false, fb_commit_request, plane_count, FB_MAX_PLANES, {1, 0});
    LIMIT(FB_MSG_REJECT, false, fb_reject_request, count, FB_WIRE_MAX_KEYS, {0});
    LIMIT(FB_MSG_HINT, false, fb_hint_request, count, FB_WIRE_MAX_KEYS, {0});
    LIMIT(FB_MSG_RESUME, false, fb_resume_request, count, FB_WIRE_MAX_KEYS, {0});
}

static void test_reply_limits(void **state)
{
    (void)state;
    LIMIT(FB_MSG_LOOKUP, true, fb_lookup_reply, page_count, FB_WIRE_MAX_KEYS / 2, {2, 0, 0, 0, 0});
    LIMIT(FB_MSG_ATTACH, true, fb_list_reply, count, FB_WIRE_MAX_LEASES, {0});
    LIMIT(FB_MSG_RENEW, true, fb_list_reply, count, FB_WIRE_MAX_KEYS, {0});
    LIMIT(FB_MSG_RESERVE, true, fb_list_reply, count, FB_WIRE_MAX_CLAIMS, {0});
    LIMIT(FB_MSG_CHUNKS, true, fb_list_reply, count, FB_WIRE_MAX_CHUNKS, {0});
}

/* Counts whose product wraps to something small in 32 or 64 bits. */
static void test_products_do_not_wrap(void **state)
{
    const struct fb_lookup_request lookup = {16, 1u << 28, 0}, wide = {1u << 31, 1u << 31, 0};
    const struct fb_lookup_reply reply = {1u << 31, 1u << 31, 0, 0, 0};
    const struct fb_commit_request commit = {1u << 31, 1u << 31};

    (void)state;
    assert_int_equal(parse_counts(FB_MSG_LOOKUP, false, &lookup, sizeof(lookup)), FB_ELIMIT);
    assert_int_equal(parse_counts(FB_MSG_LOOKUP, false, &wide, sizeof(wide)), FB_ELIMIT);
    assert_int_equal(parse_counts(FB_MSG_LOOKUP, true, &reply, sizeof(reply)), FB_ELIMIT);
    assert_int_equal(parse_counts(FB_MSG_COMMIT, false, &commit, sizeof(commit)), FB_ELIMIT);
}

/* The largest of each list fits a packet: what a client may ask for can also be said. */
static void test_largest_lists_fit(void **state)
{
    static uint8_t packet[FB_WIRE_MAX_BYTES];
    struct sample samples[MAX_SAMPLES];
    struct fb_wire_message m;
    uint32_t n = 0;

    (void)state;
    SAMPLE(FB_MSG_LOOKUP, false, 16 * 4, 4096 * 32, fb_lookup_request, {16, 256, 0});
    SAMPLE(FB_MSG_RENEW, false, 4096 * 8, 4096 * 4, fb_renew_request, {4000, 96, 4096});
    SAMPLE(FB_MSG_COMMIT, false, 1024 * 8, 8192 * 8, fb_commit_request, {1024, 8});
    SAMPLE(FB_MSG_REJECT, false, 4096 * 32, 0, fb_reject_request, {1, 4096});
    SAMPLE(FB_MSG_RESERVE, true, 1024 * 20, 0, fb_list_reply, {1024, 0});
    for (uint32_t i = 0; i < n; i++) {
        assert_int_equal(parse(&samples[i], packet, sample_write(&samples[i], packet), &m, NULL),
                         FB_OK);
    }
}

/* --- replies --- */

/* An attach reply: rows, each of which says how many locations of it come behind the rows. */
static uint32_t attach_write(uint8_t *packet, const struct fb_attach_row *rows, uint32_t count,
                             uint32_t locations)
{
    struct fb_list_reply body = {.count = count};
    struct fb_wire_writer w;
    uint8_t *at;

    fb_wire_begin(&w, packet, FB_MSG_ATTACH, 1, FB_OK, &body, sizeof(body));
    fb_wire_append(&w, rows, count * sizeof(*rows));
    at = fb_wire_append(&w, NULL, locations * sizeof(struct fb_wire_location));
    memset(at, 7, locations * sizeof(struct fb_wire_location));
    return fb_wire_end(&w);
}

static void test_attach_reply(void **state)
{
    static uint8_t packet[FB_WIRE_MAX_BYTES];
    static const struct sample attach = {.type = FB_MSG_ATTACH, .is_reply = true};
    struct fb_attach_row rows[3] = {{FB_OK, 2, 3, 5000}, {FB_ENOENT, 0, 0, 0}, {FB_OK, 1, 4, 5000}};
    struct fb_error error = {0};
    struct fb_wire_message m;
    uint32_t bytes = attach_write(packet, rows, 3, 2 * 3 + 4);

    (void)state;
    assert_int_equal(fb_wire_parse_reply(packet, bytes, &m, NULL), FB_OK);
    assert_ptr_equal(m.first, packet + 24 + 8);
    assert_ptr_equal(m.second, m.first + 3 * sizeof(rows[0]));

    for (uint32_t cut = 0; cut < bytes; cut++) {
        set_u32(packet, 8, cut);
        assert_int_equal(parse(&attach, packet, cut, &m, &error), FB_EPROTO);
    }
    for (uint32_t locations = 0; locations < 16; locations++) {
        bytes = attach_write(packet, rows, 3, locations);
        assert_int_equal(parse(&attach, packet, bytes, &m, &error),
                         locations == 10 ? FB_OK : FB_EPROTO);
    }
    rows[2] = (struct fb_attach_row){FB_OK, 4097, 1, 0};
    bytes = attach_write(packet, rows, 3, 6);
    assert_int_equal(parse(&attach, packet, bytes, &m, &error), FB_ELIMIT);
    rows[2] = (struct fb_attach_row){FB_OK, 1u << 31, 1u << 31, 0};
    bytes = attach_write(packet, rows, 3, 6);
    assert_int_equal(parse(&attach, packet, bytes, &m, &error), FB_ELIMIT);
}

static void test_failed_reply(void **state)
{
    static const struct sample lookup = {.type = FB_MSG_LOOKUP, .is_reply = true};
    static uint8_t packet[FB_WIRE_MAX_BYTES];
    struct fb_error error = {.status = FB_ELIMIT, .text = "too much"};
    struct fb_wire_message m;
    uint32_t bytes = fb_wire_fail(packet, FB_MSG_LOOKUP, 9, &error);

    (void)state;
    assert_int_equal(bytes, 24 + 8);
    assert_int_equal(fb_wire_parse_reply(packet, bytes, &m, NULL), FB_OK);
    assert_int_equal(m.header.status, FB_ELIMIT);
    assert_int_equal(m.header.id, 9);
    assert_int_equal(m.text_bytes, 8);
    assert_memory_equal(m.text, "too much", 8);

    memset(error.text, 'x', sizeof(error.text)); /* no terminator */
    bytes = fb_wire_fail(packet, FB_MSG_LOOKUP, 9, &error);
    assert_int_equal(bytes, 24 + FB_ERROR_TEXT_BYTES);
    error.text[0] = 0;
    bytes = fb_wire_fail(packet, FB_MSG_LOOKUP, 9, &error);
    assert_int_equal(fb_wire_parse_reply(packet, bytes, &m, NULL), FB_OK);
    assert_int_equal(m.text_bytes, 0);

    set_u32(packet, 12, 5);
    assert_int_equal(parse(&lookup, packet, bytes, &m, &error), FB_EPROTO);
    assert_string_equal(error.text, "unknown status 5");
    set_u32(packet, 12, UINT32_MAX);
    assert_int_equal(parse(&lookup, packet, bytes, &m, &error), FB_EPROTO);
    /* A miss is a result: its body must be there. */
    set_u32(packet, 12, FB_MISS);
    assert_int_equal(parse(&lookup, packet, bytes, &m, &error), FB_EPROTO);
    assert_string_equal(error.text, "lookup: 0 bytes of 24");
}

static void test_elements_are_unaligned(void **state)
{
    const uint8_t bytes[] = {9, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0};

    (void)state;
    assert_int_equal(fb_wire_u32(bytes + 1, 3), 4);
    assert_true(fb_wire_u64(bytes + 1, 1) == 0x400000003ull);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes_are_fixed),   cmocka_unit_test(test_samples_are_complete),
        cmocka_unit_test(test_round_trips),       cmocka_unit_test(test_wrong_lengths),
        cmocka_unit_test(test_wrong_headers),     cmocka_unit_test(test_request_limits),
        cmocka_unit_test(test_reply_limits),      cmocka_unit_test(test_products_do_not_wrap),
        cmocka_unit_test(test_largest_lists_fit), cmocka_unit_test(test_attach_reply),
        cmocka_unit_test(test_failed_reply),      cmocka_unit_test(test_elements_are_unaligned),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
