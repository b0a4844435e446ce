"""Whether a batch points only where it may: ids are checked here, because kernels trust them.

Owns `check_batch`, which reads the batch's four arrays on the host and never the cache, and `check_copies`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from octavo.attention.errors import BatchError
from octavo.attention.interface import AttentionBatch, LayerCache


def check_batch(batch: AttentionBatch, num_blocks: int, block_size: int, num_tokens: int) -> None:
    """Raise BatchError unless every block, length and slot of the batch is in bounds and consistent.

    Checked in order: shapes and dtypes; query_start rises from 0 to `num_tokens`; each row's queries
    fit its kv_len and its kv_len fits its table; every block that covers kv_len is in
    0..num_blocks - 1; slots are in range, distinct, and those that the tables give. The error names
    the sequence's row and the position. Vectorised; cost O(R * M + T log T).
    """
    _check_shapes(batch, num_tokens)
    tables, starts = batch.tables.cpu().numpy(), batch.query_start.cpu().numpy().astype(np.int64)
    kv_len, slots = batch.kv_len.cpu().numpy().astype(np.int64), batch.slots.cpu().numpy()
    counts = np.diff(starts)
    _check_query_start(starts, counts, num_tokens)
    _check_lengths(counts, kv_len, tables.shape[1] * block_size)
    _check_blocks(tables, kv_len, num_blocks, block_size)
    _check_slots(slots, tables, counts, starts, kv_len, num_blocks, block_size)


def check_copies(cache: LayerCache, copies: Sequence[tuple[int, int, int]]) -> None:
    """Raise BatchError, with the copy's place, unless each (src, dst, count) lies in the cache. O(copies)."""
    for place, (src, dst, count) in enumerate(copies):
        if not (0 <= src < cache.num_blocks and 0 <= dst < cache.num_blocks):
            raise BatchError(
                f"copy {place} is block {src} to {dst}; the cache has blocks 0..{cache.num_blocks - 1}",
                position=place,
            )
        if not 0 <= count <= cache.block_size:
            raise BatchError(
                f"copy {place} asks for {count} slots; a block has {cache.block_size}", position=place
            )


def _check_shapes(batch: AttentionBatch, num_tokens: int) -> None:
    rows = batch.tables.shape[0]
    wanted = (
        ("tables", batch.tables, 2, rows, torch.int32),
        ("query_start", batch.query_start, 1, rows + 1, torch.int32),
        ("kv_len", batch.kv_len, 1, rows, torch.int32),
        ("slots", batch.slots, 1, num_tokens, torch.int64),
    )
    for name, tensor, ndim, length, dtype in wanted:
        if tensor.dtype != dtype:
            raise BatchError(f"{name} is {tensor.dtype}; it must be {dtype}")
        if tensor.ndim != ndim or tensor.shape[0] != length:
            raise BatchError(
                f"{name} has shape {tuple(tensor.shape)}; a batch of {rows} sequences and {num_tokens} "
                f"tokens needs {ndim} dimension(s), the first of length {length}"
            )


def _check_query_start(starts: np.ndarray, counts: np.ndarray, num_tokens: int) -> None:
    if starts[0] != 0:
        raise BatchError(f"query_start[0] is {starts[0]}; it must be 0", row=0, position=0)
    if (row := _first(counts < 0)) is not None:
        raise BatchError(
            f"row {row}: query_start falls from {starts[row]} to {starts[row + 1]}",
            row=row,
            position=row + 1,
        )
    if starts[-1] != num_tokens:
        row = len(starts) - 2
        raise BatchError(
            f"row {row}: query_start ends at {starts[-1]}; there are {num_tokens} tokens",
            row=row,
            position=row + 1,
        )


def _check_lengths(counts: np.ndarray, kv_len: np.ndarray, room: int) -> None:
    if (row := _first(counts > kv_len)) is not None:
        raise BatchError(
            f"row {row}: {counts[row]} queries, but kv_len, which counts them too, is {kv_len[row]}",
            row=row,
            position=int(kv_len[row]),
        )
    if (row := _first(kv_len > room)) is not None:
        raise BatchError(
            f"row {row}: kv_len is {kv_len[row]}; its table has room for {room} tokens",
            row=row,
            position=room,
        )


def _check_blocks(tables: np.ndarray, kv_len: np.ndarray, num_blocks: int, block_size: int) -> None:
    used = np.arange(tables.shape[1])[None, :] * block_size < kv_len[:, None]  # [R, M]
    bad = used & ((tables < 0) | (tables >= num_blocks))
    if (place := _first(bad.ravel())) is None:
        return
    row, logical = divmod(place, tables.shape[1])
    raise BatchError(
        f"row {row}: logical block {logical} (position {logical * block_size}) is block "
        f"{tables[row, logical]}; the pool has blocks 0..{num_blocks - 1}",
        row=row,
        position=logical * block_size,
    )


def _check_slots(
    slots: np.ndarray,
    tables: np.ndarray,
    counts: np.ndarray,
    starts: np.ndarray,
    kv_len: np.ndarray,
    num_blocks: int,
    block_size: int,
) -> None:
    rows = np.repeat(np.arange(len(counts)), counts)  # [T], the sequence of each token
    positions = np.arange(len(slots)) - starts[rows] + (kv_len - counts)[rows]

    def fail(token: int, why: str) -> BatchError:
        row, position = int(rows[token]), int(positions[token])
        message = f"row {row}, position {position}: slot {slots[token]} {why}"
        return BatchError(message, row=row, position=position)

    total = num_blocks * block_size
    if (token := _first((slots < 0) | (slots >= total))) is not None:
        raise fail(token, f"is outside the pool's 0..{total - 1}")
    order = np.argsort(slots, kind="stable")
    repeated = slots[order[1:]] == slots[order[:-1]]
    if (place := _first(repeated)) is not None:
        first, again = int(order[place]), int(order[place + 1])
        raise fail(again, f"is also written by row {rows[first]}, position {positions[first]}")
    given = tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    if (token := _first(slots != given)) is not None:
        raise fail(token, f"is not the one that its table gives, {given[token]}")


def _first(bad: np.ndarray) -> int | None:
    """The index of the first true element, if any."""
    return int(bad.argmax()) if bad.any() else None
