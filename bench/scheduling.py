"""What scheduling does when memory is short, on the real engine.

    python -m bench.scheduling budgets WORKLOADS.json --kv-tokens 1024 4096 --pools paged max
    python -m bench.scheduling modes   WORKLOADS.json --kv-tokens 2048
    python -m bench.scheduling gap

budgets: W2's requests through the paged pool and through contiguous reservation (max, pow2, oracle) in as
much memory: throughput, sequences at once, and how the slots were used. modes: the same with each way of
preemption, while admission believes every output to be short, so that preemptions happen. gap: eight
running streams while a long prompt comes: the gaps between their tokens, against the same streams at the
same lengths without the prompt.

--requests N and --shorten K take the first N requests with a K-th of their outputs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import threading
import time
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the commands do, before torch is imported

from octavo import SamplingParams
from octavo.attention.pages import THREAD as PAGES_THREAD
from octavo.engine import Engine, EngineConfig
from octavo.engine.llm import LLM
from octavo.kv import Pool
from octavo.kv.contiguous import ContiguousPool
from octavo.kv.waste import WasteLog
from octavo.models import LoadedModel, load_model
from octavo.sched.lengths import Lengths

BLOCK_SIZE = 16
SAMPLE_STEPS = 8


class Hopeful(Lengths):
    """Believes every output to end at once."""

    def left(self, done: int, limit: int) -> int:
        return 1


def engine_on(
    model: LoadedModel, kv_tokens: int, pool: str, work: list[dict[str, Any]], **options: Any
) -> Engine:
    """An engine whose KV cache has `kv_tokens` slots; "paged", or contiguous by a policy."""
    longest = max(len(r["prompt"]) + r["max_tokens"] for r in work)
    config = EngineConfig(num_blocks=kv_tokens // BLOCK_SIZE, block_size=BLOCK_SIZE, **options)
    if pool == "paged":
        return Engine(model, config)
    final = {tuple(r["prompt"]): len(r["prompt"]) + r["max_tokens"] - 1 for r in work}

    def make(_: Any) -> Pool:
        contiguous = ContiguousPool(
            kv_tokens // BLOCK_SIZE * BLOCK_SIZE,
            cast("Any", pool),
            max_len=longest,
            block_size=BLOCK_SIZE,
            final_len=lambda prompt: final[tuple(prompt)],
        )
        return cast("Pool", contiguous)  # the same calls, as far as the engine makes them

    return Engine(model, config, pool=make)


def run(engine: Engine, work: list[dict[str, Any]]) -> dict[str, Any]:
    """All requests at once; outputs of exact length."""
    llm = LLM.__new__(LLM)
    llm.engine = engine
    ends: dict[Any, int] = {}  # slots that each sequence will have filled when it ends
    log, running, step = WasteLog(engine.pool, ends.__getitem__), [], engine.step

    def sampled() -> Any:
        deltas = step()
        if engine.scheduler.running:
            running.append(len(engine.scheduler.running))
            if len(running) % SAMPLE_STEPS == 0:
                sample()
        return deltas

    def sample() -> None:
        ends.clear()
        for branch in engine.scheduler.running:
            ends[branch.kv] = len(branch.request.prompt) + branch.request.max_tokens - 1
        head = next(iter(engine.scheduler.waiting), None)
        log.sample(len(running), list(ends), len(head.tokens) if head is not None else 0)

    engine.step = sampled  # type: ignore[method-assign]
    params = [SamplingParams(temperature=0, max_tokens=r["max_tokens"], ignore_eos=True) for r in work]
    begin = time.perf_counter()
    outputs = llm.generate([r["prompt"] for r in work], params, use_tqdm=False)
    wall = time.perf_counter() - begin
    stats = engine.scheduler.stats
    return {
        "wall s": round(wall, 2),
        "output tok/s": round(sum(r["max_tokens"] for r in work) / wall, 1),
        "mean running": round(statistics.mean(running), 1),
        "most running": max(running),
        "steps": len(running),
        "of the pool": {name: round(value, 2) for name, value in log.summary().of_pool._asdict().items()},
        "preempted": dict(stats.preempted),
        "recomputed": round(stats.recomputed / stats.computed, 3),
        "swapped blocks": stats.swapped_out,
        "outputs": hash(tuple(tuple(o.outputs[0].token_ids) for o in outputs)),
    }


def budgets(args: argparse.Namespace, work: list[dict[str, Any]]) -> None:
    """One row per budget and pool."""
    model = load_model(args.model)
    for kv_tokens in args.kv_tokens:
        for pool in args.pools:
            longest = max(len(r["prompt"]) + r["max_tokens"] for r in work)
            if kv_tokens < longest:
                print(json.dumps({"kv tokens": kv_tokens, "pool": pool, "refused": f"needs {longest}"}))
                continue
            engine = engine_on(model, kv_tokens, pool, work)
            print(json.dumps({"kv tokens": kv_tokens, "pool": pool, **run(engine, work)}), flush=True)


def modes(args: argparse.Namespace, work: list[dict[str, Any]]) -> None:
    """One row per mode of preemption."""
    model = load_model(args.model)
    for kv_tokens in args.kv_tokens:
        for name, options in {
            "planned": {},
            "recompute": {"preemption": "recompute"},
            "swap": {"preemption": "swap", "host_cache": "1GiB"},
            "auto": {"preemption": "auto", "host_cache": "1GiB"},
        }.items():
            engine = engine_on(model, kv_tokens, "paged", work, **options)
            if name != "planned":
                engine.scheduler._admitter._lengths = Hopeful()
            print(json.dumps({"kv tokens": kv_tokens, "mode": name, **run(engine, work)}), flush=True)


def gap(args: argparse.Namespace) -> None:
    """Gaps between the tokens of eight streams while a long prompt is prefilled, against the same streams at
    the same lengths without it."""
    model = load_model(args.model)
    rng = random.Random(1)
    prompts = [[rng.randrange(1000, 40_000) for _ in range(n)] for n in (*[64] * 8, 200, args.prompt)]
    engine = streams_on(model, prompts[:8], interactive=not args.unbounded)
    begun = [timed(engine) for _ in range(100)]
    short = SamplingParams(temperature=0, max_tokens=1)
    first = engine.add_request(prompts[8], short)  # what a chunk costs is learnt
    while first in engine._live:
        begun.append(timed(engine))
    long = engine.add_request(prompts[9], short)
    beside, chunks = [], []
    while long in engine._live:
        computed = engine.scheduler.stats.computed
        beside.append(timed(engine))
        chunks.append(engine.scheduler.stats.computed - computed - 8)
    twin = streams_on(model, prompts[:8], interactive=True)
    alone = [timed(twin) for _ in range(len(begun) + len(beside))][len(begun) :]
    usual = [statistics.median(alone[max(0, i - 25) : i + 25]) for i in range(len(alone))]
    ratios = sorted(b / u for b, u in zip(beside, usual, strict=True))
    quiet = sorted(a / u for a, u in zip(alone, usual, strict=True))
    figures = {
        "steps": len(beside),
        "prompt s": sum(beside),
        "median step ms": 1e3 * statistics.median(beside),
        "longest step ms": 1e3 * max(beside),
        "longest / median": max(beside) / statistics.median(beside),
        "without the prompt, median ms": 1e3 * statistics.median(alone),
        "against without at the same length: median": statistics.median(ratios),
        "99 %": ratios[int(0.99 * len(ratios))],
        "longest": ratios[-1],
        "steps over 2": sum(r > 2 for r in ratios),
        "without against its own median: longest": quiet[-1],
        "without: steps over 2": sum(r > 2 for r in quiet),
    }
    print(json.dumps({key: round(value, 2) for key, value in figures.items()}, indent=1))
    print("chunks, by tenths of the time:", [chunks[i * len(chunks) // 10] for i in range(10)])
    print("costs:", {k: getattr(engine.meter.costs, k) for k in ("token", "pair", "read", "block")})


def streams_on(model: LoadedModel, prompts: list[list[int]], interactive: bool) -> Engine:
    """A new engine with streams that outlast everything, ten steps in."""
    engine = Engine(model, EngineConfig(num_blocks=1792, block_size=BLOCK_SIZE))
    engine.runner.keep_ahead()  # a server does so when it starts, and is done with it within seconds
    while any(thread.name == PAGES_THREAD for thread in threading.enumerate()):
        time.sleep(0.1)
    endless = SamplingParams(temperature=0, max_tokens=2500, ignore_eos=True)
    for prompt in prompts:
        engine.add_request(prompt, endless, interactive=interactive)
    for _ in range(10):
        engine.step()
    return engine


def timed(engine: Engine) -> float:
    """Seconds of a step."""
    begin = time.perf_counter()
    engine.step()
    return time.perf_counter() - begin


def main() -> None:
    """Parse the command line and run one of the measurements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("budgets", "modes", "gap"))
    parser.add_argument("file", type=Path, nargs="?", help="the workloads' JSON file")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kv-tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--pools", nargs="+", default=["paged", "max", "pow2", "oracle"])
    parser.add_argument("--requests", type=int)
    parser.add_argument("--shorten", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=6000, help="gap: tokens of the long prompt")
    parser.add_argument("--unbounded", action="store_true", help="gap: as if nobody read the streams")
    args = parser.parse_args()
    if args.what == "gap":
        gap(args)
        return
    work = json.loads(args.file.read_text())["W2"]["requests"][: args.requests]
    work = [{**r, "max_tokens": max(1, r["max_tokens"] // args.shorten)} for r in work]
    (budgets if args.what == "budgets" else modes)(args, work)


if __name__ == "__main__":
    main()
