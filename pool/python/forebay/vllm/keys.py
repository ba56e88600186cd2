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
        self._known: dict[str, bytes | None] = {}

    def digest(self, path: str) -> bytes | None:
        """None: not known yet, or not readable."""
        if path not in self._known:
            self._known[path] = None
            threading.Thread(target=self._make, args=(path,), daemon=True).start()
        return self._known[path]

    def _make(self, path: str) -> None:
        try:
            names = [os.path.join(path, name) for name in os.listdir(path)]
            self._known[path] = identity.of_files(n for n in names if os.path.isfile(n))
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
            adapter = adapters.digest(request.lora_request.lora_path)
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
