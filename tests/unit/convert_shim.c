/* The codecs as flat functions of arrays, for test_convert_ml_dtypes.py. */
#include "kernels/fpenv.h"
#include "kernels/rows.h"
#include "kernels/scale.h"

#define SHIM_EXPORT __attribute__((visibility("default")))

SHIM_EXPORT int shim_has_isa(int isa);
SHIM_EXPORT void shim_narrow(int elem, const float *v, size_t n, uint16_t *ret_x);
SHIM_EXPORT void shim_widen(int elem, const uint16_t *x, size_t n, float *ret_v);
SHIM_EXPORT uint32_t shim_encode(int isa, int codec, int elem, uint32_t rows, uint32_t row_elems,
                                 const uint16_t *x, uint8_t *codes, uint8_t *scales);
SHIM_EXPORT void shim_decode(int isa, int codec, int elem, uint32_t rows, uint32_t row_elems,
                             const uint8_t *codes, const uint8_t *scales, uint16_t *x);

int shim_has_isa(int isa)
{
    return fb_kernels_get((enum fb_kernels_isa)isa) != NULL;
}

void shim_narrow(int elem, const float *v, size_t n, uint16_t *ret_x)
{
    fb_fpenv saved = fb_fpenv_enter();

    for (size_t i = 0; i < n; i++) {
        ret_x[i] = fb_f32_to_elem((enum fb_elem)elem, v[i]);
    }
    fb_fpenv_leave(saved);
}

void shim_widen(int elem, const uint16_t *x, size_t n, float *ret_v)
{
    fb_fpenv saved = fb_fpenv_enter();

    for (size_t i = 0; i < n; i++) {
        ret_v[i] = fb_elem_to_f32((enum fb_elem)elem, x[i]);
    }
    fb_fpenv_leave(saved);
}

static void format_init(struct fb_row_format *f, int isa, int codec, int elem, uint32_t row_elems)
{
    struct fb_section s = {
        .codec = (enum fb_codec)codec, .elem = (enum fb_elem)elem, .row_elems = row_elems};

    fb_row_format_init(f, fb_kernels_get((enum fb_kernels_isa)isa), &s);
}

uint32_t shim_encode(int isa, int codec, int elem, uint32_t rows, uint32_t row_elems,
                     const uint16_t *x, uint8_t *codes, uint8_t *scales)
{
    fb_fpenv saved = fb_fpenv_enter();
    struct fb_row_format f;

    format_init(&f, isa, codec, elem, row_elems);
    uint32_t bad = fb_rows_encode(&f, x, row_elems, rows, codes, scales);

    fb_fpenv_leave(saved);
    return bad;
}

void shim_decode(int isa, int codec, int elem, uint32_t rows, uint32_t row_elems,
                 const uint8_t *codes, const uint8_t *scales, uint16_t *x)
{
    fb_fpenv saved = fb_fpenv_enter();
    struct fb_row_format f;

    format_init(&f, isa, codec, elem, row_elems);
    fb_rows_decode(&f, codes, scales, rows, x, row_elems, false);
    fb_fpenv_leave(saved);
}
