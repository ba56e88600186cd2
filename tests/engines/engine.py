"""One vLLM engine in one process, driven by a plan; prints a JSON line for each result.

usage: engine.py PLAN.json

A plan has `model` (a folder), `options` (of vllm.LLM), `connector` (its extra configuration, or
null for none) and `steps`, done one after the other, or "stdin": a step a line from there.

    {"do": "generate", "name": N, "prompts": [[ids], ...], "tokens": T}   all at once
    {"do": "forget", "pool": bool}      the local prefix cache; with pool, also what the pool has
    {"do": "ask", "name": N}            print {"ask": N} and wait for a line on standard input
    {"do": "abort", "prompt": [ids]}    begin it, and give it up after 0, 1, 2, ... steps
    {"do": "score", "name": N, "text": FILE, "context": C, "count": T, "save": FILE}
                                        log probabilities of all words after the first C tokens of a
                                        text, after C + 1, ...; T times
    {"do": "settle"}                    wait until nothing is being stored
    {"do": "wait", "seconds": S}
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB


def say(**fields: Any) -> None:
    print("RESULT " + json.dumps(fields), flush=True)


def make_engine(plan: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    options = {
        "enforce_eager": True,
        "max_model_len": 4096,
        "max_num_seqs": 1,
        "disable_log_stats": False,
        "skip_tokenizer_init": not os.path.exists(os.path.join(plan["model"], "tokenizer.json")),
        **plan.get("options", {}),
    }
    if plan.get("connector") is not None:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector=plan.get("class", "ForebayConnector"),
            kv_connector_module_path=plan.get("module", "forebay.vllm"),
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=plan["connector"],
        )
    return LLM(plan["model"], **options)


def generate(engine: Any, step: dict[str, Any]) -> None:
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=step.get("tokens", 16),
        temperature=0,
        logprobs=2,
        ignore_eos=True,
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": ids} for ids in step["prompts"]]
    begun = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    for index, output in enumerate(outputs):
        sample = output.outputs[0]
        chosen = [at[token].logprob for at, token in zip(sample.logprobs, sample.token_ids)]
        second = [
            sorted((v.logprob for v in at.values()), reverse=True)[1] for at in sample.logprobs
        ]
        say(
            name=step["name"],
            index=index,
            prompt=len(step["prompts"][index]),
            cached=output.num_cached_tokens,
            tokens=list(sample.token_ids),
            logprobs=chosen,
            margins=[a - b for a, b in zip(chosen, second)],
            first_s=output.metrics.first_token_latency if output.metrics else None,
            seconds=seconds,
        )


def score(engine: Any, step: dict[str, Any]) -> None:
    """Saves `logprobs`, float32 [count, words], and `tokens`, [count] that the text has there. The
    first of them is preceded by what was stored: the context, forgotten by the engine."""
    import numpy
    from vllm import SamplingParams

    with open(step["text"]) as file:
        ids = engine.get_tokenizer().encode(file.read())
    context, count = step["context"], step["count"]
    if len(ids) < context + count:
        raise ValueError(f"{step['text']} has {len(ids)} tokens of {context + count}")
    one = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    every = SamplingParams(max_tokens=1, temperature=0, detokenize=False, logprobs=-1)
    engine.generate([{"prompt_token_ids": ids[:context]}], one, use_tqdm=False)
    settle(engine)
    engine.reset_prefix_cache()
    rows, cached = [], []
    for end in range(context, context + count):
        (output,) = engine.generate([{"prompt_token_ids": ids[:end]}], every, use_tqdm=False)
        (said,) = output.outputs[0].logprobs
        row = numpy.empty(len(said), dtype=numpy.float32)
        row[list(said)] = [each.logprob for each in said.values()]
        rows.append(row)
        cached.append(output.num_cached_tokens)
    numpy.savez(step["save"], logprobs=rows, tokens=ids[context : context + count])
    say(name=step["name"], cached=cached)


def abort(engine: Any, step: dict[str, Any]) -> None:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, detokenize=False)
    for steps in range(6):
        name = f"abort-{steps}"
        engine.llm_engine.add_request(name, {"prompt_token_ids": step["prompt"]}, params)
        for _ in range(steps):
            engine.llm_engine.step()
        engine.llm_engine.abort_request([name])


def settle(engine: Any) -> None:
    """Stores of finished requests keep the engine stepping; let it."""
    while engine.llm_engine.has_unfinished_requests():
        engine.llm_engine.step()
    time.sleep(0.5)


def counters(engine: Any) -> dict[str, float]:
    """The connector's, as vLLM's metrics have them."""
    prefix = "vllm:forebay_"
    return {
        metric.name.removeprefix(prefix): metric.value
        for metric in engine.get_metrics()
        if metric.name.startswith(prefix) and metric.value
    }


def do(engine: Any, step: dict[str, Any]) -> None:
    match step["do"]:
        case "generate":
            generate(engine, step)
        case "forget":
            done = engine.reset_prefix_cache(reset_connector=step.get("pool", False))
            say(forgot=bool(done))
        case "ask":
            say(ask=step["name"])
            sys.stdin.readline()
        case "score":
            score(engine, step)
        case "abort":
            abort(engine, step)
        case "settle":
            settle(engine)
        case "wait":
            time.sleep(step["seconds"])


def main(path: str) -> None:
    with open(path) as file:
        plan = json.load(file)
    begun = time.perf_counter()
    engine = make_engine(plan)
    say(started_s=time.perf_counter() - begun)
    if plan["steps"] == "stdin":
        for line in sys.stdin:
            do(engine, json.loads(line))
            say(did=True)
    else:
        for step in plan["steps"]:
            do(engine, step)
    say(done=True, counters=counters(engine))


if __name__ == "__main__":
    main(sys.argv[1])
