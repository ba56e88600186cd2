/* Reading the encoded extra of a page: what its KV depends on besides tokens.
 * source: docs/formats.md, "Chain and key" */
#ifndef FB_COMMAND_KEY_EXTRA_H
#define FB_COMMAND_KEY_EXTRA_H

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

/* The parts that are present, as an object of
 *
 *   "adapter": hex, "multimodal": ["hex at offset", ...], "embeddings": hex, "salt": text
 *
 * for json_decref, or NULL when this is no extra. 0 bytes are an extra without parts. */
json_t *fb_key_extra_parts(const uint8_t *extra, size_t bytes);

#endif
