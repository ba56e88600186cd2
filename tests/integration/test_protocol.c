/* Clients that are wrong, or not ours: over plain sockets. The daemon answers in words or closes
 * the connection, goes on with the others, and loses nothing. */
#include "proto/wire.h"
#include "tests/integration/actor.h"
#include "tests/integration/fixture.h"
#include "transport/channel.h"

#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmocka.h>

enum { STORED = 5 }; /* chains, by their seeds */

static int setup(void **state)
{
    static struct fixture f;

    fixture_init(&f, NULL);
    *state = &f;
    return 0;
}

static int teardown(void **state)
{
    fixture_fini(*state);
    return 0;
}

/* --- a plain client --- */

struct raw {
    struct fb_channel *channel;
    struct fb_wire_writer w;
    struct fb_wire_message reply;
    enum fb_status parsed; /* of the last reply */
    int fds[FB_CHANNEL_MAX_FDS];
    uint32_t fd_count;
    uint8_t tx[FB_WIRE_MAX_BYTES];
    uint8_t rx[FB_WIRE_MAX_BYTES];
};

static void raw_close(struct raw *r)
{
    for (uint32_t i = 0; i < r->fd_count; i++) {
        close(r->fds[i]);
    }
    fb_channel_destroy(r->channel);
    free(r);
}

static struct raw *raw_connect(const char *socket)
{
    struct raw *r = calloc(1, sizeof(*r));

    assert_non_null(r);
    assert_int_equal(fb_unix_connect(socket, &r->channel, NULL), FB_OK);
    return r;
}

/* The next packet; FB_ECONN when the daemon has closed the connection. */
static enum fb_status raw_receive(struct raw *r)
{
    struct pollfd p = {.fd = fb_channel_fd(r->channel), .events = POLLIN};
    enum fb_status status;
    size_t bytes;

    assert_int_equal(poll(&p, 1, DAEMON_WAIT_MS), 1);
    status = fb_channel_recv(r->channel, r->rx, sizeof(r->rx), &bytes, r->fds, &r->fd_count);
    if (status == FB_OK) {
        r->parsed = fb_wire_parse_reply(r->rx, bytes, &r->reply, NULL);
    }
    return status;
}

static void raw_expect_closed(struct raw *r)
{
    assert_int_equal(raw_receive(r), FB_ECONN);
}

static void raw_begin(struct raw *r, enum fb_msg type, const void *body, size_t bytes)
{
    fb_wire_begin(&r->w, r->tx, type, 1, FB_OK, body, bytes);
}

/* Send what was built and return the answer's status. */
static enum fb_status raw_call(struct raw *r, const int *fds, uint32_t fd_count)
{
    assert_int_equal(fb_channel_send(r->channel, r->tx, fb_wire_end(&r->w), fds, fd_count), FB_OK);
    assert_int_equal(raw_receive(r), FB_OK);
    assert_int_equal(r->parsed, FB_OK);
    return (enum fb_status)r->reply.header.status;
}

static void raw_expect_text(const struct raw *r, const char *text)
{
    assert_non_null(r->reply.text);
    assert_non_null(memmem(r->reply.text, r->reply.text_bytes, text, strlen(text)));
}

static struct fb_hello_request a_hello(uint8_t id)
{
    struct fb_hello_request hello = {FB_WIRE_VERSION, FB_WIRE_VERSION, 0, {0}};

    memset(hello.client, id, sizeof(hello.client));
    return hello;
}

static int own_pidfd(void)
{
    int fd = (int)syscall(SYS_pidfd_open, getpid(), 0);

    assert_true(fd >= 0);
    return fd;
}

static struct raw *raw_open(const char *socket, uint8_t id)
{
    struct fb_hello_request hello = a_hello(id);
    struct raw *r = raw_connect(socket);
    int pidfd = own_pidfd();

    raw_begin(r, FB_MSG_HELLO, &hello, sizeof(hello));
    assert_int_equal(raw_call(r, &pidfd, 1), FB_OK);
    close(pidfd);
    return r;
}

