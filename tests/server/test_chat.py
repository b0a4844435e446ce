"""/v1/chat/completions, in one body and as a stream, over a fake engine."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from .fake_engine import FakeEngineThread
from .sse import events, texts

URL = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


def test_one_message(client: TestClient) -> None:
    """The body has OpenAI's shape and the assistant's message."""
    answer = client.post(URL, json={"messages": [USER], "max_tokens": 2}).json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "One sheet", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["prompt_tokens"] == len("user: hi\nassistant:")


def test_stream(client: TestClient) -> None:
    """Each choice opens with its role, then text; the last chunk of it has the reason; then usage."""
    body = {"messages": [USER], "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(client.post(URL, json=body))
    whole = client.post(URL, json={"messages": [USER], "n": 2}).json()
    assert texts(chunks) == {c["index"]: c["message"]["content"] for c in whole["choices"]}
    assert last["usage"] == whole["usage"]
    assert last["choices"] == []
    for index in (0, 1):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert all("role" not in c["delta"] for c in mine[1:])


@pytest.mark.parametrize(
    ("messages", "rendered"),
    [
        ([{"role": "developer", "content": "be brief"}, USER], "system: be brief\nuser: hi\nassistant:"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            "user: a\nb\nassistant:",
        ),
        (
            [USER, {"role": "assistant", "content": "yes", "tool_calls": None, "refusal": None}, USER],
            "user: hi\nassistant: yes\nuser: hi\nassistant:",
        ),
    ],
)
def test_messages_are_read(
    client: TestClient, engine: FakeEngineThread, messages: list[Any], rendered: str
) -> None:
    """developer is system, text parts are joined by a line break, and empty fields of a reply are fine."""
    assert client.post(URL, json={"messages": messages, "max_tokens": 1}).status_code == 200
    assert bytes(engine.seen[0][0]).decode() == rendered


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([USER, {"role": "robot", "content": "x"}], "messages[1].role"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "function", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{**USER, "name": "bob"}], "messages[0].name"),
        ([{**USER, "colour": "red"}], "messages[0].colour"),
        (
            [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
            "messages[0].tool_calls[0].function",
        ),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
            "messages[0].content[0]",
        ),
        *(
            (
                [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind, kind: {}}]}],
                "messages[0].content[1]",
            )
            for kind in ("image_url", "input_audio", "video_url", "file", "refusal", "thinking")
        ),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
    ],
)
def test_bad_messages(client: TestClient, messages: object, named: str) -> None:
    """A message that cannot be passed on whole is refused with its place in param and message."""
    answer = client.post(URL, json={"messages": messages})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == named
    assert named in error["message"]


def test_image_part_is_refused_by_name(client: TestClient) -> None:
    """The refusal names the kind of the part, so that nobody thinks the picture was seen."""
    parts = [{"type": "text", "text": "what is this"}, {"type": "image_url", "image_url": {"url": "x"}}]
    answer = client.post(URL, json={"messages": [{"role": "user", "content": parts}]})
    assert "image_url" in answer.json()["error"]["message"]


def test_template_complaint(client: TestClient) -> None:
    """What the chat template objects to is a 400 with the template's words."""
    answer = client.post(URL, json={"messages": [{"role": "assistant", "content": "x"}]})
    assert answer.status_code == 400
    assert "starts with a user" in answer.json()["error"]["message"]


def test_max_completion_tokens(client: TestClient, engine: FakeEngineThread) -> None:
    """max_completion_tokens is max_tokens by its newer name; both may be given when they agree."""
    for body in ({"max_completion_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": 3}):
        assert client.post(URL, json={"messages": [USER], **body}).status_code == 200
    assert [params.max_tokens for _, params in engine.seen] == [3, 3]
    answer = client.post(URL, json={"messages": [USER], "max_completion_tokens": 3, "max_tokens": 4})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_completion_tokens"
