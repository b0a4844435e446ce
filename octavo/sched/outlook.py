"""What those that run will hold until they end, and whether one more could run along.

    blocks held
      N  |- - - - - - - - - - - - - - - - - - - - - - - - watermark
         |            /|    /|                   growth of all that run, a block per block_size steps,
         |     /|  /   | /   |  /|               and what each gives back when it ends
         |  /   |/                 |
         +------+------+-----+-----+---> steps   the highest point must stay under the line

Each branch ends after as many tokens as `Lengths` expects. The highest point lies just before an end, so
only those are looked at (the idea is that of the "past-future" scheduler of Gong et al., ASPLOS 2025; here
without sampling, so that one trace gives one schedule).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from octavo.sched.lengths import Lengths
from octavo.sched.request import AnyPool, Branch


class _Row(NamedTuple):
    """A branch in an outlook, in steps from now, tokens and blocks. start: when it begins to hold `need`
    more blocks. have: blocks of its table then. gain: what it gives back after its last token."""

    start: int
    length: int
    left: int
    have: int
    need: int
    gain: int
    width: int


class Outlook:
    """What the running branches, and one that waits for them, will hold until they end.

    Built once a step; O(blocks held).
    """

    def __init__(self, pool: AnyPool, running: Seq[Branch], lengths: Lengths, limit: int) -> None:
        """limit: blocks that may be held."""
        self._pool = pool
        self._lengths = lengths
        self._limit = limit - pool.stats().held
        self._rows: list[_Row] = []
        self._next: _Row | None = None
        for branch in running:
            assert branch.kv is not None
            gain = pool.gain([branch.kv])  # type: ignore[list-item]
            self._rows.append(self._row(branch, len(branch.kv.table), 0, gain))

    def fits(self, branch: Branch) -> bool:
        """Whether `branch`, which takes `branch.need` blocks now, and all others could run to their
        expected ends, without making the one that is expected() start later. O(branches^2), vectorised.
        """
        rows = [*self._rows, self._new(branch)]
        if self._next is not None:
            rows.append(self._next)
        return self._peak(rows) <= self._limit

    def add(self, branch: Branch) -> None:
        """A branch was started."""
        self._rows.append(self._new(branch))

    def expect(self, branch: Branch, start: int | None = None) -> int:
        """`branch` is to start as soon as it fits: from now on nobody fits() who would be in its way.

        start: when that is, if it is known. Returns it, in steps from now. O(branches^3), vectorised.
        """
        row = self._new(branch)
        if start is None:
            ends = sorted({1 + other.left for other in self._rows})
            low, high = 0, len(ends) - 1
            while low < high:  # nearly monotone: later, more will have ended
                middle = (low + high) // 2
                start = ends[middle]
                fits = self._peak([*self._rows, row._replace(start=start)], start) <= self._limit
                low, high = (low, middle) if fits else (middle + 1, high)
            start = ends[low] if ends else 0
        self._next = row._replace(start=start)
        return start

    def _peak(self, rows: list[_Row], since: int = 0) -> int:
        """The most blocks held at a time from `since` on, beyond those held now."""
        start, length, left, have, need, gain, width = np.array(rows, np.int64).T
        ends = start + left
        times = np.concatenate([ends[ends >= since], start[start >= since]])[:, None]
        size = self._pool.block_size
        grown = -(-(length + np.maximum(times - start, 0)) // size)
        growth = np.maximum(grown - have, 0) + (width - 1) * (grown - length // size)
        held = need + np.where(times <= ends, growth, -gain)
        return int(np.where(times >= start, held, 0).sum(1).max())

    def _new(self, branch: Branch) -> _Row:
        have = self._pool.blocks_for(len(branch.tokens))
        return self._row(branch, have, branch.need, branch.need)

    def _row(self, branch: Branch, have: int, need: int, gain: int) -> _Row:
        left = self._lengths.left(branch.num_output, branch.tokens_left)
        return _Row(0, len(branch.tokens), left, have, need, gain, branch.width)
