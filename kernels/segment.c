/* Segments: gather, quantize and sum in one sweep; check, reconstruct and scatter in another.
 *
 * Encoding works in batches that stay in the first-level cache: rows are quantized into a sink,
 * which adds whole lines to the sum while it streams them to the segment. Decoding sums the
 * segment first, which brings it near, and then decodes from there. So the sum costs no trip to
 * memory of its own. Later batches, and while decoding the next segment, are prefetched: pages are
 * scattered, and the processor does not guess where rows go on.
 * Stateless; any thread. Stack: below 64 KiB. */
#include "kernels/fpenv.h"
#include "kernels/paged.h"
#include "proto/sum.h"

#include <string.h>

#define BATCH_BYTES   2048u /* of source rows that are coded together */
#define BATCHES_AHEAD 3u    /* prefetched while one is coded */
#define FLUSH_BYTES   512u  /* a sink sends lines when it has these */

/* One row of any quantized section; its codes or its scales, whatever the group. */
#define TILE_BYTES (FB_MAX_QUANT_ROW * 2u)
#define SINK_BYTES (FB_MAX_QUANT_ROW * 4u)

_Static_assert(SINK_BYTES % FB_LINE_BYTES == 0, "a full sink is flushed whole");
_Static_assert(FB_ARRAY_ALIGN % FB_LINE_BYTES == 0, "arrays start on lines");

/* Bytes on their way to consecutive places of a segment. */
struct sink {
    const struct fb_kernels *kernels;
    uint8_t *segment;
    uint64_t offset; /* of bytes[0] in the segment; on a line */
    uint32_t fill;
    uint64_t sum;
    uint8_t bytes[SINK_BYTES + FB_LINE_BYTES] __attribute__((aligned(64)));
};

/* One section's rows of one head. */
struct rows_job {
    const struct fb_kernels *kernels;
    const struct fb_section *section;
    const struct fb_token_map *map;
    struct fb_paged_view view;
    struct fb_section_place place;
    uint64_t segment_bytes;
    uint32_t head;
    uint32_t elem_bytes;
    uint32_t first_token; /* of the page that has row 0 */

    const struct rows_job *next; /* coded after this one, or NULL */
};

static void sink_init(struct sink *s, const struct fb_kernels *k, uint8_t *segment, uint64_t offset)
{
    s->kernels = k;
    s->segment = segment;
    s->offset = offset;
    s->fill = 0;
    s->sum = 0;
}

/* Send whole lines; what is left, less than one, moves to the front. */
static void sink_flush(struct sink *s)
{
    uint32_t whole = s->fill & -FB_LINE_BYTES;

    s->sum += s->kernels->sum_copy(s->segment + s->offset, s->bytes, whole, s->offset);
    s->offset += whole;
    s->fill -= whole;
    memcpy(s->bytes, s->bytes + whole, s->fill);
}

/* Room for bytes <= SINK_BYTES; the caller fills it and calls sink_commit. */
static uint8_t *sink_reserve(struct sink *s, uint32_t bytes)
{
    if (s->fill + bytes > sizeof(s->bytes)) {
        sink_flush(s);
    }
    return s->bytes + s->fill;
}

static void sink_commit(struct sink *s, uint32_t bytes)
{
    s->fill += bytes;
    if (s->fill >= FLUSH_BYTES) {
        sink_flush(s);
    }
}

/* Pad the array with zeros and send the rest; returns the sum of all that was sent. */
static uint64_t sink_finish(struct sink *s)
{
    uint32_t pad = (uint32_t)(-(s->offset + s->fill) % FB_ARRAY_ALIGN);

    memset(sink_reserve(s, pad), 0, pad);
    sink_commit(s, pad);
    sink_flush(s);
    return s->sum;
}

static struct fb_tile job_tile(const struct rows_job *job, const struct fb_run *run,
                               uint32_t channel_first, uint32_t channels)
{
    return (struct fb_tile){
        .at = fb_view_at(&job->view, job->elem_bytes, run, job->head, channel_first),
        .token_stride = job->view.token_stride,
        .channel_stride = job->view.channel_stride,
        .elem_bytes = job->elem_bytes,
        .tokens = run->count,
        .channels = channels,
    };
}

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static uint32_t job_batch(const struct rows_job *job, uint32_t bytes)
{
    uint32_t row_bytes = job->section->row_elems * job->elem_bytes;

    return row_bytes < bytes ? bytes / row_bytes : 1;
}

