/* Prints docs/vectors.json: what other implementations must arrive at, bit by bit.
 *
 * docs/formats.md defines all of it; tests/vectors/check_vectors.py computes it again without any
 * of this code. A test compares the file with this program's output, so a format cannot change
 * unnoticed.
 *
 * The input of a block is numbered in the order section, layer of the section, head, row, channel,
 * from input_first on. Of element number n, g = mix64(n) (SplitMix64's) gives
 *   bf16  sign g >> 63, exponent field 120 + (g >> 32 & 15), mantissa g & 127
 *   fp16  sign g >> 63, exponent field 8 + (g >> 32 & 15), mantissa g & 1023
 *   else  the byte g >> 56
 * but in bf16 and fp16 rows 0 and 1 of each head are special: row 0 is zero throughout, and in
 * row 1 channel c is the (c mod 8)-th of
 *   +0, -0, smallest subnormal, the same negative, 1, -1, smallest normal, largest finite */
#include "kernels/codec.h"
#include "proto/chain.h"
#include "proto/sum.h"
#include "tests/unit/proto_util.h"

#include <inttypes.h>
#include <openssl/sha.h>
#include <stdio.h>
#include <stdlib.h>

#define HEX_SEGMENT_BYTES 4096u /* longer segments are given by their sums only */

static void must(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "make_vectors: %s failed\n", what);
        exit(1);
    }
}

/* --- JSON --- */

static void put_hex(const char *name, const void *data, size_t bytes)
{
    printf("\"%s\": \"", name);
    for (size_t i = 0; i < bytes; i++) {
        printf("%02x", ((const uint8_t *)data)[i]);
    }
    printf("\"");
}

static void put_hex_or_null(const char *name, const void *data, size_t bytes)
{
    if (data) {
        put_hex(name, data, bytes);
    } else {
        printf("\"%s\": null", name);
    }
}

static void put_sha256(const char *name, const void *data, size_t bytes)
{
    uint8_t digest[SHA256_DIGEST_LENGTH];

    SHA256(data, bytes, digest);
    put_hex(name, digest, sizeof(digest));
}

/* What goes before the i-th item of a list. */
static const char *before(uint32_t i)
{
    return i ? ",\n  " : "\n  ";
}

static void fill(uint8_t *out, size_t bytes, uint64_t seed)
{
    for (size_t i = 0; i < bytes; i++) {
        out[i] = (uint8_t)(random_next(&seed) >> 56);
    }
}

/* --- chains and keys --- */

static void put_extra(const char *name, const struct fb_chain_extra *x, uint8_t *out,
                      size_t *ret_bytes)
{
    must(fb_chain_extra_encode(x, out, FB_CHAIN_MAX_EXTRA, ret_bytes) == FB_OK, name);
    printf("{\"name\": \"%s\", ", name);
    put_hex_or_null("adapter", x->adapter, FB_DIGEST_BYTES);
    printf(", \"multimodal\": [");
    for (uint32_t i = 0; i < x->multimodal_count; i++) {
        printf("%s{", i ? ", " : "");
        put_hex("digest", x->multimodal[i].digest, FB_DIGEST_BYTES);
        printf(", \"offset\": %" PRId64 "}", x->multimodal[i].offset);
    }
    printf("], ");
    put_hex_or_null("embeddings", x->embeddings, FB_DIGEST_BYTES);
    printf(", \"salt\": %s%s%s, ", x->salt ? "\"" : "", x->salt ? x->salt : "null",
           x->salt ? "\"" : "");
    put_hex("cbor", out, *ret_bytes);
    printf("}");
}

