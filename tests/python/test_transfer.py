"""Puts and gets over caches in the arrangements of engines."""

from array import array

import numpy as np
import pytest

import engine
import forebay
from engine import ARRANGEMENTS, DIM, HEADS, PAGE, SENTINEL, WAIT_S, Engine
from forebay import Codec, Elem, Kind, Section, Status

PAGES = 4
OK = [Status.OK] * PAGES


@pytest.fixture
def chain():
    return forebay.chain(engine.tokens(1, PAGES), PAGE)


@pytest.fixture
def kv():
    return engine.rows(1, PAGES)


@pytest.fixture
def stored(pool, space, chain, kv):
    """That KV is in the pool; gives a hit of all of it."""
    assert Engine(PAGES).write(kv).put(pool, space, chain) == OK
    with pool.lookup([space], chain, timeout=WAIT_S) as hit:
        assert hit.pages == PAGES
        yield hit


@pytest.mark.parametrize("block_tokens", [16, 48, 128])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_put(pool, space, chain, kv, arrangement, block_tokens):
    """What an engine of any arrangement has put is what a plain one gets."""
    source = Engine(PAGES, arrangement=arrangement, block_tokens=block_tokens).write(kv)
    assert source.put(pool, space, chain) == OK
    to = Engine(PAGES, block_tokens=PAGE)
    with pool.lookup([space], chain, timeout=WAIT_S) as hit:
        assert to.get(hit) == OK
    assert np.array_equal(to.read(), kv)


@pytest.mark.parametrize("block_tokens", [16, 48, 128])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_get(stored, kv, arrangement, block_tokens):
    """An engine of any arrangement gets what a plain one has put, and nothing else is written."""
    to = Engine(PAGES, arrangement=arrangement, block_tokens=block_tokens)
    assert to.get(stored) == OK
    assert np.array_equal(to.read(), kv)
    assert to.written() == kv.size


def test_get_range_of_tokens(stored, kv):
    to = Engine(PAGES)
    assert to.get(stored, tokens=(70, 100)) == OK
    assert np.array_equal(to.read()[:, :, 70:170], kv[:, :, 70:170])
    assert to.written() == kv[:, :, 70:170].size


def test_get_range_of_pages(stored, kv):
    to = Engine(PAGES)
    assert to.get(stored, pages=(1, 2)) == OK[:2]
    assert np.array_equal(to.read()[:, :, PAGE : 3 * PAGE], kv[:, :, PAGE : 3 * PAGE])
    assert to.written() == kv.size // 2


def test_get_behind_other_tokens(stored, kv):
    """The chain's first token need not be the first of the engine's blocks."""
    to = Engine(PAGES + 1)
    assert to.get(stored, first_token=PAGE) == OK
    assert np.array_equal(to.read()[:, :, PAGE:], kv)
    assert to.written() == kv.size


def test_get_range_of_heads(stored, kv):
    """A rank that has two of the heads."""
    to = Engine(PAGES, heads=3)
    assert to.get(stored, planes=(2, 2), head=1) == OK
    assert np.array_equal(to.read()[..., 1:, :], kv[..., 2:, :])
    assert (to.read()[..., 0, :] == SENTINEL).all()


def test_get_range_of_layers(stored, kv):
    to = Engine(PAGES)
    assert to.get(stored, layers=(1, 1)) == OK
    assert np.array_equal(to.read()[1], kv[1])
    assert to.written() == kv[1].size


def test_get_into_blocks_of_each_layer(stored, kv):
    to = Engine(PAGES)
    ids = [to.block_ids, to.block_ids[::-1]]
    assert stored.get(0, to.cache, ids, to.block_tokens) == OK
    assert np.array_equal(to.read()[0], kv[0])
    to.block_ids.reverse()
    assert np.array_equal(to.read()[1], kv[1])


def test_ids_in_any_form(stored, kv):
    for form in (tuple, np.array, lambda ids: np.array(ids, np.int32), lambda ids: array("q", ids)):
        to = Engine(PAGES)
        assert stored.get(0, to.cache, form(to.block_ids), to.block_tokens) == OK
        assert np.array_equal(to.read(), kv)


