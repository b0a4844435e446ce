"""The load generator: what it sends, how it times, and what it reports, against the fake engine's server."""

from __future__ import annotations

import json
import random
import xml.dom.minidom
from itertools import pairwise
from pathlib import Path

import pytest

from octavo.cli import load_source
from octavo.cli.errors import CommandError
from octavo.cli.load_report import percentile, plot, summary
from octavo.cli.load_run import Outcome
from octavo.cli.main import main
from octavo.server import ServerConfig, create_app
from octavo.server.keys import ApiKey
from tests.server.conftest import serving
from tests.server.fake_engine import WORDS, FakeEngineThread

SHARED = Path(__file__).parents[3] / "shared"


def test_workloads_are_sent_as_recorded(tmp_path: Path) -> None:
    """Prompts to the token, n and temperature; a workload that borrows another's requests has them."""
    path = tmp_path / "w.json"
    works = {
        "meta": {"seed": 1},
        "A": {"requests": [{"prompt": [1, 2], "max_tokens": 3}], "n": 2, "temperature": 1.0},
        "B": {"same_as": "A", "kv_tokens": 4096},
    }
    path.write_text(json.dumps(works))
    jobs, note = load_source.workload(path, "A")
    assert jobs == [load_source.Job(0.0, [1, 2], 3, 2, 1.0)]
    assert note == ""
    borrowed, note = load_source.workload(path, "B")
    assert borrowed == jobs
    assert "4,096 tokens" in note
    with pytest.raises(CommandError, match="no workload 'C'; it has A, B"):
        load_source.workload(path, "C")


def test_mooncake_traces(tmp_path: Path) -> None:
    """Requests share tokens exactly where they share hash ids; lengths and times scale."""
    path = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": 5000, "input_length": 1200, "output_length": 9, "hash_ids": [0, 1, 2]},
        {"timestamp": 7000, "input_length": 700, "output_length": 1, "hash_ids": [0, 7]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = load_source.trace(path, None, length=1.0, speed=2.0)
    assert (first.at, second.at) == (0.0, 1.0)
    assert (len(first.prompt), len(second.prompt), first.max_tokens) == (1200, 700, 9)
    assert first.prompt[:512] == second.prompt[:512]
    assert first.prompt[512:520] != second.prompt[512:520]
    (half,) = load_source.trace(path, 1, length=0.5, speed=1.0)
    assert (len(half.prompt), half.max_tokens) == (600, 4)
    assert half.prompt[:256] == first.prompt[:256]


def test_azure_traces(tmp_path: Path) -> None:
    """Times with seven decimals, and lengths; another file is refused by name."""
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48,10\n"
        "2023-11-16 18:17:04.0319600,31,8\n"
    )
    first, second = load_source.trace(path, None, length=1.0, speed=1.0)
    assert second.at == pytest.approx(0.052)
    assert (len(first.prompt), first.max_tokens, len(second.prompt)) == (48, 10, 31)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(CommandError, match="neither a Mooncake nor an Azure trace"):
        load_source.trace(path, None, length=1.0, speed=1.0)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the traces are not here")
def test_published_traces_are_read() -> None:
    """The first requests of real files have the lengths that their lines say."""
    jobs = load_source.trace(SHARED / "data/mooncake/conversation_trace.jsonl", 20, length=1.0, speed=1.0)
    assert (len(jobs), len(jobs[0].prompt), jobs[0].max_tokens) == (20, 6758, 500)
    jobs = load_source.trace(
        SHARED / "data/azure-2023/AzureLLMInferenceTrace_conv.csv", 20, length=1.0, speed=1.0
    )
    assert (len(jobs), len(jobs[0].prompt), jobs[0].max_tokens) == (20, 374, 44)
    jobs, _ = load_source.workload(SHARED / "workloads/workloads.json", "W5")
    assert (len(jobs), sum(job.max_tokens for job in jobs)) == (64, 8840)


def test_arrivals_come_at_their_rate() -> None:
    """Two thousand gaps of a Poisson process have its mean, and differ."""
    jobs = load_source.at_rate(load_source.made_up(2000, 1, 1, 0, 0), 50.0, seed=1)
    gaps = [b.at - a.at for a, b in pairwise(jobs)]
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert len(set(gaps)) == len(gaps)
    shared = load_source.made_up(3, 10, 1, 6, 0)
    assert shared[0].prompt[:6] == shared[1].prompt[:6]
    assert shared[0].prompt[6:] != shared[1].prompt[6:]