/* What a process keeps open stays in an epoll set though the daemon has closed its own. */
static void client_comes_back_with_the_same_pidfd(void **state)
{
    struct fb_hello_request hello = a_hello(1);
    struct fixture *f = *state;
    int pidfd = own_pidfd();

    for (int i = 0; i < 5; i++) {
        struct raw *r = raw_connect(f->daemon.socket);

        raw_begin(r, FB_MSG_HELLO, &hello, sizeof(hello));
        assert_int_equal(raw_call(r, &pidfd, 1), FB_OK);
        assert_false(r->reply.hello_reply.client_existed);
        raw_close(r);
        usleep(50000); /* the daemon sees it go */
    }
    close(pidfd);
}

static uint32_t raw_space(struct raw *r, const struct fb_manifest *m, enum fb_status expected)
{
    uint8_t encoded[FB_MANIFEST_MAX_BYTES];
    struct fb_space_request request;
    size_t bytes;

    assert_int_equal(fb_manifest_encode(m, encoded, sizeof(encoded), &bytes, NULL), FB_OK);
    request.manifest_bytes = (uint32_t)bytes;
    raw_begin(r, FB_MSG_SPACE, &request, sizeof(request));
    fb_wire_append(&r->w, encoded, bytes);
    assert_int_equal(raw_call(r, NULL, 0), expected);
    return expected == FB_OK ? r->reply.space_reply.space : 0;
}

/* Reserve one page whose key is this byte; the row is the answer. */
static struct fb_reserve_row raw_reserve(struct raw *r, uint32_t space, uint8_t key)
{
    struct fb_reserve_request request = {
        .space = space, .count = 1, .plane_count = FIXTURE_HEADS, .layer_count = FIXTURE_LAYERS};
    uint8_t keys[FB_KEY_BYTES];
    struct fb_reserve_row row;

    memset(keys, key, sizeof(keys));
    raw_begin(r, FB_MSG_RESERVE, &request, sizeof(request));
    fb_wire_append(&r->w, keys, sizeof(keys));
    assert_int_equal(raw_call(r, NULL, 0), FB_OK);
    memcpy(&row, r->reply.first, sizeof(row));
    return row;
}

static enum fb_status raw_commit(struct raw *r, uint64_t claim, uint32_t planes)
{
    struct fb_commit_request request = {1, planes};
    uint64_t sums[FIXTURE_HEADS + 1] = {0};

    raw_begin(r, FB_MSG_COMMIT, &request, sizeof(request));
    fb_wire_append(&r->w, &claim, sizeof(claim));
    fb_wire_append(&r->w, sums, planes * sizeof(*sums));
    assert_int_equal(raw_call(r, NULL, 0), FB_OK);
    return (enum fb_status)fb_wire_u32(r->reply.first, 0);
}

/* The first status of a list of one id. */
static enum fb_status raw_list(struct raw *r, enum fb_msg type, uint64_t id)
{
    struct fb_list_request request = {.count = 1};

    raw_begin(r, type, &request, sizeof(request));
    fb_wire_append(&r->w, &id, type == FB_MSG_CHUNKS ? 4 : 8);
    assert_int_equal(raw_call(r, NULL, 0), FB_OK);
    return (enum fb_status)fb_wire_u32(r->reply.first, 0);
}

/* --- before hello --- */

static void first_message_is_hello(void **state)
{
    struct fb_hello_request hello = a_hello(1);
    struct fb_list_request list = {0};
    struct fixture *f = *state;
    struct raw *r = raw_connect(f->daemon.socket);
    int not_pidfd[1] = {STDIN_FILENO};

    raw_begin(r, FB_MSG_RELEASE, &list, sizeof(list));
    assert_int_equal(raw_call(r, NULL, 0), FB_ESTATE);
    raw_expect_text(r, "the first message must be hello");
    raw_begin(r, FB_MSG_HELLO, &hello, sizeof(hello));
    assert_int_equal(raw_call(r, NULL, 0), FB_EPROTO);
    raw_expect_text(r, "pidfd");
    raw_begin(r, FB_MSG_HELLO, &hello, sizeof(hello));
    assert_int_equal(raw_call(r, not_pidfd, 1), FB_EPROTO);
    raw_close(r);
    r = raw_open(f->daemon.socket, 1);
    raw_begin(r, FB_MSG_HELLO, &hello, sizeof(hello));
    assert_int_equal(raw_call(r, NULL, 0), FB_ESTATE);
    raw_close(r);
}

