/* Manifest: validation, the one encoding, the space id. */
#include "proto/manifest.h"

#include "proto/assert.h"
#include "proto/cbor.h"

#include <math.h>
#include <openssl/evp.h>
#include <string.h>

/* Keys of the manifest's map, all present, in this order. */
enum manifest_key {
    KEY_SCHEMA = 1,
    KEY_TENANT,
    KEY_MODEL,
    KEY_QUANTIZATION,
    KEY_POSITION,
    KEY_ARRANGEMENT,
    KEY_ENGINE_BLOCK,
    KEY_RULE,
    KEY_WINDOW,
    KEY_PAGE_TOKENS,
    KEY_LAYERS,
    KEY_HEADS,
    KEY_SECTIONS,
    KEY_SCALES,
    KEY_GENERATION,
    KEY_PRIVATE,
    KEY_END,
};
#define KEY_COUNT      (KEY_END - KEY_SCHEMA)
#define SECTION_FIELDS 7

struct name_row {
    uint32_t value;
    uint32_t bytes; /* of an element, where that makes sense */
    const char *name;
};

static const struct name_row elems[] = {
    {FB_ELEM_BF16, 2, "bf16"}, {FB_ELEM_FP16, 2, "fp16"},         {FB_ELEM_E4M3FN, 1, "e4m3fn"},
    {FB_ELEM_E5M2, 1, "e5m2"}, {FB_ELEM_E4M3FNUZ, 1, "e4m3fnuz"}, {FB_ELEM_BYTE, 1, "byte"},
};
static const struct name_row codecs[] = {
    {FB_CODEC_RAW, 0, "raw"},
    {FB_CODEC_FP8_E4M3, 0, "fp8_e4m3"},
    {FB_CODEC_FP8_E5M2, 0, "fp8_e5m2"},
    {FB_CODEC_INT8, 0, "int8"},
};
static const struct name_row kinds[] = {
    {FB_SECTION_K, 0, "K"},       {FB_SECTION_V, 0, "V"},         {FB_SECTION_LATENT, 0, "latent"},
    {FB_SECTION_ROPE, 0, "rope"}, {FB_SECTION_INDEX, 0, "index"}, {FB_SECTION_STATE, 0, "state"},
};
static const struct name_row rules[] = {
    {FB_RULE_FULL, 0, "full"},
    {FB_RULE_WINDOW, 0, "window"},
    {FB_RULE_STATE, 0, "state"},
};

#define FIND(table, v) find_row(table, sizeof(table) / sizeof((table)[0]), (uint32_t)(v))

static const struct name_row *find_row(const struct name_row *table, size_t n, uint32_t value)
{
    static const struct name_row unknown = {0, 0, "?"};

    for (size_t i = 0; i < n; i++) {
        if (table[i].value == value) {
            return &table[i];
        }
    }
    return &unknown;
}

uint32_t fb_elem_bytes(enum fb_elem elem)
{
    return FIND(elems, elem)->bytes;
}

const char *fb_codec_name(enum fb_codec codec)
{
    return FIND(codecs, codec)->name;
}

const char *fb_elem_name(enum fb_elem elem)
{
    return FIND(elems, elem)->name;
}

const char *fb_section_kind_name(enum fb_section_kind kind)
{
    return FIND(kinds, kind)->name;
}

const char *fb_rule_name(enum fb_rule rule)
{
    return FIND(rules, rule)->name;
}

enum fb_codec fb_codec_by_name(const char *name)
{
    for (size_t i = 0; i < sizeof(codecs) / sizeof(codecs[0]); i++) {
        if (strcmp(codecs[i].name, name) == 0) {
            return (enum fb_codec)codecs[i].value;
        }
    }
    return 0;
}

static enum fb_status check_text(const char *field, const char *text, size_t capacity,
                                 struct fb_error *error)
{
    if (!memchr(text, 0, capacity)) {
        return fb_error_set(error, FB_EINVAL, "manifest: %s is longer than %zu characters", field,
                            capacity - 1);
    }
    return FB_OK;
}

