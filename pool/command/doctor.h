/* Checks of `forebay doctor`: each looks at one thing and says what it found and how to mend it.
 * Checks change nothing on the machine. */
#ifndef FB_COMMAND_DOCTOR_H
#define FB_COMMAND_DOCTOR_H

#include "pool/command/cli.h"
#include "pool/node/config.h"

#include <stddef.h>

enum fb_finding { FB_FINDING_OK, FB_FINDING_WARN, FB_FINDING_FAIL };

struct fb_doctor {
    const struct fb_cli *cli;
    struct fb_config config; /* the daemon's, or its defaults */
};

struct fb_result {
    enum fb_finding finding;
    char found[256];
    char remedy[256]; /* empty when there is nothing to do */
};

struct fb_check {
    const char *name;
    void (*look)(const struct fb_doctor *doctor, struct fb_result *r);
};

/* Of the machine (doctor_machine.c); of the daemon and where it lives (doctor_daemon.c). */
extern const struct fb_check fb_machine_checks[];
extern const size_t fb_machine_check_count;
extern const struct fb_check fb_daemon_checks[];
extern const size_t fb_daemon_check_count;

/* Fill a result; remedy may be NULL. */
void fb_result_set(struct fb_result *r, enum fb_finding finding, const char *remedy,
                   const char *format, ...) __attribute__((format(printf, 4, 5)));

/* The first line of a file of /proc or /sys, without its end; false when it cannot be read. */
bool fb_doctor_read_line(const char *path, char *out, size_t capacity);

#endif
