"""What the engine tests share: a pool of their own, an engine in a process, results."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
BIN = ROOT / "build/release/bin"


@dataclass
class Daemon:
    """A pool of its own, in folders of its own."""

    home: Path
    host: str = "2GiB"
    process: subprocess.Popen[bytes] | None = None
    chunks: Path = field(
        default_factory=lambda: Path(tempfile.mkdtemp(prefix="forebay-engines-", dir="/dev/shm"))
    )

    @property
    def socket(self) -> str:
        return str(self.home / "run/default/forebay.sock")

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                BIN / "forebayd",
                "--run-dir",
                self.home / "run",
                "--chunk-dir",
                self.chunks,
                "--host-bytes",
                self.host,
                "--grpc-listen",
                "",
                "--http-listen",
                "",
            ],
            stdout=subprocess.DEVNULL,
            stderr=open(self.home / "daemon.log", "ab"),
        )
        for _ in range(200):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as attempt:
                if attempt.connect_ex(self.socket) == 0:
                    return
            time.sleep(0.05)
        raise RuntimeError(f"the daemon did not start: {self.home}/daemon.log")

    def stop(self, how: int = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(timeout=30)
            self.process = None

    def signal(self, how: int) -> None:
        assert self.process is not None
        self.process.send_signal(how)

    def forget(self) -> None:
        """All that it has; it must not be running."""
        shutil.rmtree(self.chunks)
        self.chunks.mkdir()

    def end(self) -> None:
        self.stop(signal.SIGKILL)
        shutil.rmtree(self.chunks, ignore_errors=True)

    def damage(self) -> int:
        """Flip a bit in every stored block, in the middle of its planes. Returns how many."""
        count = 0
        for path in self.chunks.rglob("*"):
            if path.is_file() and path.stat().st_size >= 1 << 21:
                with open(path, "r+b") as file:
                    data = file.read()
                    at = data.find(b"FBBLOCK1", 4096)
                    while at >= 0:
                        size = int.from_bytes(data[at + 104 : at + 112], "little")
                        place = at + 4096 + (size - 4096) // 3
                        file.seek(place)
                        file.write(bytes([data[place] ^ 0x10]))
                        count += 1
                        at = data.find(b"FBBLOCK1", at + size)
        return count


#: An engine that takes longer than this for a plan is stuck: that is a failure of its own.
RUN_SECONDS = 400


class Engine:
    """One engine in a process of its own. RuntimeError: it ended early, or does not answer."""

    def __init__(
        self,
        home: Path,
        work: Path,
        plan: dict[str, Any],
        *,
        seed: str = "0",
        tap: Path | None = None,
    ) -> None:
        self.log = work / f"engine-{len(list(work.glob('engine-*.log')))}.log"
        plan_path = self.log.with_suffix(".json")
        plan = {**plan, "model": str(home / "models" / plan["model"])}
        if tap is not None:
            plan["connector"] = {**plan["connector"], "tap": "tap"}
        plan_path.write_text(json.dumps(plan))
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'pool/python'}:{HERE}",
            "FOREBAY_LIBRARY": str(ROOT / "build/release/lib/libforebay.so"),
            "PYTHONHASHSEED": seed,
            "FOREBAY_TAP": str(tap or ""),
            "VLLM_ENABLE_V1_MULTIPROCESSING": plan.get("processes", "0"),
            **plan.get("environment", {}),
        }
        self.process = subprocess.Popen(
            [home / "venv/bin/python", HERE / "engine.py", plan_path],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(self.log, "w"),
        )
        self.copy = open(self.log.with_suffix(".out"), "w")
        self.watchdog = threading.Timer(RUN_SECONDS, self.process.kill)
        self.watchdog.daemon = True  # a program that failed ends at once, and its engines then
        self.watchdog.start()

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def results(self) -> Iterator[dict[str, Any]]:
        """What it says, to its end."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.copy.write(line)
            if line.startswith("RESULT "):
                yield json.loads(line[7:])

    def do(self, step: dict[str, Any]) -> list[dict[str, Any]]:
        """For plans whose steps come from here: do one, and return what it says."""
        found = []
        self.say(json.dumps(step))
        for result in self.results():
            if "did" in result:
                return found
            if "name" in result:
                found.append(result)
        raise RuntimeError(self.last_words())

    def last_words(self) -> str:
        if not self.copy.closed:
            self.copy.flush()
        tail = self.log_text().splitlines()[-30:]
        return "an engine ended early:\n" + "\n".join(tail)

    def log_text(self) -> str:
        return self.log.read_text() + self.log.with_suffix(".out").read_text()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        for _ in self.results():
            pass
        self.process.wait()
        self.watchdog.cancel()
        self.copy.close()


class Run(Engine):
    """A plan from its first step to its last, and what was said."""

    def __init__(
        self,
        home: Path,
        work: Path,
        plan: dict[str, Any],
        *,
        seed: str = "0",
        tap: Path | None = None,
        answers: Callable[[str], object] = lambda name: None,
    ) -> None:
        super().__init__(home, work, plan, seed=seed, tap=tap)
        self.said: dict[str, list[dict[str, Any]]] = {}
        self.counters: dict[str, float] = {}
        self.forgot: list[bool] = []  #: whether the engine's cache had no block in use
        done = False
        for result in self.results():
            if "ask" in result:
                answers(result["ask"])
                self.say("")
            elif "name" in result:
                self.said.setdefault(result["name"], []).append(result)
            elif "forgot" in result:
                self.forgot.append(result["forgot"])
            if "done" in result:
                done = True
                self.counters = result["counters"]
        self.end()
        if not done:
            raise RuntimeError(self.last_words())

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        return self.said[name]


class Tests:
    """Properties, each printed once."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed = 0

    def check(self, name: str, holds: bool, what: str = "") -> None:
        self.passed += holds
        self.failed += not holds
        print(
            f"{'passed' if holds else 'failed'}: engines/{name}" + (f" ({what})" if what else ""),
            flush=True,
        )


def one_by_one(name: str, prompts: list[list[int]], tokens: int = 16) -> list[dict[str, Any]]:
    return [
        {"do": "generate", "name": name, "prompts": [prompt], "tokens": tokens}
        for prompt in prompts
    ]


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a["tokens"] == b["tokens"] and a["logprobs"] == b["logprobs"]


def read_tap(path: Path) -> Iterable[dict[str, Any]]:
    if path.exists():
        with open(path) as file:
            for line in file:
                yield json.loads(line)


def compare_taps(stored_path: Path, loaded_path: Path) -> tuple[int, int]:
    """Pages after a load that equal the pages before the store, and all that were loaded."""
    stored: dict[tuple[str, int], dict[str, str]] = {}
    for line in read_tap(stored_path):
        stored.setdefault((line["page"], line["space"]), {}).update(line["digests"])
    equal = total = 0
    for line in read_tap(loaded_path):
        before = stored.get((line["page"], line["space"]), {})
        total += 1
        equal += all(before.get(k) == v for k, v in line["digests"].items())
    return equal, total


def bar_line(case: str, figure: int, limit: int) -> None:
    print(
        json.dumps(
            {
                "bench": "engine_equal",
                "case": case,
                "figure": figure,
                "limit": limit,
                "unit": "count",
                "ratio": figure / limit if limit else 0.0,
                "better": "higher",
                "bar": 1,
                "threads": 2,
                "waited": "none",
            }
        ),
        flush=True,
    )
