"""Prompt chunks beside running streams: the bound on gaps, and short prompts behind long ones."""

from __future__ import annotations

import random

import pytest

from octavo.sched import Costs, Decodes, Plan, State
from octavo.sched.chunks import MIN_CHUNK, PROBE, Draft
from tests.sched.simulate import Simulation
from tests.sched.test_scheduler import tokens

COSTS = Costs(step=30.0, token=1.0, pair=0.0002, read=0.001, decodes={8: Decodes(50.0, 40)})


def seconds(plan: Plan, costs: Costs) -> float:
    """What a step costs by the figures that the policy was given."""
    chunks = [entry for entry in plan.entries if len(entry.tokens) > 1]
    decodes = [entry for entry in plan.entries if len(entry.tokens) == 1]
    total = costs.decode(len(decodes), sum(entry.start for entry in decodes))
    return total + sum(costs.chunk(len(entry.tokens), entry.start) for entry in chunks)


def streams(count: int, interactive: bool = True, **options: int) -> Simulation:
    """`count` running streams."""
    sim = Simulation(1000, 16, max_batched_tokens=2048, **options)
    sim.scheduler.costs = COSTS
    for i in range(count):
        sim.submit(tokens(i, 4), 1000, interactive=interactive)
    sim.step()
    sim.step()
    return sim


def test_no_stream_waits_for_a_long_prompt() -> None:
    """While 6,000 tokens are prefilled, each of eight streams gets a token every step, and no step costs more
    than twice one without the prompt."""
    sim = streams(8)
    sim.step()
    long = sim.submit(tokens(50, 6000), 4)
    steps = steps_without = 0
    while long.branches[0].num_output == 0:
        before = [len(request.branches[0].tokens) for request in sim.requests[:8]]
        plan = sim.step()
        assert [len(request.branches[0].tokens) - b for request, b in zip(sim.requests[:8], before)] == [
            1
        ] * 8
        decodes = [entry for entry in plan.entries if entry.branch is not long.branches[0]]
        assert seconds(plan, COSTS) <= 2 * seconds(plan._replace(entries=tuple(decodes)), COSTS)
        steps += 1
        steps_without += not any(entry.branch is long.branches[0] for entry in plan.entries)
    assert steps < 6000 / MIN_CHUNK, "the prompt got more than the least"
    assert abs(steps_without - steps / PROBE) <= 1, "now and then the decodes are seen alone"


def test_nobody_reads_nobody_waits() -> None:
    """Without a reader, or without running streams, a prompt gets the whole budget."""
    for sim in (streams(8, interactive=False), streams(0)):
        sim.submit(tokens(50, 6000), 4)
        assert sim.step().num_tokens == 2048


