"""Runs vLLM with the pool, and without it, and compares what they say.

usage: vllm_run.py --home DIR [--long] [--only NAME]...

For each model one process stores and one loads. The loading one must find every prefix, say bit
for bit what an engine says after a hit of the same length in its own cache, and have in its pages,
after a load, what was there before the store. Then ranks that share, faults, and crowds.
Prints "passed: engines/..." or "failed: engines/..." for each property, and JSON lines of what the
bar engine_equal asks. DIR has `venv` and `models` (tests/engines/setup).
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import Daemon, Engine, Run, Tests, bar_line, compare_taps, one_by_one, same


@dataclass
class Shape:
    """A model, and how its engine is set up."""

    model: str
    options: dict[str, Any]
    lengths: list[int]  #: of prompts
    more: list[int] = field(default_factory=list)  #: of --long
    step: int = 64  #: hits are multiples of it
    exact: bool = False  #: a hit may cover a whole prompt: full attention alone
    short: bool = True  #: also without --long
    plan: dict[str, Any] = field(default_factory=dict)  #: of the engine, besides
    manifest: dict[str, Any] = field(default_factory=dict)  #: what its space's must say


def around(*boundaries: int) -> list[int]:
    return [b + d for b in boundaries for d in (-1, 0, 1, 33)]


# Engine blocks of 64, so that a local hit of every pool hit's length exists.
SHAPES = {
    "smollm2": Shape(
        "smollm2",
        {"block_size": 64},
        [63, 64, 129, 353],
        [*around(128, 256, 384, 512), *range(100, 1100, 31)],
        exact=True,
    ),
    "smollm2_32": Shape(
        "smollm2",
        {"block_size": 32},
        [97, 129, 160, 161, 223, 417, 700],
        exact=True,
        short=False,
    ),
    "llama": Shape(
        "llama",
        {"block_size": 64},
        [130, 449, *around(64, 192, 512)],
        exact=True,
        short=False,
    ),
    "llama_fp8": Shape(
        "llama_scaled",
        {"block_size": 64, "kv_cache_dtype": "fp8_e4m3"},
        [130, 449],
        exact=True,
        manifest={"scales": [0.02, 0.013, 0.03, 0.023, 0.04, 0.033, 0.05, 0.043]},
    ),
    # Blocks whose insides strides do not give, and that are larger than pages would be.
    "llama_opaque": Shape(
        "llama",
        {"block_size": 128},
        [130, 449],
        around(128, 256),
        step=128,
        exact=True,
        short=False,
        plan={"class": "OpaqueConnector", "module": "opaque"},
        manifest={"engine_block_tokens": 128, "page_tokens": 128},
    ),
    "mistral": Shape("mistral", {"block_size": 64}, [130, 449], around(256, 320, 640)),
    "gemma3": Shape("gemma3", {"block_size": 64}, [130, 449, 700], around(256, 320, 640)),
    # Blocks that are larger than pages: a window's first block needs more than its pages.
    "gemma3_128": Shape("gemma3", {"block_size": 128}, [321, 449], [577, 700, 900], step=128),
    "deepseek": Shape(
        "deepseek", {"enable_prefix_caching": True}, [130, 449], around(64, 192, 640), exact=True
    ),
    "qwen3next": Shape("qwen3next", {}, [400, 801], around(384, 768), step=384),
    # Engine blocks that 64 does not divide, as engines on GPUs have.
    "qwen3next_544": Shape(
        "qwen3next", {"block_size": 544}, [600, 1100], around(544, 1088), step=544
    ),
}


def prompt(length: int, seed: int = 1) -> list[int]:
    return random.Random(1000 * seed + length).choices(range(100, 8000), k=length)


def settings(daemon: Daemon, **more: Any) -> dict[str, Any]:
    return {
        "socket": daemon.socket,
        "min_prefix_tokens": 1,
        "lookup_timeout": 0.5,
        **more,
    }


@contextmanager
def pool(name: str, tests: Tests) -> Iterator[tuple[Daemon, Path]]:
    """A daemon and a folder; the folder stays if something failed."""
    work = Path(tempfile.mkdtemp(prefix=f"forebay-{name}-"))
    daemon = Daemon(work)
    failed = tests.failed
    try:
        daemon.start()
        yield daemon, work
    except RuntimeError as error:
        tests.check(f"{name}/runs", False)
        print(error, file=sys.stderr)
    finally:
        daemon.end()
        if tests.failed == failed:
            shutil.rmtree(work)
        else:
            print(f"logs: {work}")


# --- one engine stores, one loads ---


def run_shape(tests: Tests, home: Path, name: str, shape: Shape, long: bool) -> None:
    prompts = [prompt(n) for n in shape.lengths + (shape.more if long else [])]
    with pool(name, tests) as (daemon, work):
        plan = {"model": shape.model, "options": shape.options, **shape.plan}
        storing = []
        for p in prompts:
            storing += one_by_one("cold", [p]) + one_by_one("local", [p])
        # This one never loads, so that its second answers come from its own cache.
        never = settings(daemon, min_prefix_tokens=1 << 30)
        first = Run(
            home,
            work,
            {**plan, "connector": never, "steps": [*storing, {"do": "settle"}]},
            seed="1",
            tap=work / "stored",
        )
        loading = []
        for p in prompts:
            loading += [*one_by_one("pool", [p]), {"do": "forget"}]
        loading += [{"do": "ask", "name": "damage"}]
        for p in prompts[-2:]:
            loading += [*one_by_one("damaged", [p]), {"do": "settle"}, {"do": "forget"}]
            loading += [*one_by_one("anew", [p]), {"do": "forget"}]
        loading += [{"do": "forget", "pool": True}, *one_by_one("reset", prompts[-2:])]
        second = Run(
            home,
            work,
            {
                **plan,
                "connector": settings(daemon, report_keys=str(work / "keys")),
                "steps": loading,
            },
            seed="2",
            tap=work / "loaded",
            answers=lambda ask: tests.check(f"{name}/blocks_to_damage", daemon.damage() > 0),
        )
        references = first["local"]
        if shape.exact:
            references = restored(home, work, shape, prompts, references)
        judge_hits(tests, name, shape, references, second["pool"])
        judge_damage(tests, name, shape, first, second)
        judge_pages(tests, name, work)
        if shape.manifest:
            judge_manifest(tests, name, shape, work / "keys")


def expected_hit(shape: Shape, n: int) -> int:
    return (n if shape.exact else n - 1) // shape.step * shape.step


def restored(
    home: Path,
    work: Path,
    shape: Shape,
    prompts: list[list[int]],
    local: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """What local hits said, and, where there is none of the pool hit's length, what an engine says
    whose own pages were put back."""
    missing = [
        at
        for at, (p, hit) in enumerate(zip(prompts, local, strict=True))
        if hit["cached"] != expected_hit(shape, len(p))
    ]
    if not missing:
        return local
    steps = []
    for at in missing:
        steps += [*one_by_one("cold", [prompts[at]]), {"do": "forget"}]
        steps += one_by_one("again", [prompts[at]])
    run = Run(
        home,
        work,
        {
            "model": shape.model,
            "options": shape.options,
            "class": "RestoreConnector",
            "module": "restore",
            "connector": {"page_tokens": shape.step},
            "steps": steps,
        },
    )
    references = list(local)
    for at, result in zip(missing, run["again"], strict=True):
        references[at] = result
    return references


def is_hit(shape: Shape, result: dict[str, Any]) -> bool:
    """Of the expected length; of a whole prompt, the last token is computed again."""
    expected = expected_hit(shape, result["prompt"])
    return result["cached"] in (expected, min(expected, result["prompt"] - 1))


def judge_hits(
    tests: Tests,
    name: str,
    shape: Shape,
    references: list[dict[str, Any]],
    hits: list[dict[str, Any]],
) -> None:
    found = equal = comparable = 0
    for reference, hit in zip(references, hits, strict=True):
        found += is_hit(shape, hit)
        comparable += is_hit(shape, reference)
        equal += is_hit(shape, reference) and same(reference, hit)
        if not same(reference, hit):
            said = f"{reference['cached']} {reference['logprobs'][:4]}"
            print(f"  {hit['prompt']}: {said}, pool {hit['cached']} {hit['logprobs'][:4]}")
    lengths = " ".join(f"{h['prompt']}:{h['cached']}" for h in hits)
    tests.check(f"{name}/every_prefix_is_found", found == len(hits), lengths)
    bar_line(f"{name}/answers", equal, len(hits))
    tests.check(
        f"{name}/answers_equal_those_of_a_hit_without_the_pool",
        comparable == equal == len(hits),
        f"{equal} of {len(hits)}",
    )


def judge_damage(tests: Tests, name: str, shape: Shape, first: Run, second: Run) -> None:
    """After damage: computed, not believed; stored anew; and after a reset nothing is found."""
    cold = {c["prompt"]: c for c in first["cold"]}
    damaged, anew = second["damaged"], second["anew"]
    right = [d["cached"] == 0 and same(d, cold[d["prompt"]]) for d in damaged]
    tests.check(
        f"{name}/damaged_pages_are_computed",
        all(right),
        " ".join(f"{d['prompt']}:{d['cached']}" for d in damaged),
    )
    corrupt = second.counters.get("pages_corrupt", 0)
    tests.check(f"{name}/damage_is_counted", corrupt > 0, f"{corrupt:.0f} pages")
    pool_hits = {p["prompt"]: p["cached"] for p in second["pool"]}
    tests.check(
        f"{name}/damaged_pages_are_stored_anew",
        all(a["cached"] == pool_hits[a["prompt"]] for a in anew),
        " ".join(f"{a['prompt']}:{a['cached']}" for a in anew),
    )
    tests.check(
        f"{name}/nothing_is_found_after_a_reset",
        all(r["cached"] == 0 for r in second["reset"]),
        " ".join(str(r["cached"]) for r in second["reset"]),
    )


def judge_pages(tests: Tests, name: str, work: Path) -> None:
    equal, total = compare_taps(work / "stored", work / "loaded")
    bar_line(f"{name}/pages", equal, total)
    tests.check(
        f"{name}/pages_after_a_load_equal_those_before_the_store",
        total > 0 and equal == total,
        f"{equal} of {total}",
    )


def judge_manifest(tests: Tests, name: str, shape: Shape, reports: Path) -> None:
    report = json.loads(next(reports.iterdir()).read_text())
    (space,) = report["spaces"]
    said = {key: space["manifest"][key] for key in shape.manifest}
    if "scales" in said:
        said["scales"] = [round(scale, 6) for scale in said["scales"]]
    tests.check(f"{name}/manifest", said == shape.manifest, str(said))


# --- whether the tests see a fault ---


def run_planted(tests: Tests, home: Path) -> None:
    """A page whose bytes are wrong when they are stored, with sums that match them, must show: in
    the pages after the load, and in the answer."""
    name, p = "planted", prompt(300, seed=8)
    with pool(name, tests) as (daemon, work):
        plan = {"model": "llama", "options": {"block_size": 64}}
        runs = []
        for at, least, plant in (("stored", 1 << 30, "1"), ("loaded", 1, "")):
            steps = [*one_by_one("said", [p, p] if plant else [p]), {"do": "settle"}]
            runs.append(
                Run(
                    home,
                    work,
                    {
                        **plan,
                        "connector": settings(daemon, min_prefix_tokens=least),
                        "environment": {"FOREBAY_PLANT": plant},
                        "steps": steps,
                    },
                    tap=work / at,
                )
            )
        local, hit = runs[0]["said"][1], runs[1]["said"][0]
        equal, total = compare_taps(work / "stored", work / "loaded")
        tests.check(f"{name}/page_is_seen", equal == total - 1, f"{equal} of {total} are equal")
        tests.check(
            f"{name}/answer_is_seen",
            hit["cached"] == local["cached"] == 256 and not same(hit, local),
            f"{hit['cached']} and {local['cached']} cached",
        )


# --- what was decoded ---


def run_decoded(tests: Tests, home: Path, model: str) -> None:
    """Pages of decoded tokens, long after blocks have slid out of the window."""
    name, begin = f"decoded_{model}", prompt(130, seed=7)
    options = {"block_size": 64}
    with pool(name, tests) as (daemon, work):
        engines = [
            Engine(
                home,
                work,
                {
                    "model": model,
                    "options": options,
                    "connector": settings(daemon, min_prefix_tokens=least),
                    "steps": "stdin",
                },
            )
            for least in (1 << 30, 1)
        ]
        (said,) = engines[0].do(one_by_one("long", [begin], tokens=400)[0])
        ids = (begin + said["tokens"])[:449]
        engines[0].do({"do": "settle"})
        engines[0].do({"do": "forget"})
        (cold,) = engines[0].do(one_by_one("cold", [ids])[0])
        (hit,) = engines[1].do(one_by_one("pool", [ids])[0])
        for engine in engines:
            engine.end()
        # A word at a time adds in another order than a prompt at once; a wrong page is far off.
        apart = abs(cold["logprobs"][0] - hit["logprobs"][0])
        tests.check(
            f"{name}/answer_is_close_to_what_is_computed",
            hit["cached"] == 448 and cold["cached"] == 0 and apart < 0.3,
            f"{hit['cached']} cached, {apart:.3f} apart",
        )


# --- ranks ---


def run_ranks(tests: Tests, home: Path, model: str) -> None:
    """Two ranks fill what one reads, and the other way."""
    prompts = [prompt(n, seed=3) for n in (130, 449)]
    two = {"tensor_parallel_size": 2, "block_size": 64}
    one = {"block_size": 64}
    if model == "deepseek":
        two.pop("block_size")
        one.pop("block_size")
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    for name, store, load in (
        (f"{model}_two_to_one", two, one),
        (f"{model}_one_to_two", one, two),
    ):
        with pool(name, tests) as (daemon, work):
            runs = []
            for at, options in (("stored", store), ("loaded", load)):
                plan = {
                    "model": model,
                    "options": options,
                    "connector": settings(daemon),
                    "steps": [*one_by_one("said", prompts), {"do": "settle"}],
                }
                if options is two:
                    plan |= {"processes": "1", "environment": environment}
                runs.append(Run(home, work, plan, tap=work / at))
            said = list(zip(runs[0]["said"], runs[1]["said"], strict=True))
            tests.check(
                f"{name}/every_prefix_is_found",
                all(b["cached"] == b["prompt"] // 64 * 64 for _, b in said),
                " ".join(f"{b['prompt']}:{b['cached']}" for _, b in said),
            )
            # Two ranks add in another order than one, so that only the first word is compared.
            apart = max(abs(a["logprobs"][0] - b["logprobs"][0]) for a, b in said)
            tests.check(f"{name}/answers_are_close", apart < 0.3, f"{apart:.3f}")
            judge_pages(tests, name, work)


# --- faults ---


def run_faults(tests: Tests, home: Path) -> None:
    """The daemon is killed, stopped, restarted and emptied while an engine serves."""
    name, p = "faults", prompt(700, seed=4)
    with pool(name, tests) as (daemon, work):
        acts: dict[str, Callable[[], None]] = {
            "kill": lambda: daemon.stop(signal.SIGKILL),
            "start": daemon.start,
            "stop": lambda: daemon.signal(signal.SIGSTOP),
            "go on": lambda: daemon.signal(signal.SIGCONT),
            "empty": lambda: (daemon.stop(), daemon.forget(), daemon.start()),
        }
        again: dict[str, Any] = {"do": "forget"}
        back = {"do": "wait", "seconds": 7}  # the library asks again at least every 5 s

        def act(what: str) -> dict[str, Any]:
            return {"do": "ask", "name": what}

        steps = [
            *one_by_one("cold", [p]),
            {"do": "settle"},
            *(again, act("kill")),
            *one_by_one("killed", [p]),
            *(act("start"), back, again),
            *one_by_one("restarted", [p]),
            *(again, act("stop")),
            *one_by_one("stopped", [p]),
            *(act("go on"), back, again),
            *one_by_one("went on", [p]),
            *(again, act("empty"), back),
            *one_by_one("emptied", [p]),
            *({"do": "settle"}, again),
            *one_by_one("filled", [p]),
        ]
        run = Run(
            home,
            work,
            {
                "model": "smollm2",
                "options": {"block_size": 64},
                "connector": settings(daemon),
                "steps": steps,
            },
            answers=lambda ask: acts[ask](),
        )
        (cold,) = run["cold"]
        for without in ("killed", "stopped", "emptied"):
            (result,) = run[without]
            tests.check(
                f"{name}/{without}",
                result["cached"] == 0 and same(result, cold) and result["seconds"] < 20,
                f"{result['cached']} cached, {result['seconds']:.1f} s",
            )
        for with_it in ("restarted", "went on", "filled"):
            (result,) = run[with_it]
            tests.check(
                f"{name}/{with_it.replace(' ', '_')}",
                result["cached"] == 640 and result["tokens"][0] == cold["tokens"][0],
                f"{result['cached']} cached",
            )


def run_without_daemon(tests: Tests, home: Path) -> None:
    """An engine starts and serves where there is no daemon, and says so once."""
    name, p = "no_daemon", prompt(300, seed=5)
    work = Path(tempfile.mkdtemp(prefix="forebay-nobody-"))
    connector = {"socket": str(work / "nobody.sock")}
    steps = one_by_one("said", [p, p])
    with_it = Run(home, work, {"model": "llama", "connector": connector, "steps": steps})
    without = Run(home, work, {"model": "llama", "connector": None, "steps": steps})
    tests.check(
        f"{name}/serves",
        all(same(a, b) for a, b in zip(with_it["said"], without["said"], strict=True)),
    )
    warnings = with_it.log_text().count("no daemon answers")
    tests.check(f"{name}/one_warning", warnings == 1, str(warnings))
    shutil.rmtree(work)


def run_aborts(tests: Tests, home: Path) -> None:
    """Requests that are given up while they are looked up, loaded, computed and stored."""
    name, p, q = "aborts", prompt(700, seed=9), prompt(650, seed=10)
    again: dict[str, Any] = {"do": "forget"}
    for model in ("llama", "gemma3"):
        with pool(f"{name}_{model}", tests) as (daemon, work):
            steps = [
                *(*one_by_one("cold", [p]), {"do": "settle"}, again),
                *(*one_by_one("before", [p]), again),
                *({"do": "abort", "prompt": p}, {"do": "abort", "prompt": q}, {"do": "settle"}),
                *(again, *one_by_one("after", [p])),
            ]
            run = Run(
                home,
                work,
                {
                    "model": model,
                    "options": {"block_size": 64},
                    "connector": settings(daemon),
                    "steps": steps,
                },
            )
            (before,), (after,) = run["before"], run["after"]
            tests.check(
                f"{name}/{model}_answer_is_the_same_after",
                before["cached"] == after["cached"] == 640 and same(before, after),
                f"{before['cached']} and {after['cached']} cached",
            )
            tests.check(f"{name}/{model}_no_block_stays_in_use", all(run.forgot), str(run.forgot))


def run_draft(tests: Tests, home: Path) -> None:
    """With a draft, whose layers no hit fills: the same answers, and its guesses are counted."""
    name, p = "draft", prompt(300, seed=5)
    draft = {"method": "draft_model", "model": str(home / "models/smollm2")}
    options = {"block_size": 64, "speculative_config": {**draft, "num_speculative_tokens": 3}}
    with pool(name, tests) as (daemon, work):
        steps = [
            *one_by_one("local", [p, p], tokens=48),
            *({"do": "settle"}, {"do": "forget"}),
            *one_by_one("pool", [p], tokens=48),
        ]
        run = Run(
            home,
            work,
            {
                "model": "smollm2",
                "options": options,
                "connector": settings(daemon),
                "steps": steps,
            },
        )
        local, hit = run["local"][1], run["pool"][0]
        tests.check(
            f"{name}/answer_equals_that_of_a_local_hit",
            local["cached"] == hit["cached"] == 256 and same(local, hit),
            f"{local['cached']} and {hit['cached']} cached",
        )
        guessed = run.counters.get("draft_tokens_after_hits", 0)
        taken = run.counters.get("draft_tokens_taken_after_hits", 0)
        tests.check(
            f"{name}/guesses_are_counted",
            0 < taken <= min(guessed, 47),
            f"{taken:.0f} of {guessed:.0f} taken",
        )


# --- crowds ---


def run_crowd(tests: Tests, home: Path) -> None:
    """Many at once in a small cache: preemption, chunked prefill. Where an answer differs, the
    engine itself must have been undecided: no more than it is between two sizes of chunks."""
    name = "crowd"
    prompts = [prompt(400 + i, seed=6) for i in range(12)]
    options = {
        "block_size": 64,
        "max_model_len": 1024,
        "num_gpu_blocks_override": 48,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 12,
    }
    crowd = {"do": "generate", "prompts": prompts, "tokens": 100}
    with pool(name, tests) as (daemon, work):
        base = {"model": "smollm2", "options": options}
        bare = Run(home, work, {**base, "connector": None, "steps": [{**crowd, "name": "a"}]})
        other = Run(
            home,
            work,
            {
                **base,
                "options": {**options, "max_num_batched_tokens": 192},
                "connector": None,
                "steps": [{**crowd, "name": "a"}],
            },
        )
        limit = 1.5 * max([0.05, *margins(bare["a"], other["a"])])
        steps = [{**crowd, "name": "first"}, {"do": "settle"}, {"do": "forget"}]
        steps += [{**crowd, "name": "second"}]
        run = Run(home, work, {**base, "connector": settings(daemon), "steps": steps})
        for which in ("first", "second"):
            apart = margins(bare["a"], run[which])
            tests.check(
                f"{name}/{which}_answers_differ_only_where_undecided",
                all(margin <= limit for margin in apart),
                f"{len(apart)} of {len(prompts)} differ, margins at most "
                f"{max(apart, default=0):.3f} of {limit:.3f}",
            )
        hits = [r["cached"] for r in run["second"]]
        tests.check(f"{name}/hits", min(hits) >= 384, " ".join(map(str, hits)))


def margins(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> list[float]:
    """Of the first word that differs, how much the engine preferred it to the second best."""
    found = []
    for x, y in zip(a, b, strict=True):
        for i, (s, t) in enumerate(zip(x["tokens"], y["tokens"], strict=True)):
            if s != t:
                found.append(min(x["margins"][i], y["margins"][i]))
                break
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--home", type=Path, required=True, help="folder of venv and models")
    parser.add_argument("--long", action="store_true", help="more prompts, more models")
    parser.add_argument("--only", action="append", help="this case; may be given again")
    parser.add_argument("--list", action="store_true", help="print the cases")
    arguments = parser.parse_args()
    tests, home = Tests(), arguments.home
    cases: dict[str, Callable[[], None]] = {
        name: lambda name=name, shape=shape: run_shape(  # type: ignore[misc]
            tests, home, name, shape, arguments.long
        )
        for name, shape in SHAPES.items()
        if shape.short or arguments.long or name in (arguments.only or ())
    }
    for model in ("llama", "mistral", "deepseek") if arguments.long else ("llama",):
        cases[f"ranks_{model}"] = lambda model=model: run_ranks(  # type: ignore[misc]
            tests, home, model
        )
    for model in ("mistral", "gemma3", "llama") if arguments.long else ("mistral",):
        cases[f"decoded_{model}"] = lambda model=model: run_decoded(  # type: ignore[misc]
            tests, home, model
        )
    cases["planted"] = lambda: run_planted(tests, home)
    cases["faults"] = lambda: run_faults(tests, home)
    cases["aborts"] = lambda: run_aborts(tests, home)
    cases["draft"] = lambda: run_draft(tests, home)
    cases["no_daemon"] = lambda: run_without_daemon(tests, home)
    cases["crowd"] = lambda: run_crowd(tests, home)
    if arguments.list:
        print("\n".join(cases))
        return 0
    for name in arguments.only or cases:
        if name not in cases:
            parser.error(f"{name} is not a case; there are {' '.join(cases)}")
        begun = time.monotonic()
        cases[name]()
        print(f"-- engines/{name}: {time.monotonic() - begun:.0f} s", flush=True)
    print(f"{tests.passed} passed, {tests.failed} failed")
    return 1 if tests.failed else 0


if __name__ == "__main__":
    sys.exit(main())
