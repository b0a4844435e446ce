"""The attention backend in plain torch: runs everywhere, and is what other backends are tested against.

    write_kv          new K/V rows        ->  flat view [num_blocks * block_size, Hkv, D] at slots
    paged_attention   rows of one query   ->  padded gather, two batched products per group
                      longer rows         ->  gather, then scaled_dot_product_attention per tile,
                                              or dense_attention where it lacks an option
    copy_blocks       (src, dst, n)       ->  one indexed copy, or in order where copies touch

Owns the arithmetic; what the batch implies is in plan.py. Arithmetic runs in `compute_dtype`, stored
values are converted when read. The oracle, without any of this, is `dense_reference` in dense.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.attention.checks import check_copies
from octavo.attention.dense import Rules, dense_attention
from octavo.attention.errors import BatchError
from octavo.attention.interface import AttentionBackend, AttentionBatch, LayerCache
from octavo.attention.plan import Chunk, DecodeGroup, StepPlan
from octavo.attention.quant import quantize


class ReferenceBackend(AttentionBackend):
    """`AttentionBackend` in torch, for any block size, group size and head dimension.

    compute_dtype is that of scores and sums: float32, or float64 for an oracle. The plan of the last
    batch is kept by identity, so pass a new AttentionBatch each step and do not change its tensors.
    Not for use by two threads at once.
    """

    name: str = "reference"
    half: torch.dtype = torch.float16

    def __init__(self, compute_dtype: torch.dtype = torch.float32) -> None:
        self.compute_dtype = compute_dtype
        self._planned: tuple[AttentionBatch, StepPlan] | None = None
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def allocate(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> LayerCache:
        """Allocate an uninitialised cache, as rows."""
        return LayerCache.allocate(num_blocks, block_size, num_kv_heads, head_dim, dtype)

    def write_kv(self, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """Store key and value `[T, Hkv, D]` at slots `[T]` int64, converted to the stored dtype.

        Slots must be distinct. Raises IndexError on a slot outside the cache, BatchError where the
        cache lies in lanes. Cost O(T).
        """
        _check_rows(cache)
        for stored, scale, new in (
            (cache.key, cache.key_scale, key),
            (cache.value, cache.value_scale, value),
        ):
            if scale is None:
                new = new.to(stored.dtype)
            else:
                new, new_scale = quantize(new)
                scale.view(-1, scale.shape[2]).index_copy_(0, slots, new_scale)
            stored.view(-1, *stored.shape[2:]).index_copy_(0, slots, new)

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
        """Attend from query `[T, Hq, D]` over the cache; see `AttentionBackend.paged_attention`.

        Trusts the batch (`check_batch` does not), and raises BatchError only on head counts that do
        not divide, a window below 1, or a cache in lanes. Cost: one read of each
        row's visible keys and values.
        """
        _check_rows(cache)
        num_heads, num_kv_heads = query.shape[1], cache.key.shape[2]
        if num_heads % num_kv_heads:
            raise BatchError(f"{num_heads} query heads do not divide among {num_kv_heads} KV heads")
        if window is not None and window < 1:
            raise BatchError(f"window {window} hides every key; use a window of 1 or more, or None")
        rules = Rules(scale, window, softcap, sinks, alibi)
        plan = self._plan(batch, cache.block_size)
        out = torch.empty_like(query)
        lse = query.new_empty(query.shape[:2], dtype=torch.float32) if return_lse else None
        for group in plan.decode_groups(window, num_kv_heads):
            self._decode(query, cache, group, rules, out, lse)
        for chunk in plan.chunks(window):
            self._chunk(query, cache, plan, chunk, rules, out, lse)
        return out if lse is None else (out, lse)

    def copy_blocks(self, cache: LayerCache, copies: Sequence[tuple[int, int, int]]) -> None:
        """Apply (src block, dst block, leading slots) in order, to K and V.

        Raises BatchError, before anything is copied, on a block or a length outside the cache.
        """
        check_copies(cache, copies)
        _check_rows(cache)
        if len(copies) > 1 and _are_independent(copies):
            self._copy_at_once(cache, copies)
            return
        for src, dst, count in copies:
            if src != dst:
                for stored in cache.tensors():
                    stored[dst, :count] = stored[src, :count]

    def gather_blocks(self, cache: LayerCache, blocks: Tensor) -> LayerCache:
        """Copy whole blocks `[n]` int64 out of the cache; IndexError on a block outside it."""
        return LayerCache(*(stored.index_select(0, blocks) for stored in cache.tensors()))

    def scatter_blocks(self, cache: LayerCache, blocks: Tensor, stored: LayerCache) -> None:
        """Copy the n blocks of `stored` into the cache as blocks `[n]` int64, which are distinct."""
        for into, new in zip(cache.tensors(), stored.tensors(), strict=True):
            into.index_copy_(0, blocks, new)

    def _plan(self, batch: AttentionBatch, block_size: int) -> StepPlan:
        """The plan of this batch: the last one where it is the same object, else a new one."""
        if self._planned is not None:
            planned_batch, plan = self._planned
            if planned_batch is batch and plan.block_size == block_size:
                return plan
        plan = StepPlan(batch, block_size)
        self._planned = (batch, plan)
        return plan

    def _decode(
        self,
        query: Tensor,
        cache: LayerCache,
        group: DecodeGroup,
        rules: Rules,
        out: Tensor,
        lse_out: Tensor | None,
    ) -> None:
        """Attend for the rows of one group and store their rows of out and lse."""
        _, num_heads, head_dim = query.shape
        num_kv_heads = cache.key.shape[2]
        batch = group.query_rows.shape[0] * num_kv_heads
        new = query.index_select(0, group.query_rows).to(self.compute_dtype)
        new = (new * rules.scale).view(batch, -1, head_dim)  # [B * Hkv, G, D]
        key, value = self._gather(cache, (head_dim,), group.gather)
        key = key.view(batch, -1, head_dim)  # [B * Hkv, L, D]
        value = value.view(batch, -1, head_dim)
        scores = torch.bmm(new, key.transpose(1, 2)).view(-1, num_heads, key.shape[1])  # [B, Hq, L]
        if rules.softcap is not None:
            scores = rules.softcap * torch.tanh(scores / rules.softcap)
        if rules.alibi is not None:
            scores += rules.alibi.to(scores.dtype)[:, None] * group.distance
        if group.padding is not None:
            scores.masked_fill_(group.padding, -torch.inf)
        if rules.sinks is None and lse_out is None:
            weights = torch.softmax(scores, dim=-1)
        else:
            lse = torch.logsumexp(scores, dim=-1)  # [B, Hq]
            if rules.sinks is not None:
                lse = torch.logaddexp(lse, rules.sinks.to(lse.dtype))
            weights = torch.exp(scores - lse[..., None])
            if lse_out is not None:
                lse_out.index_copy_(0, group.query_rows, lse.to(lse_out.dtype))
        result = torch.bmm(weights.view(batch, -1, key.shape[1]), value)  # [B * Hkv, G, D]
        out.index_copy_(0, group.query_rows, result.view(-1, num_heads, head_dim).to(out.dtype))

    def _chunk(
        self,
        query: Tensor,
        cache: LayerCache,
        plan: StepPlan,
        chunk: Chunk,
        rules: Rules,
        out: Tensor,
        lse_out: Tensor | None,
    ) -> None:
        """Attend for one sequence's queries, tile by tile, and store their rows of out and lse."""
        key, value = self._gather(cache, cache.key.shape[2:], chunk.slots)  # [L, Hkv, D]
        plain = rules.softcap is None and rules.sinks is None and rules.alibi is None and lse_out is None
        for tile in chunk.tiles:
            new = query[tile.begin : tile.end].to(self.compute_dtype)
            seen = slice(tile.key_begin, tile.key_end)
            if plain:
                mask = plan.tile_mask(chunk, tile, rules.window, self.compute_dtype)
                # [n, H, D] -> [1, H, n, D] and back
                result = F.scaled_dot_product_attention(
                    new.transpose(0, 1)[None],
                    key[seen].transpose(0, 1)[None],
                    value[seen].transpose(0, 1)[None],
                    attn_mask=mask,
                    scale=rules.scale,
                    enable_gqa=True,
                )[0].transpose(0, 1)
            else:
                result, lse = dense_attention(
                    new, key[seen], value[seen], rules, tile.first_query, chunk.first_key + tile.key_begin
                )
                if lse_out is not None:
                    lse_out[tile.begin : tile.end] = lse
            out[tile.begin : tile.end] = result

    def _gather(self, cache: LayerCache, shape: Sequence[int], index: Tensor) -> tuple[Tensor, Tensor]:
        """K and V as rows of `shape`, those at index `[n]`, in the compute dtype: `[n, *shape]` each.

        Both lie in buffers that the next call overwrites: fresh memory of this size would be mapped,
        faulted in and unmapped for every layer, which costs more than the arithmetic.
        """
        found = []
        for name, stored, scale in (
            ("key", cache.key, cache.key_scale),
            ("value", cache.value, cache.value_scale),
        ):
            rows = stored.view(-1, *shape)
            wanted = self._buffer(name, (len(index), *shape), self.compute_dtype, stored.device)
            if stored.dtype == self.compute_dtype:
                torch.index_select(rows, 0, index, out=wanted)
            else:
                raw = self._buffer("stored", (len(index), *shape), stored.dtype, stored.device)
                wanted.copy_(torch.index_select(rows, 0, index, out=raw))
            if scale is not None:
                wanted *= scale.view(-1, *shape[:-1]).index_select(0, index)[..., None]
            found.append(wanted)
        return found[0], found[1]

    def _buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A contiguous tensor of this shape in reused memory; grows, never shrinks."""
        need = math.prod(shape)
        kept = self._buffers.get((name, dtype, device))
        if kept is None or len(kept) < need:
            with torch.inference_mode(False):  # so that it can be written in any mode
                kept = torch.empty(need, dtype=dtype, device=device)
            self._buffers[name, dtype, device] = kept
        return kept[:need].view(*shape)

    @staticmethod
    def _copy_at_once(cache: LayerCache, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy as one gather and one scatter; only for copies of which none sees another's result."""
        size = cache.block_size
        src, dst, count = torch.tensor(copies, device=cache.key.device).unbind(1)
        offsets = torch.arange(size, device=cache.key.device)
        wanted = offsets[None, :] < count[:, None]  # [copies, block_size]
        src_slots = (src[:, None] * size + offsets)[wanted]
        dst_slots = (dst[:, None] * size + offsets)[wanted]
        for stored in cache.tensors():
            flat = stored.view(-1, *stored.shape[2:])
            flat.index_copy_(0, dst_slots, flat.index_select(0, src_slots))


def _check_rows(cache: LayerCache) -> None:
    """This backend takes slots as rows of a flat view."""
    if not (cache.key.is_contiguous() and cache.value.is_contiguous()):
        raise BatchError(
            f"the reference backend takes caches as rows, got strides {cache.key.stride()} and "
            f"{cache.value.stride()}: allocate the cache with this backend"
        )


def _are_independent(copies: Sequence[tuple[int, int, int]]) -> bool:
    """Whether the copies give one result in any order: no dst twice, and none that is also a src."""
    destinations = {dst for _, dst, _ in copies}
    return len(destinations) == len(copies) and destinations.isdisjoint(src for src, _, _ in copies)
