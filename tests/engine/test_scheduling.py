"""The scheduler's policies on a model: outputs unchanged, options honoured or refused, costs measured."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from octavo import SamplingParams
from octavo.engine import ConfigError, Engine, EngineConfig
from octavo.engine.costs import StepMeter
from octavo.engine.llm import LLM
from octavo.kv.contiguous import ContiguousPool
from octavo.models import LoadedModel
from octavo.sched import Branch, Plan, PlanEntry, QueueFull, Request
from octavo.sched.chunks import PROBE
from tests.engine.helpers import idle, llm_on, over_admit

Tiny = tuple[LoadedModel, Any]


def prompts(count: int, seed: int = 5) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, rng.integers(1, 60)).tolist() for _ in range(count)]


def params(count: int = 24) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def tokens(llm: LLM, batch: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(batch, params(), use_tqdm=False)]


@pytest.fixture(scope="module")
def want(tiny: Tiny) -> list[list[int]]:
    return tokens(llm_on(tiny[0]), prompts(12))


@pytest.mark.parametrize(
    ("options", "modes"),
    [
        ({}, {"partial", "recompute"}),
        ({"prefix_caching": False}, {"partial", "recompute"}),
        ({"preemption": "recompute", "host_cache": "4MiB"}, {"partial", "recompute"}),
        ({"preemption": "swap", "host_cache": "4MiB"}, {"swap"}),
        ({"preemption": "swap", "host_cache": "16KiB"}, {"swap", "partial", "recompute"}),
        ({"preemption": "auto", "host_cache": "4MiB"}, {"swap", "partial", "recompute"}),
    ],
)
def test_each_mode_changes_no_token(
    tiny: Tiny, want: list[list[int]], options: dict[str, Any], modes: set[str]
) -> None:
    """Far too much admitted into a small pool: the same tokens, in every mode and with a full host."""
    with over_admit(llm_on(tiny[0], block_size=4, num_blocks=40, **options)) as llm:
        assert tokens(llm, prompts(12)) == want
        stats = llm.engine.scheduler.stats
        assert stats.preemptions > 0
        assert set(+stats.preempted) <= modes
        assert stats.swapped_in == stats.swapped_out
        if options.get("preemption") == "swap":
            assert stats.swapped_out > 0
            assert (stats.swap_full > 0) == (options["host_cache"] == "16KiB")
            assert stats.recomputed == 0 or stats.swap_full > 0
        idle(llm)


def test_swap_that_fails_is_computed_again(tiny: Tiny, want: list[list[int]]) -> None:
    """Every third block is lost on its way back from the host: the same tokens, nothing is held."""
    from octavo.kv import BlockLost

    llm = over_admit(llm_on(tiny[0], block_size=4, num_blocks=40, preemption="swap", host_cache="4MiB"))
    assert llm.engine.mover is not None
    (store,) = llm.engine.mover.stores.values()
    get, calls = store.get, 0

    def failing(slot: int, out: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise BlockLost("gone")
        get(slot, out)

    store.get = failing
    assert tokens(llm, prompts(12)) == want
    assert llm.engine.scheduler.stats.preempted["lost"] > 0
    assert llm.engine.pool.stats().host.held == 0
    idle(llm)


@pytest.mark.parametrize("schedule", ["fcfs", "priority", "prefix", "fair"])
def test_each_schedule_changes_no_token(tiny: Tiny, want: list[list[int]], schedule: str) -> None:
    """The order in which requests run is nothing that their outputs depend on."""
    llm = llm_on(tiny[0], block_size=4, num_blocks=120, max_num_seqs=4, schedule=schedule)
    engine, batch = llm.engine, prompts(12)
    ids = [
        engine.add_request(prompt, params(), priority=i % 3, tenant="ab"[i % 2])
        for i, prompt in enumerate(batch)
    ]
    got: dict[int, list[int]] = {request_id: [] for request_id in ids}
    ended = []
    while engine.has_work:
        for delta in engine.step():
            got[delta.request_id] += [token for change in delta.deltas for token in change.token_ids]
            if delta.finished:
                ended.append(ids.index(delta.request_id))
    assert [got[request_id] for request_id in ids] == want
    if schedule == "priority":
        assert {i % 3 for i in ended[:4]} == {2}
    idle(llm)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "random"}, "schedule must be one of fcfs, priority, prefix, fair"),
        ({"preemption": "drop"}, "preemption must be one of auto, recompute, swap"),
        ({"preemption": "swap"}, "host_cache, which is not set"),
        ({"schedule": "prefix", "prefix_caching": False}, "prefix_caching is off"),
        ({"tenant_weights": {"a": 2.0}}, "tenant_weights are for schedule 'fair'"),
        ({"schedule": "fair", "tenant_weights": {"a": -1.0}}, "tenant 'a' must be a number above 0"),
        ({"max_queue": 0}, "max_queue"),
        ({"max_queue": -1}, "max_queue"),
        ({"max_queue": 2**31}, "max_queue"),
        ({"max_queue": True}, "max_queue"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused_by_name(
    tiny: Tiny, options: dict[str, Any], message: str
) -> None:
    """Each is refused at the start, with what to change."""
    with pytest.raises((ConfigError, ValueError), match=message):
        Engine(tiny[0], EngineConfig(num_blocks=8, **options))


def test_the_table_says_what_preemption_does_and_why(tiny: Tiny) -> None:
    """auto without a host cache is recompute, and the row names the option that changes that."""

    def row(**options: Any) -> str:
        return dict(llm_on(tiny[0], **options).engine.describe())["preemption"]

    assert row().startswith("recompute (auto; --host-cache")
    assert row(preemption="recompute") == "recompute"
    assert "whichever" in row(host_cache="1MiB")
    assert row(host_cache="1MiB", preemption="swap").startswith("swap to the host cache; recompute where")
    assert dict(llm_on(tiny[0], schedule="fair").engine.describe())["schedule"] == "fair (--schedule)"


def test_a_full_queue_is_told_and_offline_use_feeds_it(tiny: Tiny) -> None:
    """add_request refuses what is too much; LLM.generate queues the rest as places become free."""
    llm = llm_on(tiny[0], max_num_seqs=2, max_queue=2)
    batch = prompts(9)
    assert tokens(llm, batch) == tokens(llm_on(tiny[0]), batch)
    idle(llm)
    for prompt in batch[:4]:
        llm.engine.add_request(prompt, params())
    with pytest.raises(QueueFull, match="4 sequences run or wait and the request asks for 1 more, but 4 may"):
        llm.engine.add_request(batch[4], params())
    while llm.engine.has_work:
        llm.engine.step()
    idle(llm)


@pytest.mark.parametrize("policy", ["max", "pow2", "oracle"])
def test_a_contiguous_pool_changes_no_token(tiny: Tiny, want: list[list[int]], policy: str) -> None:
    """The engine over contiguous reservation: the same tokens, fewer requests at once."""
    batch = prompts(12)
    final = {tuple(prompt): len(prompt) + 23 for prompt in batch}

    def pool(budget: Any) -> Any:
        return ContiguousPool(
            budget.num_blocks * 4,
            policy,  # type: ignore[arg-type]
            max_len=84,
            block_size=4,
            final_len=lambda prompt: final[tuple(prompt)],
        )

    llm = LLM.__new__(LLM)
    config = EngineConfig(block_size=4, num_blocks=64, checked=True, max_model_len=84)
    llm.engine = Engine(tiny[0], config, pool=pool)
    assert tokens(llm, batch) == want
    assert llm.engine.pool.stats().held == 0
    llm.engine.pool.check()


def entry(count: int, start: int) -> PlanEntry:
    branch = Branch(Request([1], 1), 0, [1])
    return PlanEntry(branch, start, [0] * count, np.zeros(count, np.int64), 1)


def plan(*entries: PlanEntry) -> Plan:
    from octavo.kv import Actions

    return Plan(entries, Actions((), ()), (), ())


def test_the_meter_finds_the_costs_behind_its_measurements() -> None:
    """Steps timed by a known law: the law comes out, and follows a change."""
    meter = StepMeter()
    for token, pair in ((2e-3, 1e-7), (1e-3, 4e-7)):
        for i in range(300):
            meter.step(plan(*[entry(1, 50)] * 8), 0.05)
            count, start = 20 + i % 30, 200 * (i % 30)
            chunk = count * (token + pair * (start + count / 2))
            meter.step(plan(*[entry(1, 50)] * 8, entry(count, start)), 0.05 + chunk)
        costs = meter.costs
        assert costs.decode(8, 400) == pytest.approx(0.05)
        assert costs.token == pytest.approx(token, rel=0.02)
        assert costs.pair == pytest.approx(pair, rel=0.02)
    for _ in range(100):
        meter.transfers(10, 0.02)
    assert meter.costs.block == pytest.approx(0.002)


def test_the_meter_tells_what_streams_read_from_what_chunks_cost() -> None:
    """Streams grow alone, then beside a long prompt: what fetching an earlier token costs comes out of the
    first part, and the second is not laid at the chunks' door."""
    meter, rng = StepMeter(), random.Random(3)
    base, read, token, pair = 0.01, 1.3e-6, 2e-4, 3e-8

    def step(length: int, chunk: int, start: int) -> None:
        entries = [entry(1, length)] * 8 + ([entry(chunk, start)] if chunk else [])
        took = base + read * 8 * length
        took += read * start + chunk * (token + pair * (start + chunk / 2)) if chunk else 0
        meter.step(plan(*entries), took * rng.uniform(0.98, 1.02))

    for length in range(64, 364):
        step(length, 0, 0)
    assert meter.costs.read == pytest.approx(read, rel=0.2)
    assert meter.costs.decode(8, 8 * 1300) == pytest.approx(base + read * 8 * 1300, rel=0.2)
    for i in range(500):
        step(364 + i, 12, 12 * i)
    true = read * 6000 + 12 * (token + pair * 6006)
    assert meter.costs.chunk(12, 6000) == pytest.approx(true, rel=0.2)


