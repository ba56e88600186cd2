"""Chain hashes of a request, by its tokens and by what else its KV depends on."""

from __future__ import annotations

import os
import threading
from array import array
from typing import Any

import forebay
from forebay import identity
from forebay._native import CHAIN_BYTES


class Unpoolable(Exception):
    """The KV of a request depends on something that has no name others could trust."""


class Adapters:
    """Digests of adapters, by the files in their folders. Made in the background."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], bytes | None] = {}
        self._replaced: set[tuple[int, str]] = set()

    def digest(self, adapter: Any) -> bytes | None:
        """None: not known yet, not readable, or loaded over another whose digest was made."""
        key = (adapter.lora_int_id, adapter.lora_path)
        if getattr(adapter, "load_inplace", False):
            self._replaced.add(key)
        if key in self._replaced:
            return None
        if key not in self._known:
            self._known[key] = None
            threading.Thread(target=self._make, args=(key,), daemon=True).start()
        return self._known[key]

    def _make(self, key: tuple[int, str]) -> None:
        try:
            names = [os.path.join(key[1], name) for name in os.listdir(key[1])]
            self._known[key] = identity.of_files(n for n in names if os.path.isfile(n))
        except OSError:
            pass  # requests with this adapter are not pooled


class RequestChain:
    """The chain of one request; grows with its tokens."""

    __slots__ = ("hashes", "page_tokens", "_extra", "_salt")

    def __init__(self, request: Any, page_tokens: int, adapters: Adapters) -> None:
        """Unpoolable: see there."""
        if getattr(request, "mm_features", None):
            raise Unpoolable("multimodal content is named by ids that a user may choose")
        if getattr(request, "prompt_embeds", None) is not None:
            raise Unpoolable("prompt embeddings")
        adapter = None
        if request.lora_request is not None:
            adapter = adapters.digest(request.lora_request)
            if adapter is None:
                raise Unpoolable("the adapter's digest is not known yet")
        self.hashes = b""
        self.page_tokens = page_tokens
        self._extra = forebay.Extra(adapter=adapter).encode() if adapter else b""
        salt = getattr(request, "cache_salt", None)
        self._salt = forebay.Extra(adapter=adapter, salt=salt).encode() if salt else self._extra

    @property
    def pages(self) -> int:
        return len(self.hashes) // CHAIN_BYTES

    def extras(self) -> list[bytes]:
        """Of each page."""
        return [self._salt if page == 0 else self._extra for page in range(self.pages)]

    def grow(self, tokens: Any) -> None:
        """Hash the pages that have become whole. tokens  [n] of the request, from its first on"""
        size, done = self.page_tokens, self.pages
        pages = len(tokens) // size
        if pages <= done:
            return
        new = array("I", tokens[done * size : pages * size])
        if done == 0 and self._salt != self._extra:
            self.hashes = forebay.chain(new[:size], size, extra=self._salt)
            new = new[size:]
        previous = self.hashes[-CHAIN_BYTES:] or None
        self.hashes += forebay.chain(new, size, previous=previous, extra=self._extra)
