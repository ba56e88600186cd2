/* Mailbox: a stack that posters push and the reactor takes whole and reverses. */
#include "pool/node/mailbox.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct fb_mailbox {
    _Atomic(struct fb_mail *) head;
    int fd;
};

enum fb_status fb_mailbox_create(struct fb_mailbox **ret_mailbox)
{
    struct fb_mailbox *m = calloc(1, sizeof(*m));

    if (!m) {
        return FB_ENOMEM;
    }
    m->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (m->fd < 0) {
        free(m);
        return FB_EIO;
    }
    *ret_mailbox = m;
    return FB_OK;
}

void fb_mailbox_destroy(struct fb_mailbox *mailbox)
{
    if (mailbox) {
        close(mailbox->fd);
        free(mailbox);
    }
}

void fb_mailbox_post(struct fb_mailbox *mailbox, struct fb_mail *mail)
{
    struct fb_mail *head = atomic_load_explicit(&mailbox->head, memory_order_relaxed);

    do {
        mail->next = head;
    } while (!atomic_compare_exchange_weak_explicit(&mailbox->head, &head, mail,
                                                    memory_order_release, memory_order_relaxed));
    if (!head) {
        uint64_t one = 1;
        ssize_t n = write(mailbox->fd, &one, sizeof(one));

        (void)n; /* a full counter wakes as well */
    }
}

int fb_mailbox_fd(const struct fb_mailbox *mailbox)
{
    return mailbox->fd;
}

uint32_t fb_mailbox_run(struct fb_mailbox *mailbox)
{
    struct fb_mail *stack, *list = NULL;
    uint64_t count;
    uint32_t n = 0;
    ssize_t got;

    /* In this order, and also without mail: what is posted in between wakes again, and a poster
     * whose mail was taken early still writes. */
    got = read(mailbox->fd, &count, sizeof(count));
    (void)got;
    stack = atomic_exchange_explicit(&mailbox->head, NULL, memory_order_acquire);
    while (stack) {
        struct fb_mail *next = stack->next;

        stack->next = list;
        list = stack;
        stack = next;
    }
    while (list) {
        struct fb_mail *next = list->next;

        list->run(list);
        list = next;
        n++;
    }
    return n;
}