static void newer_protocol_is_told_so(void **state)
{
    struct fb_hello_request hello = a_hello(1);
    struct fb_wire_header *header;
    struct fixture *f = *state;
    struct raw *r = raw_connect(f->daemon.socket);
    int pidfd = own_pidfd();

    hello.version_min = FB_WIRE_VERSION + 1;
    hello.version_max = FB_WIRE_VERSION + 3;
    raw_begin(r, FB_MSG_HELLO, &hello, sizeof(hello));
    assert_int_equal(raw_call(r, &pidfd, 1), FB_EVERSION);
    raw_expect_text(r, "use matching versions of forebayd and libforebay");
    raw_close(r);
    r = raw_connect(f->daemon.socket);
    raw_begin(r, FB_MSG_HELLO, &hello, sizeof(hello));
    header = (struct fb_wire_header *)r->tx;
    header->version = FB_WIRE_VERSION + 1;
    assert_int_equal(raw_call(r, &pidfd, 1), FB_EVERSION);
    assert_true(r->reply.text_bytes > 0);
    raw_expect_closed(r);
    raw_close(r);
    close(pidfd);
}

/* --- broken packets --- */

static void send_bytes(struct raw *r, const void *packet, size_t bytes)
{
    assert_int_equal(fb_channel_send(r->channel, packet, bytes, NULL, 0), FB_OK);
}

static void broken_packets_end_the_connection(void **state)
{
    enum { WRONG_MAGIC, TRUNCATED, WRONG_LENGTH, UNKNOWN_TYPE, TOO_SHORT, OVERSIZED, CASES };
    struct fb_lookup_request lookup = {1, 4, 0};
    struct fixture *f = *state;
    uint8_t *large = calloc(1, FB_WIRE_MAX_BYTES + 4096);

    assert_non_null(large);
    fixture_put(f, 7);
    for (int i = 0; i < CASES; i++) {
        struct raw *r = raw_open(f->daemon.socket, (uint8_t)(i + 1));
        struct fb_wire_header *header = (struct fb_wire_header *)r->tx;
        uint32_t bytes;

        raw_begin(r, FB_MSG_LOOKUP, &lookup, sizeof(lookup));
        fb_wire_append(&r->w, large, 4 + 4 * FB_KEY_BYTES);
        bytes = fb_wire_end(&r->w);
        header->magic += i == WRONG_MAGIC;
        header->bytes += i == WRONG_LENGTH;
        header->type = i == UNKNOWN_TYPE ? FB_MSG_END : header->type;
        if (i == OVERSIZED) {
            memcpy(large, r->tx, bytes);
            send_bytes(r, large, FB_WIRE_MAX_BYTES + 4096);
        } else {
            send_bytes(r, r->tx, i == TRUNCATED ? bytes - 1 : i == TOO_SHORT ? 7 : bytes);
        }
        if (i != OVERSIZED) {
            assert_int_equal(raw_receive(r), FB_OK);
            assert_int_equal(r->reply.header.status, FB_EPROTO);
        }
        raw_expect_closed(r);
        raw_close(r);
        fixture_check(f, 7);
    }
    free(large);
    daemon_await_metric(&f->daemon, "forebay_clients", 1);
}