static enum fb_status check_texts(const struct fb_manifest *m, struct fb_error *error)
{
    enum fb_status status = check_text("tenant", m->tenant, sizeof(m->tenant), error);

    if (status == FB_OK) {
        status = check_text("model", m->model, sizeof(m->model), error);
    }
    if (status == FB_OK) {
        status = check_text("quantization", m->quantization, sizeof(m->quantization), error);
    }
    if (status == FB_OK) {
        status = check_text("position", m->position, sizeof(m->position), error);
    }
    if (status == FB_OK) {
        status = check_text("arrangement", m->arrangement, sizeof(m->arrangement), error);
    }
    if (status != FB_OK) {
        return status;
    }
    if (m->tenant[0] == 0) {
        return fb_error_set(error, FB_EINVAL, "manifest: tenant is empty; name the tenant");
    }
    if (m->model[0] == 0 && !m->is_private) {
        return fb_error_set(error, FB_EINVAL,
                            "manifest: model is empty; give repository and revision or a digest of "
                            "the weights, or make the space private to this process");
    }
    if ((m->arrangement[0] != 0) != (m->engine_block_tokens != 0)) {
        return fb_error_set(error, FB_EINVAL,
                            "manifest: arrangement and engine_block_tokens go together; set both "
                            "for engine-specific rows, none for canonical rows");
    }
    return FB_OK;
}

static enum fb_status check_shape(const struct fb_manifest *m, struct fb_error *error)
{
    if (m->rule < FB_RULE_FULL || m->rule > FB_RULE_STATE) {
        return fb_error_set(error, FB_EINVAL, "manifest: rule %d is not full, window or state",
                            (int)m->rule);
    }
    if ((m->rule == FB_RULE_WINDOW) != (m->window_tokens != 0)) {
        return fb_error_set(error, FB_EINVAL,
                            "manifest: window_tokens is %u; expected 1 or more with rule window, "
                            "0 otherwise",
                            m->window_tokens);
    }
    if (m->page_tokens == 0 || m->page_tokens > FB_MAX_PAGE_TOKENS) {
        return fb_error_set(error, FB_EGEOMETRY, "manifest: page_tokens %u; expected 1 to %u",
                            m->page_tokens, FB_MAX_PAGE_TOKENS);
    }
    if (m->layer_count == 0 || m->layer_count > FB_MAX_LAYERS) {
        return fb_error_set(error, FB_EGEOMETRY, "manifest: %u layers; expected 1 to %u",
                            m->layer_count, FB_MAX_LAYERS);
    }
    for (uint32_t i = 1; i < m->layer_count; i++) {
        if (m->layers[i] <= m->layers[i - 1]) {
            return fb_error_set(error, FB_EINVAL,
                                "manifest: layer index %u follows %u; expected ascending indices "
                                "without repeats",
                                m->layers[i], m->layers[i - 1]);
        }
    }
    if (m->head_count == 0 || m->head_count > FB_MAX_PLANES) {
        return fb_error_set(error, FB_EGEOMETRY, "manifest: %u heads; expected 1 to %u",
                            m->head_count, FB_MAX_PLANES);
    }
    if (m->head_first > m->head_total || m->head_count > m->head_total - m->head_first) {
        return fb_error_set(error, FB_EGEOMETRY, "manifest: heads %u+%u are outside the model's %u",
                            m->head_first, m->head_count, m->head_total);
    }
    return FB_OK;
}

static enum fb_status check_section(const struct fb_manifest *m, uint32_t i, struct fb_error *error)
{
    const struct fb_section *s = &m->sections[i];
    bool quantizes = s->codec != FB_CODEC_RAW;

