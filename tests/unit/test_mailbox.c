/* Mailboxes under many posters, and workers that post to one. */
#include "pool/node/worker.h"

#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

#include <cmocka.h>

#define POSTERS 8
#define MAILS   20000 /* of each */

struct letter {
    struct fb_mail mail;
    struct poster *poster;
    uint32_t number;
};

struct poster {
    pthread_t thread;
    struct fb_mailbox *mailbox;
    struct letter *letters; /* [MAILS] */
    uint32_t next;          /* number to come; the reader's */
    bool in_order;          /* so far; the reader's */
};

static void on_letter(struct fb_mail *mail)
{
    struct letter *letter = (struct letter *)mail;
    struct poster *poster = letter->poster;

    poster->in_order &= letter->number == poster->next;
    poster->next++;
    memset(letter, 0xff, sizeof(*letter)); /* it is ours again */
}

static void *post_all(void *arg)
{
    struct poster *poster = arg;

    for (uint32_t i = 0; i < MAILS; i++) {
        fb_mailbox_post(poster->mailbox, &poster->letters[i].mail);
    }
    return NULL;
}

static void begin(struct poster *posters, struct fb_mailbox *mailbox)
{
    for (uint32_t p = 0; p < POSTERS; p++) {
        struct letter *letters = calloc(MAILS, sizeof(*letters));

        assert_non_null(letters);
        for (uint32_t i = 0; i < MAILS; i++) {
            letters[i] = (struct letter){.mail.run = on_letter, .poster = &posters[p], .number = i};
        }
        posters[p] = (struct poster){.mailbox = mailbox, .letters = letters, .in_order = true};
    }
    for (uint32_t p = 0; p < POSTERS; p++) {
        assert_int_equal(pthread_create(&posters[p].thread, NULL, post_all, &posters[p]), 0);
    }
}

static void end(struct poster *posters)
{
    for (uint32_t p = 0; p < POSTERS; p++) {
        pthread_join(posters[p].thread, NULL);
        free(posters[p].letters);
        assert_true(posters[p].in_order);
        assert_int_equal(posters[p].next, MAILS);
    }
}

static bool is_readable(const struct fb_mailbox *mailbox, int timeout_ms)
{
    struct pollfd p = {.fd = fb_mailbox_fd(mailbox), .events = POLLIN};

    return poll(&p, 1, timeout_ms) == 1;
}

/* As the reactor reads: only when woken. A wake that were lost would end this by its time-out. */
static void nothing_is_lost(void **state)
{
    struct poster posters[POSTERS];
    struct fb_mailbox *mailbox;
    uint32_t got = 0;

    (void)state;
    assert_int_equal(fb_mailbox_create(&mailbox), FB_OK);
    begin(posters, mailbox);
    while (got < POSTERS * MAILS) {
        assert_true(is_readable(mailbox, 10000));
        got += fb_mailbox_run(mailbox);
    }
    end(posters);
    assert_false(is_readable(mailbox, 0));
    fb_mailbox_destroy(mailbox);
}

/* A reader that does not wait for the descriptor takes mail before its poster has written there:
 * the wake that is left over must not last. */
static void late_wakes_do_not_last(void **state)
{
    struct poster posters[POSTERS];
    struct fb_mailbox *mailbox;
    uint32_t got = 0;

    (void)state;
    assert_int_equal(fb_mailbox_create(&mailbox), FB_OK);
    begin(posters, mailbox);
    while (got < POSTERS * MAILS) {
        got += fb_mailbox_run(mailbox);
    }
    end(posters);
    assert_int_equal(eventfd_write(fb_mailbox_fd(mailbox), 1), 0); /* the last one, very late */
    assert_int_equal(fb_mailbox_run(mailbox), 0);
    assert_false(is_readable(mailbox, 0));
    fb_mailbox_destroy(mailbox);
}

struct reposted {
    struct fb_mail mail;
    struct fb_mailbox *mailbox;
    uint32_t runs;
};

static void repost(struct fb_mail *mail)
{
    struct reposted *r = (struct reposted *)mail;

    if (++r->runs < 3) {
        fb_mailbox_post(r->mailbox, mail);
    }
}

/* Mail that posts itself again comes in the next round, so that a round ends. */
static void mail_may_post(void **state)
{
    struct reposted r = {.mail.run = repost};

    (void)state;
    assert_int_equal(fb_mailbox_create(&r.mailbox), FB_OK);
    fb_mailbox_post(r.mailbox, &r.mail);
    for (uint32_t n = 1; n <= 3; n++) {
        assert_true(is_readable(r.mailbox, 0));
        assert_int_equal(fb_mailbox_run(r.mailbox), 1);
        assert_int_equal(r.runs, n);
    }
    assert_false(is_readable(r.mailbox, 0));
    assert_int_equal(fb_mailbox_run(r.mailbox), 0);
    fb_mailbox_destroy(r.mailbox);
}

static void mail_left_inside_is_not_run(void **state)
{
    struct reposted r = {.mail.run = repost};

    (void)state;
    assert_int_equal(fb_mailbox_create(&r.mailbox), FB_OK);
    fb_mailbox_post(r.mailbox, &r.mail);
    fb_mailbox_destroy(r.mailbox);
    assert_int_equal(r.runs, 0);
    fb_mailbox_destroy(NULL);
}

/* --- workers --- */

#define JOBS 200

struct task {
    struct fb_job job;
    pthread_t worked_by;
    bool worked;
    bool told;
};

static void work(struct fb_job *job)
{
    struct task *task = (struct task *)job;

    task->worked_by = pthread_self();
    task->worked = true;
}

static void tell(struct fb_mail *mail)
{
    struct task *task = (struct task *)mail;

    task->told = task->worked;
}

/* Whoever submitted a job waits for its mail: it comes also when the workers end meanwhile. */
static void all_that_was_submitted_is_done(void **state)
{
    struct task *tasks = calloc(JOBS, sizeof(*tasks));
    struct fb_mailbox *mailbox;
    struct fb_workers *workers;

    (void)state;
    assert_non_null(tasks);
    assert_int_equal(fb_mailbox_create(&mailbox), FB_OK);
    assert_int_equal(fb_workers_create(mailbox, &workers), FB_OK);
    for (uint32_t i = 0; i < JOBS; i++) {
        tasks[i].job = (struct fb_job){.mail.run = tell, .work = work};
        fb_workers_submit(workers, &tasks[i].job);
    }
    fb_workers_destroy(workers);
    assert_int_equal(fb_mailbox_run(mailbox), JOBS);
    for (uint32_t i = 0; i < JOBS; i++) {
        assert_true(tasks[i].told);
        assert_false(pthread_equal(tasks[i].worked_by, pthread_self()));
    }
    fb_mailbox_destroy(mailbox);
    fb_workers_destroy(NULL);
    free(tasks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_is_lost),
        cmocka_unit_test(late_wakes_do_not_last),
        cmocka_unit_test(mail_may_post),
        cmocka_unit_test(mail_left_inside_is_not_run),
        cmocka_unit_test(all_that_was_submitted_is_done),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