static void long_list_is_refused_in_words(void **state)
{
    struct fb_lookup_request lookup = {1, FB_WIRE_MAX_KEYS + 1, 0};
    struct fb_list_request list = {.count = FB_WIRE_MAX_LEASES + 1};
    struct fixture *f = *state;
    struct raw *r = raw_open(f->daemon.socket, 1);

    raw_begin(r, FB_MSG_LOOKUP, &lookup, sizeof(lookup));
    fb_wire_append(&r->w, NULL, 4 + (FB_WIRE_MAX_KEYS + 1) * FB_KEY_BYTES);
    assert_int_equal(raw_call(r, NULL, 0), FB_ELIMIT);
    raw_begin(r, FB_MSG_RELEASE, &list, sizeof(list));
    fb_wire_append(&r->w, NULL, 8 * (FB_WIRE_MAX_LEASES + 1));
    assert_int_equal(raw_call(r, NULL, 0), FB_ELIMIT);
    raw_space(r, &f->manifest, FB_OK); /* an honest mistake: the connection is still good */
    raw_close(r);
}

/* --- claims, leases, ranges --- */

static void claims_belong_to_who_reserved(void **state)
{
    struct fixture *f = *state;
    struct raw *a = raw_open(f->daemon.socket, 1), *b = raw_open(f->daemon.socket, 2);
    uint32_t space = raw_space(a, &f->manifest, FB_OK);
    struct fb_reserve_row row = raw_reserve(a, space, 9);

    assert_int_equal(row.status, FB_OK);
    assert_int_equal(raw_commit(b, row.claim, FIXTURE_HEADS), FB_EPERM);
    assert_int_equal(raw_list(b, FB_MSG_ABORT, row.claim), FB_EPERM);
    assert_int_equal(raw_commit(a, row.claim ^ 1ull << 40, FIXTURE_HEADS), FB_ENOENT);
    assert_int_equal(raw_commit(a, 0, FIXTURE_HEADS), FB_ENOENT);
    assert_int_equal(raw_commit(a, row.claim, FIXTURE_HEADS + 1), FB_EINVAL);
    assert_int_equal(raw_reserve(b, space, 9).status, FB_BUSY);
    assert_int_equal(raw_commit(a, row.claim, FIXTURE_HEADS), FB_OK);
    assert_int_equal(raw_commit(a, row.claim, FIXTURE_HEADS), FB_ENOENT);
    assert_int_equal(raw_reserve(b, space, 9).status, FB_EXISTS);
    assert_int_equal(raw_list(a, FB_MSG_RELEASE, row.claim), FB_ENOENT);
    raw_close(a);
    raw_close(b);
    daemon_await_nothing_held(&f->daemon);
}

static void ranges_must_be_in_the_space(void **state)
{
    static const uint32_t ranges[][4] = {
        {0, 0, 0, 1}, {FIXTURE_HEADS, 1, 0, 1},  {1, UINT32_MAX, 0, 1},
        {0, 1, 0, 0}, {0, 1, FIXTURE_LAYERS, 1}, {0, 1, 1, UINT32_MAX},
    };
    struct fixture *f = *state;
    struct raw *r = raw_open(f->daemon.socket, 1);
    uint8_t key[FB_KEY_BYTES] = {1};
    uint32_t space = raw_space(r, &f->manifest, FB_OK);

    for (size_t i = 0; i < sizeof(ranges) / sizeof(ranges[0]); i++) {
        struct fb_reserve_request request = {.space = space,
                                             .count = 1,
                                             .plane_first = ranges[i][0],
                                             .plane_count = ranges[i][1],
                                             .layer_first = ranges[i][2],
                                             .layer_count = ranges[i][3]};

        raw_begin(r, FB_MSG_RESERVE, &request, sizeof(request));
        fb_wire_append(&r->w, key, sizeof(key));
        assert_int_equal(raw_call(r, NULL, 0), FB_EINVAL);
        raw_expect_text(r, "this space has 2 planes and 2 layers");
    }
    raw_close(r);
    daemon_await_nothing_held(&f->daemon);
}

/* --- other tenants --- */

