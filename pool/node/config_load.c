/* How a node takes its configuration from a YAML file, the environment and flags. */
#include "pool/node/config_table.h"

#include <argp.h>
#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#define LABEL_BYTES 192

_Static_assert(FB_OPTIONS <= 64, "duplicates in a file are found by a 64-bit mask");

/* ---- the file ---- */

struct file {
    const char *path;
    yaml_document_t document;
    uint64_t seen; /* one bit per option */
};

static void file_label(const struct file *file, const yaml_node_t *node, const char *name,
                       char out[LABEL_BYTES])
{
    snprintf(out, LABEL_BYTES, "%.140s:%zu: %s", file->path, node->start_mark.line + 1, name);
}

/* Text of a node that must be a scalar, or NULL. */
static const char *scalar_text(const yaml_node_t *node, const char *label, const char *expected,
                               struct fb_error *error)
{
    const char *text = (const char *)node->data.scalar.value;

    if (node->type != YAML_SCALAR_NODE) {
        fb_error_set(error, FB_EINVAL, "%s: a %s is not possible here; expected %s", label,
                     node->type == YAML_SEQUENCE_NODE ? "list" : "mapping", expected);
        return NULL;
    }
    if (strlen(text) != node->data.scalar.length) {
        fb_error_set(error, FB_EINVAL, "%s: the value has a zero byte; expected %s", label,
                     expected);
        return NULL;
    }
    return text;
}

/* One entry of the list: a mapping of name and share. */
static enum fb_status file_tenant(struct file *file, yaml_node_t *node, struct fb_config *config,
                                  struct fb_error *error)
{
    static const char *const keys[] = {"name", "share"};
    const char *texts[2] = {NULL, NULL};
    char label[LABEL_BYTES];

    file_label(file, node, "tenants", label);
    if (node->type != YAML_MAPPING_NODE) {
        return fb_error_set(error, FB_EINVAL,
                            "%s: expected entries such as {name: default, share: 100}", label);
    }
    for (yaml_node_pair_t *p = node->data.mapping.pairs.start; p < node->data.mapping.pairs.top;
         p++) {
        yaml_node_t *key = yaml_document_get_node(&file->document, p->key);
        yaml_node_t *value = yaml_document_get_node(&file->document, p->value);
        const char *name;
        int i;

        file_label(file, key, "tenants", label);
        name = scalar_text(key, label, "name or share", error);
        if (!name) {
            return FB_EINVAL;
        }
        i = strcmp(name, keys[1]) == 0;
        if (strcmp(name, keys[i]) != 0 || texts[i]) {
            return fb_error_set(error, FB_EINVAL, "%s: \"%.80s\" is %s; expected name and share",
                                label, name,
                                strcmp(name, keys[i]) == 0 ? "there twice" : "unknown");
        }
        texts[i] = scalar_text(value, label, "a plain value", error);
        if (!texts[i]) {
            return FB_EINVAL;
        }
    }
    for (int i = 0; i < 2; i++) {
        if (!texts[i]) {
            return fb_error_set(error, FB_EINVAL,
                                "%s: an entry without %s; expected name and share", label, keys[i]);
        }
    }
    return fb_config_add_tenant(config, texts[0], texts[1], label, error);
}

static enum fb_status file_tenants(struct file *file, yaml_node_t *list, struct fb_config *config,
                                   const char *label, struct fb_error *error)
{
    yaml_node_item_t *item = list->data.sequence.items.start;

    if (list->type != YAML_SEQUENCE_NODE || item == list->data.sequence.items.top) {
        return fb_error_set(error, FB_EINVAL,
                            "%s: expected a list with entries such as {name: default, share: 100}",
                            label);
    }
    fb_config_clear_tenants(config);
    for (; item < list->data.sequence.items.top; item++) {
        yaml_node_t *node = yaml_document_get_node(&file->document, *item);
        enum fb_status status = file_tenant(file, node, config, error);

        if (status != FB_OK) {
            return status;
        }
    }
    return FB_OK;
}

static enum fb_status file_option(struct file *file, yaml_node_t *key, yaml_node_t *value,
                                  struct fb_config *config, struct fb_error *error)
{
    const struct fb_option *option;
    char expected[FB_OPTION_EXPECTED_BYTES];
    char label[LABEL_BYTES];
    const char *text;
    uint64_t bit;

