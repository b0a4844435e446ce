"""The seam between a model and the kernels that follow a block table.

    LayerCache.key    [num_blocks, block_size, Hkv, D]      one pair per layer, same block ids in all
    LayerCache.value  [num_blocks, block_size, Hkv, D]

    AttentionBatch, for R sequences with T new tokens between them in one ragged call:
        query_start   0        3   4              9      sequence r owns rows query_start[r]:query_start[r+1]
        rows          q q q    q   q q q q q                of query, key, value and slots
        tables[r]     physical block ids by logical block number, padded with -1
        kv_len[r]     tokens that sequence r has once this step's are written; its last query
                      row sits at position kv_len[r] - 1

Owns the data classes and the backend's signature; computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    """K and V of one layer, `[num_blocks, block_size, Hkv, D]` each, in the stored dtype."""

    key: Tensor
    value: Tensor

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool that this cache backs."""
        return self.key.shape[0]

    @property
    def block_size(self) -> int:
        """Token slots per block."""
        return self.key.shape[1]

    @staticmethod
    def allocate(
        num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> LayerCache:
        """Allocate an uninitialised cache: slots that no sequence wrote are never read."""
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        return LayerCache(torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype))


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the new tokens of one step lie; the same for every layer. See the module's drawing.

    tables `[R, M]` int32, query_start `[R+1]` int32, kv_len `[R]` int32, slots `[T]` int64.
    """

    tables: Tensor
    query_start: Tensor
    kv_len: Tensor
    slots: Tensor


class AttentionBackend(Protocol):
    """What a kernel package provides."""

    name: str

    def write_kv(self, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """Store key and value `[T, Hkv, D]` at slots `[T]` (block * block_size + offset)."""

    def paged_attention(
        self,
        query: Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Causal attention of query `[T, Hq, D]` over the cached tokens of each row's sequence.

        Query head h reads K/V head h // (Hq // Hkv). Scores are q.k * scale, then
        softcap * tanh(score / softcap), then + alibi[h] * (key position - query position).
        window: a query at position p sees keys p - window + 1 .. p. sinks `[Hq]`: one more logit
        per head that takes probability and adds nothing. Returns out `[T, Hq, D]` in the query's
        dtype and, when asked, lse `[T, Hq]` float32 (natural log, sink included).
        """

    def copy_blocks(self, cache: LayerCache, copies: Sequence[tuple[int, int, int]]) -> None:
        """Apply (src block, dst block, leading slots) copies in order, K and V."""
