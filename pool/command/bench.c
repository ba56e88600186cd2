/* bench: quick figures of one shape against a running daemon. Each round puts a prompt that is
 * new, looks it up, gets it, and copies the same bytes by memcpy, so that all see the same
 * disturbances; figures are medians of the rounds. */
#include "pool/command/histogram.h"
#include "pool/command/output.h"
#include "pool/command/session.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PAGE_TOKENS  64u
#define PROMPT_BYTES (8ull << 20) /* of a prompt's rows, at least a page */

struct bench_input {
    struct fb_cli_input base;
    const struct fb_shape *shape;
    enum fb_codec codec;
    uint32_t rounds;
};

struct bench {
    struct fb_session session;
    struct fb_seat seat;
    uint32_t pages; /* of a prompt: all in the window */
    uint64_t *ids;
    uint8_t *chain;
    enum fb_status *statuses;
    uint8_t *copy; /* [pages * source_bytes] */
    struct fb_histogram put_ns;
    struct fb_histogram lookup_ns;
    struct fb_histogram get_ns;
    struct fb_histogram memcpy_ns;
};

static void bench_fini(struct bench *b)
{
    free(b->ids);
    free(b->chain);
    free(b->statuses);
    free(b->copy);
    fb_seat_fini(&b->seat);
    fb_session_close(&b->session);
}

/* On failure it has been said why. */
static bool bench_init(struct bench *b, const struct bench_input *input)
{
    uint64_t source_bytes;

    if (fb_session_open(&b->session, input->base.cli, input->shape, input->codec, PAGE_TOKENS) !=
        FB_OK) {
        return false;
    }
    source_bytes = b->session.layout->source_bytes;
    b->pages = (uint32_t)(PROMPT_BYTES / source_bytes) + 1;
    b->ids = calloc(b->pages, sizeof(*b->ids));
    b->chain = calloc(b->pages, FB_CHAIN_BYTES);
    b->statuses = calloc(b->pages, sizeof(*b->statuses));
    b->copy = calloc(b->pages, source_bytes);
    if (!b->ids || !b->chain || !b->statuses || !b->copy ||
        fb_seat_init(&b->seat, &b->session, b->pages) != FB_OK) {
        fb_fail("out of memory");
        bench_fini(b);
        return false;
    }
    memset(b->copy, 1, b->pages * source_bytes); /* touched before the first copy */
    return true;
}

static enum fb_status bench_put(struct bench *b)
{
    uint64_t ns;
    enum fb_status status = fb_seat_put(&b->seat, b->chain, b->ids, 0, b->pages, b->statuses, &ns);

    for (uint32_t i = 0; i < b->pages && status == FB_OK; i++) {
        status = b->statuses[i];
    }
    fb_histogram_add(&b->put_ns, ns);
    return status;
}

static enum fb_status bench_get(struct bench *b)
{
    const struct fb_session *s = &b->session;
    uint64_t started = fb_now_ns();
    struct fb_hit *hit;
    enum fb_status status = fb_lookup(s->pool, (struct fb_pool_space *const *)&s->space, 1,
                                      b->chain, b->pages, 0, FB_SESSION_TIMEOUT_NS, &hit);

    fb_histogram_add(&b->lookup_ns, fb_now_ns() - started);
    if (status != FB_OK) {
        return status;
    }
    started = fb_now_ns();
    status = fb_hit_pages(hit) == b->pages ? fb_seat_get(&b->seat, hit, 0, b->pages, b->statuses)
                                           : FB_MISS;
    fb_histogram_add(&b->get_ns, fb_now_ns() - started);
    fb_hit_release(hit);
    return status;
}

static enum fb_status run_round(struct bench *b, uint64_t seed)
{
    size_t bytes = b->pages * b->session.layout->source_bytes;
    uint64_t started;
    enum fb_status status;

    for (uint32_t i = 0; i < b->pages; i++) {
        b->ids[i] = fb_prompt_page(seed, i);
    }
    status = fb_seat_chain(&b->seat, b->ids, b->pages, b->chain);
    if (status == FB_OK) {
        status = bench_put(b);
    }
    if (status == FB_OK) {
        status = bench_get(b);
    }
    if (status == FB_OK) {
        started = fb_now_ns();
        memcpy(b->copy, b->seat.cache.memory, bytes);
        __asm__ volatile("" : : "r"(b->copy) : "memory"); /* it is never read */
        fb_histogram_add(&b->memcpy_ns, fb_now_ns() - started);
    }
    return status;
}

