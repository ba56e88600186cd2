"""A worker's side: finds how the engine arranges its cache, loads hits into it and stores pages
from it, on two threads of its own. The engine's thread never waits for either.
"""

from __future__ import annotations

import importlib
import queue
import threading
import time
from array import array
from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger

import forebay
from forebay import Pool, Rule, Space, Status
from forebay._native import CHAIN_BYTES
from forebay.vllm import family
from forebay.vllm.family import Place
from forebay.vllm.messages import Era, Handshake, Load, Pages, StepMeta, Store, WorkerMeta
from forebay.vllm.scheduler import manifest
from forebay.vllm.settings import Settings
from forebay.vllm.stats import Stats

logger = init_logger("vllm.forebay")

#: An engine that has nothing to compute steps on, and would hold the interpreter's lock against
#: the threads that it waits for.
IDLE_SECONDS = 0.001


class Lane:
    """A thread of transfers, one after the other, with a connection of its own."""

    def __init__(
        self, name: str, settings: Settings, places: list[Place], work: Callable[..., None]
    ) -> None:
        self.settings = settings
        self.places = places
        self.work = work
        self.jobs: queue.SimpleQueue[tuple[Any, float] | None] = queue.SimpleQueue()
        self.era: Era | None = None
        self.pool: Pool | None = None
        self.spaces: list[Space] = []
        self.thread = threading.Thread(target=self._run, name=f"forebay-{name}", daemon=True)
        self.thread.start()

    def submit(self, job: Any) -> None:
        self.jobs.put((job, time.monotonic()))

    def close(self) -> None:
        self.jobs.put(None)
        self.thread.join(timeout=5)

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None:
            try:
                self.work(self, *job)
            except Exception:  # a job that fails must not end the thread
                logger.exception("Forebay: a transfer failed")
        self._disconnect()

    def open(self, era: Era) -> Pool:
        """Have `spaces` be those of an era. The daemon may forget those of the one before."""
        if self.pool is None or era != self.era:
            self._disconnect()
            self.pool = Pool(self.settings.socket, connect=0.2)
            self.spaces = [self.pool.space(manifest(place.part, era)) for place in self.places]
            self.era = era
        return self.pool

    def _disconnect(self) -> None:
        self.era, self.spaces = None, []
        if self.pool is not None:
            self.pool.close()
            self.pool = None


