/* Worker threads, one per NUMA node. */
#include "pool/node/worker.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX_WORKERS 16

struct worker {
    struct fb_workers *owner;
    pthread_t thread;
    uint32_t numa_node;
    struct fb_job *head;
    struct fb_job **tail;
};

struct fb_workers {
    struct fb_mailbox *mailbox;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    bool stopping;
    uint32_t count;
    uint32_t next;
    struct worker workers[MAX_WORKERS];
};

/* Parse a list such as "0-3,8-11" of a NUMA node's processors. */
static bool node_cpus(uint32_t numa_node, cpu_set_t *ret_set)
{
    char path[96];
    unsigned first, last;
    FILE *file;

    snprintf(path, sizeof(path), "/sys/devices/system/node/node%u/cpulist", numa_node);
    file = fopen(path, "re");
    if (!file) {
        return false;
    }
    CPU_ZERO(ret_set);
    while (fscanf(file, "%u", &first) == 1) {
        last = first;
        if (fscanf(file, "-%u", &last) == EOF) {
            last = first;
        }
        for (unsigned cpu = first; cpu <= last && cpu < CPU_SETSIZE; cpu++) {
            CPU_SET(cpu, ret_set);
        }
        if (fgetc(file) != ',') {
            break;
        }
    }
    fclose(file);
    return CPU_COUNT(ret_set) > 0;
}

static struct fb_job *take_job(struct worker *w)
{
    struct fb_workers *all = w->owner;
    struct fb_job *job;

    pthread_mutex_lock(&all->mutex);
    while (!w->head && !all->stopping) {
        pthread_cond_wait(&all->wake, &all->mutex);
    }
    job = w->head;
    if (job) {
        w->head = job->next;
        if (!w->head) {
            w->tail = &w->head;
        }
    }
    pthread_mutex_unlock(&all->mutex);
    return job;
}

static void *worker_main(void *arg)
{
    struct worker *w = arg;
    struct fb_job *job;
    cpu_set_t set;

    /* Only a preference: in a container some processors may be forbidden. */
    if (node_cpus(w->numa_node, &set)) {
        sched_setaffinity(0, sizeof(set), &set);
    }
    while ((job = take_job(w))) {
        job->work(job);
        fb_mailbox_post(w->owner->mailbox, &job->mail);
    }
    return NULL;
}

enum fb_status fb_workers_create(struct fb_mailbox *mailbox, struct fb_workers **ret_workers)
{
    struct fb_workers *all = calloc(1, sizeof(*all));
    cpu_set_t set;

    if (!all) {
        return FB_ENOMEM;
    }
    all->mailbox = mailbox;
    pthread_mutex_init(&all->mutex, NULL);
    pthread_cond_init(&all->wake, NULL);
    do {
        struct worker *w = &all->workers[all->count];

        *w = (struct worker){.owner = all, .numa_node = all->count, .tail = &w->head};
        if (pthread_create(&w->thread, NULL, worker_main, w) != 0) {
            fb_workers_destroy(all);
            return FB_ENOMEM;
        }
        all->count++;
    } while (all->count < MAX_WORKERS && node_cpus(all->count, &set));
    *ret_workers = all;
    return FB_OK;
}

void fb_workers_destroy(struct fb_workers *workers)
{
    if (!workers) {
        return;
    }
    pthread_mutex_lock(&workers->mutex);
    workers->stopping = true;
    pthread_cond_broadcast(&workers->wake);
    pthread_mutex_unlock(&workers->mutex);
    for (uint32_t i = 0; i < workers->count; i++) {
        pthread_join(workers->workers[i].thread, NULL);
    }
    pthread_cond_destroy(&workers->wake);
    pthread_mutex_destroy(&workers->mutex);
    free(workers);
}

void fb_workers_submit(struct fb_workers *workers, struct fb_job *job)
{
    struct worker *w;

    job->next = NULL;
    pthread_mutex_lock(&workers->mutex);
    w = &workers->workers[workers->next++ % workers->count];
    *w->tail = job;
    w->tail = &job->next;
    pthread_cond_broadcast(&workers->wake);
    pthread_mutex_unlock(&workers->mutex);
}
