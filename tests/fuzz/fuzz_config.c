/* Any bytes as a configuration file: refused with a reason, or values that can be checked. */
#include "pool/node/config.h"
#include "tests/fuzz/fuzz.h"

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct fb_error error = {0};
    struct fb_config config;
    char path[64];
    int fd = memfd_create("config", MFD_CLOEXEC);

    FB_ASSERT(fd >= 0 && write(fd, data, bytes) == (ssize_t)bytes);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    fb_config_init(&config);
    if (fb_config_load_file(&config, path, &error) != FB_OK) {
        FB_ASSERT(error.status != FB_OK && error.text[0]);
    } else {
        FB_ASSERT(config.tenant_count > 0 && config.tenant_count <= FB_TENANTS_MAX);
        (void)fb_config_check(&config, 64ull << 30, &error);
    }
    close(fd);
    return 0;
}
