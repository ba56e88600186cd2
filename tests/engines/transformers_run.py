"""Runs ForebayCache over real models of Transformers, and compares bit by bit.

    python tests/engines/transformers_run.py --models DIR [--model NAME ...] [--short]

DIR has a folder a model. For each, one process stores prompts and a second one, which has only the
pool, gets them back: what it loads must be what was stored, and what it generates must be what the
first generates from a local cache of the same prefix. Then trouble: no daemon, a daemon that is
killed, a page that is damaged. One JSON line a case; exit status 0 only if all hold. Needs a build
(--build), torch and transformers; nothing else runs or stays.
"""

from __future__ import annotations

import argparse
import json
import logging
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = 64
NEW_TOKENS = 12
FAILED = 2  # exit status of a role that says which of its cases failed
POOLED = ("smollm2", "llama", "mistral", "gemma3", "deepseek")
WINDOWED = ("mistral", "gemma3")
REFUSED = ("qwen3next",)
LENGTHS = (63, 64, 65, 127, 128, 129, 500)
SHORT_LENGTHS = (63, 64, 129, 500)


class Daemon:
    """A forebayd with directories of its own."""

    def __init__(self, build: Path) -> None:
        self.run_dir = Path(tempfile.mkdtemp(prefix="forebay-run-"))
        self.chunk_dir = Path(tempfile.mkdtemp(prefix="forebay-test-", dir="/dev/shm"))
        self.socket = str(self.run_dir / "default" / "forebay.sock")
        with open(self.run_dir / "log", "w") as log:
            self.process = subprocess.Popen(
                [
                    build / "bin" / "forebayd",
                    "--run-dir",
                    self.run_dir,
                    "--chunk-dir",
                    self.chunk_dir,
                    "--host-bytes",
                    "256MiB",
                    "--grpc-listen",
                    "",
                    "--http-listen",
                    "",
                ],
                stderr=log,
            )

    def __enter__(self) -> Daemon:
        deadline = time.monotonic() + 10
        while "event=ready" not in (self.run_dir / "log").read_text():
            if self.process.poll() is not None or time.monotonic() > deadline:
                text = (self.run_dir / "log").read_text()
                self.__exit__()
                raise RuntimeError(f"forebayd did not start:\n{text}")
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self.run_dir)
        shutil.rmtree(self.chunk_dir)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class Report:
    """One line a case."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.failed = 0

    def case(self, name: str, checks: dict[str, bool], **facts: object) -> None:
        wrong = [check for check, holds in checks.items() if not holds]
        self.failed += bool(wrong)
        line = {"model": self.model, "case": name, "ok": not wrong, **facts}
        print(json.dumps(line | ({"wrong": wrong} if wrong else {})), flush=True)


# --- cases ---


def cases(short: bool) -> list[dict[str, int]]:
    """Each a prompt that is stored, and one that is asked for: the stored one up to ``keep``, then
    ``tail`` other tokens. ``decode``: new tokens that are stored too."""
    same = [
        {"seed": 1000 + n, "length": n, "decode": 0, "keep": n, "tail": 0}
        for n in (SHORT_LENGTHS if short else LENGTHS)
    ]
    long = {"seed": 1500, "length": 500, "decode": 0}
    return [
        *same,
        {**long, "keep": 128, "tail": 0},
        {**long, "keep": 200, "tail": 40},
        {**long, "keep": 448, "tail": 1},
        {**long, "keep": 500, "tail": 300},
        {"seed": 2000, "length": 100, "decode": 80, "keep": 180, "tail": 10},
        {"seed": 2001, "length": 400, "decode": 140, "keep": 540, "tail": 10},
    ]


def hit_tokens(case: dict[str, int]) -> int:
    """What the pool must give: whole pages with KV, and a token left to compute."""
    stored = case["length"] + max(0, case["decode"] - 1)  # the last token has no KV
    asked = case["keep"] + case["tail"]
    return min(min(stored, case["keep"]) // PAGE * PAGE, asked - 1)


def tokens(seed: int, count: int):
    import torch

    return torch.randint(5, 8000, (1, count), generator=torch.Generator().manual_seed(seed))


def generate(model, ids, past, new: int = NEW_TOKENS):
    """Greedy, also past an end-of-text token. Returns ids and log-probabilities [new, vocabulary]
    of the new tokens."""
    import torch

    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=past,
        do_sample=False,
        max_new_tokens=new,
        min_new_tokens=new,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences, torch.log_softmax(torch.cat(out.logits).float(), dim=-1)


def states(past) -> list[tuple]:
    return [(layer.keys.clone(), layer.values.clone()) for layer in past.layers]


def same_bits(a, b) -> bool:
    import torch

    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )


def loaded_is(past, stored: list[tuple], length: int) -> bool:
    """Whether a cache of ``length`` tokens holds the end of what was stored, and enough of it."""
    if past.get_seq_length() != length:
        return False
    for layer, reference in zip(past.layers, stored):
        need = min(length, layer.sliding_window - 1) if layer.is_sliding else length
        for got, whole in zip((layer.keys, layer.values), reference):
            if not same_bits(got, whole[:, :, length - need : length]):
                return False
    return True


# --- roles: each a process ---


def load(folder: Path, **options):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # threads that spin wait long for a busy machine
    torch.set_grad_enabled(False)
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def patient(model, pool, **options):
    """A ForebayCache that a busy machine does not make miss."""
    from forebay.transformers import ForebayCache

    return ForebayCache(model, pool, timeout=10, **options)


def store_role(args: argparse.Namespace, report: Report) -> None:
    """Store prompts; write down what was stored, and what a local cache makes of each case."""
    import torch
    from transformers import DynamicCache

    import forebay

    model = load(args.folder)
    with forebay.Pool(args.socket) as pool:
        cache = patient(model, pool)
        for number, case in enumerate(cases(args.short)):
            ids = tokens(case["seed"], case["length"])
            local = DynamicCache(config=model.config)
            local.activate_past_recording()
            past, stored = cache.prepare(ids), {}
            if case["decode"]:
                whole, _ = generate(model, ids, local, case["decode"])
                out, _ = generate(model, ids, past, case["decode"])
                past.store(out)
                stored["repeated"] = torch.equal(whole, out)
            else:
                whole = ids
                model(ids, past_key_values=local)
                if not past.hit_tokens:  # the first case of its prompt
                    model(ids, past_key_values=past)
                    past.store()
            stored["states"] = states(local)
            asked = torch.cat([whole[:, : case["keep"]], tokens(case["seed"] + 9, case["tail"])], 1)
            length = hit_tokens(case)
            if length:
                local.crop(length - local.get_seq_length())
            else:
                local = DynamicCache(config=model.config)
            stored["asked"] = asked
            stored["out"], stored["logprobs"] = generate(model, asked, local)
            torch.save(stored, args.work / f"{number}.pt")


def hit_role(args: argparse.Namespace, report: Report) -> None:
    """Get them back, having seen nothing but the pool."""
    import torch

    import forebay

    model = load(args.folder)
    with forebay.Pool(args.socket) as pool:
        cache = patient(model, pool)
        for number, case in enumerate(cases(args.short)):
            stored, length = torch.load(args.work / f"{number}.pt"), hit_tokens(case)
            begun = time.monotonic()
            past = cache.prepare(stored["asked"])
            seconds = time.monotonic() - begun
            checks = {"hit": past.hit_tokens == length}
            if length:
                checks["tensors"] = loaded_is(past, stored["states"], length)
            out, logprobs = generate(model, stored["asked"], past)
            checks["tokens"] = torch.equal(out, stored["out"])
            checks["logprobs"] = same_bits(logprobs, stored["logprobs"])
            checks["repeated"] = stored.get("repeated", True)
            report.case("hit", checks, **case, hit=past.hit_tokens, load_ms=round(seconds * 1e3, 2))


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("forebay.transformers").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def damage(chunk_dir: Path, row: bytes) -> int:
    """Flip a bit wherever the pool's memory has these bytes. Returns how often that was."""
    found = 0
    for path in chunk_dir.glob("chunk-*"):
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            at = memory.find(row)
            while at >= 0:
                memory[at] ^= 1
                found += 1
                at = memory.find(row, at + 1)
    return found


