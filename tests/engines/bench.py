"""What the pool costs an engine, and what it saves: the engine_* benchmarks of tests/bench/run.

usage: bench.py --home DIR [--quick] engine_hit | engine_miss | engine_step | engine_codec

DIR has `venv` and `models` (tests/engines/setup). One engine and one daemon on this host's CPUs and
shared memory: no GPU figure, no network figure. Prints JSON lines as tests/bench/run describes.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import ROOT, Daemon, Engine

TOKENS = 1500
LONG_TOKENS = 4000
# Threads of OpenMP that wait busily leave a daemon on the same two cores no time to answer.
PASSIVE = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0", "GOMP_SPINCOUNT": "0"}
MODELS = {"smollm2": {"block_size": 64}, "llama": {"block_size": 64}}
SECONDS_FREE = 0.010  # that a hit may take beyond its bytes


def prompt(seed: int, length: int = TOKENS) -> list[int]:
    return random.Random(seed).choices(range(100, 8000), k=length)


def line(
    bench: str, case: str, figure: float, limit: float, unit: str, bar: float | None, **more: Any
) -> None:
    print(
        json.dumps(
            {
                "bench": bench,
                "case": case,
                "figure": round(figure, 6),
                "limit": round(limit, 6),
                "unit": unit,
                "ratio": round(figure / limit, 4),
                "better": "lower",
                **({} if bar is None else {"bar": bar}),
                "threads": 2,
                "waited": "both sleep",
                **more,
            }
        ),
        flush=True,
    )


def first(engine: Engine, ids: list[int], tokens: int = 1) -> dict[str, Any]:
    step = {"do": "generate", "name": "bench", "prompts": [ids], "tokens": tokens}
    (result,) = engine.do(step)
    return result


def start(
    home: Path, work: Path, model: str, connector: dict[str, Any] | None, **more: Any
) -> Engine:
    options = {**MODELS[model], "max_num_batched_tokens": 4096, **more.pop("options", {})}
    environment = {**PASSIVE, **more.pop("environment", {})}
    plan = {
        "model": model,
        "options": options,
        "connector": connector,
        "steps": "stdin",
        "environment": environment,
        **more,
    }
    engine = Engine(home, work, plan)
    first(engine, prompt(1))  # the first passes of an engine are slow
    first(engine, prompt(2))
    return engine


def host_get_bytes_per_s() -> float:
    output = subprocess.run(
        [ROOT / "tests/bench/run", "--quick", "--no-build", "host_get"],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    ).stdout
    return json.loads(output.splitlines()[0])["figure"] * 1e9


def engine_hit(home: Path, work: Path, daemon: Daemon, quick: bool) -> None:
    """Time to first token, hit by hit: from the pool, from the engine's own cache, from neither."""
    for model in MODELS:
        engine = start(home, work, model, {"socket": daemon.socket, "lookup_timeout": 0.1})
        times: dict[str, list[float]] = {"miss": [], "local": [], "pool": []}
        for i in range(4 if quick else 10):
            ids, found = prompt(100 + i), {}
            times["miss"].append(first(engine, ids)["first_s"])
            engine.do({"do": "settle"})
            # By turns, since the first answer after a pause is slower. A hit in the pool leaves
            # the prompt in the engine's own cache.
            order = ("pool", "local") if i % 2 else ("local", "pool")
            for source in order:
                if source == "pool":
                    engine.do({"do": "forget"})
                found[source] = first(engine, ids)
                times[source].append(found[source]["first_s"])
            engine.do({"do": "forget"})
            pool, local = found["pool"], found["local"]
            if pool["cached"] != local["cached"]:
                raise RuntimeError(f"{pool['cached']} and {local['cached']} tokens were cached")
        engine.end()
        median = {name: statistics.median(values) for name, values in times.items()}
        moved = pool["cached"] * bytes_per_token(home, model)
        limit = median["local"] + moved / (0.7 * host_get_bytes_per_s()) + SECONDS_FREE
        line(
            "engine_hit",
            f"{model}, {TOKENS} tokens",
            median["pool"],
            limit,
            "s",
            1.0,
            local_s=round(median["local"], 4),
            miss_s=round(median["miss"], 4),
            bytes=moved,
        )
        line("engine_hit", f"{model}, against a miss", median["pool"], median["miss"], "s", 1.05)


def bytes_per_token(home: Path, model: str) -> int:
    config = json.loads((home / "models" / model / "config.json").read_text())
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * dim


def engine_miss(home: Path, work: Path, daemon: Daemon, quick: bool) -> None:
    """Prompts that no cache has, by turns in an engine with the connector and in one without."""
    with_it = start(home, work, "smollm2", {"socket": daemon.socket, "store": True})
    without = start(home, work, "smollm2", None)
    ratios, differences = [], []
    for i in range(12 if quick else 44):
        ids = prompt(1000 + i)
        order = [with_it, without] if i % 2 else [without, with_it]
        seconds = {}
        for engine in order:
            seconds[engine] = first(engine, ids)["first_s"]
            engine.do({"do": "settle"})
        ratios.append(seconds[with_it] / seconds[without])
        differences.append(seconds[with_it] - seconds[without])
    with_it.end()
    without.end()
    low, high = median_bounds(ratios)
    verdict = "met" if high <= 1.01 else "missed" if low > 1.01 else "inconclusive"
    line(
        "engine_miss",
        f"smollm2, {TOKENS} tokens, upper 95 % bound",
        high,
        1.0,
        "ratio",
        1.01,
        low=round(low, 4),
        median=round(statistics.median(ratios), 4),
        verdict=verdict,
        median_us=round(1e6 * statistics.median(differences)),
        pairs=len(ratios),
    )