    file_label(file, key, "", label);
    text = scalar_text(key, label, "the name of an option", error);
    option = text ? fb_option_find(text, label, error) : NULL;
    if (!option) {
        return FB_EINVAL;
    }
    file_label(file, key, option->name, label);
    bit = UINT64_C(1) << (option - fb_options);
    if (file->seen & bit) {
        return fb_error_set(error, FB_EINVAL, "%s: is there twice; remove one", label);
    }
    file->seen |= bit;
    if (option->type == FB_OPTION_TENANTS) {
        return file_tenants(file, value, config, label, error);
    }
    fb_option_describe(option, expected);
    text = scalar_text(value, label, expected, error);
    return text ? fb_option_set(config, option, text, label, error) : FB_EINVAL;
}

static enum fb_status file_document(struct file *file, yaml_node_t *root, struct fb_config *config,
                                    struct fb_error *error)
{
    if (root->type != YAML_MAPPING_NODE) {
        return fb_error_set(error, FB_EINVAL,
                            "%s:%zu: expected options such as \"host_bytes: 64GiB\", one a line",
                            file->path, root->start_mark.line + 1);
    }
    for (yaml_node_pair_t *p = root->data.mapping.pairs.start; p < root->data.mapping.pairs.top;
         p++) {
        enum fb_status status =
            file_option(file, yaml_document_get_node(&file->document, p->key),
                        yaml_document_get_node(&file->document, p->value), config, error);

        if (status != FB_OK) {
            return status;
        }
    }
    return FB_OK;
}

/* A file has one document, or none: then the defaults stay. */
static enum fb_status file_parse(struct file *file, yaml_parser_t *parser, struct fb_config *config,
                                 struct fb_error *error)
{
    enum fb_status status = FB_OK;
    yaml_node_t *root;

    for (int documents = 0; status == FB_OK; documents++) {
        if (!yaml_parser_load(parser, &file->document)) {
            return fb_error_set(error, FB_EINVAL, "%s:%zu: this is not YAML: %s", file->path,
                                parser->problem_mark.line + 1,
                                parser->problem ? parser->problem : "cannot be read");
        }
        root = yaml_document_get_root_node(&file->document);
        if (!root) { /* the end */
            yaml_document_delete(&file->document);
            break;
        }
        if (documents > 0) {
            status = fb_error_set(error, FB_EINVAL, "%s:%zu: a second document; expected one",
                                  file->path, root->start_mark.line + 1);
        } else {
            status = file_document(file, root, config, error);
        }
        yaml_document_delete(&file->document);
    }
    return status;
}

enum fb_status fb_config_load_file(struct fb_config *config, const char *path,
                                   struct fb_error *error)
{
    struct file file = {.path = path};
    enum fb_status status;
    yaml_parser_t parser;
    FILE *in = fopen(path, "re");

    if (!in) {
        return fb_error_set(error, FB_ENOENT, "%s: cannot read the configuration: %s", path,
                            strerror(errno));
    }
    if (!yaml_parser_initialize(&parser)) {
        status = fb_error_set(error, FB_ENOMEM, "%s: out of memory", path);
        goto err_close;
    }
    yaml_parser_set_input_file(&parser, in);
    status = file_parse(&file, &parser, config, error);
    yaml_parser_delete(&parser);
err_close:
    fclose(in);
    return status;
}

/* ---- environment and flags ---- */

/* Spell an option's name as FOREBAY_HOST_BYTES. */
static void variable_name(const struct fb_option *option, char out[FB_OPTION_NAME_BYTES])
{
    snprintf(out, FB_OPTION_NAME_BYTES, "FOREBAY_%s", option->name);
    for (; *out; out++) {
        *out = (char)toupper((unsigned char)*out);
    }
}

/* Spell an option's name as host-bytes. */
static void flag_name(const struct fb_option *option, char out[FB_OPTION_NAME_BYTES])
{
    snprintf(out, FB_OPTION_NAME_BYTES, "%s", option->name);
    for (; *out; out++) {
        *out = *out == '_' ? '-' : *out;
    }
}

