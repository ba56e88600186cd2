/* Manifests: their fields as JSON. */
#include "pool/command/manifest_json.h"

#include "pool/command/output.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

json_t *fb_hex_json(const uint8_t *data, size_t bytes)
{
    char *hex = malloc(2 * bytes + 1);
    json_t *text = NULL;

    if (hex) {
        fb_hex_format(data, bytes, hex);
        text = json_string(hex);
    }
    free(hex);
    return text;
}

json_t *fb_text_json(const char *text)
{
    json_t *value = json_string(text);

    return value ? value : fb_hex_json((const uint8_t *)text, strlen(text));
}

json_t *fb_layers_json(const struct fb_manifest *m)
{
    char text[FB_MAX_LAYERS * sizeof("65535,")] = "";
    size_t at = 0;

    for (uint32_t i = 0, last; i < m->layer_count; i = last + 1) {
        last = i;
        while (last + 1 < m->layer_count && m->layers[last + 1] == m->layers[last] + 1) {
            last++;
        }
        at +=
            (size_t)snprintf(text + at, sizeof(text) - at, "%s%u", i > 0 ? "," : "", m->layers[i]);
        if (last > i) {
            at += (size_t)snprintf(text + at, sizeof(text) - at, "-%u", m->layers[last]);
        }
    }
    return json_string(text);
}

static json_t *sections_json(const struct fb_manifest *m)
{
    json_t *sections = json_array();

    for (uint32_t i = 0; i < m->section_count; i++) {
        const struct fb_section *s = &m->sections[i];

        json_array_append_new(
            sections, json_pack("{s:s, s:s, s:s, s:I, s:I, s:I, s:I}", "kind",
                                fb_section_kind_name(s->kind), "elem", fb_elem_name(s->elem),
                                "codec", fb_codec_name(s->codec), "group", (json_int_t)s->group,
                                "layer_first", (json_int_t)s->layer_first, "layer_count",
                                (json_int_t)s->layer_count, "row_elems", (json_int_t)s->row_elems));
    }
    return sections;
}

/* Scales as texts that tell every fp32 apart, zeros of either sign too. */
static json_t *scales_json(const struct fb_manifest *m)
{
    json_t *scales = json_array();

    for (uint32_t i = 0; i < m->scale_count; i++) {
        json_array_append_new(scales, json_sprintf("%.9g", (double)m->scales[i]));
    }
    return scales;
}

json_t *fb_manifest_json(const struct fb_manifest *m)
{
    json_t *object = json_object();

    json_object_set_new(object, "tenant", fb_text_json(m->tenant));
    json_object_set_new(object, "model", fb_text_json(m->model));
    json_object_set_new(object, "quantization", fb_text_json(m->quantization));
    json_object_set_new(object, "position", fb_text_json(m->position));
    json_object_set_new(object, "arrangement", fb_text_json(m->arrangement));
    json_object_set_new(object, "engine_block_tokens", json_integer(m->engine_block_tokens));
    json_object_set_new(object, "rule", json_string(fb_rule_name(m->rule)));
    json_object_set_new(object, "window_tokens", json_integer(m->window_tokens));
    json_object_set_new(object, "page_tokens", json_integer(m->page_tokens));
    json_object_set_new(object, "layers", fb_layers_json(m));
    json_object_set_new(object, "head_first", json_integer(m->head_first));
    json_object_set_new(object, "head_count", json_integer(m->head_count));
    json_object_set_new(object, "head_total", json_integer(m->head_total));
    json_object_set_new(object, "sections", sections_json(m));
    json_object_set_new(object, "scales", scales_json(m));
    json_object_set_new(object, "generation", json_sprintf("%" PRIu64, m->generation));
    json_object_set_new(object, "private",
                        fb_hex_json(m->private_id, m->is_private ? FB_PRIVATE_BYTES : 0));
    return object;
}
