/* replay: the KV traffic of a request trace, as engines with a shared pool would make it, with
 * every page that comes back compared bit by bit with what it must be.
 *
 * Workers take requests from the trace in order, one at a time under a mutex, which also guards
 * what an infinite pool would have hit; the rest of a worker is its own until the end. */
#include "pool/command/replay.h"
#include "pool/command/output.h"
#include "pool/command/trace.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_WORKERS 256u

struct replay_input {
    struct fb_cli_input base;
    const char *trace;
    const struct fb_shape *shape;
    enum fb_codec codec;
    uint64_t limit; /* requests; 0: all */
    uint32_t workers;
    double pace; /* times the trace's own; 0: as fast as possible */
    bool quiet;
};

struct replay {
    const struct replay_input *input;
    struct fb_session session;
    uint64_t started_ns;

    pthread_mutex_t mutex; /* guards what follows */
    struct fb_trace *trace;
    struct fb_prefix_set *prefixes;
    struct fb_progress progress;
    uint64_t taken;          /* requests */
    uint64_t infinite_pages; /* of those */
    uint64_t first_ms;       /* timestamp of the first request */
    enum fb_status status;   /* FB_OK while there is more, FB_MISS at the end, else an error */
    struct fb_error error;
};

struct worker {
    struct replay *replay;
    pthread_t thread;
    struct fb_seat seat;
    struct fb_request request;
    uint8_t chain[FB_TRACE_MAX_PAGES * FB_CHAIN_BYTES];
    enum fb_status statuses[FB_TRACE_MAX_PAGES];
    struct fb_replay_totals totals;
};

/* --- taking requests --- */

static void show_progress(struct replay *r)
{
    double share = r->input->limit ? (double)r->taken / (double)r->input->limit : 0;
    double file_share = fb_trace_progress(r->trace);

    fb_progress_show(&r->progress, "%3.0f %% of the trace, %" PRIu64 " requests",
                     100 * (share > file_share ? share : file_share), r->taken);
}

static enum fb_status take_locked(struct replay *r, struct fb_request *request)
{
    uint32_t hit;
    enum fb_status status;

    if (r->status != FB_OK) {
        return FB_MISS;
    }
    if (r->input->limit && r->taken == r->input->limit) {
        return FB_MISS;
    }
    status = fb_trace_next(r->trace, request, &r->error);
    if (status == FB_OK) {
        status = fb_prefix_set_add(r->prefixes, request->ids, request->pages, &hit);
        if (status != FB_OK) {
            return fb_error_set(&r->error, status, "out of memory");
        }
        if (r->taken == 0) { /* written once: workers read it without the mutex */
            r->first_ms = request->timestamp_ms;
        }
        r->infinite_pages += hit;
        r->taken++;
        show_progress(r);
    }
    return status;
}

/* returns false when there is nothing more to do */
static bool take_request(struct replay *r, struct fb_request *request)
{
    enum fb_status status;

    pthread_mutex_lock(&r->mutex);
    status = take_locked(r, request);
    if (status != FB_OK && r->status == FB_OK) {
        r->status = status;
    }
    pthread_mutex_unlock(&r->mutex);
    return status == FB_OK;
}

static void wait_for_turn(const struct replay *r, const struct fb_request *request)
{
    uint64_t later_ms =
        request->timestamp_ms > r->first_ms ? request->timestamp_ms - r->first_ms : 0;
    uint64_t at_ns = r->started_ns + (uint64_t)((double)later_ms * 1e6 / r->input->pace);
    struct timespec at = {(time_t)(at_ns / 1000000000), (long)(at_ns % 1000000000)};

    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL) == EINTR) {
    }
}

/* --- one request --- */

/* Compare the leading pages that arrived. returns how many those are */
static uint32_t check_pages(struct worker *w, uint32_t first, uint32_t count)
{
    uint32_t leading = 0;

    for (uint32_t i = 0; i < count; i++) {
        enum fb_status status = w->statuses[i];

        w->totals.corrupt += status == FB_ECORRUPT;
        w->totals.failed += status != FB_OK && status != FB_ECORRUPT;
        if (status != FB_OK) {
            continue;
        }
        leading += leading == i;
        if (fb_seat_check(&w->seat, first + i, w->request.ids[first + i])) {
            w->totals.verified++;
        } else {
            w->totals.wrong++;
        }
    }
    return leading;
}

/* Get a hit's pages, window by window. returns the leading pages that arrived */
static uint32_t get_pages(struct worker *w, struct fb_hit *hit, uint32_t pages)
{
    uint32_t window = w->seat.cache.window_pages;
    uint32_t arrived = 0;
    uint32_t last_count = 0;
    uint64_t total_ns = 0;

    for (uint32_t first = 0; first < pages && arrived == first; first += last_count) {
        uint32_t count = pages - first < window ? pages - first : window;
        uint64_t started;

        for (uint32_t i = 0; i < count; i++) {
            fb_engine_scrub(&w->seat.cache, first + i);
        }
        started = fb_now_ns();
        fb_seat_get(&w->seat, hit, first, count, w->statuses);
        total_ns += fb_now_ns() - started;
        arrived += check_pages(w, first, count);
        last_count = count;
    }
    fb_histogram_add(&w->totals.get_ns, total_ns);
    return arrived;
}