def trouble_role(args: argparse.Namespace, report: Report) -> None:
    """No daemon; a damaged page; types and codecs; wrong use; a daemon that is killed."""
    import torch
    from transformers import DynamicCache

    import forebay

    model, warned = load(args.folder), Warnings()
    ids = tokens(3000, 500)
    plain, plain_logprobs = generate(model, ids, DynamicCache(config=model.config))

    def recomputes(cache) -> dict[str, bool]:
        begun = time.monotonic()
        past = cache.prepare(ids)
        checks = {"in time": time.monotonic() - begun < 1, "no hit": past.hit_tokens == 0}
        out, logprobs = generate(model, ids, past)
        past.store(out)
        return checks | {
            "tokens": torch.equal(out, plain),
            "logprobs": same_bits(logprobs, plain_logprobs),
        }

    with forebay.Pool("/nowhere/forebay.sock", connect=0.1) as pool:
        cache = patient(model, pool)
        checks = recomputes(cache) | recomputes(cache)
        report.case("no daemon", checks | {"one warning": len(warned.texts) == 1})

    with Daemon(args.build) as daemon, forebay.Pool(daemon.socket) as pool:
        cache = patient(model, pool)
        past = cache.prepare(ids)
        model(ids, past_key_values=past)
        stored = states(past)
        past.store()

        row = stored[0][0][0, 0, 4 * PAGE + 5].view(torch.uint8).numpy().tobytes()
        damaged = damage(daemon.chunk_dir, row)
        past = cache.prepare(ids)
        checks = {
            "damaged": damaged == 1,
            "pages before it": past.hit_tokens == 4 * PAGE,
            "tensors": loaded_is(past, stored, 4 * PAGE),
        }
        local = DynamicCache(config=model.config)
        local.activate_past_recording()
        model(ids, past_key_values=local)
        local.crop(4 * PAGE - 500)
        expected, expected_logprobs = generate(model, ids, local)
        out, logprobs = generate(model, ids, past)
        past.store(out)
        checks["tokens"] = torch.equal(out, expected)
        checks["logprobs"] = same_bits(logprobs, expected_logprobs)
        checks["stored again"] = cache.prepare(ids).hit_tokens == 7 * PAGE
        report.case("damaged page", checks)

        for codec, bound in (("fp8_e4m3", 2**-4), ("int8", 2**-6)):
            lossy = patient(model, pool, codec=codec)
            lossy.generate(ids, max_new_tokens=2, do_sample=False)
            past = lossy.prepare(ids)
            rows = [
                (got.float(), whole[:, :, 448 - got.shape[2] : 448].float())
                for layer, whole_layer in zip(past.layers, stored)
                for got, whole in zip((layer.keys, layer.values), whole_layer)
            ]
            # Of the largest in its row: loose for each element, and far from another row's.
            error = max(
                ((got - whole).abs() / whole.abs().amax(-1, keepdim=True)).max().item()
                for got, whole in rows
            )
            report.case(
                codec,
                {"hit": past.hit_tokens == 448, "lossy": 0 < error <= bound},
                error=round(error, 5),
            )

        for name, text in {
            "batch": lambda: cache.prepare(ids.repeat(2, 1)),
            "beams": lambda: cache.generate(ids, num_beams=2, max_new_tokens=2),
            "padding": lambda: cache.generate(
                ids, attention_mask=(torch.arange(500) > 3)[None].long(), max_new_tokens=2
            ),
            "codec": lambda: patient(model, pool, codec="int7"),
        }.items():
            report.case(f"refused: {name}", {"ValueError": raised(text)})

        looked_up = {"prompt_lookup_num_tokens": 4, "max_new_tokens": NEW_TOKENS}
        apart = forebay.Extra(salt="assisted").encode()
        out = cache.generate(ids, extra=apart, do_sample=False, **looked_up)
        local = DynamicCache(config=model.config)
        expected = model.generate(ids, past_key_values=local, do_sample=False, **looked_up)
        report.case(
            "assisted",
            {
                "tokens": torch.equal(out, expected),
                "tensors": loaded_is(cache.prepare(ids, extra=apart), stored, 448),
            },
        )

        private = patient(model, pool, private=True)
        other = patient(model, pool, private=True)
        private.generate(ids, max_new_tokens=2, do_sample=False)
        report.case(
            "private",
            {
                "itself": private.prepare(ids).hit_tokens == 448,
                "nobody else": other.prepare(ids).hit_tokens == 0,
            },
        )

        salted = forebay.Extra(salt="a").encode()
        cache.generate(ids, extra=salted, max_new_tokens=2, do_sample=False)
        report.case(
            "salt",
            {
                "same": cache.prepare(ids, extra=salted).hit_tokens == 448,
                "other": cache.prepare(ids, extra=forebay.Extra(salt="b").encode()).hit_tokens == 0,
            },
        )

        cache = patient(model, pool)
        checks = {"before": cache.prepare(ids).hit_tokens == 448}
        daemon.kill()
        warned.texts.clear()
        checks |= recomputes(cache) | recomputes(cache)
        report.case("daemon killed", checks | {"one warning": len(warned.texts) == 1})

    with Daemon(args.build) as daemon, forebay.Pool(daemon.socket) as pool:
        for dtype in (torch.float32, torch.float16):
            model = load(args.folder, dtype=dtype)
            cache = patient(model, pool)
            past = cache.prepare(ids)
            fresh = past.hit_tokens == 0
            model(ids, past_key_values=past)
            stored = states(past)
            past.store()
            past = cache.prepare(ids)
            report.case(str(dtype), {"fresh": fresh, "tensors": loaded_is(past, stored, 448)})
        model = load(args.folder, dtype=torch.float32)
        report.case(
            "refused: int8 of float32",
            {"ValueError": raised(lambda: patient(model, pool, codec="int8"))},
        )


