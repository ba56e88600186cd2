/* The figures of a replay. */
#include "pool/command/output.h"
#include "pool/command/replay.h"

#include <stdio.h>

void fb_replay_merge(struct fb_replay_totals *totals, const struct fb_replay_totals *other)
{
    totals->requests += other->requests;
    totals->input_tokens += other->input_tokens;
    totals->pages += other->pages;
    totals->hit_pages += other->hit_pages;
    totals->infinite_pages += other->infinite_pages;
    totals->put_pages += other->put_pages;
    totals->present_pages += other->present_pages;
    totals->refused_pages += other->refused_pages;
    totals->verified += other->verified;
    totals->wrong += other->wrong;
    totals->corrupt += other->corrupt;
    totals->failed += other->failed;
    fb_histogram_merge(&totals->lookup_ns, &other->lookup_ns);
    fb_histogram_merge(&totals->get_ns, &other->get_ns);
    fb_histogram_merge(&totals->put_ns, &other->put_ns);
}

static double ratio(uint64_t a, uint64_t b)
{
    return b ? (double)a / (double)b : 0;
}

void fb_replay_show(const struct fb_replay_totals *t, const struct fb_session *session,
                    const char *trace, uint32_t workers, uint64_t elapsed_ns, bool json)
{
    const struct fb_layout *l = session->layout;
    uint64_t got_bytes = t->hit_pages * l->source_bytes;
    uint64_t put_bytes = t->put_pages * l->source_bytes;
    const struct fb_histogram *lookup = &t->lookup_ns;
    const struct fb_histogram *get = &t->get_ns;
    const struct fb_histogram *put = &t->put_ns;
    const struct fb_field fields[] = {
        FB_FIELD_TEXT("trace", "Trace", trace),
        FB_FIELD_TEXT("model", "Model", session->shape->model),
        FB_FIELD_TEXT("codec", "Codec", fb_codec_name(session->codec)),
        FB_FIELD_COUNT("workers", "Workers", workers),
        FB_FIELD_NS("elapsed_ns", "Took", elapsed_ns),
        FB_FIELD_COUNT("requests", "Requests", t->requests),
        FB_FIELD_COUNT("tokens", "Tokens", t->input_tokens),
        FB_FIELD_COUNT("pages", "Pages asked", t->pages),
        FB_FIELD_COUNT("hit_pages", "  from the pool", t->hit_pages),
        FB_FIELD_COUNT("put_pages", "  put", t->put_pages),
        FB_FIELD_COUNT("present_pages", "  there before the put", t->present_pages),
        FB_FIELD_COUNT("refused_pages", "  refused, no room", t->refused_pages),
        FB_FIELD_SHARE("hit_rate", "Hit rate", ratio(t->hit_pages, t->pages)),
        FB_FIELD_SHARE("infinite_hit_rate", "  of an infinite pool",
                       ratio(t->infinite_pages, t->pages)),
        FB_FIELD_SHARE("hit_ratio", "  share of that", ratio(t->hit_pages, t->infinite_pages)),
        FB_FIELD_BYTES("bytes_got", "KV got", got_bytes),
        FB_FIELD_BYTES("bytes_put", "KV put", put_bytes),
        FB_FIELD_COUNT("bf16_bytes_per_token", "Bytes a token, bf16",
                       l->source_bytes / l->page_tokens),
        FB_FIELD_COUNT("stored_bytes_per_token", "  as stored", l->block_bytes / l->page_tokens),
        FB_FIELD_TIMES("capacity_gain", "  so there fits", ratio(l->source_bytes, l->block_bytes)),
        FB_FIELD_NS("lookup_p50_ns", "Lookup of a request, p50", fb_histogram_quantile(lookup, .5)),
        FB_FIELD_NS("lookup_p99_ns", "  p99", fb_histogram_quantile(lookup, .99)),
        FB_FIELD_NS("get_p50_ns", "Get of a request, p50", fb_histogram_quantile(get, .5)),
        FB_FIELD_NS("get_p99_ns", "  p99", fb_histogram_quantile(get, .99)),
        FB_FIELD_NS("put_p50_ns", "Put of a request, p50", fb_histogram_quantile(put, .5)),
        FB_FIELD_NS("put_p99_ns", "  p99", fb_histogram_quantile(put, .99)),
        FB_FIELD_GBPS("get_gbps", "Get, KV of a worker", ratio(got_bytes, get->sum)),
        FB_FIELD_GBPS("put_gbps", "Put, KV of a worker", ratio(put_bytes, put->sum)),
        FB_FIELD_COUNT("verified", "Pages verified", t->verified),
        FB_FIELD_COUNT("wrong", "  wrong", t->wrong),
        FB_FIELD_COUNT("corrupt", "  damaged, and found so", t->corrupt),
        FB_FIELD_COUNT("failed", "Failed", t->failed),
    };

    fb_fields_show(fields, FB_COUNT_OF(fields), json);
}
