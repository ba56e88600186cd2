/* Maps: chunks of the daemon in this process. */
#include "pool/client/internal.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static struct fb_map_list *bucket_of(struct fb_pool *pool, uint32_t chunk)
{
    return &pool->maps[chunk % FB_MAP_BUCKETS];
}

static struct fb_map *find_map(struct fb_pool *pool, uint32_t chunk)
{
    struct fb_map *map;

    LIST_FOREACH(map, bucket_of(pool, chunk), link) {
        if (map->chunk == chunk) {
            return map;
        }
    }
    return NULL;
}

/* The mutex is held. The chunk id is confirmed in the keeper's next message. */
static void unmap(struct fb_pool *pool, struct fb_map *map)
{
    uint32_t *grown = realloc(pool->unmapped, (pool->unmapped_count + 1) * sizeof(*pool->unmapped));

    munmap(map->base, map->bytes);
    LIST_REMOVE(map, link);
    pool->info.bytes_mapped -= map->bytes;
    if (grown) {
        grown[pool->unmapped_count++] = map->chunk;
        pool->unmapped = grown;
        fb_keeper_wake(pool);
    }
    free(map);
}

void fb_map_retire(struct fb_pool *pool, uint32_t chunk)
{
    struct fb_map *map;

    pthread_mutex_lock(&pool->mutex);
    map = find_map(pool, chunk);
    if (map) {
        map->retired = true;
        if (map->refs == 0) {
            unmap(pool, map);
        }
    }
    pthread_mutex_unlock(&pool->mutex);
}

void fb_map_destroy_all(struct fb_pool *pool)
{
    for (uint32_t i = 0; i < FB_MAP_BUCKETS; i++) {
        while (!LIST_EMPTY(&pool->maps[i])) {
            struct fb_map *map = LIST_FIRST(&pool->maps[i]);

            LIST_REMOVE(map, link);
            munmap(map->base, map->bytes);
            free(map);
        }
    }
}

/* Map what an answer describes; its descriptor stays the link's. */
static struct fb_map *make_map(const struct fb_link *link)
{
    struct fb_chunk_row row;
    struct fb_map *map;
    void *base;

    memcpy(&row, link->reply.first, sizeof(row));
    if (link->fd_count != 1 || row.slot_bytes == 0 || row.slots_offset > row.bytes) {
        return NULL;
    }
    base = mmap(NULL, row.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, link->fds[0], 0);
    if (base == MAP_FAILED) {
        return NULL;
    }
    map = calloc(1, sizeof(*map));
    if (!map) {
        munmap(base, row.bytes);
        return NULL;
    }
    map->chunk = row.chunk;
    map->base = base;
    map->bytes = row.bytes;
    map->slot_bytes = row.slot_bytes;
    map->slots_offset = row.slots_offset;
    return map;
}

static enum fb_status request_map(struct fb_pool *pool, uint32_t chunk, uint64_t deadline_ns,
                                  struct fb_map **ret_map)
{
    struct fb_list_request request = {.count = 1};
    struct fb_map *map = NULL;
    struct fb_wire_writer w;
    struct fb_link *link;
    enum fb_status status = fb_link_take(pool, deadline_ns, &link);

    if (status != FB_OK) {
        return status;
    }
    fb_link_begin(link, &w, FB_MSG_CHUNKS, &request, sizeof(request));
    fb_wire_append(&w, &chunk, sizeof(chunk));
    status = fb_link_call(pool, link, &w, NULL, 0, deadline_ns);
    if (status == FB_OK && link->reply.list_reply.count == 1) {
        map = fb_wire_u32(link->reply.first, 0) == FB_OK ? make_map(link) : NULL;
    }
    fb_link_give(pool, link, status);
    if (status != FB_OK) {
        return status;
    }
    *ret_map = map;
    return map ? FB_OK : FB_MISS;
}

/* Find or make the map of a chunk and take a reference. */
static enum fb_status acquire(struct fb_pool *pool, uint32_t chunk, uint64_t deadline_ns,
                              struct fb_map **ret_map)
{
    struct fb_map *map, *made = NULL;
    enum fb_status status;

    pthread_mutex_lock(&pool->mutex);
    map = find_map(pool, chunk);
    if (!map) {
        pthread_mutex_unlock(&pool->mutex);
        status = request_map(pool, chunk, deadline_ns, &made);
        if (status != FB_OK) {
            return status;
        }
        pthread_mutex_lock(&pool->mutex);
        map = find_map(pool, chunk);
        if (!map) {
            LIST_INSERT_HEAD(bucket_of(pool, chunk), made, link);
            pool->info.bytes_mapped += made->bytes;
            fb_keeper_wake(pool);
            map = made;
            made = NULL;
        }
    }
    map->refs++;
    pthread_mutex_unlock(&pool->mutex);
    if (made) { /* another thread was faster */
        munmap(made->base, made->bytes);
        free(made);
    }
    *ret_map = map;
    return FB_OK;
}

enum fb_status fb_map_slot(struct fb_pool *pool, struct fb_map_refs *refs,
                           struct fb_wire_location where, uint64_t block_bytes,
                           uint64_t deadline_ns, uint8_t **ret_slot)
{
    struct fb_map *map = NULL;
    uint64_t offset;

    for (uint32_t i = refs->count; i-- > 0 && !map;) {
        map = refs->list[i]->chunk == where.chunk ? refs->list[i] : NULL;
    }
    if (!map) {
        struct fb_map **list = realloc(refs->list, (refs->count + 1) * sizeof(struct fb_map *));
        enum fb_status status;

        if (!list) {
            return FB_ENOMEM;
        }
        refs->list = list;
        status = acquire(pool, where.chunk, deadline_ns, &map);
        if (status != FB_OK) {
            return status;
        }
        refs->list[refs->count++] = map;
    }
    offset = map->slots_offset + where.slot * map->slot_bytes;
    if (block_bytes > map->slot_bytes || offset + map->slot_bytes > map->bytes) {
        return FB_EPROTO;
    }
    *ret_slot = map->base + offset;
    return FB_OK;
}

/* The mutex is held. */
static void drop_ref(struct fb_pool *pool, struct fb_map *map)
{
    if (--map->refs == 0 && map->retired) {
        unmap(pool, map);
    }
}

static struct fb_map *next_untouched(struct fb_pool *pool)
{
    struct fb_map *map;

    for (uint32_t i = 0; i < FB_MAP_BUCKETS; i++) {
        LIST_FOREACH(map, &pool->maps[i], link) {
            if (!map->touched && !map->retired) {
                return map;
            }
        }
    }
    return NULL;
}

void fb_map_touch(struct fb_pool *pool)
{
#ifdef MADV_POPULATE_WRITE
    struct fb_map *map;

    pthread_mutex_lock(&pool->mutex);
    while (!pool->stopping && (map = next_untouched(pool))) {
        map->touched = true;
        map->refs++;
        pthread_mutex_unlock(&pool->mutex);
        madvise(map->base, map->bytes, MADV_POPULATE_WRITE);
        pthread_mutex_lock(&pool->mutex);
        drop_ref(pool, map);
    }
    pthread_mutex_unlock(&pool->mutex);
#else
    (void)pool;
    (void)next_untouched;
#endif
}

void fb_map_release(struct fb_pool *pool, struct fb_map_refs *refs)
{
    pthread_mutex_lock(&pool->mutex);
    for (uint32_t i = 0; i < refs->count; i++) {
        drop_ref(pool, refs->list[i]);
    }
    pthread_mutex_unlock(&pool->mutex);
    free(refs->list);
    *refs = (struct fb_map_refs){0};
}
