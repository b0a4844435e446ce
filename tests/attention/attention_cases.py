"""Paged batches to test with, and attention by loops over queries and heads in float64.

Shares no code with the package: `naive_attention` works on each sequence's own K and V, before they
were ever put into blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from octavo.attention import AttentionBatch, LayerCache

Shape = tuple[int, int]  # (queries, kv_len) of one sequence


@dataclass
class Case:
    """One ragged batch, its cache, and every sequence's keys and values in order of position."""

    query: torch.Tensor
    keys: list[torch.Tensor]  # [kv_len, Hkv, D] each
    values: list[torch.Tensor]
    cache: LayerCache
    batch: AttentionBatch
    shapes: list[Shape]


def make_batch(shapes: list[Shape], block_size: int, physical: list[int]) -> AttentionBatch:
    """A batch whose sequences take their blocks from `physical` in turn."""
    ids = iter(physical)
    columns = max(-(-kv_len // block_size) for _, kv_len in shapes) + 1  # one more, always padding
    tables = torch.full((len(shapes), columns), -1, dtype=torch.int32)
    slots, starts = [], [0]
    for row, (queries, kv_len) in enumerate(shapes):
        for logical in range(-(-kv_len // block_size)):
            tables[row, logical] = next(ids)
        for position in range(kv_len - queries, kv_len):
            block = int(tables[row, position // block_size])
            slots.append(block * block_size + position % block_size)
        starts.append(starts[-1] + queries)
    return AttentionBatch(
        tables=tables,
        query_start=torch.tensor(starts, dtype=torch.int32),
        kv_len=torch.tensor([kv_len for _, kv_len in shapes], dtype=torch.int32),
        slots=torch.tensor(slots, dtype=torch.int64),
    )


def make_case(
    shapes: list[Shape],
    *,
    block_size: int,
    group: int,
    head_dim: int,
    num_kv_heads: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    fill: float = math.nan,
    order: str = "shuffled",
) -> Case:
    """A case with random contents; every slot that no sequence owns holds `fill`.

    `order` permutes physical block ids and nothing else: contents depend on `seed` alone.
    """
    generator = torch.Generator().manual_seed(seed)
    needed = sum(-(-kv_len // block_size) for _, kv_len in shapes)
    num_blocks = needed + 3
    physical = list(range(num_blocks))
    if order == "shuffled":
        physical = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed + 1)).tolist()
    elif order == "reversed":
        physical.reverse()
    batch = make_batch(shapes, block_size, physical)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    query = random(sum(queries for queries, _ in shapes), num_kv_heads * group, head_dim)
    keys = [random(kv_len, num_kv_heads, head_dim).to(dtype) for _, kv_len in shapes]
    values = [random(kv_len, num_kv_heads, head_dim).to(dtype) for _, kv_len in shapes]
    cache = LayerCache.allocate(num_blocks, block_size, num_kv_heads, head_dim, dtype)
    cache.key.fill_(fill)
    cache.value.fill_(fill)
    for row, (_, kv_len) in enumerate(shapes):
        for position in range(kv_len):
            block, offset = int(batch.tables[row, position // block_size]), position % block_size
            cache.key[block, offset] = keys[row][position]
            cache.value[block, offset] = values[row][position]
    return Case(query, keys, values, cache, batch, shapes)


def naive_attention(
    case: Case,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, Hq, D] and lse [T, Hq] in float64, one query of one head at a time."""
    query = case.query.double().numpy()
    total, num_heads, head_dim = query.shape
    out, lse = np.zeros((total, num_heads, head_dim)), np.zeros((total, num_heads))
    token = 0
    for row, (queries, kv_len) in enumerate(case.shapes):
        keys, values = case.keys[row].double().numpy(), case.values[row].double().numpy()
        group = num_heads // keys.shape[1]
        for position in range(kv_len - queries, kv_len):
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(num_heads):
                scores = keys[first : position + 1, head // group] @ query[token, head] * scale
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                if alibi is not None:
                    scores = scores + float(alibi[head]) * (np.arange(first, position + 1) - position)
                logits = scores if sinks is None else np.append(scores, float(sinks[head]))
                top = logits.max()
                total_weight = np.exp(logits - top).sum()
                lse[token, head] = top + math.log(total_weight)
                weights = np.exp(scores - top) / total_weight
                out[token, head] = weights @ values[first : position + 1, head // group]
            token += 1
    return torch.from_numpy(out), torch.from_numpy(lse)
