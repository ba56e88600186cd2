/* What the tests of proto share: plain manifests, and random numbers that repeat. */
#ifndef FB_TESTS_PROTO_UTIL_H
#define FB_TESTS_PROTO_UTIL_H

#include "proto/manifest.h"

#include <string.h>

/* SplitMix64. */
static inline uint64_t random_next(uint64_t *state)
{
    uint64_t x = *state += 0x9e3779b97f4a7c15ull;

    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

static inline uint32_t random_below(uint64_t *state, uint32_t n)
{
    return (uint32_t)((random_next(state) >> 32) * n >> 32);
}

/* A model with full attention: K and V of bf16 in every layer. */
static inline void manifest_make(struct fb_manifest *m, uint32_t layers, uint32_t heads,
                                 uint32_t head_dim, enum fb_codec codec)
{
    memset(m, 0, sizeof(*m));
    strcpy(m->tenant, "default");
    strcpy(m->model, "example/model@0123abcd");
    strcpy(m->position, "rope theta=500000");
    m->rule = FB_RULE_FULL;
    m->page_tokens = 64;
    m->layer_count = layers;
    for (uint32_t i = 0; i < layers && i < FB_MAX_LAYERS; i++) {
        m->layers[i] = (uint16_t)i;
    }
    m->head_count = heads;
    m->head_total = heads;
    m->section_count = 2;
    for (uint32_t i = 0; i < 2; i++) {
        m->sections[i] = (struct fb_section){
            .kind = i ? FB_SECTION_V : FB_SECTION_K,
            .elem = FB_ELEM_BF16,
            .codec = codec,
            .layer_count = layers,
            .row_elems = head_dim,
        };
    }
}

/* Every field in use: a window space of some layers and heads with static scales, private. */
static inline void manifest_make_rich(struct fb_manifest *m)
{
    manifest_make(m, 3, 2, 80, FB_CODEC_INT8);
    strcpy(m->quantization, "awq-w4a16");
    m->rule = FB_RULE_WINDOW;
    m->window_tokens = 4096;
    m->page_tokens = 32;
    m->layers[0] = 1;
    m->layers[1] = 30;
    m->layers[2] = 1000;
    m->head_first = 4;
    m->head_total = 300;
    m->section_count = 3;
    m->sections[0].group = 32;
    m->sections[1].codec = FB_CODEC_FP8_E5M2;
    m->sections[1].elem = FB_ELEM_FP16;
    m->sections[2] = (struct fb_section){
        .kind = FB_SECTION_INDEX,
        .elem = FB_ELEM_BYTE,
        .codec = FB_CODEC_RAW,
        .layer_first = 1,
        .layer_count = 2,
        .row_elems = 132,
    };
    m->scale_count = 2;
    m->scales[0] = 0.5f;
    m->scales[1] = -3.25f;
    m->generation = 1ull << 40;
    m->is_private = true;
    memcpy(m->private_id, "0123456789abcdef", FB_PRIVATE_BYTES);
}

#endif
