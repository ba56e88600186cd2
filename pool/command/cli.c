/* The options that all subcommands share. */
#include "pool/command/cli.h"

#include "pool/client/forebay.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

static const struct argp_option common_options[] = {
    {"socket", 's', "PATH", 0, "Socket of a tenant ($FOREBAY_SOCKET, else " FB_DEFAULT_SOCKET ")",
     -2},
    {"grpc", 'g', "ADDRESS", 0,
     "Control plane of a daemon ($FOREBAY_GRPC, else " FB_DEFAULT_GRPC ")", -2},
    {"json", 'j', NULL, 0, "Print JSON", -2},
    {0},
};

static error_t parse_common(int key, char *arg, struct argp_state *state)
{
    struct fb_cli *cli = state->input;

    switch (key) {
    case 's': cli->socket = arg; return 0;
    case 'g': cli->grpc = arg; return 0;
    case 'j': cli->json = true; return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp common_argp = {.options = common_options, .parser = parse_common};

const struct argp_child fb_cli_children[] = {{&common_argp, 0, NULL, 0}, {0}};

void fb_cli_init_child(const struct argp_state *state)
{
    const struct fb_cli_input *input = state->input;

    state->child_inputs[0] = input->cli;
}

static error_t parse_plain(int key, char *arg, struct argp_state *state)
{
    (void)arg;
    if (key == ARGP_KEY_INIT) {
        fb_cli_init_child(state);
        return 0;
    }
    return ARGP_ERR_UNKNOWN;
}

void fb_cli_parse_plain(struct fb_cli *cli, int argc, char **argv, const char *doc)
{
    const struct argp argp = {.parser = parse_plain, .doc = doc, .children = fb_cli_children};
    struct fb_cli_input input = {cli};

    argp_parse(&argp, argc, argv, 0, NULL, &input);
}

uint64_t fb_cli_number(const struct argp_state *state, const char *name, const char *text,
                       uint64_t min, uint64_t max)
{
    char *end;
    unsigned long long value;

    errno = 0;
    value = strtoull(text, &end, 10);
    if (*text < '0' || *text > '9' || *end || errno || value < min || value > max) {
        argp_error(state, "%s: \"%s\" is wrong; expected a number from %" PRIu64 " to %" PRIu64,
                   name, text, min, max);
    }
    return value;
}
