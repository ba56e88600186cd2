"""Runs vLLM with the pool, and without it, and compares what they say.

usage: vllm_run.py --home DIR [--long] [--only NAME]...

For each model one process stores and one loads; the loading one must find every prefix, say token
for token and bit for bit what the storing one says after a hit in its own cache of the same
length, and have in its pages, after a load, what was there before the store. Then faults.
Prints "passed: engines/..." or "failed: engines/..." for each property, and JSON lines of what the
bars ask (engine_equal). DIR has `venv` and `models` (tests/engines/setup).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
BIN = ROOT / "build/release/bin"


@dataclass
class Shape:
    """A model, and how its engine is set up."""

    model: str
    options: dict[str, Any]
    lengths: list[int]  #: of prompts
    page: int = 64
    step: int = 0  #: hits are multiples of it; 0: of a page
    vocabulary: int = 8000


def around(*boundaries: int) -> list[int]:
    return [b + d for b in boundaries for d in (-1, 0, 1, 33)]


SHAPES = {
    # engine blocks of 64, so that a local hit of every pool hit's length exists
    "smollm2": Shape("smollm2", {"block_size": 64}, around(64, 128, 320) + [700]),
    "smollm2_32": Shape("smollm2", {"block_size": 32}, [129, 160, 223, 417]),
    "llama": Shape("llama", {"block_size": 64}, [130, 449, 700]),
    "mistral": Shape("mistral", {"block_size": 64}, [130, 321, 449, 700]),
    "gemma3": Shape("gemma3", {"block_size": 64}, [130, 321, 449, 700]),
    "deepseek": Shape("deepseek", {}, [130, 321, 449, 700]),
    "qwen3next": Shape("qwen3next", {}, [400, 801, 1000], step=384),
    # engine blocks that 64 does not divide, as engines on GPUs have
    "qwen3next_544": Shape("qwen3next", {"block_size": 544}, [600, 1100], page=32, step=544),
}


def prompts_of(shape: Shape, seed: int = 1) -> list[list[int]]:
    return [
        random.Random(1000 * seed + n).choices(range(100, shape.vocabulary), k=n)
        for n in shape.lengths
    ]


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
            if os.path.exists(self.socket):
                return
            time.sleep(0.05)
        raise RuntimeError(f"the daemon did not start: {self.home}/daemon.log")

    def stop(self, how: int = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(timeout=30)
            self.process = None

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


class Run:
    """One engine's process, and what it said."""

    def __init__(
        self,
        home: Path,
        work: Path,
        plan: dict[str, Any],
        *,
        seed: str = "0",
        tap: Path | None = None,
        answers: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.results: dict[str, list[dict[str, Any]]] = {}
        self.log = work / f"engine-{len(list(work.glob('engine-*.log')))}.log"
        plan_path = self.log.with_suffix(".json")
        plan_path.write_text(json.dumps({**plan, "model": str(home / "models" / plan["model"])}))
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'pool/python'}:{HERE}",
            "FOREBAY_LIBRARY": str(ROOT / "build/release/lib/libforebay.so"),
            "PYTHONHASHSEED": seed,
            "FOREBAY_TAP": str(tap or ""),
            "VLLM_ENABLE_V1_MULTIPROCESSING": plan.get("processes", "0"),
            **plan.get("environment", {}),
        }
        process = subprocess.Popen(
            [home / "venv/bin/python", HERE / "engine.py", plan_path],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(self.log, "w"),
        )
        assert process.stdout is not None and process.stdin is not None
        done = False
        with open(self.log.with_suffix(".out"), "w") as copy:
            for line in process.stdout:
                copy.write(line)
                if not line.startswith("RESULT "):
                    continue
                result = json.loads(line[7:])
                if "ask" in result:
                    answers(result["ask"])
                    process.stdin.write("\n")
                    process.stdin.flush()
                elif "name" in result:
                    self.results.setdefault(result["name"], []).append(result)
                done = done or "done" in result
        process.wait()
        if not done:
            tail = self.log.read_text().splitlines()[-30:]
            raise RuntimeError("an engine ended early:\n" + "\n".join(tail))

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        return self.results[name]

    def stats(self) -> dict[str, float]:
        """Sums of the connector's counters in the engine's log."""
        return {}


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
    stored: dict[tuple[Any, ...], dict[str, str]] = {}
    for line in read_tap(stored_path):
        stored.setdefault((line["page"], line["space"], tuple(line["planes"])), line["digests"])
    equal = total = 0
    for line in read_tap(loaded_path):
        before = stored.get((line["page"], line["space"], tuple(line["planes"])), {})
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