/* Rows from one engine block that fit into `bytes`, one at least. */
static struct fb_run job_run(const struct rows_job *job, uint32_t row, uint32_t row_end,
                             uint32_t bytes)
{
    uint32_t rows = min_u32(job_batch(job, bytes), row_end - row);

    return fb_map_run(job->map, job->first_token + row, rows);
}

/* Start reading a batch of rows; those past the last are the next job's. */
static void job_prefetch(const struct rows_job *job, uint32_t row)
{
    while (job && row >= job->place.rows) {
        row -= job->place.rows;
        job = job->next;
    }
    if (job && job->section->row_elems <= FB_MAX_QUANT_ROW) {
        struct fb_run run = job_run(job, row, job->place.rows, BATCH_BYTES);
        struct fb_tile tile = job_tile(job, &run, 0, job->section->row_elems);

        fb_tile_prefetch(&tile);
    }
}

/* Rows longer than the sink go through it in pieces, one row at a time. */
static uint64_t encode_raw(const struct rows_job *job, uint8_t *segment)
{
    uint32_t width = min_u32(job->section->row_elems, SINK_BYTES / job->elem_bytes);
    struct sink sink;
    struct fb_run run;

    sink_init(&sink, job->kernels, segment, job->place.codes_offset);
    for (uint32_t row = 0; row < job->place.rows; row += run.count) {
        run = job_run(job, row, job->place.rows, BATCH_BYTES);
        job_prefetch(job, row + BATCHES_AHEAD * job_batch(job, BATCH_BYTES));
        for (uint32_t c = 0; c < job->section->row_elems; c += width) {
            uint32_t channels = min_u32(width, job->section->row_elems - c);
            uint32_t bytes = run.count * channels * job->elem_bytes;
            struct fb_tile tile = job_tile(job, &run, c, channels);

            fb_tile_gather(job->kernels, &tile, sink_reserve(&sink, bytes));
            sink_commit(&sink, bytes);
        }
    }
    return sink_finish(&sink);
}

static uint64_t encode_quantized(const struct rows_job *job, uint8_t *segment, uint64_t *bad_rows)
{
    uint32_t row_elems = job->section->row_elems;
    bool in_place = job->view.channel_stride == 1;
    __attribute__((aligned(64))) uint8_t rows[TILE_BYTES];
    struct sink codes, scales;
    struct fb_row_format format;
    struct fb_run run;

    fb_row_format_init(&format, job->kernels, job->section);
    sink_init(&codes, job->kernels, segment, job->place.codes_offset);
    sink_init(&scales, job->kernels, segment, job->place.scales_offset);
    for (uint32_t row = 0; row < job->place.rows; row += run.count) {
        run = job_run(job, row, job->place.rows, BATCH_BYTES);
        job_prefetch(job, row + BATCHES_AHEAD * job_batch(job, BATCH_BYTES));
        struct fb_tile tile = job_tile(job, &run, 0, row_elems);
        uint32_t code_bytes = run.count * row_elems;
        uint32_t scale_bytes = run.count * job->place.scale_bytes;

        if (!in_place) {
            fb_tile_gather(job->kernels, &tile, rows);
        }
        *bad_rows +=
            fb_rows_encode(&format, in_place ? (uint16_t *)tile.at : (uint16_t *)rows,
                           in_place ? tile.token_stride : row_elems, run.count,
                           sink_reserve(&codes, code_bytes), sink_reserve(&scales, scale_bytes));
        sink_commit(&codes, code_bytes);
        sink_commit(&scales, scale_bytes);
    }
    return sink_finish(&codes) + sink_finish(&scales);
}

/* While rows are written, start reading what a reader of a whole plane comes to next: the same
 * rows of the next layer's segment. There may be none; prefetching does not mind. */
static void decode_prefetch(const struct rows_job *job, uint32_t row, uint32_t rows,
                            const uint8_t *segment)
{
    uint64_t skip = job->segment_bytes + job->place.codes_offset;
    uintptr_t at = (uintptr_t)segment + skip + (uint64_t)row * job->place.row_bytes;
    uint64_t bytes = (uint64_t)rows * job->place.row_bytes;

    bytes = bytes < TILE_BYTES ? bytes : TILE_BYTES;
    for (uint64_t i = 0; i < bytes; i += FB_LINE_BYTES) {
        __builtin_prefetch((const void *)(at + i), 0, 2);
    }
}

