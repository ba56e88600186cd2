/* Survivors: who holds a lock in the clients directory. */
#include "pool/node/survivor.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

struct fb_survivor {
    struct fb_survivor *next;
    char name[2 * FB_CLIENT_ID_BYTES + 1];
};

/* Whether nobody holds the file's lock; then it is deleted. Directory errors count as alive: a
 * slot is rather kept too long than reused too early. */
static bool is_dead(int dir_fd, const char *name)
{
    int fd = openat(dir_fd, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    bool dead;

    if (fd < 0) {
        return errno == ENOENT;
    }
    dead = flock(fd, LOCK_EX | LOCK_NB) == 0;
    if (dead) {
        unlinkat(dir_fd, name, 0);
    }
    close(fd);
    return dead;
}

static bool is_client_name(const char *name)
{
    return strlen(name) == 2 * FB_CLIENT_ID_BYTES &&
           strspn(name, "0123456789abcdef") == 2 * FB_CLIENT_ID_BYTES;
}

static enum fb_status collect(struct fb_survivors *s, DIR *dir)
{
    struct dirent *entry;

    while ((entry = readdir(dir))) {
        struct fb_survivor *one;

        if (!is_client_name(entry->d_name) || is_dead(s->dir_fd, entry->d_name)) {
            continue;
        }
        one = calloc(1, sizeof(*one));
        if (!one) {
            return FB_ENOMEM;
        }
        memcpy(one->name, entry->d_name, sizeof(one->name));
        one->next = s->list;
        s->list = one;
        s->count++;
    }
    return FB_OK;
}

enum fb_status fb_survivors_init(struct fb_survivors *s, const char *socket_dir, unsigned mode,
                                 int group, struct fb_error *error)
{
    enum fb_status status;
    char path[512];
    DIR *dir;

    *s = (struct fb_survivors){.dir_fd = -1};
    snprintf(path, sizeof(path), "%s/clients", socket_dir);
    if (mkdir(path, 0700) < 0 && errno != EEXIST) {
        return fb_error_set(error, FB_EIO, "cannot create %s: %s", path, strerror(errno));
    }
    s->dir_fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    /* Who may write to the socket may leave a lock file, and delete only his own. */
    if (s->dir_fd < 0 || fchown(s->dir_fd, (uid_t)-1, (gid_t)group) < 0 ||
        fchmod(s->dir_fd, 01000 | mode | (mode & 0444) >> 2) < 0) {
        fb_error_set(error, FB_EIO, "cannot use %s: %s", path, strerror(errno));
        fb_survivors_fini(s);
        return FB_EIO;
    }
    dir = opendir(path);
    status = dir ? collect(s, dir) : FB_EIO;
    if (dir) {
        closedir(dir);
    }
    if (status != FB_OK) {
        fb_error_set(error, status, "cannot read %s: %s", path, fb_status_text(status));
        fb_survivors_fini(s);
    }
    return status;
}

void fb_survivors_fini(struct fb_survivors *s)
{
    while (s->list) {
        struct fb_survivor *one = s->list;

        s->list = one->next;
        free(one);
    }
    if (s->dir_fd >= 0) {
        close(s->dir_fd);
    }
    *s = (struct fb_survivors){.dir_fd = -1};
}

static void drop(struct fb_survivors *s, struct fb_survivor **link)
{
    struct fb_survivor *one = *link;

    *link = one->next;
    s->count--;
    free(one);
}

bool fb_survivors_returned(struct fb_survivors *s, const uint8_t id[FB_CLIENT_ID_BYTES])
{
    char name[2 * FB_CLIENT_ID_BYTES + 1];

    for (size_t i = 0; i < FB_CLIENT_ID_BYTES; i++) {
        snprintf(name + 2 * i, 3, "%02x", id[i]);
    }
    for (struct fb_survivor **link = &s->list; *link; link = &(*link)->next) {
        if (strcmp((*link)->name, name) == 0) {
            drop(s, link);
            return true;
        }
    }
    return false;
}

uint32_t fb_survivors_poll(struct fb_survivors *s)
{
    struct fb_survivor **link = &s->list;
    uint32_t died = 0;

    while (*link) {
        if (is_dead(s->dir_fd, (*link)->name)) {
            drop(s, link);
            died++;
        } else {
            link = &(*link)->next;
        }
    }
    return died;
}
