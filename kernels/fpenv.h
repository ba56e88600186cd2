/* Floating-point environment of a codec: round to nearest even, subnormals kept, no traps.
 *
 * Enter before the first operation, leave on every way out: the caller gets back what it had set,
 * its exception flags included. */
#ifndef FB_KERNELS_FPENV_H
#define FB_KERNELS_FPENV_H

#if defined(__x86_64__)
#include <xmmintrin.h>

#define FB_MXCSR_DEFAULT 0x1f80u

typedef unsigned int fb_fpenv;

static inline fb_fpenv fb_fpenv_enter(void)
{
    fb_fpenv saved = _mm_getcsr();

    _mm_setcsr(FB_MXCSR_DEFAULT);
    return saved;
}

static inline void fb_fpenv_leave(fb_fpenv saved)
{
    _mm_setcsr(saved);
}

/* Order streaming stores before whatever publishes them. */
static inline void fb_stream_fence(void)
{
    _mm_sfence();
}

#else
#include <fenv.h>

typedef fenv_t fb_fpenv;

static inline fb_fpenv fb_fpenv_enter(void)
{
    fb_fpenv saved;

    fegetenv(&saved);
    fesetenv(FE_DFL_ENV);
    return saved;
}

static inline void fb_fpenv_leave(fb_fpenv saved)
{
    fesetenv(&saved);
}

static inline void fb_stream_fence(void)
{
}
#endif

#endif