def test_percentiles_against_a_plain_reference() -> None:
    """As numpy's linear ones, on random values."""
    import numpy as np

    rng = random.Random(4)
    for size in (1, 2, 3, 10, 99):
        values = sorted(rng.random() for _ in range(size))
        for share in (0, 50, 90, 99, 100):
            assert percentile(values, share) == pytest.approx(np.percentile(values, share))


def test_figures_of_known_outcomes() -> None:
    """Every figure by hand; a failed request counts as such and in nothing else."""
    good = Outcome(
        sent=1.0, ended=3.0, chunks=[1.5, 2.0, 3.0], prompt_tokens=10, cached_tokens=4, output_tokens=3
    )
    bad = Outcome(sent=0.0, ended=5.0, chunks=[1.0], output_tokens=1, error="HTTP 429: full")
    figures = summary([good, bad])
    assert (figures["requests"], figures["failed"], figures["errors"]) == (2, 1, {"HTTP 429: full": 1})
    assert figures["wall_s"] == 5.0
    assert figures["output_tokens_per_s"] == pytest.approx(3 / 5)
    assert figures["total_tokens_per_s"] == pytest.approx(13 / 5)
    latency = figures["latency_s"]
    assert latency["ttft"]["p50"] == pytest.approx(0.5)
    assert latency["itl"]["p50"] == pytest.approx(0.75)
    assert latency["tpot"]["max"] == pytest.approx(0.75)
    assert latency["e2e"]["p99"] == pytest.approx(2.0)
    xml.dom.minidom.parseString(plot([good, bad], "a <b> & c"))
    xml.dom.minidom.parseString(plot([bad], "nothing"))


@pytest.mark.parametrize("loop", [["--rate", "200"], ["--concurrency", "3"]])
def test_against_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str], loop: list[str]) -> None:
    """Open and closed loop: every token counted, the key sent, figures and plot written."""
    thread = FakeEngineThread(delay=0.001)
    config = ServerConfig(keys=(ApiKey.from_secret("k"),))
    out, svg = tmp_path / "f.json", tmp_path / "f.svg"
    with serving(create_app(thread, config)) as url:
        common = [
            "bench",
            "serve",
            "--url",
            url,
            "--requests",
            "12",
            "--prompt-tokens",
            "9",
            "--output-tokens",
            "5",
        ]
        files = ["--json", str(out), "--plot", str(svg)]
        assert main([*common, *loop, "--api-key", "k", *files]) == 0
        figures = json.loads(out.read_text())
        assert (figures["requests"], figures["failed"]) == (12, 0)
        assert figures["output_tokens"] == 12 * 5
        assert figures["prompt_tokens"] == 12 * 9
        assert figures["latency_s"]["e2e"]["p50"] >= figures["latency_s"]["ttft"]["p50"] > 0
        assert "output tokens/s" in capsys.readouterr().out
        xml.dom.minidom.parse(str(svg))
        assert {len(prompt) for prompt, _ in thread.seen} == {9}
        assert all(params.ignore_eos for _, params in thread.seen)
        assert main([*common, *loop]) == 1  # no key
        assert "12 failed: HTTP 401" in capsys.readouterr().out
    assert main([*common, *loop]) == 1
    assert "ConnectError" in capsys.readouterr().out


def test_a_workload_against_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A closed loop keeps at most its number under way, and n sequences are all counted."""
    thread, most = FakeEngineThread(delay=0.002), [0]
    inner = thread.stream

    def stream(*args: object) -> object:
        most[0] = max(most[0], thread.running)
        return inner(*args)  # type: ignore[arg-type]

    thread.stream = stream  # type: ignore[method-assign,assignment]
    path, out = tmp_path / "w.json", tmp_path / "f.json"
    requests = [{"prompt": [65] * 4, "max_tokens": 6} for _ in range(8)]
    path.write_text(json.dumps({"A": {"requests": requests, "n": 2, "kv_tokens": 64}}))
    with serving(create_app(thread)) as url:
        command = ["bench", "workload", "A", "--file", str(path), "--url", url, "--json", str(out)]
        assert main([*command, "--concurrency", "2"]) == 0
    assert json.loads(out.read_text())["output_tokens"] == 8 * 2 * 6
    assert most[0] <= 2
    assert "64 tokens of KV cache" in capsys.readouterr().out
    assert main(["bench", "serve", "--rate", "1", "--concurrency", "1"]) == 2
    assert "give one of them" in capsys.readouterr().err
    assert len(WORDS) >= 6
