"""The memory map in a real browser, against the engine's own numbers; and its routes."""

from __future__ import annotations

import base64
import json
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from octavo.engine import Engine, EngineConfig, EngineThread
from octavo.engine.mirror import Mirror
from octavo.engine.observe import Observer
from octavo.models import LoadedModel, load_model
from octavo.server import ServerConfig, create_app
from octavo.server.keys import ApiKey
from tests.engine.helpers import tiny_checkpoint

from .browser import browser
from .conftest import serving, wait_for

NUM_BLOCKS = 26


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(tiny_checkpoint(tmp_path_factory.mktemp("tiny"))[0])


@pytest.fixture
def engine(model: LoadedModel) -> Iterator[EngineThread]:
    """So few blocks that copies, evictions and preemptions come by themselves."""
    config = EngineConfig(block_size=4, num_blocks=NUM_BLOCKS, max_num_seqs=8, checked=True)
    thread = EngineThread(Engine(model, config))
    thread.start()
    yield thread
    thread.shutdown(timeout=10)


@pytest.fixture
def serve(engine: EngineThread) -> Iterator[Callable[..., str]]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(serving(create_app(engine, ServerConfig(**options))))


def load(url: str, count: int = 10, key: str = "") -> list[threading.Thread]:
    """Requests that begin alike, every other one with three sequences."""

    headers = {"Authorization": f"Bearer {key}"} if key else {}

    def one(number: int) -> None:
        body = {
            "prompt": "A leaf of the book, " + "x" * (number % 5),
            "n": 1 + 2 * (number % 2),
            "max_tokens": 30 + number,
            "ignore_eos": True,
            "seed": number,
        }
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    return threads


SHOWN = """() => {
  const { state } = octavoMap.app;
  const text = (id) => Number(document.getElementById(id).textContent.replace(/[^0-9.]/g, ""));
  const kinds = { free: 0, cached: 0, held: 0, shared: 0 };
  for (let i = 0; i < state.numBlocks; i++) kinds[state.kind(i)]++;
  return { kinds, counts: state.counts, refs: [...state.refs], seqs: [...state.seqs.values()],
    text: { held: text("n-held"), shared: text("n-shared"), cached: text("n-cached"), free: text("n-free"),
            running: text("running"), waiting: text("waiting"), preemptions: text("preemptions") } };
}"""


def expect_truth(page: Any, engine: EngineThread) -> dict[str, Any]:
    """What the page has, in its data and in its text, is what the engine says of itself right now."""
    pool, scheduler = engine.engine.pool, engine.engine.scheduler
    stats, refs = pool.stats(), pool._blocks.refs[: pool.num_blocks]
    shared = sum(count > 1 for count in refs)
    want = {"held": stats.held - shared, "shared": shared, "cached": stats.cached, "free": stats.free}
    texts = {
        **want,
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "preemptions": scheduler.stats.preemptions,
    }
    each = "Object.keys(want).every((k) => text[k] === want[k])"
    same = f"(want) => {{ const {{ text }} = ({SHOWN})(); return {each}; }}"
    page.wait_for_function(same, arg=texts, timeout=60_000)
    shown = page.evaluate(SHOWN)
    assert shown["text"] == texts
    assert shown["kinds"] == want
    assert shown["refs"] == refs
    tables = {row["id"]: row["table"] for row in shown["seqs"] if row["state"] == "r"}
    branches = {f"{engine.engine.request_id(b.request)}.{b.index}": b for b in scheduler.running}
    assert tables == {name: b.kv.table.tolist() for name, b in branches.items() if b.kv is not None}
    for key in ("copies", "evictions", "merges"):
        assert shown["counts"][key] == getattr(stats, key)
    return shown


def test_the_page_tells_the_truth(engine: EngineThread, serve: Callable[..., str], tmp_path: Path) -> None:
    """During a run with copies, evictions and preemptions, at moments it is held at, and idle at the end."""
    url = serve()
    with browser(tmp_path) as page:
        page.goto(url)
        page.wait_for_function("() => octavoMap.app.history !== null")
        expect_truth(page, engine)
        threads = load(url)
        for thread in threads:
            thread.join()
        end = expect_truth(page, engine)
        assert end["counts"]["held"] == end["counts"]["running"] == end["counts"]["waiting"] == 0
        assert end["seqs"] == []
        assert min(end["counts"][key] for key in ("copies", "evictions", "preemptions")) > 0
        assert page.inner_text("#status") == "live"
        assert page.inner_text("#rate") == "0", "nothing is generated any more, though no frame says so"
        assert page.inner_text("#waiting-note") == "nobody waits"


