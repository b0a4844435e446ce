"""Starting branches that wait: who, in which order, and what each of them waits for otherwise.

    "places"    max_num_seqs run                      "prefix"   a running prompt computes the same prefix
    "budget"    this step's tokens are given out      "gap"      bringing it back would hold up a stream
    "memory"    no blocks for what it must hold       "growth"   blocks now, but not to everybody's end
    "headroom"  somebody had to stop, and memory is still short

A branch that does not fit is passed over, so that it does not idle the machine. But the first such one in
the order has the next turn: nobody is started who would be in its way as far as the outlook can tell, and
nobody at all once it was first for max_wait steps. It is overdue by then, so only older ones can come
before it: the wait of any branch has a bound, whatever the policy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Seq

from octavo.kv import NoRoom
from octavo.sched.chunks import Draft
from octavo.sched.config import SchedulerConfig
from octavo.sched.lengths import Lengths
from octavo.sched.outlook import Outlook
from octavo.sched.queue import Queue
from octavo.sched.reclaim import Reclaimer, widths
from octavo.sched.request import AnyPool, AnySequence, Branch
from octavo.sched.stats import SchedulerStats

PROBE_STEPS = 16
"""Steps after which what a waiting branch needs is looked up again: others may have published since."""

_TRIES = 8
"""Waiting branches that are looked at closely in one step and turn out not to fit."""

_STARTS_KEPT = 64


class Admitter:
    """Moves branches from the queue to those that run."""

    def __init__(
        self,
        pool: AnyPool,
        config: SchedulerConfig,
        queue: Queue,
        memory: Reclaimer,
        lengths: Lengths,
        stats: SchedulerStats,
    ) -> None:
        self._pool = pool
        self._config = config
        self._queue = queue
        self._memory = memory
        self._running = memory.running
        self._lengths = lengths
        self._stats = stats
        self._step = 0
        self._now = 0.0
        self._outlook: Outlook | None = None  # of this step, once it was needed
        self._first: Branch | None = None  # the first that does not fit in this step
        # Whose turn is next, the step in which it should fit, and when to look at that again.
        self._turn: tuple[Branch, int, int] | None = None
        self._starts: deque[tuple[float, int]] = deque(maxlen=_STARTS_KEPT)  # (time, branches)
        self._watermark = math.ceil(config.watermark * pool.num_blocks)

    def admit(self, draft: Draft, step: int, now: float) -> None:
        """Start what can be started in this step. O(waiting branches tried), see Queue.candidates()."""
        self._begin(step, now)
        if not self._queue or not draft.has_room:
            return
        if self._is_short():
            self._stats.blocked["headroom"] += 1
            return
        if self._config.order == "prefix":
            self._refresh_hits()
        reason = self._try_all(draft)
        if reason is not None:
            self._stats.blocked[reason] += 1

    def start_alone(self, branch: Branch, draft: Draft, step: int, now: float) -> bool:
        """Start one branch that has to run now, whatever the outlook."""
        self._begin(step, now)
        places = self._config.max_running - widths(self._running)
        return branch.width <= places and self._try(branch, draft, forced=True) is None

    def retry_after(self, places: int) -> float | None:
        """In how long so many places will be free, at the rate of the latest starts: each filled a place."""
        if len(self._starts) < 2:
            return None
        elapsed = self._starts[-1][0] - self._starts[0][0]
        started = sum(branches for _, branches in self._starts) - self._starts[0][1]
        return places * elapsed / started

    # -- inside --------------------------------------------------------------------------------

    def _begin(self, step: int, now: float) -> None:
        self._step, self._now = step, now
        self._outlook = self._first = None

    def _try_all(self, draft: Draft) -> str | None:
        """Try one after the other; returns what the first that was not started waits for."""
        places = self._config.max_running - widths(self._running)
        reason = None
        tries = 0
        for branch in self._queue.candidates(self._step):
            if not draft.has_room or places <= 0:
                return reason or ("budget" if places > 0 else "places")
            if tries == 0 and self._queue.overdue(branch.request, self._step):
                self._memory.strip(branch, self._step)
            refused = "places" if branch.width > places else self._try(branch, draft)
            if refused is None:
                places -= branch.width
                continue
            reason = reason or refused
            if refused == "prefix":
                continue  # not for want of anything: it is better off waiting
            if tries == 0:
                self._hold_turn(branch, refused)
            tries += 1
            if tries >= _TRIES or 0 <= branch.first_at <= self._step - self._config.max_wait:
                return reason
        return reason

    def _try(self, branch: Branch, draft: Draft, *, forced: bool = False) -> str | None:
        """Start a waiting branch, or say what it waits for."""
        spare = self._watermark if self._running else 0
        self._look_up(branch)
        if branch.need + spare > self._pool.available:
            return "memory"
        if not forced and self._follows(branch):
            return "prefix"
        moved = branch.kv.num_parked if branch.kv is not None else 0
        if moved and draft.resumed and moved * draft.costs.block > draft.spare:
            return "gap"
        if not forced and self._running and self._pool.grows and not self._view().fits(branch):
            return "growth"
        if not self._open(branch, spare):
            return "memory"
        draft.spare -= moved * draft.costs.block
        draft.resumed = draft.resumed or moved > 0
        self._started(branch, moved)
        draft.choose(branch, max(draft.chunk(branch), min(1, draft.budget)))
        return None

    def _follows(self, branch: Branch) -> bool:
        """Whether it should wait for a prompt that begins like its own: until that has published, or is
        gone, or this one is overdue."""
        return (
            self._pool.prefix_caching
            and branch.kv is None
            and not branch.request.score_prompt
            and not self._queue.overdue(branch.request, self._step)
            and leader_of(branch, self._running, self._pool.block_size) is not None
        )

    def _look_up(self, branch: Branch) -> None:
        """What a waiting branch needs at least, from the pool's tree or, for a while, from memory."""
        if branch.kv is not None:
            branch.need = branch.kv.need(wanted_length(branch, self._config) - branch.kv.length)
            branch.hit = branch.kv.length
        elif branch.probed_at < 0 or self._step - branch.probed_at >= PROBE_STEPS:
            self._probe(branch)

    def _probe(self, branch: Branch) -> None:
        hit = self._pool.probe(branch.tokens, branch.request.scope)
        branch.hit, branch.probed_at = min(hit.num_tokens, usable(branch)), self._step
        whole = min(hit.num_full_blocks, branch.hit // self._pool.block_size)
        branch.need = self._pool.blocks_for(wanted_length(branch, self._config)) - whole

    def _refresh_hits(self) -> None:
        """Probe again a few of those that were not for longest."""
        stale = [
            branch
            for branch in self._queue.window()
            if branch.kv is None and (branch.probed_at < 0 or self._step - branch.probed_at >= PROBE_STEPS)
        ]
        for branch in sorted(stale, key=lambda b: (b.probed_at, *b.age))[: 4 * _TRIES]:
            self._probe(branch)

    def _open(self, branch: Branch, spare: int) -> bool:
        """Give a waiting branch its sequence with all that it needs to start, or nothing new at all.

        One that kept KV may find more than that in the tree. Only one of the two is held while room is
        looked for: a block that both hold would have to be copied, and the first in rank denied its last.
        """
        pool, own = self._pool, branch.kv
        if own is None or (own.on_device and pool.prefix_caching):
            before = pool.available
            fresh = pool.open(branch.tokens, branch.request.scope, priority=branch.request.priority)
            fresh.truncate(min(fresh.length, usable(branch)))
            # What open() took was cached and counts as well, or the next attempt would be made too soon.
            if (own is None or fresh.length > own.length) and self._reserve(
                branch, fresh, spare, before - pool.available
            ):
                branch.opened = len(branch.tokens)
                self._memory.release(branch)
                branch.kv = fresh
                return True
            fresh.close()
        return own is not None and self._reserve(branch, own, spare)

    def _reserve(self, branch: Branch, kv: AnySequence, spare: int, taken: int = 0) -> bool:
        """Room in `kv` for what the branch must hold to start; else note what it needs, `taken` included."""
        count = wanted_length(branch, self._config) - kv.length
        need = kv.need(count)
        if need + spare <= self._pool.available and not isinstance(kv.reserve(count), NoRoom):
            return True
        branch.need = max(branch.need, need + taken)
        return False

    def _started(self, branch: Branch, moved: int) -> None:
        """A waiting branch has its memory: it runs from now on."""
        request, stats = branch.request, self._stats
        assert branch.kv is not None
        self._queue.remove(branch)
        if request.num_cached is None:
            request.num_cached = branch.kv.num_cached
            stats.admitted += 1
            queued = self._now - request.submitted_at
            stats.queue_time += queued
            stats.longest_queue_time = max(stats.longest_queue_time, queued)
            self._starts.append((self._now, branch.width))
        else:
            stats.resumed += 1
        branch.first_at = -1
        stats.swapped_in += moved
        self._memory.start(branch)
        self._queue.charge(request, branch.remaining)
        if self._outlook is not None:
            self._outlook.add(branch)

    def _is_short(self) -> bool:
        """Whether somebody was stopped, and nothing has made room since: two blocks for each branch that
        runs, and the watermark."""
        memory = self._memory
        if memory.short and self._pool.available >= self._watermark + 2 * len(self._running):
            memory.short = False
        return memory.short and bool(self._running)

    # -- the outlook ---------------------------------------------------------------------------

    def _view(self) -> Outlook:
        if self._outlook is None:
            limit = self._pool.num_blocks - self._watermark
            self._outlook = Outlook(self._pool, self._running, self._lengths, limit)
            if self._first is not None:
                self._expect(self._outlook, self._first)
        return self._outlook

    def _hold_turn(self, branch: Branch, refused: str) -> None:
        """The first that does not fit: who is started instead must not be in its way."""
        if branch.first_at < 0:
            branch.first_at = self._step
        if refused in ("memory", "growth"):
            self._first = branch
            if self._outlook is not None:
                self._expect(self._outlook, branch)

    def _expect(self, outlook: Outlook, branch: Branch) -> None:
        turn = self._turn
        if turn is not None and turn[0] is branch and self._step < min(turn[1:]):
            outlook.expect(branch, turn[1] - self._step)
        else:
            start = self._step + outlook.expect(branch)
            self._turn = (branch, start, self._step + PROBE_STEPS)


def wanted_length(branch: Branch, config: SchedulerConfig) -> int:
    """Token slots that it must get to start: for all known tokens, so that a prompt never stalls half-way;
    after max_preemptions to its very end, so that it never has to stop again."""
    if branch.num_preemptions < config.max_preemptions:
        return len(branch.tokens)
    return max(len(branch.tokens), len(branch.request.prompt) + branch.request.max_tokens - 1)


def usable(branch: Branch) -> int:
    """Cached tokens that it may take over: those whose logits it wants must be computed for it."""
    request = branch.request
    if request.score_prompt and request.scored < len(request.prompt):
        return request.scored
    return len(branch.tokens)


def leader_of(branch: Branch, running: Seq[Branch], block_size: int) -> Branch | None:
    """A running branch whose prompt begins as this one does and is being computed: waiting for it saves
    computing the same prefix twice. None if that would save less than a block. O(running), and
    O(tokens in common) for those that begin alike."""
    tokens, scope = branch.tokens, branch.request.scope
    for other in running:
        assert other.kv is not None
        if other.remaining <= 1 or other.request.scope != scope:
            continue
        known = max(branch.hit, other.kv.committed)
        end = known + block_size
        if end >= len(tokens) or end > len(other.tokens):  # one token is always left to compute
            continue
        # The block that it would save tells most prompts apart: those that share a prefix differ after it.
        if tokens[known:end] == other.tokens[known:end] and tokens[:known] == other.tokens[:known]:
            return other
    return None
