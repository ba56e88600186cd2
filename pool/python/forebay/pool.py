"""Pools, spaces, hits and puts.

The pool is a cache and never in the way: where it is slow, full, broken or gone, calls say so
within their deadline, and the caller computes what it would have computed anyway. Calls release
the GIL. Objects are closed by ``with`` or by name; one that is merely dropped is handed to its
pool, which releases it with its next call: destructors never wait.
"""

from __future__ import annotations

import ctypes
import warnings
import weakref
from array import array
from collections import deque
from collections.abc import Sequence
from ctypes import byref, c_uint32, c_uint64, c_void_p
from types import TracebackType
from typing import Any

from forebay import _native
from forebay._native import CHAIN_BYTES, KEY_BYTES, SPACE_ID_BYTES, Status, check, lib
from forebay.cache import Cache
from forebay.chain import address_of
from forebay.manifest import Manifest

READ_AHEAD = 1  #: `Pool.lookup`: start to bring what is in slower tiers


def _ns(seconds: float | None) -> int:
    """A deadline for the library; None: the call's default."""
    return 0 if seconds is None else max(1, int(seconds * 1e9))


def _hash(name: str, value: bytes) -> bytes:
    if len(value) != CHAIN_BYTES:
        raise ValueError(f"{name} of {len(value)} bytes; expected a chain hash of {CHAIN_BYTES}")
    return value


def _pages(chain: bytes) -> int:
    if len(chain) % CHAIN_BYTES:
        raise ValueError(f"a chain of {len(chain)} bytes; expected {CHAIN_BYTES} a page")
    return len(chain) // CHAIN_BYTES


class Space:
    """A space of a pool; made by `Pool.space`, and gone with the pool."""

    def __init__(self, pool: Pool, handle: c_void_p, manifest: Manifest) -> None:
        self.pool = pool
        self.manifest = manifest
        self._handle = handle
        self.id = ctypes.string_at(lib.fb_pool_space_id(handle), SPACE_ID_BYTES)
        layout = lib.fb_pool_space_layout(handle).contents
        self.page_tokens: int = layout.page_tokens
        self.planes: int = layout.plane_count
        self.layers: int = layout.layer_count
        self.sections: int = layout.section_count
        self.block_bytes: int = layout.block_bytes  #: as stored
        self.source_bytes: int = layout.source_bytes  #: of the same rows in the engine

    @property
    def handle(self) -> c_void_p:
        self.pool._opened()
        return self._handle

    def key(self, chain_hash: bytes) -> bytes:
        """[32] pool key of a page."""
        out = ctypes.create_string_buffer(KEY_BYTES)
        lib.fb_pool_key(self.handle, _hash("chain_hash", chain_hash), out)
        return out.raw


