/* Speed of the CPU codecs against memcpy of the same bf16 bytes, in the same run.
 *
 * One thread, buffers larger than the caches, engine blocks in shuffled order. A repetition runs
 * every case once and memcpy before each few of them, so that all see the same disturbances; time
 * is the thread's own, since nothing waits; figures are medians. One JSON line a case: figure and
 * limit in GB/s of bf16. --quick does fewer repetitions. */
#include "kernels/codec.h"
#include "proto/sum.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum {
    HEADS = 8,
    LAYERS = 4,
    ROW = 128,
    PAGE_TOKENS = 64,
    PAGES = 64,
    BLOCK_TOKENS = 16,
    BLOCKS = PAGES * PAGE_TOKENS / BLOCK_TOKENS,
    CASES_A_SHAPE = 8, /* codecs, each encoded and decoded */
    MAX_REPEATS = 15,
    MAX_CASES = 6 * CASES_A_SHAPE,
};

#define SECTION_BYTES ((size_t)BLOCKS * BLOCK_TOKENS * HEADS * ROW * 2) /* of one layer */
#define CACHE_BYTES   (SECTION_BYTES * 2 * LAYERS)

enum shape { SHAPE_HND, SHAPE_NHD, SHAPE_TRANSPOSED };

struct bench_case {
    enum fb_kernels_isa isa;
    enum fb_codec codec;
    enum shape shape;
    bool decode;
    double gbps[MAX_REPEATS];
};

/* An engine's cache, a second one to decode to, and the pages stored. */
struct bench {
    uint8_t *engine;
    uint8_t *target;
    uint8_t *blocks;
    int64_t block_ids[BLOCKS];
};

