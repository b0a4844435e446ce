"""/v1/responses over a fake engine: its input, its refusals, and what becomes of failures."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from fastapi.testclient import TestClient

from octavo.server.responses.items import OutputItems

from .fake_engine import WORDS, FakeEngineThread

URL = "/v1/responses"
USER = {"role": "user", "content": "hi"}
CLOCK = {"type": "function", "name": "clock", "parameters": None, "strict": False}
CALLED = {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "noon"}


def read(answer: Any) -> list[dict[str, Any]]:
    """The events of a stream."""
    assert answer.status_code == 200, answer.text
    return [
        json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n") if line.startswith("data")
    ]


def test_text(client: TestClient) -> None:
    """A text gives one message; usage counts it."""
    answer = client.post(URL, json={"input": "hi", "max_output_tokens": 2}).json()
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [part["text"] for part in answer["output"][0]["content"]] == ["One sheet"]
    assert answer["usage"]["output_tokens"] == 2
    whole = client.post(URL, json={"input": "hi"}).json()
    assert (whole["status"], whole["incomplete_details"]) == ("completed", None)
    assert whole["output"][0]["content"][0]["text"] == "".join(WORDS)


@pytest.mark.parametrize(
    ("fields", "rendered"),
    [
        ({"input": "hi"}, "user: hi\n"),
        ({"input": "hi", "instructions": "be brief"}, "system: be brief\nuser: hi\n"),
        ({"input": [{"role": "developer", "content": "be brief"}, USER]}, "system: be brief\nuser: hi\n"),
        (
            {
                "input": [
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
                ]
            },
            "user: hi\n",
        ),
        (
            {
                "input": [
                    USER,
                    {
                        "type": "message",
                        "role": "assistant",
                        "id": "msg_1",
                        "status": "completed",
                        "content": [
                            {"type": "output_text", "text": "yes", "annotations": [], "logprobs": []}
                        ],
                    },
                    USER,
                ]
            },
            "user: hi\nassistant: yes\nuser: hi\n",
        ),
        ({"input": [USER, CALLED, RESULT]}, "user: hi\nassistant: \ntool: noon\n"),
    ],
)
def test_input(client: TestClient, engine: FakeEngineThread, fields: dict[str, Any], rendered: str) -> None:
    """Every form of input becomes the messages of a chat; output that is sent back is read again."""
    assert client.post(URL, json={**fields, "max_output_tokens": 1}).status_code == 200
    assert bytes(engine.seen[0][0]).decode() == rendered + "assistant:"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["a"]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{**USER, "colour": 1}]}, "input[0].colour"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{**CALLED, "arguments": "["}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "a", "store": True}, "store"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "conversation": "c"}, "conversation"),
        ({"input": "a", "truncation": "auto"}, "truncation"),
        ({"input": "a", "reasoning": {"effort": "high"}}, "reasoning"),
        ({"input": "a", "text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"input": "a", "text": {"verbosity": "low"}}, "text.verbosity"),
        ({"input": "a", "text": {"other": 1}}, "text.other"),
        ({"input": "a", "include": ["reasoning.encrypted_content"]}, "include"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "a", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "top_logprobs": 21}, "top_logprobs"),
        ({"input": "a", "metadata": {"a": 1}}, "metadata"),
        ({"input": "a", "metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"input": "a", "n": 2}, "n"),
        (
            {"input": "a", "stream": True, "stream_options": {"include_usage": True}},
            "stream_options.include_usage",
        ),
    ],
)
def test_refusals(client: TestClient, fields: dict[str, Any], param: str) -> None:
    """What a stateless server without tools of its own cannot honour is refused by its place."""
    answer = client.post(URL, json=fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_values_that_ask_for_nothing(client: TestClient) -> None:
    """What client libraries send by default is accepted."""
    body = {"input": "a", "store": False, "background": False, "truncation": "disabled", "include": []}
    body |= {"text": {"format": {"type": "text"}}, "reasoning": {"effort": None}, "tools": [CLOCK]}
    body |= {"previous_response_id": None, "service_tier": "auto", "user": "u", "prompt_cache_key": "p"}
    assert client.post(URL, json=body).status_code == 200


def test_failure_in_a_stream(client: TestClient, engine: FakeEngineThread) -> None:
    """After the first event a failure is response.failed; before it, an HTTP error. No secret is shown."""
    engine.fail_after = 2
    found = read(client.post(URL, json={"input": "hi", "stream": True}))
    assert found[0]["type"] == "response.created"
    assert found[-1]["type"] == "response.failed"
    assert found[-1]["response"]["error"]["code"] == "server_error"
    assert "secret" not in json.dumps(found)
    assert engine.running == 0
    engine.fail_after = 0
    assert client.post(URL, json={"input": "hi", "stream": True}).status_code == 500


def test_too_long(client: TestClient) -> None:
    """A prompt that does not fit is a 400 though a stream was asked for."""
    assert client.post(URL, json={"input": "x" * 200, "stream": True}).status_code == 400


def test_a_message_has_all_logprobs_however_its_tokens_come() -> None:
    """Tokens that give no text, at the end too, are in the message's logprobs, whether the deltas of several
    steps come one by one or in one; what the deltas say adds up to it."""
    rng = random.Random(4)
    for _ in range(50):
        tokens = [(rng.choice(("", "a", "bc")), f"t{i}") for i in range(rng.randint(1, 9))]
        items, events, at = OutputItems(), [], 0
        while at < len(tokens):
            some = tokens[at : at + rng.randint(1, 4)]
            at += len(some)
            delta = {"content": text} if (text := "".join(part for part, _ in some)) else {}
            entries = [{"token": name, "bytes": [], "logprob": -1.0, "top_logprobs": []} for _, name in some]
            events += items.take({"delta": delta, "logprobs": {"content": entries}})
        events += items.finish("completed")
        (message,) = items.items
        part = message["content"][0]
        names = [name for _, name in tokens]
        assert part["text"] == "".join(text for text, _ in tokens)
        assert [entry["token"] for entry in part["logprobs"]] == names
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert [entry["token"] for delta in deltas for entry in delta["logprobs"]] == names
        assert "".join(delta["delta"] for delta in deltas) == part["text"]
