"""Snapshot and frames, applied one after another, equal the engine at any moment."""

from __future__ import annotations

import json
import queue
import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from octavo.engine import Engine, EngineConfig, EngineThread, SamplingParams
from octavo.engine.feed import Feed
from octavo.engine.mirror import Mirror
from octavo.engine.observe import Observer
from octavo.engine.recorder import Recorder
from octavo.kv.blocks import Blocks
from octavo.models import LoadedModel, load_model
from octavo.sched import Plan
from tests.engine.helpers import tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(tiny_checkpoint(tmp_path_factory.mktemp("tiny"))[0])


def engine_on(model: LoadedModel, **options: Any) -> Engine:
    config = {"block_size": 4, "num_blocks": 24, "max_num_seqs": 8, "max_batched_tokens": 48, **options}
    return Engine(model, EngineConfig(checked=True, **config))


def ask(rng: random.Random, engine: Engine) -> int:
    """Queue a request that begins like many others, some with several sequences."""
    prompt = [7, 8, 9, 10, 11, 12][: rng.randint(1, 6)] + [
        rng.randint(13, 16) for _ in range(rng.randint(0, 40))
    ]
    params = SamplingParams(
        n=rng.choice((1, 1, 3)),
        max_tokens=rng.randint(1, 40),
        temperature=1,
        seed=rng.randint(0, 9),
        ignore_eos=True,
    )
    return engine.add_request(prompt, params)


def expect(mirror: Mirror, engine: Engine) -> None:
    """The mirror says of every block and sequence what the engine's own structures say."""
    pool, size = engine.pool, engine.pool.block_size
    blocks, tree = pool._blocks, pool._blocks.tree
    filled = [tree.fill(block) for block in range(pool.num_blocks)]
    rows = {}
    for branch in [*engine.scheduler.running, *engine.scheduler.waiting]:
        name = f"{engine.request_id(branch.request)}.{branch.index}"
        table = branch.kv.table.tolist() if branch.kv is not None else []
        committed = branch.kv.committed if branch.kv is not None else 0
        rows[name] = (table, committed, len(branch.tokens), branch.num_preemptions)
        for index, block in enumerate(table):
            filled[block] = max(filled[block], min(max(committed - index * size, 0), size))
    assert mirror.refs.tolist() == blocks.refs[: pool.num_blocks]
    assert mirror.fill.tolist() == filled
    shown = {
        row.name: (row.table, row.committed, row.tokens, row.preemptions) for row in mirror.rows.values()
    }
    assert shown == rows
    for block in range(pool.num_blocks):
        want = -1 if tree.key[block] is None else tree.parent(block)
        assert mirror.parent[block] == (want if want < pool.num_blocks else -(2**31)), block
    stats = pool.stats()
    assert [mirror.counts[k] for k in ("free", "held", "cached", "evictions", "copies")] == [
        stats.free, stats.held, stats.cached, stats.evictions, stats.copies,
    ]  # fmt: skip
    assert mirror.counts["preemptions"] == engine.scheduler_stats.preemptions
    assert mirror.counts["computed"] == engine.scheduler_stats.computed
    states = {
        "held": int((mirror.refs > 0).sum()),
        "cached": int(((mirror.refs == 0) & (mirror.parent != -1)).sum()),
    }
    assert states == {k: mirror.counts[k] for k in states}


class Outside(Observer):
    """Counts what plans say, beside the recorder."""

    preempted = copies = 0

    def planned(self, plan: Plan) -> None:
        self.preempted += len(plan.preempted)
        self.copies += len(plan.actions.copies)


def through_json(frame: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(frame))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", [{}, {"prefix_caching": False}, {"host_cache": 60_000}])
def test_frames_equal_the_engine(model: LoadedModel, seed: int, options: dict[str, Any]) -> None:
    """Through copies, evictions, preemptions, aborts and idle times, taken at random moments."""
    rng = random.Random(seed)
    engine = engine_on(model, **options)
    for _ in range(4):
        ask(rng, engine)
    for _ in range(10):
        engine.step()
    recorder = Recorder(engine)
    recorder.attach()
    assert recorder.take() is None
    mirror = Mirror(through_json({"kind": "snapshot", **recorder.snapshot()}))
    expect(mirror, engine)
    seen: set[str] = set()
    told: Counter[str] = Counter()
    outside = Outside()
    engine.observers.append(outside)
    for step in range(160):
        if rng.random() < 0.25 and step < 120:
            ask(rng, engine)
        if rng.random() < 0.05 and engine._live:
            engine.abort(rng.choice(list(engine._live)))
        engine.step()
        if rng.random() < 0.6:
            frame = recorder.take()
            if frame is not None:
                seen |= frame.get("events", {}).keys()
                told.update({kind: len(each) for kind, each in frame.get("events", {}).items()})
                mirror.apply(through_json(frame))
            expect(mirror, engine)
    while engine.has_work:
        engine.step()
    last = recorder.take() or {}
    told.update({kind: len(each) for kind, each in last.get("events", {}).items()})
    engine.observers.remove(outside)
    mirror.apply(through_json(last))
    expect(mirror, engine)
    assert (mirror.counts["held"], mirror.rows) == (0, {})
    assert recorder.take() is None, "an idle engine has nothing to say"
    assert told["preempt"] == outside.preempted
    assert told["copy"] == outside.copies
    assert ("evict" in seen) == (options.get("prefix_caching", True))
    assert "copy" in seen
    assert ("out" in seen) == ("host_cache" in options)
    recorder.detach()
    assert type(engine.pool._blocks) is Blocks
    assert engine.observers == []
    engine.pool.check()