static double now_s(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static uint8_t *big_alloc(size_t bytes)
{
    uint8_t *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (p == MAP_FAILED) {
        perror("bench_codec: mmap");
        exit(1);
    }
    madvise(p, bytes, MADV_HUGEPAGE);
    memset(p, 1, bytes);
    return p;
}

static uint64_t next_random(uint64_t *state)
{
    *state = fb_mix64(*state);
    return *state;
}

/* Values like those of keys and values: a bell around zero, in bf16. */
static void fill(uint16_t *x, size_t n)
{
    uint64_t state = 1;

    for (size_t i = 0; i < n; i++) {
        uint64_t r = next_random(&state);
        float v = 0;
        uint32_t bits;

        for (int j = 0; j < 4; j++) {
            v += (float)(r >> (16 * j) & 0xffff) / 65536.0f - 0.5f;
        }
        memcpy(&bits, &v, sizeof(bits));
        x[i] = (uint16_t)(bits >> 16);
    }
}

static void bench_init(struct bench *b)
{
    uint64_t state = 2;

    b->engine = big_alloc(CACHE_BYTES);
    b->target = big_alloc(CACHE_BYTES);
    b->blocks = big_alloc(CACHE_BYTES + CACHE_BYTES / 4);
    fill((uint16_t *)b->engine, CACHE_BYTES / 2);
    for (int64_t i = 0; i < BLOCKS; i++) {
        int64_t j = (int64_t)(next_random(&state) % (uint64_t)(i + 1));

        b->block_ids[i] = b->block_ids[j];
        b->block_ids[j] = i;
    }
}

static void layout_init(struct fb_layout *l, enum fb_codec codec)
{
    struct fb_manifest m = {
        .tenant = "bench",
        .model = "bench@1",
        .rule = FB_RULE_FULL,
        .page_tokens = PAGE_TOKENS,
        .layer_count = LAYERS,
        .head_count = HEADS,
        .head_total = HEADS,
        .section_count = 2,
    };
    struct fb_error error;

    for (uint32_t i = 0; i < LAYERS; i++) {
        m.layers[i] = (uint16_t)i;
    }
    for (uint32_t i = 0; i < 2; i++) {
        m.sections[i] = (struct fb_section){
            .kind = i ? FB_SECTION_V : FB_SECTION_K,
            .elem = FB_ELEM_BF16,
            .codec = codec,
            .layer_count = LAYERS,
            .row_elems = ROW,
        };
    }
    if (fb_layout_init(l, &m, &error)) {
        fprintf(stderr, "bench_codec: %s\n", error.text);
        exit(1);
    }
}

/* Sections of one layer: [blocks, heads, tokens, dim], [blocks, tokens, heads, dim], or K as
 * [blocks, heads, dim, tokens] beside V as the first. */
static void views_init(struct fb_paged_view views[2], uint8_t *cache, uint32_t layer,
                       enum shape shape)
{
    for (uint32_t i = 0; i < 2; i++) {
        struct fb_paged_view *v = &views[i];

        v->base = cache + (2 * layer + i) * SECTION_BYTES;
        v->block_stride = BLOCK_TOKENS * HEADS * ROW;
        v->token_stride = ROW;
        v->head_stride = BLOCK_TOKENS * ROW;
        v->channel_stride = 1;
        if (shape == SHAPE_NHD) {
            v->token_stride = HEADS * ROW;
            v->head_stride = ROW;
        } else if (shape == SHAPE_TRANSPOSED && i == 0) {
            v->token_stride = 1;
            v->channel_stride = BLOCK_TOKENS;
        }
    }
}

static enum fb_status run_segment(const struct bench *b, const struct bench_case *c,
                                  const struct fb_layout *l, uint32_t page, uint32_t layer,
                                  uint32_t head)
{
    static const uint8_t key[FB_KEY_BYTES] = {7};
    const struct fb_kernels *k = fb_kernels_get(c->isa);
    uint8_t *segment = b->blocks + page * l->block_bytes + fb_layout_segment(l, head, layer);
    uint64_t seed = fb_sum_seed(key, head, layer);
    struct fb_token_map map = {
        .block_ids = b->block_ids,
        .block_count = BLOCKS,
        .first_token = (uint64_t)page * PAGE_TOKENS,
        .block_tokens = BLOCK_TOKENS,
    };
    struct fb_paged_view views[2];
    uint64_t sum, bad;

    views_init(views, c->decode ? b->target : b->engine, layer, c->shape);
    return c->decode ? fb_segment_decode(k, l, layer, head, views, &map, 0, PAGE_TOKENS, seed,
                                         segment, &sum)
                     : fb_segment_encode(k, l, layer, head, views, &map, seed, segment, &sum, &bad);
}

static double run_case(const struct bench *b, const struct bench_case *c)
{
    struct fb_layout l;

    layout_init(&l, c->codec);
    double start = now_s();

    for (uint32_t page = 0; page < PAGES; page++) {
        for (uint32_t head = 0; head < HEADS; head++) {
            for (uint32_t layer = 0; layer < LAYERS; layer++) {
                enum fb_status status = run_segment(b, c, &l, page, layer, head);

                if (status) {
                    fprintf(stderr, "bench_codec: %s\n", fb_status_name(status));
                    exit(1);
                }
            }
        }
    }
    return (double)CACHE_BYTES / (now_s() - start) * 1e-9;
}

static double run_memcpy(const struct bench *b)
{
    double start = now_s();

    memcpy(b->target, b->engine, CACHE_BYTES);
    return (double)CACHE_BYTES / (now_s() - start) * 1e-9;
}

static int compare(const void *a, const void *b)
{
    double d = *(const double *)a - *(const double *)b;

    return (d > 0) - (d < 0);
}

static double median(double *v, int n)
{
    qsort(v, (size_t)n, sizeof(*v), compare);
    return v[n / 2];
}

/* Every case is an encoding, directly followed by the decoding of what it wrote. */
static int cases_init(struct bench_case *cases)
{
    static const enum fb_kernels_isa isas[] = {FB_KERNELS_AVX512, FB_KERNELS_AVX2};
    static const enum shape shapes[] = {SHAPE_HND, SHAPE_NHD, SHAPE_TRANSPOSED};
    int n = 0;

    for (size_t i = 0; i < sizeof(isas) / sizeof(isas[0]); i++) {
        if (!fb_kernels_get(isas[i])) {
            continue;
        }
        for (size_t j = 0; j < sizeof(shapes) / sizeof(shapes[0]); j++) {
            for (int codec = FB_CODEC_RAW; codec <= FB_CODEC_INT8; codec++) {
                for (int decode = 0; decode < 2; decode++) {
                    cases[n++] = (struct bench_case){
                        .isa = isas[i],
                        .codec = (enum fb_codec)codec,
                        .shape = shapes[j],
                        .decode = decode,
                    };
                }
            }
        }
    }
    return n;
}

static void print_case(struct bench_case *c, int repeats, double limit)
{
    static const char *const shape_names[] = {"", "nhd/", "transposed/"};
    double bar = c->codec == FB_CODEC_RAW ? 0.8 : c->decode ? 1.1 : 0.6;
    double figure = median(c->gbps, repeats);

    if (c->shape == SHAPE_TRANSPOSED) {
        bar /= 2;
    }
    printf("{\"bench\":\"codec_cpu\",\"case\":\"codec/%s/%s%s/%s\",\"figure\":%.2f,"
           "\"limit\":%.2f,\"unit\":\"GB/s\",\"ratio\":%.3f,\"better\":\"higher\",",
           c->decode ? "decode" : "encode", shape_names[c->shape], fb_codec_name(c->codec),
           fb_kernels_name(fb_kernels_get(c->isa)), figure, limit, figure / limit);
    if (c->isa == FB_KERNELS_AVX512 && c->shape != SHAPE_NHD) {
        printf("\"bar\":%.2f,", bar);
    }
    printf("\"threads\":1,\"waited\":\"none\"}\n");
}

int main(int argc, char **argv)
{
    int repeats = argc > 1 && !strcmp(argv[1], "--quick") ? 3 : MAX_REPEATS;
    static struct bench b;
    static struct bench_case cases[MAX_CASES];
    double memcpy_gbps[MAX_REPEATS * MAX_CASES / CASES_A_SHAPE];
    int copies = 0;

    if (argc > 2 || (argc == 2 && repeats == MAX_REPEATS)) {
        fprintf(stderr, "usage: bench_codec [--quick]\n");
        return 2;
    }
    bench_init(&b);
    int n = cases_init(cases);

    for (int r = 0; r < repeats; r++) {
        for (int i = 0; i < n; i++) {
            if (i % CASES_A_SHAPE == 0) {
                memcpy_gbps[copies++] = run_memcpy(&b);
            }
            cases[i].gbps[r] = run_case(&b, &cases[i]);
        }
    }
    double limit = median(memcpy_gbps, copies);

    for (int i = 0; i < n; i++) {
        print_case(&cases[i], repeats, limit);
    }
    return 0;
}