static void tenants_see_nothing_of_each_other(void **state)
{
    static const char *const flags[] = {"--tenants=default=50,other=50", NULL};
    struct fb_lookup_request lookup = {1, 1, 0};
    uint64_t leases[FB_HIT_MAX_LEASES];
    struct fb_manifest manifest;
    uint8_t key[FB_KEY_BYTES];
    struct fixture f;
    struct fb_hit *hit;
    struct raw *mine, *other;
    char socket[128];
    uint32_t space, chunk;

    (void)state;
    fixture_init(&f, flags);
    snprintf(socket, sizeof(socket), "%s/other/forebay.sock", f.daemon.dir);
    fixture_put(&f, 7);
    hit = fixture_lookup(&f);
    assert_int_equal(fb_hit_leases(hit, leases), 1);
    mine = raw_open(f.daemon.socket, 1);
    other = raw_open(socket, 1);
    space = raw_space(mine, &f.manifest, FB_OK);
    chunk = raw_reserve(mine, space, 9).where.chunk;
    assert_int_equal(raw_list(mine, FB_MSG_CHUNKS, chunk), FB_OK);
    assert_int_equal(mine->fd_count, 1);

    assert_int_equal(raw_list(other, FB_MSG_CHUNKS, chunk), FB_ENOENT);
    assert_int_equal(other->fd_count, 0);
    assert_int_equal(raw_list(other, FB_MSG_ATTACH, leases[0]), FB_ENOENT);
    assert_int_equal(raw_list(other, FB_MSG_RELEASE, leases[0]), FB_ENOENT);
    raw_space(other, &f.manifest, FB_EPERM);
    raw_expect_text(other, "open the socket of the manifest's tenant");
    fb_pool_key(f.space, f.chain[0], key);
    raw_begin(other, FB_MSG_LOOKUP, &lookup, sizeof(lookup));
    fb_wire_append(&other->w, &space, sizeof(space));
    fb_wire_append(&other->w, key, sizeof(key));
    assert_int_equal(raw_call(other, NULL, 0), FB_ENOENT);
    manifest = f.manifest;
    strcpy(manifest.tenant, "other");
    space = raw_space(other, &manifest, FB_OK);
    raw_begin(other, FB_MSG_LOOKUP, &lookup, sizeof(lookup));
    fb_wire_append(&other->w, &space, sizeof(space));
    fb_wire_append(&other->w, key, sizeof(key));
    assert_int_equal(raw_call(other, NULL, 0), FB_OK);
    assert_int_equal(other->reply.lookup_reply.page_count, 0);
    assert_int_not_equal(raw_reserve(other, space, 9).where.chunk, chunk);
    raw_close(mine);
    raw_close(other);
    fb_hit_release(hit);
    fixture_fini(&f);
}

static void tenant_stays_in_its_share(void **state)
{
    static const char *const flags[] = {"--tenants=default=50,other=25", NULL};
    const uint64_t share = 16ull << 20; /* of 32 MiB */
    struct fb_pool_space *space;
    struct fb_pool *pool;
    struct fixture f;
    char socket[128];

    (void)state;
    fixture_init(&f, flags);
    snprintf(socket, sizeof(socket), "%s/other/forebay.sock", f.daemon.dir);
    assert_int_equal(fb_open(socket, NULL, &pool, NULL), FB_OK);
    strcpy(f.manifest.tenant, "other");
    assert_int_equal(fb_pool_space_open(pool, &f.manifest, &space, NULL), FB_OK);
    fixture_use(&f, 1);
    assert_int_equal(engine_put(&f.from, pool, space, f.chain[0], 0, FIXTURE_PAGES), FB_OK);
    for (uint64_t seed = 0; seed < 2 * share / (FIXTURE_PAGES * f.from.layout.block_bytes);
         seed++) {
        fixture_put(&f, 100 + seed);
    }
    assert_true(daemon_metric(&f.daemon, "forebay_evicted_blocks_total") > 0);
    assert_in_range(daemon_chunk_bytes(&f.daemon), share / 2, share + share / 2);
    fixture_use(&f, 1);
    engine_round(&f.from);
    {
        uint32_t arrived;

        assert_int_equal(engine_get(&f.to, pool, space, f.chain[0], &arrived), FB_OK);
        assert_int_equal(arrived, FIXTURE_PAGES);
        assert_true(engine_equal(&f.from, &f.to, engine_all(&f.to)));
    }
    fb_close(pool);
    fixture_fini(&f);
}

