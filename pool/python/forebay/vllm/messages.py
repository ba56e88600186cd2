"""What the scheduler's side and the workers tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from forebay.vllm.family import Part


@dataclass(frozen=True)
class Era:
    """As long as the weights are what they are. Blocks of one era are not found in another."""

    model: str  #: identity
    generation: int = 0  #: 0: as loaded, shared with others; else private to this engine
    private_id: bytes | None = None


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """From each worker, once the engine has given it its caches."""

    parts: tuple[Part, ...] = ()
    refusal: str | None = None
    fails_by_request: bool = False  #: the engine takes failed loads of several cache groups


@dataclass
class Load:
    request_id: str
    era: Era
    chain: bytes  #: [pages * 32] the hit
    leases: list[int]
    local_tokens: int  #: that the engine had; they are not written
    block_ids: tuple[list[int], ...]  #: of each cache group, from the request's first block on


@dataclass
class Pages:
    """Consecutive pages of one space."""

    space: int  #: in the family
    first: int
    count: int


@dataclass
class Store:
    id: int
    request_id: str
    era: Era
    chain: bytes  #: [pages * 32] of the request, from its first page on
    pages: list[Pages]
    block_ids: tuple[list[int], ...]  #: of each cache group, from the request's first block on


@dataclass
class StepMeta(KVConnectorMetadata):
    """To the workers, with every step."""

    era: Era | None = None
    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    held: set[str] = field(default_factory=set)  #: finished; blocks are kept for their stores


@dataclass
class WorkerMeta(KVConnectorWorkerMetadata):
    """From the workers, with every step's output."""

    stored: list[int] = field(default_factory=list)  #: ids of stores, once for each rank

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerMeta)
        return WorkerMeta(self.stored + other.stored)