static void put_chain(const uint8_t *previous, const uint32_t *ids, uint32_t count,
                      const uint8_t *extra, size_t extra_bytes, uint8_t *hash)
{
    printf("{");
    put_hex_or_null("previous", previous, FB_CHAIN_BYTES);
    printf(", \"tokens\": [");
    for (uint32_t i = 0; i < count; i++) {
        printf("%s%" PRIu32, i ? ", " : "", ids[i]);
    }
    printf("], ");
    put_hex("extra", extra, extra_bytes);
    printf(", ");
    must(fb_chain(previous, ids, count, extra, extra_bytes, hash) == FB_OK, "fb_chain");
    put_hex("hash", hash, FB_CHAIN_BYTES);
    printf("}");
}

static void put_chains(void)
{
    struct fb_multimodal_item items[3] = {{.offset = -100000}, {.offset = 0}, {.offset = 63}};
    static uint8_t adapter[FB_DIGEST_BYTES], embeddings[FB_DIGEST_BYTES];
    const struct {
        const char *name;
        struct fb_chain_extra extra;
    } rows[] = {
        {"nothing", {0}},
        {"adapter", {.adapter = adapter}},
        {"one image", {.multimodal = items + 2, .multimodal_count = 1}},
        {"embeddings", {.embeddings = embeddings}},
        {"salt", {.salt = "tenant-internal"}},
        {"everything", {adapter, items, 3, embeddings, "s"}},
    };
    enum { ROWS = sizeof(rows) / sizeof(rows[0]) };
    static uint8_t extra[ROWS][FB_CHAIN_MAX_EXTRA];
    uint8_t hashes[2 * ROWS][FB_CHAIN_BYTES];
    size_t extra_bytes[ROWS];
    uint32_t ids[64];

    fill(adapter, sizeof(adapter), 1);
    fill(embeddings, sizeof(embeddings), 2);
    for (uint32_t i = 0; i < 3; i++) {
        fill(items[i].digest, FB_DIGEST_BYTES, 3 + i);
    }
    for (uint32_t i = 0; i < 64; i++) {
        ids[i] = i < 63 ? i * i * 31 % 128256 : UINT32_MAX;
    }
    printf("\"extra\": [");
    for (uint32_t i = 0; i < ROWS; i++) {
        fputs(before(i), stdout);
        put_extra(rows[i].name, &rows[i].extra, extra[i], &extra_bytes[i]);
    }
    /* each as a first page, then as one that follows it */
    printf("],\n\"chain\": [");
    for (uint32_t i = 0; i < 2 * ROWS; i++) {
        uint32_t row = i % ROWS;

        fputs(before(i), stdout);
        put_chain(i < ROWS ? NULL : hashes[row], ids, i < ROWS ? 64 : 1 + row, extra[row],
                  extra_bytes[row], hashes[i]);
    }
    printf("],\n");
}

static void put_keys(void)
{
    uint8_t space[FB_SPACE_ID_BYTES], chain[FB_CHAIN_BYTES], key[FB_KEY_BYTES];
    struct fb_hasher *hasher = NULL;

    must(fb_hasher_create(&hasher) == FB_OK, "fb_hasher_create");
    printf("\"keys\": [");
    for (uint32_t i = 0; i < 3; i++) {
        fill(space, sizeof(space), 100 + i / 2);
        fill(chain, sizeof(chain), 200 + i);
        fb_pool_keys(hasher, space, chain, 1, key);
        printf("%s{", before(i));
        put_hex("space", space, sizeof(space));
        printf(", ");
        put_hex("chain", chain, sizeof(chain));
        printf(", ");
        put_hex("key", key, sizeof(key));
        printf("}");
    }
    printf("],\n");
    fb_hasher_destroy(hasher);
}

/* --- manifests --- */

static void put_sections(const struct fb_manifest *m)
{
    printf("\"sections\": [");
    for (uint32_t i = 0; i < m->section_count; i++) {
        const struct fb_section *s = &m->sections[i];

        printf("%s[%d, %d, %d, %u, %u, %u, %u]", i ? ", " : "", (int)s->kind, (int)s->elem,
               (int)s->codec, s->layer_first, s->layer_count, s->row_elems, s->group);
    }
    printf("], ");
}