def test_in_the_middle_of_a_run(engine: EngineThread, serve: Callable[..., str], tmp_path: Path) -> None:
    """Stopped between two steps, the page shows that very moment; then pause, back, on, live."""
    url = serve()
    with browser(tmp_path) as page:
        page.goto(url)
        page.wait_for_function("() => octavoMap.app.history !== null")
        middle = Middle(engine, 10)
        threads = load(url)
        assert middle.reached.wait(60)
        try:
            shown = expect_truth(page, engine)
            assert shown["kinds"]["shared"] > 0
            assert shown["counts"]["running"] > 1
            why = page.inner_text("#waiting-note")
            options = (
                "--kv-memory",
                "--max-num-seqs",
                "--max-batched-tokens",
                "like its own",
                "about to start",
            )
            assert shown["counts"]["waiting"] == 0 or any(option in why for option in options), why
        finally:
            middle.go_on.set()
        page.keyboard.press("Space")
        page.wait_for_function("() => document.getElementById('status').textContent === 'paused'")
        for thread in threads:
            thread.join()
        at = page.evaluate("() => octavoMap.app.shown")
        expected = page.evaluate("(i) => [...octavoMap.app.history.at(i - 1).refs]", at)
        page.keyboard.press(",")
        assert page.evaluate("() => octavoMap.app.shown") == at - 1
        assert page.evaluate("() => [...octavoMap.app.state.refs]") == expected
        page.keyboard.press(".")
        assert page.evaluate("() => octavoMap.app.shown") == at
        page.keyboard.press(",")  # one before the last: going on must not stay on a copy
        page.evaluate("() => octavoMap.show(octavoMap.app.history.last - 1)")
        page.keyboard.press("l")
        page.wait_for_function("() => document.getElementById('status').textContent === 'live'")
        expect_truth(page, engine)


def test_a_new_connection_while_paused(engine: EngineThread, tmp_path: Path) -> None:
    """The stream ends and comes back while the page is paused: what is looked at stays, with its past; going
    on shows what is now, and follows."""
    app = create_app(engine)
    with serving(app) as url, browser(tmp_path) as page:
        page.goto(url)
        page.wait_for_function("() => octavoMap.app.history !== null")
        for thread in load(url, 2):
            thread.join()
        expect_truth(page, engine)
        page.keyboard.press("Space")
        last = page.evaluate("() => octavoMap.app.history.last")
        refs = page.evaluate("() => [...octavoMap.app.state.refs]")
        before = list(app.state.feed._watchers)
        for watcher in before:
            watcher(None)
        for thread in load(url, 6):
            thread.join()
        wait_for(lambda: any(watcher not in before for watcher in app.state.feed._watchers))
        for thread in load(url, 3):
            thread.join()
        page.wait_for_function("() => document.getElementById('status').textContent === 'paused'")
        assert page.evaluate("() => octavoMap.app.history.last") == last
        assert page.evaluate("() => [...octavoMap.app.state.refs]") == refs
        page.keyboard.press("l")
        expect_truth(page, engine)
        for thread in load(url, 2):
            thread.join()
        expect_truth(page, engine)


class Middle(Observer):
    """Stops the engine between two steps when all of `count` requests have come, and sequences run, share
    and have been preempted. What others ask of its thread meanwhile is answered."""

    def __init__(self, engine: EngineThread, count: int) -> None:
        self._engine, self._left = engine, count
        self.reached, self.go_on = threading.Event(), threading.Event()
        engine.engine.observers.append(self)

    def added(self, request_id: int, request: object, arrived: float) -> None:
        self._left -= 1

    def stepped(self, deltas: object) -> None:
        pool, scheduler = self._engine.engine.pool, self._engine.engine.scheduler
        busy = len(scheduler.running) > 1 and pool.num_shared() and scheduler.stats.preemptions
        if busy and not self._left and not self.reached.is_set():
            self._engine.ask(self._stay)

    def _stay(self) -> None:
        self.reached.set()
        while not self.go_on.is_set():
            with suppress(queue.Empty):
                call = self._engine._inbox.get(timeout=0.01)
                assert call is not None
                call()


