"""What of an engine is pooled, and with whom it is shared: models, adapters, requests, settings."""

import threading
from types import SimpleNamespace

import pytest
from plain_engine import PAGE, BlockPool, config, part, prompt

from daemon import WAIT_S, until
from forebay import Rule, identity
from forebay._native import CHAIN_BYTES
from forebay.vllm import family
from forebay.vllm.keys import Adapters, RequestChain
from forebay.vllm.messages import Handshake
from forebay.vllm.scheduler import Scheduler
from forebay.vllm.settings import parse
from forebay.vllm.stats import Stats
from forebay.vllm.worker import Worker


def identified(monkeypatch, tmp_path, **model):
    """A scheduler that has found out who the model is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    scheduler = Scheduler(config(**model), parse({"socket": "/nowhere/forebay.sock"}), Stats())
    until(lambda: scheduler.identity is not None, "the model has an identity")
    scheduler.parts = (part(),)
    assert scheduler._ready()
    scheduler.close()
    return scheduler


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ({"load_format": "dummy", "revision": "abc"}, "its weights are made up"),
        ({"hf_overrides": {"rope_theta": 1}, "revision": "abc"}, "its configuration is overridden"),
        ({}, "its revision is not known"),
        ({"hf_config": SimpleNamespace(_commit_hash=None)}, "its revision is not known"),
        ({"model": "EMPTY"}, "has no weights"),
    ],
)
def test_models_that_nobody_can_name_are_private(monkeypatch, tmp_path, warnings, model, why):
    (tmp_path / "EMPTY").mkdir()
    if "model" in model:
        model = {"model": str(tmp_path / "EMPTY")}
    schedulers = [identified(monkeypatch, tmp_path, **model) for _ in range(2)]
    assert [s.identity for s in schedulers] == ["", ""]
    assert len({s.era.private_id for s in schedulers} - {None}) == 2
    assert sum("private" in text and why in text for text in warnings) == 2


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ({"revision": "abc"}, "org/name@abc"),
        ({"revision": "main", "hf_config": SimpleNamespace(_commit_hash="d1")}, "org/name@d1"),
        ({"model": "WEIGHTS"}, "sha256:"),
    ],
)
def test_models_that_have_a_name_are_shared(monkeypatch, tmp_path, model, name):
    (tmp_path / "WEIGHTS").mkdir()
    (tmp_path / "WEIGHTS" / "model.safetensors").write_bytes(b"weights")
    if "model" in model:
        model = {"model": str(tmp_path / "WEIGHTS")}
    scheduler = identified(monkeypatch, tmp_path, **model)
    assert scheduler.identity.startswith(name)
    assert scheduler.era.private_id is None


def test_scales_found_at_run_time_are_private(make, warnings):
    engine = make()
    engine.worker.config.cache_config.calculate_kv_scales = True
    engine.scheduler.handshake([engine.worker.handshake()])
    assert engine.scheduler.era.private_id
    assert "scales that are found at run time" in warnings[-1]


def adapter(folder, **fields):
    folder.mkdir(exist_ok=True)
    (folder / "adapter.safetensors").write_text(folder.name)
    return SimpleNamespace(lora_int_id=1, lora_path=str(folder), **fields)


def test_an_adapter_is_pooled_once_its_digest_is_known(make, monkeypatch, tmp_path):
    engine, lora = make(), adapter(tmp_path / "a")
    read, of_files = threading.Event(), identity.of_files
    monkeypatch.setattr(
        identity, "of_files", lambda paths: of_files(paths) if read.wait(WAIT_S) else None
    )
    early = engine.asked(prompt(64), lora_request=lora)
    assert engine.count("requests_not_pooled") == 1
    read.set()
    until(lambda: engine.scheduler.adapters.digest(lora), "the digest is known")
    assert engine.compute(early, 0, 64).stores == []  # its pages would have no name
    late = engine.asked(prompt(64), lora_request=lora)
    engine.compute(late, 0, 64)
    engine.settle()
    assert engine.count("requests_not_pooled") == 1
    assert engine.matched(prompt(64), lora_request=lora) == 64
    assert engine.matched(prompt(64)) == 0


def test_an_adapter_that_was_replaced_in_place_is_never_pooled(tmp_path):
    adapters = Adapters()
    known, other = adapter(tmp_path / "a"), adapter(tmp_path / "b")
    until(lambda: adapters.digest(known) and adapters.digest(other), "digests are known")
    assert adapters.digest(known) != adapters.digest(other)
    assert adapters.digest(adapter(tmp_path / "a", load_inplace=True)) is None
    assert adapters.digest(known) is None
    assert len(adapters.digest(other)) == 32


@pytest.mark.parametrize("content", [{"mm_features": [object()]}, {"prompt_embeds": object()}])
def test_content_without_a_name_is_not_pooled(make, content):
    engine = make()
    engine.store(prompt(64))
    request = engine.request(prompt(64), **content)
    assert engine.scheduler.matched(request, 0) == 0
    assert engine.count("requests_not_pooled") == 1
    assert engine.compute(request, 0, 64).stores == []


def test_a_salt_is_of_the_first_page_and_changes_all_hashes():
    made = []
    for salt in (None, "a", "b", "a"):
        request = SimpleNamespace(lora_request=None, cache_salt=salt)
        chain = RequestChain(request, PAGE, Adapters())
        for tokens in (PAGE + 1, 4 * PAGE):  # as it grows
            chain.grow(prompt(tokens))
        assert [bool(extra) for extra in chain.extras()] == [salt is not None, *[False] * 3]
        made.append([chain.hashes[at : at + CHAIN_BYTES] for at in range(0, 128, CHAIN_BYTES)])
    assert made[1] == made[3]
    assert len({page for hashes in made for page in hashes}) == 12


# --- settings and handshake ---


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"page_token": 16, "sokcet": "x"}, "page_token, sokcet is not a key.*page_tokens.*socket"),
        ({"codec": "int4"}, 'codec "int4"; expected one of raw, fp8_e4m3, fp8_e5m2, int8'),
        ({"page_tokens": 0}, "page_tokens 0, .*expected 1 or more"),
        ({"min_prefix_tokens": -1}, ".*min_prefix_tokens -1; expected .* 0 or more"),
        ({"page_tokens": "64"}, "page_tokens is '64'; expected int"),
        ({"page_tokens": True}, "page_tokens is True; expected int"),
        ({"store": "no"}, "store is 'no'; expected bool"),
        ({"socket": 5}, "socket is 5; expected str"),
        ({"codec": ["raw"]}, "codec is .*expected str"),
        ({"lookup_timeout": "1"}, "lookup_timeout is '1'; expected float"),
        ({"load_timeout": -1}, "a timeout of -1; expected seconds"),
    ],
)
def test_wrong_settings_are_named(extra, message):
    with pytest.raises(ValueError, match=f"kv_connector_extra_config: {message}"):
        parse(extra)


HANDSHAKES = {
    "no worker has said": [],
    "the ranks found different arrangements": [
        Handshake((part(),), can_fail=True),
        Handshake((part(block=8),), can_fail=True),
    ],
    "this vLLM does not let a connector keep blocks from reuse": [Handshake((part(),))],
    "a model of windows": [Handshake((part(Rule.WINDOW),))],
    "several cache groups": [Handshake((part(groups=(0, 1)),))],
    "no such cache": [Handshake((part(),)), Handshake((), "no such cache")],
}


@pytest.mark.parametrize("why", HANDSHAKES)
def test_engines_that_are_not_pooled(make, warnings, why):
    engine = make()
    engine.store(prompt(64))
    scheduler = Scheduler(config(), engine.scheduler.settings, Stats())
    scheduler.block_pool = None if "keep blocks" in why else BlockPool()
    scheduler.handshake(HANDSHAKES[why])
    assert "not pooled" in warnings[-1]
    assert why in warnings[-1]
    request = engine.request(prompt(64))
    assert scheduler.matched(request, 0) == 0
    scheduler.block_pool = BlockPool()
    scheduler.handshake([Handshake((part(),), can_fail=True)])
    assert scheduler.matched(request, 0) == 64
    scheduler.close()


@pytest.mark.parametrize(
    ("error", "refusal"),
    [
        (family.Refused("no such cache"), "no such cache"),
        (KeyError("layer"), "cannot describe the cache: 'layer'"),
    ],
)
def test_a_worker_says_why_it_refuses(monkeypatch, error, refusal):
    def find(*_):
        raise error

    monkeypatch.setattr(family, "find", find)
    worker = Worker(config(), None, parse({}), Stats(), True)
    worker.register({})
    assert worker.handshake() == Handshake((), refusal, None, True)
    assert worker.lanes == []
