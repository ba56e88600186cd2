/* Balance: which class of a tenant has how many chunks.
 *
 * A class that is full and evicts takes a chunk from another one when its ghosts (what one more
 * chunk would have kept) were asked for clearly more often, byte for byte, than what the other
 * one keeps; and a class without any chunk takes one in any case, once the others had time to use
 * theirs. So spaces that alternate on a small tier settle instead of thrashing. Counts decay. */
#include "pool/node/state.h"

#define DECAY_NS     (2ull * 1000 * 1000 * 1000)
#define MOVE_REST_NS (250ull * 1000 * 1000)
#define ASK_NS       (1ull * 1000 * 1000 * 1000)
#define CLEARLY      2 /* times as many hits a byte */
#define MIN_EVIDENCE 64
#define SAMPLE       8 /* one key in so many is remembered; each ghost hit then counts as many */

/* The low bits choose the sample, the others the place. */
static uint64_t ghost_of(const uint8_t *key)
{
    uint64_t v;

    memcpy(&v, key, sizeof(v));
    return v % SAMPLE == 0 ? v : 0;
}

static uint64_t *ghost_place(struct fb_class *class, uint64_t ghost)
{
    return &class->ghosts[ghost / SAMPLE & class->ghost_mask];
}

void fb_balance_evicted(struct fb_class *class, const uint8_t *key)
{
    uint64_t ghost = ghost_of(key);

    if (ghost) {
        *ghost_place(class, ghost) = ghost;
    }
}

void fb_balance_missed(struct fb_class *class, const uint8_t *keys, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        uint64_t ghost = ghost_of(keys + (size_t)i * FB_KEY_BYTES);
        uint64_t *place = ghost_place(class, ghost);

        if (ghost && *place == ghost) {
            *place = 0;
            class->ghost_hits += SAMPLE;
        }
    }
}

static uint64_t class_bytes(struct fb_node *node, const struct fb_class *class)
{
    const struct fb_chunk *chunk = fb_host_next_in_class(node->host, class->tier.id, NULL);
    uint64_t file_bytes = chunk ? chunk->file.file_bytes : 0;

    return file_bytes * fb_host_class_chunks(node->host, class->tier.id);
}

/* Hits per MiB of a class, of those with a chunk to spare the least. */
static struct fb_class *find_giver(struct fb_node *node, const struct fb_class *taker,
                                   uint64_t *ret_rate)
{
    bool starving = fb_host_class_chunks(node->host, taker->tier.id) == 0;
    struct fb_class *giver = NULL;

    for (uint32_t i = 0; i < node->class_count; i++) {
        struct fb_class *class = &node->classes[i];
        uint32_t chunks = fb_host_class_chunks(node->host, class->tier.id);
        uint64_t bytes, rate;

        if (class == taker || class->tier.tenant != taker->tier.tenant || chunks == 0 ||
            (chunks == 1 && !starving) || node->now_ns - class->moved_ns < MOVE_REST_NS) {
            continue;
        }
        bytes = class_bytes(node, class);
        rate = bytes ? (class->hits << 20) / bytes : 0;
        if (!giver || rate < *ret_rate) {
            giver = class;
            *ret_rate = rate;
        }
    }
    return giver;
}

/* The chunk that holds the class's coldest block; else any. */
static struct fb_chunk *coldest_chunk(struct fb_node *node, const struct fb_class *class)
{
    uint32_t entry = fb_index_victim(node->index, class->order);
    struct fb_chunk *chunk = NULL;

    if (entry != FB_ENTRY_NONE) {
        chunk = fb_host_chunk(node->host, fb_index_location(node->index, entry).chunk);
    }
    if (chunk && !chunk->retiring) {
        return chunk;
    }
    chunk = NULL;
    do {
        chunk = fb_host_next_in_class(node->host, class->tier.id, chunk);
    } while (chunk && chunk->retiring);
    return chunk;
}