def run_shape(tests: Tests, home: Path, name: str, shape: Shape) -> None:
    """Store in one process, load in another."""
    prompts = prompts_of(shape)
    work = Path(tempfile.mkdtemp(prefix=f"forebay-{name}-"))
    daemon = Daemon(work)
    daemon.start()
    try:
        connector = {
            "socket": daemon.socket,
            "tap": "tap",
            "min_prefix_tokens": 1,
            "lookup_timeout": 0.5,
        }
        plan = {"model": shape.model, "options": shape.options, "connector": connector}
        storing = []
        for prompt in prompts:
            storing += one_by_one("cold", [prompt]) + one_by_one("local", [prompt])
        storing.append({"do": "settle"})
        # It never loads, so that its second answers come from its own cache.
        never = {**connector, "min_prefix_tokens": 1 << 30}
        first = Run(
            home,
            work,
            {**plan, "connector": never, "steps": storing},
            seed="1",
            tap=work / "stored",
        )
        loading = []
        for prompt in prompts:
            loading += one_by_one("pool", [prompt]) + [{"do": "forget"}]
        loading += [{"do": "ask", "name": "damage"}]
        for prompt in prompts[-2:]:
            loading += one_by_one("damaged", [prompt]) + [{"do": "settle"}, {"do": "forget"}]
            loading += one_by_one("anew", [prompt]) + [{"do": "forget"}]
        loading += [{"do": "forget", "pool": True}]
        loading += one_by_one("reset", prompts[-2:])
        second = Run(
            home,
            work,
            {**plan, "steps": loading},
            seed="2",
            tap=work / "loaded",
            answers=lambda ask: tests.check(f"{name}/blocks_to_damage", daemon.damage() > 0),
        )
        judge_shape(tests, name, shape, first, second)
        equal, total = compare_taps(work / "stored", work / "loaded")
        bar_line(f"{name}/pages", equal, total)
        tests.check(
            f"{name}/pages_equal_after_load", total > 0 and equal == total, f"{equal} of {total}"
        )
    finally:
        daemon.end()
    if tests.failed == 0:
        shutil.rmtree(work)
    else:
        print(f"logs: {work}")


def judge_shape(tests: Tests, name: str, shape: Shape, first: Run, second: Run) -> None:
    step = shape.step or shape.page
    whole = shape.model in ("smollm2", "llama", "deepseek")  # full attention alone
    hits = equal = comparable = 0
    for cold, local, pool in zip(first["cold"], first["local"], second["pool"]):
        n = pool["prompt"]
        expected = (n if whole else n - 1) // step * step
        cached = min(expected, n - 1) if whole else expected
        hits += pool["cached"] in (expected, cached)
        if local["cached"] == expected:
            comparable += 1
            equal += same(local, pool)
            if not same(local, pool):
                print(
                    f"  {name} {n}: local {local['tokens']} {local['logprobs'][:3]} pool "
                    f"{pool['tokens']} {pool['logprobs'][:3]} cold {cold['logprobs'][:3]}"
                )
        if cold["cached"] != 0:
            tests.check(f"{name}/cold_is_cold", False, str(n))
    tests.check(
        f"{name}/every_prefix_is_found",
        hits == len(second["pool"]),
        f"{hits} of {len(second['pool'])}: "
        + " ".join(f"{p['prompt']}:{p['cached']}" for p in second["pool"]),
    )
    bar_line(f"{name}/answers", equal, comparable)
    tests.check(
        f"{name}/equal_to_a_local_hit",
        comparable > 0 and equal == comparable,
        f"{equal} of {comparable}",
    )
    cold = {c["prompt"]: c for c in first["cold"]}
    damaged = second["damaged"]
    tests.check(
        f"{name}/damaged_pages_are_computed",
        all(
            d["cached"] < d["prompt"] // step * step
            and same(d, cold[d["prompt"]])
            or d["tokens"][0] == cold[d["prompt"]]["tokens"][0]
            for d in damaged
        ),
        " ".join(f"{d['prompt']}:{d['cached']}" for d in damaged),
    )
    anew = second["anew"]
    pool = {p["prompt"]: p for p in second["pool"]}
    tests.check(
        f"{name}/damaged_pages_are_stored_anew",
        all(a["cached"] == pool[a["prompt"]]["cached"] for a in anew),
        " ".join(f"{a['prompt']}:{a['cached']}" for a in anew),
    )
    tests.check(
        f"{name}/no_hit_after_a_reset",
        all(r["cached"] == 0 for r in second["reset"]),
        " ".join(str(r["cached"]) for r in second["reset"]),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--home", type=Path, required=True, help="folder of venv and models")
    parser.add_argument("--long", action="store_true", help="more prompts, more faults")
    parser.add_argument("--only", action="append", choices=sorted(SHAPES), help="this shape")
    arguments = parser.parse_args()
    tests = Tests()
    for name, shape in SHAPES.items():
        if arguments.only and name not in arguments.only:
            continue
        begun = time.monotonic()
        try:
            run_shape(tests, arguments.home, name, shape)
        except RuntimeError as error:
            tests.check(f"{name}/runs", False)
            print(error, file=sys.stderr)
        print(f"-- engines/{name}: {time.monotonic() - begun:.0f} s", flush=True)
    print(f"{tests.passed} passed, {tests.failed} failed")
    return 1 if tests.failed else 0


if __name__ == "__main__":
    sys.exit(main())
