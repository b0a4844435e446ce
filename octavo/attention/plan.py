"""What a step's batch implies for every layer, worked out once.

    rows with one query      -> DecodeGroup: rows of like length, padded to the longest, one product
                                keys   k k k k k k        gather: slots of real keys, and for padding
                                       k k k k . .        the row's first real key again, so that no
                                       k k k k k .        slot past kv_len is ever read
    rows with more queries   -> Chunk: one gather of the row's keys, then tiles of queries, each with
                                the keys from its window's start to its own last position

A plan depends on the batch, the block size and, by look-up, on the window and the number of KV heads.
Owns indices and masks; touches no key, value or query.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.attention.interface import AttentionBatch

MAX_GROUP_TOKENS = 8_192  # keys gathered at once for decode, padding included; one row may exceed it
FREE_WASTE = 512  # padded keys that cost less than the calls of another group
WASTE_SHARE = 8  # beyond that, at most one padded key in this many
MAX_TILE = 128  # queries in a tile
TILE_SCORES = 1 << 20  # queries * keys that a tile aims at when its keys are many
MIN_TILE = 16


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """B rows of one query each, padded to L keys.

    query_rows `[B]` int64; gather `[B * Hkv * L]` int64 into the cache as rows of one head
    (slot * Hkv + head); padding `[B, 1, L]` bool or None where no row is padded;
    distance `[B, 1, L]` int64, key position - query position.
    """

    query_rows: Tensor
    gather: Tensor
    padding: Tensor | None
    distance: Tensor


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows begin:end, and their keys as key_begin:key_end of the chunk's gathered keys."""

    begin: int
    end: int
    first_query: int  # position
    key_begin: int
    key_end: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence with more than one query: slots `[L]` int64 of its keys from position first_key."""

    slots: Tensor
    first_key: int
    tiles: tuple[Tile, ...]


class StepPlan:
    """Indices and masks for one AttentionBatch, built when first asked for and kept for all layers."""

    def __init__(self, batch: AttentionBatch, block_size: int) -> None:
        """Read the lengths of the batch's rows. Cost O(R) on the host."""
        self.block_size = block_size
        self._tables = batch.tables
        self._starts: list[int] = batch.query_start.tolist()
        self._kv_lens: list[int] = batch.kv_len.tolist()
        counts = [end - begin for begin, end in zip(self._starts[:-1], self._starts[1:])]
        self._decode_rows = [row for row, count in enumerate(counts) if count == 1]
        self._chunk_rows = [row for row, count in enumerate(counts) if count > 1]
        self._groups: dict[tuple[int | None, int], tuple[DecodeGroup, ...]] = {}
        self._chunks: dict[int | None, tuple[Chunk, ...]] = {}
        self._bands: dict[tuple[int | None, torch.dtype], tuple[Tensor, int]] = {}

    def decode_groups(self, window: int | None, num_kv_heads: int) -> tuple[DecodeGroup, ...]:
        """The rows with one query, in groups. O(1) after the first call for this window."""
        found = self._groups.get((window, num_kv_heads))
        if found is None:
            lengths = [self._visible(self._kv_lens[row], window) for row in self._decode_rows]
            found = tuple(
                self._build_group([self._decode_rows[i] for i in members], window, num_kv_heads)
                for members in group_by_length(lengths)
            )
            self._groups[window, num_kv_heads] = found
        return found

    def chunks(self, window: int | None) -> tuple[Chunk, ...]:
        """The rows with more than one query. O(1) after the first call for this window."""
        found = self._chunks.get(window)
        if found is None:
            found = tuple(self._build_chunk(row, window) for row in self._chunk_rows)
            self._chunks[window] = found
        return found

    def tile_mask(self, chunk: Chunk, tile: Tile, window: int | None, dtype: torch.dtype) -> Tensor:
        """The tile's additive mask `[queries, keys]`: 0 where a key is seen, -inf elsewhere.

        A view into one band that all tiles share, because a mask depends only on
        key position - query position.
        """
        found = self._bands.get((window, dtype))
        if found is None:
            found = self._bands[window, dtype] = self._build_band(window, dtype)
        band, zero_column = found
        column = zero_column + chunk.first_key + tile.key_begin - tile.first_query
        return band[: tile.end - tile.begin, column : column + tile.key_end - tile.key_begin]

    @staticmethod
    def _visible(kv_len: int, window: int | None) -> int:
        """Keys that the last query of a row sees."""
        return kv_len if window is None else min(kv_len, window)

    def _build_group(self, rows: list[int], window: int | None, num_kv_heads: int) -> DecodeGroup:
        device = self._tables.device
        kv_len = torch.tensor([self._kv_lens[row] for row in rows], device=device)  # [B]
        count = kv_len if window is None else kv_len.clamp(max=window)
        first = kv_len - count
        columns = torch.arange(int(count.max()), device=device)  # [L]
        padding = columns[None, :] >= count[:, None]  # [B, L]
        position = torch.where(padding, first[:, None], first[:, None] + columns[None, :])
        table = self._tables[torch.tensor(rows, device=device)]  # [B, M]
        block = table.gather(1, position // self.block_size).long()
        slot = block * self.block_size + position % self.block_size  # [B, L]
        heads = torch.arange(num_kv_heads, device=device)
        gather = slot[:, None, :] * num_kv_heads + heads[None, :, None]  # [B, Hkv, L]
        return DecodeGroup(
            query_rows=torch.tensor([self._starts[row] for row in rows], device=device),
            gather=gather.reshape(-1),
            padding=padding[:, None, :] if bool(padding.any()) else None,
            distance=(position - (kv_len[:, None] - 1))[:, None, :],
        )

    def _build_chunk(self, row: int, window: int | None) -> Chunk:
        begin, end, kv_len = self._starts[row], self._starts[row + 1], self._kv_lens[row]
        first_query = kv_len - (end - begin)
        first_key = 0 if window is None else max(0, first_query - window + 1)
        position = torch.arange(first_key, kv_len, device=self._tables.device)
        block = self._tables[row].index_select(0, position // self.block_size).long()
        slots = block * self.block_size + position % self.block_size
        size = max(MIN_TILE, min(MAX_TILE, TILE_SCORES // (kv_len - first_key)))
        tiles = []
        for tile_begin in range(begin, end, size):
            tile_end = min(tile_begin + size, end)
            at = first_query + tile_begin - begin  # position of the tile's first query
            from_key = first_key if window is None else max(first_key, at - window + 1)
            tiles.append(
                Tile(
                    begin=tile_begin,
                    end=tile_end,
                    first_query=at,
                    key_begin=from_key - first_key,
                    key_end=at + (tile_end - tile_begin) - first_key,
                )
            )
        return Chunk(slots, first_key, tuple(tiles))

    def _build_band(self, window: int | None, dtype: torch.dtype) -> tuple[Tensor, int]:
        """A mask wide enough for every tile, and the column whose key is the first query itself."""
        pairs: list[tuple[Chunk, Tile]] = [(c, t) for c in self.chunks(window) for t in c.tiles]
        before = max(tile.first_query - chunk.first_key - tile.key_begin for chunk, tile in pairs)
        height = max(tile.end - tile.begin for _, tile in pairs)
        device = self._tables.device
        offset = torch.arange(-before, height, device=device)  # key position - first query position
        distance = offset[None, :] - torch.arange(height, device=device)[:, None]
        hidden = distance > 0
        if window is not None:
            hidden |= distance <= -window
        band = torch.zeros(hidden.shape, dtype=dtype, device=device)
        return band.masked_fill_(hidden, -torch.inf), before


def group_by_length(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Split rows into groups of like length; yields indices into `lengths`, shortest first.

    A group's padding is at most FREE_WASTE keys or a share 1 / WASTE_SHARE of its padded keys,
    and its padded keys at most MAX_GROUP_TOKENS unless it is a single row. O(R log R).
    """
    members: list[int] = []
    real = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        padded = lengths[index] * (len(members) + 1)
        waste = padded - real - lengths[index]
        too_wasteful = waste > max(FREE_WASTE, padded // WASTE_SHARE)
        if members and (too_wasteful or padded > MAX_GROUP_TOKENS):
            yield members
            members, real = [], 0
        members.append(index)
        real += lengths[index]
    if members:
        yield members
