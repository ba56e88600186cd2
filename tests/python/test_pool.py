"""Life of pools, hits and puts: statuses, releases, threads, processes, and a daemon that goes."""

import gc
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

import engine
import forebay
from daemon import Daemon, until
from engine import PAGE, WAIT_S, Engine
from forebay import Status

PAGES = 4
OK = [Status.OK] * PAGES


@pytest.fixture
def chain():
    return forebay.chain(engine.tokens(1, PAGES), PAGE)


@pytest.fixture
def kv():
    return engine.rows(1, PAGES)


@pytest.fixture
def source(kv):
    return Engine(PAGES).write(kv)


def is_there(pool, space, chain, kv):
    """Whether all is there; what is must be right."""
    to = Engine(PAGES)
    with pool.lookup([space], chain, timeout=WAIT_S) as hit:
        if hit.pages < PAGES or to.get(hit) != OK:
            return False
    assert np.array_equal(to.read(), kv)
    return True


# --- statuses ---


def test_miss(pool, space, chain):
    with pool.lookup([space], chain, timeout=WAIT_S) as hit:
        assert not hit
        assert (hit.pages, hit.status, hit.leases) == (0, Status.MISS, [])
        with pytest.raises(ValueError, match="no pages"):
            Engine(PAGES).get(hit)
    assert pool.prefetch([space], chain, timeout=WAIT_S) == Status.MISS


def test_prefix(pool, space, chain, source):
    with pool.put(space, chain[:64]) as put:
        assert put.encode(source.cache, source.block_ids, source.block_tokens) == OK[:2]
        assert put.commit() == OK[:2]
    with pool.lookup([space], chain, read_ahead=True, timeout=WAIT_S) as hit:
        assert hit.pages == 2
    assert pool.prefetch([space], chain, timeout=WAIT_S) == Status.OK


def test_what_is_there_is_not_written_again(pool, space, chain, source, kv):
    assert source.put(pool, space, chain) == OK
    with pool.put(space, chain) as put:
        assert not put
        assert (put.status, put.statuses) == (Status.MISS, [Status.EXISTS] * PAGES)
        statuses = put.encode(source.cache, source.block_ids, source.block_tokens)
        assert statuses == [Status.ESTATE] * PAGES
        assert put.commit() == [Status.EXISTS] * PAGES
    assert is_there(pool, space, chain, kv)


def test_what_another_writes_is_busy(daemon, pool, space, chain):
    with forebay.Pool(daemon.socket) as other, pool.put(space, chain) as put:
        assert put.statuses == OK
        again = other.put(other.space(engine.manifest()), chain)
        assert (again.status, again.statuses) == (Status.MISS, [Status.BUSY] * PAGES)


def test_parent_must_be_there(pool, space, chain):
    with pool.put(space, chain[64:], position=2, parent=chain[32:64]) as put:
        assert not put
        assert put.statuses[0] == Status.ENOENT
    assert pool.put(space, chain[64:], position=2).statuses == [Status.EINVAL] * 2


@pytest.mark.parametrize(
    "call",
    [
        lambda pool, space, chain: pool.lookup([space], chain[:-1]),
        lambda pool, space, chain: pool.put(space, chain[1:]),
        lambda pool, space, chain: pool.put(space, chain[32:], position=1, parent=chain[:31]),
        lambda pool, space, chain: space.key(chain),
    ],
    ids=["lookup", "put", "parent", "key"],
)
def test_hashes_of_a_wrong_length_are_refused(pool, space, chain, call):
    with pytest.raises(ValueError, match=r"expected .*32"):
        call(pool, space, chain)


def test_reject_of_good_blocks_keeps_them(daemon, pool, space, chain, source, kv):
    assert source.put(pool, space, chain) == OK
    assert pool.reject(space, chain, timeout=WAIT_S) == Status.OK
    assert is_there(pool, space, chain, kv)
    assert daemon.metric("forebay_rejected_blocks_total") == 0


def test_address_that_is_none_is_refused():
    with pytest.raises(forebay.ForebayError, match="is no address; expected the path"):
        forebay.Pool("http://localhost")


# --- releases ---


def test_leaving_a_put_aborts_it(daemon, pool, space, chain, source):
    with pool.put(space, chain) as put:
        assert put.encode(source.cache, source.block_ids, source.block_tokens) == OK
        daemon.await_held("reserved")
    daemon.await_nothing_held()
    assert not pool.lookup([space], chain, timeout=WAIT_S)
    put.abort()
    assert put.commit() == [Status.ECANCELED] * PAGES
    assert source.put(pool, space, chain) == OK


