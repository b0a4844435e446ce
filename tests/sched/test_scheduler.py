"""Admission, budget, chunking, preemption and refusal, one behaviour a test."""

import pytest

from octavo.errors import InvalidRequest
from octavo.sched import NeverFits, SchedulerConfig, State
from octavo.sched.lengths import Lengths
from tests.sched.simulate import Simulation, expected


def tokens(start: int, count: int) -> list[int]:
    return list(range(start * 1000, start * 1000 + count))


def short_outputs() -> Lengths:
    """A past in which every output had one token, so that a scheduler expects too little."""
    lengths = Lengths()
    for _ in range(100):
        lengths.observe(1, ended=True)
    return lengths


def test_prefill_is_chunked_to_the_budget() -> None:
    """A 100-token prompt under a budget of 32 takes chunks 32, 32, 32, 4 and samples only at the end."""
    sim = Simulation(64, 4, max_batched_tokens=32)
    sim.submit(tokens(1, 100), 2)
    plans = [sim.step() for _ in range(4)]
    assert [plan.num_tokens for plan in plans] == [32, 32, 32, 4]
    assert [plan.entries[0].num_samples for plan in plans] == [0, 0, 0, 1]


def test_decodes_do_not_wait_for_a_long_prompt() -> None:
    """While a 500-token prompt is prefilled in chunks, the running stream gets a token every step."""
    sim = Simulation(200, 4, max_batched_tokens=16)
    stream = sim.submit(tokens(1, 4), 50)
    sim.step()
    sim.submit(tokens(2, 500), 1)
    for _ in range(20):
        before = len(stream.branches[0].output)
        plan = sim.step()
        assert len(stream.branches[0].output) == before + 1
        assert plan.num_tokens == 16


def test_first_come_first_served() -> None:
    """Requests start in order of arrival."""
    sim = Simulation(64, 4, max_num_seqs=1)
    requests = [sim.submit(tokens(i, 4), 3) for i in range(4)]
    order = []
    while sim.scheduler.has_work:
        order += [e.branch.request for e in sim.step().entries]
    assert list(dict.fromkeys(order)) == requests


def test_what_never_fits_is_refused_with_both_numbers() -> None:
    """A prompt of pool size + 1 is refused at the door, naming need, have and option; others go on."""
    sim = Simulation(4, 4, max_model_len=1000)
    with pytest.raises(NeverFits, match=r"need 5 blocks.*has 4.*kv_memory"):
        sim.submit(tokens(1, 17), 1)
    with pytest.raises(NeverFits, match=r"make 1001.*holds 1000.*max_model_len"):
        sim.submit(tokens(1, 1), 1000)
    with pytest.raises(NeverFits, match=r"n = 65.*64"):
        sim.submit(tokens(1, 1), 1, n=65)
    fits = sim.submit(tokens(2, 16), 1)
    sim.run()
    assert fits.finished


def test_the_last_sampled_token_needs_no_slot() -> None:
    """A prompt that fills the pool may still have one token sampled."""
    sim = Simulation(4, 4)
    request = sim.submit(tokens(1, 16), 1)
    sim.run()
    assert len(request.branches[0].output) == 1


def test_the_youngest_is_preempted_and_ends_the_same() -> None:
    """Two requests that outgrow the pool together: the younger is preempted, both end undisturbed."""
    sim = Simulation(7, 4, lengths=short_outputs())
    old, young = sim.submit(tokens(1, 8), 12), sim.submit(tokens(2, 8), 12)
    sim.run()
    assert old.branches[0].num_preemptions == 0
    assert young.branches[0].num_preemptions >= 1
    for request in (old, young):
        assert request.branches[0].tokens == expected(request.prompt, 12)


@pytest.mark.parametrize("length", [4, 5, 7, 8, 9])
def test_preemption_at_every_step_ends_the_same(length: int) -> None:
    """A branch preempted after each of its steps, at 0, 1 and more outputs, neither repeats nor skips."""
    for caching in (True, False):
        sim = Simulation(16, 4, caching)
        request = sim.submit(tokens(1, length), 9)
        while sim.scheduler.has_work:
            sim.step()
            for branch in list(sim.scheduler.running):
                sim.scheduler.preempt(branch)
            sim.pool.check()
        assert request.branches[0].tokens == expected(request.prompt, 9)


