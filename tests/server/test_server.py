"""What is about the server and not about one route: health, models, key, limits, engine failures."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from octavo.engine.errors import EngineDead
from octavo.errors import OctavoError
from octavo.server import ServerConfig, create_app
from octavo.server.keys import ApiKey

from .fake_engine import FakeEngineThread

COMPLETIONS = "/v1/completions"
KEY = "s\u00e9cret"
CHAT = "/v1/chat/completions"
BODIES = {
    COMPLETIONS: {"prompt": "a", "max_tokens": 3},
    CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
}


def test_health(client: TestClient, engine: FakeEngineThread) -> None:
    """200 with the engine's counts while it lives; 503 with an error body when it does not."""
    answer = client.get("/health")
    assert answer.status_code == 200
    assert answer.json()["blocks_free"] == 8
    engine.alive = False
    answer = client.get("/health")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_unavailable"


def test_models(client: TestClient) -> None:
    """The served model is listed and found by its name, slash and all; another name is a 404."""
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["fake/model"]
    assert client.get("/v1/models/fake/model").json() == listed["data"][0]
    answer = client.get("/v1/models/other")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("url", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_dead_engine(client: TestClient, engine: FakeEngineThread, url: str, stream: bool) -> None:
    """A request to a dead engine is a 503 at once."""
    engine.alive = False
    assert client.post(url, json={**BODIES[url], "stream": stream}).status_code == 503


@pytest.mark.parametrize("url", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_engine_dies_in_silence(
    client: TestClient, engine: FakeEngineThread, monkeypatch, url: str, stream: bool
) -> None:
    """An engine that stops answering and is dead fails its open requests; they do not hang."""
    monkeypatch.setattr("octavo.server.generation.LIVENESS_SECONDS", 0.05)
    engine.stalled = True
    # Alive when the request comes in, dead when it is asked again.
    answers = iter([True])
    monkeypatch.setattr(FakeEngineThread, "alive", property(lambda self: next(answers, False)), raising=False)
    answer = client.post(url, json={**BODIES[url], "stream": stream})
    assert answer.status_code == 503
    assert engine.running == 0


@pytest.mark.parametrize("how", ["fail_after", "error_after", "end_after"])
@pytest.mark.parametrize("url", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_failure_before_the_first_token(
    client: TestClient, engine: FakeEngineThread, how: str, url: str, stream: bool
) -> None:
    """Nothing has been sent yet, so the failure is a 500 in either mode; the cause is not shown."""
    setattr(engine, how, 0)
    answer = client.post(url, json={**BODIES[url], "stream": stream})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text


@pytest.mark.parametrize("how", ["fail_after", "error_after", "end_after"])
@pytest.mark.parametrize("url", BODIES)
def test_failure_in_a_stream(client: TestClient, engine: FakeEngineThread, how: str, url: str) -> None:
    """After text has gone out a failure is the last event; no DONE follows, and no secret is shown."""
    setattr(engine, how, 2)
    answer = client.post(url, json={**BODIES[url], "stream": True})
    assert answer.status_code == 200
    *before, last = [block for block in answer.text.split("\n\n") if block]
    assert len(before) >= 2
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
    assert "DONE" not in answer.text
    assert "secret" not in answer.text
    assert engine.running == 0


def test_typed_engine_failure(client: TestClient, engine: FakeEngineThread) -> None:
    """An engine error that was raised on purpose tells its message."""
    engine.fail_after, engine.failure = 0, OctavoError("no room left; raise --num-blocks")
    answer = client.post(COMPLETIONS, json=BODIES[COMPLETIONS])
    assert answer.status_code == 500
    assert "--num-blocks" in answer.json()["error"]["message"]


def test_one_prompt_of_a_batch_fails(client: TestClient, engine: FakeEngineThread) -> None:
    """When the engine fails on one prompt of a batch, the call fails and the others are aborted."""
    engine.fail_on = "b"
    engine.hold_before = 1
    answer = client.post(COMPLETIONS, json={"prompt": ["a", "b", "c"]})
    assert answer.status_code == 500
    assert (engine.running, engine.aborted) == (0, 3)


@pytest.mark.parametrize("stream", [False, True])
def test_one_prompt_of_a_batch_is_refused(client: TestClient, engine: FakeEngineThread, stream: bool) -> None:
    """When one prompt of a batch cannot run, the call is a 400 before any of them has started."""
    answer = client.post(COMPLETIONS, json={"prompt": ["a", "b" * 101], "stream": stream})
    assert answer.status_code == 400
    assert engine.seen == []


@pytest.mark.parametrize("stream", [False, True])
def test_engine_dead_in_the_middle(client: TestClient, engine: FakeEngineThread, stream: bool) -> None:
    """EngineDead from an open request is a 503, or the error event of its stream."""
    engine.fail_after, engine.failure = (1 if stream else 0), EngineDead("the engine ended: boom")
    answer = client.post(COMPLETIONS, json={"prompt": "a", "stream": stream})
    assert answer.status_code == (200 if stream else 503)
    assert '"code":"engine_unavailable"' in answer.text


class TestApiKey:
    """With a key set, everything but /health needs it."""

    @pytest.fixture
    def client(self, engine: FakeEngineThread) -> Iterator[TestClient]:
        with TestClient(create_app(engine, ServerConfig(keys=(ApiKey.from_secret(KEY),)))) as client:
            yield client

    @pytest.mark.parametrize("value", [None, "", "Bearer", "Bearer ", "Bearer secret", f"Basic {KEY}", KEY])
    @pytest.mark.parametrize("path", ["/v1/models", "/v1/models/x", "/nothing", "/health/", "//health"])
    def test_refused(self, client: TestClient, value: str | None, path: str) -> None:
        """No key, a wrong one or another scheme: 401 with an OpenAI body, whatever the path."""
        headers = {} if value is None else {"Authorization": value.encode()}
        answer = client.get(path, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        # The client takes //health for a host, so it asks for /, where a browser is to ask for the key.
        scheme = "Basic" if path == "//health" else "Bearer"
        assert answer.headers["www-authenticate"].partition(" ")[0] == scheme

    def test_refused_before_the_body_is_looked_at(self, client: TestClient, engine: FakeEngineThread) -> None:
        """A generation without the key is a 401 and never reaches the engine."""
        assert client.post(COMPLETIONS, json=BODIES[COMPLETIONS]).status_code == 401
        assert engine.seen == []

    @pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
    def test_accepted(self, client: TestClient, scheme: str) -> None:
        """The right key opens every route; the scheme's case does not matter."""
        headers = {"Authorization": f"{scheme} {KEY}".encode()}
        assert client.post(COMPLETIONS, json=BODIES[COMPLETIONS], headers=headers).status_code == 200

    def test_health_needs_none(self, client: TestClient) -> None:
        """Probes carry no key."""
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_body_too_large(engine: FakeEngineThread, chunked: bool) -> None:
    """More bytes than the limit is a 413, whether announced or sent in chunks; the limit itself passes."""
    body = json.dumps(BODIES[COMPLETIONS]).encode()
    client = TestClient(create_app(engine, ServerConfig(max_body_bytes=len(body))))
    assert client.post(COMPLETIONS, content=body).status_code == 200
    longer = body + b" "
    answer = client.post(COMPLETIONS, content=iter([longer]) if chunked else longer)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("br", 415), ("identity", 200)])
def test_compressed_bodies(client: TestClient, encoding: str, status: int) -> None:
    """A compressed body is refused as what it is, not as bad JSON."""
    body = json.dumps(BODIES[COMPLETIONS]).encode()
    answer = client.post(COMPLETIONS, content=body, headers={"Content-Encoding": encoding})
    assert answer.status_code == status
    if status != 200:
        assert answer.json()["error"]["code"] == "unsupported_encoding"
        assert encoding in answer.json()["error"]["message"]


def test_more_sequences_than_ever_fit(engine: FakeEngineThread) -> None:
    """prompts x n above the limit is a 400 with both numbers and the option, not a 429."""
    client = TestClient(create_app(engine, ServerConfig(max_open_sequences=5)))
    answer = client.post(COMPLETIONS, json={"prompt": ["a", "b"], "n": 3})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert all(part in message for part in ("6", "5", "--max-queue"))
    assert client.post(COMPLETIONS, json={"prompt": "a", "n": 5}).status_code == 200