def test_put_by_heads(pool, space, chain, kv):
    """Two ranks write their heads of the same blocks, which are published when both have."""
    to = Engine(PAGES)
    for first in (0, 2):
        with pool.lookup([space], chain, timeout=WAIT_S) as hit:
            assert not hit
        source = Engine(PAGES, heads=2).write(kv[..., first : first + 2, :])
        with pool.put(space, chain, planes=(first, 2)) as put:
            args = source.cache, source.block_ids, source.block_tokens
            assert put.encode(*args, planes=(first, 2)) == OK
            assert put.commit() == OK
    with pool.lookup([space], chain, timeout=WAIT_S) as hit:
        assert to.get(hit) == OK
    assert np.array_equal(to.read(), kv)


def test_null_block(pool, space, stored, chain, kv):
    """A page in a block that is not there is neither gathered nor written."""
    to = Engine(PAGES, block_tokens=PAGE)
    to.block_ids[1] = -1
    assert to.get(stored) == [Status.OK, Status.EINVAL, Status.OK, Status.OK]
    assert to.written() == kv.size * 3 // 4
    other = forebay.chain(engine.tokens(2, PAGES), PAGE)
    with pool.put(space, other) as put:
        args = to.cache, to.block_ids, to.block_tokens
        assert put.encode(*args)[:2] == [Status.OK, Status.EINVAL]
        assert put.commit()[1] == Status.ECANCELED


def test_too_few_blocks(stored):
    to = Engine(PAGES, block_tokens=PAGE)
    statuses = stored.get(0, to.cache, to.block_ids[:-1], to.block_tokens)
    assert statuses == [*OK[1:], Status.EINVAL]


@pytest.mark.parametrize(
    "options",
    [dict(pages=(0, 5)), dict(planes=(3, 2)), dict(layers=(1, 2))],
    ids=["pages", "planes", "layers"],
)
def test_transfer_beyond_the_hit_is_refused(stored, options):
    with pytest.raises(forebay.ForebayError) as caught:
        Engine(PAGES).get(stored, **options)
    assert caught.value.status == Status.EINVAL


def test_cache_that_does_not_fit_is_refused(stored):
    to = Engine(PAGES)
    one_layer = forebay.Cache([[forebay.View(0, 0, 0, 0, 0), None]])
    with pytest.raises(ValueError, match="1 layers and 2 sections for a space of 2 and 2"):
        stored.get(0, one_layer, to.block_ids, to.block_tokens)
    with pytest.raises(ValueError, match="ids of 3 layers for a transfer of 2"):
        stored.get(0, to.cache, [to.block_ids] * 3, to.block_tokens)


def test_view_names_every_dimension_once():
    tensor = np.zeros((8, 16, 4, DIM), np.uint16)
    with pytest.raises(ValueError, match="4 dimensions, of which 3 are named"):
        forebay.View.of(tensor, block=0, token=1)
    with pytest.raises(ValueError, match="name each once"):
        forebay.View.of(tensor, block=0, token=1, head=1)


# --- other sections and codecs ---


def test_mla(pool):
    """One latent and one rope row a token, without heads; the rope part in one layer only."""
    sections = [Section(Kind.LATENT, 96), Section(Kind.ROPE, 16, layer_first=1)]
    space = pool.space(engine.manifest(sections=sections, head_count=1))
    chain = forebay.chain(engine.tokens(3, PAGES), PAGE)

    def cache(fill):
        tensors = [fill((20, 16, width)) for width in (96, 96, 16)]
        views = [forebay.View.of(t, block=0, token=1) for t in tensors]
        return tensors, forebay.Cache([[views[0], None], [views[1], views[2]]])

    random = np.random.default_rng(3)
    source, source_cache = cache(lambda shape: random.integers(0, 65536, shape, np.uint16))
    to, to_cache = cache(lambda shape: np.full(shape, SENTINEL, np.uint16))
    ids = range(2, 18)
    with pool.put(space, chain) as put:
        assert put.encode(source_cache, ids, 16) == OK
        assert put.commit() == OK
    with pool.lookup([space], chain, timeout=WAIT_S) as hit:
        assert hit.get(0, to_cache, ids, 16) == OK
    for a, b in zip(source, to):
        assert np.array_equal(a[2:18], b[2:18])
        assert (b[:2] == SENTINEL).all() and (b[18:] == SENTINEL).all()


