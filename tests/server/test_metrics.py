"""/metrics: equal to the sum of the answers' usage, idle afterwards, and right by Prometheus' own checker."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from octavo.engine import Engine, EngineConfig, EngineThread
from octavo.models import load_model
from octavo.server import ServerConfig, create_app
from octavo.server.keys import ApiKey
from tests.engine.helpers import Hold, over_admit, tiny_checkpoint

from .sse import events

URL = "/v1/completions"
Samples = dict[str, float]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))[0]


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[EngineThread]:
    """A pool so small that a few requests evict and preempt."""
    config = EngineConfig(model=str(checkpoint), block_size=4, num_blocks=40, max_num_seqs=8, checked=True)
    thread = EngineThread(Engine(load_model(checkpoint), config))
    thread.start()
    yield thread
    thread.shutdown(timeout=10)


@pytest.fixture
def client(engine: EngineThread) -> Iterator[TestClient]:
    with TestClient(create_app(engine), raise_server_exceptions=False) as client:
        yield client


def scrape(client: TestClient) -> Samples:
    """Every sample without the model's label: "name" or "name{label=value}"."""
    answer = client.get("/metrics")
    assert answer.status_code == 200
    found: Samples = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            inside = ",".join(f"{k}={v}" for k, v in labels.items())
            found[f"{sample.name}{{{inside}}}" if inside else sample.name] = sample.value
    return found