static void decode_raw(const struct rows_job *job, uint32_t row, uint32_t row_end,
                       const uint8_t *segment)
{
    const uint8_t *codes = segment + job->place.codes_offset;
    struct fb_run run;

    for (; row < row_end; row += run.count) {
        run = job_run(job, row, row_end, TILE_BYTES);
        decode_prefetch(job, row, run.count, segment);
        struct fb_tile tile = job_tile(job, &run, 0, job->section->row_elems);

        fb_tile_scatter(job->kernels, &tile, codes + (uint64_t)row * job->place.row_bytes);
    }
}

static void decode_quantized(const struct rows_job *job, uint32_t row, uint32_t row_end,
                             const uint8_t *segment)
{
    uint32_t row_elems = job->section->row_elems;
    bool in_place = job->view.channel_stride == 1;
    __attribute__((aligned(64))) uint8_t rows[TILE_BYTES];
    struct fb_row_format format;
    struct fb_run run;

    fb_row_format_init(&format, job->kernels, job->section);
    for (; row < row_end; row += run.count) {
        run = job_run(job, row, row_end, TILE_BYTES);
        decode_prefetch(job, row, run.count, segment);
        struct fb_tile tile = job_tile(job, &run, 0, row_elems);
        const uint8_t *codes = segment + job->place.codes_offset + row * (uint64_t)row_elems;
        const uint8_t *scales =
            segment + job->place.scales_offset + row * (uint64_t)job->place.scale_bytes;

        fb_rows_decode(&format, codes, scales, run.count,
                       in_place ? (uint16_t *)tile.at : (uint16_t *)rows,
                       in_place ? tile.token_stride : row_elems, in_place);
        if (!in_place) {
            fb_tile_scatter(job->kernels, &tile, rows);
        }
    }
}

/* Describe a section's rows; false where it does not cover the layer. */
static bool job_init(struct rows_job *job, const struct fb_kernels *k, const struct fb_layout *l,
                     uint32_t layer, uint32_t section, const struct fb_paged_view *views)
{
    if (!fb_layout_section(l, layer, section, &job->place)) {
        return false;
    }
    job->kernels = k;
    job->section = &l->sections[section];
    job->view = views[section];
    job->elem_bytes = fb_elem_bytes(job->section->elem);
    job->segment_bytes = l->segment_offset[layer + 1] - l->segment_offset[layer];
    job->first_token = 0;
    if (job->section->kind == FB_SECTION_STATE) {
        /* the block's only row, wherever the page's last token is in it */
        job->first_token = l->page_tokens - 1;
        job->view.token_stride = 0;
    }
    return true;
}

/* Describe the sections of a layer; returns how many cover it. */
static uint32_t jobs_init(struct rows_job jobs[FB_MAX_SECTIONS], const struct fb_kernels *k,
                          const struct fb_layout *l, uint32_t layer, uint32_t head,
                          const struct fb_paged_view *views, const struct fb_token_map *map)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < l->section_count; i++) {
        if (job_init(&jobs[n], k, l, layer, i, views)) {
            jobs[n].map = map;
            jobs[n].head = head;
            jobs[n].next = NULL;
            if (n) {
                jobs[n - 1].next = &jobs[n];
            }
            n++;
        }
    }
    return n;
}

enum fb_status fb_segment_encode(const struct fb_kernels *k, const struct fb_layout *l,
                                 uint32_t layer, uint32_t head, const struct fb_paged_view *views,
                                 const struct fb_token_map *map, uint64_t seed, uint8_t *segment,
                                 uint64_t *ret_sum, uint64_t *ret_bad_rows)
{
    struct rows_job jobs[FB_MAX_SECTIONS];
    uint64_t sum = seed;
    uint64_t bad_rows = 0;

    if (layer >= l->layer_count) {
        return FB_EINVAL;
    }
    uint32_t n = jobs_init(jobs, k, l, layer, head, views, map);

    for (uint32_t i = 0; i < n; i++) {
        if (!fb_map_covers(map, jobs[i].first_token, jobs[i].place.rows)) {
            return FB_EINVAL;
        }
    }
    for (uint32_t b = 0; n && b < BATCHES_AHEAD; b++) {
        job_prefetch(&jobs[0], b * job_batch(&jobs[0], BATCH_BYTES));
    }
    fb_fpenv saved = fb_fpenv_enter();

    for (uint32_t i = 0; i < n; i++) {
        sum += jobs[i].section->codec == FB_CODEC_RAW
                   ? encode_raw(&jobs[i], segment)
                   : encode_quantized(&jobs[i], segment, &bad_rows);
    }
    fb_fpenv_leave(saved);

    uint8_t *trailer = segment + fb_layout_sum_offset(l, layer);

    memset(trailer, 0, FB_ARRAY_ALIGN);
    memcpy(trailer, &sum, FB_SUM_BYTES);
    fb_stream_fence();
    *ret_sum = sum;
    *ret_bad_rows = bad_rows;
    return bad_rows ? FB_ENONFINITE : FB_OK;
}