/* returns the leading pages that are in the engine's cache now */
static uint32_t reuse_pages(struct worker *w)
{
    const struct fb_session *s = &w->replay->session;
    uint64_t started = fb_now_ns();
    struct fb_hit *hit;
    enum fb_status status = fb_lookup(s->pool, (struct fb_pool_space *const *)&s->space, 1,
                                      w->chain, w->request.pages, 0, FB_SESSION_TIMEOUT_NS, &hit);
    uint32_t arrived;

    fb_histogram_add(&w->totals.lookup_ns, fb_now_ns() - started);
    if (status != FB_OK) {
        w->totals.failed += status != FB_MISS;
        return 0;
    }
    arrived = get_pages(w, hit, fb_hit_pages(hit));
    fb_hit_release(hit);
    return arrived;
}

/* Count what became of pages to be put. returns whether pages may follow the last one */
static bool count_put(struct worker *w, uint32_t count)
{
    bool go_on = false;

    for (uint32_t i = 0; i < count; i++) {
        enum fb_status status = w->statuses[i];
        bool is_present = status == FB_EXISTS || status == FB_BUSY;
        bool is_refused = status == FB_AGAIN || status == FB_ENOENT || status == FB_ELIMIT;

        w->totals.put_pages += status == FB_OK;
        w->totals.present_pages += is_present;
        w->totals.refused_pages += is_refused;
        w->totals.failed += status != FB_OK && !is_present && !is_refused;
        go_on = status == FB_OK || is_present;
    }
    return go_on;
}

static void put_pages(struct worker *w, uint32_t first)
{
    uint32_t window = w->seat.cache.window_pages;
    uint32_t pages = w->request.pages;
    uint64_t total_ns = 0;
    bool go_on = true;

    if (first == pages) {
        return;
    }
    while (first < pages && go_on) {
        uint32_t count = pages - first < window ? pages - first : window;
        uint64_t ns;
        enum fb_status status =
            fb_seat_put(&w->seat, w->chain, w->request.ids, first, count, w->statuses, &ns);

        total_ns += ns;
        first += count;
        if (status == FB_OK) {
            go_on = count_put(w, count);
        } else {
            w->totals.failed++;
            go_on = false;
        }
    }
    w->totals.refused_pages += pages - first;
    fb_histogram_add(&w->totals.put_ns, total_ns);
}

static void replay_request(struct worker *w)
{
    uint32_t arrived;

    w->totals.requests++;
    w->totals.input_tokens += w->request.input_tokens;
    w->totals.pages += w->request.pages;
    if (fb_seat_chain(&w->seat, w->request.ids, w->request.pages, w->chain) != FB_OK) {
        w->totals.failed++;
        return;
    }
    arrived = reuse_pages(w);
    w->totals.hit_pages += arrived;
    put_pages(w, arrived);
}

static void *run_worker(void *arg)
{
    struct worker *w = arg;

    while (take_request(w->replay, &w->request)) {
        if (w->replay->input->pace > 0) {
            wait_for_turn(w->replay, &w->request);
        }
        replay_request(w);
    }
    return NULL;
}

/* --- all of it --- */

/* Run the workers to their end and merge what they counted. */
static enum fb_status run_workers(struct replay *r, struct worker **workers, uint32_t count,
                                  struct fb_replay_totals *totals)
{
    uint32_t started = 0;

    while (started < count &&
           pthread_create(&workers[started]->thread, NULL, run_worker, workers[started]) == 0) {
        started++;
    }
    if (started < count) {
        pthread_mutex_lock(&r->mutex);
        r->status = fb_error_set(&r->error, FB_ENOMEM,
                                 "cannot start %u threads; use fewer --workers", count);
        pthread_mutex_unlock(&r->mutex);
    }
    for (uint32_t i = 0; i < started; i++) {
        pthread_join(workers[i]->thread, NULL);
        fb_replay_merge(totals, &workers[i]->totals);
    }
    totals->infinite_pages = r->infinite_pages;
    fb_progress_end(&r->progress);
    return r->status == FB_MISS ? FB_OK : r->status;
}

static void destroy_workers(struct worker **workers, uint32_t count)
{
    for (uint32_t i = 0; workers && i < count; i++) {
        if (workers[i]) {
            fb_seat_fini(&workers[i]->seat);
            free(workers[i]);
        }
    }
    free(workers);
}

static struct worker **create_workers(struct replay *r, uint32_t count)
{
    struct worker **workers = calloc(count, sizeof(struct worker *));

    for (uint32_t i = 0; workers && i < count; i++) {
        workers[i] = calloc(1, sizeof(**workers));
        if (!workers[i] ||
            fb_seat_init(&workers[i]->seat, &r->session, FB_TRACE_MAX_PAGES) != FB_OK) {
            destroy_workers(workers, count);
            return NULL;
        }
        workers[i]->replay = r;
    }
    return workers;
}

