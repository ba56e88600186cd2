"""An engine in plain tensors: both halves of vLLM's connector, driven as vLLM drives them, and what
vLLM would hold besides.
"""

import contextlib
import itertools
import mmap
import threading
import uuid
from types import SimpleNamespace
from typing import NamedTuple

import torch
from vllm.v1.core.sched.output import SchedulerOutput

from daemon import WAIT_S, until
from forebay import Cache, Elem, Kind, Manifest, Rule, Section, View
from forebay.vllm import family
from forebay.vllm.family import Part, Place
from forebay.vllm.scheduler import Scheduler
from forebay.vllm.settings import parse
from forebay.vllm.stats import Stats
from forebay.vllm.worker import Worker

PAGE, WINDOW, DIM, BLOCKS = 16, 20, 32, 256
STATE_BYTES = 64
HEADER_BYTES, KEY_AT = 4096, 32  # of a stored block


def part(rule=Rule.FULL, block=PAGE, groups=(0,), window=WINDOW):
    """A space of one layer for each of `groups`."""
    state = rule == Rule.STATE
    sections = [Section(Kind.K, DIM), Section(Kind.V, DIM)]
    if state:
        sections = [Section(Kind.STATE, STATE_BYTES, Elem.BYTE)]
    manifest = Manifest(
        model="",
        layers=tuple(range(len(groups))),
        sections=tuple(sections),
        page_tokens=PAGE,
        rule=rule,
        window_tokens=window if rule == Rule.WINDOW else 0,
        arrangement="test" if state else "",
        engine_block_tokens=block if state else 0,
    )
    return Part(manifest, tuple(groups), block)


def config(**model):
    """What the connector reads of vLLM's configuration; `model` is of its model_config."""
    load_format = model.pop("load_format", "auto")
    ranks = model.pop("ranks", 1)
    defaults = dict(model="org/name", revision=None, hf_overrides=None, hf_config=None)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks, rank=0, world_size=ranks),
        model_config=SimpleNamespace(**{**defaults, **model}),
        load_config=SimpleNamespace(load_format=load_format),
        cache_config=SimpleNamespace(calculate_kv_scales=False),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute"),
    )


def prompt(tokens, seed=0):
    """Token ids; a longer one begins with a shorter one."""
    return [(i * 7 + seed * 1009) % 30000 for i in range(tokens)]


def rows(tokens):
    """int16 [K and V, tokens, channels] that a model would compute."""
    ids = torch.tensor(tokens).view(1, -1, 1)
    return (ids + torch.arange(2).view(2, 1, 1) * 31000 + torch.arange(DIM)).to(torch.int16)


class BlockPool:
    """Reference counts of the engine's blocks."""

    def __init__(self):
        self.blocks = [SimpleNamespace(block_id=i, ref_cnt=0) for i in range(BLOCKS)]

    def touch(self, blocks):
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks):
        for block in blocks:
            assert block.ref_cnt > 0
            block.ref_cnt -= 1

    def kept(self):
        return {block.block_id: block.ref_cnt for block in self.blocks if block.ref_cnt}


class Said(NamedTuple):
    """By a worker, after a step."""

    sent: set[str]
    loaded: set[str]
    failed: set[str]
    bad: set[int]


