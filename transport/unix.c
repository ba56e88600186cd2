/* Channels over unix SOCK_SEQPACKET sockets. errno is translated here. */
#include "transport/channel.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define BACKLOG 128

struct unix_channel {
    struct fb_channel base;
    int fd;
};

union control {
    struct cmsghdr header;
    char bytes[CMSG_SPACE(sizeof(int) * FB_CHANNEL_MAX_FDS)];
};

static enum fb_status unix_send(struct fb_channel *channel, const void *packet, size_t bytes,
                                const int *fds, uint32_t fd_count)
{
    struct unix_channel *c = (struct unix_channel *)channel;
    struct iovec iov = {.iov_base = (void *)(uintptr_t)packet, .iov_len = bytes};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    union control control;

    if (fd_count > FB_CHANNEL_MAX_FDS) {
        return FB_ELIMIT;
    }
    if (fd_count > 0) {
        struct cmsghdr *cmsg = &control.header;

        memset(&control, 0, sizeof(control));
        msg.msg_control = &control;
        msg.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
        cmsg->cmsg_level = SOL_SOCKET;
        cmsg->cmsg_type = SCM_RIGHTS;
        cmsg->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
        memcpy(CMSG_DATA(cmsg), fds, sizeof(int) * fd_count);
    }
    for (;;) {
        if (sendmsg(c->fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) {
            return FB_OK;
        }
        if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS) {
            return FB_AGAIN;
        }
        if (errno == EMSGSIZE) {
            return FB_ELIMIT;
        }
        if (errno != EINTR) {
            return FB_ECONN;
        }
    }
}

static void close_fds(const int *fds, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        close(fds[i]);
    }
}

