"""An engine's paged cache, described so that the library reads and writes it in place."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from forebay._native import PagedView


class View:
    """One section of one layer. Element (block b, token t, head h, channel c) is at
    ``base + elem_bytes * (b*block + t*token + h*head + c*channel)``; strides are in elements.

    ``owner`` is what keeps the memory: the view holds a reference to it.
    """

    __slots__ = ("base", "strides", "owner")

    def __init__(
        self, base: int, block: int, token: int, head: int, channel: int, owner: Any = None
    ) -> None:
        self.base = base
        self.strides = (block, token, head, channel)
        self.owner = owner

    @classmethod
    def of(
        cls,
        tensor: Any,
        *,
        block: int = 0,
        token: int | None = None,
        head: int | None = None,
        channel: int = -1,
    ) -> View:
        """A numpy array or torch tensor, by the dimensions that count blocks, tokens, heads and
        channels. A dimension that is None is not there; others must have been indexed away."""
        base, strides = _memory(tensor)
        named = [d for d in (block, token, head, channel) if d is not None]
        if len({d % len(strides) for d in named}) != len(named) or len(named) != len(strides):
            raise ValueError(
                f"a tensor of {len(strides)} dimensions, of which {len(named)} are named; "
                "name each once, or index it away"
            )
        view = cls(base, *(0 if d is None else strides[d] for d in (block, token, head, channel)))
        view.owner = tensor
        return view


def _memory(tensor: Any) -> tuple[int, tuple[int, ...]]:
    """Address and strides in elements."""
    if hasattr(tensor, "data_ptr"):  # torch
        return tensor.data_ptr(), tuple(tensor.stride())
    size = tensor.itemsize
    return tensor.__array_interface__["data"][0], tuple(s // size for s in tensor.strides)


class Cache:
    """Views of all layers of a space and all its sections.

    views  [layers][sections] `View`, or None where a section does not cover a layer
    """

    __slots__ = ("layers", "sections", "native", "_owners")

    def __init__(self, views: Sequence[Sequence[View | None]]) -> None:
        self.layers = len(views)
        self.sections = len(views[0]) if views else 0
        if not views or any(len(layer) != self.sections for layer in views):
            raise ValueError("every layer of a cache must have a view, or None, for each section")
        self.native = (PagedView * (self.layers * self.sections))()
        self._owners = [view.owner for layer in views for view in layer if view]
        for at, view in enumerate(view for layer in views for view in layer):
            if view:
                self.native[at] = PagedView(view.base, *view.strides)

    def from_layer(self, first: int) -> ctypes.Array[PagedView]:
        """Views from a layer on, as the library wants them."""
        if not 0 <= first < self.layers:
            raise ValueError(f"layer {first} of a cache of {self.layers}")
        count = (self.layers - first) * self.sections
        at = ctypes.addressof(self.native) + first * self.sections * ctypes.sizeof(PagedView)
        return (PagedView * count).from_address(at)