static void put_manifest(const struct fb_manifest *m, uint8_t *ret_space)
{
    uint8_t cbor[FB_MANIFEST_MAX_BYTES];
    size_t bytes = 0;

    must(fb_manifest_encode(m, cbor, sizeof(cbor), &bytes, NULL) == FB_OK, "fb_manifest_encode");
    fb_space_id(cbor, bytes, ret_space);
    printf("{\"tenant\": \"%s\", \"model\": \"%s\", \"quantization\": \"%s\", "
           "\"position\": \"%s\", \"arrangement\": \"%s\", \"engine_block_tokens\": %u, "
           "\"rule\": %d, \"window_tokens\": %u, \"page_tokens\": %u, \"layers\": [",
           m->tenant, m->model, m->quantization, m->position, m->arrangement,
           m->engine_block_tokens, (int)m->rule, m->window_tokens, m->page_tokens);
    for (uint32_t i = 0; i < m->layer_count; i++) {
        printf("%s%u", i ? ", " : "", m->layers[i]);
    }
    printf("], \"heads\": [%u, %u, %u], ", m->head_first, m->head_count, m->head_total);
    put_sections(m);
    put_hex("scales", m->scales, 4 * (size_t)m->scale_count);
    printf(", \"generation\": %" PRIu64 ", ", m->generation);
    put_hex("private", m->private_id, m->is_private ? FB_PRIVATE_BYTES : 0);
    printf(", ");
    put_hex("cbor", cbor, bytes);
    printf(", ");
    put_hex("space", ret_space, FB_SPACE_ID_BYTES);
    printf("}");
}

static void put_manifests(void)
{
    static struct fb_manifest m;
    uint8_t space[FB_SPACE_ID_BYTES];

    printf("\"manifests\": [");
    manifest_make(&m, 32, 8, 128, FB_CODEC_FP8_E4M3);
    fputs(before(0), stdout);
    put_manifest(&m, space);

    manifest_make_rich(&m);
    fputs(before(1), stdout);
    put_manifest(&m, space);

    manifest_make(&m, 2, 1, 5000, FB_CODEC_RAW);
    strcpy(m.arrangement, "amx tiles 16x64");
    m.engine_block_tokens = 32;
    m.rule = FB_RULE_STATE;
    m.section_count = 1;
    m.sections[0].kind = FB_SECTION_STATE;
    fputs(before(2), stdout);
    put_manifest(&m, space);
    printf("],\n");
}

/* --- blocks --- */

/* A block, and where the rows come from: [layer of section, head, row, channel] per section. */
struct block {
    struct fb_layout layout;
    uint8_t *rows[2];
    size_t row_bytes[2];
    uint8_t *bytes;
};

static uint16_t float_bits(enum fb_elem elem, uint32_t row, uint32_t channel, uint64_t g)
{
    static const uint16_t special[2][8] = {
        {0, 0x8000, 0x0001, 0x8001, 0x3f80, 0xbf80, 0x0080, 0x7f7f},
        {0, 0x8000, 0x0001, 0x8001, 0x3c00, 0xbc00, 0x0400, 0x7bff},
    };
    uint32_t mantissa_bits = elem == FB_ELEM_BF16 ? 7 : 10;
    uint64_t exponent = (elem == FB_ELEM_BF16 ? 120 : 8) + (g >> 32 & 15);

    if (row < 2) {
        return row ? special[elem == FB_ELEM_FP16][channel % 8] : 0;
    }
    return (uint16_t)(g >> 63 << 15 | exponent << mantissa_bits |
                      (g & ((1u << mantissa_bits) - 1)));
}

