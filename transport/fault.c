/* Fault decorator for channels: spoils what is sent, by a seeded choice. */
#include "transport/channel.h"

#include <stdlib.h>
#include <string.h>

struct fault_channel {
    struct fb_channel base;
    struct fb_channel *inner;
    struct fb_channel_faults faults;
    uint64_t state;
    bool is_cut;
};

/* xorshift64*: good enough to choose victims. */
static uint64_t next_random(struct fault_channel *c)
{
    c->state ^= c->state >> 12;
    c->state ^= c->state << 25;
    c->state ^= c->state >> 27;
    return c->state * 0x2545f4914f6cdd1dull;
}

static bool strikes(struct fault_channel *c, uint32_t one_in)
{
    return one_in > 0 && (next_random(c) >> 16) % one_in == 0;
}

static enum fb_status send_flipped(struct fault_channel *c, const void *packet, size_t bytes,
                                   const int *fds, uint32_t fd_count)
{
    uint8_t *copy = malloc(bytes);
    uint64_t bit = (next_random(c) >> 8) % (bytes * 8);
    enum fb_status status;

    if (!copy) {
        return FB_ENOMEM;
    }
    memcpy(copy, packet, bytes);
    copy[bit / 8] ^= (uint8_t)(1u << (bit % 8));
    status = fb_channel_send(c->inner, copy, bytes, fds, fd_count);
    free(copy);
    return status;
}

static enum fb_status fault_send(struct fb_channel *channel, const void *packet, size_t bytes,
                                 const int *fds, uint32_t fd_count)
{
    struct fault_channel *c = (struct fault_channel *)channel;

    c->is_cut |= strikes(c, c->faults.cut);
    if (c->is_cut) {
        return FB_ECONN;
    }
    if (strikes(c, c->faults.drop)) {
        return FB_OK;
    }
    if (bytes > 1 && strikes(c, c->faults.truncate)) {
        return fb_channel_send(c->inner, packet, bytes / 2, fds, fd_count);
    }
    if (bytes > 0 && strikes(c, c->faults.flip)) {
        return send_flipped(c, packet, bytes, fds, fd_count);
    }
    if (strikes(c, c->faults.duplicate)) {
        fb_channel_send(c->inner, packet, bytes, fds, fd_count);
    }
    return fb_channel_send(c->inner, packet, bytes, fds, fd_count);
}

static enum fb_status fault_recv(struct fb_channel *channel, void *packet, size_t capacity,
                                 size_t *ret_bytes, int *ret_fds, uint32_t *ret_fd_count)
{
    struct fault_channel *c = (struct fault_channel *)channel;

    if (c->is_cut) {
        return FB_ECONN;
    }
    return fb_channel_recv(c->inner, packet, capacity, ret_bytes, ret_fds, ret_fd_count);
}

static int fault_fd(const struct fb_channel *channel)
{
    return fb_channel_fd(((const struct fault_channel *)channel)->inner);
}

static void fault_destroy(struct fb_channel *channel)
{
    struct fault_channel *c = (struct fault_channel *)channel;

    fb_channel_destroy(c->inner);
    free(c);
}

static const struct fb_channel_ops fault_ops = {
    .name = "fault",
    .send = fault_send,
    .recv = fault_recv,
    .fd = fault_fd,
    .destroy = fault_destroy,
};

enum fb_status fb_channel_fault(struct fb_channel *inner, const struct fb_channel_faults *faults,
                                struct fb_channel **ret_channel)
{
    struct fault_channel *c = malloc(sizeof(*c));

    if (!c) {
        return FB_ENOMEM;
    }
    *c = (struct fault_channel){
        .base.ops = &fault_ops, .inner = inner, .faults = *faults, .state = faults->seed | 1};
    *ret_channel = &c->base;
    return FB_OK;
}
