/* Status codes: names, texts, what is valid on a wire; error texts and their limit. */
#include "proto/status.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static void test_every_code_has_a_row(void **state)
{
    static const enum fb_status all[] = {
        FB_OK,        FB_MISS,      FB_AGAIN,    FB_EXISTS,       FB_BUSY,  FB_EINVAL,
        FB_EGEOMETRY, FB_ELIMIT,    FB_ENOENT,   FB_ESTATE,       FB_EPERM, FB_ENOMEM,
        FB_ETIMEDOUT, FB_ECANCELED, FB_ECORRUPT, FB_ENONFINITE,   FB_ECONN, FB_EPROTO,
        FB_EVERSION,  FB_EIO,       FB_EFATAL,   FB_EUNSUPPORTED,
    };
    uint32_t valid = 0;

    (void)state;
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        assert_true(fb_status_valid(all[i]));
        assert_ptr_equal(strstr(fb_status_name(all[i]), "FB_"), fb_status_name(all[i]));
        assert_string_not_equal(fb_status_name(all[i]), "FB_UNKNOWN");
        assert_string_not_equal(fb_status_text(all[i]), "unknown status");
    }
    for (uint32_t v = 0; v < 1000; v++) {
        valid += fb_status_valid(v);
    }
    assert_int_equal(valid, sizeof(all) / sizeof(all[0]));
}

static void test_unknown_code(void **state)
{
    (void)state;
    assert_false(fb_status_valid(2));
    assert_false(fb_status_valid(UINT32_MAX));
    assert_string_equal(fb_status_name((enum fb_status)2), "FB_UNKNOWN");
    assert_string_equal(fb_status_text((enum fb_status)2), "unknown status");
}

/* Clients written apart compare these numbers. */
static void test_numbers_are_fixed(void **state)
{
    (void)state;
    assert_int_equal(FB_AGAIN, 16);
    assert_int_equal(FB_EUNSUPPORTED, 30);
    assert_int_equal(FB_ECONN, 64);
    assert_int_equal(FB_EVERSION, 66);
    assert_int_equal(FB_EIO, 96);
    assert_int_equal(FB_EFATAL, 112);
}

static void test_error_set(void **state)
{
    char longer[2 * FB_ERROR_TEXT_BYTES];
    struct fb_error error;

    (void)state;
    assert_int_equal(fb_error_set(&error, FB_ELIMIT, "%d of %s", 3, "four"), FB_ELIMIT);
    assert_int_equal(error.status, FB_ELIMIT);
    assert_string_equal(error.text, "3 of four");
    assert_int_equal(fb_error_set(NULL, FB_EIO, "nobody reads this"), FB_EIO);

    memset(longer, 'x', sizeof(longer) - 1);
    longer[sizeof(longer) - 1] = 0;
    fb_error_set(&error, FB_EIO, "%s", longer);
    assert_int_equal(strlen(error.text), FB_ERROR_TEXT_BYTES - 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_code_has_a_row),
        cmocka_unit_test(test_unknown_code),
        cmocka_unit_test(test_numbers_are_fixed),
        cmocka_unit_test(test_error_set),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
