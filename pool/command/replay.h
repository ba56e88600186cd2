/* What a replay counts, and how it is shown. Each worker has totals of its own, merged at the end;
 * pages are those of the trace, bytes those of the engine's rows. */
#ifndef FB_COMMAND_REPLAY_H
#define FB_COMMAND_REPLAY_H

#include "pool/command/histogram.h"
#include "pool/command/session.h"

struct fb_replay_totals {
    uint64_t requests;
    uint64_t input_tokens;
    uint64_t pages;
    uint64_t hit_pages;      /* leading pages that arrived */
    uint64_t infinite_pages; /* leading pages that came before in this run */
    uint64_t put_pages;      /* committed */
    uint64_t present_pages;  /* there already, or being written, when they were to be put */
    uint64_t refused_pages;  /* no room, or no parent */
    uint64_t verified;       /* pages that arrived and are right */
    uint64_t wrong;          /* pages that arrived and are not */
    uint64_t corrupt;        /* pages whose sum did not match: found by the library */
    uint64_t failed;         /* calls and pages without an answer in time, or any other error */
    struct fb_histogram lookup_ns; /* of a request */
    struct fb_histogram get_ns;    /* of a request with a hit */
    struct fb_histogram put_ns;    /* of a request that puts */
};

void fb_replay_merge(struct fb_replay_totals *totals, const struct fb_replay_totals *other);

void fb_replay_show(const struct fb_replay_totals *totals, const struct fb_session *session,
                    const char *trace, uint32_t workers, uint64_t elapsed_ns, bool json);

#endif
