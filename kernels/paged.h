/* An engine's paged cache as tiles of rows: where a page's tokens are, and copies between there
 * and row-major memory [tokens, channels], whatever the strides.
 *
 * Borrowed pointers only. Stateless; any thread. */
#ifndef FB_KERNELS_PAGED_H
#define FB_KERNELS_PAGED_H

#include "kernels/rows.h"

/* Tokens of a page that follow each other in one engine block. */
struct fb_run {
    int64_t block;
    uint32_t token; /* in the block */
    uint32_t count;
};

/* The run that starts at a page's token, at most `limit` tokens long. The map covers it. */
static inline struct fb_run fb_map_run(const struct fb_token_map *map, uint32_t token,
                                       uint32_t limit)
{
    uint64_t at = map->first_token + token;
    uint32_t in_block = (uint32_t)(at % map->block_tokens);
    uint32_t left = map->block_tokens - in_block;

    return (struct fb_run){
        .block = map->block_ids[at / map->block_tokens],
        .token = in_block,
        .count = left < limit ? left : limit,
    };
}

/* Whether the map has the page's tokens [token, token + count), none in a null block. */
bool fb_map_covers(const struct fb_token_map *map, uint32_t token, uint32_t count);

/* Part of one head's rows in an engine block. */
struct fb_tile {
    uint8_t *at; /* element of the first token and channel */
    int64_t token_stride;
    int64_t channel_stride; /* both in elements */
    uint32_t elem_bytes;
    uint32_t tokens;
    uint32_t channels;
};

/* Row of a run's token, channels from channel_first. */
static inline uint8_t *fb_view_at(const struct fb_paged_view *v, uint32_t elem_bytes,
                                  const struct fb_run *run, uint32_t head, uint32_t channel_first)
{
    int64_t at = run->block * v->block_stride + run->token * v->token_stride +
                 head * v->head_stride + channel_first * v->channel_stride;

    return (uint8_t *)v->base + at * (int64_t)elem_bytes;
}

/* Start bringing a tile near, where its lines are easily told; a batch of rows ahead of its use. */
void fb_tile_prefetch(const struct fb_tile *tile);

/* Copy a tile to and from row-major rows, which follow each other without gaps. Scattered rows
 * may bypass the cache: fb_stream_fence before anybody is told. */
void fb_tile_gather(const struct fb_kernels *k, const struct fb_tile *tile, uint8_t *rows);
void fb_tile_scatter(const struct fb_kernels *k, const struct fb_tile *tile, const uint8_t *rows);

#endif
