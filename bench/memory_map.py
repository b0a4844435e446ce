"""What the memory map costs: the server's part of a watched run, and frames a second in a browser.

    python -m bench.memory_map WORKLOADS.json W2 [--limit 24]     engine, watched and not, in turns
    python -m bench.memory_map --browser [--blocks 100000]        Chromium over a synthetic engine

The first runs a workload's first requests through an engine thread in rounds of two, one with a watcher
of the feed and one without, and prints both walls and the time spent in the recorder and the feed. The
second lets 64 made-up sequences grow, share and end in a pool at full speed, and counts painted frames.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the commands do, before torch is imported

from octavo.engine import Engine, EngineConfig, EngineThread, SamplingParams
from octavo.engine.feed import Feed
from octavo.engine.recorder import Recorder


def timed(owner: Any, name: str, spent: list[float]) -> None:
    """Have a method add the seconds of each call to `spent`."""
    inner: Callable[..., Any] = getattr(owner, name)

    def outer(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            spent.append(time.perf_counter() - begin)

    setattr(owner, name, outer)


async def serve_all(thread: EngineThread, requests: list[dict[str, Any]]) -> None:
    """Run all requests at once to their ends."""

    async def one(request: dict[str, Any]) -> None:
        params = SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True)
        async for _ in thread.stream(request["prompt"], params):
            pass

    await asyncio.gather(*(one(request) for request in requests))


def overhead(args: argparse.Namespace) -> None:
    """Watched against unwatched, in turns, on one loaded model."""
    from octavo.models import load_model

    works = json.loads(args.file.read_text())
    requests = works[args.name]["requests"][: args.limit]
    model = load_model("smollm2")
    walls: dict[bool, list[float]] = {False: [], True: []}
    inside: list[float] = []
    frames = size = 0
    for turn in range(2 * args.rounds):
        watched = turn % 2 == 1
        config = EngineConfig(num_blocks=args.blocks, max_num_seqs=64)
        thread = EngineThread(Engine(model, config))
        feed = Feed(thread)
        spent: list[float] = []
        for name in ("take", "planned", "stepped", "snapshot"):
            timed(feed.recorder, name, spent)
        timed(feed, "_deliver", spent)
        sent: list[int] = []
        thread.start()
        if watched:
            feed.subscribe(lambda data, sent=sent: sent.append(len(data or b"")))
            while not sent:
                time.sleep(0.01)
            spent.clear()
        begin = time.perf_counter()
        asyncio.run(serve_all(thread, requests))
        wall = time.perf_counter() - begin
        walls[watched].append(wall)
        if watched:
            inside.append(sum(spent) / wall)
            frames, size = len(sent), sum(sent[1:])
        thread.shutdown(timeout=10)
    plain, seen = (statistics.median(walls[key]) for key in (False, True))
    print(f"{args.name}, {len(requests)} requests, {args.blocks:,} blocks, medians of {args.rounds}")
    print(f"unwatched {plain:.2f} s, watched {seen:.2f} s: {100 * (seen / plain - 1):+.1f} %")
    print(
        f"in recorder and feed: {100 * statistics.median(inside):.2f} % of the time; "
        f"{frames} frames, {size:,} bytes"
    )


def synthetic(recorder: Recorder, engine: Any, rng: random.Random) -> None:
    """One made-up step: 64 sequences gain a token each; those that end make room for new ones, that share."""
    scheduler, pool = engine.scheduler, engine.pool
    for branch in list(scheduler.running):
        kv = branch.kv
        if len(branch.tokens) >= branch.request.max_tokens:
            kv.close()
            scheduler.running.remove(branch)
            continue
        kv.reserve(1)
        kv.extend(1)
        pool.drain()
        branch.tokens.append(rng.randrange(1000))
        kv.commit(branch.tokens[-1:])
        engine.generated += 1
    while len(scheduler.running) < 64:
        prompt = [
            *range(rng.randrange(4) * 100),
            *(rng.randrange(1000) for _ in range(rng.randrange(100, 3000))),
        ]
        kv = pool.open(prompt)
        kv.reserve(len(prompt) - kv.length)
        kv.extend(len(prompt) - kv.length)
        pool.drain()
        kv.commit(prompt[kv.committed :])
        request = SimpleNamespace(
            prompt=prompt, max_tokens=len(prompt) + rng.randrange(50, 400), num_cached=kv.num_cached
        )
        state = SimpleNamespace(value="running")
        engine.ids[id(request)] = len(engine.ids)
        scheduler.running.append(
            SimpleNamespace(kv=kv, tokens=prompt, request=request, index=0, state=state, num_preemptions=0)
        )
    recorder._steps += 1


class SyntheticThread:
    """An engine thread whose steps are made up: a real pool and recorder, no model."""

    alive = True
    step_seconds = 0.0

    def __init__(self, blocks: int, steps_per_second: float) -> None:
        from octavo.kv import Pool
        from octavo.sched import SchedulerStats

        pool = Pool(blocks, 16)
        scheduler = SimpleNamespace(running=[], waiting=[], stats=SchedulerStats())
        self.engine = SimpleNamespace(
            pool=pool, scheduler=scheduler, observers=[], model_name="synthetic", ids={}, generated=0,
            budget=SimpleNamespace(bytes_per_block=737_280), config=SimpleNamespace(max_num_seqs=64),
        )  # fmt: skip
        self.engine.request_id = lambda request: self.engine.ids[id(request)]
        self._pause = 1 / steps_per_second
        self._calls: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self.recorder: Recorder | None = None

    def ask(self, function: Callable[[], Any]) -> Any:
        from concurrent.futures import Future

        answer: Future[Any] = Future()
        with self._lock:
            self._calls.append(lambda: answer.set_result(function()))
        return answer

    def run(self, seconds: float) -> None:
        rng, end = random.Random(1), time.monotonic() + seconds
        while time.monotonic() < end:
            synthetic(self.recorder or SimpleNamespace(_steps=0), self.engine, rng)  # type: ignore[arg-type]
            with self._lock:
                calls, self._calls = self._calls, []
            for call in calls:
                call()
            time.sleep(self._pause)


def browser(args: argparse.Namespace) -> None:
    """Frames painted a second while the page follows."""
    from playwright.sync_api import sync_playwright

    from octavo.server import create_app
    from tests.server.browser import FLAGS
    from tests.server.conftest import serving

    thread = SyntheticThread(args.blocks, 20)
    app = create_app(thread)  # type: ignore[arg-type]
    thread.recorder = app.state.feed.recorder
    worker = threading.Thread(target=thread.run, args=(args.seconds + 25,), daemon=True)
    worker.start()
    with serving(app) as url, tempfile.TemporaryDirectory() as profile, sync_playwright() as driver:
        context = driver.chromium.launch_persistent_context(
            profile, executable_path=shutil.which("chromium"), headless=True, args=FLAGS,
            viewport={"width": 1280, "height": 900},
        )  # fmt: skip
        page = context.pages[0]
        page.goto(url)
        page.wait_for_function("() => octavoMap.app.history !== null")
        time.sleep(3)
        look = "({ app, cells }) => [app.drawn, cells.painted, performance.now(), app.history.last]"
        look = f"() => ({look})(octavoMap)"
        before = page.evaluate(look)
        time.sleep(args.seconds)
        after = page.evaluate(look)
        span = (after[2] - before[2]) / 1000
        drawn, painted, frames = ((after[i] - before[i]) / span for i in (0, 1, 3))
        print(f"{args.blocks:,} blocks, 64 sequences: {drawn:.1f} animation frames/s, {painted:.1f} painted")
        print(f"{frames:.1f} frames/s came from the server")
        full = page.evaluate(
            "() => { const { cells, app } = octavoMap; const begin = performance.now();"
            " for (let i = 0; i < 20; i++) { cells.all = true; cells.draw(app.state, performance.now()); }"
            " return (performance.now() - begin) / 20; }"
        )
        print(f"painting every cell anew takes {full:.1f} ms")
        context.close()


def main() -> None:
    """Parse the command line and measure one of the two."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("name", nargs="?", default="W2")
    parser.add_argument("--limit", type=int, default=64, help="requests of the workload to run")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--blocks", type=int, help="of the pool (default: 4096, or 100000 for --browser)")
    parser.add_argument("--browser", action="store_true")
    parser.add_argument("--seconds", type=float, default=10)
    args = parser.parse_args()
    args.blocks = args.blocks or (100_000 if args.browser else 4096)
    if args.browser:
        browser(args)
    else:
        overhead(args)


if __name__ == "__main__":
    main()