    if (FIND(kinds, s->kind)->value == 0 || FIND(elems, s->elem)->value == 0) {
        return fb_error_set(error, FB_EINVAL, "manifest: section %u: unknown kind %d or element %d",
                            i, (int)s->kind, (int)s->elem);
    }
    if (FIND(codecs, s->codec)->value == 0) {
        return fb_error_set(error, FB_EUNSUPPORTED,
                            "manifest: section %u: codec %d is not known; expected raw, fp8_e4m3, "
                            "fp8_e5m2 or int8",
                            i, (int)s->codec);
    }
    if ((s->kind == FB_SECTION_STATE) != (m->rule == FB_RULE_STATE)) {
        return fb_error_set(error, FB_EINVAL,
                            "manifest: section %u: state sections and rule state go together", i);
    }
    if (s->layer_count == 0 || s->layer_first >= m->layer_count ||
        s->layer_count > m->layer_count - s->layer_first) {
        return fb_error_set(error, FB_EGEOMETRY,
                            "manifest: section %u: layers %u+%u are outside the space's %u", i,
                            s->layer_first, s->layer_count, m->layer_count);
    }
    if (s->row_elems == 0 || s->row_elems > (quantizes ? FB_MAX_QUANT_ROW : FB_MAX_ROW_ELEMS)) {
        return fb_error_set(error, FB_EGEOMETRY,
                            "manifest: section %u: %u elements a row; expected 1 to %u", i,
                            s->row_elems, quantizes ? FB_MAX_QUANT_ROW : FB_MAX_ROW_ELEMS);
    }
    if (quantizes && s->elem != FB_ELEM_BF16 && s->elem != FB_ELEM_FP16) {
        return fb_error_set(error, FB_EUNSUPPORTED,
                            "manifest: section %u: %s rows cannot be quantized to %s; use raw", i,
                            fb_elem_name(s->elem), fb_codec_name(s->codec));
    }
    if (s->group >= s->row_elems || (s->group != 0 && !quantizes)) {
        return fb_error_set(error, FB_EINVAL,
                            "manifest: section %u: group %u; expected 0 for the whole row (always "
                            "with raw), or less than the row's %u",
                            i, s->group, s->row_elems);
    }
    if (m->arrangement[0] != 0 && quantizes) {
        return fb_error_set(error, FB_EUNSUPPORTED,
                            "manifest: section %u: rows in an engine's arrangement travel raw", i);
    }
    return FB_OK;
}

/* Every layer has a section, and no two of one kind. */
static enum fb_status check_cover(const struct fb_manifest *m, struct fb_error *error)
{
    for (uint32_t layer = 0; layer < m->layer_count; layer++) {
        uint32_t seen = 0;

        for (uint32_t i = 0; i < m->section_count; i++) {
            const struct fb_section *s = &m->sections[i];
            uint32_t bit = 1u << s->kind;

            if (layer < s->layer_first || layer - s->layer_first >= s->layer_count) {
                continue;
            }
            if (seen & bit) {
                return fb_error_set(error, FB_EINVAL,
                                    "manifest: layer %u has two sections of kind %s", layer,
                                    fb_section_kind_name(s->kind));
            }
            seen |= bit;
        }
        if (seen == 0) {
            return fb_error_set(error, FB_EINVAL, "manifest: layer %u has no section", layer);
        }
    }
    return FB_OK;
}

enum fb_status fb_manifest_validate(const struct fb_manifest *m, struct fb_error *error)
{
    enum fb_status status = check_texts(m, error);

    if (status == FB_OK) {
        status = check_shape(m, error);
    }
    if (status != FB_OK) {
        return status;
    }
    if (m->section_count == 0 || m->section_count > FB_MAX_SECTIONS) {
        return fb_error_set(error, FB_EGEOMETRY, "manifest: %u sections; expected 1 to %u",
                            m->section_count, FB_MAX_SECTIONS);
    }
    for (uint32_t i = 0; i < m->section_count; i++) {
        status = check_section(m, i, error);
        if (status != FB_OK) {
            return status;
        }
    }
    if (m->scale_count > FB_MAX_SCALES) {
        return fb_error_set(error, FB_EINVAL, "manifest: %u scales; expected at most %u",
                            m->scale_count, FB_MAX_SCALES);
    }
    for (uint32_t i = 0; i < m->scale_count; i++) {
        if (!isfinite(m->scales[i])) {
            return fb_error_set(error, FB_EINVAL, "manifest: scale %u is not finite", i);
        }
    }
    return check_cover(m, error);
}

