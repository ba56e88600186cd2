/* Workers: threads that do what would stop the reactor (allocating and touching memory).
 *
 * One thread per NUMA node, kept on that node's processors, so that memory a worker touches first
 * is local there. Jobs are taken round robin by thread. */
#ifndef FB_NODE_WORKER_H
#define FB_NODE_WORKER_H

#include "pool/node/mailbox.h"

struct fb_job {
    struct fb_mail mail; /* posted back when done; mail.run sees the result */
    void (*work)(struct fb_job *job);
    struct fb_job *next;
};

struct fb_workers;

/* mailbox  borrowed until fb_workers_destroy */
enum fb_status fb_workers_create(struct fb_mailbox *mailbox, struct fb_workers **ret_workers);

/* Waits until all that was submitted is done and its mail posted. */
void fb_workers_destroy(struct fb_workers *workers);

void fb_workers_submit(struct fb_workers *workers, struct fb_job *job);

#endif
