"""vLLM's connector without vLLM's engine, over a real daemon."""

import contextlib
import itertools

import pytest
import torch
from plain_engine import (
    PAGE,
    STATE_BYTES,
    WINDOW,
    held,
    part,
    prompt,
    rows,
    tamper,
)

from daemon import until
from forebay import Rule
from forebay._native import CHAIN_BYTES
from forebay.vllm.family import Place
from forebay.vllm.messages import WorkerMeta
from forebay.vllm.worker import _ids


def positions(meta):
    """Pages that a step stores, in order."""
    return [
        span.position + page
        for store in meta.stores
        for span in store.spans
        for page in range(len(span.chain) // CHAIN_BYTES)
    ]


def described(spans):
    return [
        (span.position, len(span.chain) // CHAIN_BYTES, span.first_token, span.block_ids)
        for span in spans
    ]


def assert_failed(engine, request, bad_from):
    """Its load has: told by its blocks from one on, or, where that is None, by its name."""
    said = engine.settle()
    assert said.loaded == {request.request_id}
    assert said.failed == ({request.request_id} if bad_from is None else set())
    table = engine.tables[request.request_id][-1]
    assert said.bad == (set() if bad_from is None else set(table[bad_from:]))
    assert engine.state(request).failed


#: Loads of tokens from 16 on, and the first bad block when all of one fails.
FAMILIES = pytest.mark.parametrize(
    ("parts", "bad_from"),
    [
        ([part(block=8)], 2),
        ([part(block=8), part(block=8, groups=(1,))], None),
        ([part(Rule.WINDOW, 8)], None),
        ([part(block=8, groups=(1,))], None),  # the first is a draft's
    ],
)


# --- pages, windows and blocks ---


ALL = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("rule", "window", "block", "good"),
    [
        (Rule.FULL, 0, 64, ALL),
        (Rule.STATE, 0, 64, ALL),
        (Rule.WINDOW, 20, 4, ALL),
        (Rule.WINDOW, 20, 16, ALL),
        (Rule.WINDOW, 20, 32, [1, 2, 4, 6, 8, 10]),
        (Rule.WINDOW, 20, 64, [1, 2, 6, 10]),
        (Rule.WINDOW, 17, 32, ALL),
    ],
)
def test_hits_that_fill_their_blocks(make, rule, window, block, good):
    other = part(rule, block, groups=(1,), window=window)
    scheduler = make(part(), other).scheduler
    assert [pages for pages in range(1, 11) if scheduler._fills(other, pages)] == good
    loadable = [scheduler._loadable(pages) for pages in range(11)]
    assert loadable == [max([g for g in good if g <= pages], default=0) for pages in range(11)]


@pytest.mark.parametrize(
    ("rule", "block", "first"),
    [
        # Tokens that are computed: 0, 19, 23, 40, 51, 55, 83. The window is of 20.
        (Rule.WINDOW, 4, [0, 0, 1, 2, 2, 3, 4]),
        (Rule.WINDOW, 16, [0, 0, 0, 1, 2, 2, 4]),
        (Rule.WINDOW, 64, [0, 0, 0, 0, 0, 0, 4]),
        (Rule.FULL, 16, [0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_first_page_that_the_engine_still_has(make, rule, block, first):
    one = part(rule, block)
    scheduler = make(one).scheduler
    assert [scheduler._first_page(one, n) for n in (0, 19, 23, 40, 51, 55, 83)] == first


@pytest.mark.parametrize(
    ("block", "table", "pages", "spans"),
    [
        (4, [range(1, 17)], (1, 4), [(1, 3, 0, {0: [*range(5, 17)]})]),
        (4, [[1, 2, 3, 4, 5, 0, 7, 8, 9]], (0, 2), [(0, 1, 0, {0: [1, 2, 3, 4]})]),
        (4, [range(1, 8)], (0, 2), [(0, 1, 0, {0: [1, 2, 3, 4]})]),
        (16, [[1, 0, 3, 4]], (0, 4), [(0, 1, 0, {0: [1]}), (2, 2, 0, {0: [3, 4]})]),
        (16, [[0, 0]], (0, 2), []),
        (24, [[1, 2]], (1, 3), [(1, 2, 16, {0: [1, 2]})]),
        (64, [[1, 2]], (1, 6), [(1, 5, 16, {0: [1, 2]})]),
        (32, [[1, 2, 3]], (3, 5), [(3, 2, 16, {0: [2, 3]})]),
        (32, [[0, 2, 3]], (0, 6), [(2, 4, 0, {0: [2, 3]})]),
        (16, [[1, 2], [0, 4]], (0, 2), [(1, 1, 0, {0: [2], 1: [4]})]),
    ],
)
def test_whole_pages(make, block, table, pages, spans):
    engine = make(part(block=block, groups=range(len(table))))
    request = engine.asked(prompt(6 * PAGE))
    state = engine.state(request)
    state.block_ids = tuple(list(ids) for ids in table)
    found = engine.scheduler._whole_pages(0, state, *pages)
    assert described(found) == spans
    for span in found:
        begin, end = (at * CHAIN_BYTES for at in (span.position, span.position + 1))
        assert span.chain[:CHAIN_BYTES] == state.chain.hashes[begin:end]
        assert (span.parent or b"") == state.chain.hashes[:begin][-CHAIN_BYTES:]


@pytest.mark.parametrize(
    ("boundaries", "spans"),
    [
        ([(1, 7, 32), (2, 8, 32)], [(1, 1, 16, {1: [7], 2: [8]})]),
        ([(1, 7, 48), (2, 8, 48)], [(2, 1, 0, {1: [7], 2: [8]})]),
        ([(2, 8, 64), (1, 7, 64), (1, 5, 32), (2, 6, 32)], [(1, 1, 16), (3, 1, 16)]),
        ([(1, 7, 40), (2, 8, 40)], []),  # not on a page
        ([(1, 7, 32)], []),  # of some groups only
        ([(1, 7, 32), (2, 8, 64)], []),
        ([(0, 9, 32), (1, 7, 32), (2, 8, 32)], [(1, 1, 16)]),
        ([(1, 7, 80), (2, 8, 80)], []),  # not computed yet
    ],
)
def test_state_pages(make, boundaries, spans):
    engine = make(part(), part(Rule.STATE, 32, groups=(1, 2)))
    request = engine.asked(prompt(6 * PAGE))
    found = engine.scheduler._state_pages(1, engine.state(request), boundaries, 4)
    assert [d[: len(e)] for d, e in zip(described(found), spans, strict=True)] == spans


@pytest.mark.parametrize(
    ("groups", "ids"),
    [
        ((1,), [[8, 9, -1, -1, 14, 15]]),
        ((1, 1), [[8, 9, -1, -1, 14, 15]]),
        ((1, 0), [[8, 9, -1, -1, 14, 15], [2, 3]]),
    ],
)
def test_blocks_of_the_kernel(groups, ids):
    place = Place(part(block=8, groups=groups), None, (0, 1), 2, 4)
    assert [list(layer) for layer in _ids(place, {0: [1], 1: [4, 0, 7]})] == ids


@pytest.mark.parametrize("store_block", [4, 16, 64])
@pytest.mark.parametrize("rule", [Rule.FULL, Rule.WINDOW])
@pytest.mark.parametrize("load_block", [4, 16])
def test_loads_what_was_stored(make, rule, store_block, load_block):
    tokens = prompt(4 * PAGE + 1)
    assert make(part(rule, store_block)).store(tokens)
    engine = make(part(rule, load_block))
    request = engine.request(tokens)
    assert engine.begin_load(request) == 4 * PAGE
    assert engine.settle() == (set(), {request.request_id}, set(), set())
    table = engine.tables[request.request_id][0]
    begin = load_block * sum(block == 0 for block in table)
    assert begin == (0 if rule == Rule.FULL else (4 * PAGE - WINDOW + 1) // load_block * load_block)
    [there] = engine.read(request, 0, begin, 4 * PAGE)
    assert torch.equal(there, rows(tokens[begin : 4 * PAGE]))
    assert engine.count("loads") == 1


def test_state_comes_back(make):
    parts, tokens = (part(), part(Rule.STATE, 32, groups=(1,))), prompt(65)
    first = make(*parts)
    request = first.asked(tokens)
    first.tensors[1][0][200] = 42
    first.compute(request, 0, 65, states=[(1, 200, 64)])
    first.settle()
    second = make(*parts)
    request = second.request(tokens)
    assert second.begin_load(request) == 64
    assert second.settle().failed == set()
    block = second.tables[request.request_id][1][-1]
    assert second.tensors[1][0][block].tolist() == [42] * STATE_BYTES


# --- lookup ---


@pytest.mark.parametrize("stored", [True, False])
def test_a_request_is_looked_up_once(make, stored):
    engine, tokens = make(), prompt(3 * PAGE + 1)
    if stored:
        engine.store(tokens)
    before = engine.count("lookups")
    request = engine.request(tokens)
    for _ in range(3):
        assert engine.scheduler.matched(request, 0) == (3 * PAGE if stored else 0)
    assert engine.count("lookups") == before + 1


@pytest.mark.parametrize(("computed", "tokens"), [(0, 48), (16, 32), (17, 0), (48, 0), (60, 0)])
def test_a_gain_must_be_long_enough(make, computed, tokens):
    engine = make(min_prefix_tokens=32)
    engine.store(prompt(64))
    request = engine.request(prompt(48) + prompt(48, seed=1))
    assert engine.scheduler.matched(request, computed) == tokens
    assert engine.count("lookup_hit_tokens") == 48


def test_no_lease_for_a_request_that_reads_no_prefix(make):
    engine = make()
    engine.store(prompt(64))
    lookups = engine.count("lookups")
    request = engine.request(prompt(64), skip_reading_prefix_cache=True)
    assert engine.scheduler.matched(request, 0) == 0
    assert engine.count("lookups") == lookups
    assert engine.state(request).hit is None


@pytest.mark.parametrize(
    ("rule", "length", "tokens"),
    [(Rule.FULL, 48, 48), (Rule.FULL, 49, 48), (Rule.WINDOW, 48, 32), (Rule.WINDOW, 49, 48)],
)
def test_a_token_is_left_to_compute(make, rule, length, tokens):
    engine = make(part(rule))
    engine.store(prompt(64))
    assert engine.matched(prompt(length)) == tokens


# --- room for a hit ---


def test_a_hit_is_loaded_once(make):
    engine = make()
    engine.store(prompt(64))
    request = engine.request(prompt(65))
    assert engine.scheduler.matched(request, 16) == 48
    hit = engine.state(request).hit
    for tokens in (48, 48, 0):  # vLLM calls again when an asynchronous load is done
        engine.allocate(request, tokens, computed=16)
    assert hit.leases
    [load] = engine.step().loads
    assert load.local_tokens == 16
    assert len(load.chain) == 4 * CHAIN_BYTES
    assert engine.scheduler.matched(request, 16) == 0
    assert engine.settle().loaded == {request.request_id}
    assert engine.step().loads == []
    assert hit.leases == []


def test_room_without_a_load_forgets_the_hit(make):
    engine = make()
    engine.store(prompt(64))
    request = engine.request(prompt(65))
    lookups = engine.count("lookups")
    assert engine.scheduler.matched(request, 0) == 64
    hit = engine.state(request).hit
    engine.allocate(request, 0)
    assert hit.leases == []
    assert engine.step().loads == []
    assert engine.scheduler.matched(request, 0) == 64  # it was preempted
    assert engine.count("lookups") == lookups + 2


# --- steps ---


@pytest.mark.parametrize("block", [4, 64])
@pytest.mark.parametrize(
    ("chunks", "stored"),
    [
        ([70], [[0, 1, 2, 3]]),
        ([24, 24, 22], [[0], [1, 2], [3]]),
        ([8, 8, 47, 1, 6], [[], [0], [1, 2], [3], []]),
    ],
)
def test_chunks_store_each_page_once(make, block, chunks, stored):
    engine = make(part(block=block))
    request = engine.asked(prompt(70))
    ends = [0, *itertools.accumulate(chunks)]
    steps = [engine.compute(request, end, n) for end, n in zip(ends, chunks)]
    assert [positions(meta) for meta in steps] == stored
    engine.settle()
    assert engine.count("pages_stored") == 4
    again = engine.request(prompt(70))
    assert engine.begin_load(again) == 64
    engine.settle()
    assert torch.equal(engine.read(again, 0, 0, 64)[0], rows(prompt(64)))


@pytest.mark.parametrize("lag", [0, 1])  # tokens that are scheduled and not sampled yet
def test_decoded_pages_are_stored_when_whole(make, lag):
    engine = make()
    request = engine.asked(prompt(60))
    assert positions(engine.compute(request, 0, 60)) == [0, 1, 2]
    stored = []
    for before in range(60, 98):
        request.all_token_ids = prompt(before + 1 - lag)
        stored += [(page, before) for page in positions(engine.compute(request, before, 1))]
    assert stored == [(3, 63 + lag), (4, 79 + lag), (5, 95 + lag)]


def test_a_resumed_request_stores_its_new_blocks(make):
    engine = make(part(block=8))
    request = engine.asked(prompt(64))
    [first] = engine.compute(request, 0, 24).stores
    assert described(first.spans) == [(0, 1, 0, {0: [1, 2]})]
    [second] = engine.compute(request, 0, 40, resumed=True).stores
    assert described(second.spans) == [(1, 1, 0, {0: [6, 7]})]
    [third] = engine.compute(request, 40, 24).stores
    assert described(third.spans) == [(2, 2, 0, {0: [8, 9, 10, 11]})]


def test_a_window_stores_only_what_it_still_has(make):
    engine = make(part(block=4), part(Rule.WINDOW, 4, groups=(1,)))
    request = engine.asked(prompt(80))
    engine.compute(request, 0, 15)
    engine.state(request).stored_pages = 0
    [store] = engine.compute(request, 40, 40).stores
    assert [(span.space, span.position) for span in store.spans] == [(0, 0), (1, 2)]


def test_finished_requests_are_forgotten(make):
    engine = make()
    engine.store(prompt(64))
    request = engine.request(prompt(65))
    assert engine.scheduler.matched(request, 0) == 64
    hit = engine.state(request).hit
    engine.step(finished=[request])
    assert hit.leases == []
    assert engine.scheduler.requests == {}
    loading = engine.request(prompt(65))
    with held(engine.worker.lanes[0]):
        engine.begin_load(loading)
        engine.step(finished=[loading])
        assert engine.state(loading).hit.leases  # until the worker has read it
    engine.settle()
    assert engine.scheduler.requests == {}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("finished", [True, False])
def test_blocks_are_kept_until_all_ranks_are_done(make, ranks, together, finished):
    engine = make(part(block=8), part(Rule.WINDOW, 8, groups=(1,)), ranks=ranks)
    scheduler, request = engine.scheduler, engine.asked(prompt(64))
    [first] = engine.compute(request, 0, 24).stores
    kept = {1: 1, 2: 1, 4: 1, 5: 1}
    assert engine.blocks.kept() == kept
    [second] = engine.compute(request, 24, 8).stores
    assert engine.blocks.kept() == {**kept, 3: 1, 6: 1, 7: 1, 8: 1}
    if finished:
        engine.step(finished=[request])
    for store, left in ((second, kept), (first, {})):
        if together:
            meta = WorkerMeta([store.id])
            for _ in range(ranks - 1):
                meta = meta.aggregate(WorkerMeta([store.id]))
            scheduler.stored(meta)
        else:
            for _ in range(ranks):
                assert engine.blocks.kept() != left
                scheduler.stored(WorkerMeta([store.id]))
        assert engine.blocks.kept() == left
        scheduler.stored(WorkerMeta([store.id]))
        assert engine.blocks.kept() == left
    assert finished or engine.state(request).stores == 0
    assert scheduler.flights == {}


def test_nothing_is_stored_by_a_reader(make):
    engine = make(store=False)
    assert engine.store(prompt(64)) == []
    assert engine.matched(prompt(64)) == 0


# --- ends ---


def test_a_finished_request_waits_for_its_stores(make):
    engine = make()
    request = engine.asked(prompt(64))
    with held(engine.worker.lanes[1]):
        engine.compute(request, 0, 32)
        engine.compute(request, 32, 32)
        assert engine.scheduler.request_finished(request) is True
        meta = engine.step(finished=[request])
        assert meta.held == {request.request_id}
        assert engine.worker.take_finished() == (set(), set(), set())
        assert engine.blocks.kept()
    assert engine.settle().sent == {request.request_id}
    assert engine.blocks.kept() == {}
    assert engine.settle().sent == set()


def test_a_finished_request_without_stores_does_not_wait(make):
    engine = make()
    request = engine.request(prompt(64))
    assert engine.scheduler.request_finished(request) is False  # unknown
    engine.scheduler.matched(request, 0)
    engine.compute(request, 0, 64)
    engine.settle()
    assert engine.scheduler.request_finished(request) is False
    assert engine.step(finished=[request]).held == set()
    assert engine.settle().sent == set()


# --- reset ---


@FAMILIES
@pytest.mark.parametrize("ended", [True, False])
def test_a_load_over_a_reset_has_failed(make, parts, bad_from, ended):
    engine = make(*parts)
    engine.store(prompt(64))
    request = engine.request(prompt(65))
    with contextlib.nullcontext() if ended else held(engine.worker.lanes[0]):
        assert engine.begin_load(request, 16) == 48
        if ended:
            until(lambda: not engine.worker.loading, "it is loaded")
        engine.scheduler.reset()
        engine.step()
    assert_failed(engine, request, bad_from)
    assert engine.count("loads") == ended
    assert engine.scheduler.matched(request, 0) == 0
    assert engine.compute(request, 0, 65).stores == []
    assert engine.matched(prompt(65)) == 0


def test_a_store_over_a_reset_is_not_found(make):
    engine = make()
    request = engine.asked(prompt(64))
    with held(engine.worker.lanes[1]):
        engine.compute(request, 0, 64)
        engine.scheduler.reset()
        engine.step()
        assert engine.blocks.kept()
    engine.settle()
    assert engine.blocks.kept() == {}
    assert engine.count("pages_stored") == 4
    assert engine.matched(prompt(64)) == 0


def test_nothing_from_before_a_reset_is_found(make):
    engine, other = make(), make()
    engine.store(prompt(64))
    waiting, eras = engine.asked(prompt(80)), []
    hit = engine.state(waiting).hit
    for _ in range(2):
        engine.scheduler.reset()
        assert engine.matched(prompt(80)) == 0
        assert engine.store(prompt(80)) != []
        assert engine.matched(prompt(80)) == 80
        eras.append(engine.scheduler.era)
    assert hit.leases == []
    assert engine.scheduler.matched(waiting, 0) == 0
    assert other.matched(prompt(80)) == 64  # of the first era, and of no other
    assert [era.generation for era in eras] == [1, 2]
    assert len({era.private_id for era in eras}) == 2


def test_a_request_from_before_a_reset_is_not_pooled(make):
    engine = make()
    request = engine.asked(prompt(64))
    engine.allocate(request, 0)
    assert positions(engine.compute(request, 0, 32)) == [0, 1]
    engine.scheduler.reset()
    assert engine.compute(request, 32, 32).stores == []
    assert engine.compute(request, 0, 64, resumed=True).stores == []
    assert len(engine.store(prompt(64))) == 1
    assert engine.matched(prompt(64)) == 64
    assert engine.scheduler.matched(request, 0) == 0  # it was preempted


def test_preempted_twice_over_a_reset(make):
    engine = make()
    request = engine.asked(prompt(65))
    engine.allocate(request, 0)
    engine.compute(request, 0, 65)
    engine.settle()
    engine.scheduler.reset()
    assert engine.scheduler.matched(request, 0) == 0
    engine.allocate(request, 0)
    engine.store(prompt(65))
    assert engine.scheduler.matched(request, 0) == 0


@pytest.mark.parametrize("socket", ["/nowhere/forebay.sock", "x" * 200])
def test_reset_without_a_daemon(make, socket):
    engine = make(socket=socket, lookup_timeout=None)
    assert engine.matched(prompt(64)) == 0
    engine.scheduler.reset()
    assert engine.scheduler.era.generation == 1
    assert engine.scheduler.era.private_id
    engine.store(prompt(64))
    assert engine.blocks.kept() == {}
    assert engine.matched(prompt(64)) == 0


# --- loads that fail ---


def assert_computes(engine, request):
    """A request whose load failed is not asked again; the next one of its prompt is."""
    lookups = engine.count("lookups")
    assert engine.scheduler.matched(request, 0) == 0
    engine.allocate(request, 0)
    assert engine.scheduler.matched(request, 0) == 0
    assert engine.count("lookups") == lookups
    stored = positions(engine.compute(request, 0, 65, resumed=True))
    assert set(stored) == {0, 1, 2, 3}
    engine.settle()
    engine.step(finished=[request])
    assert engine.matched(request.all_token_ids) == 64


@FAMILIES
def test_a_lease_that_has_ended(make, parts, bad_from):
    engine = make(*parts)
    engine.store(prompt(64))
    request = engine.request(prompt(65))
    engine.allocate(request, engine.scheduler.matched(request, 16), computed=16)
    engine.state(request).hit.release()
    engine.step()
    assert_failed(engine, request, bad_from)
    assert engine.count("loads_failed") == 1
    assert_computes(engine, request)


@pytest.mark.parametrize(
    ("damaged", "rule", "block", "computed", "bad_from"),
    [
        (2, Rule.FULL, 4, 0, 8),
        (2, Rule.FULL, 4, 16, 8),
        (2, Rule.FULL, 4, 40, 10),
        (2, Rule.FULL, 16, 0, 2),
        (2, Rule.FULL, 64, 0, 0),
        (0, Rule.FULL, 8, 0, 0),
        (3, Rule.WINDOW, 8, 0, None),
    ],
)
def test_a_damaged_page(daemon, make, damaged, rule, block, computed, bad_from):
    engine = make(part(rule, block))
    engine.store(prompt(64))
    request = engine.request(prompt(65))
    engine.scheduler.matched(request, computed)
    hashes = engine.state(request).chain.hashes
    page = hashes[damaged * CHAIN_BYTES :][:CHAIN_BYTES]
    tamper(daemon, engine.scheduler.family[0].key(page))
    assert engine.begin_load(request, computed) == 64 - computed
    assert_failed(engine, request, bad_from)
    assert engine.count("pages_corrupt") == engine.count("loads_failed") == 1
    if rule == Rule.FULL:
        end = max(computed, damaged * PAGE)
        [before] = engine.read(request, 0, computed, end)
        assert torch.equal(before, rows(prompt(64)[computed:end]))
    until(lambda: engine.matched(prompt(65)) < 64, "the daemon has dropped it")
    assert_computes(engine, request)


def _raise(*_, **__):
    raise RuntimeError("a transfer that goes wrong")


@FAMILIES
def test_a_load_that_raises_has_failed(make, monkeypatch, parts, bad_from):
    engine = make(*parts)
    engine.store(prompt(64))
    request = engine.request(prompt(65))
    with monkeypatch.context() as broken:
        broken.setattr(engine.worker, "_load_space", _raise)
        engine.begin_load(request, 16)
        assert_failed(engine, request, bad_from)
    other = engine.request(prompt(65))
    assert engine.begin_load(other) == 64
    assert engine.settle() == (set(), {other.request_id}, set(), set())


def test_a_store_that_raises_is_done(make, monkeypatch):
    engine = make()
    with monkeypatch.context() as broken:
        broken.setattr(engine.worker, "_store_pages", _raise)
        assert engine.store(prompt(64))
    assert engine.blocks.kept() == {}
    assert engine.matched(prompt(64)) == 0
    engine.store(prompt(64))
    assert engine.matched(prompt(64)) == 64
