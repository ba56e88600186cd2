/* A manifest as JSON, to be shown and compared. All results are for json_decref. */
#ifndef FB_COMMAND_MANIFEST_JSON_H
#define FB_COMMAND_MANIFEST_JSON_H

#include "proto/manifest.h"

#include <jansson.h>

/* Every field, in the order of the encoding. Two manifests are equal exactly if these are. */
json_t *fb_manifest_json(const struct fb_manifest *m);

/* Layer indices in runs, as one text: "0-3,8". */
json_t *fb_layers_json(const struct fb_manifest *m);

/* A text; its bytes as digits where it is no UTF-8. */
json_t *fb_text_json(const char *text);

/* Bytes as one text of hexadecimal digits. */
json_t *fb_hex_json(const uint8_t *data, size_t bytes);

#endif
