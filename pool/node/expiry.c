/* Times to live: a small table beside the index, since few blocks have one. */
#include "pool/node/state.h"

#include <stdlib.h>

#define LOOK_NS (1000ull * 1000 * 1000)

struct fb_expiry {
    UT_hash_handle hh;
    uint32_t entry;
    uint64_t at_ns;
};

static struct fb_expiry *find(struct fb_node *node, uint32_t entry)
{
    struct fb_expiry *e;

    HASH_FIND(hh, node->expiries, &entry, sizeof(entry), e);
    return e;
}

void fb_expiry_forget(struct fb_node *node, uint32_t entry)
{
    struct fb_expiry *e = node->expiries ? find(node, entry) : NULL;

    if (e) {
        HASH_DEL(node->expiries, e); /* NOLINT(clang-analyzer-*) */
        free(e);
    }
}

enum fb_status fb_expiry_set(struct fb_node *node, uint32_t entry, uint32_t seconds)
{
    struct fb_expiry *e = find(node, entry);

    if (seconds == 0) {
        fb_expiry_forget(node, entry);
        return FB_OK;
    }
    if (!e) {
        e = calloc(1, sizeof(*e));
        if (!e) {
            return FB_ENOMEM;
        }
        e->entry = entry;
        HASH_ADD(hh, node->expiries, entry, sizeof(e->entry), e);
    }
    e->at_ns = node->now_ns + seconds * 1000000000ull;
    return FB_OK;
}

void fb_expiry_tick(struct fb_node *node)
{
    struct fb_expiry *e, *next;

    if (!node->expiries || node->now_ns - node->expired_ns < LOOK_NS) {
        return;
    }
    node->expired_ns = node->now_ns;
    HASH_ITER(hh, node->expiries, e, next) { /* NOLINT(clang-analyzer-*) */
        if (e->at_ns <= node->now_ns) {
            uint32_t entry = e->entry;

            /* Dropping may remove the entry, and this record with it. */
            fb_block_drop(node, entry);
            fb_expiry_forget(node, entry);
            fb_metrics_add(node->metrics, FB_METRIC_EVICTED_BLOCKS, 1);
        }
    }
}

void fb_expiry_destroy_all(struct fb_node *node)
{
    struct fb_expiry *e, *next;

    HASH_ITER(hh, node->expiries, e, next) { /* NOLINT(clang-analyzer-*) */
        HASH_DEL(node->expiries, e);         /* NOLINT(clang-analyzer-*) */
        free(e);
    }
}
