/* Slab of fixed-size objects. */
#include "pool/node/slab.h"

#include "proto/assert.h"
#include "proto/sum.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define NO_ITEM UINT32_MAX

void *fb_slab_at(const struct fb_slab *slab, uint32_t place)
{
    return slab->pages[place / FB_SLAB_PAGE_ITEMS] +
           (place % FB_SLAB_PAGE_ITEMS) * slab->item_bytes;
}

void fb_slab_init(struct fb_slab *slab, size_t item_bytes)
{
    *slab = (struct fb_slab){.item_bytes = item_bytes, .free_head = NO_ITEM};
    FB_ASSERT(getrandom(&slab->random, sizeof(slab->random), 0) == sizeof(slab->random));
}

void fb_slab_fini(struct fb_slab *slab)
{
    for (uint32_t i = 0; i < slab->page_count; i++) {
        free(slab->pages[i]);
    }
    free(slab->pages);
    *slab = (struct fb_slab){0};
}

static int grow(struct fb_slab *slab)
{
    uint32_t first = slab->page_count * FB_SLAB_PAGE_ITEMS;
    uint8_t **pages = realloc(slab->pages, (slab->page_count + 1) * sizeof(*pages));

    if (!pages) {
        return -1;
    }
    slab->pages = pages;
    pages[slab->page_count] = calloc(FB_SLAB_PAGE_ITEMS, slab->item_bytes);
    if (!pages[slab->page_count]) {
        return -1;
    }
    slab->page_count++;
    for (uint32_t i = FB_SLAB_PAGE_ITEMS; i-- > 0;) {
        struct fb_slab_head *head = fb_slab_at(slab, first + i);

        head->next_free = slab->free_head;
        slab->free_head = first + i;
    }
    return 0;
}

void *fb_slab_alloc(struct fb_slab *slab)
{
    struct fb_slab_head *head;
    uint32_t index;

    if (slab->free_head == NO_ITEM && grow(slab) < 0) {
        return NULL;
    }
    index = slab->free_head;
    head = fb_slab_at(slab, index);
    slab->free_head = head->next_free;
    slab->used++;
    memset(head, 0, slab->item_bytes);
    slab->random = fb_mix64(slab->random);
    /* The upper half is never 0 or all ones, so that no id is. */
    head->id = (slab->random % (UINT32_MAX - 1) + 1) << 32 | index;
    return head;
}

void fb_slab_free(struct fb_slab *slab, void *item)
{
    struct fb_slab_head *head = item;
    uint32_t index = (uint32_t)head->id;

    FB_ASSERT(head->id != 0);
    head->id = 0;
    head->next_free = slab->free_head;
    slab->free_head = index;
    slab->used--;
}

void *fb_slab_get(const struct fb_slab *slab, uint64_t id)
{
    uint32_t index = (uint32_t)id;
    struct fb_slab_head *head;

    if (index / FB_SLAB_PAGE_ITEMS >= slab->page_count) {
        return NULL;
    }
    head = fb_slab_at(slab, index);
    return id != 0 && head->id == id ? head : NULL;
}
