"""Starting, watching and ending forebayd for tests."""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "release"
LIBRARY = BUILD / "lib" / "libforebay.so"
PACKAGE = ROOT / "pool" / "python"

WAIT_S = 20
NEEDED_BYTES = 1 << 30  # of /dev/shm; containers often have 64 MiB
PR_SET_PDEATHSIG = 1


def until(condition, what, seconds=WAIT_S):
    """Wait until a condition is true; fail with what was waited for."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s until {what}"
        time.sleep(0.005)


def _chunk_parent():
    shm = os.statvfs("/dev/shm")
    return "/dev/shm" if shm.f_bavail * shm.f_frsize > NEEDED_BYTES else None


class Daemon:
    """A forebayd with directories of its own; `close` ends it and removes them."""

    def __init__(self):
        self.dir = Path(tempfile.mkdtemp(prefix="forebay-test-", dir="/tmp"))
        self.chunk_dir = Path(tempfile.mkdtemp(prefix="forebay-test-", dir=_chunk_parent()))
        self.socket = str(self.dir / "default" / "forebay.sock")
        self.process = None
        self._die_with_parent = ctypes.CDLL(None).prctl

    def start(self):
        """Returns when it is ready; chunks of the one before are taken over."""
        command = [
            BUILD / "bin" / "forebayd",
            f"--run-dir={self.dir}",
            f"--chunk-dir={self.chunk_dir}",
            f"--http-listen=unix:{self.dir}/http",
            "--grpc-listen=",
            "--host-bytes=256MiB",
        ]
        with open(self.dir / "log", "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                preexec_fn=lambda: self._die_with_parent(PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        until(self._is_ready, "forebayd is ready")

    def _is_ready(self):
        assert self.process.poll() is None, (self.dir / "log").read_text()
        return self.metric("forebay_ready") == 1

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process = None

    def close(self):
        if self.process:
            self.kill()
        shutil.rmtree(self.dir)
        shutil.rmtree(self.chunk_dir)

    def metric(self, name):
        """Value of a metric; None while nobody serves it."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(WAIT_S)
                connection.connect(str(self.dir / "http"))
                connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                page = b"".join(iter(lambda: connection.recv(65536), b""))
        except OSError:
            return None
        for line in page.decode().splitlines():
            if line.startswith(name + " "):
                return int(line.split()[1])
        return None

    def await_metric(self, name, value):
        until(lambda: self.metric(name) == value, f"{name} is {value}")

    def await_held(self, what):
        """Bytes that are leased or reserved. The daemon counts them a few times a second: only
        after it has been seen that there were any does it mean something that there are none."""
        name = f"forebay_{what}_bytes"
        until(lambda: self.metric(name) > 0, f"there are {what} bytes")

    def await_nothing_held(self):
        for name in ("leased", "reserved", "quarantined"):
            self.await_metric(f"forebay_{name}_bytes", 0)