def test_commit_gives_up_what_is_not_written(daemon, pool, space, chain, source):
    with pool.put(space, chain) as put:
        args = source.cache, source.block_ids, source.block_tokens
        assert put.encode(*args, pages=(0, 3)) == OK[:3]
        daemon.await_held("reserved")
        assert put.commit() == [*OK[:3], Status.ECANCELED]
    assert put.statuses == put.commit() == [*OK[:3], Status.ECANCELED]
    with pool.lookup([space], chain, timeout=WAIT_S) as hit:
        assert hit.pages == 3
    daemon.await_nothing_held()


def test_hit_is_released_by_with_and_by_name(daemon, pool, space, chain, source):
    assert source.put(pool, space, chain) == OK
    with pool.lookup([space], chain, timeout=WAIT_S) as hit:
        daemon.await_held("leased")
    daemon.await_nothing_held()
    hit.release()
    with pytest.raises(ValueError, match="has been released"):
        source.get(hit)
    hit = pool.lookup([space], chain, timeout=WAIT_S)
    daemon.await_held("leased")
    hit.release()
    daemon.await_nothing_held()


@pytest.mark.parametrize("what", ["hit", "put"])
def test_dropped_object_is_released_by_the_next_call(daemon, pool, space, chain, source, what):
    if what == "hit":
        assert source.put(pool, space, chain) == OK
        dropped, held = pool.lookup([space], chain, timeout=WAIT_S), "leased"
    else:
        dropped, held = pool.put(space, chain), "reserved"
    assert dropped
    del dropped
    gc.collect()
    daemon.await_held(held)
    pool.info()
    daemon.await_nothing_held()


def test_threads_release_what_is_dropped(daemon, pool, space, chain, source):
    """Hits that any thread drops, while others call."""
    assert source.put(pool, space, chain) == OK
    failures = []

    def work():
        try:
            for _ in range(300):
                assert pool.lookup([space], chain, timeout=WAIT_S).pages == PAGES
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with pool.lookup([space], chain, timeout=WAIT_S):
        daemon.await_metric("forebay_leases", 1)
    daemon.await_nothing_held()


def test_closing_twice(daemon):
    pool = forebay.Pool(daemon.socket)
    assert pool.info()["connected"]
    pool.close()
    pool.close()
    daemon.await_metric("forebay_clients", 0)


def test_pool_that_is_not_closed_warns(daemon):
    pool = forebay.Pool(daemon.socket)
    with pytest.warns(ResourceWarning, match="not closed"):
        pool.__del__()
    pool.close()


def test_use_after_close(daemon, chain, source):
    """What was held is given back, and nothing touches what the library has freed."""
    pool = forebay.Pool(daemon.socket)
    space = pool.space(engine.manifest())
    assert source.put(pool, space, chain) == OK
    hit = pool.lookup([space], chain, timeout=WAIT_S)
    put = pool.put(space, forebay.chain(engine.tokens(2, PAGES), PAGE))
    assert hit and put
    daemon.await_held("leased")
    daemon.await_held("reserved")
    pool.close()
    for call in (
        pool.info,
        lambda: pool.space(engine.manifest()),
        lambda: pool.lookup([space], chain),
        lambda: pool.put(space, chain),
        lambda: space.key(chain[:32]),
    ):
        with pytest.raises(ValueError, match="this pool has been closed"):
            call()
    for call in (lambda: source.get(hit), lambda: hit.block(0, 0)):
        with pytest.raises(ValueError, match="has been released"):
            call()
    assert hit.leases == []
    assert put.commit() == [Status.ECANCELED] * PAGES
    hit.release()
    put.abort()
    daemon.await_nothing_held()


# --- threads and processes ---


def test_get_releases_the_gil(pool, space, chain, source):
    """Another thread runs while this one is in a call. The interpreter takes the lock away from
    nobody, so the other gets it only from the call."""
    assert source.put(pool, space, chain) == OK
    to = Engine(PAGES)
    turns, stop = [0], threading.Event()

    def turn():
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0)  # gives the lock back

    def call():
        before = turns[0]
        statuses = hit.get(0, to.cache, to.block_ids, to.block_tokens)
        progress = turns[0] > before
        assert statuses == OK
        return progress

    thread = threading.Thread(target=turn)
    interval = sys.getswitchinterval()
    with pool.lookup([space], chain, timeout=WAIT_S) as hit:
        thread.start()
        try:
            sys.setswitchinterval(1000)
            until(call, "another thread ran during a get")
        finally:
            stop.set()
            sys.setswitchinterval(interval)
            thread.join()


def read_leased(socket, chain, leases):
    """In another process: statuses and KV of a hit that it attaches to."""
    to = Engine(PAGES)
    with forebay.Pool(socket) as pool:
        with pool.attach([pool.space(engine.manifest())], chain, leases, timeout=WAIT_S) as hit:
            return hit.status, to.get(hit) if hit else [], to.read()