static void put_layers(struct fb_cbor_writer *w, const struct fb_manifest *m)
{
    fb_cbor_put_array(w, m->layer_count);
    for (uint32_t i = 0; i < m->layer_count; i++) {
        fb_cbor_put_uint(w, m->layers[i]);
    }
}

static void put_sections(struct fb_cbor_writer *w, const struct fb_manifest *m)
{
    fb_cbor_put_array(w, m->section_count);
    for (uint32_t i = 0; i < m->section_count; i++) {
        const struct fb_section *s = &m->sections[i];

        fb_cbor_put_array(w, SECTION_FIELDS);
        fb_cbor_put_uint(w, s->kind);
        fb_cbor_put_uint(w, s->elem);
        fb_cbor_put_uint(w, s->codec);
        fb_cbor_put_uint(w, s->layer_first);
        fb_cbor_put_uint(w, s->layer_count);
        fb_cbor_put_uint(w, s->row_elems);
        fb_cbor_put_uint(w, s->group);
    }
}

static void put_field(struct fb_cbor_writer *w, const struct fb_manifest *m, enum manifest_key key)
{
    switch (key) {
    case KEY_SCHEMA: fb_cbor_put_uint(w, FB_MANIFEST_SCHEMA); break;
    case KEY_TENANT: fb_cbor_put_text(w, m->tenant); break;
    case KEY_MODEL: fb_cbor_put_text(w, m->model); break;
    case KEY_QUANTIZATION: fb_cbor_put_text(w, m->quantization); break;
    case KEY_POSITION: fb_cbor_put_text(w, m->position); break;
    case KEY_ARRANGEMENT: fb_cbor_put_text(w, m->arrangement); break;
    case KEY_ENGINE_BLOCK: fb_cbor_put_uint(w, m->engine_block_tokens); break;
    case KEY_RULE: fb_cbor_put_uint(w, m->rule); break;
    case KEY_WINDOW: fb_cbor_put_uint(w, m->window_tokens); break;
    case KEY_PAGE_TOKENS: fb_cbor_put_uint(w, m->page_tokens); break;
    case KEY_LAYERS: put_layers(w, m); break;
    case KEY_HEADS:
        fb_cbor_put_array(w, 3);
        fb_cbor_put_uint(w, m->head_first);
        fb_cbor_put_uint(w, m->head_count);
        fb_cbor_put_uint(w, m->head_total);
        break;
    case KEY_SECTIONS: put_sections(w, m); break;
    case KEY_SCALES: fb_cbor_put_bytes(w, m->scales, 4 * (size_t)m->scale_count); break;
    case KEY_GENERATION: fb_cbor_put_uint(w, m->generation); break;
    case KEY_PRIVATE:
        fb_cbor_put_bytes(w, m->private_id, m->is_private ? sizeof(m->private_id) : 0);
        break;
    case KEY_END: break;
    }
}

static enum fb_status encode_valid(const struct fb_manifest *m, uint8_t *out, size_t capacity,
                                   size_t *ret_bytes, struct fb_error *error)
{
    struct fb_cbor_writer w;

    fb_cbor_writer_init(&w, out, capacity);
    fb_cbor_put_map(&w, KEY_COUNT);
    for (int key = KEY_SCHEMA; key < KEY_END; key++) {
        fb_cbor_put_uint(&w, (uint64_t)key);
        put_field(&w, m, (enum manifest_key)key);
    }
    if (w.full) {
        return fb_error_set(error, FB_ELIMIT, "manifest: encoding does not fit %zu bytes",
                            capacity);
    }
    *ret_bytes = w.bytes;
    return FB_OK;
}

