"""The attention backend in C++ (csrc/), for x86-64 and other CPUs.

    LayerCache.derived["cpu"]      -> _cpu.Cache    addresses and strides, read from torch once per layer
    AttentionBatch.derived[...]    -> _cpu.Plan     validated lengths and the tasks of a step, once per step
    _cpu.Engine                       runs them on the kernels' threads, without the interpreter's lock

Owns what the kernels must be able to trust: every shape, dtype and stride is checked here. Importing this
module raises ImportError where the extension is not built; `make_backend("auto")` then takes the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.attention import _cpu
from octavo.attention.checks import check_copies
from octavo.attention.errors import BackendUnavailable, BatchError
from octavo.attention.interface import AttentionBatch, LayerCache
from octavo.attention.rotate import rotate_in_place

ISAS: tuple[str, ...] = tuple(_cpu.available_isas())  # fastest first; "baseline" is always there

_STORED = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
_COMPUTED = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NO_WINDOW = 2**31 - 1
_NO_ROTATION = (0, (0, 0), 0, 0, 0)


class CpuBackend:
    """`AttentionBackend` in C++ for block sizes 1 to 256, any group size and head dimensions 1 to 256.

    A query's result depends on that query and its sequence's keys and values alone: its bits are the
    same in any batch, chunking, number of threads and placement in the pool.

    isa: "avx512bf16", "avx512", "avx2" or "baseline"; the fastest that the machine has when None. The first
    differs from "avx512" where the cache holds bfloat16 alone: it multiplies pairs of that. checked: every
    block id and length of a batch is validated before anything is read. share: blocks that sequences
    of a step have in common are read once for all of them; no result depends on it.
    Calls from two threads wait for each other. Raises BackendUnavailable for an isa not in ISAS.
    """

    name: str = "cpu"

    def __init__(self, *, isa: str | None = None, checked: bool = True, share: bool = True) -> None:
        if isa is not None and isa not in ISAS:
            raise BackendUnavailable(f"cpu ({isa})", f"this machine has {', '.join(ISAS)}")
        self.engine = _cpu.Engine(isa or ISAS[0])
        self.half = torch.bfloat16 if self.isa == "avx512bf16" else torch.float16
        self._checked = checked
        self._share = share

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return self.engine.isa

    def allocate(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> LayerCache:
        """Allocate an uninitialised cache: in lanes where blocks are whole vectors of slots, else as rows."""
        lanes = block_size % _cpu.lanes == 0
        return LayerCache.allocate(num_blocks, block_size, num_kv_heads, head_dim, dtype, lanes=lanes)

    def write_kv(self, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        """Store key and value `[T, Hkv, D]` at slots `[T]` int64, converted to the stored dtype.

        Slots must be distinct. Rounds to nearest, ties to even; int8 as in quant.py. Raises
        BatchError on a slot outside the cache, before anything is written. Cost O(T).
        """
        self._write(key, value, cache, slots, _NO_ROTATION)

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
        """Rotate query `[T, Hq, D]` and key `[T, Hkv, D]` in place by cos and sin, then write_kv.

        cos and sin `[T, 1, D / 2]` or `[T, D / 2]`; dimension i pairs with i + D / 2. One pass over the
        rows in float32, with the bits of separate products and sums in torch; in bfloat16 and float16,
        where torch rounds after each of them, the rotation is torch's. Raises BatchError as write_kv
        does, and on shapes and dtypes that do not fit; in float32 before anything is changed.
        """
        tokens, num_heads, head_dim = query.shape
        if key.shape[0] != tokens or key.shape[2] != head_dim or key.dtype != query.dtype or head_dim % 2:
            raise BatchError(
                f"query is {query.dtype} of shape {tuple(query.shape)} and key {key.dtype} of shape "
                f"{tuple(key.shape)}; rotation needs one dtype, as many tokens and one even last axis"
            )
        wanted = tokens * head_dim // 2
        if cos.numel() != wanted or sin.numel() != wanted or not cos.dtype == sin.dtype == query.dtype:
            raise BatchError(
                f"cos is {cos.dtype} of shape {tuple(cos.shape)} and sin {sin.dtype} of shape "
                f"{tuple(sin.shape)}; they must be {query.dtype} of shape ({tokens}, {head_dim // 2})"
            )
        if query.dtype != torch.float32 or query.stride(2) != 1 or key.stride(2) != 1:
            cos, sin = cos.view(tokens, 1, -1), sin.view(tokens, 1, -1)
            rotate_in_place(query, cos, sin)
            rotate_in_place(key, cos, sin)
            self._write(key, value, cache, slots, _NO_ROTATION)
            return
        cos, sin = cos.contiguous(), sin.contiguous()
        rotary = query.data_ptr(), query.stride()[:2], num_heads, cos.data_ptr(), sin.data_ptr()
        self._write(key, value, cache, slots, rotary)

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

        query is float32, bfloat16 or float16; arithmetic is float32, but that "avx512bf16" rounds
        queries and weights to bfloat16 where the cache holds that. Raises BatchError, before
        anything is read, on shapes and dtypes that do not fit and, when checked, on any length or
        block id outside the table or the pool, with the row and position. Cost: one read of the
        visible keys and values, shared blocks once.
        """
        view = cache.derived.get("cpu") or _view(cache)
        dtype = _COMPUTED.get(query.dtype)
        shape = query.shape
        if dtype is None or len(shape) != 3 or shape[2] != cache.key.shape[3]:
            raise BatchError(
                f"query is {query.dtype} of shape {tuple(shape)}; it must be float32, bfloat16 or float16 "
                f"of shape [tokens, heads, {cache.key.shape[3]}]"
            )
        if query.stride(2) != 1:
            query = query.contiguous()
        plan = self._plan(shape, cache, batch, window)
        out = torch.empty(shape, dtype=query.dtype)
        lse = torch.empty(shape[:2]) if return_lse else None
        if sinks is not None:
            sinks = _per_head("sinks", sinks, shape[1])
        if alibi is not None:
            alibi = _per_head("alibi", alibi, shape[1])
        token_stride, head_stride, _ = query.stride()
        self.engine.attend(
            plan,
            view,
            query.data_ptr(),
            token_stride,
            head_stride,
            dtype,
            out.data_ptr(),
            scale,
            softcap or 0.0,
            0 if sinks is None else sinks.data_ptr(),
            0 if alibi is None else alibi.data_ptr(),
            0 if lse is None else lse.data_ptr(),
        )
        return out if lse is None else (out, lse)

    def copy_blocks(self, cache: LayerCache, copies: Sequence[tuple[int, int, int]]) -> None:
        """Apply (src block, dst block, leading slots) in order, to K and V.

        Raises BatchError, before anything is copied, on a block or a length outside the cache.
        """
        check_copies(cache, copies)
        self.engine.copy_blocks(
            cache.derived.get("cpu") or _view(cache), [(src, dst, count) for src, dst, count in copies]
        )

    def gather_blocks(self, cache: LayerCache, blocks: Tensor) -> LayerCache:
        """Copy whole blocks `[n]` int64 out of the cache: a LayerCache of n blocks, laid out alike.

        Raises BatchError on a block outside the cache. Cost: one read and one write of n blocks.
        """
        stored = cache.like(len(blocks))
        self._move(cache, blocks, stored, into_cache=False)
        return stored

    def scatter_blocks(self, cache: LayerCache, blocks: Tensor, stored: LayerCache) -> None:
        """Copy the n blocks of `stored` into the cache as blocks `[n]` int64, which are distinct."""
        if stored.key.dtype != cache.key.dtype or stored.key.shape[1:] != cache.key.shape[1:]:
            raise BatchError(
                f"stored blocks are {stored.key.dtype} of shape {tuple(stored.key.shape[1:])}; the cache's "
                f"are {cache.key.dtype} of shape {tuple(cache.key.shape[1:])}"
            )
        self._move(cache, blocks, stored, into_cache=True)

    def _move(self, cache: LayerCache, blocks: Tensor, stored: LayerCache, *, into_cache: bool) -> None:
        if blocks.dtype != torch.int64 or blocks.shape != (stored.num_blocks,):
            raise BatchError(
                f"blocks is {blocks.dtype} of shape {tuple(blocks.shape)}; it must be int64 of shape "
                f"({stored.num_blocks},)"
            )
        outside = (blocks < 0) | (blocks >= cache.num_blocks)
        if bool(outside.any()):
            place = int(outside.nonzero()[0])
            raise BatchError(
                f"block {int(blocks[place])} is outside the cache's 0..{cache.num_blocks - 1}", position=place
            )
        blocks = blocks.contiguous()
        self.engine.move_blocks(
            cache.derived.get("cpu") or _view(cache),
            blocks.data_ptr(),
            len(blocks),
            stored.derived.get("cpu") or _view(stored),
            into_cache,
            torch.get_num_threads(),
        )

    def _write(
        self, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor, rotary: tuple[Any, ...]
    ) -> None:
        view = cache.derived.get("cpu") or _view(cache)
        tokens = len(slots)
        wanted = (tokens, *cache.key.shape[2:])
        if key.shape != wanted or value.shape != wanted or slots.dtype != torch.int64:
            raise BatchError(
                f"key has shape {tuple(key.shape)}, value {tuple(value.shape)} and slots is {slots.dtype}; "
                f"they must have shape {wanted} and be int64"
            )
        dtype = _COMPUTED.get(key.dtype)
        if dtype is None or value.dtype != key.dtype:
            raise BatchError(
                f"key is {key.dtype} and value {value.dtype}; both must be float32, bfloat16 or float16"
            )
        if key.stride(2) != 1:
            key = key.contiguous()
        if value.stride(2) != 1:
            value = value.contiguous()
        slots = slots.contiguous()
        bad = self.engine.write(
            view,
            dtype,
            key.data_ptr(),
            key.stride()[:2],
            value.data_ptr(),
            value.stride()[:2],
            slots.data_ptr(),
            tokens,
            torch.get_num_threads(),
            *rotary,
        )
        if bad >= 0:
            raise BatchError(
                f"token {bad}: slot {int(slots[bad])} is outside the pool's "
                f"0..{cache.num_blocks * cache.block_size - 1}",
                position=bad,
            )

    def layers(
        self,
        tokens: int,
        num_heads: int,
        caches: Sequence[LayerCache],
        windows: Sequence[int | None],
        batch: AttentionBatch,
    ) -> tuple[list[_cpu.Cache], list[_cpu.Plan]]:
        """Caches and plans of all layers of a step of `tokens` float32 queries, for _cpu.Layers.

        Checked as paged_attention and write_kv check them, but for what lies in slots. The batch must live
        until the call has been made.
        """
        slots = batch.slots
        if slots.dtype != torch.int64 or slots.shape != (tokens,) or not slots.is_contiguous():
            raise BatchError(
                f"slots is {slots.dtype} of shape {tuple(slots.shape)} and strides {slots.stride()}; it must "
                f"be int64 of shape ({tokens},), dense"
            )
        views = [cache.derived.get("cpu") or _view(cache) for cache in caches]
        made: dict[tuple[Any, ...], _cpu.Plan] = {}
        plans = []
        for cache, view, window in zip(caches, views, windows, strict=True):
            kind = view.shape, window
            plan = made.get(kind)
            if plan is None:
                plan = made[kind] = self._plan((tokens, num_heads, view.shape[3]), cache, batch, window)
            plans.append(plan)
        return views, plans

    def last_plan(self, batch: AttentionBatch) -> _cpu.Plan:
        """The plan that this backend made last for a batch; its counts are for tests and reports."""
        plans: list[_cpu.Plan] = [kept[0] for key, kept in batch.derived.items() if key[0] == self._share]
        return plans[-1]

    def _plan(
        self, query: Sequence[int], cache: LayerCache, batch: AttentionBatch, window: int | None
    ) -> _cpu.Plan:
        """The tasks of this batch for layers of this shape: made once, then kept with the batch."""
        tokens, num_heads, head_dim = query
        num_blocks, block_size, num_kv_heads, _ = cache.key.shape
        threads = torch.get_num_threads()
        kind = (tokens, num_heads, head_dim, num_blocks, block_size, num_kv_heads, window, threads)
        kept: tuple[_cpu.Plan, Any] | None = batch.derived.get((self._share, self._checked, kind))
        if kept is not None:
            return kept[0]
        if num_heads % num_kv_heads or not num_heads:
            raise BatchError(f"{num_heads} query heads do not divide among {num_kv_heads} KV heads")
        if window is not None and window < 1:
            raise BatchError(f"window {window} hides every key; use a window of 1 or more, or None")
        arrays = _arrays(batch)
        tables, query_start, kv_len = arrays
        rows, columns = tables.shape
        plan = _cpu.Plan(
            tables.data_ptr(),
            columns,
            query_start.data_ptr(),
            kv_len.data_ptr(),
            rows,
            columns,
            tokens,
            block_size,
            num_blocks,
            num_heads,
            num_kv_heads,
            head_dim,
            _NO_WINDOW if window is None else min(window, _NO_WINDOW),
            threads,
            self._share,
            self._checked,
        )
        if plan.error[0]:
            raise _batch_error(plan.error)
        batch.derived[self._share, self._checked, kind] = plan, arrays  # the plan points into the arrays
        return plan