def windows_role(args: argparse.Namespace, report: Report) -> None:
    """Windows around and below whole pages, asked for at boundaries all along a prompt."""
    import torch
    from transformers import DynamicCache

    import forebay

    ids = tokens(4000, 400)
    for window in (33, 65) if args.short else (33, 64, 65, 129, 257):
        model = load(args.folder, sliding_window=window)
        with Daemon(args.build) as daemon, forebay.Pool(daemon.socket) as pool:
            cache = patient(model, pool)
            cache.generate(ids, max_new_tokens=2, do_sample=False)
            for keep, length in ((64, 63), (65, 64), (192, 191), (300, 256), (320, 319)):
                local = DynamicCache(config=model.config)
                local.activate_past_recording()
                model(ids, past_key_values=local)
                stored = states(local)
                local.crop(length - 400)
                asked = ids[:, :keep]
                past = cache.prepare(asked)
                checks = {
                    "hit": past.hit_tokens == length,
                    "tensors": loaded_is(past, stored, length),
                }
                expected, expected_logprobs = generate(model, asked, local)
                out, logprobs = generate(model, asked, past)
                checks["tokens"] = torch.equal(out, expected)
                checks["logprobs"] = same_bits(logprobs, expected_logprobs)
                report.case("window", checks, window=window, keep=keep, hit=past.hit_tokens)


