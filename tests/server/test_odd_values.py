"""Odd values in every place of a request: each is answered, or refused by a small error, and never a 500."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from octavo.server.responses.schema import ResponsesRequest
from octavo.server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Schema,
    TokenizeRequest,
)

ODD = (
    *("null", "true", "-1", "1.5", "9" * 5000, '""', '"a"', '"\\ud800"'),
    *("[]", "[null]", "[" * 100 + "]" * 100, '{"x": null}'),
)
"""JSON that few expect; as text, since Python would not write half of it."""
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"name": "s", "schema": {"type": "object", "properties": {"a": {"enum": [1]}}}, "strict": True}
BASES: dict[str, tuple[type[Schema], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "a"}),
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "a"}]}),
    "/v1/responses": (ResponsesRequest, {"input": "a"}),
    "/tokenize": (TokenizeRequest, {"prompt": "a"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}
NESTED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [[1, 2], [3]]}),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"choice": ["a", "b"]}}),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": {"type": "object"}}}),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"json_object": True}}),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"5": 1}, "stop": ["x"], "bad_words": ["y"]}),
    ("/v1/completions", {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": "b", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "1", "name": "f", "content": "c"},
            ]
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "a"}],
            "response_format": {"type": "json_schema", "json_schema": SCHEMA},
            "chat_template_kwargs": {"a": 1},
            "metadata": {"a": "b"},
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "c"},
            ],
            "include": ["message.output_text.logprobs"],
        },
    ),
    (
        "/v1/responses",
        {
            "input": "a",
            "tools": [{"type": "function", **TOOL}],
            "text": {"format": {"type": "json_schema", **SCHEMA}, "verbosity": "medium"},
            "reasoning": {"effort": "none"},
        },
    ),
]


def answered(client: TestClient, url: str, body: str) -> None:
    """Post; what is refused is so with an OpenAI error of less than 64 KB that says something."""
    answer = client.post(url, content=body.encode())
    assert answer.status_code in (200, 400, 404), (body[:200], answer.text[:500])
    if answer.status_code != 200:
        assert len(answer.content) < 64 * 1024
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]


@pytest.mark.parametrize("url", BASES)
def test_in_every_field(client: TestClient, url: str) -> None:
    """Every field that is honoured, refused or unknown, with each odd value."""
    schema, base = BASES[url]
    fields = [*schema.model_fields, *schema.refusals, "unknown", ""]
    assert len(fields) >= 5
    for field in fields:
        for value in ODD:
            others = {name: item for name, item in base.items() if name != field}
            answered(client, url, json.dumps({**others, field: "@"}).replace('"@"', value))


def mutants(value: Any) -> Iterator[Any]:
    """`value` with each of its parts in turn replaced by "@", left out, or given a key more."""
    yield "@"
    if isinstance(value, dict):
        yield {**value, "x": "@"}
        for name in value:
            yield {other: item for other, item in value.items() if other != name}
            for mutant in mutants(value[name]):
                yield {**value, name: mutant}
    elif isinstance(value, list):
        for at in range(len(value)):
            yield value[:at] + value[at + 1 :]
            for mutant in mutants(value[at]):
                yield [*value[:at], mutant, *value[at + 1 :]]


@pytest.mark.parametrize(("url", "body"), NESTED, ids=[str(i) for i in range(len(NESTED))])
def test_in_every_part(client: TestClient, url: str, body: dict[str, Any]) -> None:
    """Every part of a nested field, with each odd value."""
    for mutant in mutants(copy.deepcopy(body)):
        text = json.dumps(mutant)
        for value in ODD if '"@"' in text else ("",):
            answered(client, url, text.replace('"@"', value))