def test_another_process_attaches(daemon, pool, space, chain, source, kv):
    assert source.put(pool, space, chain) == OK
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        with pool.lookup([space], chain, timeout=WAIT_S) as hit:
            daemon.await_held("leased")
            leases = hit.leases
            assert len(leases) == 1
            status, statuses, values = processes.submit(
                read_leased, daemon.socket, chain, leases
            ).result(timeout=60)
        assert (status, statuses) == (Status.OK, OK)
        assert np.array_equal(values, kv)
        daemon.await_nothing_held()
        ended = processes.submit(read_leased, daemon.socket, chain, leases).result(timeout=60)
        assert ended[0] == Status.ENOENT


# --- a daemon that goes, bytes that change ---


def test_daemon_killed_and_started_again(daemon, pool, space, chain, source, kv):
    assert source.put(pool, space, chain) == OK
    hit = pool.lookup([space], chain, timeout=WAIT_S)
    assert hit
    daemon.kill()
    until(lambda: not pool.info()["connected"], "the library knows that the daemon is gone")
    assert not pool.lookup([space], chain)
    with pool.put(space, forebay.chain(engine.tokens(2, PAGES), PAGE)) as put:
        assert not put
        assert Status.OK not in put.statuses
    hit.release()
    daemon.start()
    until(lambda: pool.info()["connected"], "the library has found the daemon")
    until(lambda: is_there(pool, space, chain, kv), "what was stored is found again")
    assert pool.info()["reconnects"] >= 1
    other = forebay.chain(engine.tokens(3, PAGES), PAGE)
    assert source.put(pool, space, other) == OK
    assert is_there(pool, space, other, kv)


def test_no_daemon(tmp_path, chain, source):
    with forebay.Pool(str(tmp_path / "none.sock"), connect=0.05) as pool:
        info = pool.info()
        assert (info["connected"], info["tenant"], info["incarnation"]) == (False, "", 0)
        space = pool.space(engine.manifest())
        begun = time.monotonic()
        for _ in range(100):
            with pool.lookup([space], chain) as hit:
                assert not hit
                assert hit.status not in (Status.OK, Status.MISS)
        with pool.put(space, chain) as put:
            assert not put
            statuses = put.encode(source.cache, source.block_ids, source.block_tokens)
            assert statuses == [Status.ESTATE] * PAGES
            assert Status.OK not in put.commit()
        assert time.monotonic() - begun < 2
        assert pool.reject(space, chain) != Status.OK
        assert pool.info()["calls_skipped"] >= 100


def test_pool_finds_a_daemon_that_starts_later(chain, source, kv):
    daemon = Daemon()
    try:
        with forebay.Pool(daemon.socket, connect=0.05) as pool:
            space = pool.space(engine.manifest())
            assert not pool.lookup([space], chain)
            daemon.start()
            until(lambda: pool.info()["connected"], "the library has found the daemon")
            assert source.put(pool, space, chain) == OK
            assert is_there(pool, space, chain, kv)
    finally:
        daemon.close()


def flip_stored_byte(daemon, key, offset):
    """Of the block of that key, in the daemon's memory."""
    for path in daemon.chunk_dir.glob("chunk-*"):
        with open(path, "r+b") as chunk:
            data = chunk.read()
            for at in range(0, len(data), 4096):
                if data[at : at + 8] == b"FBBLOCK1" and data[at + 32 : at + 64] == key:
                    chunk.seek(at + offset)
                    chunk.write(bytes([data[at + offset] ^ 1]))
                    return
    raise AssertionError("no chunk has that block")


def test_damaged_block_is_found_and_dropped(daemon, pool, space, chain, source, kv):
    assert source.put(pool, space, chain) == OK
    flip_stored_byte(daemon, space.key(chain[32:64]), 4096 + 100)
    to = Engine(PAGES)
    with pool.lookup([space], chain, timeout=WAIT_S) as hit:
        assert hit.pages == PAGES
        assert to.get(hit) == [Status.OK, Status.ECORRUPT, Status.OK, Status.OK]
    assert np.array_equal(to.read()[:, :, :PAGE], kv[:, :, :PAGE])
    daemon.await_metric("forebay_rejected_blocks_total", 1)
    with pool.lookup([space], chain, timeout=WAIT_S) as hit:
        assert hit.pages == 1
    source.put(pool, space, chain)
    assert is_there(pool, space, chain, kv)


def test_block_in_place(pool, space, chain, source):
    assert source.put(pool, space, chain) == OK
    with pool.lookup([space], chain, timeout=WAIT_S) as hit:
        block = hit.block(0, 1)
        assert len(block) == space.block_bytes
        assert bytes(block[:8]) == b"FBBLOCK1"
        assert bytes(block[16:32]) == space.id
        assert bytes(block[32:64]) == space.key(chain[32:64])
        with pytest.raises(TypeError, match="read-only"):
            block[0] = 0
        with pytest.raises(forebay.ForebayError, match="invalid argument"):
            hit.block(0, PAGES)
        del block
