"""How an engine's own kernel arranges rows in its cache, found by writing marked rows.

Shapes and strides of a cache tensor do not tell: a kernel may keep keys transposed inside a block
whatever the tensor says. So numbers are written through the kernel into a scratch cache of the
same shape, digit by digit, since 16-bit floats hold small integers exactly; then each place of the
scratch tells which element lives there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

#: Integers up to here are exact in an element type of so many bytes.
_BASE = {1: 8, 2: 128, 4: 128}


@dataclass(frozen=True)
class Strides:
    """Element (block b, token t, head h, channel c) is at offset + b*block + t*token + h*head +
    c*channel, all in elements."""

    offset: int
    block: int
    token: int
    head: int
    channel: int


@dataclass(frozen=True)
class Found:
    """Where a kernel puts the two kinds of rows that it writes, such as keys and values."""

    first: Strides | None  #: None: no strides give their places
    second: Strides | None
    fingerprint: str  #: equal where all bytes that the kernel writes are

    @property
    def strided(self) -> bool:
        return self.first is not None and self.second is not None


def find(
    write: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
    cache: torch.Tensor,
    first: tuple[int, int, int],
    second: tuple[int, int, int],
    dtype: torch.dtype,
    stored: torch.dtype,
) -> Found:
    """Have a kernel write marked rows of both kinds, and see where they are.

    write          calls the kernel: rows of both kinds, then the scratch cache; token i of the
                   rows is to go to slot i
    cache          the engine's cache of one layer: [blocks, ...]
    first, second  (tokens, heads, channels) of the rows; the tokens are those of two blocks
    dtype, stored  of the rows, and of the cache's elements
    """
    scratch = _scratch(cache)
    flat = scratch.as_strided((_storage_elems(scratch),), (1,), 0).view(stored)
    base = _BASE[flat.element_size()]
    counts = [shape[0] * shape[1] * shape[2] for shape in (first, second)]
    numbers = torch.zeros(flat.numel(), dtype=torch.int64)
    signs = torch.zeros(flat.numel(), dtype=torch.int64)
    digest = hashlib.sha256()
    scale = 1
    while True:
        rows = [
            (torch.arange(n) // scale % base + 1).view(shape).to(dtype)
            for n, shape in zip(counts, (first, second))
        ]
        flat.view(torch.uint8).zero_()
        write(rows[0], -rows[1], scratch)
        digest.update(flat.view(torch.uint8).cpu().numpy())
        found = flat.to(torch.float32).round().to(torch.int64).cpu()
        numbers += (found.abs() - 1).clamp(min=0) * scale
        signs = found.sign()
        scale *= base
        if scale >= max(counts):
            break
    return Found(
        _fit(numbers, signs > 0, first), _fit(numbers, signs < 0, second), digest.hexdigest()[:32]
    )


def _scratch(cache: torch.Tensor) -> torch.Tensor:
    """Two blocks, strided like the engine's."""
    shape = (2, *cache.shape[1:])
    return torch.empty_strided(shape, cache.stride(), dtype=cache.dtype, device=cache.device)


def _storage_elems(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _fit(
    numbers: torch.Tensor, written: torch.Tensor, shape: tuple[int, int, int]
) -> Strides | None:
    count = shape[0] * shape[1] * shape[2]
    places = written.nonzero().flatten()
    which = numbers[places]
    if len(places) != count or len(which.unique()) != count or int(which.max()) >= count:
        return None
    at = torch.empty(count, dtype=torch.int64)
    at[which] = places
    at = at.view(2, shape[0] // 2, shape[1], shape[2])
    sizes = at.shape
    origin = int(at[0, 0, 0, 0])
    steps = [int(at.select(d, 1).flatten()[0]) - origin if sizes[d] > 1 else 0 for d in range(4)]
    expected = torch.full(sizes, origin, dtype=torch.int64)
    for d, step in enumerate(steps):
        line = torch.arange(sizes[d]) * step
        expected += line.view([-1 if i == d else 1 for i in range(4)])
    return Strides(origin, *steps) if torch.equal(at, expected) else None
