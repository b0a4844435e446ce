"""The server over the real engine with a tiny random model: the seam between the two."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from octavo.engine import Engine, EngineConfig, EngineThread
from octavo.models import load_model
from octavo.server import create_app
from tests.engine.helpers import keep_in_step, tiny_checkpoint

from .conftest import wait_for
from .sse import events, texts

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BODIES = {
    COMPLETIONS: {"prompt": ["A book", "A leaf of it"]},
    CHAT: {"messages": [{"role": "user", "content": "A book"}]},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))[0]


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[EngineThread]:
    config = EngineConfig(model=str(checkpoint), block_size=4, num_blocks=100, checked=True)
    thread = EngineThread(Engine(load_model(checkpoint), config))
    thread.start()
    yield thread
    thread.shutdown(timeout=10)


@pytest.fixture
def client(engine: EngineThread) -> Iterator[TestClient]:
    with TestClient(create_app(engine), raise_server_exceptions=False) as client:
        yield client


@pytest.mark.parametrize("url", BODIES)
def test_stream_equals_body(client: TestClient, url: str) -> None:
    """Greedy text, reasons and counts are the same streamed and not; the second time the cache is hit."""
    body = {**BODIES[url], "n": 2, "temperature": 0, "max_tokens": 20}
    whole = client.post(url, json=body).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events(client.post(url, json={**body, **options}))
    expected = {c["index"]: c["text"] if "text" in c else c["message"]["content"] for c in whole["choices"]}
    assert texts(chunks) == expected
    first, second = whole["usage"], chunks[-1]["usage"]
    assert second["prompt_tokens_details"]["cached_tokens"] > 0
    assert [first[k] for k in ("prompt_tokens", "completion_tokens")] == [
        second[k] for k in ("prompt_tokens", "completion_tokens")
    ]


def test_choices_take_turns(client: TestClient, engine: EngineThread) -> None:
    """A reader who keeps up sees every choice begin before any ends."""
    keep_in_step(engine)
    body = {"prompt": "A book", "n": 4, "seed": 4, "max_tokens": 8, "ignore_eos": True, "stream": True}
    turns = [
        choice["index"]
        for event in events(client.post(COMPLETIONS, json=body))
        for choice in event["choices"]
    ]
    assert sorted(set(turns)) == [0, 1, 2, 3]
    assert len(turns) > 8
    last_begins = max(turns.index(choice) for choice in range(4))
    first_ends = min(len(turns) - 1 - turns[::-1].index(choice) for choice in range(4))
    assert last_begins < first_ends


@pytest.mark.parametrize("url", BODIES)
def test_a_stream_of_four(client: TestClient, url: str) -> None:
    """n=4: each choice is whole and ends once, with the tokens of the same request that is not streamed,
    however unlike their lengths; the prompt counts once and every token once."""
    body = {**BODIES[url], "n": 4, "seed": 4, "max_tokens": 24, "temperature": 1.5, "return_token_ids": True}
    body |= {"stop_token_ids": list(range(0, 256, 12)), "min_tokens": 5}
    if url == COMPLETIONS:
        body["prompt"] = "A book"
    whole = client.post(url, json=body).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(client.post(url, json={**body, **options}))
    pieces: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        pieces.setdefault(choice["index"], []).append(choice)
    assert sorted(pieces) == [0, 1, 2, 3]
    lengths = []
    for want in whole["choices"]:
        mine = pieces[want["index"]]
        ids = [token for choice in mine for token in choice.get("token_ids") or []]
        assert ids == want["token_ids"]
        reasons = [choice["finish_reason"] for choice in mine]
        assert reasons == [None] * (len(mine) - 1) + [want["finish_reason"]]
        lengths.append(len(ids))
    assert len(set(lengths)) > 1
    assert texts(chunks) == {
        c["index"]: c["text"] if "text" in c else c["message"]["content"] for c in whole["choices"]
    }
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], sum(lengths))
    assert last["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + sum(lengths)


def test_seeded_branches(client: TestClient) -> None:
    """n=3 with a seed gives three unlike texts, and the same three again."""
    body = {"prompt": "A book", "n": 3, "seed": 5, "max_tokens": 30, "ignore_eos": True}
    first, second = ([c["text"] for c in client.post(COMPLETIONS, json=body).json()["choices"]] for _ in "ab")
    assert first == second
    assert len(set(first)) == 3


def test_random_bytes_are_valid_json(client: TestClient) -> None:
    """A random byte-level model at high temperature gives invalid UTF-8; the answer is valid all the same."""
    body = {"prompt": "a", "temperature": 1.5, "max_tokens": 60, "ignore_eos": True, "seed": 1}
    answer = client.post(COMPLETIONS, json=body)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 60
    assert texts(events(client.post(COMPLETIONS, json={**body, "stream": True}))) == {
        0: answer.json()["choices"][0]["text"]
    }


def test_max_tokens_rule(client: TestClient, engine: EngineThread) -> None:
    """Without max_tokens the room left is used up; more than the room is a 400 with the numbers."""
    size = engine.engine.max_model_len
    body = {"prompt": [5] * (size - 3), "ignore_eos": True}
    answer = client.post(COMPLETIONS, json=body).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"
    for prompt, limit in ((body["prompt"], 10**9), ([5] * size, None), ([5] * (size + 1), 1)):
        refused = client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": limit})
        assert refused.status_code == 400
        assert str(size) in refused.json()["error"]["message"]


def leave(client: TestClient, body: dict[str, object], count: int) -> list[dict[str, Any]]:
    """Ask for a stream, and close the connection after `count` chunks; returns those that came.

    The engine must be kept in step, or it could be done before."""
    found: list[dict[str, Any]] = []

    async def run() -> None:
        enough = asyncio.Event()
        inbox = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive() -> dict[str, object]:
            if inbox:
                return inbox.pop()
            await enough.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body" and message["body"]:
                lines = message["body"].decode().split("\n\n")
                found.extend(json.loads(line.removeprefix("data: ")) for line in lines if "{" in line)
                if len(found) >= count:
                    enough.set()

        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": [], "query_string": b""}
        await client.app(scope, receive, send)
        assert enough.is_set()

    asyncio.run(run())
    return found


@pytest.mark.parametrize("count", [1, 20])
def test_what_an_interrupted_stream_computed_is_reused(
    engine: EngineThread, client: TestClient, count: int
) -> None:
    """Dropped at token 1 or 20, then sent again with what had come: all but the last of it is cached."""
    keep_in_step(engine)
    prompt = list(range(40, 61))
    body = {
        "prompt": prompt,
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": 300,
        "return_token_ids": True,
    }
    keep_in_step(engine)  # as many chunks as tokens
    found = leave(client, {**body, "stream": True}, count)
    wait_for(lambda: engine.stats()["blocks_held"] == 0 and engine.stats()["num_running"] == 0)
    output = [token for chunk in found for choice in chunk["choices"] for token in choice["token_ids"]]
    assert len(output) >= count
    again = [*prompt, *output[:count]]
    answer = client.post(COMPLETIONS, json={**body, "prompt": again, "max_tokens": 5}).json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= (len(again) - 1) // 4 * 4
    whole = client.post(COMPLETIONS, json={**body, "max_tokens": count + 5, "cache_salt": "cold"}).json()
    assert whole["choices"][0]["token_ids"][count:] == answer["choices"][0]["token_ids"]


@pytest.mark.parametrize("url", [CHAT, "/v1/responses"])
def test_max_tokens_rule_of_chats(client: TestClient, engine: EngineThread, url: str) -> None:
    """As for completions: the room left where nothing is asked, else a 400 with the numbers."""
    name = "max_output_tokens" if url != CHAT else "max_completion_tokens"
    asked: dict[str, Any] = (
        {"input": "A book"} if url != CHAT else {"messages": [{"role": "user", "content": "A book"}]}
    )
    asked |= {"ignore_eos": True, "temperature": 0}
    size = engine.engine.max_model_len
    usage = client.post(url, json=asked).json()["usage"]
    assert usage["total_tokens"] == size
    refused = client.post(url, json={**asked, name: 10**9})
    assert refused.status_code == 400
    assert str(size) in refused.json()["error"]["message"]
    assert str(10**9) in refused.json()["error"]["message"]


def test_a_model_without_a_chat_template(client: TestClient, engine: EngineThread, monkeypatch) -> None:
    """Chats are a 400 that says so, and completions go on."""
    monkeypatch.setattr(engine.engine.tokenizer, "_template", None)
    refused = client.post(CHAT, json=BODIES[CHAT])
    assert refused.status_code == 400
    assert "chat template" in refused.json()["error"]["message"]
    assert client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_leaving_frees_the_blocks(engine: EngineThread, client: TestClient) -> None:
    """A stream that is closed early leaves no block held and nothing running."""
    keep_in_step(engine)
    leave(client, {"prompt": "a", "n": 4, "ignore_eos": True, "stream": True}, 1)
    wait_for(lambda: engine.stats()["blocks_held"] == 0 and engine.stats()["num_running"] == 0)
    stats = client.get("/health").json()
    assert stats["blocks_free"] + stats["blocks_cached"] == stats["blocks_total"]


@pytest.mark.parametrize("stream", [False, True])
def test_failing_step(client: TestClient, engine: EngineThread, monkeypatch, stream: bool) -> None:
    """A step that raises fails its requests with a 500; the engine lives and the next one is served."""

    def fail(*_: object) -> None:
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(engine.engine.runner, "forward", fail)
        assert client.post(COMPLETIONS, json={"prompt": "a", "stream": stream}).status_code == 500
    assert client.get("/health").status_code == 200
    assert client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2}).status_code == 200


def test_dying_engine(client: TestClient, engine: EngineThread, monkeypatch) -> None:
    """When the engine's loop ends with an error, the open request, health and the next request get 503."""

    def die() -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(engine.engine, "step", die)
    assert client.post(COMPLETIONS, json={"prompt": "a"}).status_code == 503
    assert client.get("/health").status_code == 503
    assert client.post(CHAT, json=BODIES[CHAT]).status_code == 503