class Pool:
    """A connection to the daemon of this host, which may come and go.

    address  path of a tenant's socket; None: $FOREBAY_SOCKET, else the default one
    connect  seconds to wait for the daemon; without one everything misses until there is
    spin     seconds to poll for an answer before sleeping

    Any thread may call. After a fork the child must open a pool of its own. ForebayError: not an
    address, or a daemon that refuses.
    """

    def __init__(
        self, address: str | None = None, *, connect: float | None = None, spin: float = 0.0
    ) -> None:
        self._handle: c_void_p | None = None
        self._held: weakref.WeakSet[Hit | Put] = weakref.WeakSet()
        self._dropped: deque[tuple[Any, c_void_p]] = deque()
        options = _native.OpenOptions(spin_ns=int(spin * 1e9), connect_ns=_ns(connect))
        handle, error = c_void_p(), _native.Error()
        name = address.encode() if address is not None else None
        check(lib.fb_open(name, byref(options), byref(handle), byref(error)), error)
        self._handle = handle

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            warnings.warn("a forebay.Pool was not closed", ResourceWarning, stacklevel=2)

    def close(self) -> None:
        """Release hits, abort puts, close; none of them may be in use. Twice is allowed."""
        if self._handle:
            for held in list(self._held):
                held.__exit__(None, None, None)
            self._release_dropped()
            handle, self._handle = self._handle, None
            lib.fb_close(handle)

    @property
    def handle(self) -> c_void_p:
        handle = self._opened()
        self._release_dropped()
        return handle

    def _opened(self) -> c_void_p:
        if not self._handle:
            raise ValueError("this pool has been closed, and what belongs to it with it")
        return self._handle

    def _release_dropped(self) -> None:
        while self._dropped:
            try:
                release, handle = self._dropped.popleft()
            except IndexError:  # another thread was quicker
                return
            release(handle)

    def info(self) -> dict[str, Any]:
        """connected, tenant, incarnation, deadlines_missed, calls_skipped, reconnects,
        bytes_mapped."""
        info = _native.PoolInfo()
        lib.fb_pool_get_info(self.handle, byref(info))
        values = {field[0]: getattr(info, field[0]) for field in info._fields_}
        values["tenant"] = info.tenant.decode()
        return values

    def space(self, manifest: Manifest) -> Space:
        """Open a space. ForebayError: the manifest is wrong or another tenant's."""
        handle, error = c_void_p(), _native.Error()
        native = manifest._native()
        check(
            lib.fb_pool_space_open(self.handle, byref(native), byref(handle), byref(error)), error
        )
        return Space(self, handle, manifest)

    def lookup(
        self,
        family: Sequence[Space],
        chain: bytes,
        *,
        read_ahead: bool = False,
        timeout: float | None = None,
    ) -> Hit:
        """Find the longest prefix that all spaces of a family have, and lease it.

        chain    [pages * 32] from the prompt's first page on
        timeout  seconds; None: 2 ms
        returns  a `Hit`, of no pages when there is none or no answer (``hit.status`` tells)
        """
        handle = c_void_p()
        status = lib.fb_lookup(
            self.handle,
            _handles(family),
            len(family),
            chain,
            _pages(chain),
            READ_AHEAD if read_ahead else 0,
            _ns(timeout),
            byref(handle),
        )
        return Hit(self, family, Status(status), handle if status == Status.OK else None)

    def attach(
        self,
        family: Sequence[Space],
        chain: bytes,
        leases: Sequence[int],
        *,
        timeout: float | None = None,
    ) -> Hit:
        """Become a holder of leases that another process looked up (`Hit.leases`), with the same
        family and chain. returns as `lookup`; `Status.ENOENT` when a lease has ended"""
        handle = c_void_p()
        native = (c_uint64 * len(leases))(*leases)
        status = lib.fb_attach(
            self.handle,
            _handles(family),
            len(family),
            chain,
            _pages(chain),
            native,
            len(leases),
            _ns(timeout),
            byref(handle),
        )
        return Hit(self, family, Status(status), handle if status == Status.OK else None)

    def put(
        self,
        space: Space,
        chain: bytes,
        *,
        position: int = 0,
        parent: bytes | None = None,
        planes: tuple[int, int] | None = None,
        layers: tuple[int, int] | None = None,
        timeout: float | None = None,
    ) -> Put:
        """Reserve slots for consecutive pages.

        chain            [pages * 32]
        position         of the first page in its chain
        parent           [32] hash of the page before; None where position is 0
        planes, layers   (first, count) that this process writes; None: all
        returns          a `Put`; ``statuses`` says of each page whether it is to be written
        """
        pages = _pages(chain)
        if parent is not None:
            _hash("parent", parent)
        part = _native.PutPart(*(planes or (0, 0)), *(layers or (0, 0)))
        handle, statuses = c_void_p(), (c_uint32 * max(pages, 1))()
        status = lib.fb_put_begin(
            self.handle,
            space.handle,
            chain,
            pages,
            parent,
            position,
            byref(part),
            _ns(timeout),
            byref(handle),
            statuses,
        )
        answered = status in (Status.OK, Status.MISS)
        return Put(
            self,
            space,
            Status(status),
            handle if status == Status.OK else None,
            list(statuses[:pages]) if answered else [int(status)] * pages,
        )

    def prefetch(
        self, family: Sequence[Space], chain: bytes, *, timeout: float | None = None
    ) -> Status:
        """Ask that pages be brought to this host."""
        return Status(
            lib.fb_prefetch(
                self.handle, _handles(family), len(family), chain, _pages(chain), _ns(timeout)
            )
        )

    def reject(self, space: Space, chain: bytes, *, timeout: float | None = None) -> Status:
        """Report pages whose bytes were wrong; the daemon looks itself and drops what is."""
        keys = b"".join(
            space.key(chain[at : at + CHAIN_BYTES]) for at in range(0, len(chain), CHAIN_BYTES)
        )
        return Status(lib.fb_reject(self.handle, space.handle, keys, _pages(chain), _ns(timeout)))


