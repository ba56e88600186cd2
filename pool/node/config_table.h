/* Inside of the configuration: the table that config.c holds and config_load.c reads. */
#ifndef FB_NODE_CONFIG_TABLE_H
#define FB_NODE_CONFIG_TABLE_H

#include "pool/node/config.h"

#include <stddef.h>

#define FB_OPTIONS               20
#define FB_OPTION_NAME_BYTES     32 /* in any spelling, the zero included */
#define FB_OPTION_EXPECTED_BYTES 128

/* From TEXT on the value is text, which a sample quotes. */
enum fb_option_type {
    FB_OPTION_SIZE,
    FB_OPTION_DURATION,
    FB_OPTION_COUNT,
    FB_OPTION_PERCENT,
    FB_OPTION_MODE,
    FB_OPTION_BOOL,
    FB_OPTION_CHOICE,
    FB_OPTION_TEXT,
    FB_OPTION_PATH,
    FB_OPTION_ADDRESS,
    FB_OPTION_TENANTS,
};

struct fb_option {
    const char *name;
    enum fb_option_type type;
    size_t offset;       /* in struct fb_config */
    const char *initial; /* the default, as text */
    uint64_t min;        /* of the value, or of the length where the value is text */
    uint64_t max;        /* likewise; 0: no range */
    const char *choices; /* separated by |, in the order of their enum */
    const char *help;
};

extern const struct fb_option fb_options[FB_OPTIONS];

/* where    what goes before a message, such as "file:7: "
 * returns  NULL with a message that suggests the nearest name */
const struct fb_option *fb_option_find(const char *name, const char *where, struct fb_error *error);

/* label  what names the option in messages: with its file and line, as a flag or a variable */
enum fb_status fb_option_set(struct fb_config *config, const struct fb_option *option,
                             const char *text, const char *label, struct fb_error *error);

/* What an option takes, in words: for messages and for the sample file. */
void fb_option_describe(const struct fb_option *option, char out[FB_OPTION_EXPECTED_BYTES]);

/* What --help puts in the place of a value. */
const char *fb_option_placeholder(const struct fb_option *option);

void fb_config_clear_tenants(struct fb_config *config);

/* share  text, in percent */
enum fb_status fb_config_add_tenant(struct fb_config *config, const char *name, const char *share,
                                    const char *label, struct fb_error *error);

#endif
