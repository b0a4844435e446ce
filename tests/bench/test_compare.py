"""bench.compare: scaling, checks of lengths, figures, medians, ratios, table, plot; workers that fail."""

from __future__ import annotations

import argparse
import http.server
import json
import sys
import threading
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from bench.compare import rounds, works
from bench.compare.__main__ import ENGINES, chosen, note_agreement
from bench.compare.client import Client
from bench.compare.install import InstallFailed, python_of
from bench.compare.plot import svg
from bench.compare.process import Process, TooSlow, WorkerFailed
from bench.compare.report import between, markdown, table
from bench.compare.rounds import Kept, Turn, measure, parse_engine, record

FILE: dict[str, Any] = {
    "W1": {"requests": [{"prompt": list(range(40)), "max_tokens": 20}], "temperature": 0},
    "W2": {"requests": [{"prompt": [1, 2, 3, 4], "max_tokens": 3}, {"prompt": [5, 6], "max_tokens": 5}]},
    "W3": {"shared_prefix_len": 20, "requests": [{"prompt": list(range(30)), "max_tokens": 10}]},
    "W4": {"n": 2, "temperature": 1.0, "requests": [{"prompt": [1, 2], "max_tokens": 4}]},
    "W5": {"same_as": "W2", "kv_tokens": 4096},
}


def answers(work: works.Work, **change: Any) -> list[dict[str, Any]]:
    """Results in which every request was done in full: first token after 1 s, the last after 3 s."""
    return [
        {
            "wall": 4.0,
            "answers": [
                {
                    "prompt": len(r["prompt"]),
                    "tokens": [[7] * r["max_tokens"] for _ in range(r["n"])],
                    "first": 1.0,
                    "end": 3.0,
                    "error": None,
                    **change,
                }
                for r in batch
            ],
        }
        for batch in work.batches
    ]


def rows(*values: tuple[str, float]) -> list[dict[str, Any]]:
    return [
        record(e, turn, "W2", figures={"wall s": v, "output tok/s": 100 / v})
        for turn, (e, v) in enumerate(values)
    ]


def test_scaling_keeps_a_shared_prefix_shared_and_the_kv_limit_large_enough() -> None:
    half = works.load(FILE, "W3", 0.5)
    assert half.batches[0][0]["prompt"] == [*range(10), *range(20, 25)]
    assert half.batches[0] == half.batches[1]
    tight = works.load(FILE, "W5", 0.001)
    assert tight.max_len < tight.kv_tokens < 4096
    assert works.load(FILE, "W5").kv_tokens == 4096


def test_w1_is_split_at_the_first_token() -> None:
    work = works.load(FILE, "W1")
    assert works.figures(work, answers(work)) == {"prefill ms": 1000.0, "decode tok/s": 19 / 2}


def test_w2_counts_the_tokens_that_came() -> None:
    work = works.load(FILE, "W2")
    assert works.figures(work, answers(work)) == {"wall s": 4.0, "output tok/s": 2.0}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"error": "no room"}, "no room"),
        ({"prompt": 1}, "1 prompt tokens"),
        ({"tokens": [[7], [7]]}, "2 x 4"),
    ],
)
def test_a_request_not_done_in_full_is_named(change: dict[str, Any], word: str) -> None:
    work = works.load(FILE, "W4")
    assert not works.faults(work, answers(work))
    (line,) = works.faults(work, answers(work, **change))
    assert word in line
    assert word in (measure("x", 1, work, answers(work, **change))["error"] or "")


def test_ratios_are_of_medians_and_above_one_where_the_first_engine_is_better() -> None:
    records = rows(("own", 10), ("own", 90), ("own", 20), ("peer", 30))
    (_, _, wall), (_, _, speed) = table(records)
    assert wall[0].value == 20
    assert wall[1].ratio == pytest.approx(1.5)
    assert speed[1].ratio == pytest.approx(5 / (100 / 30))


def test_an_error_in_one_round_is_shown_and_gives_no_ratio() -> None:
    records = [*rows(("own", 10), ("peer", 30)), record("peer", 2, "W2", error="no answer in 900 s")]
    assert table(records)[0][2][1].value is None
    assert "peer: W2: no answer in 900 s" in markdown(records, {"threads": "2"})


def test_failed_requests_are_shown_and_give_no_ratio() -> None:
    records = [*rows(("own", 10.0)), record("peer", 1, "W2", figures={"wall s": 5.0}, failed=32)]
    text = markdown(records, {"threads": "2"})
    assert "| W2 | wall s | 10.0 | 5.00 [32 failed] |" in text