def test_contents_are_told_only_when_asked_for(model: LoadedModel) -> None:
    """The number of tokens of a published and of a private block; their ids and text only with text=True."""
    engine = engine_on(model, prefix_caching=False)
    recorder = Recorder(engine)
    recorder.attach()
    engine.add_request([30, 31, 32, 33, 34, 35], SamplingParams(max_tokens=4, ignore_eos=True))
    engine.step()
    engine.step()
    (branch,) = engine.scheduler.running
    first, second = branch.kv.table.tolist()[:2]
    assert recorder.contents(first, text=False) == {"block": first, "num_tokens": 4}
    told = recorder.contents(second, text=True)
    assert told["tokens"] == branch.tokens[4 : branch.kv.committed]
    assert told["text"] == engine.tokenizer.decode(told["tokens"])
    for outside in (-1, engine.pool.num_blocks, 10**9):
        assert recorder.contents(outside, text=True)["num_tokens"] == 0


@pytest.fixture
def thread(model: LoadedModel) -> Iterator[EngineThread]:
    thread = EngineThread(engine_on(model))
    thread.start()
    yield thread
    thread.shutdown(timeout=10)


def test_the_feed_serves_many_and_rests(thread: EngineThread) -> None:
    """Two watchers, one of them late, end with the same true state; with none the engine is unwatched."""
    feed = Feed(thread, frames_per_second=200)
    boxes: list[queue.Queue[bytes | None]] = [queue.Queue(), queue.Queue()]
    rng = random.Random(5)
    mirrors: list[Mirror] = []
    for box in boxes:
        feed.subscribe(box.put)
        # Before more is asked: what ended before somebody watched is not counted.
        mirrors.append(Mirror(json.loads(box.get(timeout=10) or b"")))
        for _ in range(5):
            thread.ask(lambda: ask(rng, thread.engine)).result()
    for box, mirror in zip(boxes, mirrors, strict=True):
        while mirror.counts["finished"] < 10 or mirror.rows:
            frame = json.loads(box.get(timeout=10) or b"")
            assert frame["kind"] == "frame"
            mirror.apply(frame)
    for mirror in mirrors:
        expect(mirror, thread.engine)
    assert np.array_equal(mirrors[0].fill, mirrors[1].fill)
    for box in boxes:
        feed.unsubscribe(box.put)
    settled = threading.Event()
    for _ in range(500):
        if not feed.recorder.attached and type(thread.engine.pool._blocks) is Blocks:
            break
        settled.wait(0.01)
    assert type(thread.engine.pool._blocks) is Blocks
    assert thread.engine.observers == []


def test_watchers_hear_of_the_end(thread: EngineThread) -> None:
    """When the engine stops, each watcher gets None once."""
    feed = Feed(thread, frames_per_second=200)
    box: queue.Queue[bytes | None] = queue.Queue()
    feed.subscribe(box.put)
    assert json.loads(box.get(timeout=10) or b"")["kind"] == "snapshot"
    thread.shutdown(timeout=10)
    assert box.get(timeout=10) is None
    assert not feed.watched


@pytest.mark.parametrize(
    ("options", "size", "wanted"),
    [
        ({"max_num_seqs": 1}, 8, {"places"}),
        ({"num_blocks": 12}, 40, {"memory", "growth", "headroom"}),
        ({"max_batched_tokens": 4, "max_num_seqs": 2}, 30, {"places", "budget", ""}),
    ],
)
def test_it_says_why_somebody_waits(
    model: LoadedModel, options: dict[str, Any], size: int, wanted: set[str]
) -> None:
    """The scheduler's own reason, while the step's budget was not what was missing; nothing once all run."""
    engine = engine_on(model, **options)
    recorder = Recorder(engine)
    recorder.attach()
    mirror = Mirror(through_json({"kind": "snapshot", **recorder.snapshot()}))
    for number in range(3):
        prompt = [20 + number] * size
        engine.add_request(prompt, SamplingParams(max_tokens=6, ignore_eos=True))
    seen: set[str] = set()
    while engine.has_work:
        before = engine.scheduler_stats.blocked.copy()
        engine.step()
        mirror.apply(through_json(recorder.take() or {}))
        grown = {why for why, count in engine.scheduler_stats.blocked.items() if count != before[why]}
        assert {mirror.why} == (grown or {""})
        if engine.scheduler.waiting:
            seen.add(mirror.why)
    assert seen
    assert seen <= wanted
    assert mirror.why == ""
