"""/v1/completions, in one body and as a stream, over a fake engine."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from fastapi.testclient import TestClient

from octavo.server import completions
from octavo.server.context import LARGE_BYTES, QUICK_BYTES

from .fake_engine import WORDS, FakeEngineThread
from .sse import events, texts

URL = "/v1/completions"


def test_one_prompt(client: TestClient) -> None:
    """The body has OpenAI's shape, the whole text, the reason and the usage with cached_tokens at 0."""
    answer = client.post(URL, json={"model": "fake/model", "prompt": "abc", "max_tokens": 3}).json()
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "fake/model")
    assert isinstance(answer["created"], int)
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "One sheet makes",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([1, 0, 255], [[1, 0, 255]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompt_forms(
    client: TestClient, engine: FakeEngineThread, prompt: object, ids: list[list[int]]
) -> None:
    """Text, texts, ids and lists of ids each reach the engine as token ids, in order."""
    answer = client.post(URL, json={"prompt": prompt, "max_tokens": 1})
    assert answer.status_code == 200
    assert [seen for seen, _ in engine.seen] == ids
    assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, ids))


@pytest.mark.parametrize("stream", [False, True])
def test_batch_times_n(client: TestClient, stream: bool) -> None:
    """Sequence j of prompt i is choice i * n + j, and each prompt counts once in the usage."""
    body = {"prompt": ["a", "bb"], "n": 3, "max_tokens": 2, "stream": stream, "echo": True}
    if stream:
        body["stream_options"] = {"include_usage": True}
    response = client.post(URL, json=body)
    expected = {i * 3 + j: "ab"[i] * (i + 1) + WORDS[j] + WORDS[j + 1] for i in range(2) for j in range(3)}
    if stream:
        chunks = events(response)
        found, usage = texts(chunks), chunks[-1]["usage"]
    else:
        answer = response.json()
        found, usage = {c["index"]: c["text"] for c in answer["choices"]}, answer["usage"]
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert found == expected
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 12)


@pytest.mark.parametrize("max_tokens", [1, 4, 50, None])
@pytest.mark.parametrize("echo", [False, True])
def test_stream_equals_body(client: TestClient, max_tokens: int | None, echo: bool) -> None:
    """The streamed text and finish_reason are those of the body that is not streamed."""
    body = {"prompt": "p\u00e9", "max_tokens": max_tokens, "echo": echo, "n": 2}
    whole = client.post(URL, json=body).json()["choices"]
    chunks = events(client.post(URL, json={**body, "stream": True}))
    assert texts(chunks) == {choice["index"]: choice["text"] for choice in whole}
    ends = {c["index"]: c["finish_reason"] for k in chunks for c in k["choices"] if c["finish_reason"]}
    assert ends == {choice["index"]: choice["finish_reason"] for choice in whole}


def test_stream_shape(client: TestClient) -> None:
    """One id throughout, a reason on the last chunk only, and no usage key when none was asked for."""
    chunks = events(client.post(URL, json={"prompt": "a", "stream": True, "max_tokens": 3}))
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert all("usage" not in chunk and chunk["object"] == "text_completion" for chunk in chunks)


def test_include_usage(client: TestClient, engine: FakeEngineThread) -> None:
    """Exactly one chunk, the last, has usage and no choices; the others carry usage null."""
    engine.cached = 2
    body = {"prompt": "abc", "stream": True, "max_tokens": 2, "stream_options": {"include_usage": True}}
    *chunks, last = events(client.post(URL, json=body))
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert last["usage"]["total_tokens"] == 5


def test_no_empty_chunks(client: TestClient, engine: FakeEngineThread, monkeypatch) -> None:
    """Tokens without text yet give no chunk, but they count in the usage."""
    monkeypatch.setattr("tests.server.fake_engine.WORDS", ["", "", "x", "", "y"])
    body = {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(client.post(URL, json=body))
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["x", "y"]
    assert chunks[-1]["usage"]["completion_tokens"] == 5


def test_echo_of_token_ids(client: TestClient) -> None:
    """echo returns the decoded prompt before the text when the prompt came as ids."""
    answer = client.post(URL, json={"prompt": [104, 105], "echo": True, "max_tokens": 1}).json()
    assert answer["choices"][0]["text"] == "hiOne"


def test_sampling_fields_reach_the_engine(client: TestClient, engine: FakeEngineThread) -> None:
    """Every honoured field arrives in SamplingParams unchanged; null and absent keep the defaults."""
    given = {
        "n": 2,
        "max_tokens": 5,
        "min_tokens": 1,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 11,
        "stop_token_ids": [3],
        "ignore_eos": True,
    }
    assert client.post(URL, json={"prompt": "a", "stop": ["x", "yy"], **given}).status_code == 200
    assert client.post(URL, json={"prompt": "a", "stop": "z"}).status_code == 200
    assert client.post(URL, json={"prompt": "a", **dict.fromkeys([*given, "stop"])}).status_code == 200
    first, second, third = (params for _, params in engine.seen)
    for name, value in given.items():
        seen = getattr(first, name)
        assert (list(seen) if name == "stop_token_ids" else seen) == value
    assert tuple(first.stop) == ("x", "yy")
    assert tuple(second.stop) == ("z",)
    assert third == type(third)()


def test_lone_surrogate_in_output(client: TestClient, monkeypatch) -> None:
    """Text that is not valid Unicode still becomes valid UTF-8 JSON, with status 200."""
    monkeypatch.setattr("tests.server.fake_engine.WORDS", ["a\ud800b", "\x00\n"])
    answer = client.post(URL, json={"prompt": "a"})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "a?b\x00\n"
    assert texts(events(client.post(URL, json={"prompt": "a", "stream": True}))) == {0: "a?b\x00\n"}


@pytest.mark.parametrize(
    ("prompt", "understood", "encoded"),
    [
        ([65] * 20, "loop", "loop"),
        ("a" * 20, "loop", "octavo-text"),
        ([65] * (QUICK_BYTES // 3), "octavo-text", "octavo-text"),
        ("a" * (LARGE_BYTES + 1), "octavo-slow", "octavo-slow"),
    ],
    ids=["few ids", "short text", "many ids", "long text"],
)
def test_what_takes_long_is_done_beside_the_event_loop(
    client: TestClient, engine: FakeEngineThread, monkeypatch, prompt: Any, understood: str, encoded: str
) -> None:
    """Few token ids are checked where they are; text is tokenized in a thread, as is all that is large."""
    engine.engine.max_model_len = 10**6
    loop: list[str] = []
    places: dict[str, str] = {}

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            places[name] = threading.current_thread().name.split("_")[0]
            return function(*args)

        return call

    check = completions.ServerContext.check

    def on_the_loop(self: Any, model: str | None) -> None:
        loop.append(threading.current_thread().name.split("_")[0])
        check(self, model)

    monkeypatch.setattr(completions.ServerContext, "check", on_the_loop)
    monkeypatch.setattr(completions, "read_prompts", noted("understood", completions.read_prompts))
    encode = completions.CompletionCall.encode
    monkeypatch.setattr(completions.CompletionCall, "encode", noted("encoded", encode))
    answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "".join(WORDS[:2])
    names = {"loop": loop[0]}
    assert places == {"understood": names.get(understood, understood), "encoded": names.get(encoded, encoded)}
