/* Mailbox: how other threads reach the reactor. Many post, one takes; no locks.
 *
 * A mail is embedded in what it is about and belongs to the mailbox from post until run. */
#ifndef FB_NODE_MAILBOX_H
#define FB_NODE_MAILBOX_H

#include "proto/status.h"

struct fb_mail {
    struct fb_mail *next;
    void (*run)(struct fb_mail *mail); /* on the reactor's thread */
};

struct fb_mailbox;

enum fb_status fb_mailbox_create(struct fb_mailbox **ret_mailbox);
void fb_mailbox_destroy(struct fb_mailbox *mailbox); /* mail still inside is not run */

/* From any thread; safe in a signal handler. */
void fb_mailbox_post(struct fb_mailbox *mailbox, struct fb_mail *mail);

/* Readable when there is mail. */
int fb_mailbox_fd(const struct fb_mailbox *mailbox);

/* Run all mail in order of posting; returns how many. Reactor only. */
uint32_t fb_mailbox_run(struct fb_mailbox *mailbox);

#endif