def median_bounds(values: list[float]) -> tuple[float, float]:
    """Of the median, 95 %, by resampling."""
    rng = random.Random(7)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[1949]


def engine_step(home: Path, work: Path, daemon: Daemon, quick: bool) -> None:
    """The scheduler's side: of a request, and of a step with 16 that run."""
    times_path = work / "times.json"
    engine = start(
        home,
        work,
        "smollm2",
        {"socket": daemon.socket},
        module="timed",
        environment={"FOREBAY_TIMES": str(times_path)},
        options={"max_num_seqs": 16},
        **{"class": "TimedConnector"},
    )
    lengths = {TOKENS: 5 if quick else 20, LONG_TOKENS: 2 if quick else 10}
    for tokens, count in lengths.items():
        for i in range(count):
            first(engine, prompt(2000 + i, tokens))
    crowd = [prompt(3000 + i, 70) for i in range(16)]
    engine.do({"do": "generate", "name": "bench", "prompts": crowd, "tokens": 60})
    engine.end()
    times = json.loads(times_path.read_text())
    alone = times["requests"][2:]  # after the two of the engine's start
    for tokens, count in lengths.items():
        spent, alone = alone[:count], alone[count:]
        pages, free = tokens // 64, TOKENS // 64
        line(
            "engine_step",
            f"request, {tokens} tokens",
            statistics.median(spent) * 1e6,
            300 + 3 * (pages - free),
            "us",
            1.0,
            pages=pages,
        )
    full = [spent for spent, running, new in times["steps"] if running == 16 and new == 0]
    line(
        "engine_step",
        "step, 16 running",
        statistics.median(full) * 1e6,
        50,
        "us",
        1.0,
        steps=len(full),
    )


def engine_codec(home: Path, work: Path, daemon: Daemon, quick: bool) -> None:
    """What codecs change: the next word's distribution after 1024 tokens from the pool, and the
    perplexity of what follows, over texts of this project."""
    texts = sorted((ROOT / "docs").glob("*.md"))[: 2 if quick else None]
    plan = {"options": {"block_size": 64, "max_logprobs": -1}, "steps": "stdin"}
    for codec in ("raw", "fp8_e4m3", "int8"):
        connector = {"socket": daemon.socket, "codec": codec, "lookup_timeout": 0.5}
        engine = Engine(home, work, {**plan, "model": "smollm2", "connector": connector})
        for text in texts:
            step = {"do": "score", "name": text.name, "text": str(text), "context": 1024}
            save = str(work / f"{codec}-{text.stem}.npz")
            (said,) = engine.do({**step, "count": 8 if quick else 48, "save": save})
            if min(said["cached"]) < 1023:
                raise RuntimeError(f"{text.name}: {said['cached']} tokens were cached")
        engine.end()
    for codec in ("fp8_e4m3", "int8"):
        command = [home / "venv/bin/python", "-c", DIVERGENCE, work, codec]
        found = json.loads(subprocess.check_output(command, text=True))
        line(
            "engine_codec",
            f"{codec}, perplexity after 1024 tokens from the pool",
            found.pop("perplexity"),
            found.pop("perplexity_raw"),
            "words",
            None,
            **found,
        )


#: Reads what `score` saved of a codec and of raw.
DIVERGENCE = """
import json, pathlib, sys
import numpy as np

raw, coded = ([np.load(f) for f in sorted(pathlib.Path(sys.argv[1]).glob(f"{codec}-*.npz"))]
              for codec in ("raw", sys.argv[2]))
p, q = (np.concatenate([f["logprobs"] for f in files]).astype(float) for files in (raw, coded))
next_word = np.concatenate([f["tokens"] for f in raw])
apart = (np.exp(p) * (p - q)).sum(axis=1)
perplexity = [float(np.exp(-x[np.arange(len(x)), next_word].mean())) for x in (p, q)]
print(json.dumps({
    "perplexity_raw": perplexity[0],
    "perplexity": perplexity[1],
    "divergence_mean": round(float(apart.mean()), 6),
    "divergence_max": round(float(apart.max()), 6),
    "same_first_choice": round(float((p.argmax(1) == q.argmax(1)).mean()), 4),
    "positions": len(p),
}))
"""

BENCHES = {
    "engine_hit": engine_hit,
    "engine_miss": engine_miss,
    "engine_step": engine_step,
    "engine_codec": engine_codec,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--home", type=Path, required=True, help="folder of venv and models")
    parser.add_argument("--quick", action="store_true", help="shorter and rougher")
    parser.add_argument("name", choices=sorted(BENCHES))
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="forebay-bench-"))
    daemon = Daemon(work, host="4GiB")
    try:
        daemon.start()
        BENCHES[arguments.name](arguments.home, work, daemon, arguments.quick)
    finally:
        daemon.end()
    shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
