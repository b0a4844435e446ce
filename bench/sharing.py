"""How many KV blocks forks save: parallel samples and beams against the same sequences without sharing.

    python -m bench.sharing PROMPTS [--mode samples|beams] [--widths 2 4 6] [--first 0] [--count 100]
                            [--longest 40] [--prompt 161] [--output 58]

PROMPTS is a .jsonl file whose lines have "prompt" or "turns" (the first is taken), or a .json list whose
items have "input" (a whole chat). Taken are those of at most --longest tokens, the last --prompt tokens of
each, without a chat template; each sequence gets exactly --output tokens. After each step the blocks that
are held are compared with what the running sequences would hold if each had its own: the saving is one minus
the ratio of the two sums. The sums are printed too, so that runs over parts of the prompts (--first,
--count) can be added up. The prefix cache is off, so that nothing but the sharing within a request counts.

Beams are those of the default model. What samples share follows from lengths alone, so for them the
scheduler's plans are completed with arbitrary tokens, and no model runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

from octavo import LLM, SamplingParams
from octavo.engine.engine import Engine
from octavo.kv import Pool
from octavo.models import Tokenizer, load_model
from octavo.sched import Request, Scheduler, SchedulerConfig

BLOCK_SIZE, NUM_BLOCKS, MAX_SEQS = 16, 5000, 96


def prompts_of(path: Path, tokenizer: Tokenizer, longest: int, limit: int) -> list[list[int]]:
    """Token ids of the prompts of at most `longest` tokens, the last `limit` of each."""
    if path.suffix == ".jsonl":
        items = [json.loads(line) for line in path.read_text().splitlines()]
        texts = [item["prompt"] if "prompt" in item else item["turns"][0] for item in items]
    else:
        texts = [item["input"] for item in json.loads(path.read_text())]
    ids = [tokenizer.encode(text) for text in texts]
    return [tokens[-limit:] for tokens in ids if len(tokens) <= longest]


class Counter:
    """Blocks held, and blocks that the running sequences would hold without sharing, summed over steps."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.held = self.alone = 0
        self._scheduler = scheduler

    def count(self) -> None:
        """Add what is held now."""
        pool = self._scheduler.pool
        self.held += pool.stats().held
        for branch in self._scheduler.running:
            if branch.kv is not None:
                self.alone += branch.width * pool.blocks_for(branch.kv.length)


def run_samples(prompts: list[list[int]], width: int, output: int) -> Counter:
    """Every request forks once its prompt is computed; its samples grow to the end."""
    pool = Pool(NUM_BLOCKS, BLOCK_SIZE, prefix_caching=False)
    config = SchedulerConfig(max_num_seqs=MAX_SEQS, max_batched_tokens=2048, max_model_len=8192)
    scheduler = Scheduler(pool, config)
    counter = Counter(scheduler)
    for prompt in prompts:
        scheduler.submit(Request(prompt, output, width))
    while scheduler.has_work:
        plan = scheduler.plan()
        grown = scheduler.complete(plan, [[0] * entry.num_samples for entry in plan.entries])
        for branch in grown:
            if branch.num_output == output:
                scheduler.finish(branch)
        counter.count()
    return counter


def run_beams(engine: Engine, prompts: list[list[int]], width: int, output: int) -> Counter:
    """Beam searches of exactly `output` tokens."""
    params = SamplingParams(temperature=0, beam_width=width, max_tokens=output, ignore_eos=True)
    counter = Counter(engine.scheduler)
    for prompt in prompts:
        engine.add_request(prompt, params)
    while engine.has_work:
        engine.step()
        counter.count()
    return counter


def main() -> None:
    """Print a line per width."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--mode", choices=("samples", "beams"), default="samples")
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 6])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--longest", type=int, default=1_000_000)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=64)
    args = parser.parse_args()
    run: Callable[[list[list[int]], int], Counter]
    if args.mode == "beams":
        engine = LLM(
            prefix_caching=False, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_seqs=MAX_SEQS
        ).engine
        tokenizer = engine.tokenizer

        def run(prompts: list[list[int]], width: int) -> Counter:
            return run_beams(engine, prompts, width, args.output)
    else:
        tokenizer = load_model("smollm2").tokenizer

        def run(prompts: list[list[int]], width: int) -> Counter:
            return run_samples(prompts, width, args.output)

    prompts = prompts_of(args.prompts, tokenizer, args.longest, args.prompt)
    prompts = prompts[args.first : args.first + args.count]
    mean = sum(map(len, prompts)) / len(prompts)
    print(f"{args.mode}, {len(prompts)} prompts of {mean:.0f} tokens on average, {args.output} more")
    for width in args.widths:
        start = time.perf_counter()
        found = run(prompts, width)
        print(
            f"{width:3}: {1 - found.held / found.alone:6.1%} of the blocks saved "
            f"({found.held} held, {found.alone} without sharing; {time.perf_counter() - start:.0f} s)",
            flush=True,
        )


if __name__ == "__main__":
    main()
