/* Assertions. FB_ASSERT is always on and must be cheap: it guards what no input may bring about,
 * where going on could give out another block's bytes. FB_CHECK_SLOW runs checks that cost more
 * than the work they check, in builds that ask for them (FB_CHECK_SLOW_ON). */
#ifndef FB_PROTO_ASSERT_H
#define FB_PROTO_ASSERT_H

#include <stdio.h>
#include <stdlib.h>

__attribute__((noreturn, cold)) static inline void fb_assert_failed(const char *file, int line,
                                                                    const char *condition)
{
    fprintf(stderr, "%s:%d: assertion failed: %s\n", file, line, condition);
    abort();
}

#define FB_ASSERT(cond)                                  \
    do {                                                 \
        if (__builtin_expect(!(cond), 0)) {              \
            fb_assert_failed(__FILE__, __LINE__, #cond); \
        }                                                \
    } while (0)

/* Without FB_CHECK_SLOW_ON the condition is compiled but never evaluated. */
#ifdef FB_CHECK_SLOW_ON
#define FB_CHECK_SLOW(cond) FB_ASSERT(cond)
#else
#define FB_CHECK_SLOW(cond) ((void)sizeof((cond) ? 1 : 0))
#endif

#endif