@pytest.mark.parametrize("start", [0.5, 2.0])
def test_looks_at_decodes_alone_mend_what_a_bad_start_taught(start: float) -> None:
    """Steps that get faster or slower while the streams grow, as on a machine busy with something else, and
    then a long prompt: the steps without a chunk in between put it right."""
    meter, read = StepMeter(), 1e-6
    for i in range(60):
        meter.step(plan(*[entry(1, 64 + i)] * 8), (0.01 + read * 8 * (64 + i)) * start ** (1 - i / 60))
    for i in range(400):
        length = 124 + i
        took = 0.01 + read * 8 * length
        if i % PROBE:
            meter.step(plan(*[entry(1, length)] * 8, entry(10, 10 * i)), took + read * 10 * i + 10 * 2e-4)
        else:
            meter.step(plan(*[entry(1, length)] * 8), took)
    assert meter.costs.decode(8, 8 * 524) == pytest.approx(0.01 + read * 8 * 524, rel=0.1)
    assert meter.costs.chunk(10, 4000) == pytest.approx(read * 4000 + 10 * 2e-4, rel=0.3)


def test_the_meter_has_sane_costs_whatever_it_sees() -> None:
    """Nothing yet, decodes only, prompts only, steps with a prompt that take no longer than without: costs
    are positive, and a chunk is never free."""
    meter = StepMeter()
    seen: list[tuple[Plan, float]] = [
        (plan(entry(1, 5)), 0.03),
        (plan(entry(500, 0)), 0.4),
        (plan(*[entry(1, 9)] * 4), 0.06),
        (plan(*[entry(1, 9)] * 4, entry(30, 0)), 0.05),
        (plan(*[entry(1, 9)] * 300, entry(1000, 7000)), 3.0),
    ]
    for _ in range(3):
        for step, took in seen:
            meter.step(step, took)
            costs = meter.costs
            assert min(costs.step, costs.token, costs.block) > 0
            assert costs.pair >= 0
            assert costs.decode(5) > 0
            assert costs.chunk(10, 6000) > 0
