/* forebay: the command for operators and for trying the pool. */
#include "pool/command/cli.h"
#include "pool/command/output.h"

#include "pool/client/forebay.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct command {
    const char *name;
    const char *help;
    int (*run)(struct fb_cli *cli, int argc, char **argv);
};

static const struct command commands[] = {
    {"status", "one node at a glance", fb_run_status},
    {"spaces", "the spaces a node knows", fb_run_spaces},
    {"watch", "what happens from now on, an event a line", fb_run_watch},
    {"purge", "make blocks of a tenant unfindable", fb_run_purge},
    {"drain", "let a node finish and refuse new work", fb_run_drain},
    {"put", "put the KV of a made-up prompt", fb_run_put},
    {"lookup", "say how much of a prompt is there", fb_run_lookup},
    {"get", "get a prompt and check it", fb_run_get},
    {"replay", "replay a request trace and check all that comes back", fb_run_replay},
    {"bench", "quick figures against memcpy in the same run", fb_run_bench},
    {"why", "what the keys of two requests are made from, and what differs", fb_run_why},
    {"doctor", "look for what would make the pool slow or fail here", fb_run_doctor},
};

/* What the top level leaves: the command and all that follows it. */
struct top_input {
    struct fb_cli *cli;
    int rest; /* index in argv */
    bool version;
};

static error_t parse_top(int key, char *arg, struct argp_state *state)
{
    struct top_input *input = state->input;

    (void)arg;
    switch (key) {
    case ARGP_KEY_INIT: fb_cli_init_child(state); return 0;
    case 'V': input->version = true; return 0;
    case ARGP_KEY_ARG:
        input->rest = state->next - 1;
        state->next = state->argc;
        return 0;
    case ARGP_KEY_NO_ARGS:
        if (!input->version) {
            argp_error(state, "which command? (--help lists them)");
        }
        return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

/* The list of commands goes behind the options, from the table. */
static char *filter_help(int key, const char *text, void *input)
{
    char *list = NULL;
    size_t bytes;
    FILE *out;

    (void)input;
    if (key != ARGP_KEY_HELP_POST_DOC || !(out = open_memstream(&list, &bytes))) {
        return (char *)text;
    }
    fputs("Commands (COMMAND --help says more):\n", out);
    for (size_t i = 0; i < FB_COUNT_OF(commands); i++) {
        fprintf(out, "  %-8s %s\n", commands[i].name, commands[i].help);
    }
    return fclose(out) == 0 ? list : (char *)text;
}

static int run_command(struct fb_cli *cli, int argc, char **argv)
{
    char name[32];

    for (size_t i = 0; i < FB_COUNT_OF(commands); i++) {
        if (!strcmp(argv[0], commands[i].name)) {
            snprintf(name, sizeof(name), "forebay %s", commands[i].name);
            argv[0] = name; /* what its messages begin with */
            return commands[i].run(cli, argc, argv);
        }
    }
    fb_fail("\"%s\" is not a command; forebay --help lists them", argv[0]);
    return argp_err_exit_status;
}

int main(int argc, char **argv)
{
    static const struct argp_option options[] = {{"version", 'V', NULL, 0, "Print the version", -1},
                                                 {0}};
    static const struct argp argp = {
        .options = options,
        .parser = parse_top,
        .args_doc = "COMMAND [...]",
        .doc = "The pool of attention keys and values: look at it, look after it, try it."
               "\v-", /* replaced by filter_help */
        .children = fb_cli_children,
        .help_filter = filter_help,
    };
    const char *socket = getenv("FOREBAY_SOCKET");
    const char *grpc = getenv("FOREBAY_GRPC");
    struct fb_cli cli = {socket ? socket : FB_DEFAULT_SOCKET, grpc ? grpc : FB_DEFAULT_GRPC, false};
    struct top_input input = {.cli = &cli};
    int status;

    argp_parse(&argp, argc, argv, ARGP_IN_ORDER, NULL, &input);
    if (input.version) {
        printf("forebay %s\n", fb_version());
        return EXIT_SUCCESS;
    }
    status = run_command(&cli, argc - input.rest, argv + input.rest);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        return fb_fail("cannot write the result: %s", strerror(errno));
    }
    return status;
}
