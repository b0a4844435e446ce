"""The seam between a model and the kernels that follow a block table.

    LayerCache.key    [num_blocks, block_size, Hkv, D]      one pair per layer, same block ids in all
    LayerCache.value  [num_blocks, block_size, Hkv, D]
    .key_scale, .value_scale  [num_blocks, block_size, Hkv]  float32, where K and V are int8; else None

    in memory, as rows     key and value, C order           any backend
              in lanes     storage [num_blocks, bytes]:     for vectors; key, value and scales are views of it
                           K [Hkv, D, block_size] | V [Hkv, block_size, D]
                           | K scales [Hkv, block_size] | V scales, where there are any

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
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.attention.pages import uninitialised
from octavo.attention.rotate import rotate_in_place


@dataclass(frozen=True, slots=True)
class LayerCache:
    """K and V of one layer, `[num_blocks, block_size, Hkv, D]` each, in the stored dtype.

    In int8, K is key * key_scale and V is value * value_scale, with a scale per token and head,
    `[num_blocks, block_size, Hkv]` float32; in other dtypes the scales are None. storage: where the
    cache lies in lanes, the one tensor `[num_blocks, bytes of a block]` uint8 that holds it all.
    `derived` is a backend's own, for what it works out from these tensors once.
    """

    key: Tensor
    value: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    storage: Tensor | None = None
    derived: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool that this cache backs."""
        return self.key.shape[0]

    @property
    def block_size(self) -> int:
        """Token slots per block."""
        return self.key.shape[1]

    def tensors(self) -> tuple[Tensor, ...]:
        """Key and value, then the scales where there are any; a block is dim 0 of each."""
        if self.key_scale is None or self.value_scale is None:
            return self.key, self.value
        return self.key, self.value, self.key_scale, self.value_scale

    def stretches(self) -> tuple[Tensor, ...]:
        """The tensors that hold a block's bytes in one stretch each, block by block: `[num_blocks, ...]`."""
        return self.tensors() if self.storage is None else (self.storage,)

    def like(self, num_blocks: int) -> LayerCache:
        """An uninitialised cache of so many blocks, laid out as this one."""
        _, block_size, num_kv_heads, head_dim = self.key.shape
        lanes = self.storage is not None
        return LayerCache.allocate(
            num_blocks, block_size, num_kv_heads, head_dim, self.key.dtype, lanes=lanes
        )

    @staticmethod
    def allocate(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        lanes: bool = False,
    ) -> LayerCache:
        """Allocate an uninitialised cache: slots that no sequence wrote are never read.

        The memory is asked for in huge pages, where the system has them, because a table scatters reads
        over all of it. Pages come when first written, which takes time (see pages.py); all written, they
        come to the size of the cache.
        """
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        if not lanes:
            stored = uninitialised(shape, dtype), uninitialised(shape, dtype)
            if dtype != torch.int8:
                return LayerCache(*stored)
            return LayerCache(*stored, torch.empty(shape[:3]), torch.empty(shape[:3]))
        rows = num_kv_heads * head_dim * block_size * dtype.itemsize
        scales = num_kv_heads * block_size * 4 if dtype == torch.int8 else 0
        storage = uninitialised((num_blocks, 2 * (rows + scales)), torch.uint8)
        key, value = (
            storage[:, start : start + rows].view(dtype).view(num_blocks, num_kv_heads, *part)
            for start, part in ((0, (head_dim, block_size)), (rows, (block_size, head_dim)))
        )
        cache = LayerCache(key.permute(0, 3, 1, 2), value.transpose(1, 2), storage=storage)
        if not scales:
            return cache
        key_scale, value_scale = (
            storage[:, start : start + scales]
            .view(torch.float32)
            .view(num_blocks, num_kv_heads, block_size)
            .mT
            for start in (2 * rows, 2 * rows + scales)
        )
        return replace(cache, key_scale=key_scale, value_scale=value_scale)


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the new tokens of one step lie; the same for every layer. See the module's drawing.

    tables `[R, M]` int32, query_start `[R+1]` int32, kv_len `[R]` int32, slots `[T]` int64. `derived`
    is a backend's own: what it works out once per step, so nobody may write to the tensors meanwhile.
    """

    tables: Tensor
    query_start: Tensor
    kv_len: Tensor
    slots: Tensor
    derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)


class AttentionBackend(Protocol):
    """What a kernel package provides. A class that derives from this one inherits rotate_and_write_kv.

    half: of the dtypes of sixteen bits, that in which its kernels like keys and values best.
    """

    name: str
    half: torch.dtype

    def allocate(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> LayerCache:
        """Allocate an uninitialised cache, laid out as this backend's kernels like it."""

    def write_kv(self, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """Store key and value `[T, Hkv, D]` at slots `[T]` (block * block_size + offset)."""

    def rotate_and_write_kv(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache,
        slots: Tensor,
    ) -> None:
        """Rotate query `[T, Hq, D]` and key `[T, Hkv, D]` in place, then write_kv.

        cos and sin `[T, 1, D/2]`, all in one dtype. Dimension i pairs with i + D/2. The default takes
        two steps; a backend may take one.
        """
        rotate_in_place(query, cos, sin)
        rotate_in_place(key, cos, sin)
        self.write_kv(key, value, cache, slots)

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

    def gather_blocks(self, cache: LayerCache, blocks: Tensor) -> LayerCache:
        """Copy whole blocks `[n]` int64 out of the cache: a LayerCache of n blocks, laid out alike."""

    def scatter_blocks(self, cache: LayerCache, blocks: Tensor, stored: LayerCache) -> None:
        """Copy the n blocks of `stored` into the cache as blocks `[n]` int64; the reverse of gather."""
