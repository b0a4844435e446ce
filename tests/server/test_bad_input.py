"""Every kind of bad input gets an OpenAI error body that names what to change, and never a 500."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from octavo.server.errors import dump_json

from .fake_engine import FakeEngineThread

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def refused(client: TestClient, url: str, body: Any, status: int = 400) -> dict[str, Any]:
    """Post, and check that the answer is a well-formed, small error; then that the server still works."""
    response = client.post(url, json=body) if not isinstance(body, bytes) else client.post(url, content=body)
    assert response.status_code == status, response.text
    assert len(response.content) < 64 * 1024
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}).status_code == 200
    return error


@pytest.mark.parametrize(
    "prompt", [None, "", [], [[]], [""], ["a", ""], [[1], []], 5, {"a": 1}, True, [None], [{}]], ids=repr
)
def test_empty_or_wrong_prompt(client: TestClient, prompt: object) -> None:
    """A prompt with nothing in it, or of another type, is a 400 that names prompt."""
    assert refused(client, COMPLETIONS, {"prompt": prompt})["param"] == "prompt"


@pytest.mark.parametrize(
    "bad", ["-1", "256", "9223372036854775808", "1" * 400, "1.5", "1.0", "true", '"a"', "null"]
)
@pytest.mark.parametrize("shape", ["[3, %s]", "[[3], [3, %s]]"])
def test_bad_token_ids(client: TestClient, engine: FakeEngineThread, bad: str, shape: str) -> None:
    """A token id that is no id of the model is a 400 that says where, and the engine never sees it."""
    error = refused(client, COMPLETIONS, ('{"prompt": ' + shape % bad + "}").encode())
    assert error["param"] == "prompt"
    assert "[1]" in error["message"]
    assert len(engine.seen) == 1  # the check that the server still works


def test_mixed_batch(client: TestClient) -> None:
    """Text among ids is refused: the forms cannot be mixed."""
    assert "prompt[1]" in refused(client, COMPLETIONS, {"prompt": ["a", [1]]})["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", True),
        ("suffix", "x"),
        ("skip_special_tokens", False),
        ("include_stop_str_in_output", True),
        ("top_logprobs", 1),
        ("messages", []),
        ("max_completion_tokens", 3),
        ("tools", []),
    ],
)
def test_refused_completion_fields(client: TestClient, field: str, value: object) -> None:
    """What is not built, or is no field of completions, is refused by name."""
    error = refused(client, COMPLETIONS, {"prompt": "a", field: value})
    assert error["param"] == field
    assert field in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", 1),
        ("best_of", 2),
        ("add_special_tokens", True),
        ("moderation", {}),
        ("prompt_cache_options", {}),
        ("prompt_cache_retention", "24h"),
        ("functions", [{}]),
        ("function_call", "auto"),
        ("response_format", {"type": "text", "schema": {}}),
        ("modalities", ["text", "audio"]),
        ("audio", {}),
        ("prediction", {}),
        ("reasoning_effort", "high"),
        ("service_tier", "flex"),
        ("store", True),
        ("verbosity", "low"),
        ("web_search_options", {}),
        ("prompt", "a"),
        ("echo", True),
    ],
)
def test_refused_chat_fields(client: TestClient, field: str, value: object) -> None:
    """What is not built, or is no field of chat, is refused by name."""
    error = refused(client, CHAT, {**CHAT_BODY, field: value})
    assert error["param"] == field
    assert field in error["message"]


def test_values_that_ask_for_nothing(client: TestClient) -> None:
    """The defaults that client libraries send, and labels, are accepted on both routes."""
    both = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "n": 1}
    both |= {"user": "u", "stream": False, "seed": None, "stop": None, "stream_options": None, "model": None}
    completion = {"prompt": "a", "best_of": 1, "suffix": None, "echo": False, **both}
    chat = {"top_logprobs": None, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}}
    chat |= {"store": False, "metadata": {"a": "b"}, "service_tier": "auto", "modalities": ["text"]}
    chat |= {
        "logprobs": False,
        "parallel_tool_calls": True,
        "prompt_cache_key": "p",
        "safety_identifier": "s",
        "audio": None,
    }
    assert client.post(COMPLETIONS, json=completion).status_code == 200
    assert client.post(CHAT, json={**CHAT_BODY, **both, **chat}).status_code == 200


@pytest.mark.parametrize("value", [-1, 21, 10**6, 2**63, True, 1.5])
def test_top_logprobs_have_a_cap(client: TestClient, value: object) -> None:
    """More alternatives than the cap, or a number that is none, is a 400 that names the field."""
    error = refused(client, CHAT, {**CHAT_BODY, "logprobs": True, "top_logprobs": value})
    assert "top_logprobs" in error["message"]


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
def test_unknown_fields(client: TestClient, url: str) -> None:
    """Unknown fields are refused by name even when they are null; many of them still make a short error."""
    assert refused(client, url, {"colour": None})["param"] == "colour"
    many = {f"x{i}" + "y" * 100: 1 for i in range(20_000)}
    assert "and 19995 more" in refused(client, url, many)["message"]


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("temperature", "-0.1"),
        ("temperature", '"0"'),
        ("temperature", "true"),
        ("temperature", "1e999"),
        ("top_p", "0"),
        ("top_p", "1.1"),
        ("top_k", "-2"),
        ("top_k", "1.5"),
        ("min_p", "2"),
        ("max_tokens", "0"),
        ("max_tokens", "-1"),
        ("max_tokens", "true"),
        ("max_tokens", '"5"'),
        ("min_tokens", "-1"),
        ("n", "0"),
        ("n", "-1"),
        ("n", "1000000000"),
        ("seed", "1.5"),
        ("stop", "5"),
        ("stop", '[""]'),
        ("stop", '""'),
        ("stop", "[1]"),
        ("stop", json.dumps(["a"] * 17)),
        ("stop_token_ids", "[-1]"),
        ("stop_token_ids", "[256]"),
        ("stop_token_ids", "[true]"),
        ("ignore_eos", '"yes"'),
        ("stream", '"yes"'),
        ("stream", "1"),
        ("stream_options", "{}"),
        ("stream_options", '{"include_usage": true}'),
        ("model", "5"),
        ("user", "5"),
        ("presence_penalty", "2.1"),
        ("frequency_penalty", "-2.1"),
        ("frequency_penalty", "true"),
        ("repetition_penalty", "0"),
        ("logit_bias", '{"-1": 1}'),
        ("logit_bias", '{"256": 1}'),
        ("logit_bias", '{"x": 1}'),
        ("logit_bias", '{"1.5": 1}'),
        ("logit_bias", '{"1": 1e9}'),
        ("logit_bias", '{"1": -101}'),
        ("logit_bias", '{"1": "a"}'),
        ("logit_bias", json.dumps({str(i): 1 for i in range(1025)})),
        ("bad_words", '[""]'),
        ("bad_words", json.dumps(["a"] * 257)),
        ("prompt_logprobs", "-1"),
        ("prompt_logprobs", "1000000"),
        ("truncate_prompt_tokens", "0"),
        ("truncate_prompt_tokens", "-1"),
        ("return_token_ids", "1"),
        ("cache_salt", '""'),
        ("cache_salt", json.dumps("x" * 257)),
    ],
)
@pytest.mark.parametrize(
    ("url", "rest"), [(COMPLETIONS, '"prompt": "a"'), (CHAT, json.dumps(CHAT_BODY)[1:-1])]
)
def test_bad_values(client: TestClient, url: str, rest: str, field: str, text: str) -> None:
    """A value of the wrong type or out of range is a 400 that names the field."""
    error = refused(client, url, f'{{{rest}, "{field}": {text}}}'.encode())
    assert error["param"] == field
    assert field in error["message"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"include_usage": "yes"}, "stream_options.include_usage"),
        ({"other": 1}, "stream_options.other"),
        ({"include_obfuscation": True}, "stream_options.include_obfuscation"),
        ([1], "stream_options"),
    ],
)
def test_bad_stream_options(client: TestClient, options: object, named: str) -> None:
    """Inside stream_options the same rule holds: honoured, or refused by name."""
    body = {"prompt": "a", "stream": True, "stream_options": options}
    assert refused(client, COMPLETIONS, body)["param"] == named


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": NaN}',
        b'{"temperature": Infinity, "prompt": "a"}',
        b"[" * 100_000,
        b'{"prompt": ' + b"9" * 10_000 + b"}",
    ],
    ids=lambda body: str(body[:24]),
)
def test_not_json(client: TestClient, body: bytes) -> None:
    """Bytes that are no JSON object of Unicode text and finite numbers are a 400."""
    refused(client, COMPLETIONS, body)


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (COMPLETIONS, {"prompt": [{}] * 10_000}),
        (COMPLETIONS, {"prompt": [[1.5] * 10] * 10_000}),
        (COMPLETIONS, {"prompt": "a", "stop": [1] * 10_000}),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": ["x" * 100] * 10_000}),
        (CHAT, {"messages": [{"role": "x" * 100, "content": 1}] * 10_000}),
        (CHAT, {**CHAT_BODY, "response_format": {"type": "x" * 100_000}}),
        (CHAT, {**CHAT_BODY, "user": ["x" * 100] * 10_000}),
        (COMPLETIONS, {"prompt": "a", "model": "x" * 1_000_000}),
        (COMPLETIONS, {"prompt": "a", "x" * 1_000_000: 1}),
    ],
    ids=range(9),
)
def test_errors_stay_small(client: TestClient, url: str, body: Any) -> None:
    """Much bad input makes a short error that does not echo it."""
    status = 404 if "model" in body else 400
    assert len(refused(client, url, body, status)["message"]) < 1000


def test_unknown_model(client: TestClient) -> None:
    """Another model's name is a 404 with OpenAI's code, and says what is served."""
    error = refused(client, COMPLETIONS, {"prompt": "a", "model": "gpt-4"}, status=404)
    assert error["code"] == "model_not_found"
    assert "fake/model" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_that_never_fits(client: TestClient, stream: bool) -> None:
    """The engine's refusal is a 400 with both numbers, also when a stream was asked for."""
    message = refused(client, COMPLETIONS, {"prompt": "a" * 101, "stream": stream})["message"]
    assert "101" in message
    assert "100" in message


def test_unknown_route_and_method(client: TestClient) -> None:
    """Wrong paths and methods get the same error body."""
    assert client.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    response = client.get(COMPLETIONS)
    assert response.status_code == 405
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("field", ["stop", "stop_token_ids"])
def test_one_fault_of_a_list(client: TestClient, field: str) -> None:
    """A list of wrong items is one fault, not one per item."""
    message = refused(client, COMPLETIONS, {"prompt": "a", field: [None] * 10})["message"]
    assert message.startswith(f"{field}[0]: ")
    assert ";" not in message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_answers_hold_finite_numbers_only(value: float) -> None:
    """Nothing that is no JSON can go out: the encoder refuses NaN and infinity."""
    with pytest.raises(ValueError):
        dump_json({"x": [value]})