/* --- noise --- */

/* Some request, with keys and ids that exist and such that do not. */
static void any_request(struct raw *r, struct fixture *f, uint64_t *random)
{
    enum fb_msg type = (enum fb_msg)(FB_MSG_SPACE + random_below(random, FB_MSG_RESUME - 1));
    uint8_t body[128] = {0}, data[4 * FB_KEY_BYTES];
    static const struct {
        size_t body_bytes;
        uint32_t count_at; /* word of the fixed part that counts */
        size_t data_bytes;
    } shapes[FB_MSG_END] = {
        [FB_MSG_SPACE] = {sizeof(struct fb_space_request), 0, 1},
        [FB_MSG_LOOKUP] = {sizeof(struct fb_lookup_request), 1, 4 + FB_KEY_BYTES},
        [FB_MSG_ATTACH] = {sizeof(struct fb_list_request), 0, 8},
        [FB_MSG_RELEASE] = {sizeof(struct fb_list_request), 0, 8},
        [FB_MSG_RENEW] = {sizeof(struct fb_renew_request), 0, 8},
        [FB_MSG_RESERVE] = {sizeof(struct fb_reserve_request), 1, FB_KEY_BYTES},
        [FB_MSG_COMMIT] = {sizeof(struct fb_commit_request), 0, 8},
        [FB_MSG_ABORT] = {sizeof(struct fb_list_request), 0, 8},
        [FB_MSG_REJECT] = {sizeof(struct fb_reject_request), 1, FB_KEY_BYTES},
        [FB_MSG_HINT] = {sizeof(struct fb_hint_request), 1, FB_KEY_BYTES},
        [FB_MSG_CHUNKS] = {sizeof(struct fb_list_request), 0, 4},
        [FB_MSG_RESUME] = {sizeof(struct fb_resume_request), 2, 8},
    };
    uint32_t one = 1, page = random_below(random, FIXTURE_PAGES);

    for (size_t i = 0; i < sizeof(data); i++) {
        data[i] = (uint8_t)random_next(random);
    }
    if (random_below(random, 2)) {
        fb_pool_key(f->space, f->chain[page], type == FB_MSG_LOOKUP ? data + 4 : data);
    }
    memcpy(body + 4 * (size_t)shapes[type].count_at, &one, 4);
    if (type == FB_MSG_LOOKUP) {
        memcpy(body, &one, 4);
        memset(data, 0, 4);
    } else if (type == FB_MSG_RESERVE) {
        struct fb_reserve_request request = {
            .count = 1, .plane_count = 1, .layer_count = 1 + random_below(random, 2)};

        memcpy(body, &request, sizeof(request));
    } else if (type == FB_MSG_HINT) {
        memcpy(body + 8, &one, 4); /* a priority: no single flip makes it a time to live */
    }
    raw_begin(r, type, body, shapes[type].body_bytes);
    fb_wire_append(&r->w, data, shapes[type].data_bytes);
}

/* Take the answers that are there. */
static void drop_answers(struct raw *r)
{
    size_t bytes;

    while (fb_channel_recv(r->channel, r->rx, sizeof(r->rx), &bytes, r->fds, &r->fd_count) ==
           FB_OK) {
        for (uint32_t i = 0; i < r->fd_count; i++) {
            close(r->fds[i]);
        }
        r->fd_count = 0;
    }
    r->fd_count = 0;
}

enum { PACKETS = 12000, A_CONNECTION = 30 };

