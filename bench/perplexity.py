"""Perplexity of each format of weights on real text, and how often its likeliest token is float32's.

    python -m bench.perplexity TEXT... [--tokens 50000] [--weights float32 auto int8 int4] [--model smollm2]
                               [--as-floats]

A format may name the KV cache's too, as in auto/bfloat16; without, keys and values are kept in float32.
TEXT: files, or directories whose .txt and .jsonl files are taken in order; of a .jsonl line every string in
it. The text is cut into windows of --window tokens, each scored from its second token on with a fresh cache.
--as-floats takes the numbers of a GGUF file as a checkpoint of floats would hold them, so that int8 and int4
round every matrix; without it matrices of four bits stay as they are.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the commands do, before torch is imported

import torch

from octavo.attention import AttentionBatch, LayerCache, make_backend
from octavo.engine.config import STORED
from octavo.models import LoadedModel, load_model
from octavo.models.build import build_decoder
from octavo.models.gguf_file import GgufFile
from octavo.models.gguf_loader import GgufWeights
from octavo.ops.packing import StoredMatrix


class Floats(GgufWeights):
    """A GGUF file's weights as a checkpoint of floats would hold them."""

    def type_name(self, name: str) -> str:
        """Always float32."""
        return "F32"

    def stored(self, name: str) -> StoredMatrix:
        """Dequantised."""
        return StoredMatrix("float32", self.read(name).numpy())


def load(name: str, weights: str, as_floats: bool) -> LoadedModel:
    """The model with weights of a format."""
    model = load_model(name, weights=weights)
    if not as_floats:
        return model
    source = Floats(GgufFile(model.path), model.config)
    return dataclasses.replace(model, decoder=build_decoder(model.config, source, torch.float32, weights))


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
def score(model: LoadedModel, ids: list[int], window: int, kv_dtype: str) -> tuple[float, torch.Tensor]:
    """Sum of negative log likelihoods, and the likeliest token at each scored position."""
    config, backend, block = model.config, make_backend(), 16
    blocks = -(-window // block)
    caches = [
        LayerCache.allocate(blocks, block, config.num_kv_heads, config.head_dim, STORED[kv_dtype])
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
    parser.add_argument("--as-floats", action="store_true")
    args = parser.parse_args()
    base: tuple[float, torch.Tensor] | None = None
    for chosen in args.weights:
        weights, _, kv_dtype = chosen.partition("/")
        model = load(args.model, weights, args.as_floats)
        ids = token_ids(model, args.text, args.tokens)
        loss, best = score(model, ids, args.window, kv_dtype or "float32")
        perplexity = math.exp(loss / len(best))
        base = base or (perplexity, best)
        same = float((best == base[1]).float().mean())
        change = f"{perplexity / base[0] - 1:+.3%} of {args.weights[0]}"
        print(
            f"{chosen:14} perplexity {perplexity:9.4f} ({change}), same likeliest token {same:.2%}",
            flush=True,
        )
        print(f"               {len(best)} tokens scored; {model.decoder.weights_note}", flush=True)


if __name__ == "__main__":
    main()
