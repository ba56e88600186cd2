/* Writes a few good inputs for each fuzz target: make_seeds DIRECTORY. */
#include "pool/node/chunk.h"
#include "proto/wire.h"
#include "tests/unit/proto_util.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

static FILE *seed_open(const char *directory, const char *target, uint32_t number)
{
    char path[512];
    FILE *f;

    snprintf(path, sizeof(path), "%s/%s", directory, target);
    mkdir(directory, 0777);
    mkdir(path, 0777);
    snprintf(path, sizeof(path), "%s/%s/%02u", directory, target, number);
    f = fopen(path, "wb");
    if (!f) {
        fprintf(stderr, "make_seeds: %s: %s\n", path, strerror(errno));
        exit(1);
    }
    return f;
}

static void seed_close(FILE *f)
{
    if (fclose(f) != 0) {
        perror("make_seeds");
        exit(1);
    }
}

static void write_seed(const char *directory, const char *target, uint32_t number, const void *data,
                       size_t bytes)
{
    FILE *f = seed_open(directory, target, number);

    fwrite(data, 1, bytes, f);
    seed_close(f);
}

static void write_manifests(const char *directory)
{
    uint8_t out[FB_MANIFEST_MAX_BYTES];
    struct fb_manifest m;
    size_t bytes;

    manifest_make(&m, 4, 2, 64, FB_CODEC_FP8_E4M3);
    if (fb_manifest_encode(&m, out, sizeof(out), &bytes, NULL) == FB_OK) {
        write_seed(directory, "fuzz_manifest", 0, out, bytes);
    }
    manifest_make_rich(&m);
    if (fb_manifest_encode(&m, out, sizeof(out), &bytes, NULL) == FB_OK) {
        write_seed(directory, "fuzz_manifest", 1, out, bytes);
    }
}

/* Fixed parts of zeros up to the largest: each is right for some type, and all name a type. */
static void write_messages(const char *directory)
{
    static const uint8_t zeros[sizeof(struct fb_hello_reply)];
    static uint8_t packet[FB_WIRE_MAX_BYTES];
    static const size_t body_bytes[] = {4, 8, 12, 16, 24, 68, 88};
    uint32_t number = 0;

    for (int type = FB_MSG_HELLO; type < FB_MSG_END; type++) {
        for (size_t i = 0; i < sizeof(body_bytes) / sizeof(body_bytes[0]); i++) {
            struct fb_wire_writer w;

            fb_wire_begin(&w, packet, (enum fb_msg)type, 1, FB_OK, zeros, body_bytes[i]);
            fb_wire_end(&w);
            write_seed(directory, "fuzz_wire_request", number, packet, w.bytes);
            write_seed(directory, "fuzz_wire_reply", number++, packet, w.bytes);
        }
    }
}

static void write_headers(const char *directory)
{
    static const struct fb_block_header block = {.magic = FB_BLOCK_MAGIC,
                                                 .version = FB_BLOCK_VERSION,
                                                 .state = FB_BLOCK_COMMITTED,
                                                 .block_bytes = 4096 + 2 * 36864,
                                                 .plane_bytes = 36864,
                                                 .plane_count = 2,
                                                 .layer_count = 2,
                                                 .page_tokens = 64};
    static const struct fb_chunk_header chunk = {.magic = FB_CHUNK_MAGIC,
                                                 .version = FB_CHUNK_VERSION,
                                                 .id = 1,
                                                 .file_bytes = FB_CHUNK_ALIGN,
                                                 .slot_bytes = 65536,
                                                 .slot_count = 31,
                                                 .tenant = "default"};

    write_seed(directory, "fuzz_block_header", 0, &block, sizeof(block));
    write_seed(directory, "fuzz_chunk_header", 0, &chunk, sizeof(chunk));
}

static void write_configs(const char *directory)
{
    static const char text[] =
        "host_bytes: 8GiB\nlease: 5s\ntenants:\n  - name: a\n    share: 60%\n"
        "  - {name: b-2, share: 40%}\n# end\n";
    FILE *f = seed_open(directory, "fuzz_config", 0);

    fb_config_print_sample(f);
    seed_close(f);
    write_seed(directory, "fuzz_config", 1, text, sizeof(text) - 1);
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: make_seeds DIRECTORY\n");
        return 2;
    }
    write_manifests(argv[1]);
    write_messages(argv[1]);
    write_headers(argv[1]);
    write_configs(argv[1]);
    return 0;
}