def _handles(family: Sequence[Space]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(family))(*(space.handle for space in family))


def _transfer(
    space: Space,
    cache: Cache,
    block_ids: Any,
    block_tokens: int,
    *,
    index: int,
    pages: tuple[int, int],
    first_token: int,
    tokens: tuple[int, int] | None,
    planes: tuple[int, int] | None,
    layers: tuple[int, int] | None,
    head: int,
) -> tuple[_native.Transfer, Any]:
    """The C structure, and what must live as long as it."""
    if len(block_ids) and hasattr(block_ids[0], "__len__"):
        per_layer = [_as_int64(ids) for ids in block_ids]
    else:
        per_layer = [_as_int64(block_ids)]
    plane_first, plane_count = planes or (0, space.planes)
    layer_first, layer_count = layers or (0, space.layers)
    if (cache.layers, cache.sections) != (space.layers, space.sections):
        raise ValueError(
            f"a cache of {cache.layers} layers and {cache.sections} sections for a space of "
            f"{space.layers} and {space.sections}"
        )
    if len(per_layer) not in (1, layer_count):
        raise ValueError(f"block ids of {len(per_layer)} layers for a transfer of {layer_count}")
    views = cache.from_layer(layer_first)
    maps = (_native.TokenMap * len(per_layer))()
    for to, ids in zip(maps, per_layer):
        to.block_ids = ctypes.cast(address_of(ids), ctypes.POINTER(ctypes.c_int64))
        to.block_count, to.first_token, to.block_tokens = len(ids), first_token, block_tokens
    token_first, token_count = tokens or (0, 0)
    transfer = _native.Transfer(
        space=index,
        page_first=pages[0],
        page_count=pages[1],
        token_first=token_first,
        token_count=token_count,
        plane_first=plane_first,
        plane_count=plane_count,
        layer_first=layer_first,
        layer_count=layer_count,
        head_first=head,
        views=ctypes.cast(views, ctypes.POINTER(_native.PagedView)),
        map=maps[0],
        layer_maps=maps if len(maps) > 1 else None,
    )
    return transfer, (per_layer, views, maps)


def _as_int64(ids: Sequence[int]) -> array[int]:
    return ids if isinstance(ids, array) and ids.typecode == "q" else array("q", ids)


class Hit:
    """A prefix that the pool has, under lease until `release`. False when it has no pages."""

    def __init__(
        self, pool: Pool, family: Sequence[Space], status: Status, handle: c_void_p | None
    ) -> None:
        self.pool = pool
        self.family = tuple(family)
        self.status = status
        self.pages: int = lib.fb_hit_pages(handle) if handle else 0
        self._handle = handle
        if handle:
            pool._held.add(self)

    def __bool__(self) -> bool:
        return self.pages > 0

    def __enter__(self) -> Hit:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle:
            self.pool._dropped.append((lib.fb_hit_release, handle))

    def release(self) -> None:
        """Give the lease back; no `get` of it may be running. Twice is allowed."""
        handle, self._handle = self._handle, None
        if handle:
            lib.fb_hit_release(handle)

    @property
    def handle(self) -> c_void_p:
        if not self._handle:
            raise ValueError("this hit has no pages or has been released")
        return self._handle

    @property
    def leases(self) -> list[int]:
        """To be handed to the processes that will read: `Pool.attach`."""
        if not self._handle:
            return []
        native = (c_uint64 * _native.HIT_MAX_LEASES)()
        return list(native[: lib.fb_hit_leases(self._handle, native)])

    def block(self, space: int, page: int) -> memoryview:
        """The bytes of a stored block in place, read-only, good until the release. Its header has
        been checked, its planes have not. ForebayError: not there, or not what it should be."""
        at = c_void_p()
        check(lib.fb_hit_map(self.handle, space, page, byref(at)))
        assert at.value
        size = self.family[space].block_bytes
        return memoryview((ctypes.c_uint8 * size).from_address(at.value)).cast("B").toreadonly()

    def get(
        self,
        space: int,
        cache: Cache,
        block_ids: Sequence[int] | Sequence[Sequence[int]],
        block_tokens: int,
        *,
        pages: tuple[int, int] | None = None,
        first_token: int = 0,
        tokens: tuple[int, int] | None = None,
        planes: tuple[int, int] | None = None,
        layers: tuple[int, int] | None = None,
        head: int = 0,
        timeout: float | None = None,
    ) -> list[int]:
        """Decode pages of one space into an engine's cache, each segment checked before it is
        written.

        space         index in the family
        cache         views of all layers of the space
        block_ids     [blocks] the engine's blocks, in the order of their tokens; negative: null.
                      Or one such list for each layer of the transfer
        block_tokens  tokens of an engine block
        pages         (first, count) of the hit; None: all
        first_token   where the chain's token 0 is, counted in ``block_ids``
        tokens        (first, count) of the chain; others are not written. None: all
        planes        (first, count) of the space's heads; None: all
        head          of the views, that is the first plane
        timeout       seconds; None: 1 s plus the bytes at a quarter of the measured bandwidth
        returns       [count] statuses. Use the leading pages that are OK, compute the rest; one
                      that is not may have been written in part.
        """
        pages = pages or (0, self.pages)
        transfer, _keep = _transfer(
            self.family[space],
            cache,
            block_ids,
            block_tokens,
            index=space,
            pages=pages,
            first_token=first_token,
            tokens=tokens,
            planes=planes,
            layers=layers,
            head=head,
        )
        statuses = (c_uint32 * max(pages[1], 1))()
        status = lib.fb_get(self.handle, byref(transfer), _ns(timeout), statuses)
        if status == Status.EINVAL and not any(statuses):
            raise _native.ForebayError(status)
        return list(statuses[: pages[1]])


