/* doctor: run all checks and show them as a table. */
#include "pool/command/doctor.h"

#include "pool/command/output.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void fb_result_set(struct fb_result *r, enum fb_finding finding, const char *remedy,
                   const char *format, ...)
{
    va_list args;

    r->finding = finding;
    snprintf(r->remedy, sizeof(r->remedy), "%s", remedy ? remedy : "");
    va_start(args, format);
    vsnprintf(r->found, sizeof(r->found), format, args);
    va_end(args);
}

bool fb_doctor_read_line(const char *path, char *out, size_t capacity)
{
    FILE *file = fopen(path, "re");
    bool ok = file && fgets(out, (int)capacity, file);

    if (file) {
        fclose(file);
    }
    if (ok) {
        out[strcspn(out, "\n")] = 0;
    }
    return ok;
}

static const char *finding_name(enum fb_finding finding)
{
    switch (finding) {
    case FB_FINDING_OK: return "ok";
    case FB_FINDING_WARN: return "warn";
    default: return "fail";
    }
}

static void show_result(const char *name, const struct fb_result *r, json_t *results)
{
    if (!results) {
        printf("%-4s  %-14s  %s\n", finding_name(r->finding), name, r->found);
        if (r->remedy[0]) {
            printf("%20s  -> %s\n", "", r->remedy);
        }
        return;
    }
    json_array_append_new(results, fb_fields_json(
                                       (const struct fb_field[]){
                                           FB_FIELD_TEXT("name", "", name),
                                           FB_FIELD_TEXT("result", "", finding_name(r->finding)),
                                           FB_FIELD_TEXT("found", "", r->found),
                                           FB_FIELD_TEXT("remedy", "", r->remedy),
                                       },
                                       4));
}

/* returns how many failed */
static uint32_t run_checks(const struct fb_doctor *doctor, const struct fb_check *checks,
                           size_t count, json_t *results)
{
    uint32_t failed = 0;

    for (size_t i = 0; i < count; i++) {
        struct fb_result r = {0};

        checks[i].look(doctor, &r);
        failed += r.finding == FB_FINDING_FAIL;
        show_result(checks[i].name, &r, results);
    }
    return failed;
}

struct doctor_input {
    struct fb_cli_input base;
    struct fb_doctor *doctor;
    const char *config;
    const char *chunk_dir;
    const char *host_bytes;
};

static error_t parse(int key, char *arg, struct argp_state *state)
{
    struct doctor_input *input = state->input;

    switch (key) {
    case ARGP_KEY_INIT: fb_cli_init_child(state); return 0;
    case 'c': input->config = arg; return 0;
    case 'd': input->chunk_dir = arg; return 0;
    case 'b': input->host_bytes = arg; return 0;
    default: return ARGP_ERR_UNKNOWN;
    }
}

/* The daemon's own reader, so that what it would refuse is refused here. */
static enum fb_status load_config(const struct doctor_input *input, struct fb_error *error)
{
    struct fb_config *config = &input->doctor->config;
    enum fb_status status = FB_OK;

    fb_config_init(config);
    if (input->config) {
        status = fb_config_load_file(config, input->config, error);
    }
    if (status == FB_OK) {
        status = fb_config_load_env(config, error);
    }
    if (status == FB_OK && input->chunk_dir) {
        status = fb_config_set(config, "chunk_dir", input->chunk_dir, error);
    }
    if (status == FB_OK && input->host_bytes) {
        status = fb_config_set(config, "host_bytes", input->host_bytes, error);
    }
    return status;
}

int fb_run_doctor(struct fb_cli *cli, int argc, char **argv)
{
    static const struct argp_option options[] = {
        {"config", 'c', "FILE", 0, "Configuration of the daemon (default: its defaults)", 0},
        {"chunk-dir", 'd', "PATH", 0, "Where its chunks live", 0},
        {"host-bytes", 'b', "SIZE", 0, "Size of its host tier", 0},
        {0},
    };
    const struct argp argp = {.options = options,
                              .parser = parse,
                              .doc = "Look for what would make the pool slow or fail on this "
                                     "machine. Changes nothing. Exits with 1 if a check failed.",
                              .children = fb_cli_children};
    struct fb_doctor doctor = {.cli = cli};
    struct doctor_input input = {.base = {cli}, .doctor = &doctor};
    struct fb_error error;
    json_t *results;
    uint32_t failed;

    argp_parse(&argp, argc, argv, 0, NULL, &input);
    if (load_config(&input, &error) != FB_OK) {
        return fb_fail("%s", error.text);
    }
    results = cli->json ? json_array() : NULL;
    failed = run_checks(&doctor, fb_machine_checks, fb_machine_check_count, results);
    failed += run_checks(&doctor, fb_daemon_checks, fb_daemon_check_count, results);
    if (results) {
        fb_json_print(json_pack("{s:o, s:b}", "checks", results, "healthy", !failed), false);
    }
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
