"""Health routes in every state of the engine, and what becomes of requests in them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import httpx
import pytest
from fastapi.testclient import TestClient

from octavo.engine.errors import EngineDead
from octavo.server import ServerConfig, create_app
from octavo.server.keys import ApiKey

from .conftest import Serve, wait_for
from .fake_engine import FakeEngineThread

URLS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")
BODY = {"prompt": "a"}


def health(client: TestClient) -> tuple[int, int, int]:
    return tuple(client.get(path).status_code for path in ("/health/live", "/health/ready", "/health"))


def test_loading_then_serving(engine: FakeEngineThread) -> None:
    """Before the engine is attached: alive, not ready, and every route says 503 with a time to come back."""
    app = create_app(None)
    with TestClient(app, raise_server_exceptions=False) as client:
        assert health(client) == (200, 503, 503)
        assert client.get("/health/live").json()["state"] == "loading"
        for path in ("/v1/models", "/metrics"):
            assert client.get(path).status_code == 503
        # Also where the body is wrong: nothing can be checked without a model.
        for url in URLS:
            answer = client.post(url, json=BODY if url == URLS[0] else {})
            assert answer.status_code in (400, 503)
        refused = client.post(URLS[0], json=BODY)
        assert refused.status_code == 503
        assert "loading" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
        app.state.context.attach(engine)
        assert health(client) == (200, 200, 200)
        assert client.post(URLS[0], json=BODY).status_code == 200


def test_draining(client: TestClient, engine: FakeEngineThread) -> None:
    """Alive, not ready, new requests refused."""
    client.app.state.context.drain()  # type: ignore[attr-defined]
    assert health(client) == (200, 503, 503)
    assert client.post(URLS[0], json=BODY).status_code == 503
    assert engine.seen == []


@pytest.mark.parametrize("how", ["dead", "stuck"])
def test_beyond_help(client: TestClient, engine: FakeEngineThread, how: str) -> None:
    """A dead engine, or one whose step does not end, is not alive: a restart is what helps."""
    if how == "dead":
        engine.alive = False
    else:
        engine.step_seconds = 301.0
    assert health(client) == (503, 503, 503)
    assert how in client.get("/health/live").json()["error"]["message"]
    assert client.post(URLS[0], json=BODY).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
def test_stuck_with_a_request_open(
    client: TestClient, engine: FakeEngineThread, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """A request under way when the engine hangs ends with a 503 and does not wait for ever."""
    monkeypatch.setattr("octavo.server.generation.LIVENESS_SECONDS", 0.05)
    engine.stalled = True
    answers = iter([0.0])
    monkeypatch.setattr(
        FakeEngineThread, "step_seconds", property(lambda self: next(answers, 301.0)), raising=False
    )
    answer = client.post(URLS[0], json={**BODY, "stream": stream})
    assert answer.status_code == 503
    assert engine.running == 0


def test_dies_in_the_middle_of_streams(client: TestClient, engine: FakeEngineThread) -> None:
    """Each open stream gets an error event as its last."""
    engine.fail_after, engine.failure = 2, EngineDead("the engine ended: boom")
    for url, body in ((URLS[0], BODY), (URLS[1], {"messages": [{"role": "user", "content": "a"}]})):
        text = client.post(url, json={**body, "stream": True}).text
        last = [line for line in text.split("\n") if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_unavailable"


@pytest.mark.parametrize("stream", [False, True])
def test_request_timeout(engine: FakeEngineThread, stream: bool) -> None:
    """A request that takes longer than one may ends with code request_timeout, naming the option."""
    engine.stalled = True
    client = TestClient(create_app(engine, ServerConfig(request_seconds=0.1)))
    answer = client.post(URLS[0], json={**BODY, "stream": stream})
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "request_timeout"
    assert "--request-timeout" in answer.json()["error"]["message"]
    wait_for(lambda: engine.running == 0)
    assert engine.aborted == 1


def test_request_timeout_within_a_stream(engine: FakeEngineThread, serve: Serve, monkeypatch) -> None:
    """After text has gone out the time-out is the last event."""
    now = [1000.0]
    monkeypatch.setattr("octavo.server.generation.time", SimpleNamespace(monotonic=lambda: now[0]))
    engine.hold_before = 1
    url = serve(ServerConfig(request_seconds=100.0)) + URLS[0]
    with httpx.stream("POST", url, json={**BODY, "stream": True}, timeout=60) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        now[0] += 101.0
        assert '"request_timeout"' in [line for line in lines if line][-1]
    wait_for(lambda: (engine.running, engine.aborted) == (0, 1))


def test_health_needs_no_key(engine: FakeEngineThread) -> None:
    """Probes carry none; everything else needs one, whatever its path looks like."""
    client = TestClient(create_app(engine, ServerConfig(keys=(ApiKey.from_secret("k"),))))
    assert health(client) == (200, 200, 200)
    for path in ("/health/live/", "/health/other", "/metrics", "/openapi.json", "/tokenize", "/"):
        assert client.get(path).status_code == 401


def test_head(client: TestClient) -> None:
    """Probes that ask by HEAD get the status alone."""
    for path in ("/health", "/health/ready", "/health/live"):
        answer = client.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