class Put:
    """Pages being written. `commit` publishes those that were; leaving the ``with`` without it, or
    `abort`, gives all up."""

    def __init__(
        self,
        pool: Pool,
        space: Space,
        status: Status,
        handle: c_void_p | None,
        statuses: list[int],
    ) -> None:
        self.pool = pool
        self.space = space
        self.status = status
        self.statuses = statuses  #: [pages] OK: to be written; EXISTS, BUSY: nothing to do; ...
        self._handle = handle
        if handle:
            pool._held.add(self)

    def __bool__(self) -> bool:
        return self._handle is not None

    def __enter__(self) -> Put:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle:
            self.pool._dropped.append((lib.fb_put_abort, handle))

    def encode(
        self,
        cache: Cache,
        block_ids: Sequence[int] | Sequence[Sequence[int]],
        block_tokens: int,
        *,
        pages: tuple[int, int] | None = None,
        first_token: int = 0,
        planes: tuple[int, int] | None = None,
        layers: tuple[int, int] | None = None,
        head: int = 0,
    ) -> list[int]:
        """Gather, encode and sum the reserved pages of a range; others are skipped (ESTATE).
        Arguments as in `Hit.get`; ``first_token`` is where the put's own first token is."""
        pages = pages or (0, len(self.statuses))
        statuses = (c_uint32 * max(pages[1], 1))()
        if self._handle:
            transfer, _keep = _transfer(
                self.space,
                cache,
                block_ids,
                block_tokens,
                index=0,
                pages=pages,
                first_token=first_token,
                tokens=None,
                planes=planes,
                layers=layers,
                head=head,
            )
            status = lib.fb_put_encode(self._handle, byref(transfer), statuses)
            if status == Status.EINVAL and not any(statuses):
                raise _native.ForebayError(status)
        else:
            statuses[:] = [Status.ESTATE] * len(statuses)
        return list(statuses[: pages[1]])

    def commit(self, *, timeout: float | None = None) -> list[int]:
        """Publish what was written, give up what was not. Returns [pages] statuses: OK for those
        that are now in the pool, else what became of them."""
        handle, self._handle = self._handle, None
        if handle:
            statuses = (c_uint32 * len(self.statuses))()
            status = lib.fb_put_commit(handle, _ns(timeout), statuses)
            self.status = Status(status)
            self.statuses = list(statuses) if status == Status.OK else [status] * len(statuses)
        return self.statuses

    def abort(self) -> None:
        """Give everything up. Twice, and after a commit, is allowed."""
        handle, self._handle = self._handle, None
        if handle:
            lib.fb_put_abort(handle)
            self.statuses = [Status.ECANCELED if s == Status.OK else s for s in self.statuses]
