/* put, lookup, get: a prompt by hand. The prompt is named by a seed, so that any process on any
 * machine can say what its KV must be. */
#include "pool/command/output.h"
#include "pool/command/session.h"
#include "proto/wire.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_PAGE_TOKENS 64u
#define MAX_TOKENS          (1u << 24)
#define MAX_PAGES           FB_WIRE_MAX_KEYS

struct try_input {
    struct fb_cli_input base;
    const struct fb_shape *shape;
    enum fb_codec codec;
    uint64_t seed;
    uint32_t tokens;
    uint32_t page_tokens;
};

/* The prompt: its pages' ids, hashes and statuses. */
struct prompt {
    struct fb_session session;
    struct fb_seat seat;
    uint32_t pages;
    uint64_t *ids;
    uint8_t *chain;
    enum fb_status *statuses;
};

static const struct argp_option options[] = {
    {"shape", 'm', "NAME", 0, "Shape of the model: small (default), llama3-scaled, llama3-8b", 0},
    {"codec", 'c', "NAME", 0, "raw, fp8_e4m3 (default), fp8_e5m2 or int8", 0},
    {"seed", 'S', "N", 0, "Names the prompt (default 1)", 0},
    {"tokens", 'n', "N", 0, "Tokens of the prompt; its last page counts only whole (default 1024)",
     0},
    {"page-tokens", 'p', "N", 0, "Tokens of a page, in steps of 16 (default 64)", 0},
    {0},
};

