/* Events: a ring of what happened last, for those who watch. */
#include "pool/node/state.h"

#include <time.h>

void fb_event_push(struct fb_node *node, enum fb_event_kind kind, uint16_t tenant,
                   const uint8_t *space, const uint8_t *key, uint64_t count)
{
    struct fb_event *e = &node->events[node->event_count % FB_EVENT_RING];
    struct timespec now;

    clock_gettime(CLOCK_REALTIME_COARSE, &now);
    *e = (struct fb_event){
        .sequence = node->event_count++,
        .unix_ms = (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000,
        .kind = kind,
        .count = count,
    };
    if (tenant < node->tenant_count) {
        memcpy(e->tenant, node->tenants[tenant].name, sizeof(e->tenant));
    }
    if (space) {
        memcpy(e->space, space, sizeof(e->space));
    }
    if (key) {
        memcpy(e->key, key, sizeof(e->key));
    }
}

bool fb_node_next_event(struct fb_node *node, uint64_t *sequence, struct fb_event *ret_event)
{
    uint64_t oldest = node->event_count > FB_EVENT_RING ? node->event_count - FB_EVENT_RING : 0;

    if (*sequence < oldest) {
        *sequence = oldest;
    }
    if (*sequence >= node->event_count) {
        return false;
    }
    *ret_event = node->events[*sequence % FB_EVENT_RING];
    (*sequence)++;
    return true;
}

uint64_t fb_node_event_count(const struct fb_node *node)
{
    return node->event_count;
}
