"""Victims, modes, partial preemption, bounds, swap and its failures."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo.kv import Place, Pool, Tier
from octavo.sched import Costs, State
from octavo.sched.chunks import Draft
from octavo.sched.lengths import Lengths
from octavo.sched.preemption import choose, unit_of
from tests.sched.simulate import Simulation, expected
from tests.sched.test_scheduler import tokens


class Hopeful(Lengths):
    """Expects every branch to end at once, so that too much is admitted."""

    def left(self, done: int, limit: int) -> int:
        return 1


def crowded(blocks: int = 24, count: int = 6, prompt: int = 8, out: int = 24, **options: Any) -> Simulation:
    """`count` requests that together need far more than there is."""
    sim = Simulation(blocks, 4, lengths=Hopeful(), **options)
    for i in range(count):
        sim.submit(tokens(i + 1, prompt), out)
    return sim


def assert_right(sim: Simulation) -> None:
    for request in sim.requests:
        for branch in request.branches:
            assert branch.tokens == expected(request.prompt, request.max_tokens, branch.index)


@pytest.mark.parametrize("caching", [True, False])
def test_a_victim_gives_back_its_last_blocks_only(caching: bool) -> None:
    """One block short: the youngest waits, keeps all blocks but one, and computes only those tokens again."""
    sim = crowded(8, 2, prompt=13, out=6, prefix_caching=caching, watermark=0.0)
    while not (plan := sim.step()).preempted:
        pass
    (victim,) = plan.preempted
    assert victim.request is sim.requests[1]
    assert victim.state is State.WAITING
    assert victim.kv is not None
    assert victim.kv.length >= 12
    sim.run()
    assert_right(sim)
    stats = sim.scheduler.stats
    assert stats.preempted == {"partial": 1}
    assert stats.recomputed <= 4


def test_the_last_blocks_are_found_again_if_nobody_took_them() -> None:
    """What a victim gave back is still cached when its turn comes: nothing is computed twice."""
    sim = Simulation(16, 4)
    request = sim.submit(tokens(1, 13), 8)
    for _ in range(4):
        sim.step()
    sim.scheduler._memory.stop(request.branches[0], "partial", blocks=2)
    assert request.branches[0].kv is not None
    assert request.branches[0].kv.length == 8
    sim.run()
    assert_right(sim)
    assert sim.scheduler.stats.recomputed == 0


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("host", [0, 3, 64])
def test_every_mode_ends_the_same(mode: str, host: int) -> None:
    """No, little or much room on the host: right outputs, nothing held anywhere; a full host is counted and
    its victims are computed again."""
    sim = crowded(preemption=mode, host_blocks=host)
    sim.run()
    assert_right(sim)
    stats = sim.scheduler.stats
    assert stats.preemptions > 0
    assert (stats.preempted["swap"] > 0) == (mode != "recompute" and host > 3)
    assert stats.swapped_in == stats.swapped_out
    if mode == "swap":
        assert (stats.swap_full > 0) == (host <= 3)
    if mode == "swap" and host == 64:
        assert stats.recomputed == 0


@pytest.mark.parametrize(("block", "mode"), [(0.01, "swap"), (1000.0, "partial")])
def test_auto_goes_by_what_was_measured(block: float, mode: str) -> None:
    """Cheap transfers: swap. Dear ones: recompute."""
    sim = crowded(preemption="auto", host_blocks=64)
    sim.scheduler.costs = Costs(token=1.0, block=block)
    sim.run()
    assert_right(sim)
    assert set(sim.scheduler.stats.preempted) == {mode}


def test_a_transfer_that_fails_costs_its_request_time_and_nobody_else_anything() -> None:
    """Three times oversubscribed with swap, every third block lost on its way in either direction: all end
    right, nothing is held."""
    sim = crowded(count=9, preemption="swap", host_blocks=64)
    count = 0

    def lose(place: Place) -> bool:
        nonlocal count
        count += 1
        return count % 3 == 0

    sim.run(lose=lose)
    assert_right(sim)
    assert sim.lost > 3
    assert sim.scheduler.stats.preempted["lost"] > 0


def test_a_block_lost_while_its_owner_waits() -> None:
    """A swap-out that fails: the waiting sequence gives up its host slots and starts over."""
    sim = crowded(preemption="swap", host_blocks=64)
    sim.run(lose=lambda place: place.tier is Tier.HOST)
    assert_right(sim)
    assert sim.scheduler.stats.swapped_in == 0
    assert sim.pool.stats().host.held == 0


def test_the_cheapest_that_gains_enough_is_chosen() -> None:
    """Of three running: the one that loses least among those that gain enough; of equals the last."""
    pool = Pool(64, 4)
    small, large, last = (pool.open(tokens(i, n)) for i, n in ((1, 5), (2, 33), (3, 33)))

    class Running:
        def __init__(self, kv: Any) -> None:
            self.kv = kv

    units = []
    for i, (kv, count) in enumerate(((small, 4), (large, 32), (last, 32)), 1):
        kv.reserve(count)
        kv.extend(count)
        pool.drain()
        kv.commit(tokens(i, count))
        units.append(unit_of(pool, [Running(kv)]))  # type: ignore[list-item]
    one = choose(units, 1, pool, "recompute", Costs(pair=0.0, read=0.0))
    assert one is not None
    assert (one.unit, one.mode, one.loss) == (units[2], "partial", 4.0)
    two = choose(units[:2], 4, pool, "recompute", Costs(pair=0.0, read=0.0))
    assert two is not None
    assert (two.unit, two.mode) == (units[1], "partial")
    none_enough = choose(units[:1], 4, pool, "recompute", Costs())
    assert none_enough is not None
    assert (none_enough.unit, none_enough.mode) == (units[0], "recompute")
    shared = large.fork()
    assert choose([unit_of(pool, [Running(large)])], 1, pool, "recompute", Costs()) is None  # type: ignore[list-item]
    together = unit_of(pool, [Running(large), Running(shared)])  # type: ignore[list-item]
    assert together.gain == 8


def test_branches_that_share_blocks_stop_together() -> None:
    """A request of four branches on one prompt is stopped as a whole, for one by one would gain little."""
    sim = Simulation(20, 4, lengths=Hopeful(), watermark=0.0)
    old = sim.submit(tokens(1, 8), 60)
    young = sim.submit(tokens(2, 30), 12, n=4)
    sim.step()
    sim.step()
    memory, branch = sim.scheduler._memory, old.branches[0]
    (unit,) = memory._units(branch, sim.steps)
    assert unit.branches == tuple(young.branches)
    alone = [unit_of(sim.pool, [other]).gain for other in young.branches]
    assert (unit.gain, sum(alone)) == (7 + 4, 4)
    assert branch.kv is not None
    draft = Draft(100, Costs())
    assert memory.make_room(branch, 50, draft, sim.steps)
    assert draft.preempted == young.branches
    sim.run()
    assert_right(sim)
    assert branch.num_preemptions == 0


def test_branches_of_one_request_compete_one_by_one() -> None:
    """Eight branches of one request in a pool that holds two: they take turns, the first is never stopped."""
    sim = Simulation(8, 4, lengths=Hopeful(), watermark=0.0)
    request = sim.submit(tokens(1, 4), 20, n=8)
    sim.run()
    assert_right(sim)
    assert request.branches[0].num_preemptions == 0
    assert sim.scheduler.stats.preemptions > 0
    sim.check_bounds()


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_nobody_is_stopped_more_often_than_allowed(bound: int) -> None:
    """Whatever is misjudged, a branch is preempted max_preemptions times at most, and finishes."""
    for seed in range(5):
        rng = random.Random(seed)
        sim = Simulation(16, 4, lengths=Hopeful(), max_preemptions=bound)
        for i in range(12):
            sim.submit(tokens(i, rng.randint(1, 12)), rng.randint(8, 40))
        sim.run()
        assert_right(sim)
        counts = [branch.num_preemptions for request in sim.requests for branch in request.branches]
        assert max(counts) <= bound


@pytest.mark.parametrize("caching", [True, False])
def test_a_long_request_is_not_resumed_to_be_stopped_again(caching: bool) -> None:
    """A long request preempted while the pool is 60 % full comes back once it can stay: two preemptions at
    most, and in few steps."""
    sim = Simulation(50, 4, caching, lengths=Hopeful())
    fill = sim.submit(tokens(1, 116), 60)
    long = sim.submit(tokens(2, 60), 80)
    sim.run(limit=260)
    assert_right(sim)
    assert fill.branches[0].num_preemptions == 0
    assert 1 <= long.branches[0].num_preemptions <= 2


def test_a_sole_request_that_was_underestimated_ends_with_an_error() -> None:
    """Two blocks more than the pool has, all alone: given up after a few steps, what follows is served."""
    sim = Simulation(6, 4)
    wrong = sim.submit(tokens(1, 16), 8)
    wrong.max_tokens = 16
    right = sim.submit(tokens(2, 8), 4)
    stuck = []
    for _ in range(30):
        if sim.scheduler.has_work:
            stuck += sim.step().stuck
    assert stuck == wrong.branches
    assert wrong.branches[0].num_preemptions <= 2
    assert right.branches[0].tokens == expected(right.prompt, 4)
    assert sim.scheduler.stats.gave_up == 1
    sim.check_idle()


def test_nothing_is_admitted_until_there_is_headroom_again() -> None:
    """In the steps after a preemption a small request waits, though it would fit; once somebody has ended it
    starts."""
    sim = crowded(12, 3, prompt=8, out=16, watermark=0.0)
    while not sim.step().preempted:
        pass
    small = sim.submit(tokens(50, 1), 1)
    sim.step()
    assert small.branches[0].state is State.WAITING
    assert sim.scheduler.stats.blocked["headroom"] > 0
    sim.run()
    assert_right(sim)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("salted", [True, False])
def test_prefill_goes_on_where_nothing_is_kept(caching: bool, salted: bool) -> None:
    """A prompt of five chunks without reuse (cache off, or a salt of its own) finishes beside others, each
    chunk computed once."""
    from octavo.kv import Scope

    sim = Simulation(64, 4, caching, max_batched_tokens=16)
    scope = Scope(salt="mine") if salted else Scope()
    sim.submit(tokens(2, 4), 30)
    sim.step()
    long = sim.submit(tokens(1, 75), 3, scope=scope)
    sim.run(limit=60)
    assert long.branches[0].tokens == expected(long.prompt, 3)
    assert sim.scheduler.stats.recomputed == 0
    assert sim.scheduler.stats.computed == 4 + 29 + 75 + 2
