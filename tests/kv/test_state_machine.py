"""The pool against its oracle, with check() after every operation."""

import random

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.kv import Scope
from tests.kv.driver import SCOPES, Driver

tokens = st.lists(st.integers(0, 2), max_size=20)


class PoolMachine(RuleBasedStateMachine):
    """Hypothesis picks the operations, so that a failure comes back shrunk to its core."""

    @initialize(
        blocks=st.integers(1, 10),
        size=st.sampled_from((1, 2, 3, 4, 7)),
        caching=st.sampled_from((True, True, False)),
        host=st.sampled_from((0, 0, 2, 8)),
        disk=st.sampled_from((0, 3)),
    )
    def start(self, blocks: int, size: int, caching: bool, host: int, disk: int) -> None:
        self.driver = Driver(blocks, size, caching, host, disk)

    @rule(tokens=tokens, scope=st.sampled_from(SCOPES))
    def open(self, tokens: list[int], scope: Scope) -> None:
        if len(self.driver.pairs) < 6:
            self.driver.open(tokens, scope)

    @precondition(lambda self: self.driver.pairs)
    @rule(data=st.data(), n=st.integers(1, 12), tokens=tokens)
    def grow(self, data: st.DataObject, n: int, tokens: list[int]) -> None:
        pair = data.draw(st.sampled_from(self.driver.pairs))
        if self.driver.reserve(pair, n) and tokens:
            self.driver.extend(pair, tokens[:n])

    @rule()
    def forward(self) -> None:
        self.driver.forward()

    @precondition(lambda self: any(not p.pending and p.real.on_device for p in self.driver.pairs))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        here = [p for p in self.driver.pairs if not p.pending and p.real.on_device]
        self.driver.fork(data.draw(st.sampled_from(here)))

    @precondition(lambda self: any(not p.pending for p in self.driver.pairs))
    @rule(data=st.data(), back=st.booleans())
    def swap(self, data: st.DataObject, back: bool) -> None:
        pair = data.draw(st.sampled_from([p for p in self.driver.pairs if not p.pending]))
        self.driver.drain()
        (self.driver.resume if back else self.driver.suspend)(pair)

    @precondition(lambda self: self.driver.pairs)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        pair = data.draw(st.sampled_from(self.driver.pairs))
        self.driver.truncate(pair, data.draw(st.integers(0, pair.real.length)))

    @precondition(lambda self: self.driver.pairs)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        self.driver.revoke(data.draw(st.sampled_from(self.driver.pairs)))

    @precondition(lambda self: self.driver.pairs)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.driver.close(data.draw(st.sampled_from(self.driver.pairs)))

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "driver"):
            self.driver.compare()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.finish()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)


def play(operations: int, seed: int) -> None:
    """`operations` random operations over pools of 1 to 14 blocks, 500 to a pool."""
    rng = random.Random(seed)
    for _ in range(operations // 500):
        size = rng.choice((1, 2, 3, 4, 5, 8))
        host, disk = rng.choice((0, 0, 1, 4, 20)), rng.choice((0, 0, 3, 12))
        driver = Driver(rng.randint(1, 14), size, rng.random() < 0.85, host, disk)
        driver.windows = rng.random() < 0.2
        alphabet, longest = rng.choice((1, 2, 3)), rng.choice((4, 12, 30))
        for _ in range(500):
            driver.random_step(rng, alphabet, longest)
        driver.finish()


@pytest.mark.parametrize("seed", range(4))
def test_random_play(seed: int) -> None:
    """10,000 random operations agree with the oracle and keep every invariant."""
    play(10_000, seed)


def play_size(size: int, operations: int) -> None:
    """Random operations at one block size, over three tiers and pools of a few blocks."""
    rng = random.Random(size)
    driver = Driver(rng.randint(3, 8), size, host=rng.choice((0, 3, 8)), disk=rng.choice((0, 4)))
    for _ in range(operations):
        driver.random_step(rng, alphabet=2, longest=2 * size + 2)
    driver.finish()


@pytest.mark.parametrize("size", [7, 16, 31, 64, 256])
def test_random_play_at_larger_block_sizes(size: int) -> None:
    """200 operations each, over all tiers."""
    play_size(size, 200)


@pytest.mark.proof
def test_random_play_at_every_block_size() -> None:
    """150 operations at each block size from 1 to 256, over all tiers."""
    for size in range(1, 257):
        play_size(size, 150)


@pytest.mark.proof
def test_a_million_operations() -> None:
    """1,000,000 random operations at small sizes, check() after each, agree with the oracle."""
    play(1_000_000, seed=20261129)
