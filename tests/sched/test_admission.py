"""Room to grow, misfits, turns, shared cold prefixes, the bounded queue."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.kv.contiguous import ContiguousPool
from octavo.sched import NeverFits, QueueFull, State
from octavo.sched.admission import leader_of
from octavo.sched.lengths import Lengths
from octavo.sched.request import Branch, Request
from tests.sched.simulate import Optimist, Simulation, expected
from tests.sched.test_scheduler import short_outputs, tokens


def test_room_to_the_end_is_planned() -> None:
    """Two that fit now but not to their ends run one after the other, without any preemption; told that
    outputs are short, they run together."""
    sim = Simulation(12, 4, watermark=0.0)
    a, b = sim.submit(tokens(1, 8), 24), sim.submit(tokens(2, 8), 24)
    sim.step()
    assert (a.branches[0].state, b.branches[0].state) == (State.RUNNING, State.WAITING)
    assert sim.scheduler.stats.blocked == {"growth": 1}
    sim.run()
    assert sim.scheduler.stats.preemptions == 0
    sim = Simulation(12, 4, watermark=0.0, lengths=short_outputs())
    a, b = sim.submit(tokens(1, 8), 24), sim.submit(tokens(2, 8), 24)
    sim.step()
    assert (a.branches[0].state, b.branches[0].state) == (State.RUNNING, State.RUNNING)


def test_memory_that_comes_back_in_time_is_planned_with() -> None:
    """One that needs much at its end runs beside one that has ended by then."""
    sim = Simulation(12, 4, watermark=0.0)
    long, short = sim.submit(tokens(1, 4), 40), sim.submit(tokens(2, 20), 4)
    sim.step()
    assert {long.branches[0].state, short.branches[0].state} == {State.RUNNING}
    sim.run()
    assert sim.scheduler.stats.preemptions == 0


def test_a_misfit_is_passed_over_by_what_is_not_in_its_way() -> None:
    """A large one waits for room; a small one that ends before starts, one that would delay it does not."""
    sim = Simulation(24, 4, watermark=0.0)
    running = sim.submit(tokens(1, 40), 12)  # 13 blocks to its end
    sim.step()
    large = sim.submit(tokens(2, 40), 8)
    sim.step()
    small, lasting = sim.submit(tokens(3, 4), 4), sim.submit(tokens(4, 32), 60)
    sim.step()
    states = [request.branches[0].state for request in (large, small, lasting)]
    assert states == [State.WAITING, State.RUNNING, State.WAITING]
    while not running.finished:
        sim.step()
    sim.step()
    assert large.branches[0].state is State.RUNNING
    sim.run()


def test_a_misfit_gets_its_turn_within_the_bound() -> None:
    """Small requests without end, always more of them, and outputs longer than expected: the large one starts
    within twice max_wait and what is running then."""
    sim = Simulation(16, 4, max_wait=15, watermark=0.0, lengths=short_outputs())
    for i in range(4):
        sim.submit(tokens(10 + i, 4), 8)
    sim.step()
    large = sim.submit(tokens(1, 52), 4)
    for i in range(100):
        sim.submit(tokens(100 + i, 4), 8)
        sim.step()
        if large.finished:
            break
    assert large.finished
    assert sim.lives[large].started <= 2 * 15 + 8 + 2
    sim.run()
    sim.check_bounds()


def test_the_head_that_leaves_frees_the_way_at_once() -> None:
    """A misfit that nobody may pass any more is cancelled: the next starts in that step."""
    sim = Simulation(16, 4, max_wait=2, watermark=0.0)
    sim.submit(tokens(1, 20), 30)
    sim.step()
    large = sim.submit(tokens(2, 50), 4)
    for _ in range(5):
        sim.step()
    small = sim.submit(tokens(3, 4), 2)
    sim.step()
    assert small.branches[0].state is State.WAITING
    sim.scheduler.abort(large)
    sim.step()
    assert small.branches[0].state is not State.WAITING


def test_a_head_that_does_not_fit_is_not_looked_up_each_step() -> None:
    """While it waits, its prompt is read again at most once in sixteen steps."""
    sim = Simulation(32, 4)
    sim.submit(tokens(1, 100), 20)
    sim.step()
    sim.submit(tokens(2, 100), 4)
    calls = 0
    probe, open_ = sim.pool.probe, sim.pool.open

    def counted(function: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            return function(*args, **more)

        return call

    sim.pool.probe, sim.pool.open = counted(probe), counted(open_)  # type: ignore[method-assign]
    for _ in range(16):
        sim.step()
    assert calls <= 2


@pytest.mark.parametrize("count", [2, 8, 31])
def test_one_cold_prefix_is_computed_once(count: int) -> None:
    """`count` requests with one cold prefix in one step: the prefix is computed by one of them, the others
    compute their own tokens only."""
    sim = Simulation(400, 4, max_batched_tokens=64, max_num_seqs=64)
    shared = tokens(1, 100)
    requests = [sim.submit([*shared, 5000 + i, 6000 + i], 3) for i in range(count)]
    sim.run()
    assert sim.scheduler.stats.computed == 100 + count * (2 + 2)
    for request in requests:
        assert request.branches[0].tokens == expected(request.prompt, 3)
    assert sim.pool.stats().merges == 0


def test_a_leader_is_whoever_computes_a_block_of_the_same_prefix() -> None:
    """Random prompts with common beginnings: a leader is found exactly where the tokens in common, less those
    that are known already, and less the one that is always computed, make a block."""
    rng, found = random.Random(3), 0
    for _ in range(3000):
        block = rng.choice([1, 2, 4])
        stem = [rng.randrange(3) for _ in range(20)]

        def branch(kv: bool, stem: list[int] = stem) -> Branch:
            prompt = [*stem[: rng.randrange(20)], *(rng.randrange(3) for _ in range(rng.randrange(1, 6)))]
            made = Branch(Request(prompt, 4), 0, list(prompt))
            if kv:
                length = rng.randrange(len(prompt) + 1)
                made.kv = SimpleNamespace(length=length, committed=rng.randrange(length + 1))  # type: ignore[assignment]
            return made

        waiting, running = branch(False), [branch(True) for _ in range(3)]
        waiting.hit = rng.randrange(len(waiting.tokens))
        leads = []
        for other in running:
            pairs = list(zip(waiting.tokens[:-1], other.tokens, strict=False))
            common = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
            assert other.kv is not None
            known = max(waiting.hit, other.kv.committed)
            if other.remaining > 1 and common - known >= block:
                leads.append(other)
        leader = leader_of(waiting, running, block)
        assert leader is (leads[0] if leads else None)
        found += leader is not None
    assert 300 < found < 2700


def test_identical_cold_prompts_of_one_step_leave_no_orphan() -> None:
    """Eight equal prompts in one step, with and without reuse: equal outputs, nothing held at the end."""
    for caching in (True, False):
        sim = Simulation(64, 4, caching)
        requests = [sim.submit(tokens(1, 13), 5) for _ in range(8)]
        sim.run()
        assert {tuple(r.branches[0].tokens) for r in requests} == {tuple(expected(tokens(1, 13), 5))}
        stats = sim.pool.stats()
        assert stats.free + stats.cached == 64
        assert stats.cached <= (5 if caching else 0)


def test_who_waits_for_a_prefix_goes_when_its_leader_is_gone() -> None:
    """The one that computes the shared prefix is cancelled half-way: the next takes over in the next step."""
    sim = Simulation(400, 4, max_batched_tokens=16)
    shared = tokens(1, 100)
    first, second = sim.submit([*shared, 1], 2), sim.submit([*shared, 2], 2)
    sim.step()
    sim.step()
    assert second.branches[0].state is State.WAITING
    sim.scheduler.abort(first)
    plan = sim.step()
    assert [entry.branch.request for entry in plan.entries] == [second]
    assert plan.entries[0].start == 32, "what the first had published is reused"


def test_waiting_for_a_prefix_ends_with_max_wait() -> None:
    """A leader that takes very long is not waited for beyond max_wait."""
    sim = Simulation(400, 4, max_batched_tokens=4, max_wait=10)
    shared = tokens(1, 300)
    sim.submit([*shared, 1], 2)
    second = sim.submit([*shared, 2], 2)
    for _ in range(12):
        sim.step()
    assert second.branches[0].state is State.RUNNING


def test_the_queue_is_bounded_and_counts_branches() -> None:
    """Three may run and four wait: n = 3 counts as 3, a refusal says when to come back, cancelling frees."""
    sim = Simulation(64, 4, max_num_seqs=3, max_queue=4)
    requests = [sim.submit(tokens(i, 4), 8) for i in range(3)]
    sim.step()
    sim.submit(tokens(5, 4), 8, n=3)
    with pytest.raises(QueueFull, match=r"6 sequences run or wait and the request asks for 2 more, but 7"):
        sim.submit(tokens(6, 4), 8, n=2)
    sim.submit(tokens(7, 4), 8)
    with pytest.raises(QueueFull) as caught:
        sim.submit(tokens(8, 4), 8)
    assert caught.value.retry_after is not None
    assert sim.scheduler.stats.refused == {"queue_full": 2}
    sim.scheduler.abort(requests[0])
    sim.submit(tokens(9, 4), 8)
    sim.run()


def test_twenty_sent_to_a_queue_of_four() -> None:
    """One runs, four wait, fifteen are refused at once; those admitted all finish."""
    sim = Simulation(64, 4, max_num_seqs=1, max_queue=4)
    refused = 0
    for i in range(20):
        try:
            sim.submit(tokens(i, 4), 3)
        except QueueFull:
            refused += 1
    assert (refused, len(sim.requests)) == (15, 5)
    sim.run()
    assert all(request.finished for request in sim.requests)


def test_refusals_are_counted_by_reason() -> None:
    """What never fits and what does not fit in the queue are told apart."""
    sim = Simulation(4, 4, max_num_seqs=1, max_queue=1, max_model_len=1000)
    with pytest.raises(NeverFits):
        sim.submit(tokens(1, 17), 1)
    for i in (2, 3):
        sim.submit(tokens(i, 4), 1)
    with pytest.raises(QueueFull):
        sim.submit(tokens(4, 4), 1)
    assert sim.scheduler.stats.refused == {"never_fits": 1, "queue_full": 1}


def test_queue_time_is_that_of_the_clock_given() -> None:
    """Two requests one after the other: the second waited as long as the first ran."""
    sim = Simulation(64, 4, max_num_seqs=1)
    sim.submit(tokens(1, 4), 5)
    sim.submit(tokens(2, 4), 5)
    sim.run()
    stats = sim.scheduler.stats
    assert (stats.admitted, stats.longest_queue_time) == (2, 6.0)
    assert stats.queue_time == 7.0


@pytest.mark.parametrize("policy", ["max", "pow2", "oracle"])
def test_contiguous_pools_run_the_same_requests(policy: str) -> None:
    """Over a contiguous pool of each kind: the same outputs, no preemption where regions never grow."""
    final = {}
    pool = ContiguousPool(96, policy, max_len=40, final_len=lambda prompt: final[tuple(prompt)])  # type: ignore[arg-type]
    sim = Simulation(96, 1, pool=pool, max_model_len=40)
    for i in range(12):
        prompt = tokens(i, 3 + i)
        final[tuple(prompt)] = len(prompt) + 9
        sim.submit(prompt, 10)
    sim.run()
    for request in sim.requests:
        assert request.branches[0].tokens == expected(request.prompt, 10)
    assert (sim.scheduler.stats.preemptions > 0) <= (policy == "pow2")


def test_lengths_follow_what_ended_and_what_was_cut() -> None:
    """Ends at 50 are expected for others; what was cut off at 64 is expected to go on to its limit."""
    lengths = Lengths()
    assert (lengths.left(0, 100), lengths.left(0, 8000)) == (100, 512)
    for _ in range(100):
        lengths.observe(50, ended=True)
    assert 40 <= lengths.left(0, 8000) <= 60
    assert lengths.left(0, 20) == 20
    assert lengths.left(40, 8000) <= 20
    cut = Lengths()
    for _ in range(100):
        cut.observe(64, ended=False)
    assert cut.left(0, 64) == 64
    assert cut.left(60, 300) == 300
    for _ in range(5000):
        cut.observe(8, ended=True)
    assert cut.left(0, 8000) <= 12, "old traffic fades"
    assert Lengths().left(5, 0) == 0


def test_an_optimist_is_corrected_by_preemption_not_by_failure() -> None:
    """Too much is admitted all the time: everybody ends right, within the bound on preemptions."""
    import random

    sim = Simulation(24, 4, lengths=Optimist(random.Random(1)), max_preemptions=2)
    for i in range(20):
        sim.submit(tokens(i, 6), 30)
    sim.run()
    sim.check_bounds()
    assert sim.scheduler.stats.preemptions > 5
    for request in sim.requests:
        assert request.branches[0].tokens == expected(request.prompt, 30)
