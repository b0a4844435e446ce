"""Who is admitted first, and that nobody waits for ever."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import InvalidRequest
from octavo.kv import Scope
from octavo.sched import Request, SchedulerConfig, State
from octavo.sched.queue import Queue
from tests.sched.simulate import Simulation
from tests.sched.test_scheduler import tokens


def started(sim: Simulation) -> list[Request]:
    """Requests in the order of their first start, until idle."""
    order: dict[Request, None] = {}
    while sim.scheduler.has_work:
        order.update((entry.branch.request, None) for entry in sim.step().entries)
    return list(order)


def test_the_most_important_goes_first() -> None:
    """One at a time: by priority, equals by arrival; a running one is not pushed out."""
    sim = Simulation(64, 4, max_num_seqs=1, order="priority")
    first = sim.submit(tokens(1, 4), 3)
    sim.step()
    a, b, c, d = (sim.submit(tokens(i, 4), 3, priority=p) for i, p in ((2, 0), (3, 5), (4, -1), (5, 5)))
    assert started(sim) == [first, b, d, a, c]


@pytest.mark.parametrize("order", ["fcfs", "priority", "prefix", "fair"])
def test_a_stream_of_better_requests_cannot_starve_one(order: str) -> None:
    """A request that every newcomer outranks starts within max_wait steps and one request's length."""
    sim = Simulation(64, 4, max_num_seqs=1, order=order, max_wait=20)
    shared = tokens(9, 20)
    sim.submit(shared, 2, priority=9, tenant="new")
    poor = sim.submit(tokens(1, 4), 2, priority=-9, tenant="poor")
    sim.scheduler.waiting.charge(poor, 10**6)
    for i in range(40):
        sim.submit([*shared, i], 2, priority=9, tenant=f"new{i}")
        sim.step()
        if poor.finished:
            break
    assert poor.finished
    assert sim.lives[poor].started is not None
    assert sim.lives[poor].started <= 20 + 4


def test_the_longest_cached_prefix_goes_first() -> None:
    """Of three waiting prompts, the one with most of it in the cache starts first."""
    sim = Simulation(64, 4, max_num_seqs=1, order="prefix")
    sim.submit(tokens(1, 32), 1)
    sim.run()
    blocker = sim.submit(tokens(5, 4), 6)
    sim.step()
    cold = sim.submit(tokens(2, 32), 1)
    half = sim.submit([*tokens(1, 16), 7], 1)
    most = sim.submit([*tokens(1, 28), 8], 1)
    assert started(sim) == [blocker, most, half, cold]


def test_tenants_get_shares_by_weight() -> None:
    """Two tenants that always wait, weights 3 and 1: after a while the service is 3 to 1, within the
    largest request's cost."""
    sim = Simulation(64, 4, max_num_seqs=2, order="fair", tenant_weights={"a": 3.0})
    given = {"a": 0, "b": 0}
    for i in range(300):
        for tenant in "ab":
            if sum(b.request.tenant == tenant for b in sim.scheduler.waiting) < 3:
                sim.submit(tokens(2 * i + (tenant == "b"), 8), 8, tenant=tenant)
        for entry in sim.step().entries:
            prompt = sum(position < 8 for position in range(entry.start, entry.start + len(entry.tokens)))
            given[entry.branch.request.tenant] += prompt + 2 * entry.num_samples
    assert abs(given["a"] / 3 - given["b"]) <= 2 * (8 + 2 * 8)


def test_nobody_saves_up_while_away() -> None:
    """A tenant that was idle gets its share from now on, not the past's."""
    queue = Queue(SchedulerConfig(order="fair"))
    busy, idle = Request([1], 1, tenant="busy"), Request([1], 1, tenant="idle")
    for i, request in enumerate((busy, idle)):
        request.arrival = i
    from octavo.sched import Branch

    queue.push(Branch(busy, 0, [1]))
    queue.charge(busy, 1000)
    queue.push(Branch(idle, 0, [1]))
    assert queue.service("idle") == 1000


def test_a_tenant_counts_for_nothing_in_other_orders() -> None:
    """First come, first served: charges change nothing."""
    sim = Simulation(64, 4, max_num_seqs=1)
    a = sim.submit(tokens(1, 4), 2, tenant="a")
    b = sim.submit(tokens(2, 4), 2, tenant="b")
    sim.scheduler.waiting.charge(a, 10**6)
    assert started(sim) == [a, b]


def test_many_tenants_are_forgotten() -> None:
    """10,000 tenants that came once do not stay in memory."""
    sim = Simulation(64, 4, order="fair")
    for i in range(10_000):
        sim.submit([i % 5], 1, tenant=f"t{i}")
        if i % 50 == 49:
            sim.run()
    assert len(sim.scheduler.waiting._service) <= 4097


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"order": "lifo"}, "order"),
        ({"preemption": "maybe"}, "preemption"),
        ({"tenant_weights": {"a": 0}}, "tenant_weights"),
        ({"tenant_weights": {"a": float("nan")}}, "tenant_weights"),
        ({"watermark": 1.0}, "watermark"),
        ({"max_gap": 1.0}, "max_gap"),
        ({"max_gap": float("inf")}, "max_gap"),
        *(
            ({name: value}, name)
            for name in ("max_wait", "max_queue", "max_preemptions")
            for value in (0, -1, 2**31)
        ),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], name: str) -> None:
    """A value that cannot be is refused by its name."""
    with pytest.raises(InvalidRequest) as caught:
        SchedulerConfig(**options)
    assert caught.value.param == name


def test_scopes_do_not_count_as_prefixes() -> None:
    """A prompt cached under another scope does not go first."""
    sim = Simulation(64, 4, max_num_seqs=1, order="prefix")
    sim.submit(tokens(1, 32), 1, scope=Scope(salt="x"))
    sim.run()
    blocker = sim.submit(tokens(5, 4), 6)
    sim.step()
    first, second = sim.submit(tokens(2, 8), 1), sim.submit(tokens(1, 32), 1)
    assert started(sim) == [blocker, first, second]
    assert second.branches[0].state is State.FINISHED
