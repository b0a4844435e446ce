"""Request ids, the access log, CORS, and answers to what no route expected."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from octavo.server import ServerConfig, create_app, logs
from octavo.server.keys import ApiKey

from .conftest import wait_for
from .fake_engine import FakeEngineThread

URL = "/v1/completions"
BODY = {"prompt": "my secret", "max_tokens": 3}


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What the octavo loggers write, one JSON object a line."""
    stream = io.StringIO()
    with logs.configured("json", stream=stream):
        yield stream


def lines(log: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in log.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("sent", "kept"), [("abc-1", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("", False)]
)
def test_request_id(client: TestClient, sent: str, kept: bool) -> None:
    """Every answer has an id: the client's label where it is short and plain, else one of our own."""
    got = client.get("/health", headers={"X-Request-Id": sent}).headers["x-request-id"]
    assert (got == sent) is kept
    assert got


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", URL, 405), ("POST", URL, 400), ("GET", "/v1/models/x", 404)],
)
def test_errors_have_an_id(client: TestClient, method: str, path: str, status: int) -> None:
    """Refusals too can be found in the log."""
    answer = client.request(method, path)
    assert answer.status_code == status
    assert answer.headers["x-request-id"].startswith("req-")


def test_crash(client: TestClient, engine: FakeEngineThread, monkeypatch, log: io.StringIO) -> None:
    """An exception that no one expected is a 500 with an error body and an id; its text is only logged."""

    def stats(self: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(FakeEngineThread, "stats", stats)
    answer = client.get("/health")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"]
    assert any("secret detail" in str(line.get("exception")) for line in lines(log))


@pytest.mark.parametrize("stream", [False, True])
def test_access_log(engine: FakeEngineThread, log: io.StringIO, stream: bool) -> None:
    """One line a request: who, what, status, time, tokens, id - and nothing of the prompt or the key."""
    engine.cached = 2
    app = create_app(engine, ServerConfig(keys=(ApiKey.from_secret("s3cret", "ann"),)))
    client = TestClient(app, headers={"Authorization": "Bearer s3cret"})
    answer = client.post(URL, json={**BODY, "stream": stream}, headers={"X-Request-Id": "r1"})
    assert answer.status_code == 200
    assert client.get("/health").status_code == 200  # probes are not logged at this level
    (line,) = [line for line in lines(log) if line["logger"] == "octavo.access"]
    expected = {"method": "POST", "path": URL, "status": 200, "bytes": len(answer.content), "key": "ann"}
    expected |= {"request_id": "r1", "prompt_tokens": 9, "completion_tokens": 3, "cached_tokens": 2}
    assert expected.items() <= line.items()
    assert line["seconds"] >= 0
    assert "s3cret" not in log.getvalue()
    assert "my secret" not in log.getvalue()
    assert "sheet" not in log.getvalue()


def test_prompts_are_logged_when_asked(engine: FakeEngineThread, log: io.StringIO) -> None:
    """With log_prompts the log holds the prompt's text and each choice's."""
    client = TestClient(create_app(engine, ServerConfig(log_prompts=True)))
    client.post(URL, json=BODY)
    client.post(URL, json={**BODY, "stream": True})
    found = [line for line in lines(log) if line["message"] == "answered"]
    assert [line["prompts"] for line in found] == [["my secret"]] * 2
    assert [line["texts"] for line in found] == [["One sheet makes"]] * 2


def test_text_log_is_one_line(log: io.StringIO) -> None:
    """A line break in what a client sent does not start a line of its own; inside one form of log another
    takes its place, and gives it back."""
    stream, logger = io.StringIO(), logging.getLogger("octavo.x")
    with logs.configured("text", stream=stream):
        logger.info("a\nb", extra={"fields": {"path": "/x\n\rINFO y", "n": 1}})
    assert len(stream.getvalue().splitlines()) == 1
    assert stream.getvalue().rstrip().endswith('path="/x\\n\\rINFO y" n=1')
    assert log.getvalue() == ""
    logger.info("again")
    assert [line["message"] for line in lines(log)] == ["again"]


def test_engine_log(engine: FakeEngineThread, log: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the engine works there is a line every few seconds with its counts; then one that it rests."""
    monkeypatch.setattr("octavo.server.heartbeat.SECONDS", 0.02)
    engine.stalled = True
    with TestClient(create_app(engine)) as client:
        posted = threading.Thread(target=lambda: client.post(URL, json=BODY))
        posted.start()
        try:
            wait_for(lambda: '"message": "working"' in log.getvalue())
        finally:
            engine.stalled = False
            posted.join()
        wait_for(lambda: '"message": "idle"' in log.getvalue())
        size = len(log.getvalue())
        client.get("/health/ready")
        assert len(log.getvalue()) == size  # silent when idle
    line = next(line for line in lines(log) if line["message"] == "working")
    assert line["num_running"] == 1
    assert {"tokens_per_second", "blocks_free"} <= line.keys()


class TestCors:
    """Web pages may read answers only where that was asked for."""

    PREFLIGHT = {  # noqa: RUF012
        "Origin": "https://a.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }

    def test_off(self, client: TestClient) -> None:
        """By default no answer carries a CORS header."""
        for answer in (
            client.options(URL, headers=self.PREFLIGHT),
            client.post(URL, json=BODY, headers={"Origin": "https://a.example"}),
        ):
            assert not [name for name in answer.headers if name.startswith("access-control")]

    def test_on(self, engine: FakeEngineThread) -> None:
        """The named origin may; another may not; a preflight needs no key, and refusals can be read too."""
        config = ServerConfig(keys=(ApiKey.from_secret("k"),), cors_origins=("https://a.example",))
        client = TestClient(create_app(engine, config))
        preflight = client.options(URL, headers=self.PREFLIGHT)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        refused = client.post(URL, json=BODY, headers={"Origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
        other = client.post(URL, json=BODY, headers={"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