def half(seed):
    """KV that is finite in fp16, as bits."""
    values = np.random.default_rng(seed).normal(size=engine.rows(0, PAGES).shape)
    return values.astype(np.float16).view(np.uint16)


@pytest.mark.parametrize(
    ("codec", "bound"),
    [(Codec.FP8_E4M3, 2**-4), (Codec.FP8_E5M2, 2**-3), (Codec.INT8, 0.02)],
    ids=["fp8_e4m3", "fp8_e5m2", "int8"],
)
def test_quantized(pool, codec, bound):
    """Within the codec's error of the largest element; KV of other engines gets the same bits."""
    sections = [Section(kind, DIM, Elem.FP16, codec) for kind in (Kind.K, Kind.V)]
    space = pool.space(engine.manifest(sections=sections))
    assert space.block_bytes < space.source_bytes
    chain = forebay.chain(engine.tokens(4, PAGES), PAGE)
    kv = half(4)
    assert Engine(PAGES).write(kv).put(pool, space, chain) == OK
    engines = [Engine(PAGES), Engine(PAGES, arrangement="transposed-k", block_tokens=128)]
    with pool.lookup([space], chain, timeout=WAIT_S) as hit:
        for to in engines:
            assert to.get(hit) == OK
    a, b = (to.read() for to in engines)
    assert np.array_equal(a, b)
    assert not np.array_equal(a, kv)
    source = kv.view(np.float16).astype(np.float32)
    error = np.abs(a.view(np.float16).astype(np.float32) - source)
    assert (error <= bound * np.abs(source).max(axis=-1, keepdims=True)).all()


def test_infinity_is_not_quantized(pool):
    sections = [Section(kind, DIM, Elem.FP16, Codec.INT8) for kind in (Kind.K, Kind.V)]
    space = pool.space(engine.manifest(sections=sections))
    chain = forebay.chain(engine.tokens(5, PAGES), PAGE)
    kv = half(5)
    kv[1, 1, 2 * PAGE, HEADS - 1, 0] = 0x7C00
    source = Engine(PAGES).write(kv)
    with pool.put(space, chain) as put:
        statuses = put.encode(source.cache, source.block_ids, source.block_tokens)
        assert statuses == [Status.OK, Status.OK, Status.ENONFINITE, Status.OK]
        assert put.commit()[2] == Status.ECANCELED
    with pool.lookup([space], chain, timeout=WAIT_S) as hit:
        assert hit.pages == 2


def test_torch(pool, space, chain, kv):
    torch = pytest.importorskip("torch")
    source = torch.from_numpy(kv.view(np.int16)).view(torch.bfloat16)
    blocks = source.reshape(2, 2, -1, 16, HEADS, DIM)  # as engine blocks of 16 tokens, in order
    to = torch.zeros_like(blocks)
    ids = torch.arange(blocks.shape[2])

    def cache(tensor):
        view = forebay.View.of
        return forebay.Cache(
            [[view(kv, block=0, token=1, head=2, channel=3) for kv in layer] for layer in tensor]
        )

    with pool.put(space, chain) as put:
        assert put.encode(cache(blocks), ids.tolist(), 16) == OK
        assert put.commit() == OK
    with pool.lookup([space], chain, timeout=WAIT_S) as hit:
        assert hit.get(0, cache(to), ids.tolist(), 16) == OK
    assert torch.equal(to.view(torch.int16), blocks.view(torch.int16))
