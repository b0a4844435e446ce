"""Replays a Mooncake trace through octavo.kv.Pool and vLLM's KVCacheManager, side by side.

    bench/vllm_env.sh VENV_DIR
    python -m bench.kv_vs_vllm TRACE.jsonl --vllm VENV_DIR [--mode cost|hits|both] [--limit N] ...

cost: CPU time (of the thread, so that a busy machine does not count) of opening, reserving, committing
and closing every request, per block of 16 tokens, hashing included for vLLM, slots included for octavo.
The two replay the same requests in turn, `--rounds` times; medians.

hits: the share of the prompts' 512-token hash blocks found in the cache, beside the trace's own share
computed from its hash ids, with an unlimited pool and with fractions of what that came to hold.

Requests are served one after another in the order of the trace: open, compute the prompt in one step,
then the output in one (--decode-steps: token by token), close. So no run depends on speed or on timing.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import octavo.kv
from bench.mooncake import HASH_TOKENS, TraceRequest, read_trace, reusable, unlimited_blocks
from octavo.kv import Pool

PHASES = ("open", "reserve", "extend", "commit", "output", "close")
COST_BLOCK = 16
HIT_BLOCK = 256  # the largest that octavo takes; two to a hash block


class Vllm:
    """The worker process in vLLM's environment."""

    def __init__(self, venv: Path) -> None:
        self._process = subprocess.Popen(
            [str(venv / "bin" / "python"), "-m", "bench.vllm_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        )
        self.version = self._read()["ready"]

    def replay(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run one job; see bench/vllm_worker.py for what goes in and comes out."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the worker."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the vLLM worker ended with status {self._process.wait()}; its error is above")
        return json.loads(line)


def serve(pool: Pool, work: TraceRequest, arrays: bool, steps: bool) -> tuple[list[int], int]:
    """One request from start to end: CPU nanoseconds per phase, and the prompt tokens found."""
    prompt, output = work.prompt(), work.output()
    tokens: Any = prompt if arrays else prompt.tolist()
    made: Any = output if arrays else output.tolist()
    pieces = [made[i : i + 1] for i in range(len(made))] if steps else [made] if len(made) else []
    clock = time.thread_time_ns
    t0 = clock()
    seq = pool.open(tokens)
    t1 = clock()
    rest = tokens[seq.num_cached :]
    if not seq.reserve(len(rest)):
        raise RuntimeError(f"a request of {len(tokens)} tokens found no room")
    t2 = clock()
    seq.extend(len(rest))
    pool.drain()
    t3 = clock()
    seq.commit(len(rest))
    t4 = clock()
    for piece in pieces:
        if not seq.reserve(len(piece)):
            raise RuntimeError(f"a request of {len(tokens)} tokens found no room for its output")
        seq.extend(len(piece))
        pool.drain()
        seq.commit(piece)
    t5 = clock()
    found = seq.num_cached
    seq.close()
    t6 = clock()
    return [t1 - t0, t2 - t1, t3 - t2, t4 - t3, t5 - t4, t6 - t5], found


def replay(
    requests: list[TraceRequest],
    num_blocks: int,
    block_size: int,
    *,
    arrays: bool = True,
    steps: bool = False,
    policy: str = "LRU",
) -> dict[str, Any]:
    """All requests, one after another, on a new pool; `used` is how many blocks ended up held or cached."""
    pool = Pool(num_blocks, block_size, policy=getattr(octavo.kv, policy)())
    total = [0] * len(PHASES)
    hit_tokens = hit_blocks = 0
    gc.collect()
    gc.freeze()
    for work in requests:
        spent, found = serve(pool, work, arrays, steps)
        total = [a + b for a, b in zip(total, spent, strict=True)]
        hit_tokens += found
        hit_blocks += found // HASH_TOKENS
    gc.unfreeze()
    used = num_blocks - pool.stats().free
    return {
        "ns": dict(zip(PHASES, total, strict=True)),
        "hit_tokens": hit_tokens,
        "hit_blocks": hit_blocks,
        "used": used,
    }


def blocks_of(requests: list[TraceRequest], block_size: int) -> int:
    """Blocks that all requests take, hits included: what the costs are divided by."""
    return sum(-(-(r.num_input + r.num_output) // block_size) for r in requests)


def cost(requests: list[TraceRequest], job: dict[str, Any], vllm: Vllm | None, rounds: int) -> None:
    """Print CPU nanoseconds per block and phase for each side, and the ratio of the totals."""
    size, steps = job["block_size"], job["decode_steps"]
    blocks = blocks_of(requests, size)
    runs: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        for name, arrays in (("octavo, lists", False), ("octavo, int32 arrays", True)):
            result = replay(requests, job["num_blocks"], size, arrays=arrays, steps=steps)
            runs.setdefault(name, []).append(result["ns"])
        if vllm is not None:
            runs.setdefault(f"vLLM {vllm.version}, lists", []).append(vllm.replay(job)["ns"])
    print(
        f"\ncost: {len(requests)} requests, {blocks:,} blocks of {size}, pool of {job['num_blocks']:,}, "
        f"output {'token by token' if steps else 'in one step'}, {rounds} rounds; CPU ns per block"
    )
    totals = {}
    for name, results in runs.items():
        phases = {phase: statistics.median(r[phase] for r in results) / blocks for phase in results[0]}
        totals[name] = statistics.median(sum(r.values()) for r in results) / blocks
        parts = "  ".join(f"{phase} {ns:,.0f}" for phase, ns in phases.items())
        print(f"  {name:24} {totals[name]:8,.0f}   {parts}")
    if vllm is not None:
        reference = totals.pop(f"vLLM {vllm.version}, lists")
        for name, total in totals.items():
            print(f"  {name} takes {total / reference:.2f} of what vLLM takes")


def hits(
    requests: list[TraceRequest],
    job: dict[str, Any],
    vllm: Vllm | None,
    policies: list[str],
    shares: list[float],
) -> None:
    """Print the hit rates, in 512-token blocks and in tokens, per pool size and policy."""
    size = job["block_size"]
    own = reusable(requests)
    inputs = sum(r.num_input for r in requests)
    print(
        f"\nhits: {len(requests)} requests, {own.blocks:,} hash blocks of {HASH_TOKENS}, "
        f"{inputs:,} prompt tokens, blocks of {size}"
    )
    print(
        f"  the trace's own reuse: {own.full / own.blocks:.2%} of its blocks whole "
        f"({own.any / own.blocks:.2%} with those cut short), "
        f"{own.full * HASH_TOKENS / inputs:.2%} of its tokens"
    )

    def line(label: str, result: dict[str, Any]) -> None:
        blocks, tokens = result["hit_blocks"] / own.blocks, result["hit_tokens"] / inputs
        seconds = sum(result["ns"].values()) / 1e9
        print(
            f"  {label:44} {blocks:8.2%} of blocks {tokens:8.2%} of tokens   {seconds:6.1f} s CPU", flush=True
        )

    unlimited = replay(requests, job["num_blocks"], size, policy=policies[0])
    line(f"unlimited ({unlimited['used']:,} blocks used), octavo", unlimited)
    if unlimited["hit_blocks"] != own.full:
        raise SystemExit(f"octavo found {unlimited['hit_blocks']:,} hash blocks, the trace has {own.full:,}")
    if vllm is not None:
        line(f"unlimited, vLLM {vllm.version}", vllm.replay(job))
    longest = max(-(-(r.num_input + r.num_output) // size) + 1 for r in requests)
    for share in shares:
        count = max(round(unlimited["used"] * share), longest)
        label = f"{share:.0%} ({count:,} blocks)"
        for policy in policies:
            line(f"{label}, octavo {policy}", replay(requests, count, size, policy=policy))
        if vllm is not None:
            line(f"{label}, vLLM LRU", vllm.replay({**job, "num_blocks": count}))


def profile(requests: list[TraceRequest], job: dict[str, Any], arrays: bool) -> None:
    """Print where the time of octavo's calls goes, under cProfile."""
    profiler = cProfile.Profile()
    profiler.enable()
    replay(requests, job["num_blocks"], job["block_size"], arrays=arrays, steps=job["decode_steps"])
    profiler.disable()
    pstats.Stats(profiler, stream=sys.stdout).sort_stats("tottime").print_stats(18)


def main() -> None:
    """Parse the command line and run what it asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, help="a Mooncake trace, one JSON object a line")
    parser.add_argument("--vllm", type=Path, metavar="VENV_DIR", help="environment of bench/vllm_env.sh")
    parser.add_argument("--mode", choices=("cost", "hits", "both", "profile"), default="both")
    parser.add_argument("--limit", type=int, default=1000, help="requests for cost and profile (1000)")
    parser.add_argument("--hit-limit", type=int, help="requests for hits (all)")
    parser.add_argument("--rounds", type=int, default=3, help="replays for cost; medians (3)")
    parser.add_argument("--block-size", type=int, default=COST_BLOCK, help="tokens, for cost (16)")
    parser.add_argument("--hit-block-size", type=int, default=HIT_BLOCK, help="tokens, for hits (256)")
    parser.add_argument("--decode-steps", action="store_true", help="output token by token, for cost")
    parser.add_argument("--policies", nargs="+", default=["LRU"], help="classes of octavo.kv, for hits")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.1, 0.01], help="pool sizes, for hits")
    parser.add_argument("--arrays", action="store_true", help="profile with int32 arrays, not lists")
    args = parser.parse_args()

    def job(requests: list[TraceRequest], limit: int | None, block_size: int) -> dict[str, Any]:
        return {
            "trace": str(args.trace.resolve()),
            "limit": limit,
            "num_blocks": unlimited_blocks(requests, block_size),
            "block_size": block_size,
            "decode_steps": args.decode_steps,
        }

    few = read_trace(args.trace, args.limit)
    if args.mode == "profile":
        profile(few, job(few, args.limit, args.block_size), args.arrays)
        return
    vllm = Vllm(args.vllm) if args.vllm else None
    if args.mode in ("cost", "both"):
        cost(few, job(few, args.limit, args.block_size), vllm, args.rounds)
    if args.mode in ("hits", "both"):
        many = read_trace(args.trace, args.hit_limit)
        hit_job = {**job(many, args.hit_limit, args.hit_block_size), "decode_steps": False}
        hits(many, hit_job, vllm, args.policies, args.shares)
    if vllm is not None:
        vllm.close()


if __name__ == "__main__":
    main()