/* Collect passed descriptors. */
static uint32_t take_fds(struct msghdr *msg, int *ret_fds)
{
    uint32_t n = 0;

    for (struct cmsghdr *cmsg = CMSG_FIRSTHDR(msg); cmsg; cmsg = CMSG_NXTHDR(msg, cmsg)) {
        uint32_t here;

        if (cmsg->cmsg_level != SOL_SOCKET || cmsg->cmsg_type != SCM_RIGHTS) {
            continue;
        }
        here = (uint32_t)((cmsg->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(ret_fds + n, CMSG_DATA(cmsg), here * sizeof(int));
        n += here;
    }
    return n;
}

static enum fb_status unix_recv(struct fb_channel *channel, void *packet, size_t capacity,
                                size_t *ret_bytes, int *ret_fds, uint32_t *ret_fd_count)
{
    struct unix_channel *c = (struct unix_channel *)channel;
    struct iovec iov = {.iov_base = packet, .iov_len = capacity};
    union control control;
    struct msghdr msg = {.msg_iov = &iov,
                         .msg_iovlen = 1,
                         .msg_control = &control,
                         .msg_controllen = sizeof(control)};
    uint32_t fd_count;
    ssize_t n;

    do {
        n = recvmsg(c->fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    } while (n < 0 && errno == EINTR);
    if (n < 0) {
        return errno == EAGAIN || errno == EWOULDBLOCK ? FB_AGAIN : FB_ECONN;
    }
    fd_count = take_fds(&msg, ret_fds);
    if (n == 0 || (msg.msg_flags & (MSG_TRUNC | MSG_CTRUNC))) {
        close_fds(ret_fds, fd_count);
        return n == 0 ? FB_ECONN : FB_EPROTO;
    }
    *ret_bytes = (size_t)n;
    *ret_fd_count = fd_count;
    return FB_OK;
}

static int unix_fd(const struct fb_channel *channel)
{
    return ((const struct unix_channel *)channel)->fd;
}

static void unix_destroy(struct fb_channel *channel)
{
    struct unix_channel *c = (struct unix_channel *)channel;

    close(c->fd);
    free(c);
}

static const struct fb_channel_ops unix_ops = {
    .name = "unix",
    .send = unix_send,
    .recv = unix_recv,
    .fd = unix_fd,
    .destroy = unix_destroy,
};

/* Takes fd, also on failure. */
static enum fb_status wrap_fd(int fd, struct fb_channel **ret_channel)
{
    struct unix_channel *c = malloc(sizeof(*c));

    if (!c) {
        close(fd);
        return FB_ENOMEM;
    }
    *c = (struct unix_channel){.base.ops = &unix_ops, .fd = fd};
    *ret_channel = &c->base;
    return FB_OK;
}

static enum fb_status make_address(const char *path, struct sockaddr_un *ret_address,
                                   struct fb_error *error)
{
    size_t n = strlen(path);

    *ret_address = (struct sockaddr_un){.sun_family = AF_UNIX};
    if (n >= sizeof(ret_address->sun_path)) {
        return fb_error_set(error, FB_EINVAL,
                            "socket path \"%s\" has %zu characters; at most %zu are possible", path,
                            n, sizeof(ret_address->sun_path) - 1);
    }
    memcpy(ret_address->sun_path, path, n + 1);
    return FB_OK;
}

enum fb_status fb_unix_connect(const char *path, struct fb_channel **ret_channel,
                               struct fb_error *error)
{
    struct sockaddr_un address;
    enum fb_status status = make_address(path, &address, error);
    int fd, e;

    if (status != FB_OK) {
        return status;
    }
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        return fb_error_set(error, FB_ENOMEM, "socket: %s", strerror(errno));
    }
    if (connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
        e = errno;
        close(fd);
        return fb_error_set(error, e == EAGAIN ? FB_AGAIN : FB_ECONN,
                            "no daemon answers at %s (%s): is forebayd running, and may this user "
                            "write to its socket?",
                            path, strerror(e));
    }
    return wrap_fd(fd, ret_channel);
}

enum fb_status fb_unix_listen(const char *path, mode_t mode, gid_t group, int *ret_fd,
                              struct fb_error *error)
{
    struct sockaddr_un address;
    struct fb_channel *probe = NULL;
    enum fb_status status = make_address(path, &address, error);
    int fd;

    if (status != FB_OK) {
        return status;
    }
    status = fb_unix_connect(path, &probe, NULL);
    if (status == FB_OK) {
        fb_channel_destroy(probe);
    }
    if (status == FB_OK || status == FB_AGAIN) {
        return fb_error_set(error, FB_BUSY,
                            "another daemon listens at %s; stop it or choose another run_dir",
                            path);
    }
    unlink(path);
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        return fb_error_set(error, FB_EIO, "socket: %s", strerror(errno));
    }
    if (bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0 ||
        chown(path, (uid_t)-1, group) < 0 || chmod(path, mode) < 0 || listen(fd, BACKLOG) < 0) {
        status = fb_error_set(error, FB_EIO, "cannot listen at %s: %s", path, strerror(errno));
        close(fd);
        return status;
    }
    *ret_fd = fd;
    return FB_OK;
}

enum fb_status fb_unix_accept(int listen_fd, struct fb_channel **ret_channel)
{
    int fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

    if (fd < 0) {
        return errno == EMFILE || errno == ENFILE || errno == ENOMEM ? FB_EIO : FB_AGAIN;
    }
    return wrap_fd(fd, ret_channel);
}

enum fb_status fb_unix_pair(struct fb_channel *ret_channels[2])
{
    struct fb_channel *first, *second;
    int fds[2];

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) < 0) {
        return FB_EIO;
    }
    if (wrap_fd(fds[0], &first) != FB_OK) {
        close(fds[1]);
        return FB_ENOMEM;
    }
    if (wrap_fd(fds[1], &second) != FB_OK) {
        fb_channel_destroy(first);
        return FB_ENOMEM;
    }
    ret_channels[0] = first;
    ret_channels[1] = second;
    return FB_OK;
}