static void show(const struct bench *b, const struct bench_input *input)
{
    double bytes = (double)(b->pages * b->session.layout->source_bytes);
    uint64_t put_ns = fb_histogram_quantile(&b->put_ns, 0.5);
    uint64_t get_ns = fb_histogram_quantile(&b->get_ns, 0.5);
    uint64_t memcpy_ns = fb_histogram_quantile(&b->memcpy_ns, 0.5);
    const struct fb_field fields[] = {
        FB_FIELD_TEXT("model", "Model", input->shape->model),
        FB_FIELD_TEXT("codec", "Codec", fb_codec_name(input->codec)),
        FB_FIELD_COUNT("rounds", "Rounds", input->rounds),
        FB_FIELD_COUNT("pages", "Pages of a prompt", b->pages),
        FB_FIELD_GBPS("memcpy_gbps", "memcpy of its bf16 rows", bytes / (double)memcpy_ns),
        FB_FIELD_GBPS("put_gbps", "Put", bytes / (double)put_ns),
        FB_FIELD_SHARE("put_ratio", "  share of memcpy", (double)memcpy_ns / (double)put_ns),
        FB_FIELD_GBPS("get_gbps", "Get", bytes / (double)get_ns),
        FB_FIELD_SHARE("get_ratio", "  share of memcpy", (double)memcpy_ns / (double)get_ns),
        FB_FIELD_NS("lookup_p50_ns", "Lookup, p50", fb_histogram_quantile(&b->lookup_ns, 0.5)),
        FB_FIELD_NS("lookup_max_ns", "  longest", b->lookup_ns.max),
    };

    fb_fields_show(fields, FB_COUNT_OF(fields), input->base.cli->json);
}

static enum fb_status run_rounds(struct bench *b, uint32_t rounds)
{
    struct timespec now;
    struct fb_progress progress;
    enum fb_status status = FB_OK;

    clock_gettime(CLOCK_REALTIME, &now); /* prompts that no run before has put */
    fb_progress_init(&progress, false);
    for (uint32_t i = 0; i < rounds && status == FB_OK; i++) {
        status = run_round(b, (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec + i);
        fb_progress_show(&progress, "round %u of %u", i + 1, rounds);
    }
    fb_progress_end(&progress);
    return status;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    struct bench_input *input = state->input;

    switch (key) {
    case ARGP_KEY_INIT: fb_cli_init_child(state); return 0;
    case 'r': input->rounds = (uint32_t)fb_cli_number(state, "--rounds", arg, 1, 100000); return 0;
    case 'c':
        input->codec = fb_codec_by_name(arg);
        if (!input->codec) {
            argp_error(state, "--codec: no codec \"%s\"; --help names them", arg);
        }
        return 0;
    case 'm':
        input->shape = fb_shape_find(arg);
        if (!input->shape) {
            argp_error(state, "--shape: no shape \"%s\"; --help names them", arg);
        }
        return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

int fb_run_bench(struct fb_cli *cli, int argc, char **argv)
{
    static const struct argp_option options[] = {
        {"shape", 'm', "NAME", 0, "Shape of the model: small, llama3-scaled (default), llama3-8b",
         0},
        {"codec", 'c', "NAME", 0, "raw, fp8_e4m3 (default), fp8_e5m2 or int8", 0},
        {"rounds", 'r', "N", 0, "Rounds (default 50)", 0},
        {0},
    };
    const struct argp argp = {.options = options,
                              .parser = parse,
                              .doc = "Measure put, lookup and get of one shape against memcpy in "
                                     "the same run. It leaves its blocks in the pool.",
                              .children = fb_cli_children};
    struct bench_input input = {.base = {cli},
                                .shape = fb_shape_find("llama3-scaled"),
                                .codec = FB_CODEC_FP8_E4M3,
                                .rounds = 50};
    struct bench *b = calloc(1, sizeof(*b));
    enum fb_status status;

    argp_parse(&argp, argc, argv, 0, NULL, &input);
    if (!b || !bench_init(b, &input)) {
        free(b);
        return EXIT_FAILURE;
    }
    status = run_rounds(b, input.rounds);
    if (status == FB_OK) {
        show(b, &input);
    }
    bench_fini(b);
    free(b);
    return status == FB_OK ? EXIT_SUCCESS
                           : fb_fail("a round failed: %s; is the pool large enough and free?",
                                     fb_status_text(status));
}
