"""A real server on a real socket: clients that leave, a full queue, and the official client library."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from octavo.server import ServerConfig
from octavo.server.keys import ApiKey

from .conftest import Serve, wait_for
from .fake_engine import WORDS, FakeEngineThread
from .http_load import request_bytes

TEXT = "".join(WORDS)
USER = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/completions": {"prompt": ["a", "b"], "n": 2},
    "/v1/chat/completions": {"messages": USER, "n": 2},
}


def connect(url: str, **kwargs: object) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="k", max_retries=0, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("queued", [False, True])
def test_disconnect_aborts(
    serve: Serve, engine: FakeEngineThread, path: str, stream: bool, queued: bool
) -> None:
    """A client that leaves, before or during its answer, ends its engine requests; others go on."""
    engine.stalled, engine.hold_before = queued, 1
    url = serve()
    requests = 2 if "prompt" in BODIES[path] else 1
    body = json.dumps({**BODIES[path], "stream": stream}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as sock:
        sock.sendall(head.encode() + body)
        if stream and not queued:
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
        wait_for(lambda: engine.running == requests)
    wait_for(lambda: engine.aborted == requests and engine.running == 0)
    engine.stalled, engine.hold_before = False, None
    assert httpx.post(url + path, json=BODIES[path]).status_code == 200


def test_leaving_a_stream_early(serve: Serve, engine: FakeEngineThread) -> None:
    """Closing the response after the first chunk aborts the request."""
    engine.hold_before = 1
    stream = connect(serve()).completions.create(model="fake/model", prompt="a", stream=True)
    next(stream)
    assert engine.running == 1
    stream.close()
    wait_for(lambda: (engine.running, engine.aborted) == (0, 1))


def test_queue_limit(serve: Serve, engine: FakeEngineThread) -> None:
    """With 4 places, n=3 takes 3; the excess is a 429 while they wait, and those who leave free theirs."""
    engine.stalled = True
    url = serve(ServerConfig(max_open_sequences=4)) + "/v1/completions"
    with socket.create_connection(("127.0.0.1", int(url.split(":")[2].split("/")[0]))) as waiting:
        waiting.sendall(request_bytes({"prompt": "a", "n": 3}))
        wait_for(lambda: engine.running == 1)
        for stream in (False, True):
            answer = httpx.post(url, json={"prompt": "a", "n": 2, "stream": stream})
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "queue_full"
        assert engine.running == 1
    wait_for(lambda: engine.running == 0)
    engine.stalled = False
    assert httpx.post(url, json={"prompt": "a", "n": 4}).status_code == 200


def test_small_requests_do_not_queue_behind_large_ones(
    serve: Serve, engine: FakeEngineThread, monkeypatch
) -> None:
    """While as many large texts are tokenised as there are threads, a small request is answered."""
    engine.engine.max_model_len = 10**7
    go_on, under_way = threading.Event(), threading.Semaphore(0)
    encode = type(engine.engine.tokenizer).encode

    def slow(text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > 1000:
            under_way.release()
            go_on.wait(60)
        return encode(engine.engine.tokenizer, text[:10])

    monkeypatch.setattr(engine.engine.tokenizer, "encode", slow, raising=False)
    url = serve()
    large = {"prompt": "a" * 300_000}
    posts = [(url + path, large) for path in ("/v1/completions", "/tokenize") for _ in range(3)]
    with ThreadPoolExecutor(6) as clients:
        answers = [clients.submit(httpx.post, path, json=body, timeout=120) for path, body in posts]
        try:
            assert under_way.acquire(timeout=60)
            assert under_way.acquire(timeout=60)
            small = httpx.post(url + "/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=30)
            assert small.status_code == 200
            assert httpx.post(url + "/tokenize", json={"prompt": "a"}, timeout=30).status_code == 200
        finally:
            go_on.set()
        assert [answer.result().status_code for answer in answers] == [200] * 6


def test_slow_tokenizer_does_not_block(serve: Serve, engine: FakeEngineThread, monkeypatch) -> None:
    """While a long prompt is tokenised the server answers others, and a client may leave."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(text: str, add_special_tokens: bool = True) -> list[int]:
        begun.set()
        go_on.wait(60)
        return [1]

    monkeypatch.setattr(engine.engine.tokenizer, "encode", slow, raising=False)
    url = serve()
    body = {"prompt": "a"}
    posted = threading.Thread(target=lambda: httpx.post(url + "/v1/completions", json=body, timeout=120))
    posted.start()
    try:
        assert begun.wait(60)
        assert httpx.get(url + "/health", timeout=30).status_code == 200
    finally:
        go_on.set()
        posted.join()


class TestOfficialClient:
    """The openai package works unchanged."""

    def test_models(self, serve: Serve) -> None:
        """It lists and retrieves the model."""
        client = connect(serve())
        assert [model.id for model in client.models.list()] == ["fake/model"]
        assert client.models.retrieve("fake/model").owned_by == "octavo"

    def test_completion(self, serve: Serve) -> None:
        """It reads a batch and its usage."""
        answer = connect(serve()).completions.create(model="fake/model", prompt=["a", "b"], echo=True)
        assert [choice.text for choice in answer.choices] == ["a" + TEXT, "b" + TEXT]
        assert answer.usage is not None
        assert answer.usage.total_tokens == 2 + 2 * len(WORDS)

    def test_completion_stream(self, serve: Serve) -> None:
        """It reads a stream."""
        stream = connect(serve()).completions.create(model="fake/model", prompt="a", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == TEXT

    def test_chat(self, serve: Serve, engine: FakeEngineThread) -> None:
        """It reads a message and cached tokens; extensions go through extra_body."""
        engine.cached = 3
        answer = connect(serve()).chat.completions.create(
            model="fake/model", messages=USER, max_completion_tokens=2, extra_body={"top_k": 4}
        )
        assert answer.choices[0].message.content == "One sheet"
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 3
        assert engine.seen[0][1].top_k == 4

    def test_chat_stream(self, serve: Serve) -> None:
        """It reads a stream with usage at its end."""
        stream = connect(serve()).chat.completions.create(
            model="fake/model", messages=USER, stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = stream
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
        assert last.usage is not None
        assert last.usage.completion_tokens == len(WORDS)

    def test_errors(self, serve: Serve, engine: FakeEngineThread) -> None:
        """Errors arrive as its own types, and a failure within a stream raises."""
        url = serve(ServerConfig(keys=(ApiKey.from_secret("k"),)))
        client = connect(url)
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="fake/model", prompt="a", suffix="x")
        assert refused.value.param == "suffix"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="a")
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        engine.fail_after = 2
        stream = client.chat.completions.create(model="fake/model", messages=USER, stream=True)
        with pytest.raises(openai.APIError, match="internal error"):
            list(stream)
