"""Chain hashes: the names of a prompt's pages, equal for all programs that share a pool."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forebay._native import (
    CHAIN_BYTES,
    CHAIN_MAX_EXTRA,
    DIGEST_BYTES,
    ChainExtra,
    MultimodalItem,
    check,
    lib,
)


@dataclass(frozen=True)
class Multimodal:
    """An item of a prompt that is not text, such as an image."""

    digest: bytes  #: [32] of the content itself, never of a name that a user may choose
    offset: int  #: of its first token in this page; negative: it began before


@dataclass(frozen=True)
class Extra:
    """What the KV of a page depends on besides the tokens up to its end."""

    adapter: bytes | None = None  #: [32] digest of the adapter's files
    multimodal: tuple[Multimodal, ...] = ()
    embeddings: bytes | None = None  #: [32] digest of prompt embeddings
    salt: str | None = None  #: keeps prompts apart; first page only

    def encode(self) -> bytes:
        """Deterministic CBOR; empty where nothing is present. ForebayError: over a limit."""
        for digest in (self.adapter, self.embeddings, *(m.digest for m in self.multimodal)):
            if digest is not None and len(digest) != DIGEST_BYTES:
                raise ValueError(f"a digest of {len(digest)} bytes; expected {DIGEST_BYTES}")
        if "\0" in (self.salt or ""):
            raise ValueError("a salt with a NUL; expected text without")
        items = (MultimodalItem * len(self.multimodal))()
        for item, source in zip(items, self.multimodal):
            ctypes.memmove(item.digest, source.digest, DIGEST_BYTES)
            item.offset = source.offset
        extra = ChainExtra(
            adapter=self.adapter,
            multimodal=items if len(items) else None,
            multimodal_count=len(items),
            embeddings=self.embeddings,
            salt=self.salt.encode() if self.salt else None,
        )
        out = ctypes.create_string_buffer(CHAIN_MAX_EXTRA)
        n = ctypes.c_size_t()
        check(lib.fb_chain_extra_encode(ctypes.byref(extra), out, len(out), ctypes.byref(n)))
        return out.raw[: n.value]


def chain(
    tokens: Sequence[int],
    page_tokens: int,
    *,
    previous: bytes | None = None,
    extra: bytes = b"",
) -> bytes:
    """Chain hashes of the whole pages of ``tokens``.

    tokens       [n] token ids; an ``array('I')`` or a contiguous uint32 array is not copied
    previous     [32] hash of the page before; None: ``tokens`` begin the prompt
    extra        `Extra.encode`, the same for all these pages
    returns      [n // page_tokens * 32] bytes, one hash after the other
    """
    if page_tokens < 1:
        raise ValueError(f"pages of {page_tokens} tokens; expected at least 1")
    count = len(tokens) // page_tokens
    if previous is not None and len(previous) != CHAIN_BYTES:
        raise ValueError(f"a previous hash of {len(previous)} bytes; expected {CHAIN_BYTES}")
    ids = _as_uint32(tokens)
    out = ctypes.create_string_buffer(max(count, 1) * CHAIN_BYTES)
    check(
        lib.fb_chain_pages(
            previous, address_of(ids), page_tokens, count, extra or None, len(extra), out
        )
    )
    return out.raw[: count * CHAIN_BYTES]


def _as_uint32(tokens: Sequence[int]) -> Any:
    if isinstance(tokens, array) and tokens.typecode == "I":
        return tokens
    interface = getattr(tokens, "__array_interface__", None)
    if (
        interface
        and interface["typestr"] == "<u4"
        and interface.get("strides") is None
        and len(interface["shape"]) == 1
    ):
        return tokens
    return array("I", tokens)


def address_of(numbers: Any) -> int:
    """Where the items of an ``array.array`` or of a numpy array are."""
    if isinstance(numbers, array):
        return numbers.buffer_info()[0]
    address: int = numbers.__array_interface__["data"][0]
    return address
