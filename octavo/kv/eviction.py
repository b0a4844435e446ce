"""Which cached block goes first when a new one is needed.

A policy is told of every block that becomes cached and of every one that stops being so; `victim`
names the next to evict, which must be a leaf of the prefix tree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """The seam for eviction policies. Each call O(1) or O(log n) in the number of cached blocks."""

    def add(self, block: int) -> None:
        """`block` has just become cached: its last holder left."""

    def remove(self, block: int) -> None:
        """`block` is cached no more: a sequence holds it again, or it left the tree."""

    def victim(self) -> int:
        """The cached block to evict next. Called only while there is one."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...


class LRU:
    """Least recently released first.

    A sequence gives its blocks back from the tail, and whoever holds a block holds its ancestors
    (invariant 3), so a block is never released after its parent: the oldest entry is always a leaf
    and no leaf has to be searched for. Every call is O(1).
    """

    def __init__(self) -> None:
        self._queue: OrderedDict[int, None] = OrderedDict()

    def add(self, block: int) -> None:
        self._queue[block] = None

    def remove(self, block: int) -> None:
        del self._queue[block]

    def victim(self) -> int:
        return next(iter(self._queue))

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[int]:
        return iter(self._queue)