class Engine:
    """A connector, and what vLLM has: a cache, its blocks, the tables of its requests."""

    def __init__(self, monkeypatch, parts, *, ranks=1, fails_by_request=True, **settings):
        self.stats, self.counts = Stats(), {}
        settings = parse({"page_tokens": PAGE, "min_prefix_tokens": 1, **settings})
        self.scheduler = Scheduler(config(ranks=ranks), settings, self.stats)
        self.scheduler.block_pool = self.blocks = BlockPool()
        count = 1 + max((group for p in parts for group in p.groups), default=0)
        cache_config = SimpleNamespace(kv_cache_groups=[None] * count)
        self.worker = Worker(config(), cache_config, settings, self.stats, fails_by_request)
        self.block_tokens = {group: p.block_tokens for p in parts for group in p.groups}
        self.windows = {g for p in parts for g in p.groups if p.manifest.rule == Rule.WINDOW}
        self.tensors = [[self._tensor(p) for _ in p.groups] for p in parts]
        places = [self._place(p, tensors) for p, tensors in zip(parts, self.tensors)]
        monkeypatch.setattr(family, "find", lambda *_: places)
        self.worker.register({})
        self.scheduler.handshake([self.worker.handshake()] * ranks)
        self.scheduler._ready()
        self.tables = {}
        self.free = itertools.count(1)

    def _tensor(self, p):
        if p.manifest.rule == Rule.STATE:
            return torch.zeros(BLOCKS, STATE_BYTES, dtype=torch.uint8)
        return torch.zeros(2, BLOCKS, p.block_tokens, 1, DIM, dtype=torch.int16)

    def _place(self, p, tensors):
        if p.manifest.rule == Rule.STATE:
            views = [[View(t.data_ptr(), t.stride(0), 0, 0, 1, owner=t)] for t in tensors]
        else:
            views = [[View.of(kv, token=1, head=2, channel=3) for kv in t] for t in tensors]
        return Place(p, Cache(views), (0, 1), 1, p.block_tokens)

    def close(self):
        self.worker.close()
        self.scheduler.close()

    def count(self, name):
        """So far, of both halves."""
        taken = self.stats.take()
        for key, n in taken.data.items() if taken else ():
            self.counts[key] = self.counts.get(key, 0) + n
        return self.counts.get(name, 0)

    # --- requests ---

    def request(self, tokens, **fields):
        """What the connector reads of vLLM's `Request`."""
        ids = dict(request_id=uuid.uuid4().hex, all_token_ids=list(tokens))
        return SimpleNamespace(**ids, **{"lora_request": None, **fields})

    def state(self, request):
        return self.scheduler.requests[request.request_id]

    def asked(self, tokens, **fields):
        """A request that vLLM has asked for."""
        request = self.request(tokens, **fields)
        self.scheduler.matched(request, 0)
        return request

    def matched(self, tokens, **fields):
        """What a new request finds; it is given up at once."""
        request = self.request(tokens, **fields)
        found = self.scheduler.matched(request, 0)
        self.step(finished=[request])
        return found

    def _no_blocks(self):
        return tuple([] for _ in range(1 + max(self.block_tokens)))

    def _grow(self, request, tokens, behind=0):
        """Blocks for so many tokens; null where a window is past them. Returns the new ones."""
        table = self.tables.setdefault(request.request_id, self._no_blocks())
        new = tuple([] for _ in table)
        for group, size in self.block_tokens.items():
            first = max(0, behind - WINDOW + 1) // size if group in self.windows else 0
            for at in range(len(table[group]), -(-tokens // size)):
                new[group].append(next(self.free) if at >= first else 0)
            table[group].extend(new[group])
        return tuple(list(ids) for ids in new)

    def allocate(self, request, tokens, computed=0):
        """Room for `tokens` of a hit beyond those computed."""
        total = computed + tokens
        self._grow(request, total, behind=total)
        table = tuple(list(ids) for ids in self.tables[request.request_id])
        self.scheduler.allocated(request, table, tokens)

    def begin_load(self, request, computed=0):
        """Ask for a request and load what there is beyond the tokens computed; returns how many."""
        tokens = self.scheduler.matched(request, computed)
        self.allocate(request, tokens, computed)
        self.step()
        return tokens

    # --- steps ---

    def step(self, output=None, finished=()):
        """Hand a step to both halves; without an output it computes nothing."""
        output = output or SchedulerOutput.make_empty()
        output.finished_req_ids = {request.request_id for request in finished}
        meta = self.scheduler.build(output)
        self.worker.submit_loads(meta)
        if output.total_num_scheduled_tokens:  # vLLM 0.30 saves only then
            self.worker.submit_stores(meta)
        return meta

    def compute(self, request, before, count, *, resumed=False, states=()):
        """A step that computes tokens [before, before + count) of one request."""
        known = request.request_id in self.tables and before > 0
        if resumed:
            del self.tables[request.request_id]
        new = self._grow(request, before + count)
        self._write(request, before, before + count)
        output = SchedulerOutput.make_empty()
        output.num_scheduled_tokens = {request.request_id: count}
        output.total_num_scheduled_tokens = count
        output.kv_connector_block_state = SimpleNamespace(
            boundary_state_offloads={request.request_id: list(states)} if states else {}
        )
        if known or resumed:
            cached = output.scheduled_cached_reqs
            cached.req_ids, cached.num_computed_tokens = [request.request_id], [before]
            cached.new_block_ids = [new if any(new) else None]
            cached.resumed_req_ids = {request.request_id} if resumed else set()
        else:
            output.scheduled_new_reqs = [
                SimpleNamespace(
                    req_id=request.request_id,
                    block_ids=self.tables[request.request_id],
                    num_computed_tokens=before,
                )
            ]
        return self.step(output)

    def _write(self, request, begin, end):
        end = min(end, len(request.all_token_ids))
        values = rows(request.all_token_ids[begin:end])
        for p, tensors in zip(self.scheduler.parts, self.tensors):
            for group, tensor in zip(p.groups, tensors):
                if p.manifest.rule != Rule.STATE:
                    tensor[:, *self._slots(request, group, begin, end), 0] = values

    def _slots(self, request, group, begin, end):
        size, table = self.block_tokens[group], self.tables[request.request_id][group]
        tokens = torch.arange(begin, end)
        return torch.tensor(table)[tokens // size], tokens % size

    def read(self, request, space, begin, end):
        """As `rows`, of each layer."""
        groups = self.scheduler.parts[space].groups
        slots = [self._slots(request, group, begin, end) for group in groups]
        return [tensor[:, *at, 0] for tensor, at in zip(self.tensors[space], slots)]

    def store(self, tokens):
        """Compute a prompt, and wait until its pages are in the pool; returns its stores."""
        request = self.asked(tokens)
        self.scheduler.allocated(request, (), 0)
        meta = self.compute(request, 0, len(tokens))
        self.settle()
        self.step(finished=[request])
        return meta.stores

    def settle(self):
        """Wait for all transfers, and tell the scheduler of them."""
        worker = self.worker
        until(lambda: not worker.loading and not worker.storing, "transfers are done")
        said = Said(*worker.take_finished(), worker.take_bad_blocks())
        self.scheduler.stored(worker.take_meta())
        self.scheduler.loaded(said.loaded, said.failed, said.bad)
        return said


@contextlib.contextmanager
def held(lane):
    """Transfers of a lane wait until this ends."""
    gate, work = threading.Event(), lane.work

    def wait(*job):
        assert gate.wait(WAIT_S)
        work(*job)

    lane.work = wait
    try:
        yield
    finally:
        lane.work = work
        gate.set()


def tamper(daemon, key):
    """Flip a bit in the stored block of a key."""
    for path in daemon.chunk_dir.rglob("*"):
        if path.is_file() and path.stat().st_size:
            with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
                at = data.find(key)
                while at >= 0:
                    block = at - KEY_AT
                    if data[block : block + 8] == b"FBBLOCK1":
                        data[block + HEADER_BYTES + 100] ^= 1
                        return
                    at = data.find(key, at + 1)
    raise AssertionError("no block has that key")
