"""The scheduler's side: what of a prompt the pool has, which pages to store, and who may forget
what. One answer for all ranks.

A request is looked up once. The answer, a hit under lease, is remembered until the engine has room
for it, then handed to the workers, and given back when they have read it. Pages are stored in the
step that completes them; their blocks are kept from reuse until every worker is done.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vllm.logger import init_logger

import forebay
from forebay import Hit, Pool, Rule, Space, Status, identity
from forebay._native import CHAIN_BYTES
from forebay.vllm.keys import Adapters, RequestChain, Unpoolable
from forebay.vllm.messages import Era, Handshake, Load, Pages, StepMeta, Store, WorkerMeta
from forebay.vllm.settings import Settings
from forebay.vllm.stats import Stats

logger = init_logger("vllm.forebay")

_NEVER = 1 << 62
#: An answer takes less than this where the daemon is not busy; sleeping costs as much again.
SPIN_SECONDS = 100e-6


@dataclass
class _Request:
    """A request that the engine has."""

    request: Any
    chain: RequestChain | None  #: None: not pooled
    era: Era | None
    hit: Hit | None = None
    asked: bool = False  #: looked up; the answer is in `hit` and `hit_tokens`
    hit_tokens: int = 0
    failed: bool = False  #: a load failed: compute, do not ask again
    loading: bool = False
    block_ids: tuple[list[int], ...] = ()
    stored_pages: int = 0  #: handed to the workers, or found in the pool
    store_at: int = 0  #: computed tokens at which there may be a page to store
    stores: int = 0  #: in flight
    finished: bool = False
    loaded: bool = False  #: from the pool
    drafted: int = 0  #: tokens in its last step that a draft had guessed
    outputs: int = 0  #: before that step


@dataclass
class _Flight:
    """A store in flight."""

    request_id: str
    blocks: list[Any]  #: that are kept from reuse
    waiting: int  #: ranks that are not done


@dataclass
class _Step:
    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    held: set[str] = field(default_factory=set)


class Scheduler:
    def __init__(self, config: Any, settings: Settings, stats: Stats) -> None:
        self.settings = settings
        self.stats = stats
        self.ranks = config.parallel_config.tensor_parallel_size
        self.model_config = config.model_config
        self.load_format = config.load_config.load_format
        self.parts: tuple[Any, ...] = ()
        self.family: list[Space] = []
        self.exact = False  #: the last token of a prompt can be computed again after a full hit
        self.era: Era | None = None
        self.generation = 0
        self.block_pool: Any = None
        self.adapters = Adapters()
        self.requests: dict[str, _Request] = {}
        self.flights: dict[int, _Flight] = {}
        self.next_store = 1
        self.step = _Step()
        self.identity: str | None = settings.model
        self.pool: Pool | None = None
        if getattr(config.kv_transfer_config, "kv_load_failure_policy", "") != "recompute":
            logger.warning(
                'Forebay: set "kv_load_failure_policy": "recompute"; without it vLLM fails the '
                "requests whose blocks could not be loaded"
            )
        self._connect(0.2)
        if self.pool is not None and not self.pool.info()["connected"]:
            logger.warning("Forebay: no daemon answers; everything is computed until one does")
        if self.identity is None:
            threading.Thread(target=self._identify, daemon=True).start()

    def _connect(self, seconds: float | None) -> None:
        try:
            self.pool = Pool(self.settings.socket, connect=seconds, spin=SPIN_SECONDS)
        except forebay.ForebayError as error:
            logger.warning("Forebay: no pool: %s", error)

    # --- what can be pooled ---

    def _identify(self) -> None:
        """Read the weights, which may take a while: until then everything misses."""
        model = self.model_config
        try:
            if self.load_format == "dummy":
                raise ValueError("its weights are made up")
            if model.hf_overrides:
                raise ValueError("its configuration is overridden")
            if os.path.isdir(model.model):
                self.identity = identity.of_folder(model.model)
            else:
                commit = getattr(model.hf_config, "_commit_hash", None) or model.revision
                if commit is None:
                    raise ValueError("its revision is not known")
                self.identity = identity.of_repository(model.model, commit)
        except (OSError, ValueError) as error:
            self._warn_private(f"{model.model}: {error}")
            self.identity = ""

    def _warn_private(self, why: str) -> None:
        logger.warning("Forebay: blocks stay private to this engine: %s", why)

    def handshake(self, workers: Iterable[Handshake]) -> None:
        workers = list(workers)
        refusals = {worker.refusal for worker in workers if worker.refusal}
        if len({worker.parts for worker in workers}) > 1:
            refusals.add("the ranks found different arrangements")
        if not workers:
            refusals.add("no worker has said how it keeps its cache")
        if self.block_pool is None:
            refusals.add("this vLLM does not let a connector keep blocks from reuse")
        if refusals:
            logger.warning("Forebay: this engine is not pooled: %s", "; ".join(sorted(refusals)))
            return
        parts, private = workers[0].parts, workers[0].private
        if not workers[0].can_fail:
            logger.warning(
                "Forebay: this engine is not pooled: a model of windows, recurrent layers or "
                "several cache groups needs a vLLM that takes failed loads by request (0.32 or "
                "later)"
            )
            return
        if private:
            self._warn_private(private)
            self.era = Era("", private_id=os.urandom(16))
        self.parts = parts
        self.exact = all(part.manifest.rule == Rule.FULL for part in parts)

    def _ready(self) -> bool:
        """Open the spaces of this era, once everything about them is known."""
        if self.family:
            return True
        if not self.parts or self.identity is None or self.pool is None:
            return False
        if self.era is None:
            self.era = Era(self.identity, private_id=None if self.identity else os.urandom(16))
        try:
            self.family = [self.pool.space(manifest(part, self.era)) for part in self.parts]
        except (forebay.ForebayError, ValueError) as error:
            logger.warning("Forebay: this engine is not pooled: %s", error)
            self.parts = ()
            return False
        return True

    @property
    def page_tokens(self) -> int:
        return self.family[0].page_tokens

    # --- lookup ---

    def matched(self, request: Any, computed: int) -> int:
        """Tokens beyond `computed` that can be loaded."""
        if not self._ready():
            return 0
        state = self._state_of(request)
        if state.chain is None or state.failed or state.loading or state.era != self.era:
            return 0
        if getattr(request, "skip_reading_prefix_cache", False):
            return 0
        if not state.asked:
            self._ask(state)
        gain = state.hit_tokens - computed
        return gain if gain >= max(1, self.settings.min_prefix_tokens) else 0

    def _state_of(self, request: Any) -> _Request:
        state = self.requests.get(request.request_id)
        if state is None:
            chain = None
            try:
                chain = RequestChain(request, self.page_tokens, self.adapters)
            except Unpoolable:
                self.stats.add("requests_not_pooled", 1)
            state = _Request(request, chain, self.era)
            self.requests[request.request_id] = state
        return state

    def _ask(self, state: _Request) -> None:
        assert state.chain is not None and self.pool is not None
        tokens = state.request.all_token_ids
        state.chain.grow(tokens)
        # A token must be left to compute. Full attention may compute the last one again.
        usable = len(tokens) if self.exact else len(tokens) - 1
        pages = min(state.chain.pages, usable // self.page_tokens)
        state.asked = True
        self.stats.add("lookups", 1)
        hit = self._lookup(state.chain, self._loadable(pages))
        if hit is None:
            return
        state.hit = hit
        state.hit_tokens = hit.pages * self.page_tokens
        state.stored_pages = max(state.stored_pages, hit.pages)
        self.stats.add("lookup_hit_tokens", state.hit_tokens)

    def _lookup(self, chain: RequestChain, pages: int) -> Hit | None:
        """The longest hit of at most so many pages that can be loaded."""
        assert self.pool is not None
        while pages > 0:
            hit = self.pool.lookup(
                self.family,
                chain.hashes[: pages * CHAIN_BYTES],
                timeout=self.settings.lookup_timeout,
            )
            if not hit:
                self.stats.add("lookups_unanswered", hit.status != Status.MISS)
                return None
            pages = self._loadable(hit.pages)
            if pages == hit.pages:
                return hit
            hit.release()  # a shorter hit needs earlier pages of a window, which this has not
        return None

    def _loadable(self, pages: int) -> int:
        """The longest prefix of at most so many pages that fills every block it touches."""
        while pages > 0 and not all(self._fills(part, pages) for part in self.parts):
            pages -= 1
        return pages

    def _fills(self, part: Any, pages: int) -> bool:
        """An engine whose blocks are larger than pages may hold more of a window than the pages
        that cover it. It would take the rest for computed."""
        if part.manifest.rule != Rule.WINDOW:
            return True
        size, window = self.page_tokens, part.manifest.window_tokens
        first_block = max(0, pages * size - window + 1) // part.block_tokens
        first_page = max(0, pages - -(-window // size))
        return first_block * part.block_tokens >= first_page * size

    def allocated(self, request: Any, block_ids: tuple[list[int], ...], tokens: int) -> None:
        """The engine has room for `tokens` of the hit, or for the request without one."""
        state = self.requests.get(request.request_id)
        if state is None or state.loading:
            return
        if tokens > 0 and state.hit is not None:
            pages = state.hit_tokens // self.page_tokens
            assert state.chain is not None and state.era is not None
            state.loading = True
            state.block_ids = block_ids
            self.step.loads.append(
                Load(
                    request.request_id,
                    state.era,
                    state.chain.hashes[: pages * CHAIN_BYTES],
                    state.hit.leases,
                    state.hit_tokens - tokens,
                    block_ids,
                )
            )
        else:
            _forget_hit(state)
            state.asked = False  # when it is preempted, it may ask again

    def loaded(
        self, finished: Iterable[str], failed: Iterable[str], bad_blocks: Iterable[int]
    ) -> None:
        """Workers are done with loads, of which some failed: named by request, or by block."""
        if not finished:
            return
        bad = set(bad_blocks)
        for request_id in finished:
            state = self.requests.get(request_id)
            if state is None:
                continue
            state.loading = state.asked = False
            if request_id in failed or bad.intersection(*state.block_ids[:1]):
                state.failed = True
                state.stored_pages = state.store_at = 0
            else:
                state.loaded = True
            _forget_hit(state)
            if state.finished:
                self._drop(request_id)

    # --- steps ---

    def build(self, output: Any) -> StepMeta:
        if self._ready():
            self._note_scheduled(output)
        for request_id in output.finished_req_ids:
            self._drop(request_id)
        step, self.step = self.step, _Step()
        idle = output.total_num_scheduled_tokens == 0
        return StepMeta(self.era, step.loads, step.stores, step.held, idle)

    def _note_scheduled(self, output: Any) -> None:
        """Called in every step: what has no page to store costs a look-up and a comparison."""
        boundaries = _boundaries(output)
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            state = self.requests.get(new.req_id)
            if state is not None:
                state.block_ids = tuple(list(ids) for ids in new.block_ids)
                before = new.num_computed_tokens
                self._note_computed(state, before, scheduled[new.req_id], boundaries)
        cached = output.scheduled_cached_reqs
        drafts = output.scheduled_spec_decode_tokens
        for i, request_id in enumerate(cached.req_ids):
            state = self.requests.get(request_id)
            if state is None:
                continue
            new_ids = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                state.block_ids = tuple(list(ids) for ids in new_ids or ())
            elif new_ids is not None:
                for ids, more in zip(state.block_ids, new_ids, strict=True):
                    ids.extend(more)
            if drafts and state.loaded:
                self._note_drafts(state, len(drafts.get(request_id, ())))
            before, count = cached.num_computed_tokens[i], scheduled[request_id]
            if before + count >= state.store_at or boundaries:
                self._note_computed(state, before, count, boundaries)

    def _note_drafts(self, state: _Request, drafted: int) -> None:
        """A hit does not fill the layers of a draft: how many of its guesses are taken after one
        is counted. Of the step before this, the engine has the outcome now."""
        outputs = state.request.num_output_tokens
        taken = min(max(0, outputs - state.outputs - 1), state.drafted)
        self.stats.add("draft_tokens_after_hits", state.drafted)
        self.stats.add("draft_tokens_taken_after_hits", taken)
        state.drafted, state.outputs = drafted, outputs

    def _note_computed(
        self,
        state: _Request,
        before: int,
        count: int,
        boundaries: dict[str, list[tuple[int, int, int]]],
    ) -> None:
        """This step computes `count` tokens of a request, after `before`."""
        states = boundaries.get(state.request.request_id, [])
        if before + count >= state.store_at or states:
            self._store_new(state, before, count, states)
        pooled = state.chain is not None and state.era is not None and self.settings.store
        state.store_at = (state.stored_pages + 1) * self.page_tokens if pooled else _NEVER

    def _store_new(
        self, state: _Request, before: int, count: int, boundaries: list[tuple[int, int, int]]
    ) -> None:
        """Hand the pages that this step completes to the workers."""
        if state.chain is None or state.era is None or state.era != self.era:
            return
        if not self.settings.store:
            return
        tokens = state.request.all_token_ids
        pages = min(before + count, len(tokens)) // self.page_tokens
        if pages <= state.stored_pages and not boundaries:
            return
        state.chain.grow(tokens)
        spans = []
        for index, part in enumerate(self.parts):
            if part.manifest.rule == Rule.STATE:
                spans += self._state_pages(index, state, boundaries, pages)
            else:
                first = max(state.stored_pages, self._first_page(part, before))
                spans += self._whole_pages(index, state, first, pages)
        state.stored_pages = max(pages, state.stored_pages)
        if not spans:
            return
        store = Store(self.next_store, state.request.request_id, state.era, spans)
        self.next_store += 1
        self.step.stores.append(store)
        self._keep(store, state)

    def _first_page(self, part: Any, computed: int) -> int:
        """The first page whose blocks the engine still holds when so many tokens are computed:
        those that lie behind a window before the next token may be another request's by now."""
        if part.manifest.rule != Rule.WINDOW:
            return 0
        behind = max(0, computed - part.manifest.window_tokens + 1)
        begin = behind // part.block_tokens * part.block_tokens
        return -(-begin // self.page_tokens)

    def _whole_pages(self, index: int, state: _Request, first: int, end: int) -> list[Pages]:
        """Pages [first, end) of a space, less those with null blocks."""
        part, spans = self.parts[index], []
        size, tokens = part.block_tokens, self.page_tokens
        begin = first
        for page in range(first, end + 1):
            whole = page < end and all(
                b < len(state.block_ids[group]) and state.block_ids[group][b] != 0
                for group in set(part.groups)
                for b in range(page * tokens // size, ((page + 1) * tokens - 1) // size + 1)
            )
            if whole:
                continue
            if page > begin:
                block = begin * tokens // size
                blocks = slice(block, (page * tokens - 1) // size + 1)
                ids = {group: state.block_ids[group][blocks] for group in set(part.groups)}
                spans.append(self._span(index, state, begin, page, block, ids))
            begin = page + 1
        return spans

    def _state_pages(
        self, index: int, state: _Request, boundaries: list[tuple[int, int, int]], pages: int
    ) -> list[Pages]:
        """Pages at whose end every layer has its state; the engine names the blocks."""
        part = self.parts[index]
        where: dict[int, dict[int, list[int]]] = {}
        for group, block, tokens in boundaries:
            where.setdefault(tokens, {})[group] = [block]
        spans = []
        for tokens, ids in sorted(where.items()):
            page, rest = divmod(tokens, self.page_tokens)
            if not rest and page <= pages and set(part.groups) <= set(ids):
                block = (tokens - 1) // part.block_tokens
                spans.append(self._span(index, state, page - 1, page, block, ids))
        return spans

    def _span(
        self,
        index: int,
        state: _Request,
        first: int,
        end: int,
        block: int,
        block_ids: dict[int, list[int]],
    ) -> Pages:
        """Pages [first, end) of a space. block  the request's, that `block_ids` begin with"""
        assert state.chain is not None
        hashes = state.chain.hashes
        return Pages(
            index,
            first,
            hashes[first * CHAIN_BYTES : end * CHAIN_BYTES],
            hashes[(first - 1) * CHAIN_BYTES : first * CHAIN_BYTES] if first else None,
            first * self.page_tokens - block * self.parts[index].block_tokens,
            block_ids,
        )

    def _keep(self, store: Store, state: _Request) -> None:
        """Blocks of a store are not reused before it is done, whatever becomes of the request."""
        wanted = {b for span in store.spans for ids in span.block_ids.values() for b in ids} - {0}
        blocks = [self.block_pool.blocks[b] for b in sorted(wanted)]
        self.block_pool.touch(blocks)
        state.stores += 1
        self.flights[store.id] = _Flight(store.request_id, blocks, self.ranks)

    def stored(self, meta: WorkerMeta | None) -> None:
        for store_id in meta.stored if meta is not None else ():
            flight = self.flights.get(store_id)
            if flight is None:
                continue
            flight.waiting -= 1
            if flight.waiting == 0:
                del self.flights[store_id]
                self.block_pool.free_blocks(flight.blocks)
                state = self.requests.get(flight.request_id)
                if state is not None:
                    state.stores -= 1

    # --- ends ---

    def request_finished(self, request: Any) -> bool:
        """Whether the engine is to keep stepping, and the request's blocks, until the workers say
        that its stores are done."""
        state = self.requests.get(request.request_id)
        if state is None:
            return False
        if state.drafted:
            self._note_drafts(state, 0)
        if self.settings.report_keys and state.chain is not None:
            self._report(state)
        if state.stores > 0:
            self.step.held.add(request.request_id)
            return True
        return False

    def _drop(self, request_id: str) -> None:
        state = self.requests.get(request_id)
        if state is None:
            return
        state.finished = True
        if not state.loading:
            _forget_hit(state)
            del self.requests[request_id]

    def reset(self) -> None:
        """The weights have changed, or may have: nothing stored so far is of use here."""
        self.generation += 1
        for state in self.requests.values():
            state.era = None  # its KV is of the old weights, or will be of both
            state.store_at = _NEVER
            state.asked = True
            _forget_hit(state)  # workers that read it hold leases of their own
        self.family = []
        if self.pool is not None:  # the daemon may forget the old spaces
            self.close()
            self._connect(None)
        self.identity = self.identity or ""
        self.era = Era(self.identity, self.generation, os.urandom(16))

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
            self.pool = None

    # --- reports ---

    def _report(self, state: _Request) -> None:
        """The ingredients of a request's keys, for `forebay why`."""
        assert state.chain is not None
        state.chain.grow(state.request.all_token_ids)
        hashes = state.chain.hashes
        report = {
            "forebay_keys": 1,
            "request": state.request.request_id,
            "page_tokens": self.page_tokens,
            "tokens": list(state.request.all_token_ids),
            "extras": [extra.hex() for extra in state.chain.extras()],
            "chain": [
                hashes[at : at + CHAIN_BYTES].hex() for at in range(0, len(hashes), CHAIN_BYTES)
            ],
            "spaces": [{"id": s.id.hex(), "manifest": _readable(s.manifest)} for s in self.family],
        }
        folder = self.settings.report_keys
        assert folder is not None
        try:
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, f"{state.request.request_id}.json"), "w") as file:
                json.dump(report, file)
        except OSError as error:
            logger.warning_once("Forebay: no key reports: %s", error)


def manifest(part: Any, era: Era) -> forebay.Manifest:
    return replace(
        part.manifest,
        model=era.model,
        generation=era.generation,
        private_id=era.private_id,
    )


def _forget_hit(state: _Request) -> None:
    state.hit_tokens = 0
    if state.hit is not None:
        state.hit.release()
        state.hit = None


def _boundaries(output: Any) -> dict[str, list[tuple[int, int, int]]]:
    """(cache group, block, tokens) of recurrent states that this step completes, by request."""
    blocks = getattr(output, "kv_connector_block_state", None)
    return blocks.boundary_state_offloads if blocks is not None else {}


def _readable(m: forebay.Manifest) -> dict[str, Any]:
    fields = asdict(m)
    private = fields.pop("private_id")
    fields["private"] = private.hex() if private else ""
    fields["rule"] = m.rule.name.lower()
    for section in fields["sections"]:
        for name in ("kind", "elem", "codec"):
            section[name] = section[name].name.lower()
        if section["layer_count"] is None:
            section["layer_count"] = len(m.layers) - section["layer_first"]
    return fields
