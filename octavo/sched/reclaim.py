"""Getting device blocks back from branches: the part of preemption that changes something.

    running  --stop-->  waiting, holding  nothing          recompute
                                          first blocks     partial     may be cut further, or dropped
                                          host slots       swap

preemption.py says who and how; here it is carried out on the pool's sequences.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Seq

from octavo.kv import Granted, NoRoom, Sequence
from octavo.sched.chunks import Draft
from octavo.sched.config import SchedulerConfig
from octavo.sched.preemption import Mode, Unit, choose, give_back_tail, unit_of
from octavo.sched.queue import Queue
from octavo.sched.request import AnyPool, Branch, State
from octavo.sched.stats import SchedulerStats


def _age(branch: Branch) -> tuple[int, int]:
    return branch.age


class Reclaimer:
    """The running branches, and those that wait but still hold device blocks."""

    def __init__(self, pool: AnyPool, config: SchedulerConfig, queue: Queue, stats: SchedulerStats) -> None:
        self._pool = pool
        self._config = config
        self._queue = queue
        self._stats = stats
        self.running: list[Branch] = []  # by age
        self.holders: list[Branch] = []  # waiting, by age
        self.short = False
        """Whether somebody was stopped, and no headroom was seen since."""

    def start(self, branch: Branch) -> None:
        """A branch runs from now on."""
        if branch in self.holders:
            self.holders.remove(branch)
        branch.state = State.RUNNING
        insort(self.running, branch, key=_age)

    def make_room(self, branch: Branch, count: int, draft: Draft, step: int) -> bool:
        """Reserve `count` tokens for a running branch, at the cost of those that rank behind it."""
        assert branch.kv is not None
        while isinstance(refused := branch.kv.reserve(count), NoRoom):
            if not self._take(branch, refused.short_by, draft, step):
                return False
        return True

    def stop(self, branch: Branch, mode: Mode, draft: Draft | None = None, blocks: int = 0) -> None:
        """Make a running branch wait. blocks: for "partial", how many it gives back."""
        assert branch.kv is not None
        if draft is not None:
            draft.drop(branch)
            draft.preempted.append(branch)
        branch.computed = max(branch.computed, branch.kv.committed)
        if mode == "swap":
            assert isinstance(branch.kv, Sequence)
            moved = branch.kv.suspend()
            if isinstance(moved, Granted):
                self._stats.swapped_out += moved.num_blocks
            else:
                self._stats.swap_full += 1
                mode = "recompute"
        if mode == "partial":
            if give_back_tail(branch, blocks, self._pool.block_size):
                insort(self.holders, branch, key=_age)
            else:
                mode = "recompute"
        if mode == "recompute":
            branch.kv.close()
            branch.kv = None
        self._stats.preempted[mode] += 1
        branch.num_preemptions += not branch.idle
        branch.state = State.WAITING
        branch.probed_at = -1
        self.running.remove(branch)
        self._queue.push(branch)
        self.short = True

    def lose(self, branch: Branch) -> None:
        """The KV of a branch is gone, wherever it is: it waits and computes it again."""
        assert branch.kv is not None
        if branch.state is State.RUNNING:
            self.stop(branch, "recompute")
            self._stats.preempted["recompute"] -= 1
            self._stats.preempted["lost"] += 1
        else:
            self.release(branch)

    def release(self, branch: Branch) -> None:
        """A waiting or finished branch gives back whatever it holds; what it computed stays findable."""
        if branch in self.holders:
            self.holders.remove(branch)
        if branch.kv is not None:
            branch.computed = max(branch.computed, branch.kv.committed)
            branch.kv.close()
            branch.kv = None
            branch.probed_at = -1

    def strip(self, branch: Branch, step: int) -> None:
        """Whoever waits and ranks behind `branch` gives back the device blocks that it still holds."""
        rank = self._queue.rank(branch, step)
        for holder in [other for other in self.holders if self._queue.rank(other, step) > rank]:
            self.release(holder)

    def pinned(self, branch: Branch) -> bool:
        """Whether it was stopped so often that it now has all it needs and keeps it."""
        return branch.num_preemptions >= self._config.max_preemptions

    def _take(self, branch: Branch, need: int, draft: Draft, step: int) -> bool:
        """Make at least one block available, `need` if possible; False where nobody ranks behind."""
        rank = self._queue.rank(branch, step)
        behind = [other for other in self.holders if self._queue.rank(other, step) > rank]
        if behind:
            last = max(behind, key=lambda other: self._queue.rank(other, step))
            before = self._pool.available
            if not give_back_tail(last, need, self._pool.block_size):
                self.release(last)
            if self._pool.available > before:
                return True
            self.release(last)  # what it shares gains nothing; nor is it worth holding
            return True
        choice = choose(self._units(branch, step), need, self._pool, self._config.preemption, draft.costs)
        if choice is None:
            return False
        for victim in choice.unit.branches:
            self.stop(victim, choice.mode, draft, need)
        if choice.mode != "swap" and self._config.preemption == "swap":
            self._stats.swap_full += 1
        return True

    def _units(self, branch: Branch, step: int) -> list[Unit]:
        """What could be stopped for `branch`, in the order of rank: idle beams, whatever their rank, else
        whole requests, but single branches of its own."""
        queue = self._queue
        idle = [unit_of(self._pool, [b]) for b in self.running if b.idle]
        if any(unit.gain for unit in idle):
            return idle
        rank = queue.rank(branch, step)
        ranked = sorted((queue.rank(other, step), i) for i, other in enumerate(self.running))
        groups: dict[object, list[Branch]] = {}
        for other_rank, i in ranked:
            other = self.running[i]
            if other_rank > rank and not self.pinned(other):
                own = other.request is branch.request
                groups.setdefault(other if own else other.request, []).append(other)
        return [unit_of(self._pool, branches) for branches in groups.values()]


def widths(branches: Seq[Branch]) -> int:
    """Branches that these stand for, those still to be forked included."""
    return sum(branch.width for branch in branches)