def _view(cache: LayerCache) -> _cpu.Cache:
    """Check a layer's tensors and describe them to the kernels; kept with the cache."""
    key, value = cache.key, cache.value
    if key.dtype not in _STORED or value.dtype != key.dtype or key.device.type != "cpu":
        raise BatchError(
            f"the cache holds {key.dtype} and {value.dtype} on {key.device}; it must hold one of float32, "
            "bfloat16, float16 and int8, in host memory"
        )
    if key.ndim != 4 or value.shape != key.shape or not 1 <= key.shape[3] <= _cpu.max_head_dim:
        raise BatchError(
            f"key has shape {tuple(key.shape)} and value {tuple(value.shape)}; both must be "
            f"[num_blocks, block_size, heads, dim] with dim at most {_cpu.max_head_dim}"
        )
    lanes = key.stride(1) == 1 and key.shape[1] % _cpu.lanes == 0
    if value.stride(3) != 1 or not (key.stride(3) == 1 or lanes):
        raise BatchError(
            f"key has strides {key.stride()} and value {value.stride()}; values must end in 1, and keys "
            f"too or have 1 for slots, with a block size that is a multiple of {_cpu.lanes}"
        )
    scales: list[Tensor] = []
    if key.dtype == torch.int8:
        for name, scale in (("key_scale", cache.key_scale), ("value_scale", cache.value_scale)):
            if scale is None or scale.dtype != torch.float32 or scale.shape != key.shape[:3]:
                raise BatchError(f"{name} must be float32 of shape {tuple(key.shape[:3])} in an int8 cache")
            scales.append(scale)
        if scales[0].stride() != scales[1].stride():
            raise BatchError("key_scale and value_scale have different strides")
    view = _cpu.Cache(
        (key.data_ptr(), value.data_ptr(), *(scale.data_ptr() for scale in scales or ()))
        + (0, 0) * (not scales),
        _STORED[key.dtype],
        tuple(key.shape),
        key.stride(),
        value.stride(),
        (*scales[0].stride(), 1) if scales else (0, 0, 0, 0),
    )
    cache.derived["cpu"] = view
    return view


