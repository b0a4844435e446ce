"""Perplexity of each format of weights on real text, and how often its likeliest token is float32's.

    python -m bench.perplexity TEXT... [--tokens 50000] [--weights float32 auto int8 int4] [--model smollm2]

TEXT: files, or directories whose .txt and .jsonl files are taken in order; of a .jsonl line every string in
it. The text is cut into windows of --window tokens, each scored from its second token on with a fresh cache.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the commands do, before torch is imported

import torch

from octavo.attention import AttentionBatch, LayerCache, make_backend
from octavo.models import LoadedModel, load_model


def strings_of(value: Any) -> Iterator[str]:
    """Every string in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings_of(inner)


def read_text(paths: list[Path]) -> Iterator[str]:
    """Pieces of text from files and directories."""
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix == ".jsonl":
                for line in file.read_text(encoding="utf-8").splitlines():
                    yield from strings_of(json.loads(line))
            elif file.suffix == ".txt":
                yield file.read_text(encoding="utf-8")


def token_ids(model: LoadedModel, paths: list[Path], count: int) -> list[int]:
    """The first `count` tokens of the text."""
    ids: list[int] = []
    for piece in read_text(paths):
        ids += model.tokenizer.encode(piece + "\n")
        if len(ids) >= count:
            return ids[:count]
    raise SystemExit(f"the text has {len(ids)} tokens, fewer than {count}")


@torch.inference_mode()
def score(model: LoadedModel, ids: list[int], window: int) -> tuple[float, torch.Tensor]:
    """Sum of negative log likelihoods, and the likeliest token at each scored position."""
    config, backend, block = model.config, make_backend(), 16
    blocks = -(-window // block)
    caches = [
        LayerCache.allocate(blocks, block, config.num_kv_heads, config.head_dim, torch.float32)
        for _ in range(config.num_layers)
    ]
    table = torch.arange(blocks, dtype=torch.int32)[None]
    total, best = 0.0, []
    for start in range(0, len(ids), window):
        part = torch.tensor(ids[start : start + window])
        count = len(part)
        batch = AttentionBatch(
            tables=table,
            query_start=torch.tensor([0, count], dtype=torch.int32),
            kv_len=torch.tensor([count], dtype=torch.int32),
            slots=torch.arange(count),
        )
        hidden = model.decoder.forward(part, torch.arange(count), caches, batch, backend)
        logits = model.decoder.logits(hidden[:-1])
        total += float(torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum"))
        best.append(logits.argmax(-1))
    return total, torch.cat(best)


def main() -> None:
    """Parse the command line, score each format, print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--weights", nargs="+", default=["float32", "auto", "int8", "int4"])
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    base: tuple[float, torch.Tensor] | None = None
    for weights in args.weights:
        model = load_model(args.model, weights=weights)
        ids = token_ids(model, args.text, args.tokens)
        loss, best = score(model, ids, args.window)
        perplexity = math.exp(loss / len(best))
        base = base or (perplexity, best)
        same = float((best == base[1]).float().mean())
        change = f"{perplexity / base[0] - 1:+.3%} of {args.weights[0]}"
        print(
            f"{weights:8} perplexity {perplexity:9.4f} ({change}), same likeliest token {same:.2%}",
            flush=True,
        )
        print(f"         {len(best)} tokens scored; {model.decoder.weights_note}", flush=True)


if __name__ == "__main__":
    main()
