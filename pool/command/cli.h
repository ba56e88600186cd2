/* The frame of the `forebay` command: what every subcommand is given.
 *
 * Exit status: 0 done; 1 it failed, with one line on stderr that says what to do; 2 a lookup or a
 * get found less than was asked for; 64 wrong usage. */
#ifndef FB_COMMAND_CLI_H
#define FB_COMMAND_CLI_H

#include <argp.h>
#include <stdbool.h>
#include <stdint.h>

#define FB_EXIT_MISS    2
#define FB_DEFAULT_GRPC "127.0.0.1:7400"

struct fb_cli {
    const char *socket; /* of the pool */
    const char *grpc;   /* of the daemon's control plane */
    bool json;
};

/* Subcommands: parse their own arguments and return the exit status. */
int fb_run_status(struct fb_cli *cli, int argc, char **argv);
int fb_run_spaces(struct fb_cli *cli, int argc, char **argv);
int fb_run_watch(struct fb_cli *cli, int argc, char **argv);
int fb_run_purge(struct fb_cli *cli, int argc, char **argv);
int fb_run_drain(struct fb_cli *cli, int argc, char **argv);
int fb_run_put(struct fb_cli *cli, int argc, char **argv);
int fb_run_lookup(struct fb_cli *cli, int argc, char **argv);
int fb_run_get(struct fb_cli *cli, int argc, char **argv);
int fb_run_replay(struct fb_cli *cli, int argc, char **argv);
int fb_run_bench(struct fb_cli *cli, int argc, char **argv);
int fb_run_why(struct fb_cli *cli, int argc, char **argv);
int fb_run_doctor(struct fb_cli *cli, int argc, char **argv);

/* The options that every subcommand takes too, as a child parser; its input is the fb_cli. */
extern const struct argp_child fb_cli_children[];

/* Options of a subcommand: its input begins with the fb_cli, for its parser to hand down. */
struct fb_cli_input {
    struct fb_cli *cli;
};

/* Hand the fb_cli to the child parser; for ARGP_KEY_INIT. */
void fb_cli_init_child(const struct argp_state *state);

/* Parse a subcommand that has no options of its own. */
void fb_cli_parse_plain(struct fb_cli *cli, int argc, char **argv, const char *doc);

/* A number between min and max, else a usage error that names it. */
uint64_t fb_cli_number(const struct argp_state *state, const char *name, const char *text,
                       uint64_t min, uint64_t max);

#endif
