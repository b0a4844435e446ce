"""Tiny random checkpoints, and the decoder run on them through a shuffled paged cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from octavo.attention.interface import AttentionBackend, AttentionBatch, LayerCache
from octavo.attention.reference import ReferenceBackend
from octavo.models import Decoder
from octavo.models.build import build_decoder
from octavo.models.config import config_from_hf
from octavo.models.safetensors_loader import SafetensorsWeights

VOCAB = 160
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def tiny_model(family: str = "Llama", seed: int = 0, **options: Any) -> Any:
    """Make a transformers model with every parameter random: a bias of zero would hide its loss."""
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    return model


def save(model: Any, directory: Path, **changes: Any) -> Path:
    """Save the model; `changes` replace keys of config.json, None removes one."""
    model.save_pretrained(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        config[key] = value
        if value is None:
            del config[key]
    path.write_text(json.dumps(config))
    return directory


def decoder_from(directory: Path, dtype: torch.dtype = torch.float32, weights: str = "auto") -> Decoder:
    """Load the weights without a tokenizer."""
    config = config_from_hf(json.loads((directory / "config.json").read_text()))
    return build_decoder(config, SafetensorsWeights(directory), dtype, weights)


def prompt(length: int, seed: int = 1, vocab: int = VOCAB) -> list[int]:
    """Random token ids."""
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def expected_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """Logits of transformers at every position, float32 `[T, V]`."""
    return model(torch.tensor([list(ids)])).logits[0].float()


def paged_logits(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    chunk: int = 10_000,
    block_size: int = 4,
    *,
    backend: AttentionBackend | None = None,
    kv_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Logits at every position of each prompt, computed together in steps of `chunk` tokens each.

    Physical blocks are shuffled and the cache starts full of NaN.
    """
    config = decoder.config
    columns = max(-(-len(ids) // block_size) for ids in prompts)
    order = torch.randperm(len(prompts) * columns, generator=torch.Generator().manual_seed(2))
    tables = order.view(len(prompts), columns).to(torch.int32)
    stored = kv_dtype or decoder.dtype
    caches = [
        LayerCache.allocate(order.numel(), block_size, config.num_kv_heads, config.head_dim, stored)
        for _ in range(config.num_layers)
    ]
    for cache in caches:
        for tensor in cache.tensors():
            tensor.fill_(77 if tensor.dtype == torch.int8 else torch.nan)
    backend = backend or ReferenceBackend()
    out: list[list[Tensor]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), chunk):
        rows = [row for row, ids in enumerate(prompts) if len(ids) > start]
        positions = [torch.arange(start, min(start + chunk, len(prompts[row]))) for row in rows]
        slots = [
            tables[row][p // block_size].long() * block_size + p % block_size
            for row, p in zip(rows, positions)
        ]
        lengths = torch.tensor([0] + [len(p) for p in positions])
        batch = AttentionBatch(
            tables=tables[rows],
            query_start=lengths.cumsum(0).to(torch.int32),
            kv_len=torch.tensor([int(p[-1]) + 1 for p in positions], dtype=torch.int32),
            slots=torch.cat(slots),
        )
        tokens = torch.cat([torch.tensor(prompts[row])[p] for row, p in zip(rows, positions)])
        hidden = decoder.forward(tokens, torch.cat(positions), caches, batch, backend)
        logits = decoder.logits(hidden)
        for row, part in zip(rows, logits.split(lengths[1:].tolist())):
            out[row].append(part)
    return [torch.cat(parts) for parts in out]


def assert_same_logits(decoder: Decoder, model: Any, ids: Sequence[int], atol: float = 1e-4) -> None:
    """The decoder's logits equal transformers' at every position."""
    (found,) = paged_logits(decoder, [ids])
    wanted = expected_logits(model, ids)
    assert found.dtype == torch.float32
    assert found.shape == wanted.shape
    # Logits of these random models spread over tens of units, so agreement is not by smallness.
    assert wanted.std() > 1
    torch.testing.assert_close(found, wanted, atol=atol, rtol=1e-4)