enum fb_status fb_manifest_encode(const struct fb_manifest *m, uint8_t *out, size_t capacity,
                                  size_t *ret_bytes, struct fb_error *error)
{
    enum fb_status status = fb_manifest_validate(m, error);

    return status == FB_OK ? encode_valid(m, out, capacity, ret_bytes, error) : status;
}

static bool get_u32(struct fb_cbor_reader *r, uint32_t *ret_v)
{
    uint64_t v;

    if (!fb_cbor_get_uint(r, &v) || v > UINT32_MAX) {
        return false;
    }
    *ret_v = (uint32_t)v;
    return true;
}

static bool get_text(struct fb_cbor_reader *r, char *out, size_t capacity)
{
    const char *text;
    size_t bytes;

    if (!fb_cbor_get_text(r, &text, &bytes) || bytes >= capacity || memchr(text, 0, bytes)) {
        return false;
    }
    memcpy(out, text, bytes);
    out[bytes] = 0;
    return true;
}

static bool get_layers(struct fb_cbor_reader *r, struct fb_manifest *m)
{
    uint64_t n;

    if (!fb_cbor_get_array(r, &n) || n > FB_MAX_LAYERS) {
        return false;
    }
    m->layer_count = (uint32_t)n;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t v;

        if (!fb_cbor_get_uint(r, &v) || v > UINT16_MAX) {
            return false;
        }
        m->layers[i] = (uint16_t)v;
    }
    return true;
}

static bool get_sections(struct fb_cbor_reader *r, struct fb_manifest *m)
{
    uint64_t n;

    if (!fb_cbor_get_array(r, &n) || n > FB_MAX_SECTIONS) {
        return false;
    }
    m->section_count = (uint32_t)n;
    for (uint32_t i = 0; i < n; i++) {
        struct fb_section *s = &m->sections[i];
        uint32_t kind, elem, codec;
        uint64_t fields;

        if (!fb_cbor_get_array(r, &fields) || fields != SECTION_FIELDS || !get_u32(r, &kind) ||
            !get_u32(r, &elem) || !get_u32(r, &codec) || !get_u32(r, &s->layer_first) ||
            !get_u32(r, &s->layer_count) || !get_u32(r, &s->row_elems) || !get_u32(r, &s->group) ||
            (kind | elem | codec) > UINT8_MAX) {
            return false;
        }
        s->kind = (enum fb_section_kind)kind;
        s->elem = (enum fb_elem)elem;
        s->codec = (enum fb_codec)codec;
    }
    return true;
}

static bool get_scales(struct fb_cbor_reader *r, struct fb_manifest *m)
{
    const uint8_t *data;
    size_t bytes;

    if (!fb_cbor_get_bytes(r, &data, &bytes) || bytes % 4 != 0 || bytes > sizeof(m->scales)) {
        return false;
    }
    m->scale_count = (uint32_t)(bytes / 4);
    if (bytes > 0) {
        memcpy(m->scales, data, bytes);
    }
    return true;
}

static bool get_private(struct fb_cbor_reader *r, struct fb_manifest *m)
{
    const uint8_t *data;
    size_t bytes;

    if (!fb_cbor_get_bytes(r, &data, &bytes) || (bytes != 0 && bytes != sizeof(m->private_id))) {
        return false;
    }
    m->is_private = bytes != 0;
    if (bytes > 0) {
        memcpy(m->private_id, data, bytes);
    }
    return true;
}

