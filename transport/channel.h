/* Channel: packets with descriptors between two processes of one host, in order, never split.
 *
 * One ops table, worn by the unix socket (also as a socket pair inside one process) and by the
 * fault decorator. Nothing here blocks; callers poll the descriptor. A channel belongs to one
 * thread at a time. */
#ifndef FB_TRANSPORT_CHANNEL_H
#define FB_TRANSPORT_CHANNEL_H

#include "proto/status.h"

#include <stddef.h>
#include <sys/types.h>

#define FB_CHANNEL_MAX_FDS 64

struct fb_channel;

struct fb_channel_ops {
    const char *name;

    /* Send one packet. Descriptors are borrowed.
     * returns FB_OK | FB_AGAIN (peer does not read) | FB_ELIMIT (packet too large) | FB_ECONN */
    enum fb_status (*send)(struct fb_channel *channel, const void *packet, size_t bytes,
                           const int *fds, uint32_t fd_count);

    /* Receive one packet. Descriptors become the caller's, at most FB_CHANNEL_MAX_FDS.
     * returns FB_OK | FB_AGAIN (nothing there) | FB_EPROTO (cut packet) | FB_ECONN (or an empty
     * packet, which looks like the end) */
    enum fb_status (*recv)(struct fb_channel *channel, void *packet, size_t capacity,
                           size_t *ret_bytes, int *ret_fds, uint32_t *ret_fd_count);

    int (*fd)(const struct fb_channel *channel); /* to poll */
    void (*destroy)(struct fb_channel *channel);
};

struct fb_channel {
    const struct fb_channel_ops *ops;
};

static inline enum fb_status fb_channel_send(struct fb_channel *c, const void *packet, size_t bytes,
                                             const int *fds, uint32_t fd_count)
{
    return c->ops->send(c, packet, bytes, fds, fd_count);
}

static inline enum fb_status fb_channel_recv(struct fb_channel *c, void *packet, size_t capacity,
                                             size_t *ret_bytes, int *ret_fds,
                                             uint32_t *ret_fd_count)
{
    return c->ops->recv(c, packet, capacity, ret_bytes, ret_fds, ret_fd_count);
}

static inline int fb_channel_fd(const struct fb_channel *c)
{
    return c->ops->fd(c);
}

static inline void fb_channel_destroy(struct fb_channel *c)
{
    if (c) {
        c->ops->destroy(c);
    }
}

/* Connect to a listening socket. Never waits: a full backlog is FB_AGAIN.
 * returns FB_OK | FB_AGAIN | FB_ECONN (nobody listens) | FB_EINVAL (path too long) | FB_ENOMEM */
enum fb_status fb_unix_connect(const char *path, struct fb_channel **ret_channel,
                               struct fb_error *error);

/* Listen at path, replacing a socket nobody listens on. mode and group (-1: keep) are set before
 * anyone can connect.
 * returns FB_OK | FB_BUSY (somebody listens there) | FB_EINVAL | FB_EIO */
enum fb_status fb_unix_listen(const char *path, mode_t mode, gid_t group, int *ret_fd,
                              struct fb_error *error);

/* returns FB_OK | FB_AGAIN (nobody waits) | FB_EIO */
enum fb_status fb_unix_accept(int listen_fd, struct fb_channel **ret_channel);

/* Two ends of one channel in this process. */
enum fb_status fb_unix_pair(struct fb_channel *ret_channels[2]);

/* Fault decorator: what goes wrong, as one in n packets (0: never), chosen by seed. */
struct fb_channel_faults {
    uint64_t seed;
    uint32_t drop;      /* sent packets vanish */
    uint32_t duplicate; /* sent packets arrive twice */
    uint32_t truncate;  /* sent packets lose their second half */
    uint32_t flip;      /* sent packets have one bit flipped */
    uint32_t cut;       /* the connection is lost */
};

/* Takes `inner`, which the decorator destroys. */
enum fb_status fb_channel_fault(struct fb_channel *inner, const struct fb_channel_faults *faults,
                                struct fb_channel **ret_channel);

#endif
