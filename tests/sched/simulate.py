"""Runs a Scheduler without a model: a logical step is the clock, sampled tokens come from a seed.

After every step the pool walks its invariants and the harness checks what must hold whatever happens; at
the end of a run, what must have held over time. Everything random comes from one seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from octavo.kv import Move, Place, Pool
from octavo.sched import Branch, Plan, Request, Scheduler, SchedulerConfig, State
from octavo.sched.lengths import Lengths


class Optimist(Lengths):
    """Expects too little, now and then by a lot: what makes a scheduler admit too much."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def left(self, done: int, limit: int) -> int:
        return self._rng.randint(1, max(1, limit // 4))


@dataclass
class Life:
    """When a request came, first started and ended, in steps."""

    arrived: int
    older: int  # requests that were here, unfinished, when it came
    started: int | None = None
    ended: int | None = None


@dataclass
class Spans:
    """For the bound on waiting: how long branches ran at a stretch."""

    since: dict[Branch, int] = field(default_factory=dict)
    longest: int = 0


class Simulation:
    """Steps a scheduler, checks the pool after every step, and remembers what was computed.

    next_token(branch) is a function of the branch's tokens alone, as a greedy model's would be, so
    that a preempted run must end with the same tokens as an undisturbed one.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        *,
        host_blocks: int = 0,
        lengths: Lengths | None = None,
        pool: Any = None,
        **config: Any,
    ) -> None:
        if pool is None:
            pool = Pool(num_blocks, block_size, prefix_caching=prefix_caching, host_blocks=host_blocks)
        self.pool = pool
        config.setdefault("max_model_len", num_blocks * block_size + 1)
        self.scheduler = Scheduler(self.pool, SchedulerConfig(**config), lengths)
        self.plans: list[Plan] = []
        self.requests: list[Request] = []
        self.lives: dict[Request, Life] = {}
        self.spans = Spans()
        self.steps = 0
        self.lost = 0
        self.forced: set[Branch] = set()  # stopped for another reason than room

    def submit(self, prompt: list[int], max_tokens: int, n: int = 1, **more: Any) -> Request:
        request = Request(prompt, max_tokens, n, **more)
        self.scheduler.submit(request, float(self.steps))
        older = sum(not other.finished for other in self.requests)
        self.requests.append(request)
        self.lives[request] = Life(self.steps, older)
        return request

    def step(
        self,
        stop: Callable[[Branch], bool] | None = None,
        lose: Callable[[Place], bool] | None = None,
        fail: bool = False,
    ) -> Plan:
        """One step. stop: whether a branch ends of itself. lose: whether a transfer to a place fails.
        fail: the forward pass raises."""
        scheduler = self.scheduler
        before = {branch: branch.first_at for branch in scheduler.waiting}
        top = min(scheduler.running, key=self._rank, default=None)
        self.steps += 1
        plan = scheduler.plan(float(self.steps))
        self._check_plan(plan, before, top)
        for transfer in plan.actions.transfers:
            if lose is not None and isinstance(transfer, Move) and lose(transfer.dst):
                self.lost += 1
                lost = self.pool.lost(transfer.dst)
                self.forced |= {b for b in (*scheduler.running, *scheduler.waiting) if b.kv in lost}
                plan = scheduler.retract(plan, lost)
                self.pool.check()
        self.plans.append(plan)
        if fail:
            scheduler.fail(plan)
        else:
            sampled = [[next_token(e.branch.tokens, i) for i in range(e.num_samples)] for e in plan.entries]
            for branch in scheduler.complete(plan, sampled):
                if branch.num_output == branch.request.max_tokens or (stop and stop(branch)):
                    scheduler.finish(branch)
        self.pool.check()
        self._note_lives()
        return plan

    def run(self, limit: int = 10_000, **more: Any) -> None:
        """Step until idle; every step must do something."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            lost = self.lost
            plan = self.step(**more)
            assert plan.entries or plan.preempted or plan.stuck or self.lost > lost, "a step does nothing"
        assert not self.scheduler.has_work, f"not idle after {limit} steps"
        self.check_idle()

    def check_idle(self) -> None:
        """Nothing is held in any tier, and nobody is remembered."""
        stats = self.pool.stats()
        assert (stats.held, stats.host.held, stats.sequences) == (0, 0, 0)
        assert not self.scheduler._memory.holders
        assert len(self.scheduler.waiting) == 0

    def check_bounds(self) -> None:
        """Nobody waited longer, nor was stopped more often, than is promised."""
        config = self.scheduler.config
        for request, life in self.lives.items():
            if life.started is not None:
                wait, longest = life.started - life.arrived, self.spans.longest
                bound = config.max_wait + (life.older + 1) * (config.max_wait + longest)
                assert wait <= bound, f"waited {wait} steps, bound {bound}"
            for branch in request.branches:
                assert branch in self.forced or branch.num_preemptions <= config.max_preemptions

    # -- inside --------------------------------------------------------------------------------

    def _rank(self, branch: Branch) -> tuple[int, ...]:
        return self.scheduler.waiting.rank(branch, self.steps + 1)

    def _check_plan(self, plan: Plan, before: dict[Branch, int], top: Branch | None) -> None:
        scheduler = self.scheduler
        config = scheduler.config
        self.pool.check()
        assert plan.num_tokens <= config.max_batched_tokens
        widths = sum(branch.width for branch in scheduler.running)
        assert widths <= config.max_running
        slots = [slot for entry in plan.entries for slot in entry.slots.tolist()]
        assert len(set(slots)) == len(slots)
        assert len(scheduler.running) == len(set(scheduler.running))
        assert not set(scheduler.running) & set(scheduler.waiting)
        for branch in scheduler._memory.holders:
            assert branch.state is State.WAITING
            assert branch.kv is not None
        for branch in scheduler.running:
            assert branch.kv is not None
            assert branch.kv.on_device
        # Whoever was first for max_wait steps is passed by nobody who came later.
        due = [b for b, first in before.items() if 0 <= first <= self.steps - config.max_wait]
        oldest = min((b.age for b in due if b.state is State.WAITING), default=None)
        if oldest is not None:
            for branch in before:
                assert branch.state is not State.RUNNING or branch.age < oldest, "passed one that was due"
        # The first in rank is never the one to stop, unless one that waits is before it.
        if top is not None and top in plan.preempted:
            rank = scheduler.waiting.rank(top, self.steps)
            assert any(scheduler.waiting.rank(b, self.steps) < rank for b in before)

    def _note_lives(self) -> None:
        running = set(self.scheduler.running)
        for request, life in self.lives.items():
            if life.started is None and request.num_cached is not None:
                life.started = self.steps
            if life.ended is None and request.finished:
                life.ended = self.steps
        spans = self.spans
        for branch in running - spans.since.keys():
            spans.since[branch] = self.steps - 1
        for branch in spans.since.keys() - running:
            spans.longest = max(spans.longest, self.steps - spans.since.pop(branch) + 1)


def next_token(tokens: list[int], sample: int = 0) -> int:
    """A made-up greedy continuation: depends on all tokens so far and nothing else."""
    return random.Random(f"{tokens}/{sample}").randrange(5)


def expected(prompt: list[int], max_tokens: int, sample: int = 0) -> list[int]:
    """What a branch must end with, computed without a scheduler."""
    tokens = list(prompt)
    for i in range(max_tokens):
        tokens.append(next_token(tokens, sample if i == 0 else 0))
    return tokens
