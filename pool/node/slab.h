/* Slab: objects of one size, named by 64-bit ids that are never valid again once freed.
 *
 * An id is a random upper half and a slot number, so that ids of an earlier incarnation of the
 * daemon name nothing. Objects do not move; memory grows by pages and is kept. One thread. */
#ifndef FB_NODE_SLAB_H
#define FB_NODE_SLAB_H

#include <stddef.h>
#include <stdint.h>

#define FB_SLAB_PAGE_ITEMS 256u

/* First member of every object. */
struct fb_slab_head {
    uint64_t id; /* 0 while free */
    uint32_t next_free;
};

struct fb_slab {
    uint8_t **pages;
    uint32_t page_count;
    uint32_t free_head;
    uint32_t used;
    size_t item_bytes;
    uint64_t random;
};

void fb_slab_init(struct fb_slab *slab, size_t item_bytes);
void fb_slab_fini(struct fb_slab *slab);

/* A zeroed object with its id set, or NULL without memory. */
void *fb_slab_alloc(struct fb_slab *slab);
void fb_slab_free(struct fb_slab *slab, void *item);

/* The object in that place, live or not; place < page_count * FB_SLAB_PAGE_ITEMS. */
void *fb_slab_at(const struct fb_slab *slab, uint32_t place);

/* The object of that id, or NULL. */
void *fb_slab_get(const struct fb_slab *slab, uint64_t id);

#endif
