/* Actors: other processes of a test, which run this program again in a role of their own.
 *
 * They talk in lines: the actor says where it is, the test says when to go on, and may kill it in
 * between. An actor dies with its test program. */
#ifndef FB_TESTS_ACTOR_H
#define FB_TESTS_ACTOR_H

#include <stdint.h>
#include <sys/types.h>

struct actor {
    pid_t pid;
    int in;  /* what it says */
    int out; /* what it is told */
};

/* Run this program as `program ROLE ARG...`; args are ended by NULL. */
void actor_start(struct actor *actor, const char *role, const char *const *args);

/* Wait for its next line and assert that it is this one. */
void actor_expect(struct actor *actor, const char *line);

void actor_tell(struct actor *actor);

/* Kill it and wait for its end. */
void actor_kill(struct actor *actor);

/* Wait for its end and assert that it ended well. */
void actor_join(struct actor *actor);

/* In the actor: say a line; wait until told to go on. */
void actor_say(const char *line);
void actor_wait(void);

/* In the actor: end as failed unless the condition holds. */
#define ACTOR_CHECK(condition) actor_check((condition), __FILE__, __LINE__, #condition)
void actor_check(int ok, const char *file, int line, const char *text);

#endif
