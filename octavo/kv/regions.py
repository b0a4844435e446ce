"""Regions of consecutive blocks: those that are free, those that are owned, and moves between them.

    free     [ 3 .. 8 )  [ 21 .. 64 )       sorted, never touching, first fit
    owned    [ 0 .. 3 )  [ 8 .. 21 )        held by a sequence and by moves that still read them

Owns addresses; knows nothing of sequences, policies or tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from octavo.kv.errors import InvariantViolated


class FreeRegions:
    """Sorted free regions of blocks that never touch. Every call is O(regions)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.starts = [0]
        self.ends = [num_blocks]
        self.total = num_blocks

    @property
    def largest(self) -> int:
        """Blocks of the largest region, 0 if there is none."""
        return max((end - start for start, end in zip(self.starts, self.ends, strict=True)), default=0)

    def first_fit(self, count: int) -> int:
        """Where the first region of at least `count` blocks starts, or -1."""
        for start, end in zip(self.starts, self.ends, strict=True):
            if end - start >= count:
                return start
        return -1

    def around(self, start: int, end: int) -> tuple[int, int]:
        """How far the free room on both sides of [start, end) reaches."""
        i = bisect_left(self.starts, start)
        low = self.starts[i - 1] if i and self.ends[i - 1] == start else start
        high = self.ends[i] if i < len(self.starts) and self.starts[i] == end else end
        return low, high

    def take(self, start: int, end: int) -> None:
        """Take [start, end), which lies in one free region."""
        i = bisect_left(self.starts, start + 1) - 1
        low, high = self.starts[i], self.ends[i]
        left, right = (low, start), (end, high)
        kept = [region for region in (left, right) if region[0] < region[1]]
        self.starts[i : i + 1] = [region[0] for region in kept]
        self.ends[i : i + 1] = [region[1] for region in kept]
        self.total -= end - start

    def give(self, start: int, end: int) -> None:
        """Give [start, end) back, merging it with the free neighbours."""
        if start == end:
            return
        i = bisect_left(self.starts, start)
        low, high = self.around(start, end)
        first = i - (low < start)
        last = i + (high > end)
        self.starts[first:last] = [low]
        self.ends[first:last] = [high]
        self.total += end - start


@dataclass(eq=False, slots=True)
class Region:
    """Blocks [start, start + count), returned when `holders` (its sequence, moves out of it) is 0."""

    start: int
    count: int
    holders: int = 1

    @property
    def end(self) -> int:
        """The block behind the last one."""
        return self.start + self.count


@dataclass(slots=True)
class Move:
    """`num_slots` slots from block `src` on, due in the region that this belongs to.

    pins: the regions that the source lies in, kept until drain(). inside: part of the source lies in
    the target region itself.
    """

    src: int
    num_slots: int
    pins: tuple[Region, ...]
    inside: bool = False


def check_regions(free: FreeRegions, owned: Iterable[Region], moves: Mapping[Region, Move]) -> None:
    """Raise InvariantViolated unless the regions tile the pool (1), holders add up (2) and moves are
    independent (9). `owned`: one entry per sequence that has a region."""
    spans = list(zip(free.starts, free.ends, strict=True))
    if sum(end - start for start, end in spans) != free.total:
        raise InvariantViolated(1, f"free regions {spans} are not {free.total} blocks")
    if any(a[1] >= b[0] for a, b in pairwise(spans)):
        raise InvariantViolated(1, f"free regions {spans} touch or are out of order")
    holders: Counter[Region] = Counter(owned)
    holders.update(region for move in moves.values() for region in move.pins)
    for region, count in holders.items():
        if region.holders != count:
            raise InvariantViolated(2, f"{region} has {count} holders")
    spans = sorted(spans + [(region.start, region.end) for region in holders if region.count])
    at = 0
    for start, end in spans:
        if start != at or end <= start:
            raise InvariantViolated(1, f"regions {spans} overlap or leave a gap at {at}")
        at = end
    if at != free.num_blocks:
        raise InvariantViolated(1, f"regions end at {at}, the pool at {free.num_blocks}")
    for region, move in moves.items():
        if region not in holders or move.num_slots < 1:
            raise InvariantViolated(9, f"{move} is due in {region}, which nobody owns")