/* SOCKET: make noise, and die with all that was had by chance. */
static int act_noise(char **args)
{
    struct fb_channel_faults faults = {
        .seed = 1, .drop = 50, .duplicate = 50, .truncate = 40, .flip = 2, .cut = 400};
    struct fixture f = {0};
    uint64_t random = 1;

    fixture_manifest(&f.manifest);
    ACTOR_CHECK(fb_open(args[0], NULL, &f.pool, NULL) == FB_OK);
    ACTOR_CHECK(fb_pool_space_open(f.pool, &f.manifest, &f.space, NULL) == FB_OK);
    chain_make(STORED, FIXTURE_PAGE, FIXTURE_PAGES, f.chain[0]);
    for (int i = 0; i < PACKETS / A_CONNECTION; i++) {
        struct raw *r = raw_open(args[0], (uint8_t)i);

        raw_space(r, &f.manifest, FB_OK);
        faults.seed++;
        ACTOR_CHECK(fb_channel_fault(r->channel, &faults, &r->channel) == FB_OK);
        for (int n = 0; n < A_CONNECTION; n++) {
            any_request(r, &f, &random);
            if (fb_channel_send(r->channel, r->tx, fb_wire_end(&r->w), NULL, 0) != FB_OK) {
                break;
            }
            drop_answers(r);
        }
        raw_close(r);
    }
    actor_say("done");
    actor_wait(); /* for its death */
    return EXIT_FAILURE;
}

static void noise_loses_nothing(void **state)
{
    struct fixture *f = *state;
    struct actor actor;

    for (uint64_t seed = 1; seed <= STORED; seed++) {
        fixture_put(f, seed);
    }
    actor_start(&actor, "noise", (const char *[]){f->daemon.socket, NULL});
    actor_expect(&actor, "done");
    actor_kill(&actor);
    daemon_await_metric(&f->daemon, "forebay_clients", 1);
    daemon_await_nothing_held(&f->daemon);
    assert_true(daemon_metric(&f->daemon, "forebay_protocol_errors_total") > 50);
    assert_int_equal(daemon_metric(&f->daemon, "forebay_rejected_blocks_total"), 0);
    for (uint64_t seed = 1; seed <= STORED; seed++) {
        fixture_check(f, seed);
    }
    daemon_signal(&f->daemon, SIGTERM);
    assert_int_equal(daemon_wait(&f->daemon), 0);
    daemon_restart(&f->daemon);
    fixture_await_connected(f);
    fixture_check(f, STORED);
}

/* A client that asks and asks but does not read. */
static void client_that_does_not_read_is_cut_off(void **state)
{
    struct fixture *f = *state;
    struct raw *r = raw_open(f->daemon.socket, 1);
    uint64_t until = clock_ms() + DAEMON_WAIT_MS;
    struct fb_list_request list = {0};
    enum fb_status status = FB_OK;

    while (status != FB_ECONN && clock_ms() < until) {
        raw_begin(r, FB_MSG_RELEASE, &list, sizeof(list));
        status = fb_channel_send(r->channel, r->tx, fb_wire_end(&r->w), NULL, 0);
    }
    assert_int_equal(status, FB_ECONN);
    raw_close(r);
    fixture_put(f, 7);
    fixture_check(f, 7);
}

int main(int argc, char **argv)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    static const struct CMUnitTest tests[] = {
        TEST(first_message_is_hello),
        TEST(newer_protocol_is_told_so),
        TEST(broken_packets_end_the_connection),
        TEST(long_list_is_refused_in_words),
        TEST(claims_belong_to_who_reserved),
        TEST(ranges_must_be_in_the_space),
        cmocka_unit_test(tenants_see_nothing_of_each_other),
        cmocka_unit_test(tenant_stays_in_its_share),
        TEST(client_comes_back_with_the_same_pidfd),
        TEST(noise_loses_nothing),
        TEST(client_that_does_not_read_is_cut_off),
    };

    if (argc > 2 && strcmp(argv[1], "noise") == 0) {
        return act_noise(argv + 2);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