def _arrays(batch: AttentionBatch) -> tuple[Tensor, Tensor, Tensor]:
    """The batch's tables, query_start and kv_len, dense; BatchError where a shape or dtype is wrong."""
    tables = batch.tables
    if tables.ndim != 2 or tables.dtype != torch.int32:
        raise BatchError(f"tables is {tables.dtype} of shape {tuple(tables.shape)}; it must be int32 [R, M]")
    for name, tensor, length in (
        ("query_start", batch.query_start, len(tables) + 1),
        ("kv_len", batch.kv_len, len(tables)),
    ):
        if tensor.dtype != torch.int32 or tensor.shape != (length,):
            raise BatchError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; "
                f"it must be int32 of shape ({length},)"
            )
    return tables.contiguous(), batch.query_start.contiguous(), batch.kv_len.contiguous()


def _per_head(name: str, values: Tensor, num_heads: int) -> Tensor:
    if values.shape != (num_heads,):
        raise BatchError(f"{name} has shape {tuple(values.shape)}; there are {num_heads} query heads")
    return values.to(torch.float32).contiguous()


def _batch_error(error: tuple[int, int, int, int, int]) -> BatchError:
    """Put what the planner found into words; kinds are those of PlanError in csrc/plan.h."""
    kind, row, position, found, wanted = error
    words = {
        1: f"query_start[0] is {found}; it must be 0",
        2: f"row {row}: query_start falls from {wanted} to {found}",
        3: f"row {row}: query_start ends at {found}; there are {wanted} tokens",
        4: f"row {row}: {found} queries, but kv_len, which counts them too, is {wanted}",
        5: f"row {row}: kv_len is {found}; its table has room for {wanted} tokens",
        6: f"row {row}: the block at position {position} is {found}; the pool has blocks 0..{wanted - 1}",
    }
    return BatchError(words[kind], row=row, position=position)