def test_pointing_keys_and_tabs(engine: EngineThread, serve: Callable[..., str], tmp_path: Path) -> None:
    """The inspector names a block's state, tokens and path; tree and themes work by keyboard."""
    url = serve(show_text=True)
    with browser(tmp_path, viewport={"width": 400, "height": 800}) as page:
        page.goto(url)
        page.wait_for_function("() => octavoMap.app.history !== null")
        for thread in load(url, 3):
            thread.join()
        page.wait_for_function("() => octavoMap.app.state.counts.finished === 3")
        page.wait_for_function("() => octavoMap.app.state.counts.held === 0")
        block, depth = page.evaluate(
            """() => {
              const { state } = octavoMap.app;
              const depths = [...state.refs.keys()].map((id) => [id, state.path(id).length]);
              return depths.reduce((best, at) => (at[1] > best[1] ? at : best));
            }"""
        )
        assert depth > 3
        page.focus("#cells")
        page.keyboard.press("Home")
        for _ in range(block):
            page.keyboard.press("ArrowRight")
        text = page.inner_text("#inspector")
        assert f"Block {block}" in text
        assert "cached" in text
        assert f"depth {depth}" in text
        page.wait_for_function("() => document.getElementById('inspector').textContent.includes('says')")
        page.focus("#tab-requests")
        page.keyboard.press("ArrowRight")
        page.wait_for_selector("#tree .node")
        assert "tokens in" in page.inner_text("#tree")
        before = page.evaluate("() => document.documentElement.dataset.theme")
        page.keyboard.press("t")
        assert page.evaluate("() => document.documentElement.dataset.theme") != before
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 400, "no sideways scrolling"


def test_a_hundred_thousand_blocks_are_drawn(tmp_path: Path, model: LoadedModel) -> None:
    """Each block has its own cell, and the cell under a pixel is the block whose colour it has."""
    config = EngineConfig(block_size=1, num_blocks=100_000, max_num_seqs=8)
    thread = EngineThread(Engine(model, config))
    thread.start()
    try:
        with (
            serving(create_app(thread)) as url,
            browser(tmp_path, viewport={"width": 1280, "height": 900}) as page,
        ):
            page.goto(url)
            page.wait_for_function("() => octavoMap.cells.painted > 0")
            found = page.evaluate(
                """() => {
                  const { cells, app } = octavoMap;
                  const seen = new Set();
                  for (let y = 0; y < cells.canvas.height; y += cells.size)
                    for (let x = 0; x < cells.columns * cells.size; x += cells.size)
                      seen.add(cells.hit(x / cells.ratio, y / cells.ratio, app.state));
                  seen.delete(-1);
                  return [seen.size, cells.size];
                }"""
            )
            assert found[0] == 100_000
            assert found[1] >= 1
    finally:
        thread.shutdown(timeout=10)


def test_the_stream_is_a_snapshot_and_frames(engine: EngineThread, serve: Callable[..., str]) -> None:
    """Any client can follow: what it puts together equals the pool, and leaving ends the watching."""
    url = serve()
    with httpx.stream("GET", f"{url}/memory/events", timeout=30) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = (line[6:] for line in answer.iter_lines() if line.startswith("data: "))
        mirror = Mirror(json.loads(next(lines)))
        threads = load(url, 4)
        while mirror.counts["finished"] < 4 or mirror.rows:
            mirror.apply(json.loads(next(lines)))
        for thread in threads:
            thread.join()
        assert mirror.refs.tolist() == engine.engine.pool._blocks.refs[:NUM_BLOCKS]
        assert mirror.counts["cached"] == engine.engine.pool.stats().cached
    wait_for(lambda: not hasattr(engine.engine.pool._blocks, "watch"))
    assert len(engine.engine.observers) == 1, "only the metrics look on"