class Worker:
    def __init__(
        self,
        config: Any,
        cache_config: Any,
        settings: Settings,
        stats: Stats,
        fails_by_request: bool,
    ) -> None:
        self.config = config
        self.cache_config = cache_config
        self.settings = settings
        self.stats = stats
        self.fails_by_request = fails_by_request
        self.places: list[Place] = []
        self.refusal: str | None = None
        self.tap = importlib.import_module(settings.tap) if settings.tap else None
        self.era: Era | None = None  #: of the last step
        self.idle = False  #: the last step computes nothing
        self.bad_blocks: set[int] = set()  #: of loads that failed, to be told
        self.lanes: list[Lane] = []
        self.lock = threading.Lock()
        self.done = threading.Condition(self.lock)
        # Under the lock: what is under way, and results that the engine's thread has not taken yet.
        self.loading = 0
        self.loaded: list[tuple[Load, int]] = []
        self.stored: list[int] = []
        self.storing: dict[str, int] = {}  #: stores of a request that are not done
        self.held: set[str] = set()

    # --- start and end ---

    def register(self, caches: dict[str, Any]) -> None:
        try:
            rank = self.config.parallel_config.rank % self.config.parallel_config.world_size
            self.places = family.find(self.config, self.cache_config, caches, self.settings, rank)
        except family.Refused as refused:
            self.refusal = str(refused)
            return
        except Exception as error:  # whatever an engine's internals throw, it must start
            logger.exception("Forebay: cannot describe the cache")
            self.refusal = f"cannot describe the cache: {error}"
            return
        for name, work in (("load", self._load), ("store", self._store)):
            self.lanes.append(Lane(name, self.settings, self.places, work))

    def handshake(self) -> Handshake:
        private = None
        if getattr(self.config.cache_config, "calculate_kv_scales", False):
            private = "its cache has scales that are found at run time"
        can_fail = self.fails_by_request or self._fails_by_block()
        parts = tuple(place.part for place in self.places)
        return Handshake(parts, self.refusal, private, can_fail)

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()

    # --- the engine's thread ---

    def submit_loads(self, meta: StepMeta) -> None:
        self.era, self.idle = meta.era, meta.idle
        with self.lock:
            self.held |= meta.held  # here: vLLM 0.30 has no stores in steps that compute nothing
            self.loading += len(meta.loads)
        for load in meta.loads:
            self.lanes[0].submit(load)

    def submit_stores(self, meta: StepMeta) -> None:
        with self.lock:
            for store in meta.stores:
                self.storing[store.request_id] = self.storing.get(store.request_id, 0) + 1
        for store in meta.stores:
            self.lanes[1].submit(store)

    def take_finished(self) -> tuple[set[str], set[str], set[str]]:
        """Requests whose stores are done and that the engine keeps for that; whose loads are done;
        those of them that failed and have no failed blocks to tell by."""
        with self.lock:
            if self.idle and (self.loading or self.storing) and not (self.loaded or self.stored):
                self.done.wait(IDLE_SECONDS)
            sent = {r for r in self.held if r not in self.storing}
            self.held -= sent
            loaded, self.loaded = self.loaded, []
        # Judged now, since the weights may have changed after a load had ended.
        failed = {load.request_id for load, good in loaded if not self._arrived(load, good)}
        return sent, {load.request_id for load, _ in loaded}, failed

    def _arrived(self, load: Load, good: int) -> bool:
        """Whether a load is of use as a whole; else its blocks are told, where that is possible."""
        if load.era != self.era:
            good = 0
        if good == len(load.chain) // CHAIN_BYTES * self._page_tokens():
            return True
        if not self._fails_by_block():
            return False
        part = self.places[0].part
        first = max(good, load.local_tokens) // part.block_tokens
        self.bad_blocks |= set(load.block_ids[part.groups[0]][first:]) - {0}
        return True

    def _fails_by_block(self) -> bool:
        return family.fails_by_block((place.part for place in self.places), self.cache_config)

    def take_bad_blocks(self) -> set[int]:
        bad, self.bad_blocks = self.bad_blocks, set()
        return bad

    def take_meta(self) -> WorkerMeta | None:
        with self.lock:
            stored, self.stored = self.stored, []
        return WorkerMeta(stored) if stored else None

    # --- transfers ---

    def _load(self, lane: Lane, load: Load, begun: float) -> None:
        good, total = 0, len(load.chain) // CHAIN_BYTES * self._page_tokens()
        try:
            with lane.open(load.era).attach(lane.spaces, load.chain, load.leases) as hit:
                if hit.pages * self._page_tokens() == total:
                    count = len(self.places)
                    good = min(self._load_space(load, hit, index, total) for index in range(count))
                if self.tap:
                    self.tap.loaded(self, load, good == total)
        finally:
            if good == total:
                self.stats.add("loads", 1)
                self.stats.add("load_seconds", time.monotonic() - begun)
            else:
                self.stats.add("loads_failed", 1)
            with self.lock:
                self.loaded.append((load, good))
                self.loading -= 1
                self.done.notify()

    def _load_space(self, load: Load, hit: forebay.Hit, index: int, total: int) -> int:
        """Returns up to which token the space is right."""
        place, space = self.places[index], hit.family[index]
        size, rule = space.page_tokens, place.part.manifest.rule
        if rule == Rule.STATE:
            begin = total - size
        elif rule == Rule.WINDOW:
            begin = max(load.local_tokens, self._first_token(place, load.block_ids))
        else:
            begin = load.local_tokens
        first = begin // size
        pages = (first, total // size - first)
        statuses = hit.get(
            index,
            place.cache,
            _ids(place, load.block_ids),
            place.block_tokens,
            pages=pages,
            tokens=(begin, total - begin),
            planes=place.planes,
            timeout=self.settings.load_timeout,
        )
        self.stats.add("pages_corrupt", statuses.count(Status.ECORRUPT))
        self.stats.add(
            "loaded_bytes", pages[1] * space.source_bytes * place.planes[1] / space.planes
        )
        for at, status in enumerate(statuses):
            if status != Status.OK:
                return 0 if rule != Rule.FULL else max((first + at) * size, load.local_tokens)
        return total

    def _first_token(self, place: Place, block_ids: tuple[list[int], ...]) -> int:
        """Of the first block that is there; a window's earlier ones are null."""
        firsts = []
        for group in set(place.part.groups):
            there = [i for i, block in enumerate(block_ids[group]) if block != 0]
            firsts.append(there[0] if there else len(block_ids[group]))
        return max(firsts) * place.part.block_tokens

    def _page_tokens(self) -> int:
        return self.places[0].part.manifest.page_tokens

    def _store(self, lane: Lane, store: Store, begun: float) -> None:
        try:
            pool = lane.open(store.era)
            for span in store.spans:
                self._store_pages(pool, lane.spaces[span.space], span)
            self.stats.add("store_seconds", time.monotonic() - begun)
        finally:
            with self.lock:
                self.stored.append(store.id)
                left = self.storing[store.request_id] - 1
                if left:
                    self.storing[store.request_id] = left
                else:
                    del self.storing[store.request_id]
                self.done.notify()

    def _store_pages(self, pool: Pool, space: Space, span: Pages) -> None:
        place = self.places[span.space]
        with pool.put(
            space, span.chain, position=span.position, parent=span.parent, planes=place.planes
        ) as put:
            if put:
                if self.tap:
                    self.tap.storing(self, span)
                put.encode(
                    place.cache,
                    _ids(place, span.block_ids),
                    place.block_tokens,
                    first_token=span.first_token,
                    planes=place.planes,
                )
                if self.tap:
                    self.tap.stored(self, span, put)
                statuses = put.commit()
            else:
                statuses = put.statuses
        done = statuses.count(Status.OK)
        there = statuses.count(Status.EXISTS) + statuses.count(Status.BUSY)
        self.stats.add("pages_stored", done)
        self.stats.add("pages_there", there)
        self.stats.add("pages_refused", len(statuses) - done - there)
        self.stats.add("stored_bytes", done * space.source_bytes * place.planes[1] / space.planes)


def _ids(place: Place, block_ids: tuple[list[int], ...] | dict[int, list[int]]) -> list[array[int]]:
    """Blocks of the kernel, for each layer; null blocks are negative. block_ids  by cache group"""
    made: dict[int, array[int]] = {}
    for group in place.part.groups:
        if group not in made:
            split = place.split
            made[group] = array(
                "q",
                (
                    block * split + i if block else -1
                    for block in block_ids[group]
                    for i in range(split)
                ),
            )
    if len(made) == 1:
        return [made[place.part.groups[0]]]
    return [made[group] for group in place.part.groups]