def test_however_dear_prompts_are_they_end() -> None:
    """Where one more token already costs more than the bound, the first prompt still gets a few each step."""
    sim = streams(8)
    sim.scheduler.costs = Costs(step=1.0, token=1000.0, pair=1.0, decodes={8: Decodes(1.0, 40)})
    long = sim.submit(tokens(50, 200), 1)
    for _ in range((200 // MIN_CHUNK + 1) * PROBE // (PROBE - 1) + 1):
        sim.step()
    assert long.finished


def test_a_short_prompt_overtakes_a_long_one() -> None:
    """A short prompt that comes during a long one has its first token long before the long one is done."""
    for count in (0, 8):
        sim = streams(count)
        long = sim.submit(tokens(50, 9000), 4, interactive=True)
        sim.step()
        short = sim.submit(tokens(60, 20), 4, interactive=True)
        steps = 0
        while short.branches[0].num_output == 0:
            sim.step()
            steps += 1
        assert steps <= 3
        assert long.branches[0].num_output == 0
        assert long.branches[0].state is State.RUNNING


def test_a_long_prompt_keeps_half_of_the_room() -> None:
    """Under a rain of short prompts a long one goes on with at least half of each step's prompt tokens."""
    sim = Simulation(4000, 16, max_batched_tokens=512, max_num_seqs=512)
    long = sim.submit(tokens(1, 8000), 1)
    steps = 0
    while not long.finished:
        for i in range(20):
            sim.submit(tokens(1000 + 100 * steps + i, 30), 1)
        sim.step()
        steps += 1
    assert steps <= 8000 / 256 + 2


def test_swapping_in_counts_as_part_of_the_step() -> None:
    """With readers, sequences that are dear to bring back come back one a step."""
    sim = Simulation(128, 4, host_blocks=256, preemption="swap", max_num_seqs=16)
    for i in range(6):
        sim.submit(tokens(i, 16), 30, interactive=True)
    sim.step()
    sim.step()
    sim.scheduler.costs = Costs(block=1000.0)
    for branch in sim.scheduler.running[1:]:
        sim.scheduler._memory.stop(branch, "swap")
    sim.scheduler._memory.short = False
    back = []
    for _ in range(5):
        before = sim.scheduler.stats.resumed
        sim.step()
        back.append(sim.scheduler.stats.resumed - before)
    assert back == [1] * 5
    sim.run()


@pytest.mark.parametrize("seed", range(3))
def test_chunk_within_is_the_inverse_of_chunk(seed: int) -> None:
    """The most tokens that cost no more than the limit: those fit, one more does not."""
    rng = random.Random(seed)
    for _ in range(300):
        costs = Costs(
            token=rng.uniform(0.1, 3),
            pair=rng.choice((0.0, rng.uniform(1e-6, 1e-2))),
            read=rng.choice((0.0, rng.uniform(0, 0.1))),
        )
        limit, start = rng.uniform(0, 500), rng.randrange(10_000)
        count = costs.chunk_within(limit, start)
        assert count == 0 or costs.chunk(count, start) <= limit + 1e-6
        assert costs.chunk(count + 2, start) > limit


@pytest.mark.parametrize("seed", range(3))
def test_a_chunk_in_parts_costs_what_it_costs_whole(seed: int) -> None:
    """Earlier tokens are fetched once for a chunk, however many times more tokens are chosen for it."""
    rng = random.Random(seed)
    sim = streams(8)
    long = sim.submit(tokens(50, 6000), 4).branches[0]
    for _ in range(rng.randrange(3, 30)):
        sim.step()
    whole, parts = Draft(500, COSTS, spare=40.0), Draft(500, COSTS, spare=40.0)
    count = whole.chunk(long)
    assert 0 < count < 500
    whole.choose(long, count)
    for share in (rng.uniform(0.3, 1), rng.uniform(0.3, 1), 1.0, 1.0):
        parts.choose(long, parts.chunk(long, share))
    assert parts.spare == pytest.approx(40.0 - COSTS.chunk(parts.chosen[long], long.kv.length))
    assert count - 1 <= parts.chosen[long] <= count


def test_decodes_of_more_tokens_cost_more() -> None:
    """The estimate follows the streams' lengths, and from the nearest number of rows that was seen."""
    costs = Costs(token=1.0, read=0.01, decodes={2: Decodes(20.0, 100), 8: Decodes(50.0, 1000)})
    assert costs.decode(8, 1000) == 50
    assert costs.decode(8, 2000) == pytest.approx(60)
    assert costs.decode(8, 500) == pytest.approx(45)
    assert costs.decode(7, 1000) == pytest.approx(49)
    assert costs.decode(3, 100) == pytest.approx(21)
    assert Costs(token=1.0, read=1.0, decodes={8: Decodes(50.0, 1000)}).decode(8, 0) == 12.5
    assert Costs(step=5.0, token=2.0, read=0.5).decode(3, 10) == 16


def test_decodes_are_seen_alone_whatever_was_before() -> None:
    """Many steps of prompts that nobody reads, and then a reader beside a long prompt: soon, and then every
    so many steps, one has no chunk."""
    sim = Simulation(1000, 16, max_batched_tokens=64)
    sim.scheduler.costs = COSTS
    sim.submit(tokens(1, 4), 1000, interactive=False)
    sim.submit(tokens(2, 64 * 3 * PROBE), 4, interactive=False)
    for _ in range(2 * PROBE):
        sim.step()
    sim.submit(tokens(3, 4), 1000, interactive=True)
    chunks = [any(len(entry.tokens) > 1 for entry in sim.step().entries) for _ in range(5 * PROBE)]
    for start in range(2, 3 * PROBE, PROBE):
        assert not all(chunks[start : start + PROBE])