def test_text_only_where_it_is_allowed(engine: EngineThread) -> None:
    """Without show_text a block's token ids and text are nowhere: not in frames, not in answers."""
    for show in (False, True):
        with serving(create_app(engine, ServerConfig(show_text=show))) as url:
            assert httpx.get(f"{url}/memory/info").json() == {"mode": "live", "show_text": show}
            assert httpx.get(f"{url}/memory/block/0").status_code == 400, "nobody watches"
            with httpx.stream("GET", f"{url}/memory/events") as answer:
                lines = (line[6:] for line in answer.iter_lines() if line.startswith("data: "))
                next(lines)
                httpx.post(f"{url}/v1/completions", json={"prompt": "Secretword", "max_tokens": 2})
                frame = next(line for line in lines if json.loads(line).get("blocks"))
                block = json.loads(frame)["blocks"][0]
                told = httpx.get(f"{url}/memory/block/{block}").json()
                assert ("text" in told, "tokens" in told) == (show, show)
                assert told["num_tokens"] > 0
                assert "Secretword" not in frame


@pytest.mark.parametrize("path", ["/", "/memory/map.js", "/memory/info", "/memory/events", "/memory/block/0"])
def test_a_key_covers_all_of_it(engine: EngineThread, path: str) -> None:
    """Bearer as in the API, or as a basic password, which browsers can ask for; nothing without."""
    app = create_app(engine, ServerConfig(keys=(ApiKey.from_secret("k:1"),)))
    with TestClient(app) as client:
        refused = client.get(path)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Basic")
        wrong = base64.b64encode(b"me:other").decode()
        for header in (f"Basic {wrong}", "Basic !!", "Bearer other", "Basic"):
            assert client.get(path, headers={"Authorization": header}).status_code == 401
        if path != "/memory/events":  # it would not end
            right = base64.b64encode(b"anyone:k:1").decode()
            for header in (f"Basic {right}", "Bearer k:1"):
                assert client.get(path, headers={"Authorization": header}).status_code in (200, 400)
        # A password that a browser repeats by itself must not spend tokens.
        body = {"prompt": "a", "max_tokens": 1}
        basic = {"Authorization": "Basic " + base64.b64encode(b"anyone:k:1").decode()}
        assert client.post("/v1/completions", json=body, headers=basic).status_code == 401
        assert client.get("/v1/models", headers=basic).status_code == 401
        assert client.get("/v1/models").headers["www-authenticate"] == "Bearer"


def test_the_browser_asks_for_the_key(engine: EngineThread, tmp_path: Path) -> None:
    """With the key as its password the page loads and follows, events included."""
    config = ServerConfig(keys=(ApiKey.from_secret("k"),))
    with serving(create_app(engine, config)) as url:
        credentials = {"username": "anyone", "password": "k"}
        with browser(tmp_path, http_credentials=credentials) as page:
            page.goto(url)
            page.wait_for_function("() => octavoMap.app.history !== null")
            for thread in load(url, 2, key="k"):
                thread.join()
            page.wait_for_function("() => octavoMap.app.state.counts.finished === 2")


def test_off_means_off(engine: EngineThread) -> None:
    """Without the map its paths are unknown, as any other."""
    with TestClient(create_app(engine, ServerConfig(memory_map=False))) as client:
        for path in ("/", "/memory/map.js", "/memory/events"):
            assert client.get(path).status_code == 404


def test_only_its_own_parts_are_served(engine: EngineThread) -> None:
    """No path leads out of the folder, and nothing on the page comes from elsewhere."""
    with TestClient(create_app(engine)) as client:
        page = client.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in page.headers["content-security-policy"]
        for path in ("/memory/nothing.js", "/memory/..%2Fapp.py", "/memory/__init__.py", "/memory/block/x"):
            assert client.get(path).status_code in (404, 422, 400), path
        web = Path(__file__).parents[2] / "octavo/server/web"
        for part in web.iterdir():
            text = part.read_text()
            outside = text.replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in outside, part
            assert "https://" not in outside, part
            if part.suffix == ".html":
                assert "<style" not in text
                assert " style=" not in text