static enum fb_status open_replay(struct replay *r)
{
    enum fb_status status = fb_trace_open(r->input->trace, &r->trace, &r->error);

    if (status == FB_OK) {
        status = fb_prefix_set_create(&r->prefixes);
    }
    if (status != FB_OK) {
        fb_fail("%s", r->error.text);
        return status;
    }
    return fb_session_open(&r->session, r->input->base.cli, r->input->shape, r->input->codec,
                           FB_TRACE_PAGE_TOKENS);
}

static void close_replay(struct replay *r)
{
    fb_session_close(&r->session);
    fb_prefix_set_destroy(r->prefixes);
    fb_trace_close(r->trace);
    pthread_mutex_destroy(&r->mutex);
}

/* What a replay's outcome means for its exit status, said in words where it is bad. */
static int judge(const struct replay *r, const struct fb_replay_totals *totals)
{
    if (totals->wrong || totals->corrupt) {
        return fb_fail("%" PRIu64 " pages came back wrong and %" PRIu64 " damaged; keep the daemon "
                       "as it is and report this",
                       totals->wrong, totals->corrupt);
    }
    if (totals->requests == 0) {
        return fb_fail("%s has no requests", r->input->trace);
    }
    return EXIT_SUCCESS;
}

static int run_replay(const struct replay_input *input, struct fb_replay_totals *totals)
{
    struct replay r = {.input = input, .error = {.text = "out of memory"}};
    struct worker **workers = NULL;
    int exit_status = EXIT_FAILURE;
    enum fb_status status;

    pthread_mutex_init(&r.mutex, NULL);
    if (open_replay(&r) != FB_OK) {
        goto out;
    }
    workers = create_workers(&r, input->workers);
    if (!workers) {
        fb_fail("out of memory; use fewer --workers or a smaller --shape");
        goto out;
    }
    fb_progress_init(&r.progress, input->quiet);
    r.started_ns = fb_now_ns();
    status = run_workers(&r, workers, input->workers, totals);
    if (status != FB_OK) {
        fb_fail("%s", r.error.text);
        goto out;
    }
    fb_replay_show(totals, &r.session, input->trace, input->workers, fb_now_ns() - r.started_ns,
                   input->base.cli->json);
    exit_status = judge(&r, totals);

out:
    destroy_workers(workers, input->workers);
    close_replay(&r);
    return exit_status;
}

static double parse_pace(const struct argp_state *state, const char *text)
{
    char *end;
    double pace = strtod(text, &end);

    if (*end || !(pace > 0 && pace <= 1e6)) {
        argp_error(state, "--pace: \"%s\" is wrong; expected a factor above 0, such as 1 or 10",
                   text);
    }
    return pace;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    struct replay_input *input = state->input;

    switch (key) {
    case ARGP_KEY_INIT: fb_cli_init_child(state); return 0;
    case 'l': input->limit = fb_cli_number(state, "--limit", arg, 1, UINT64_MAX); return 0;
    case 'w':
        input->workers = (uint32_t)fb_cli_number(state, "--workers", arg, 1, MAX_WORKERS);
        return 0;
    case 'p': input->pace = parse_pace(state, arg); return 0;
    case 'q': input->quiet = true; return 0;
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
    case ARGP_KEY_ARG:
        if (input->trace) {
            argp_error(state, "one trace at a time; \"%s\" is too much", arg);
        }
        input->trace = arg;
        return 0;
    case ARGP_KEY_NO_ARGS: argp_error(state, "which trace?"); return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

int fb_run_replay(struct fb_cli *cli, int argc, char **argv)
{
    static const struct argp_option options[] = {
        {"limit", 'l', "N", 0, "Stop after so many requests", 0},
        {"codec", 'c', "NAME", 0, "raw, fp8_e4m3 (default), fp8_e5m2 or int8", 0},
        {"shape", 'm', "NAME", 0, "Shape of the model: small, llama3-scaled (default), llama3-8b",
         0},
        {"workers", 'w', "N", 0, "Threads that replay requests (default 1)", 0},
        {"pace", 'p', "X", 0,
         "Keep the trace's times, X times as fast (default: as fast as possible)", 0},
        {"quiet", 'q', NULL, 0, "No progress", 0},
        {0},
    };
    const struct argp argp = {.options = options,
                              .parser = parse,
                              .args_doc = "TRACE",
                              .doc = "Replay a Mooncake request trace: look each request's pages "
                                     "up, get what is there, compare every bit, put the rest.",
                              .children = fb_cli_children};
    struct replay_input input = {.base = {cli},
                                 .shape = fb_shape_find("llama3-scaled"),
                                 .codec = FB_CODEC_FP8_E4M3,
                                 .workers = 1};
    struct fb_replay_totals *totals = calloc(1, sizeof(*totals));
    int status;

    argp_parse(&argp, argc, argv, 0, NULL, &input);
    if (!totals) {
        return fb_fail("out of memory");
    }
    status = run_replay(&input, totals);
    free(totals);
    return status;
}
