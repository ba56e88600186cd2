"""An engine's paged cache in the arrangements that engines have, as numpy arrays."""

import numpy as np

import forebay

LAYERS, HEADS, DIM, PAGE = 2, 4, 32, 64
SENTINEL = 0xA5A5  # what was never written
WAIT_S = 5  # deadlines of tests that are not about deadlines


def manifest(**changes):
    fields = dict(
        model="test@1",
        layers=range(LAYERS),
        sections=[forebay.Section(kind, DIM) for kind in (forebay.Kind.K, forebay.Kind.V)],
        page_tokens=PAGE,
        head_count=HEADS,
    )
    return forebay.Manifest(**{**fields, **changes})


def tokens(seed, pages):
    return np.random.default_rng(seed).integers(0, 128000, pages * PAGE, dtype=np.uint32)


def rows(seed, pages, heads=HEADS):
    """KV as bits of bf16, uint16 [layers, K and V, tokens, heads, dim]; any bits will do."""
    shape = (LAYERS, 2, pages * PAGE, heads, DIM)
    return np.random.default_rng(seed).integers(0, SENTINEL, shape, dtype=np.uint16)


# A layer's K and V of so many blocks: tensors and the dimensions that count blocks, tokens, heads
# and channels.


def _split_nhd(blocks, block_tokens, heads):
    kv = np.empty((2, blocks, block_tokens, heads, DIM), np.uint16)
    return [(part, (0, 1, 2, 3)) for part in kv]


def _block_nhd(blocks, block_tokens, heads):
    kv = np.empty((blocks, 2, block_tokens, heads, DIM), np.uint16)
    return [(kv[:, part], (0, 1, 2, 3)) for part in (0, 1)]


def _split_hnd(blocks, block_tokens, heads):
    kv = np.empty((2, blocks, heads, block_tokens, DIM), np.uint16)
    return [(part, (0, 2, 1, 3)) for part in kv]


def _transposed_k(blocks, block_tokens, heads):
    k = np.empty((blocks, heads, DIM, block_tokens), np.uint16)
    v = np.empty((blocks, heads, block_tokens, DIM), np.uint16)
    return [(k, (0, 3, 1, 2)), (v, (0, 2, 1, 3))]


ARRANGEMENTS = {
    "split-nhd": _split_nhd,
    "block-nhd": _block_nhd,
    "split-hnd": _split_hnd,
    "transposed-k": _transposed_k,
}


class Engine:
    """A cache with room for some pages, in blocks that are not in order.

    cache      what forebay takes; block_ids, block_tokens go with it
    read()     uint16 [layers, K and V, tokens, heads, dim]; write() the reverse
    """

    def __init__(self, pages, *, arrangement="split-nhd", block_tokens=16, heads=HEADS):
        self.tokens = pages * PAGE
        self.block_tokens = block_tokens
        used = -(-self.tokens // block_tokens)
        blocks = used + 3
        self.block_ids = np.random.default_rng(block_tokens).permutation(blocks)[:used].tolist()
        layers = [ARRANGEMENTS[arrangement](blocks, block_tokens, heads) for _ in range(LAYERS)]
        self.cache = forebay.Cache(
            [
                [
                    forebay.View.of(tensor, block=b, token=t, head=h, channel=c)
                    for tensor, (b, t, h, c) in layer
                ]
                for layer in layers
            ]
        )
        # [blocks, block tokens, heads, dim] of the same memory
        self._plain = [[tensor.transpose(order) for tensor, order in layer] for layer in layers]
        for part in self._parts():
            part[...] = SENTINEL

    def _parts(self):
        return [part for layer in self._plain for part in layer]

    def _places(self):
        token = np.arange(self.tokens)
        return np.array(self.block_ids)[token // self.block_tokens], token % self.block_tokens

    def write(self, values):
        for part, value in zip(self._parts(), values.reshape(-1, *values.shape[2:])):
            part[self._places()] = value
        return self

    def read(self):
        parts = np.stack([part[self._places()] for part in self._parts()])
        return parts.reshape(LAYERS, 2, *parts.shape[1:])

    def written(self):
        """Elements that are no sentinel, those outside of its blocks too."""
        return sum(int((part != SENTINEL).sum()) for part in self._parts())

    def put(self, pool, space, chain, **options):
        """Put whole; returns the statuses of the commit."""
        with pool.put(space, chain, timeout=WAIT_S, **options) as put:
            put.encode(self.cache, self.block_ids, self.block_tokens)
            return put.commit(timeout=WAIT_S)

    def get(self, hit, **options):
        """Returns the statuses."""
        return hit.get(0, self.cache, self.block_ids, self.block_tokens, timeout=WAIT_S, **options)