def load(client: TestClient) -> list[dict[str, Any]]:
    """Twelve requests at once, some with n > 1, some streamed, some alike; their usage objects."""
    usages: list[dict[str, Any]] = []

    def one(number: int) -> None:
        body: dict[str, Any] = {
            "prompt": "A leaf of the book " * (1 + number % 3) + "x" * (number % 4),
            "n": 1 + 2 * (number % 2),
            "max_tokens": 12 + number,
            "ignore_eos": True,
            "seed": number,
        }
        if number % 3 == 0:
            options = {"stream": True, "stream_options": {"include_usage": True}}
            usages.append(events(client.post(URL, json={**body, **options}))[-1]["usage"])
        else:
            usages.append(client.post(URL, json=body).json()["usage"])

    threads = [threading.Thread(target=one, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return usages


def test_counters_equal_the_usage_of_all_answers(client: TestClient, engine: EngineThread) -> None:
    """Prompt, cached and generated tokens agree to the token, and the load did preempt and copy."""
    over_admit(engine)
    usages = load(client)
    assert len(usages) == 12
    found = scrape(client)
    assert found["octavo_prompt_tokens_total"] == sum(u["prompt_tokens"] for u in usages)
    assert found["octavo_generation_tokens_total"] == sum(u["completion_tokens"] for u in usages)
    cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
    assert cached > 0
    assert found["octavo_prefix_cache_hits_total"] == cached
    assert found["octavo_prefix_cache_queries_total"] == found["octavo_prompt_tokens_total"]
    assert found["octavo_request_success_total{finished_reason=length}"] == 6 * 1 + 6 * 3
    for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds", "request_queue_time_seconds"):
        assert found[f"octavo_{name}_count"] == 12
    # A gap for every token of a sequence but its first.
    gaps = sum(u["completion_tokens"] for u in usages) - (6 * 1 + 6 * 3)
    assert found["octavo_inter_token_latency_seconds_count"] == gaps
    stats, pool = engine.engine.scheduler_stats, engine.engine.pool_stats
    assert min(stats.preemptions, pool.copies, pool.evictions) > 0
    assert found["octavo_num_preemptions_total"] == stats.preemptions
    assert found["octavo_block_copies_total"] == pool.copies
    assert found["octavo_block_evictions_total"] == pool.evictions
    assert found["octavo_iteration_tokens_sum"] == stats.computed == found["octavo_computed_tokens_total"]


def test_gauges_move_and_return_to_zero(client: TestClient, engine: EngineThread) -> None:
    """While a request runs it shows; after it everything is idle and every block free or cached."""
    body = {"prompt": "A book", "max_tokens": 100, "ignore_eos": True}
    runner = threading.Thread(target=lambda: client.post(URL, json=body))
    hold = Hold(engine, lambda: bool(engine.engine.scheduler.running))
    runner.start()
    hold.wait()
    busy = scrape(client)
    hold.go_on()
    runner.join()
    assert busy["octavo_num_requests_running"] == 1
    assert busy["octavo_kv_cache_usage_perc"] > 0
    load(client)
    idle = scrape(client)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "shared_blocks"):
        assert idle[f"octavo_{name}"] == 0, name
    assert idle["octavo_unused_slots"] == 0
    assert idle["octavo_blocks{state=held}"] == 0
    assert idle["octavo_blocks{state=free}"] + idle["octavo_blocks{state=cached}"] == 40


def test_what_did_not_succeed_is_counted(client: TestClient, engine: EngineThread, monkeypatch) -> None:
    """A failed step and a client that leaves are reasons of their own."""

    def fail(*_: object) -> None:
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(engine.engine.runner, "forward", fail)
        assert client.post(URL, json={"prompt": "a"}).status_code == 500
    assert scrape(client)["octavo_request_success_total{finished_reason=error}"] == 1
    ident = engine.engine.add_request([1, 2, 3], _params())
    engine.engine.abort(ident)
    engine.engine.abort(ident)
    found = scrape(client)
    assert found["octavo_request_success_total{finished_reason=abort}"] == 1
    assert found["octavo_e2e_request_latency_seconds_count"] == 2


def _params() -> Any:
    from octavo.engine import SamplingParams

    return SamplingParams(max_tokens=2)


def test_a_key_covers_metrics(engine: EngineThread) -> None:
    """With a key set, a scrape needs it."""
    with TestClient(create_app(engine, ServerConfig(keys=(ApiKey.from_secret("k"),)))) as client:
        assert client.get("/metrics").status_code == 401
        assert client.get("/metrics", headers={"Authorization": "Bearer k"}).status_code == 200


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not here")
def test_promtool_accepts_it(client: TestClient) -> None:
    """A plain scrape passes without a remark; with vLLM's prefix the colon is all that it gets."""
    load(client)

    def check(text: str) -> tuple[int, list[str]]:
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
        return done.returncode, (done.stdout + done.stderr).splitlines()

    assert check(client.get("/metrics").text) == (0, [])
    _, remarks = check(client.get("/metrics?prefix=vllm:").text)
    assert remarks
    assert [line for line in remarks if "should not contain ':'" not in line] == []


def test_another_prefix_changes_the_names_alone(client: TestClient) -> None:
    """As a dashboard for vLLM wants them: the same numbers under the same names after the prefix."""
    load(client)
    plain, other = client.get("/metrics").text, client.get("/metrics", params={"prefix": "vllm:"}).text
    assert "vllm:num_requests_running{" in other
    assert "octavo_" not in other
    assert other.replace("vllm:", "octavo_") == plain


def test_a_bad_prefix_is_refused(client: TestClient) -> None:
    """What is no metric name cannot be asked for."""
    for prefix in ("", "9", "a b", "a{", "é", "a" * 99):
        answer = client.get("/metrics", params={"prefix": prefix})
        assert answer.status_code == 400, prefix
        assert answer.json()["error"]["param"] == "prefix"


def test_the_dashboard_asks_for_what_is_there(client: TestClient) -> None:
    """Every metric that docs/grafana-dashboard.json names is in /metrics, under that very name."""
    board = json.loads((Path(__file__).parents[2] / "docs/grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [item["query"]["query"] for item in board["templating"]["list"] if item["type"] == "query"]
    asked = {name for query in queries for name in re.findall(r"octavo\w+", query)}
    there = {name.partition("{")[0] for name in scrape(client)}
    assert len(asked) > 20
    assert asked - there == set()