static void retire(struct fb_node *node, struct fb_chunk *chunk)
{
    uint32_t id = chunk->file.id;

    fb_host_retire(node->host, chunk);
    for (uint32_t slot = 0; slot < chunk->file.slot_count; slot++) {
        uint32_t entry = chunk->entries[slot];

        if (entry != FB_ENTRY_NONE && !(fb_index_flags(node->index, entry) & FB_ENTRY_WRITING)) {
            fb_block_drop(node, entry);
            /* The last drop of an unmapped chunk has destroyed it. */
            if (!fb_host_chunk(node->host, id)) {
                return;
            }
        }
    }
    fb_client_notify_unmap(node, chunk);
    fb_balance_try_reap(node, chunk);
}

/* A chunk of another class that has nothing in it. */
static struct fb_chunk *find_unused(struct fb_node *node, const struct fb_class *taker)
{
    for (uint32_t i = 0; i < node->class_count; i++) {
        const struct fb_class *class = &node->classes[i];
        struct fb_chunk *chunk = NULL;

        if (class != taker && class->tier.tenant == taker->tier.tenant) {
            chunk = fb_host_unused_chunk(node->host, class->tier.id);
        }
        if (chunk) {
            return chunk;
        }
    }
    return NULL;
}

/* The chunk to take, if it is worth it. */
static struct fb_chunk *choose_chunk(struct fb_node *node, const struct fb_class *class)
{
    bool starving = fb_host_class_chunks(node->host, class->tier.id) == 0;
    uint64_t taker_bytes = (class->ghost_mask + 1) * SAMPLE * class->tier.slot_bytes;
    uint64_t taker_rate = (class->ghost_hits << 20) / taker_bytes, giver_rate = 0;
    struct fb_chunk *unused = find_unused(node, class);
    struct fb_class *giver;

    if (unused) {
        return unused;
    }
    if (!starving && class->ghost_hits < MIN_EVIDENCE) {
        return NULL;
    }
    giver = find_giver(node, class, &giver_rate);
    if (!giver || (!starving && taker_rate <= CLEARLY * giver_rate)) {
        return NULL;
    }
    return coldest_chunk(node, giver);
}

bool fb_balance_ask(struct fb_node *node, struct fb_class *class)
{
    struct fb_chunk *chunk;

    if (fb_host_tenant_retiring(node->host, class->tier.tenant) > 0) {
        return true;
    }
    chunk = choose_chunk(node, class);
    if (!chunk) {
        return false;
    }
    class->moved_ns = node->now_ns;
    class->ghost_hits = 0;
    fb_metrics_add(node->metrics, FB_METRIC_CHUNKS_MOVED, 1);
    fb_event_push(node, FB_EVENT_CHUNK_MOVED, class->tier.tenant, NULL, NULL, 1);
    fb_log(&node->log, FB_LOG_INFO, "chunk_moved",
           FB_KV_STR("tenant", node->tenants[class->tier.tenant].name),
           FB_KV_U64("from_slot_bytes", chunk->file.slot_bytes),
           FB_KV_U64("to_slot_bytes", class->tier.slot_bytes));
    retire(node, chunk);
    return true;
}

void fb_balance_try_reap(struct fb_node *node, struct fb_chunk *chunk)
{
    /* Clients outlive the node, which only then forgets what they have mapped. */
    if (chunk && node->state != FB_NODE_DRAINED && fb_host_reap(node->host, chunk)) {
        fb_op_wake_all(node);
    }
}

/* Chunks on their way out are asked for again: a reader may have mapped one since, and a message
 * to a client that is busy may have been lost. */
static void ask_again(struct fb_node *node)
{
    for (uint32_t i = 0; i < node->class_count; i++) {
        struct fb_chunk *chunk = NULL;

        while ((chunk = fb_host_next_in_class(node->host, (uint16_t)i, chunk))) {
            if (chunk->retiring) {
                fb_client_notify_unmap(node, chunk);
            }
        }
    }
}

void fb_balance_tick(struct fb_node *node)
{
    if (node->now_ns - node->asked_ns >= ASK_NS) {
        node->asked_ns = node->now_ns;
        ask_again(node);
    }
    if (node->now_ns - node->decayed_ns < DECAY_NS) {
        return;
    }
    node->decayed_ns = node->now_ns;
    for (uint32_t i = 0; i < node->class_count; i++) {
        node->classes[i].hits /= 2;
        node->classes[i].ghost_hits /= 2;
    }
}
