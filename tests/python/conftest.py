"""Tests run against the package's source and the release build."""

import os
import sys

import pytest

from daemon import BUILD, LIBRARY, PACKAGE, Daemon

for needed in (LIBRARY, BUILD / "bin" / "forebayd"):
    if not needed.exists():
        pytest.exit(f"{needed} is not there; build it: cmake --build --preset release", 1)
os.environ["FOREBAY_LIBRARY"] = str(LIBRARY)
os.environ["PYTHONPATH"] = str(PACKAGE)  # of programs that tests start
os.environ.pop("FOREBAY_SOCKET", None)
sys.path.insert(0, str(PACKAGE))


@pytest.fixture
def daemon():
    """A daemon that runs, for one test."""
    daemon = Daemon()
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.close()


@pytest.fixture
def pool(daemon):
    """A pool of that daemon. It is closed before the daemon ends."""
    import engine
    import forebay

    with forebay.Pool(daemon.socket, connect=engine.WAIT_S) as pool:
        yield pool


@pytest.fixture
def space(pool):
    """The space of plain K and V that engine.py describes."""
    import engine

    return pool.space(engine.manifest())