static void check_input(const struct argp_state *state, const struct try_input *input)
{
    if (input->page_tokens % FB_ENGINE_BLOCK_TOKENS) {
        argp_error(state, "--page-tokens: expected a multiple of %u", FB_ENGINE_BLOCK_TOKENS);
    }
    if (input->tokens < input->page_tokens) {
        argp_error(state, "--tokens: %u tokens are no whole page; expected %u or more",
                   input->tokens, input->page_tokens);
    }
    if (input->tokens / input->page_tokens > MAX_PAGES) {
        argp_error(state, "--tokens: more than %u pages; use larger ones (--page-tokens)",
                   MAX_PAGES);
    }
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    struct try_input *input = state->input;

    switch (key) {
    case ARGP_KEY_INIT: fb_cli_init_child(state); return 0;
    case 'm':
        input->shape = fb_shape_find(arg);
        if (!input->shape) {
            argp_error(state, "--shape: no shape \"%s\"; --help names them", arg);
        }
        return 0;
    case 'c':
        input->codec = fb_codec_by_name(arg);
        if (!input->codec) {
            argp_error(state, "--codec: no codec \"%s\"; --help names them", arg);
        }
        return 0;
    case 'S': input->seed = fb_cli_number(state, "--seed", arg, 0, UINT64_MAX); return 0;
    case 'n':
        input->tokens = (uint32_t)fb_cli_number(state, "--tokens", arg, 1, MAX_TOKENS);
        return 0;
    case 'p':
        input->page_tokens =
            (uint32_t)fb_cli_number(state, "--page-tokens", arg, 16, FB_MAX_PAGE_TOKENS);
        return 0;
    case ARGP_KEY_END: check_input(state, input); return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static void prompt_fini(struct prompt *p)
{
    free(p->ids);
    free(p->chain);
    free(p->statuses);
    fb_seat_fini(&p->seat);
    fb_session_close(&p->session);
}

/* Parse the arguments and prepare the prompt. On failure it has been said why. */
static bool prompt_init(struct prompt *p, struct fb_cli *cli, int argc, char **argv,
                        const char *doc)
{
    const struct argp argp = {
        .options = options, .parser = parse, .doc = doc, .children = fb_cli_children};
    struct try_input input = {
        .base = {cli},
        .shape = fb_shape_at(0),
        .codec = FB_CODEC_FP8_E4M3,
        .seed = 1,
        .tokens = 1024,
        .page_tokens = DEFAULT_PAGE_TOKENS,
    };

    memset(p, 0, sizeof(*p));
    argp_parse(&argp, argc, argv, 0, NULL, &input);
    if (fb_session_open(&p->session, cli, input.shape, input.codec, input.page_tokens) != FB_OK) {
        return false;
    }
    p->pages = input.tokens / input.page_tokens;
    p->ids = calloc(p->pages, sizeof(*p->ids));
    p->chain = calloc(p->pages, FB_CHAIN_BYTES);
    p->statuses = calloc(p->pages, sizeof(*p->statuses));
    if (!p->ids || !p->chain || !p->statuses ||
        fb_seat_init(&p->seat, &p->session, p->pages) != FB_OK) {
        fb_fail("out of memory");
        prompt_fini(p);
        return false;
    }
    for (uint32_t i = 0; i < p->pages; i++) {
        p->ids[i] = fb_prompt_page(input.seed, i);
    }
    if (fb_seat_chain(&p->seat, p->ids, p->pages, p->chain) != FB_OK) {
        fb_fail("cannot compute chain hashes: out of memory");
        prompt_fini(p);
        return false;
    }
    return true;
}

/* Look the whole prompt up. A miss is no hit and 0 pages. returns false after a message */
static bool find(struct prompt *p, struct fb_hit **ret_hit, uint64_t *ret_ns)
{
    uint64_t started = fb_now_ns();
    enum fb_status status = fb_lookup(p->session.pool, &p->session.space, 1, p->chain, p->pages, 0,
                                      FB_SESSION_TIMEOUT_NS, ret_hit);

    *ret_ns = fb_now_ns() - started;
    if (status != FB_OK) {
        *ret_hit = NULL;
    }
    if (status != FB_OK && status != FB_MISS) {
        fb_fail("no answer to the lookup: %s; look at the daemon with `forebay status`",
                fb_status_text(status));
        return false;
    }
    return true;
}

/* --- put --- */

struct put_counts {
    uint64_t written;
    uint64_t present;
    uint64_t refused;
    enum fb_status reason; /* of the last refusal */
};

static void count_put(struct put_counts *n, const enum fb_status *statuses, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        bool is_present = statuses[i] == FB_EXISTS || statuses[i] == FB_BUSY;

        n->written += statuses[i] == FB_OK;
        n->present += is_present;
        if (statuses[i] != FB_OK && !is_present) {
            n->refused++;
            n->reason = statuses[i];
        }
    }
}

int fb_run_put(struct fb_cli *cli, int argc, char **argv)
{
    struct prompt p;
    struct put_counts n = {0};
    enum fb_status status = FB_OK;
    uint64_t total_ns = 0;

    if (!prompt_init(&p, cli, argc, argv, "Put the KV of a made-up prompt, all whole pages.")) {
        return EXIT_FAILURE;
    }
    for (uint32_t first = 0; first < p.pages && status == FB_OK;) {
        uint32_t left = p.pages - first;
        uint32_t count = left < p.seat.cache.window_pages ? left : p.seat.cache.window_pages;
        uint64_t ns;

        status = fb_seat_put(&p.seat, p.chain, p.ids, first, count, p.statuses, &ns);
        if (status == FB_OK) {
            count_put(&n, p.statuses, count);
        }
        total_ns += ns;
        first += count;
    }
    if (status == FB_OK) {
        const struct fb_field fields[] = {
            FB_FIELD_COUNT("pages", "Pages", p.pages),
            FB_FIELD_COUNT("written", "  written", n.written),
            FB_FIELD_COUNT("present", "  there before", n.present),
            FB_FIELD_COUNT("refused", "  refused", n.refused),
            FB_FIELD_BYTES("stored_bytes", "Stored", n.written * p.session.layout->block_bytes),
            FB_FIELD_NS("put_ns", "Took", total_ns),
        };

        fb_fields_show(fields, FB_COUNT_OF(fields), cli->json);
    }
    prompt_fini(&p);
    if (status != FB_OK) {
        return fb_fail("the put failed: %s", fb_status_text(status));
    }
    return n.refused ? fb_fail("pages were refused: %s", fb_status_text(n.reason)) : EXIT_SUCCESS;
}

/* --- lookup --- */

int fb_run_lookup(struct fb_cli *cli, int argc, char **argv)
{
    struct prompt p;
    struct fb_hit *hit;
    uint64_t ns;
    uint32_t found;
    bool answered;
    bool is_whole;

    if (!prompt_init(&p, cli, argc, argv,
                     "Say how many leading pages of a prompt are there. Exits with 2 unless all "
                     "are.")) {
        return EXIT_FAILURE;
    }
    answered = find(&p, &hit, &ns);
    found = hit ? fb_hit_pages(hit) : 0;
    fb_hit_release(hit);
    if (answered) {
        const struct fb_field fields[] = {
            FB_FIELD_COUNT("pages", "Pages", p.pages),
            FB_FIELD_COUNT("found", "  there", found),
            FB_FIELD_NS("lookup_ns", "Took", ns),
        };

        fb_fields_show(fields, FB_COUNT_OF(fields), cli->json);
    }
    is_whole = found == p.pages;
    prompt_fini(&p);
    return !answered ? EXIT_FAILURE : is_whole ? EXIT_SUCCESS : FB_EXIT_MISS;
}

/* --- get --- */

struct get_counts {
    uint64_t pages; /* that arrived and are right */
    uint64_t ns;
    bool failed; /* it has been said why */
};

/* Get one window of pages and check it. */
static void get_window(struct prompt *p, struct fb_hit *hit, uint32_t first, uint32_t count,
                       struct get_counts *n)
{
    uint64_t started;

    for (uint32_t i = 0; i < count; i++) {
        fb_engine_scrub(&p->seat.cache, first + i);
    }
    started = fb_now_ns();
    fb_seat_get(&p->seat, hit, first, count, p->statuses);
    n->ns += fb_now_ns() - started;
    for (uint32_t i = 0; i < count && !n->failed; i++) {
        char what[160];

        if (p->statuses[i] != FB_OK) {
            fb_fail("page %u did not arrive: %s", first + i, fb_status_text(p->statuses[i]));
            n->failed = true;
        } else if (!fb_seat_check(&p->seat, first + i, p->ids[first + i])) {
            fb_engine_explain(&p->seat.cache, first + i, &p->seat.reference, 0, what, sizeof(what));
            fb_fail("page %u is wrong: %s; keep the daemon as it is and report this", first + i,
                    what);
            n->failed = true;
        } else {
            n->pages++;
        }
    }
}

int fb_run_get(struct fb_cli *cli, int argc, char **argv)
{
    struct prompt p;
    struct fb_hit *hit;
    struct get_counts n = {0};
    uint64_t lookup_ns;
    uint32_t found;
    bool is_whole;

    if (!prompt_init(&p, cli, argc, argv,
                     "Get a prompt's leading pages and check every bit. Exits with 1 when one is "
                     "wrong, with 2 unless all are there.")) {
        return EXIT_FAILURE;
    }
    n.failed = !find(&p, &hit, &lookup_ns);
    found = hit ? fb_hit_pages(hit) : 0;
    for (uint32_t first = 0; first < found && !n.failed;) {
        uint32_t left = found - first;
        uint32_t count = left < p.seat.cache.window_pages ? left : p.seat.cache.window_pages;

        get_window(&p, hit, first, count, &n);
        first += count;
    }
    fb_hit_release(hit);
    if (!n.failed) {
        const struct fb_field fields[] = {
            FB_FIELD_COUNT("pages", "Pages", p.pages),
            FB_FIELD_COUNT("found", "  there", found),
            FB_FIELD_COUNT("verified", "  verified", n.pages),
            FB_FIELD_NS("lookup_ns", "Lookup took", lookup_ns),
            FB_FIELD_NS("get_ns", "Get took", n.ns),
        };

        fb_fields_show(fields, FB_COUNT_OF(fields), cli->json);
    }
    is_whole = found == p.pages;
    prompt_fini(&p);
    return n.failed ? EXIT_FAILURE : is_whole ? EXIT_SUCCESS : FB_EXIT_MISS;
}