def test_a_peer_that_was_never_installed_keeps_its_column() -> None:
    records = [*rows(("own", 10.0)), record("peer", 1, "W2", error="not installed: no wheel")]
    assert "| W2 | wall s | 10.0 | failed |" in markdown(records, {})


def test_no_two_engines_have_one_colour() -> None:
    root = ElementTree.fromstring(svg(rows(*((f"engine {i}", 10) for i in range(14))), "caption"))
    keys = [e.get("fill") for e in root.iter() if e.get("width") == "12" and e.get("height") == "12"]
    assert len(keys) == len(set(keys)) == 14


def test_the_plot_is_xml_with_a_bar_per_engine_as_long_as_its_speed() -> None:
    root = ElementTree.fromstring(svg(rows(("own <1>", 10), ("peer", 20)), "caption"))
    bars = [float(r.get("width", 0)) for r in root.findall("{*}rect") if r.get("height") == "12"][2:]
    assert bars[0] == pytest.approx(2 * bars[1])


def test_greedy_agreement_is_the_length_of_the_common_beginning() -> None:
    assert works.agreement([1, 2, 3], [1, 2, 4]) == 2
    records = [record("own", 1, "W1", tokens=[1, 2]), record("peer", 1, "W1", tokens=[1, 3])]
    note_agreement(records)
    assert records[1]["notes"] == ["its greedy tokens are the first engine's for 1 of 2"]


def test_default_stands_for_the_default_engines() -> None:
    assert chosen(argparse.Namespace(engine=None)) == list(ENGINES)
    assert chosen(argparse.Namespace(engine=["default", "vllm"])) == [*ENGINES, "vllm"]


def test_an_engine_may_run_some_workloads_only(turn: Any) -> None:
    one = turn(1)
    one.text = "fake:works=W1+W4"
    one.__post_init__()
    one.run([works.load(FILE, name) for name in ("W1", "W2", "W4")])
    assert {"W1", "W4"} == done(one).keys() - {"start", "install", "memory"}


def test_engine_options() -> None:
    assert parse_engine("octavo:weights=int8,speculate=4,prefix_caching=false") == (
        "octavo",
        {"weights": "int8", "speculate": 4, "prefix_caching": False},
    )
    with pytest.raises(ValueError, match="not option=value"):
        parse_engine("octavo:weights")


def test_what_pip_refuses_is_reported(tmp_path: Path) -> None:
    module = ModuleType("peer")
    module.INSTALL = [[str(tmp_path / "no-such-wheel.whl")]]  # type: ignore[attr-defined]
    with pytest.raises(InstallFailed):
        python_of("peer", module, tmp_path)
    assert not (tmp_path / "peer" / "installed.txt").exists()


def test_a_worker_that_cannot_start_says_why() -> None:
    process = Process(Path(sys.executable), "openvino", 1)
    with pytest.raises(WorkerFailed, match="ModuleNotFoundError"):
        process.start({"model": "x", "threads": 1, "kv_tokens": 64, "options": {}}, 60)
    process.close()


class FakePeer:
    """A peer module without an environment; `prepare` names it as the real ones do."""

    PACKAGE = "pytest"
    INSTALL: ClassVar[list[list[str]]] = []

    @staticmethod
    def label(options: dict[str, Any]) -> str:
        return "fake"


class FakeProcess:
    """Stands for Process; `lost` holds the sizes of batches on which it is lost, and how."""

    lost: ClassVar[dict[int, WorkerFailed]] = {}
    starts = 0

    def __init__(self, *_: Any) -> None:
        FakeProcess.starts += 1

    def start(self, setup: dict[str, Any], limit: float) -> dict[str, Any]:
        return {"ready": {}, "seconds": 1.0, "resident MiB": 1.0, "installed": {"MiB": 1.0, "packages": 1}}

    def run(self, requests: list[dict[str, Any]], limit: float) -> dict[str, Any]:
        if requests[0]["prompt"] and len(requests) in self.lost:
            raise self.lost[len(requests)]
        one = [
            {"prompt": len(r["prompt"]), "tokens": [[7] * r["max_tokens"]] * r["n"], "first": 1.0, "end": 2.0}
            for r in requests
        ]
        return {"wall": 2.0, "answers": [{**answer, "error": None} for answer in one]}

    def peak_mib(self) -> float:
        return 2.0

    def close(self) -> None:
        pass


