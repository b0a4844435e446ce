"""What --record writes: the same page and the same state again, from a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.cli import top
from octavo.cli.main import main
from octavo.engine import Engine, EngineConfig, EngineThread
from octavo.engine.feed import Feed
from octavo.engine.mirror import Mirror
from octavo.engine.recording import BadRecording, read, recording
from octavo.errors import OctavoError
from octavo.models import LoadedModel, load_model
from octavo.server import ServerConfig, create_app
from octavo.server.keys import ApiKey
from octavo.server.replay import create_replay_app
from tests.engine.helpers import tiny_checkpoint

from .browser import browser
from .conftest import serving
from .test_memory_map import load


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(tiny_checkpoint(tmp_path_factory.mktemp("tiny"))[0])


@pytest.fixture
def engine(model: LoadedModel) -> Iterator[EngineThread]:
    thread = EngineThread(Engine(model, EngineConfig(block_size=4, num_blocks=48, max_num_seqs=8)))
    thread.start()
    yield thread
    thread.shutdown(timeout=10)


def record(engine: EngineThread, path: Path, count: int = 6) -> Mirror:
    """A recorded run of some requests; what a watcher of the same feed saw at its end."""
    app = create_app(engine, ServerConfig(memory_map=False))
    feed: Feed = app.state.feed
    seen: list[bytes] = []

    def watcher(data: bytes | None) -> None:
        seen.append(data or b"")

    with serving(app) as url, recording(feed, path):
        feed.subscribe(watcher)
        for thread in load(url, count):
            thread.join()
        mirror, done = None, 0
        while mirror is None or mirror.counts["finished"] < count or mirror.rows:
            if len(seen) > done:
                frame = json.loads(seen[done])
                if mirror is None:
                    mirror = Mirror(frame)
                else:
                    mirror.apply(frame)
                done += 1
        feed.unsubscribe(watcher)
    return mirror


@pytest.mark.parametrize("name", ["map.jsonl", "map.jsonl.gz"])
def test_a_recording_holds_the_whole_run(engine: EngineThread, tmp_path: Path, name: str) -> None:
    """Its frames lead to the same end, and a file that was cut off anywhere is read up to there."""
    path = tmp_path / name
    end = record(engine, path)
    first, *frames = read(path)
    mirror = Mirror(first)
    for frame in frames:
        mirror.apply(frame)
    assert mirror.counts == end.counts
    assert mirror.refs.tolist() == end.refs.tolist()
    assert mirror.fill.tolist() == end.fill.tolist()
    data = path.read_bytes()
    for share in (0.99, 0.7):
        path.write_bytes(data[: int(len(data) * share)])
        try:
            assert 1 <= len(read(path)) <= 1 + len(frames)
        except BadRecording:
            assert name.endswith(".gz"), "so little of a compressed file may hold no whole line"


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    """Another file, an empty one, none at all: one line that says what to do."""
    path = tmp_path / "x.jsonl"
    for text in ("", "{}\n", "[1]\n", "no\n", '{"kind":"frame"}\n'):
        path.write_text(text)
        with pytest.raises(BadRecording, match=str(path)):
            create_replay_app(path)
    with pytest.raises(BadRecording, match="No such file"):
        create_replay_app(tmp_path / "none")
    with pytest.raises(OctavoError, match="--record"), recording(None, tmp_path / "no" / "x"):  # type: ignore[arg-type]
        pass


def test_the_page_plays_it(engine: EngineThread, tmp_path: Path) -> None:
    """In the browser it runs to the recorded end, and any moment before can be looked at."""
    path = tmp_path / "map.jsonl"
    end = record(engine, path)
    with serving(create_replay_app(path)) as url, browser(tmp_path / "profile") as page:
        page.goto(url)
        page.wait_for_function("() => octavoMap.app.history !== null")
        page.select_option("#speed", "64")
        page.wait_for_function("() => octavoMap.app.shown === octavoMap.app.history.last")
        assert page.evaluate("() => [...octavoMap.app.state.refs]") == end.refs.tolist()
        assert page.evaluate("() => octavoMap.app.state.counts") == end.counts
        page.evaluate("() => octavoMap.show(0)")
        assert page.evaluate("() => octavoMap.app.state.counts.finished") == 0
        assert page.inner_text("#status") == "replay paused"


def test_top_shows_the_same(engine: EngineThread, capsys: pytest.CaptureFixture[str]) -> None:
    """`octavo top --once` prints the counts, under the key where there is one, and a cell for each block."""
    config = ServerConfig(keys=(ApiKey.from_secret("k"),))
    with serving(create_app(engine, config)) as url:
        for thread in load(url, 4, key="k"):
            thread.join()
        stats = engine.engine.pool.stats()
        assert main(["top", url, "--api-key", "k", "--once"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "tokens/s" not in shown, "one moment has no speed"
        assert f"cached {stats.cached}" in shown
        assert f"free {stats.free}" in shown
        assert f"{engine.engine.scheduler_stats.preemptions} preemptions" in shown
        assert shown.count("▒") == stats.cached + 1, "a cell for each cached block, one in the legend"
        assert main(["top", url, "--once"]) == 2
        assert "401" in capsys.readouterr().err
        mirror = Mirror(next(top.events(url, "k")))
        text = top.cells(mirror, 5, 3).plain  # type: ignore[attr-defined]
        assert "each character is 4 blocks" in text
    assert main(["top", url, "--once"]) == 2
    assert "cannot follow" in capsys.readouterr().err
