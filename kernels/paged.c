/* Gather and scatter of tiles. Three cases: rows contiguous in the cache, columns contiguous
 * (a cache stored transposed), and neither. Stateless; any thread. */
#include "kernels/paged.h"

#include <string.h>

bool fb_map_covers(const struct fb_token_map *map, uint32_t token, uint32_t count)
{
    uint64_t first, end;

    if (!map->block_tokens || __builtin_add_overflow(map->first_token, token, &first) ||
        __builtin_add_overflow(first, count, &end)) {
        return false;
    }
    if (!count) {
        return true;
    }
    uint64_t last_block = (end - 1) / map->block_tokens;

    if (last_block >= map->block_count) {
        return false;
    }
    for (uint64_t b = first / map->block_tokens; b <= last_block; b++) {
        if (map->block_ids[b] < 0) {
            return false;
        }
    }
    return true;
}

static bool columns_contiguous(const struct fb_tile *t)
{
    return t->token_stride == 1 && t->elem_bytes == 2 && t->tokens > 1;
}

void fb_tile_prefetch(const struct fb_tile *t)
{
    bool rows = t->channel_stride == 1;
    uint32_t count = rows ? t->tokens : t->channels;
    uint32_t bytes = (rows ? t->channels : t->tokens) * t->elem_bytes;
    int64_t stride = (rows ? t->token_stride : t->channel_stride) * t->elem_bytes;

    if (!rows && !columns_contiguous(t)) {
        return;
    }
    for (uint32_t i = 0; i < count; i++) {
        const uint8_t *line = t->at + i * stride;

        for (uint32_t at = 0; at < bytes; at += FB_LINE_BYTES) {
            __builtin_prefetch(line + at, 0, 2);
        }
    }
}

static void copy_element(uint8_t *to, const uint8_t *from, uint32_t elem_bytes)
{
    to[0] = from[0];
    if (elem_bytes == 2) {
        to[1] = from[1];
    }
}

void fb_tile_gather(const struct fb_kernels *k, const struct fb_tile *t, uint8_t *rows)
{
    size_t row_bytes = (size_t)t->channels * t->elem_bytes;
    int64_t token_bytes = t->token_stride * t->elem_bytes;
    int64_t channel_bytes = t->channel_stride * t->elem_bytes;

    if (columns_contiguous(t)) {
        k->transpose((const uint16_t *)t->at, t->channel_stride, t->channels, t->tokens,
                     (uint16_t *)rows, t->channels, false);
        return;
    }
    for (uint32_t i = 0; i < t->tokens; i++) {
        const uint8_t *from = t->at + i * token_bytes;
        uint8_t *to = rows + i * row_bytes;

        if (t->channel_stride == 1) {
            memcpy(to, from, row_bytes);
            continue;
        }
        for (uint32_t c = 0; c < t->channels; c++) {
            copy_element(to + (size_t)c * t->elem_bytes, from + c * channel_bytes, t->elem_bytes);
        }
    }
}

void fb_tile_scatter(const struct fb_kernels *k, const struct fb_tile *t, const uint8_t *rows)
{
    size_t row_bytes = (size_t)t->channels * t->elem_bytes;
    int64_t token_bytes = t->token_stride * t->elem_bytes;
    int64_t channel_bytes = t->channel_stride * t->elem_bytes;

    if (columns_contiguous(t)) {
        k->transpose((const uint16_t *)rows, t->channels, t->tokens, t->channels, (uint16_t *)t->at,
                     t->channel_stride, true);
        return;
    }
    for (uint32_t i = 0; i < t->tokens; i++) {
        const uint8_t *from = rows + i * row_bytes;
        uint8_t *to = t->at + i * token_bytes;

        if (t->channel_stride == 1) {
            k->stream_copy(to, from, row_bytes);
            continue;
        }
        for (uint32_t c = 0; c < t->channels; c++) {
            copy_element(to + c * channel_bytes, from + (size_t)c * t->elem_bytes, t->elem_bytes);
        }
    }
}
