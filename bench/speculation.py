"""What guessing from a sequence's own text is worth: wall time and tokens per step, on against off.

    python -m bench.speculation TEXTS.jsonl [--count 8] [--output 96] [--company 1]
    python -m bench.speculation --workload WORKLOADS.json W2 [--limit 64]

TEXTS has lines with "category" and "turns"; those of the category "summarization" are taken, each twice:
as it is, and as the task of repeating its text with a small change. Greedy, on the default model. On and
off take turns in one process, so that a busy machine slows both. Wall times are medians over --rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from octavo import LLM, SamplingParams
from octavo.engine import Engine, EngineConfig
from octavo.models import load_model

Work = tuple[list[list[int]], list[SamplingParams]]


def text_work(path: Path, llm: LLM, count: int, output: int) -> dict[str, Work]:
    """The two sets, summarise and edit."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    tasks = [line["turns"][0] for line in lines if line["category"] == "summarization"][:count]
    edits = [
        "Repeat the following text word for word, but write the last word of it in capital letters:\n"
        + " ".join(task.split(":", 1)[-1].split()[:80])
        for task in tasks
    ]
    params = SamplingParams(temperature=0, max_tokens=output)
    encode = llm.engine.tokenizer.encode_chat
    return {
        name: ([encode([{"role": "user", "content": text}]) for text in texts], [params] * len(texts))
        for name, texts in (("summarise", tasks), ("edit", edits))
    }


def recorded_work(path: Path, name: str, limit: int) -> dict[str, Work]:
    """A recorded workload, with exact output lengths."""
    requests = json.loads(path.read_text())[name]["requests"][:limit]
    params = [SamplingParams(temperature=0, max_tokens=r["max_tokens"], ignore_eos=True) for r in requests]
    return {name: ([r["prompt"] for r in requests], params)}


def run(llm: LLM, work: Work, company: int) -> tuple[float, float, int, int, list[list[int]]]:
    """Seconds, output tokens per sequence and step, guessed, accepted, and the tokens."""
    prompts, params = work
    engine, computed = llm.engine, 0
    outputs, guessed, accepted, steps = [], 0, 0, 0
    start = time.perf_counter()
    for first in range(0, len(prompts), company):
        chunk = slice(first, first + company)
        for output in llm.generate(prompts[chunk], params[chunk], use_tqdm=False):
            tokens = output.outputs[0].token_ids
            outputs.append(tokens)
            guessed, accepted = guessed + output.num_guessed, accepted + output.num_accepted
            computed += len(tokens)
            steps += len(tokens) - output.num_accepted
    seconds = time.perf_counter() - start
    assert not engine.has_work
    return seconds, computed / steps, guessed, accepted, outputs


def main() -> None:
    """Print a line per set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", type=Path, nargs="?")
    parser.add_argument("--workload", nargs=2, metavar=("FILE", "NAME"))
    parser.add_argument("--limit", type=int, default=64, help="requests of the workload")
    parser.add_argument("--count", type=int, default=8, help="texts of each set")
    parser.add_argument("--output", type=int, default=96)
    parser.add_argument("--company", type=int, default=1, help="sequences that run together")
    parser.add_argument("--guesses", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    model = load_model("smollm2")
    llms = {}
    for name, guesses in (("off", 0), ("on", args.guesses)):
        llm = LLM.__new__(LLM)
        llm.engine = Engine(model, EngineConfig(speculate=guesses, prefix_caching=False))
        llms[name] = llm
    if args.workload:
        sets = recorded_work(Path(args.workload[0]), args.workload[1], args.limit)
        company = args.limit
    else:
        sets = text_work(args.texts, llms["off"], args.count, args.output)
        company = args.company
    for name, work in sets.items():
        times: dict[str, list[float]] = {"off": [], "on": []}
        found = {}
        for number in range(args.rounds):
            for which in ("off", "on") if number % 2 == 0 else ("on", "off"):
                found[which] = run(llms[which], work, company)
                times[which].append(found[which][0])
        off, on = statistics.median(times["off"]), statistics.median(times["on"])
        _, rate, guessed, accepted, tokens = found["on"]
        same = sum(a == b for a, b in zip(tokens, found["off"][4], strict=True))
        print(
            f"{name}, {company} together: off {off:.2f} s, on {on:.2f} s, {off / on:.2f} times as fast; "
            f"{rate:.2f} tokens a step, {accepted} of {guessed} guesses came true; "
            f"{same} of {len(tokens)} outputs the same",
            flush=True,
        )


if __name__ == "__main__":
    main()