/* Rows of a section in a range of the page's tokens. */
static void job_rows(const struct rows_job *job, uint32_t token_first, uint32_t token_end,
                     uint32_t *ret_row, uint32_t *ret_end)
{
    uint32_t last = job->first_token + job->place.rows;

    *ret_row = token_first > job->first_token ? token_first - job->first_token : 0;
    *ret_end = token_end > job->first_token ? min_u32(token_end, last) - job->first_token : 0;
}

enum fb_status fb_segment_decode(const struct fb_kernels *k, const struct fb_layout *l,
                                 uint32_t layer, uint32_t head, const struct fb_paged_view *views,
                                 const struct fb_token_map *map, uint32_t token_first,
                                 uint32_t token_count, uint64_t seed, const uint8_t *segment,
                                 uint64_t *ret_sum)
{
    struct rows_job jobs[FB_MAX_SECTIONS];
    uint32_t row, end;
    uint64_t sum;

    if (layer >= l->layer_count || token_first > l->page_tokens ||
        token_count > l->page_tokens - token_first) {
        return FB_EINVAL;
    }
    uint32_t n = jobs_init(jobs, k, l, layer, head, views, map);

    for (uint32_t i = 0; i < n; i++) {
        job_rows(&jobs[i], token_first, token_first + token_count, &row, &end);
        if (row < end && !fb_map_covers(map, jobs[i].first_token + row, end - row)) {
            return FB_EINVAL;
        }
    }
    enum fb_status status = fb_segment_check(k, l, layer, seed, segment, &sum);

    if (status) {
        return status;
    }
    fb_fpenv saved = fb_fpenv_enter();

    for (uint32_t i = 0; i < n; i++) {
        job_rows(&jobs[i], token_first, token_first + token_count, &row, &end);
        if (jobs[i].section->codec == FB_CODEC_RAW) {
            decode_raw(&jobs[i], row, end, segment);
        } else {
            decode_quantized(&jobs[i], row, end, segment);
        }
    }
    fb_fpenv_leave(saved);
    fb_stream_fence();
    *ret_sum = sum;
    return FB_OK;
}

enum fb_status fb_segment_check(const struct fb_kernels *k, const struct fb_layout *l,
                                uint32_t layer, uint64_t seed, const uint8_t *segment,
                                uint64_t *ret_sum)
{
    uint64_t sum_offset = fb_layout_sum_offset(l, layer);
    uint64_t sum = seed + k->sum_copy(NULL, segment, sum_offset, 0);
    uint64_t stored;

    memcpy(&stored, segment + sum_offset, sizeof(stored));
    *ret_sum = sum;
    return sum == stored ? FB_OK : FB_ECORRUPT;
}

enum fb_status fb_block_check(const struct fb_kernels *k, const struct fb_layout *l,
                              const uint8_t *block, uint32_t plane_first, uint32_t plane_count)
{
    const struct fb_block_header *header = (const struct fb_block_header *)block;
    uint64_t sum;

    for (uint32_t p = plane_first; p < plane_first + plane_count; p++) {
        uint64_t plane_sum = 0;

        for (uint32_t layer = 0; layer < l->layer_count; layer++) {
            uint64_t seed = fb_sum_seed(header->key, p, layer);
            const uint8_t *segment = block + fb_layout_segment(l, p, layer);

            if (fb_segment_check(k, l, layer, seed, segment, &sum)) {
                return FB_ECORRUPT;
            }
            plane_sum += sum;
        }
        if (plane_sum != header->plane_sums[p]) {
            return FB_ECORRUPT;
        }
    }
    return FB_OK;
}

uint64_t fb_sum_copy(const struct fb_kernels *k, void *dst, const void *src, size_t bytes,
                     uint64_t offset)
{
    uint64_t sum = k->sum_copy(dst, src, bytes, offset);

    fb_stream_fence();
    return sum;
}