def raised(call) -> bool:
    try:
        call()
    except ValueError:
        return True
    return False


def identity_role(args: argparse.Namespace, report: Report) -> None:
    """Names of models: from a folder, from a hub's cache, with settings changed at load time."""
    import forebay

    def name(where: object, **options: object) -> str:
        cache = patient(load(where, **options), pool)
        return cache._manifests[0]["model"]

    commits = ["0123456789abcdef" * 2 + "01234567", "f" * 40]
    repository = args.work / "models--some--model"
    for commit in commits:
        (repository / "snapshots" / commit).mkdir(parents=True)
        for file in args.folder.iterdir():
            (repository / "snapshots" / commit / file.name).symlink_to(file.resolve())
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commits[0])
    with Daemon(args.build) as daemon, forebay.Pool(daemon.socket) as pool:
        folder, changed = name(args.folder), name(args.folder, rms_norm_eps=0.5)
        two = name("some/model")
        shutil.rmtree(repository / "snapshots" / commits[1])
        one = name("some/model")
    report.case(
        "identity",
        {
            "folder": folder.startswith("sha256:") and "+" not in folder,
            "changed": changed.startswith(folder + "+"),
            "two commits": two == "",
            "one commit": one == f"some/model@{commits[0]}",
        },
        names=[folder, changed, one],
    )


