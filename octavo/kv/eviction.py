"""Which cached block goes first when a new one is needed.

A policy is told of every block that becomes cached and of every one that stops being so; `victim`
names the next to evict. Whoever holds a block holds its ancestors, and returns blocks from the tail, so
an ancestor is used at least as often, at least as importantly, and given back later than what follows
it: with the release as the tie-break every order below comes to leaves first, without looking for them.
(Where a caller's own use breaks that rule, evicting an inner block takes what hangs below it along.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import chain, takewhile
from math import inf
from typing import Protocol


class EvictionPolicy(Protocol):
    """The seam for eviction policies. Each call O(1) or O(log n) in the number of cached blocks."""

    def add(self, block: int, uses: int, priority: int, partial: bool) -> None:
        """`block` has just become cached: its last holder left.

        uses: how many times it was taken since it was written. priority: the highest of the sequences
        that held it. partial: it is a partly filled leaf, which saves least for the room it takes.
        """

    def remove(self, block: int) -> None:
        """`block` is cached no more: a sequence holds it again, or it left the tier."""

    def victim(self) -> int:
        """The cached block to evict next. Called only while there is one."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...


class LRU:
    """Partly filled leaves first, then least recently released. Every call is O(1)."""

    def __init__(self) -> None:
        self._partial: OrderedDict[int, None] = OrderedDict()
        self._queue: OrderedDict[int, None] = OrderedDict()

    def add(self, block: int, uses: int = 1, priority: int = 0, partial: bool = False) -> None:
        """See EvictionPolicy."""
        (self._partial if partial else self._queue)[block] = None

    def add_full(self, blocks: Iterable[int]) -> None:
        """The same as add() for each of some full blocks, in order."""
        queue = self._queue
        for block in blocks:
            queue[block] = None

    def remove(self, block: int) -> None:
        """See EvictionPolicy."""
        if block in self._queue:
            del self._queue[block]
        else:
            del self._partial[block]

    def victim(self) -> int:
        """See EvictionPolicy."""
        return next(iter(self._partial or self._queue))

    def __len__(self) -> int:
        return len(self._queue) + len(self._partial)

    def __iter__(self) -> Iterator[int]:
        return chain(self._partial, self._queue)


class _Ranked:
    """Partly filled leaves first, then lowest rank, then least recently released. O(log n), amortised.

    Entries of blocks that left stay in the heap until they surface; it is rebuilt when they are most.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int]] = []  # (rank, release, block)
        self._release: dict[int, int] = {}  # of the blocks that are cached now
        self._clock = 0
        self._age: float = -inf  # the rank of the latest victim

    def _rank(self, uses: int, priority: int) -> float:
        raise NotImplementedError

    def add(self, block: int, uses: int = 1, priority: int = 0, partial: bool = False) -> None:
        """See EvictionPolicy."""
        self._clock += 1
        self._release[block] = self._clock
        rank = -inf if partial else self._rank(uses, priority)
        heappush(self._heap, (rank, self._clock, block))
        if len(self._heap) > 2 * len(self._release) + 64:
            self._heap = sorted(entry for entry in self._heap if self._release.get(entry[2]) == entry[1])

    def remove(self, block: int) -> None:
        """See EvictionPolicy."""
        del self._release[block]

    def victim(self) -> int:
        """See EvictionPolicy."""
        while self._release.get(self._heap[0][2]) != self._heap[0][1]:
            heappop(self._heap)
        self._age = max(self._age, self._heap[0][0])
        return self._heap[0][2]

    def __len__(self) -> int:
        return len(self._release)

    def __iter__(self) -> Iterator[int]:
        return iter(self._release)


class LFU(_Ranked):
    """Least often used first, with ageing: a system prompt outlives one-off tails that came after it, but
    not for ever. A block's rank is its uses on top of the rank of the latest victim, so what was popular
    once sinks as others go (LFU with dynamic ageing: Arlitt et al., 2000)."""

    def _rank(self, uses: int, priority: int) -> float:
        return max(self._age, 0) + uses


class Priority(_Ranked):
    """Lowest priority first, as given to open()."""

    def _rank(self, uses: int, priority: int) -> float:
        return priority


class Expiring:
    """Another order, in which blocks also run out: see Pool.expire(). ttl and `now` are in the
    caller's logical time."""

    def __init__(self, order: EvictionPolicy, ttl: int) -> None:
        self._order = order
        self._since: dict[int, int] = {}  # in the order of release
        self.ttl = ttl
        self.now = 0

    def add(self, block: int, uses: int = 1, priority: int = 0, partial: bool = False) -> None:
        """See EvictionPolicy."""
        self._since[block] = self.now
        self._order.add(block, uses, priority, partial)

    def remove(self, block: int) -> None:
        """See EvictionPolicy."""
        del self._since[block]
        self._order.remove(block)

    def victim(self) -> int:
        """See EvictionPolicy."""
        return self._order.victim()

    def expired(self) -> list[int]:
        """The blocks released `ttl` ago or longer, the oldest first. O(their number)."""
        return list(takewhile(lambda block: self.now - self._since[block] >= self.ttl, self._since))

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)
