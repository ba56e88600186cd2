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

    model: str  #: identity; may be empty in a private era
    generation: int = 0  #: of the weights in this engine; 0: as loaded
    private_id: bytes | None = None  #: [16] None: shared with other engines


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """From each worker, once the engine has given it its caches."""

    parts: tuple[Part, ...] = ()
    refusal: str | None = None
    private: str | None = None  #: why the KV is of use to this engine alone
    can_fail: bool = False  #: the engine can be told, one way or another, that a load failed


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
    """Consecutive pages of one space, and the engine's blocks that have them."""

    space: int  #: in the family
    position: int  #: of the first page in its chain
    chain: bytes  #: [pages * 32]
    parent: bytes | None  #: [32] hash of the page before
    first_token: int  #: of the first page, counted in `block_ids`
    block_ids: dict[int, list[int]]  #: of each cache group of the space


@dataclass
class Store:
    id: int
    request_id: str
    era: Era
    spans: list[Pages]


@dataclass
class StepMeta(KVConnectorMetadata):
    """To the workers, with every step."""

    era: Era | None = None
    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    held: set[str] = field(default_factory=set)  #: finished; blocks are kept for their stores
    idle: bool = False  #: the step computes nothing


@dataclass
class WorkerMeta(KVConnectorWorkerMetadata):
    """From the workers, with every step's output."""

    stored: list[int] = field(default_factory=list)  #: ids of stores, once for each rank

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerMeta)
        return WorkerMeta(self.stored + other.stored)
