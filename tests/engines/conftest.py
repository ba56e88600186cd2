"""The connector's tests run against the package's source and the release build, in the Python that
setup installs vLLM for.
"""

import contextlib
import os
import sys
import uuid
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from daemon import LIBRARY, PACKAGE, WAIT_S, Daemon

os.environ["FOREBAY_LIBRARY"] = str(LIBRARY)
sys.path.insert(0, str(PACKAGE))


@pytest.fixture(scope="module")
def daemon():
    """A daemon that runs, for all tests of a file."""
    daemon = Daemon()
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.close()


@pytest.fixture
def make(daemon, monkeypatch):
    """Makes engines of a model that no other test has."""
    from plain_engine import Engine, part

    import forebay
    from forebay.vllm import scheduler, worker

    def patient(address, *, connect, **options):
        return forebay.Pool(address, connect=WAIT_S, **options)

    for half in (scheduler, worker):
        monkeypatch.setattr(half, "Pool", patient)
    with contextlib.ExitStack() as stack:
        model = uuid.uuid4().hex

        def make(*parts, **options):
            options = {"socket": daemon.socket, "model": model, **options}
            options = {"lookup_timeout": WAIT_S, "load_timeout": WAIT_S, **options}
            engine = Engine(monkeypatch, parts or [part()], **options)
            stack.callback(engine.close)
            return engine

        yield make


@pytest.fixture
def warnings(monkeypatch):
    """What the scheduler's side warns of."""
    from forebay.vllm import scheduler

    said = []
    monkeypatch.setattr(
        scheduler.logger, "warning", lambda text, *values: said.append(text % values)
    )
    return said
