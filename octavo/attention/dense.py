"""Attention of one sequence, written to be read: the arithmetic that every backend must agree with.

    query [Q, Hq, D]   at positions first_query .. first_query + Q - 1
    key   [L, Hkv, D]  at positions first_key   .. first_key + L - 1

    score = q.k * scale  ->  softcap  ->  + alibi  ->  mask  ->  softmax (with the sink)  ->  . V

Owns the order of operations and `dense_reference`, the oracle over a paged cache. Nothing here is
tuned: one sequence at a time, all its scores in memory at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.attention.interface import AttentionBatch, LayerCache


@dataclass(frozen=True, slots=True)
class Rules:
    """What a model asks of attention; see `AttentionBackend.paged_attention` for each."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [Hq]
    alibi: Tensor | None = None  # [Hq]


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, rules: Rules, first_query: int, first_key: int = 0
) -> tuple[Tensor, Tensor]:
    """Attend from query `[Q, Hq, D]` to key and value `[L, Hkv, D]`, all in one dtype.

    Returns out `[Q, Hq, D]` and lse `[Q, Hq]` in that dtype. Every query must see at least one key.
    Costs Q * L * Hq scores of memory.
    """
    num_queries, num_heads, head_dim = query.shape
    num_keys, num_kv_heads, _ = key.shape
    group = num_heads // num_kv_heads
    grouped = (query * rules.scale).view(num_queries, num_kv_heads, group, head_dim)
    scores = torch.einsum("qhgd,khd->hgqk", grouped, key)
    scores = scores.reshape(num_heads, num_queries, num_keys)
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    query_at = torch.arange(first_query, first_query + num_queries, device=query.device)
    key_at = torch.arange(first_key, first_key + num_keys, device=query.device)
    distance = key_at[None, :] - query_at[:, None]  # [Q, L], 0 at the query itself
    if rules.alibi is not None:
        scores = scores + rules.alibi.to(scores.dtype)[:, None, None] * distance
    hidden = distance > 0
    if rules.window is not None:
        hidden |= distance <= -rules.window
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)  # [Hq, Q]
    if rules.sinks is not None:
        lse = torch.logaddexp(lse, rules.sinks.to(lse.dtype)[:, None])
    weights = torch.exp(scores - lse[..., None])
    weights = weights.view(num_kv_heads, group, num_queries, num_keys)
    out = torch.einsum("hgqk,khd->qhgd", weights, value)
    return out.reshape(num_queries, num_heads, head_dim), lse.T


def dense_reference(
    query: Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Compute `paged_attention` sequence by sequence: the oracle for every backend.

    Returns out `[T, Hq, D]` and lse `[T, Hq]`, both in `compute_dtype`. Reads only the slots below
    kv_len. Slow; for tests.
    """
    rules = Rules(scale, window, softcap, sinks, alibi)
    out = torch.empty(query.shape, dtype=compute_dtype, device=query.device)
    lse = torch.empty(query.shape[:2], dtype=compute_dtype, device=query.device)
    starts, kv_lens = batch.query_start.tolist(), batch.kv_len.tolist()
    for row, (begin, end, kv_len) in enumerate(zip(starts[:-1], starts[1:], kv_lens)):
        if begin == end:
            continue
        positions = torch.arange(kv_len, device=query.device)
        blocks = batch.tables[row, positions // cache.block_size].long()
        offsets = positions % cache.block_size
        key = cache.key[blocks, offsets].to(compute_dtype)  # [kv_len, Hkv, D]
        value = cache.value[blocks, offsets].to(compute_dtype)
        if cache.key_scale is not None and cache.value_scale is not None:
            key = key * cache.key_scale[blocks, offsets].to(compute_dtype)[..., None]
            value = value * cache.value_scale[blocks, offsets].to(compute_dtype)[..., None]
        first_query = kv_len - (end - begin)
        out[begin:end], lse[begin:end] = dense_attention(
            query[begin:end].to(compute_dtype), key, value, rules, first_query
        )
    return out, lse
