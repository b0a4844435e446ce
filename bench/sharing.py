"""How many KV blocks forks save: parallel samples and beams against the same sequences without sharing.

    python -m bench.sharing PROMPTS [--mode samples|beams] [--widths 2 4 6] [--count 50] [--output 64]

PROMPTS is a .jsonl file whose lines have "turns" (the first is taken) or a .json list whose items have
"input" (a whole chat). Each prompt is chat-formatted where it is one turn, cut to --prompt tokens, and run
with the default model. After each step the blocks that are held are compared with what the running
sequences would hold if each had its own: the saving is one minus the ratio of the two sums. The prefix
cache is off, so that nothing but the sharing within a request counts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from octavo import LLM, SamplingParams


def prompts_of(path: Path, llm: LLM, count: int, limit: int) -> list[list[int]]:
    """Token ids of the first `count` prompts, the last `limit` tokens of each."""
    tokenizer = llm.engine.tokenizer
    if path.suffix == ".jsonl":
        turns = [json.loads(line)["turns"][0] for line in path.read_text().splitlines()]
        ids = [tokenizer.encode_chat([{"role": "user", "content": turn}]) for turn in turns[:count]]
    else:
        ids = [tokenizer.encode(item["input"]) for item in json.loads(path.read_text())[:count]]
    return [tokens[-limit:] for tokens in ids]


def saving(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> tuple[float, int]:
    """The share of blocks saved, and preemptions."""
    engine, size = llm.engine, llm.engine.pool.block_size
    before = engine.scheduler.stats.preemptions
    for prompt in prompts:
        engine.add_request(prompt, params)
    held = alone = 0
    while engine.has_work:
        engine.step()
        held += engine.pool.stats().held
        for branch in engine.scheduler.running:
            if branch.kv is not None:
                width = branch.request.n if branch.request.unforked else 1
                alone += width * -(-branch.kv.length // size)
    return 1 - held / alone, engine.scheduler.stats.preemptions - before


def main() -> None:
    """Print a line per width."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--mode", choices=("samples", "beams"), default="samples")
    parser.add_argument("--widths", type=int, nargs="+", default=[2, 4, 6])
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=64)
    args = parser.parse_args()
    llm = LLM(prefix_caching=False, kv_memory="4GiB", block_size=16, max_num_seqs=96)
    prompts = prompts_of(args.prompts, llm, args.count, args.prompt)
    mean = sum(map(len, prompts)) / len(prompts)
    print(f"{args.mode}, {len(prompts)} prompts of {mean:.0f} tokens on average, up to {args.output} more")
    for width in args.widths:
        if args.mode == "beams":
            params = SamplingParams(temperature=0, beam_width=width, max_tokens=args.output)
        else:
            params = SamplingParams(n=width, temperature=1.0, seed=1, max_tokens=args.output)
        saved, preemptions = saving(llm, prompts, params)
        print(f"{width:3}: {saved:6.1%} of the blocks saved ({preemptions} preemptions)", flush=True)


if __name__ == "__main__":
    main()
