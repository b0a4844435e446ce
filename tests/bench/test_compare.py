"""bench.compare: scaling, checks of lengths, figures, medians, ratios, table, plot; workers that fail."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench.compare import works
from bench.compare.__main__ import measure, note_agreement, parse_engine, record
from bench.compare.install import InstallFailed, python_of
from bench.compare.plot import svg
from bench.compare.process import Process, WorkerFailed
from bench.compare.report import markdown, table

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


def test_the_plot_is_xml_with_a_bar_per_engine_as_long_as_its_speed() -> None:
    root = ElementTree.fromstring(svg(rows(("own <1>", 10), ("peer", 20)), "caption"))
    bars = [float(r.get("width", 0)) for r in root.findall("{*}rect") if r.get("height") == "12"][2:]
    assert bars[0] == pytest.approx(2 * bars[1])


def test_greedy_agreement_is_the_length_of_the_common_beginning() -> None:
    assert works.agreement([1, 2, 3], [1, 2, 4]) == 2
    records = [record("own", 1, "W1", tokens=[1, 2]), record("peer", 1, "W1", tokens=[1, 3])]
    note_agreement(records)
    assert records[1]["notes"] == ["its greedy tokens are the first engine's for 1 of 2"]


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
