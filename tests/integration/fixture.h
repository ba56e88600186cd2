/* What tests with one daemon and one pool begin with: small blocks of a plain model. */
#ifndef FB_TESTS_FIXTURE_H
#define FB_TESTS_FIXTURE_H

#include "tests/integration/daemon.h"
#include "tests/integration/engine.h"

enum { FIXTURE_LAYERS = 2, FIXTURE_HEADS = 2, FIXTURE_PAGE = 64, FIXTURE_PAGES = 4 };

struct fixture {
    struct daemon daemon;
    struct fb_manifest manifest;
    struct fb_pool *pool;
    struct fb_pool_space *space;
    struct engine from, to; /* FIXTURE_PAGES each */
    uint8_t chain[FIXTURE_PAGES][FB_CHAIN_BYTES];
};

/* Manifest that actors use as well. */
void fixture_manifest(struct fb_manifest *m);

/* flags of the daemon, or NULL; the pool is open and the space is too. */
void fixture_init(struct fixture *f, const char *const *flags);
void fixture_fini(struct fixture *f);

/* Chain and contents of a seed, in f->chain and f->from. */
void fixture_use(struct fixture *f, uint64_t seed);

/* Put it and assert that all is well; look it up, get it and assert that it is whole. */
void fixture_put(struct fixture *f, uint64_t seed);
void fixture_check(struct fixture *f, uint64_t seed);

/* Another space of the pool, another engine. */
struct fb_pool_space *fixture_open_space(struct fixture *f, const struct fb_manifest *m);
void fixture_engine(struct engine *e, const struct fb_manifest *m, uint32_t block_tokens,
                    uint32_t pages);

/* What such a space's engine puts is what another one, with the same blocks, gets. */
void fixture_round_trip(struct fixture *f, const struct fb_manifest *m, uint32_t block_tokens,
                        uint32_t pages, uint64_t seed);

/* Look up the chain in use. */
struct fb_hit *fixture_lookup(struct fixture *f);

/* Wait until the library has found a daemon again. */
void fixture_await_connected(struct fixture *f);

#endif
