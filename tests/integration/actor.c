/* Actors: starting, talking, ending. */
#include "tests/integration/actor.h"

#include "tests/integration/daemon.h"

#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define MAX_ARGS 16

void actor_start(struct actor *actor, const char *role, const char *const *args)
{
    const char *list[MAX_ARGS] = {"/proc/self/exe", role};
    int from[2], to[2];

    for (int n = 2; *args && n + 1 < MAX_ARGS; n++) {
        list[n] = *args++;
    }
    assert_int_equal(pipe2(from, O_CLOEXEC), 0);
    assert_int_equal(pipe2(to, O_CLOEXEC), 0);
    actor->pid = fork();
    assert_true(actor->pid >= 0);
    if (actor->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(to[0], STDIN_FILENO);
        dup2(from[1], STDOUT_FILENO);
        execv(list[0], (char **)(uintptr_t)list);
        _exit(127);
    }
    close(from[1]);
    close(to[0]);
    actor->in = from[0];
    actor->out = to[1];
}

void actor_expect(struct actor *actor, const char *line)
{
    uint64_t until = clock_ms() + 3 * DAEMON_WAIT_MS;
    char said[128] = "";
    size_t n = 0;

    while (n + 1 < sizeof(said) && (n == 0 || said[n - 1] != '\n')) {
        struct pollfd p = {.fd = actor->in, .events = POLLIN};
        uint64_t now = clock_ms();

        if (now >= until || poll(&p, 1, (int)(until - now)) != 1 ||
            read(actor->in, said + n, 1) != 1) {
            fail_msg("the actor should say \"%s\", but ended or hangs", line);
        }
        n++;
    }
    said[n - 1] = 0;
    assert_string_equal(said, line);
}

void actor_tell(struct actor *actor)
{
    assert_int_equal(write(actor->out, "\n", 1), 1);
}

static int end(struct actor *actor)
{
    int status = 0;

    assert_int_equal(waitpid(actor->pid, &status, 0), actor->pid);
    close(actor->in);
    close(actor->out);
    return status;
}

void actor_kill(struct actor *actor)
{
    kill(actor->pid, SIGKILL);
    end(actor);
}

void actor_join(struct actor *actor)
{
    int status = end(actor);

    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

void actor_say(const char *line)
{
    printf("%s\n", line);
    fflush(stdout);
}

void actor_wait(void)
{
    char c;

    if (read(STDIN_FILENO, &c, 1) != 1) {
        _exit(EXIT_FAILURE); /* the test has gone */
    }
}

void actor_check(int ok, const char *file, int line, const char *text)
{
    if (!ok) {
        fprintf(stderr, "%s:%d: an actor's check failed: %s\n", file, line, text);
        _exit(EXIT_FAILURE);
    }
}
