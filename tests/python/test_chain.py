"""Chain hashes against docs/formats.md, "Chain and key", written out here with hashlib."""

import hashlib
import struct
from array import array

import cbor2
import numpy as np
import pytest

import forebay
from forebay import Extra, Multimodal

TAG = b"fb.chain\x01"
DIGEST = bytes(range(32))
ITEM = (Multimodal(DIGEST, 0),)
IDS = [7, 0, 4294967295, 128000, 5, 6, 9, 10, 11]


def expected_chain(ids, page_tokens, previous=None, extra=b""):
    at = previous or hashlib.sha256(TAG).digest()
    out = b""
    for first in range(0, len(ids) // page_tokens * page_tokens, page_tokens):
        page = ids[first : first + page_tokens]
        data = TAG + at + struct.pack(f"<I{page_tokens}I", page_tokens, *page)
        at = hashlib.sha256(data + struct.pack("<I", len(extra)) + extra).digest()
        out += at
    return out


@pytest.mark.parametrize(
    "tokens",
    [
        IDS,
        tuple(IDS),
        array("I", IDS),
        array("q", IDS),
        np.array(IDS, np.uint32),
        np.array(IDS, np.int64),
        np.repeat(np.array(IDS, np.uint32), 2)[::2],
        np.array(IDS, ">u4"),
    ],
    ids=["list", "tuple", "array-I", "array-q", "uint32", "int64", "strided", "big-endian"],
)
def test_ids_in_any_form(tokens):
    assert forebay.chain(tokens, 4) == expected_chain(IDS, 4)


def test_previous_continues_a_chain():
    whole = forebay.chain(IDS, 2)
    assert len(whole) == 4 * 32
    assert forebay.chain(IDS[4:], 2, previous=whole[32:64]) == whole[64:]


def test_less_than_a_page_has_no_hash():
    assert forebay.chain(IDS, 10) == b""
    assert forebay.chain([], 4) == b""


@pytest.mark.parametrize(
    ("extra", "fields"),
    [
        (Extra(), {}),
        (Extra(adapter=DIGEST), {1: DIGEST}),
        (Extra(salt="näh"), {4: "näh"}),
        (Extra(embeddings=DIGEST[::-1]), {3: DIGEST[::-1]}),
        (
            Extra(DIGEST, (Multimodal(DIGEST, -3), Multimodal(DIGEST, 5)), DIGEST, "s"),
            {1: DIGEST, 2: [[DIGEST, -3], [DIGEST, 5]], 3: DIGEST, 4: "s"},
        ),
    ],
    ids=["nothing", "adapter", "salt", "embeddings", "all"],
)
def test_extra_is_deterministic_cbor(extra, fields):
    encoded = cbor2.dumps(fields, canonical=True) if fields else b""
    assert extra.encode() == encoded
    assert forebay.chain(IDS, 4, extra=extra.encode()) == expected_chain(IDS, 4, extra=encoded)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: forebay.chain(IDS, 0), ValueError, "pages of 0 tokens; expected at least 1"),
        (lambda: forebay.chain(IDS, 4, previous=b"x"), ValueError, "1 bytes; expected 32"),
        (lambda: forebay.chain([-1], 1), OverflowError, "negative"),
        (lambda: forebay.chain([1 << 32], 1), OverflowError, "int|large"),
        (lambda: forebay.chain(np.zeros((4, 4), np.uint32), 4), TypeError, "."),
        (lambda: forebay.chain([0] * 4097, 4097), forebay.ForebayError, "invalid argument"),
        (lambda: forebay.chain(IDS, 4, extra=bytes(4097)), forebay.ForebayError, "invalid"),
        (lambda: Extra(adapter=b"name").encode(), ValueError, "4 bytes; expected 32"),
        (lambda: Extra(salt="a\0b").encode(), ValueError, "NUL"),
        (lambda: Extra(multimodal=ITEM * 65).encode(), forebay.ForebayError, "limit|invalid"),
    ],
    ids=[
        "no-page",
        "short-previous",
        "negative-id",
        "large-id",
        "two-dimensions",
        "long-page",
        "long-extra",
        "short-digest",
        "salt-with-nul",
        "many-items",
    ],
)
def test_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()