@pytest.fixture
def turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A factory: round number -> a Turn of the fake peer, all with the same records on disk."""
    monkeypatch.setattr(rounds, "Process", FakeProcess)
    monkeypatch.setattr(rounds.importlib, "import_module", lambda _: FakePeer)
    monkeypatch.setattr(FakeProcess, "lost", {})
    monkeypatch.setattr(FakeProcess, "starts", 0)
    path = tmp_path / "results.json"
    args = argparse.Namespace(venvs=tmp_path, threads=1, model="m", slots=1, limit=5.0)

    def make(number: int) -> Turn:
        content = json.loads(path.read_text()) if path.exists() else {"records": []}
        return Turn("fake", number, args, Kept(content, path))

    return make


def done(turn: Turn) -> dict[str, str | None]:
    return {r["work"]: r["error"] for r in turn.kept.records if r["round"] == turn.number}


def test_a_second_call_runs_only_what_has_no_record(turn: Any) -> None:
    first = turn(1)
    first.run([works.load(FILE, "W1")])
    again = turn(1)
    again.run([works.load(FILE, "W1"), works.load(FILE, "W4")])
    names = [r["work"] for r in again.kept.records]
    assert names.count("W1") == names.count("W4") == 1
    assert FakeProcess.starts == 2


def test_a_lost_engine_is_a_record_and_is_started_again_for_the_rest(turn: Any) -> None:
    FakeProcess.lost = {2: WorkerFailed("the process ended with status -9")}
    one = turn(1)
    one.run([works.load(FILE, name) for name in ("W1", "W2", "W4")])
    assert done(one)["W2"] == "the process ended with status -9"
    assert done(one)["W1"] is None
    assert done(one)["W4"] is None
    assert FakeProcess.starts == 2


def test_what_was_too_slow_once_is_not_tried_in_later_rounds(turn: Any) -> None:
    FakeProcess.lost = {2: TooSlow("no answer in 5 s")}
    turn(1).run([works.load(FILE, "W2")])
    FakeProcess.lost = {}
    later = turn(2)
    later.run([works.load(FILE, "W2"), works.load(FILE, "W1")])
    assert done(later)["W2"] == "not tried again: not done in 5 s"
    assert done(later)["W1"] is None


def test_an_engine_that_does_not_install_keeps_a_record_per_workload(turn: Any) -> None:
    one = turn(1)
    one.text = "fake:venv=/nowhere"
    one.__post_init__()
    one.run([works.load(FILE, "W1")])
    assert "not installed: there is no /nowhere" in (done(one)["W1"] or "")


def test_the_table_goes_between_its_marks_and_nothing_else_changes() -> None:
    page = "a\n<!-- compare -->\nold\n<!-- /compare -->\nz\n"
    new = between(page, "| t |\n")
    assert new == "a\n<!-- compare -->\n\n| t |\n\n<!-- /compare -->\nz\n"
    assert between(new, "| t |\n") == new
    with pytest.raises(ValueError, match="has no"):
        between("a", "t")


class Answer(http.server.BaseHTTPRequestHandler):
    """Streams two events of token ids, or answers whole, or refuses."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = "text/event-stream" if asked["stream"] else "application/json"
        self.send_response(400 if asked["bad"] else 200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        if asked["bad"]:
            self.wfile.write(b'{"error": "no room"}')
        elif asked["stream"]:
            self.wfile.write(b'data: {"ids": [1]}\n\ndata: {"ids": [2, 3], "prompt": 4}\n\ndata: [DONE]\n\n')
        else:
            self.wfile.write(b'[{"ids": [1, 2, 3], "prompt": 4}]')

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize(("n", "bad"), [(1, False), (2, False), (1, True)])
def test_the_client_reads_streams_whole_answers_and_refusals(n: int, bad: bool) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        (answer,) = Client(server.server_port).run(
            [{"n": n}],
            "/",
            lambda request, stream: {"stream": stream, "bad": bad},
            lambda event: (event.get("prompt"), [(0, event.get("ids", []))], event.get("error")),
        )
    finally:
        server.shutdown()
    if bad:
        assert answer["error"] == "no room"
        return
    assert (answer["prompt"], answer["tokens"][0], answer["error"]) == (4, [1, 2, 3], None)
    assert (answer["first"] is not None) == (n == 1)  # only a single sample is streamed