def test_a_preempted_request_finds_its_own_blocks() -> None:
    """What an interrupted request had computed is reused when nothing evicted it."""
    sim = Simulation(16, 4)
    request = sim.submit(tokens(1, 9), 5)
    sim.step()
    sim.step()
    sim.scheduler.preempt(request.branches[0])
    plan = sim.step()
    assert [len(entry.tokens) for entry in plan.entries] == [1]
    assert sim.scheduler.stats.recomputed == 0


def test_admission_leaves_room_to_grow() -> None:
    """A request that would take the last blocks waits while another runs, and starts once it is alone."""
    sim = Simulation(8, 4)
    sim.submit(tokens(1, 16), 4)
    second = sim.submit(tokens(2, 15), 4)
    sim.step()
    assert second.branches[0].state is State.WAITING
    sim.run()
    assert second.finished


def test_n_branches_share_the_prompt() -> None:
    """n = 4: one prefill, then four branches on the same full blocks."""
    sim = Simulation(32, 4)
    request = sim.submit(tokens(1, 10), 6, n=4)
    sim.step()
    assert len(request.branches) == 4
    assert len({tuple(b.kv.table[:2].tolist()) for b in request.branches}) == 1
    assert sim.pool.stats().held == 3
    sim.run()
    for branch in request.branches:
        assert branch.tokens == expected(request.prompt, 6, branch.index)


def test_n_counts_against_max_num_seqs() -> None:
    """n = 3 under max_num_seqs 4 leaves room for one more, not two."""
    sim = Simulation(64, 4, max_num_seqs=4)
    sim.submit(tokens(1, 4), 8, n=3)
    for i in (2, 3):
        sim.submit(tokens(i, 4), 8)
    sim.step()
    sim.step()
    assert len(sim.scheduler.running) == 4
    assert len(sim.scheduler.waiting) == 1


def test_abort_returns_everything_in_every_state() -> None:
    """Aborting waiting, prefilling, decoding and forked requests leaves nothing held."""
    sim = Simulation(64, 4, max_batched_tokens=16, max_num_seqs=8)
    forked = sim.submit(tokens(1, 5), 20, n=3)
    decoding = sim.submit(tokens(2, 5), 20)
    sim.step()
    prefilling = sim.submit(tokens(3, 100), 20)
    sim.step()
    waiting = sim.submit(tokens(4, 100), 20)
    for request in (waiting, forked, prefilling, decoding):
        sim.scheduler.abort(request)
        sim.pool.check()
        assert request.finished
    assert not sim.scheduler.has_work
    assert sim.pool.stats().held == 0


def test_a_failed_step_takes_only_its_own_requests() -> None:
    """fail() gives up the requests of the plan, publishes nothing of it, and the rest goes on."""
    sim = Simulation(64, 4, max_num_seqs=1)
    bad, good = sim.submit(tokens(1, 9), 3), sim.submit(tokens(2, 9), 3)
    plan = sim.scheduler.plan()
    assert sim.scheduler.fail(plan) == [bad]
    assert sim.pool.stats().free == 64
    sim.run()
    assert good.branches[0].tokens == expected(good.prompt, 3)


def test_a_wrong_estimate_ends_in_a_refusal_not_a_loop() -> None:
    """A request that outgrows the pool all alone is given up, and the next one is served."""
    sim = Simulation(4, 4)
    wrong = sim.submit(tokens(1, 8), 4)
    wrong.max_tokens = 100  # what submit() estimated is no longer true
    right = sim.submit(tokens(2, 8), 4)
    stuck = []
    while sim.scheduler.has_work:
        stuck += sim.step().stuck
    assert stuck == wrong.branches
    assert right.branches[0].tokens == expected(right.prompt, 4)


@pytest.mark.parametrize("option", ["max_num_seqs", "max_batched_tokens", "max_model_len"])
@pytest.mark.parametrize("value", [0, -1, 2**31, True, 1.5])
def test_options_out_of_range_are_named(option: str, value: int) -> None:
    """Zero, negative, huge and non-integer options are refused by name."""
    with pytest.raises(InvalidRequest, match=option):
        SchedulerConfig(**{option: value})
