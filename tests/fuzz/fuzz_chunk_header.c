/* Any bytes as the header of a chunk file, with a CRC that is right and a file as long as it says
 * where that is not too long: refused with a reason, or all slots are inside the mapping. */
#include "pool/node/chunk.h"
#include "tests/fuzz/fuzz.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_FILE_BYTES (256ull << 20) /* sparse, but mapped */

static void check(int fd)
{
    struct fb_error error = {0};
    struct fb_chunk_file f;
    char path[64];

    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    if (fb_chunk_open(AT_FDCWD, path, &f, &error) != FB_OK) {
        FB_ASSERT(error.status != FB_OK && error.text[0]);
        return;
    }
    FB_ASSERT(f.slot_count > 0 && memchr(f.tenant, 0, sizeof(f.tenant)));
    FB_ASSERT(fb_chunk_slot(&f, f.slot_count - 1) + f.slot_bytes <= f.map + f.file_bytes);
    FB_ASSERT(*(volatile uint8_t *)fb_chunk_slot(&f, f.slot_count - 1) == 0);
    fb_chunk_close(&f);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    int fd = memfd_create("chunk", MFD_CLOEXEC);
    struct fb_chunk_header h = {0};

    memcpy(&h, data, bytes < sizeof(h) ? bytes : sizeof(h));
    FB_ASSERT(fd >= 0 && write(fd, data, bytes) == (ssize_t)bytes);
    check(fd);
    h.crc = fb_crc32c(&h, offsetof(struct fb_chunk_header, crc));
    FB_ASSERT(pwrite(fd, &h, sizeof(h), 0) == sizeof(h));
    FB_ASSERT(ftruncate(fd, sizeof(h)) == 0); /* what is behind it reads as zero */
    if (h.file_bytes >= sizeof(h) && h.file_bytes <= MAX_FILE_BYTES) {
        FB_ASSERT(ftruncate(fd, (off_t)h.file_bytes) == 0);
    }
    check(fd);
    close(fd);
    return 0;
}