/* Fill the rows of a section; elements are numbered from `number` on, the next is returned. */
static uint64_t fill_rows(struct block *b, uint32_t section, uint64_t number)
{
    const struct fb_section *s = &b->layout.sections[section];
    uint32_t elem_bytes = fb_elem_bytes(s->elem);
    size_t count =
        (size_t)s->layer_count * b->layout.plane_count * b->layout.page_tokens * s->row_elems;

    b->row_bytes[section] = count * elem_bytes;
    b->rows[section] = malloc(b->row_bytes[section]);
    must(b->rows[section], "malloc");
    for (size_t i = 0; i < count; i++) {
        uint64_t state = number++;
        uint64_t g = random_next(&state);
        uint32_t row = (uint32_t)(i / s->row_elems % b->layout.page_tokens);
        uint16_t bits = elem_bytes == 2 ? float_bits(s->elem, row, (uint32_t)(i % s->row_elems), g)
                                        : (uint16_t)(g >> 56);

        memcpy(b->rows[section] + i * elem_bytes, &bits, elem_bytes);
    }
    return number;
}

static void views_of(const struct block *b, uint32_t layer, struct fb_paged_view views[2])
{
    for (uint32_t i = 0; i < 2; i++) {
        const struct fb_section *s = &b->layout.sections[i];
        int64_t head = (int64_t)b->layout.page_tokens * s->row_elems;

        views[i] = (struct fb_paged_view){
            .base = b->rows[i] + (size_t)(layer - s->layer_first) * b->layout.plane_count *
                                     (size_t)head * fb_elem_bytes(s->elem),
            .token_stride = s->row_elems,
            .head_stride = head,
            .channel_stride = 1,
        };
    }
}

static void put_segments(struct block *b, struct fb_block_header *h)
{
    static const int64_t engine_block = 0;
    const struct fb_layout *l = &b->layout;
    const struct fb_token_map map = {&engine_block, 1, 0, l->page_tokens};
    const struct fb_kernels *k = fb_kernels_get(FB_KERNELS_REF);

    printf("   \"segments\": [");
    for (uint32_t i = 0; i < l->plane_count * l->layer_count; i++) {
        uint32_t plane = i / l->layer_count, layer = i % l->layer_count;
        uint64_t at = fb_layout_segment(l, plane, layer), bad, sum;
        uint64_t bytes = l->segment_offset[layer + 1] - l->segment_offset[layer];
        struct fb_paged_view views[2];

        views_of(b, layer, views);
        must(fb_segment_encode(k, l, layer, plane, views, &map, fb_sum_seed(h->key, plane, layer),
                               b->bytes + at, &sum, &bad) == FB_OK,
             "fb_segment_encode");
        h->plane_sums[plane] += sum;
        printf("%s {\"offset\": %" PRIu64 ", \"bytes\": %" PRIu64 ", \"sum\": \"%016" PRIx64 "\", ",
               before(i), at, bytes, sum);
        put_hex("hex", b->bytes + at, bytes <= HEX_SEGMENT_BYTES ? bytes : 0);
        printf("}");
    }
    printf("],\n");
}

/* Decode over the input: the rows are then what a reader gets. */
static void put_decoded(struct block *b, const struct fb_block_header *h)
{
    static const int64_t engine_block = 0;
    const struct fb_layout *l = &b->layout;
    const struct fb_token_map map = {&engine_block, 1, 0, l->page_tokens};
    const struct fb_kernels *k = fb_kernels_get(FB_KERNELS_REF);
    uint64_t sum;

    for (uint32_t i = 0; i < l->plane_count * l->layer_count; i++) {
        uint32_t plane = i / l->layer_count, layer = i % l->layer_count;
        struct fb_paged_view views[2];

        views_of(b, layer, views);
        must(fb_segment_decode(k, l, layer, plane, views, &map, 0, l->page_tokens,
                               fb_sum_seed(h->key, plane, layer),
                               b->bytes + fb_layout_segment(l, plane, layer), &sum) == FB_OK,
             "fb_segment_decode");
    }
    for (uint32_t i = 0; i < 2; i++) {
        put_sha256(i ? "section_1_decoded_sha256" : "section_0_decoded_sha256", b->rows[i],
                   b->row_bytes[i]);
        printf(",\n   ");
    }
}