static bool get_field(struct fb_cbor_reader *r, struct fb_manifest *m, enum manifest_key key)
{
    uint64_t n;
    uint32_t v;

    switch (key) {
    case KEY_SCHEMA: return get_u32(r, &v);
    case KEY_TENANT: return get_text(r, m->tenant, sizeof(m->tenant));
    case KEY_MODEL: return get_text(r, m->model, sizeof(m->model));
    case KEY_QUANTIZATION: return get_text(r, m->quantization, sizeof(m->quantization));
    case KEY_POSITION: return get_text(r, m->position, sizeof(m->position));
    case KEY_ARRANGEMENT: return get_text(r, m->arrangement, sizeof(m->arrangement));
    case KEY_ENGINE_BLOCK: return get_u32(r, &m->engine_block_tokens);
    case KEY_RULE:
        if (!get_u32(r, &v) || v > UINT8_MAX) {
            return false;
        }
        m->rule = (enum fb_rule)v;
        return true;
    case KEY_WINDOW: return get_u32(r, &m->window_tokens);
    case KEY_PAGE_TOKENS: return get_u32(r, &m->page_tokens);
    case KEY_LAYERS: return get_layers(r, m);
    case KEY_HEADS:
        return fb_cbor_get_array(r, &n) && n == 3 && get_u32(r, &m->head_first) &&
               get_u32(r, &m->head_count) && get_u32(r, &m->head_total);
    case KEY_SECTIONS: return get_sections(r, m);
    case KEY_SCALES: return get_scales(r, m);
    case KEY_GENERATION: return fb_cbor_get_uint(r, &m->generation);
    case KEY_PRIVATE: return get_private(r, m);
    case KEY_END: break;
    }
    return false;
}

/* The schema comes first, so that another version is told apart from garbage. */
static enum fb_status check_schema(struct fb_cbor_reader r, struct fb_error *error)
{
    uint64_t pairs, key, schema;

    if (!fb_cbor_get_map(&r, &pairs) || !fb_cbor_get_uint(&r, &key) || key != KEY_SCHEMA ||
        !fb_cbor_get_uint(&r, &schema)) {
        return fb_error_set(error, FB_EPROTO, "manifest: not a manifest");
    }
    if (schema != FB_MANIFEST_SCHEMA) {
        return fb_error_set(error, FB_EVERSION,
                            "manifest: schema %llu; this program knows %d: use matching versions",
                            (unsigned long long)schema, FB_MANIFEST_SCHEMA);
    }
    return FB_OK;
}

enum fb_status fb_manifest_decode(const uint8_t *in, size_t bytes, struct fb_manifest *ret_m,
                                  struct fb_error *error)
{
    uint8_t again[FB_MANIFEST_MAX_BYTES];
    struct fb_manifest m = {0};
    struct fb_cbor_reader r;
    enum fb_status status;
    uint64_t pairs, got;
    size_t again_bytes;

    fb_cbor_reader_init(&r, in, bytes);
    status = check_schema(r, error);
    if (status != FB_OK) {
        return status;
    }
    if (!fb_cbor_get_map(&r, &pairs) || pairs != KEY_COUNT) {
        return fb_error_set(error, FB_EPROTO, "manifest: not a map of %d fields", KEY_COUNT);
    }
    for (int key = KEY_SCHEMA; key < KEY_END; key++) {
        if (!fb_cbor_get_uint(&r, &got) || got != (uint64_t)key ||
            !get_field(&r, &m, (enum manifest_key)key)) {
            return fb_error_set(error, FB_EPROTO, "manifest: field %d is missing or malformed",
                                key);
        }
    }
    status = fb_manifest_encode(&m, again, sizeof(again), &again_bytes, error);
    if (status != FB_OK) {
        return status;
    }
    if (again_bytes != bytes || memcmp(in, again, bytes) != 0) {
        return fb_error_set(error, FB_EPROTO, "manifest: not in the deterministic encoding");
    }
    *ret_m = m;
    return FB_OK;
}

void fb_space_id(const uint8_t *encoded, size_t bytes, uint8_t ret_id[FB_SPACE_ID_BYTES])
{
    uint8_t digest[EVP_MAX_MD_SIZE];

    FB_ASSERT(EVP_Digest(encoded, bytes, digest, NULL, EVP_sha256(), NULL) == 1);
    memcpy(ret_id, digest, FB_SPACE_ID_BYTES);
}
