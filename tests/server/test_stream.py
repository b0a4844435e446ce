"""Streams in long silences: comments keep a connection open, and change nothing of what is said."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from octavo.server.stream import STILL_HERE, EventStream

from .conftest import Serve, wait_for
from .fake_engine import WORDS, FakeEngineThread
from .sse import events, texts

URL = "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    URL: {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silence is long after a hundredth of a second."""
    monkeypatch.setattr("octavo.server.stream.QUIET_SECONDS", 0.01)


@pytest.mark.parametrize("path", BODIES)
def test_a_queued_stream_shows_life(serve: Serve, engine: FakeEngineThread, path: str) -> None:
    """While its request waits, headers and comments come; then the answer, as it would have been."""
    body = {**BODIES[path], "stream": True, "temperature": 0}
    plain = httpx.post(serve() + path, json=body).text
    engine.stalled = True
    with httpx.stream("POST", serve() + path, json=body, timeout=60) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        for _ in range(2):
            assert next(lines) == ": still here"
            assert next(lines) == ""
        assert engine.running == 1
        engine.stalled = False
        said = [line for line in lines if line and not line.startswith(":")]
    assert [line.partition(":")[0] for line in said] == [
        line.partition(":")[0] for line in plain.split("\n") if line and not line.startswith(":")
    ]


def test_also_between_two_tokens(serve: Serve, engine: FakeEngineThread) -> None:
    """A silence within an answer is bridged in the same way, and no event is torn."""
    engine.hold_before = 3
    with httpx.stream("POST", serve() + URL, json={"prompt": "a", "stream": True}, timeout=60) as answer:
        text = ""
        for part in answer.iter_text():
            text += part
            if engine.hold_before and text.endswith(STILL_HERE.decode() * 2) and text.startswith("data:"):
                engine.hold_before = None
    whole = httpx.Response(200, headers=answer.headers, text=text)
    assert texts(events(whole)) == {0: "".join(WORDS)}
    assert text.count("data: ") == len(WORDS) + 1


def test_the_official_client_ignores_comments(serve: Serve, engine: FakeEngineThread) -> None:
    """Its stream has the chunks alone."""
    engine.delay = 0.03
    client = openai.OpenAI(base_url=serve() + "/v1", api_key="k", max_retries=0, timeout=60)
    stream = client.completions.create(model="fake/model", prompt="a", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "".join(WORDS)


@pytest.mark.parametrize("path", BODIES)
def test_an_error_after_comments_is_an_event(serve: Serve, engine: FakeEngineThread, path: str) -> None:
    """The status has gone out with the first comment, so a failure in the queue ends the stream."""
    engine.hold_before = engine.fail_after = 0
    body = {**BODIES[path], "stream": True}
    with httpx.stream("POST", serve() + path, json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines) == ": still here"
        engine.hold_before = None
        said = [line for line in lines if line.startswith("data: ")]
    assert len(said) == 1
    assert json.loads(said[0][6:])["error"]["type"] == "server_error"
    assert "secret" not in said[0]


def test_leaving_between_comments_aborts(serve: Serve, engine: FakeEngineThread) -> None:
    """A client that leaves while queued is noticed as before."""
    engine.stalled = True
    with httpx.stream("POST", serve() + URL, json={"prompt": "a", "stream": True}, timeout=60) as answer:
        assert next(answer.iter_lines()) == ": still here"
    wait_for(lambda: (engine.running, engine.aborted) == (0, 1))


def test_comments_do_not_pile_up() -> None:
    """To a client that does not read nothing is said until what is under way has gone."""
    sent: list[dict[str, Any]] = []
    free, ended = asyncio.Event(), asyncio.Event()

    async def said() -> Any:
        yield b"data: 1\n\n"
        await ended.wait()

    async def send(message: Any) -> None:
        sent.append(message)
        if message.get("body"):
            await free.wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def main() -> None:
        answer = asyncio.create_task(EventStream(said())({"type": "http"}, receive, send))
        while len(sent) < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)  # ten silences
        assert [message.get("body") for message in sent] == [None, b"data: 1\n\n"]
        free.set()
        while sent[-1].get("body") != STILL_HERE:
            await asyncio.sleep(0.001)
        ended.set()
        await answer
        assert sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}

    asyncio.run(main())
