/* What the fuzz targets share. libFuzzer calls LLVMFuzzerTestOneInput from one thread. */
#ifndef FB_TESTS_FUZZ_H
#define FB_TESTS_FUZZ_H

#include "proto/assert.h"

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

#endif
