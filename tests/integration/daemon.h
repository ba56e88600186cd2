/* A forebayd of a test: a process of its own, in directories of its own.
 *
 * Functions assert what they need and fail the test otherwise; they are called from a test's main
 * thread. Every wait is for a condition and has an end. A daemon dies with its test program. */
#ifndef FB_TESTS_DAEMON_H
#define FB_TESTS_DAEMON_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define DAEMON_PATH_BYTES 80
#define DAEMON_WAIT_MS    10000 /* for what should take no time, on a machine that is busy */
#define DAEMON_GONE       (-1)  /* exit status of one that a signal ended */

struct daemon {
    char dir[DAEMON_PATH_BYTES];       /* sockets, log */
    char chunk_dir[DAEMON_PATH_BYTES]; /* to be changed before the first start, if at all */
    char socket[DAEMON_PATH_BYTES];    /* of tenant default */
    char http[DAEMON_PATH_BYTES];
    char log[DAEMON_PATH_BYTES];
    const char *const *flags;
    pid_t pid; /* 0: not running */
};

/* Make and remove the directories. fini kills what runs. */
void daemon_init(struct daemon *d);
void daemon_fini(struct daemon *d);

/* Start and wait until it is ready. flags: more flags, ended by NULL; borrowed until fini. */
void daemon_start(struct daemon *d, const char *const *flags);

/* Start without waiting, as daemon_start. */
void daemon_launch(struct daemon *d, const char *const *flags);

/* With the flags of the last start. */
void daemon_restart(struct daemon *d);

void daemon_signal(const struct daemon *d, int number);

/* Wait for its end; returns its exit status or DAEMON_GONE. */
int daemon_wait(struct daemon *d);

/* SIGKILL and wait. */
void daemon_kill(struct daemon *d);

/* A metric's value; DAEMON_NO_METRIC when it is not served (any more). */
#define DAEMON_NO_METRIC UINT64_MAX
uint64_t daemon_metric(const struct daemon *d, const char *name);
void daemon_await_metric(const struct daemon *d, const char *name, uint64_t value);

/* Nothing leased, reserved or quarantined. */
void daemon_await_nothing_held(const struct daemon *d);

bool daemon_log_has(const struct daemon *d, const char *text);
void daemon_await_log(const struct daemon *d, const char *text);

/* Print it, when a daemon did not do what it should. */
void daemon_show_log(const struct daemon *d);

/* Bytes of the files in its chunk directory. */
uint64_t daemon_chunk_bytes(const struct daemon *d);

/* Path of any chunk file; false when there is none. */
bool daemon_find_chunk(const struct daemon *d, char *out, size_t capacity);

uint64_t clock_ms(void);
void nap(void); /* one round of a wait */

#endif
