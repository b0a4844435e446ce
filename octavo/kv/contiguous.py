"""Contiguous reservation: what servers did before paging, with the same API as Pool and Sequence.

    block     0 . . . . . . 7 8 . . . . 12 13 . . . . . 19 20 . . . . . . . 28
              | A, 8 blocks  | free, 5    | B, 7           | free, 9          |
              | 47 slots used|            | 100 slots used |                  |

A sequence owns one region of consecutive slots, as long as its policy says, taken first fit from the
free regions, which are kept sorted and coalesced and never compacted. Nothing is shared: open() finds
nothing, fork() copies everything. It exists so that what paging saves can be measured.

Kernels follow it unchanged: a region is whole blocks of `block_size` slots and its block table counts
up, [13, 14, ...]. A region is rounded up to whole blocks, so a small `block_size` (1 is exact) keeps
that rounding out of the waste; it changes the addressing, not the policy.

    policy    region, in slots                                          grows
    max       max_len, whatever comes                                   never
    pow2      the next power of two of what is needed, up to max_len    by doubling, see below
    oracle    the sequence's final length, told at open                 never

A region grows in place where the room right behind it is free, else it moves to another one: reserve()
queues the copies and the old region is given back by drain(). If nothing else fits it may move into the
free room around itself, as long as no block is both read and written and no earlier copy is still due
from it. So a sequence alone, with nothing due, can always grow to what can_ever_fit() allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from octavo.kv.contiguous_sequence import ContiguousSequence
from octavo.kv.errors import InvalidArgument, InvariantViolated
from octavo.kv.regions import FreeRegions, Move, Region, check_regions
from octavo.kv.types import (
    DEFAULT_SCOPE,
    Actions,
    Copy,
    Fit,
    Hit,
    PoolStats,
    Scope,
    Tokens,
    token_bytes,
)

Policy: TypeAlias = Literal["max", "pow2", "oracle"]
FinalLength: TypeAlias = Callable[[Tokens], int]
_POLICIES = ("max", "pow2", "oracle")


class ContiguousPool:
    """Contiguous reservation of a device's KV cache, first fit, no compaction. The API of octavo.kv.Pool.

    num_slots: token slots, a multiple of block_size. policy: how long a region is, see the module.
    max_len: the longest sequence in tokens; "max" needs it. block_size: slots per table entry. final_len:
    for "oracle", the length that a sequence opened with these tokens will end with, unless open() is
    told. Raises InvalidArgument for values out of range. Not thread-safe.

    A scheduler's headroom for growth is of use to "pow2" alone; see `grows`.
    """

    prefix_caching = False
    gives_back_tail = False
    """Whether truncate() makes room for others."""

    host_room = 0
    """Blocks that suspend() could move to host memory."""

    def __init__(
        self,
        num_slots: int,
        policy: Policy = "max",
        *,
        max_len: int | None = None,
        block_size: int = 1,
        final_len: FinalLength | None = None,
    ) -> None:
        if block_size < 1 or num_slots < block_size or num_slots % block_size or num_slots >= 2**31:
            raise InvalidArgument(
                f"num_slots must be a multiple of block_size from 1 block to below 2**31 slots, "
                f"got {num_slots} slots in blocks of {block_size}"
            )
        if policy not in _POLICIES:
            raise InvalidArgument(f"policy must be one of {', '.join(_POLICIES)}, got {policy!r}")
        if max_len is not None and max_len < 1:
            raise InvalidArgument(f"max_len must be at least 1, got {max_len}")
        if policy == "max" and max_len is None:
            raise InvalidArgument("policy 'max' needs max_len, the length that every sequence reserves")
        self.block_size = block_size
        self.num_blocks = num_slots // block_size
        self.policy: Policy = policy
        self.max_len = max_len if max_len is not None else num_slots
        self._final_len = final_len
        self._free = FreeRegions(self.num_blocks)
        self._moves: dict[Region, Move] = {}  # by the region to fill, oldest first
        self._open: dict[int, ContiguousSequence] = {}  # by table row
        self._free_rows: list[int] = []
        self._tables = np.full((0, 32), -1, np.int32)
        self._num_copies = 0

    # -- what callers ask ----------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Blocks that one reserve() could take now: those of the largest free region, however many
        are free in all (`stats().free`). O(free regions)."""
        return self._free.largest

    @property
    def grows(self) -> bool:
        """Whether an admitted sequence may ever need more blocks than its first reserve() took."""
        return self.policy == "pow2"

    def gain(self, seqs: Sequence[ContiguousSequence]) -> int:
        """Blocks that closing these sequences would free, wherever they lie. O(sequences)."""
        return sum(seq._region.count for seq in seqs if seq._region is not None)

    @property
    def tables(self) -> npt.NDArray[np.int32]:
        """Every block table, one row each, padded with -1. The array moves when it grows."""
        return self._tables

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens, without what the policy adds."""
        return -(-num_tokens // self.block_size)

    def can_ever_fit(self, num_tokens: int) -> Fit:
        """Whether an empty pool could hold a sequence of `num_tokens`; need and have in blocks.

        Under "pow2" the last two regions must fit side by side, for the last growth may be a move.
        """
        if num_tokens > self.max_len:
            return Fit(False, self.blocks_for(num_tokens), self.blocks_for(self.max_len))
        need = self._region_blocks(num_tokens, num_tokens)
        if self.policy == "pow2":
            before = self.blocks_for(_next_power(num_tokens) // 2)
            need += before if before < need else 0
        return Fit(need <= self.num_blocks, need, self.num_blocks)

    def probe(self, tokens: Tokens, scope: Scope = DEFAULT_SCOPE) -> Hit:
        """Nothing is ever found."""
        return Hit(0, 0)

    def open(
        self,
        tokens: Tokens,
        scope: Scope = DEFAULT_SCOPE,
        final_len: int | None = None,
        *,
        priority: int = 0,
    ) -> ContiguousSequence:
        """Start a sequence; its region is taken by the first reserve(). O(tokens).

        final_len: for "oracle", the token slots that it will have filled in the end. priority is that of
        cached blocks, of which there are none. Raises
        InvalidArgument for ids that are not int32, and where the oracle was told nothing.
        """
        token_bytes(tokens)
        if self.policy == "oracle" and final_len is None:
            if self._final_len is None:
                raise InvalidArgument("policy 'oracle' needs final_len, here or in ContiguousPool")
            final_len = self._final_len(tokens)
        return ContiguousSequence(self, self.max_len if final_len is None else final_len)

    def drain(self) -> Actions:
        """Hand over the copies to apply before the next forward pass, and give back what moved away."""
        copies: list[Copy] = []
        for region, move in self._moves.items():
            for i in range(self.blocks_for(move.num_slots)):
                count = min(self.block_size, move.num_slots - i * self.block_size)
                copies.append(Copy(move.src + i, region.start + i, count))
        moves = list(self._moves.values())
        self._moves.clear()
        for move in moves:
            self._unpin(move)
        self._num_copies += len(copies)
        return Actions(tuple(copies))

    def stats(self) -> PoolStats:
        """Blocks by state and counts since the start; `copies` are those handed over. O(1)."""
        return PoolStats(
            num_blocks=self.num_blocks,
            free=self._free.total,
            held=self.num_blocks - self._free.total,
            cached=0,
            sequences=len(self._open),
            evictions=0,
            copies=self._num_copies,
            merges=0,
        )

    def unusable(self, num_tokens: int) -> int:
        """Free slots in regions too small for a new sequence of `num_tokens`: external fragmentation."""
        want = self._region_blocks(num_tokens, num_tokens)
        regions = zip(self._free.starts, self._free.ends, strict=True)
        return self.block_size * sum(end - start for start, end in regions if end - start < want)

    # -- for ContiguousSequence ----------------------------------------------------------------

    def _region_blocks(self, num_tokens: int, final_len: int) -> int:
        """Blocks of the region that the policy takes for a sequence of `num_tokens` so far."""
        if self.policy == "oracle":
            limit = size = final_len
        else:
            limit = self.max_len
            size = limit if self.policy == "max" else min(_next_power(num_tokens), limit)
        if num_tokens > limit:
            raise InvalidArgument(
                f"{num_tokens} tokens, but policy {self.policy!r} was told {limit} at most: "
                "raise max_len or final_len"
            )
        return self.blocks_for(size)

    def _take(self, start: int, count: int) -> Region:
        self._free.take(start, start + count)
        return Region(start, count)

    def _place(self, seq: ContiguousSequence, old: Region, want: int) -> int:
        """Where a longer region for `seq` may start: first fit, else around its old one; -1 if nowhere.

        Around itself a region moves down by its data's length or more, or up, so that no block is both
        read and written; and only where no other move reads the old region.
        """
        start = self._free.first_fit(want)
        due = self._moves.get(old)
        if start >= 0 or old.holders > 1 or (due is not None and due.inside):
            return start
        kept = 0 if due is not None else self.blocks_for(seq.committed)
        low, high = self._free.around(old.start, old.end)
        if high - low >= want:
            for start in (low, old.start + kept):
                if start + want <= high and (start + kept <= old.start or start >= old.start + kept):
                    return start
        return -1

    def _move(self, old: Region, start: int, want: int, num_slots: int) -> Region:
        """A region of `want` blocks at `start`, to be filled from `old`, whose sequence lets it go."""
        src, pins = self._source(old)
        if start < old.end and old.start < start + want:
            return self._move_around(old, start, want, src, num_slots)
        new = self._take(start, want)
        if num_slots:
            self._queue(new, src, num_slots, pins)
        self._shorten(old, 0)
        self._release(old)
        return new

    def _move_around(self, old: Region, start: int, want: int, src: int, num_slots: int) -> Region:
        """The same where the two overlap: what is left of `old` stays pinned, the rest is part of the new."""
        due = self._moves.pop(old, None)
        end = old.end
        self._free.give(old.start, end)
        new = self._take(start, want)
        if due is not None:
            self._moves[new] = due  # nothing lies in `old` yet, its source is elsewhere
        elif num_slots:
            if start <= old.start:
                old.start = min(start + want, end)
            else:
                end = start
            old.count = end - old.start
            if old.count:
                self._free.take(old.start, end)
            self._moves[new] = Move(src, num_slots, (old,), inside=True)
        return new

    def _source(self, region: Region) -> tuple[int, tuple[Region, ...]]:
        """The block where the data of `region` starts now, and the regions that it lies in. A region that
        still waits to be filled is bypassed, so that copies stay independent."""
        due = self._moves.get(region)
        if due is None:
            return region.start, (region,)
        return due.src, (*due.pins, region) if due.inside else due.pins

    def _queue(self, target: Region, src: int, num_slots: int, pins: tuple[Region, ...]) -> None:
        for region in pins:
            region.holders += 1
        self._moves[target] = Move(src, num_slots, pins)

    def _shorten(self, region: Region, num_slots: int) -> None:
        """At most `num_slots` of what is due in `region` are still wanted."""
        due = self._moves.get(region)
        if due is None:
            return
        due.num_slots = min(due.num_slots, num_slots)
        if due.num_slots == 0:
            self._unpin(self._moves.pop(region))

    def _unpin(self, move: Move) -> None:
        for region in move.pins:
            self._release(region)

    def _release(self, region: Region) -> None:
        region.holders -= 1
        if region.holders == 0:
            self._free.give(region.start, region.end)

    def _enter(self, seq: ContiguousSequence) -> int:
        """A table row for a new sequence; the array doubles when there is none."""
        if not self._free_rows:
            rows = len(self._tables)
            more = max(rows, 16)
            self._tables = np.pad(self._tables, ((0, more), (0, 0)), constant_values=-1)
            self._free_rows = list(range(rows + more - 1, rows - 1, -1))
        row = self._free_rows.pop()
        self._open[row] = seq
        return row

    def _leave(self, seq: ContiguousSequence) -> None:
        self._tables[seq.row] = -1
        del self._open[seq.row]
        self._free_rows.append(seq.row)

    def _fill_row(self, row: int, region: Region) -> None:
        have = self._tables.shape[1]
        if region.count > have:
            wider = max(region.count, 2 * have) - have
            self._tables = np.pad(self._tables, ((0, 0), (0, wider)), constant_values=-1)
        self._tables[row, : region.count] = np.arange(region.start, region.end, dtype=np.int32)

    def check(self) -> None:
        """Walk the invariants (numbers as in docs/kv.md) and raise InvariantViolated. O(blocks + tables)."""
        check_regions(self._free, [s._region for s in self._open.values() if s._region], self._moves)
        if set(self._free_rows) & set(self._open) or len(self._free_rows) + len(self._open) != len(
            self._tables
        ):
            raise InvariantViolated(5, "a table row is lost or used twice")
        for row in range(len(self._tables)):
            seq = self._open.get(row)
            region = seq._region if seq else None
            want = np.full(self._tables.shape[1], -1, np.int32)
            if region is not None:
                want[: region.count] = np.arange(region.start, region.end)
            if not np.array_equal(self._tables[row], want):
                raise InvariantViolated(5, f"row {row} is not {region}")
        for seq in self._open.values():
            if not 0 <= seq.committed <= seq.length <= seq.capacity:
                raise InvariantViolated(6, f"{seq}: committed {seq.committed}, capacity {seq.capacity}")
            due = self._moves.get(seq._region) if seq._region is not None else None
            if due is not None and due.num_slots != seq.committed:
                raise InvariantViolated(9, f"{seq}: {due.num_slots} slots due of {seq.committed}")
        for move in self._moves.values():
            if not self._covered(move):
                raise InvariantViolated(9, f"{move} reads blocks that it does not pin")

    def _covered(self, move: Move) -> bool:
        pinned = {b for region in (*move.pins, *self._targets(move)) for b in range(region.start, region.end)}
        return pinned.issuperset(range(move.src, move.src + self.blocks_for(move.num_slots)))

    def _targets(self, move: Move) -> list[Region]:
        return [region for region, due in self._moves.items() if due is move and due.inside]


def _next_power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