enum fb_status fb_config_load_env(struct fb_config *config, struct fb_error *error)
{
    for (size_t i = 0; i < FB_OPTIONS; i++) {
        char name[FB_OPTION_NAME_BYTES];
        const char *text;
        enum fb_status status;

        variable_name(&fb_options[i], name);
        text = getenv(name);
        status = text ? fb_option_set(config, &fb_options[i], text, name, error) : FB_OK;
        if (status != FB_OK) {
            return status;
        }
    }
    return FB_OK;
}

/* argp's keys: those of options follow in the order of the table. */
enum { KEY_CONFIG = 0x100, KEY_CHECK, KEY_PRINT, KEY_VERSION, KEY_OPTION };

struct flags {
    const char *file;
    enum fb_config_action action;
    const char *values[FB_OPTIONS];
};

static error_t take_flag(int key, char *arg, struct argp_state *state)
{
    struct flags *flags = state->input;

    switch (key) {
    case KEY_CONFIG: flags->file = arg; return 0;
    case KEY_CHECK: flags->action = FB_CONFIG_CHECK; return 0;
    case KEY_PRINT: flags->action = FB_CONFIG_PRINT; return 0;
    case KEY_VERSION: flags->action = FB_CONFIG_VERSION; return 0;
    case ARGP_KEY_ARG: argp_error(state, "unexpected argument \"%s\"", arg); return EINVAL;
    default: break;
    }
    if (key < KEY_OPTION || key >= KEY_OPTION + FB_OPTIONS) {
        return ARGP_ERR_UNKNOWN;
    }
    flags->values[key - KEY_OPTION] = arg ? arg : "true";
    return 0;
}

/* Does not return for --help and for flags that are wrong. */
static void parse_flags(int argc, char **argv, struct flags *flags)
{
    struct argp_option table[FB_OPTIONS + 5] = {
        {"config", KEY_CONFIG, "FILE", 0, "Read options from this YAML file (FOREBAY_CONFIG)", 0},
        {"check-config", KEY_CHECK, NULL, 0, "Say whether the configuration is good, and end", 0},
        {"print-config", KEY_PRINT, NULL, 0, "Print a file of all options and end", 0},
        {"version", KEY_VERSION, NULL, 0, "Print the version and end", 0},
    };
    struct argp argp = {
        .options = table,
        .parser = take_flag,
        .doc = "Keep attention keys and values of inference servers in a pool.\v"
               "Each option can be given in the file (host_bytes: 64GiB), as a variable of the "
               "environment (FOREBAY_HOST_BYTES=64GiB) and as a flag; the last of these wins.",
    };
    char names[FB_OPTIONS][FB_OPTION_NAME_BYTES];
    char helps[FB_OPTIONS][160];

    for (size_t i = 0; i < FB_OPTIONS; i++) {
        const struct fb_option *option = &fb_options[i];

        flag_name(option, names[i]);
        snprintf(helps[i], sizeof(helps[i]), "%s (\"%s\")", option->help, option->initial);
        table[i + 4] = (struct argp_option){
            .name = names[i],
            .key = KEY_OPTION + (int)i,
            .arg = fb_option_placeholder(option),
            .flags = option->type == FB_OPTION_BOOL ? OPTION_ARG_OPTIONAL : 0,
            .doc = helps[i],
            .group = 1,
        };
    }
    argp_parse(&argp, argc, argv, 0, NULL, flags);
}

enum fb_status fb_config_load(struct fb_config *config, int argc, char **argv,
                              enum fb_config_action *ret_action, struct fb_error *error)
{
    struct flags flags = {.file = getenv("FOREBAY_CONFIG"), .action = FB_CONFIG_RUN};
    enum fb_status status = FB_OK;

    parse_flags(argc, argv, &flags);
    fb_config_init(config);
    if (flags.action == FB_CONFIG_PRINT || flags.action == FB_CONFIG_VERSION) {
        *ret_action = flags.action;
        return FB_OK;
    }
    if (flags.file) {
        status = fb_config_load_file(config, flags.file, error);
    }
    if (status == FB_OK) {
        status = fb_config_load_env(config, error);
    }
    for (size_t i = 0; i < FB_OPTIONS && status == FB_OK; i++) {
        char label[FB_OPTION_NAME_BYTES + 2] = "--";

        flag_name(&fb_options[i], label + 2);
        if (flags.values[i]) {
            status = fb_option_set(config, &fb_options[i], flags.values[i], label, error);
        }
    }
    if (status == FB_OK) {
        *ret_action = flags.action;
    }
    return status;
}