static void put_block(const struct fb_manifest *m, uint32_t number)
{
    struct fb_block_header *h;
    struct block b = {0};

    must(fb_layout_init(&b.layout, m, NULL) == FB_OK, "fb_layout_init");
    b.bytes = aligned_alloc(FB_BLOCK_ALIGN, b.layout.block_bytes);
    must(b.bytes, "aligned_alloc");
    memset(b.bytes, 0, b.layout.block_bytes);
    h = (struct fb_block_header *)b.bytes;
    printf("%s{\"manifest\": ", before(number));
    *h = (struct fb_block_header){
        .magic = FB_BLOCK_MAGIC,
        .version = FB_BLOCK_VERSION,
        .state = FB_BLOCK_COMMITTED,
        .position = 7 + number,
        .block_bytes = b.layout.block_bytes,
        .plane_bytes = b.layout.plane_bytes,
        .plane_count = b.layout.plane_count,
        .layer_count = b.layout.layer_count,
        .page_tokens = b.layout.page_tokens,
        .sequence = 1000 + number,
    };
    put_manifest(m, h->space);
    fill(h->key, sizeof(h->key), 300 + number);
    fill(h->parent, sizeof(h->parent), 400 + number);
    printf(",\n   \"input_first\": %u, \"block_bytes\": %" PRIu64 ", \"plane_bytes\": %" PRIu64
           ",\n",
           1000000 * number, h->block_bytes, h->plane_bytes);
    fill_rows(&b, 1, fill_rows(&b, 0, 1000000 * number));
    put_segments(&b, h);
    fb_block_header_seal(h);
    printf("   ");
    put_hex("header_start", h, offsetof(struct fb_block_header, plane_sums) + 8 * h->plane_count);
    printf(", \"header_crc\": %" PRIu32 ",\n   ", h->crc);
    put_decoded(&b, h);
    put_sha256("block_sha256", b.bytes, b.layout.block_bytes);
    printf("}");
    free(b.rows[0]);
    free(b.rows[1]);
    free(b.bytes);
}

/* Eight tokens of two heads and two layers in every codec, from both element types; the second
 * section in groups that do not divide the row. Then raw bytes beside raw bf16, and a segment
 * longer than the table of position keys. */
static void put_blocks(void)
{
    static struct fb_manifest m;
    uint32_t number = 0;

    printf("\"blocks\": [");
    for (int codec = FB_CODEC_FP8_E4M3; codec <= FB_CODEC_INT8; codec++) {
        for (int elem = FB_ELEM_BF16; elem <= FB_ELEM_FP16; elem++) {
            manifest_make(&m, 2, 2, 40, (enum fb_codec)codec);
            m.page_tokens = 8;
            m.sections[0].elem = m.sections[1].elem = (enum fb_elem)elem;
            m.sections[1].group = 16;
            put_block(&m, number++);
        }
    }
    manifest_make(&m, 2, 2, 24, FB_CODEC_RAW);
    m.page_tokens = 8;
    m.sections[1].elem = FB_ELEM_E4M3FN;
    m.sections[1].layer_first = m.sections[1].layer_count = 1;
    put_block(&m, number++);

    manifest_make(&m, 1, 1, 128, FB_CODEC_RAW);
    m.page_tokens = 128;
    put_block(&m, number);
    printf("]\n");
}

int main(void)
{
    printf("{\"about\": \"Test vectors of docs/formats.md, made by tests/vectors/make_vectors.c. "
           "Digests and bytes are hexadecimal.\",\n");
    put_chains();
    put_keys();
    put_manifests();
    put_blocks();
    printf("}\n");
    return ferror(stdout) || fflush(stdout) ? 1 : 0;
}
