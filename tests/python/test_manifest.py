"""Manifests: what is refused, and that each says why; what makes two spaces one."""

import pytest

import engine
import forebay
from forebay import Codec, Elem, ForebayError, Kind, Rule, Section, Status

K = Section(Kind.K, engine.DIM)

REFUSED = {
    "tenant-long": (dict(tenant="x" * 64), ValueError, "tenant of 64 bytes; at most 63"),
    "model-long": (dict(model="ä" * 128), ValueError, "model of 256 bytes; at most 255"),
    "model-with-nul": (dict(model="a\0b"), ValueError, "model has a NUL"),
    "layers-many": (dict(layers=range(1025)), ValueError, "1025 layers; at most 1024"),
    "layer-beyond-16-bits": (dict(layers=[0, 65536]), ValueError, "layer 65536; expected 0 to"),
    "layer-negative": (dict(layers=[-1]), ValueError, "layer -1; expected 0 to 65535"),
    "sections-many": (dict(sections=[K] * 33), ValueError, "33 sections; at most 32"),
    "scales-many": (dict(scales=[1.0] * 2049), ValueError, "2049 scales; at most 2048"),
    "private-id-short": (dict(private_id=b"x"), ValueError, "1 bytes; expected 16"),
    "model-empty": (dict(model=""), ForebayError, "model"),
    "layers-none": (dict(layers=[]), ForebayError, "layer"),
    "layers-not-ascending": (dict(layers=[1, 0]), ForebayError, "layer"),
    "page-empty": (dict(page_tokens=0), ForebayError, "page"),
    "window-without-rule": (dict(window_tokens=64), ForebayError, "window"),
    "rule-without-window": (dict(rule=Rule.WINDOW), ForebayError, "window"),
    "heads-beyond-total": (dict(head_first=1, head_total=4), ForebayError, "head"),
    "sections-none": (dict(sections=[]), ForebayError, "section"),
    "section-twice": (dict(sections=[K, K]), ForebayError, "section"),
    "codec-of-bytes": (
        dict(sections=[Section(Kind.K, 32, Elem.BYTE, Codec.INT8)]),
        ForebayError,
        "section",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(pool, name):
    changes, error, text = REFUSED[name]
    with pytest.raises(error, match=text) as caught:
        pool.space(engine.manifest(**changes))
    assert "manifest" in str(caught.value) or "private_id" in str(caught.value)


def test_tenant_of_another_socket_is_refused(pool):
    with pytest.raises(ForebayError) as caught:
        pool.space(engine.manifest(tenant="other"))
    assert caught.value.status == Status.EPERM


def test_space_describes_blocks(space):
    assert (space.page_tokens, space.planes, space.layers, space.sections) == (64, 4, 2, 2)
    assert space.source_bytes == 2 * 2 * 64 * 4 * 32 * 2
    assert space.block_bytes >= space.source_bytes + 4096
    assert len(space.id) == 16


def test_equal_manifests_are_one_space(pool, space):
    assert pool.space(engine.manifest(head_total=engine.HEADS)).id == space.id
    assert pool.space(engine.manifest(generation=1)).id != space.id
    assert pool.space(engine.manifest(scales=[1.0])).id != space.id
    assert pool.space(engine.manifest(private_id=bytes(16))).id != space.id


def test_family_of_rules(pool, space):
    """A hit is as long as the prefix that all spaces have."""
    window = pool.space(engine.manifest(rule=Rule.WINDOW, window_tokens=64, layers=[2, 3]))
    chain = forebay.chain(engine.tokens(1, 3), engine.PAGE)
    source = engine.Engine(3).write(engine.rows(1, 3))
    assert source.put(pool, space, chain) == [Status.OK] * 3
    with pool.lookup([space, window], chain, timeout=engine.WAIT_S) as hit:
        assert not hit
        assert hit.status == Status.MISS
    with pool.put(window, chain[32:64], position=1, parent=chain[:32]) as put:
        put.encode(source.cache, source.block_ids, source.block_tokens, first_token=engine.PAGE)
        assert put.commit() == [Status.OK]
    with pool.lookup([space, window], chain, timeout=engine.WAIT_S) as hit:
        assert hit.pages == 2