def refused_role(args: argparse.Namespace, report: Report) -> None:
    import forebay

    text = ""
    with forebay.Pool("/nowhere/forebay.sock", connect=0.1) as pool:
        try:
            patient(load(args.folder), pool)
        except ValueError as error:
            text = str(error)
    report.case("refused", {"names the layer": "linear_attention" in text}, text=text)


ROLES = {
    "store": store_role,
    "hit": hit_role,
    "trouble": trouble_role,
    "windows": windows_role,
    "identity": identity_role,
    "refused": refused_role,
}


# --- the parent ---


def run(role: str, folder: Path, work: Path, args: argparse.Namespace, socket: str = "") -> int:
    """A role in a process of its own. Returns 0 where all its cases hold."""
    environment = os.environ | {
        "FOREBAY_LIBRARY": str(args.build / "lib" / "libforebay.so"),
        "PYTHONPATH": str(ROOT / "pool" / "python"),
        "XDG_CACHE_HOME": str(work / "cache"),
        "HF_HUB_CACHE": str(work),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    command = [
        sys.executable,
        __file__,
        "--role",
        role,
        "--folder",
        folder,
        "--work",
        work,
        "--socket",
        socket,
        "--build",
        args.build,
    ]
    done = subprocess.run(command + ["--short"] * args.short, env=environment, timeout=1200)
    if done.returncode not in (0, FAILED):
        print(
            json.dumps(
                {
                    "model": folder.name,
                    "case": role,
                    "ok": False,
                    "wrong": [f"exit status {done.returncode}"],
                }
            ),
            flush=True,
        )
    return int(done.returncode != 0)


def run_model(name: str, args: argparse.Namespace) -> int:
    folder, failed = args.models / name, 0
    with tempfile.TemporaryDirectory(prefix="forebay-transformers-") as work:
        work = Path(work)
        if name in REFUSED:
            return run("refused", folder, work, args)
        with Daemon(args.build) as daemon:
            failed += run("store", folder, work, args, daemon.socket)
            failed += run("hit", folder, work, args, daemon.socket)
        failed += run("trouble", folder, work, args)
        if name in WINDOWED:
            failed += run("windows", folder, work, args)
        if name == "mistral":  # the smallest: names do not depend on what is inside
            failed += run("identity", folder, work, args)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(
        description="ForebayCache over real models, compared bit by bit"
    )
    parser.add_argument("--models", type=Path, help="a folder of models' folders")
    parser.add_argument("--model", nargs="+", help=f"default: {' '.join(POOLED + REFUSED)}")
    parser.add_argument("--short", action="store_true", help="fewer lengths")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "release")
    for name in ("--role", "--socket"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--folder", "--work"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.build = args.build.resolve()
    if args.role:
        report = Report(args.folder.name)
        ROLES[args.role](args, report)
        return FAILED if report.failed else 0
    if not args.models:
        parser.error("--models DIR is needed")
    failed = ran = 0
    for name in args.model or POOLED + REFUSED:
        if not (args.models / name / "config.json").exists():
            print(json.dumps({"model": name, "skipped": f"not in {args.models}"}), flush=True)
            failed += args.model is not None
            continue
        failed += run_model(name, args)
        ran += 1
    return int(failed > 0 or ran == 0)


if __name__ == "__main__":
    sys.exit(main())
