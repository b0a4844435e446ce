"""Runs a Scheduler without a model: a logical step is the clock, sampled tokens come from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable

from octavo.kv import Pool
from octavo.sched import Branch, Plan, Request, Scheduler, SchedulerConfig


class Simulation:
    """Steps a scheduler, checks the pool after every step, and remembers what was computed.

    next_token(branch) is a function of the branch's tokens alone, as a greedy model's would be, so
    that a preempted run must end with the same tokens as an undisturbed one.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True, **config: int) -> None:
        self.pool = Pool(num_blocks, block_size, prefix_caching=prefix_caching)
        config.setdefault("max_model_len", num_blocks * block_size + 1)
        self.scheduler = Scheduler(self.pool, SchedulerConfig(**config))
        self.plans: list[Plan] = []
        self.requests: list[Request] = []

    def submit(self, prompt: list[int], max_tokens: int, n: int = 1) -> Request:
        request = Request(prompt, max_tokens, n)
        self.scheduler.submit(request)
        self.requests.append(request)
        return request

    def step(self, stop: Callable[[Branch], bool] | None = None) -> Plan:
        plan = self.scheduler.plan()
        self.plans.append(plan)
        self.pool.check()
        assert plan.num_tokens <= self.scheduler.config.max_batched_tokens
        assert len(self.scheduler.running) <= self.scheduler.config.max_running
        slots = [slot for entry in plan.entries for slot in entry.slots.tolist()]
        assert len(set(slots)) == len(slots)
        sampled = [[next_token(e.branch.tokens, i) for i in range(e.num_samples)] for e in plan.entries]
        for branch in self.scheduler.complete(plan, sampled):
            if len(branch.output) == branch.request.max_tokens or (stop and stop(branch)):
                self.scheduler.finish(branch)
        self.pool.check()
        return plan

    def run(self, limit: int = 10_000) -> None:
        """Step until idle; every step must do something."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            plan = self.step()
            assert plan.entries or plan.preempted or plan.stuck, "a step that does nothing"
        assert not self.scheduler.has_work, f"not idle after {limit} steps"
        assert self.pool.stats().held == 0


def next_token(tokens: list[int], sample: int = 0) -> int:
    """A made-up greedy continuation: depends on all tokens so far and nothing else."""
    return random.Random(f"{tokens}/{sample}").randrange(5)


def expected(prompt: list[int], max_tokens: int, sample: int = 0) -> list[int]:
    """What a branch must end with, computed without a scheduler."""
    tokens = list(prompt)
    for i in range(max_tokens):
        tokens.append(next_token(tokens, sample if i == 0 else 0))
    return tokens
