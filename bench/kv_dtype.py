"""What a narrower KV cache changes in a model's answers, against the same weights with a float32 cache.

    python -m bench.kv_dtype [--dtypes float16 bfloat16 int8] [--prompts FILE.jsonl] [--tokens 300]

Greedy: each prompt is answered with each cache, all at once, end-of-text ignored. Agreement is the share of
tokens equal at the same place, and where the first difference lies (one near-tie is enough, and everything
after it is another text). "float32, 7 at a time" is a control: the same cache in other batches, so what
rounding in other orders does by itself.

Forced: the float32 answers are fed to the model with each cache, and at every one of their places the
distributions are compared: difference of the log probability of the token that float32 chose, and the KL
divergence from float32's distribution. So one difference does not lead to others.

Prompts are the first turns of a file of {"turns": [...]} or {"prompt": ...} lines, spread evenly over it, as
chats; without a file the built-in list below.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from octavo import SamplingParams
from octavo.attention import AttentionBatch, LayerCache, make_backend
from octavo.engine import Engine, EngineConfig
from octavo.engine.config import STORED
from octavo.engine.llm import LLM
from octavo.models import LoadedModel, load_model

BUILT_IN = (
    "Why is the sea salt?",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain how a suspension bridge carries its load.",
    "List ten uses for old newspapers.",
    "What is the difference between weather and climate?",
    "Write a polite letter that declines an invitation to a wedding.",
    "How do vaccines work?",
    "Describe the life cycle of a butterfly for a ten-year-old.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "What were the causes of the First World War?",
    "Give me a recipe for vegetable soup for four people.",
    "Compare trains and aeroplanes as ways to travel 800 km.",
    "A shop sells pens at 3 for 2 euros. How much do 18 pens cost? Show each step.",
    "Write a poem about the first snow of the year.",
    "How does a refrigerator keep food cold?",
    "Name the planets of the solar system and one fact about each.",
    "Summarise the story of Romeo and Juliet in one paragraph.",
    "What should I think about before I adopt a dog?",
    "Translate into French, and explain the grammar: The book that you lent me was very good.",
    "Describe a city of the year 2200.",
)
CONTROL = "float32, 7 at a time"


@dataclass(frozen=True, slots=True)
class Forced:
    """Differences over all forced places: of the chosen token's log probability, and KL in nats."""

    largest: float
    mean: float
    divergence: float
    same_best: float


def answers(
    model: LoadedModel, prompts: list[list[int]], tokens: int, kv_dtype: str, at_once: int
) -> list[list[int]]:
    """Greedy answers of `tokens` tokens each."""
    llm = LLM.__new__(LLM)
    llm.engine = Engine(model, EngineConfig(kv_dtype=kv_dtype, kv_memory="1GiB", max_num_seqs=at_once))
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@torch.inference_mode()
def forced_logprobs(model: LoadedModel, prompt: list[int], answer: list[int], dtype: torch.dtype) -> Tensor:
    """Log probabilities `[answer, V]` at each place of `answer`, with K and V stored in `dtype`."""
    config, ids = model.config, prompt + answer[:-1]
    blocks = -(-len(ids) // 16)
    caches = [
        LayerCache.allocate(blocks, 16, config.num_kv_heads, config.head_dim, dtype)
        for _ in range(config.num_layers)
    ]
    places = torch.arange(len(ids))
    batch = AttentionBatch(
        tables=torch.arange(blocks, dtype=torch.int32)[None],
        query_start=torch.tensor([0, len(ids)], dtype=torch.int32),
        kv_len=torch.tensor([len(ids)], dtype=torch.int32),
        slots=places,
    )
    hidden = model.decoder.forward(torch.tensor(ids), places, caches, batch, make_backend())
    return model.decoder.logits(hidden[len(prompt) - 1 :]).log_softmax(-1)


def compare(
    model: LoadedModel, prompts: list[list[int]], texts: list[list[int]], dtypes: list[str]
) -> dict[str, Forced]:
    """Feed the float32 answers with each cache, one prompt at a time."""
    found: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {dtype: [] for dtype in dtypes}
    for prompt, text in zip(prompts, texts, strict=True):
        exact = forced_logprobs(model, prompt, text, torch.float32)
        chosen = torch.tensor(text)[:, None]
        for dtype in dtypes:
            near = forced_logprobs(model, prompt, text, STORED[dtype])
            found[dtype].append(
                (
                    (near.gather(1, chosen) - exact.gather(1, chosen)).abs().flatten(),
                    (exact.exp() * (exact - near)).sum(-1),
                    near.argmax(-1) == exact.argmax(-1),
                )
            )
    result = {}
    for dtype, parts in found.items():
        change, divergence, best = (torch.cat(each) for each in zip(*parts, strict=True))
        result[dtype] = Forced(
            float(change.max()), float(change.mean()), float(divergence.mean()), float(best.float().mean())
        )
    return result


def first_difference(a: list[int], b: list[int]) -> int:
    """Tokens before the first that differs; all of them where none does."""
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def read_prompts(path: Path | None, count: int) -> list[str]:
    """`count` prompts, spread evenly over the file or the built-in list."""
    texts = list(BUILT_IN)
    if path is not None:
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        texts = [line["turns"][0] if "turns" in line else line["prompt"] for line in lines]
    return [texts[number * len(texts) // count] for number in range(min(count, len(texts)))]


def main() -> None:
    """Parse the command line, run, print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtypes", nargs="*", default=["float16", "bfloat16", "int8"], choices=list(STORED))
    parser.add_argument("--prompts", type=Path, help="a file of JSON lines; the built-in list without")
    parser.add_argument("--count", type=int, default=20, help="prompts")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of each answer")
    parser.add_argument("--control", action="store_true", help="add float32 in other batches")
    parser.add_argument("--skip-greedy", action="store_true", help="only the forced comparison")
    args = parser.parse_args()
    model = load_model(args.model)
    texts = read_prompts(args.prompts, args.count)
    prompts = [model.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
    begin = time.perf_counter()
    base = answers(model, prompts, args.tokens, "float32", len(prompts))
    print(
        f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts))} tokens", flush=True
    )
    if not args.skip_greedy:
        print("cache                 equal tokens  answers equal  first difference: median  least")
        runs = [(dtype, dtype, len(prompts)) for dtype in args.dtypes]
        for name, dtype, at_once in runs + ([(CONTROL, "float32", 7)] if args.control else []):
            other = answers(model, prompts, args.tokens, dtype, at_once)
            firsts = [first_difference(a, b) for a, b in zip(base, other, strict=True)]
            equal = sum(x == y for a, b in zip(base, other, strict=True) for x, y in zip(a, b, strict=True))
            print(
                f"{name:21} {equal / (len(prompts) * args.tokens):12.1%} {firsts.count(args.tokens):14} "
                f"{statistics.median(firsts):25.0f} {min(firsts):6}",
                flush=True,
            )
    print("cache       largest |d logprob|      mean   mean KL  same best token")
    for dtype, forced in compare(model, prompts, base, args.dtypes).items():
        print(
            f"{dtype:10} {forced.largest:20.4f} {forced.mean:9.5f} {forced.divergence:9.2e} "
            f"{forced.same_best:16.2%}"
        )
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
