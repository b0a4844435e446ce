"""Block size and number format of the KV cache, end to end: what the defaults are chosen from.

    python -m bench.kv_format WORKLOADS.json [--dtypes float32] [--block-sizes 16 32] [--rounds 2]

For each pair an engine on one loaded model runs three pieces, the pairs in turn, round after round, because
the machine may be shared; for each the fastest round's median counts:

    one    W1's prompt of 128 tokens alone                  milliseconds per decode step
    many   12 requests of W2 at once, sizes mixed           milliseconds per decode step, and waste
    long   2 prompts of 1,600 tokens, half of it shared     milliseconds per decode step

"prefill" is the prompt tokens per second of all pieces together. "wasted" is the share of held slots in which
no token lies, the mean over the decode steps of `many`. "shared" is the prompt tokens of `long` found cached.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from octavo import SamplingParams
from octavo.engine import Engine, EngineConfig
from octavo.kv.waste import WasteLog
from octavo.models import LoadedModel, load_model

KV_TOKENS = 16_384
STEPS = 16
LONG = 1_600


@dataclass
class Result:
    """Of one pair: the fastest round's median decode step by piece, in seconds, and the rest."""

    steps: dict[str, float] = field(default_factory=dict)
    prefill: float = 0.0
    wasted: float = 0.0
    shared: int = 0
    bytes_per_token: float = 0.0


def pieces(works: dict[str, Any]) -> dict[str, list[list[int]]]:
    """The prompts of each piece."""
    long = [token for request in works["W2"]["requests"] for token in request["prompt"]]
    return {
        "one": [works["W1"]["requests"][0]["prompt"]],
        "many": [request["prompt"] for request in works["W2"]["requests"][:12]],
        "long": [long[:LONG], long[: LONG // 2] + long[-LONG // 2 :]],
    }


def run(
    model: LoadedModel, prompts: dict[str, list[list[int]]], block_size: int, dtype: str, best: Result
) -> None:
    """One round of a pair; `best` keeps the fastest."""
    engine = Engine(
        model, EngineConfig(block_size=block_size, num_blocks=KV_TOKENS // block_size, kv_dtype=dtype)
    )
    best.bytes_per_token = engine.budget.bytes_per_block / block_size
    computed, prefill_time = 0, 0.0
    for name, each in prompts.items():
        before = engine.scheduler_stats.computed
        for prompt in each[:1]:  # the first alone, so that the second finds it
            engine.add_request(prompt, params())
        decoding: list[float] = []
        log, late = WasteLog(engine.pool), each[1:]
        while engine.has_work or late:
            plain = all(len(branch.output) > 0 for branch in engine.scheduler.running) and not late
            begin = time.perf_counter()
            deltas = engine.step()
            taken = time.perf_counter() - begin
            if plain and engine.scheduler.running:
                decoding.append(taken)
                held = [branch.kv for branch in engine.scheduler.running if branch.kv is not None]
                log.sample(len(decoding), held)
            elif not plain:
                prefill_time += taken
            if name == "long" and any(delta.num_cached_tokens for delta in deltas):
                best.shared = max(delta.num_cached_tokens for delta in deltas)
            for prompt in late:
                engine.add_request(prompt, params())
            late = []
        computed += engine.scheduler_stats.computed - before - len(decoding) * len(each)
        median = statistics.median(decoding[len(decoding) // 4 :])
        best.steps[name] = min(best.steps.get(name, median), median)
        if name == "many":
            best.wasted = log.summary().of_taken.internal
    engine.close()
    best.prefill = max(best.prefill, computed / prefill_time)


def params() -> SamplingParams:
    """Greedy, a fixed number of tokens."""
    return SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)


def main() -> None:
    """Parse the command line, run the rounds, print one row per pair."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="the workloads' JSON file")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "float16", "bfloat16", "int8"])
    parser.add_argument("--block-sizes", nargs="*", type=int, default=[8, 16, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    model, prompts = load_model(args.model), pieces(json.loads(args.file.read_text()))
    results = {pair: Result() for pair in product(args.dtypes, args.block_sizes)}
    print("   dtype  block     one    many    long  prefill  wasted  shared  bytes/token", flush=True)
    for _ in range(args.rounds):  # each round prints the best so far
        for (dtype, block_size), result in results.items():
            run(model, prompts, block_size, dtype, result)
            steps = "".join(f"{result.steps[name] * 1e3:8.2f}" for name in prompts)
            print(
                f"{dtype:>8} {block_size:6}{steps} {result.prefill:8.0f} {result.wasted:7.1%} "
                f"{result.shared:7} {result.bytes_per_token:12,.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
