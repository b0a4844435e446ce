"""Answers of a stated form, and calls that must be made, over a tiny model that knows nothing of JSON."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from fastapi.testclient import TestClient
from tokenizers import Tokenizer

from octavo.engine import EngineThread, StructuredOutputs
from octavo.engine.grammar import Grammars
from octavo.server import ServerConfig, create_app
from octavo.server.context import SLOW_THREADS, TEXT_THREADS
from octavo.server.tools import read_tools, write_grammar

from . import openai
from .sse import events, texts
from .tiny_chat import engine_thread, tiny_with_tools

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
USER = {"role": "user", "content": "A book"}
PLACE = {"$ref": "#/$defs/place"}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}, "c": PLACE},
    "required": ["a", "b", "c"],
    "additionalProperties": False,
    "$defs": {"place": {"enum": ["near", "far"]}},
}
OTHER = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}
NEAR = {"type": "function", "function": {"name": "near", "parameters": SCHEMA, "strict": True}}
COUNT = {"type": "function", "function": {"name": "count", "parameters": OTHER}}
UNKNOWN: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "nothing"}, "strict": True},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}


def wrapped(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineThread]:
    thread = engine_thread(
        tiny_with_tools(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048), num_blocks=2000
    )
    yield thread
    thread.shutdown(timeout=10)


@pytest.fixture(scope="module")
def client(engine: EngineThread) -> Iterator[TestClient]:
    with TestClient(create_app(engine), raise_server_exceptions=False) as client:
        yield client


def ok(client: TestClient, url: str, **body: Any) -> dict[str, Any]:
    answer = client.post(url, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_json_schema(client: TestClient, stream: bool, seed: int) -> None:
    """The text is JSON of the schema, in a body and in a stream, for each of n."""
    body = {"messages": [USER], "response_format": FORMAT, "n": 2, "seed": seed}
    if stream:
        found = texts(events(client.post(CHAT, json={**body, "stream": True})))
    else:
        found = {c["index"]: c["message"]["content"] for c in ok(client, CHAT, **body)["choices"]}
    assert sorted(found) == [0, 1]
    for text in found.values():
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    ("form", "holds"),
    [
        ({"regex": "[ab]{3}"}, lambda text: set(text) <= {"a", "b"} and len(text) == 3),
        ({"choice": ["leaf", "sheet"]}, lambda text: text in ("leaf", "sheet")),
        ({"json": OTHER}, lambda text: json.loads(text)["n"] in (1, 2)),
    ],
)
@pytest.mark.parametrize("url", [COMPLETIONS, CHAT, RESPONSES])
def test_extension(client: TestClient, url: str, form: dict[str, Any], holds: Any) -> None:
    """structured_outputs holds on every route."""
    prompts = {COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": [USER]}, RESPONSES: {"input": "a"}}
    answer = ok(client, url, **prompts[url], structured_outputs=form, seed=1)
    if url == RESPONSES:
        text = answer["output"][0]["content"][0]["text"]
    else:
        choice = answer["choices"][0]
        text = choice["text"] if url == COMPLETIONS else choice["message"]["content"]
    assert holds(text)


def test_responses(client: TestClient) -> None:
    """text.format is response_format, flatter; the response tells it again."""
    form = {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}
    answer = ok(client, RESPONSES, input="a", text={"format": form}, seed=1)
    openai.check("Response", answer)
    jsonschema.validate(json.loads(answer["output"][0]["content"][0]["text"]), SCHEMA)
    assert answer["text"]["format"] == form


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("choice", ["required", "near", "count"])
def test_forced_calls(client: TestClient, choice: str, seed: int, stream: bool) -> None:
    """A call that must be made is made, of the tool that was named, with arguments of its schema."""
    forced: Any = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    body = {"messages": [USER], "tools": [NEAR, COUNT], "tool_choice": forced, "seed": seed}
    if stream:
        chunks = [
            c for one in events(client.post(CHAT, json={**body, "stream": True})) for c in one["choices"]
        ]
        pieces = [call for c in chunks for call in c["delta"].get("tool_calls", [])]
        name = pieces[0]["function"]["name"]
        arguments = "".join(piece["function"]["arguments"] for piece in pieces)
        reason = chunks[-1]["finish_reason"]
        assert not any(c["delta"].get("content") for c in chunks)
    else:
        made = ok(client, CHAT, **body)["choices"][0]
        (call,) = made["message"]["tool_calls"]
        name, arguments, reason = (
            call["function"]["name"],
            call["function"]["arguments"],
            made["finish_reason"],
        )
        assert made["message"]["content"] is None
    assert reason == "tool_calls"
    assert name in ("near", "count") if choice == "required" else name == choice
    jsonschema.validate(json.loads(arguments), SCHEMA if name == "near" else OTHER)


def test_forced_call_of_a_response(client: TestClient) -> None:
    """The same in Responses."""
    tool = {"type": "function", **COUNT["function"]}  # type: ignore[dict-item]
    choice = {"type": "function", "name": "count"}
    answer = ok(client, RESPONSES, input="a", tools=[tool], tool_choice=choice, seed=1)
    openai.check("Response", answer)
    assert [item["type"] for item in answer["output"]] == ["function_call"]
    jsonschema.validate(json.loads(answer["output"][0]["arguments"]), OTHER)


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineThread]:
    """A model whose vocabulary has the opening tag, so that it can be made to begin a call."""
    path = tiny_with_tools(tmp_path_factory.mktemp("caller"), max_position_embeddings=2048)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens(["<tool_call>"])
    tokenizer.save(str(path / "tokenizer.json"))
    thread = engine_thread(path, num_blocks=2000)
    yield thread
    thread.shutdown(timeout=10)


def say(engine: EngineThread, text: str) -> dict[str, float]:
    """A bias that makes the model begin with this one token of text."""
    (token,) = engine.engine.tokenizer.encode(text, add_special_tokens=False)
    return {str(token): 100.0}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("form", "begin"), [("hermes", "<tool_call>"), ("llama", "{")])
def test_a_strict_tool_that_the_model_chooses(
    caller: EngineThread, form: str, begin: str, seed: int, stream: bool
) -> None:
    """Where the model may choose, a call that it begins follows the schema of the tool, and names one."""
    body = {"messages": [USER], "tools": [NEAR, {**COUNT, "function": {**COUNT["function"], "strict": True}}]}
    body |= {"seed": seed, "logit_bias": say(caller, begin), "parallel_tool_calls": False, "temperature": 1.5}
    with TestClient(create_app(caller, ServerConfig(tool_format=form))) as client:
        if stream:
            chunks = events(client.post(CHAT, json={**body, "stream": True}))
            found = [c for one in chunks for c in one["choices"]]
            calls = [call["function"] for c in found for call in c["delta"].get("tool_calls", [])]
            name, arguments = calls[0]["name"], "".join(call["arguments"] for call in calls)
            assert found[-1]["finish_reason"] == "tool_calls"
            assert not any(c["delta"].get("content") for c in found)
        else:
            choice = ok(client, CHAT, **body)["choices"][0]
            (call,) = choice["message"]["tool_calls"]
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    jsonschema.validate(json.loads(arguments), {"near": SCHEMA, "count": OTHER}[name])


@pytest.mark.parametrize("form", ["hermes", "llama"])
def test_a_strict_tool_that_the_model_leaves(caller: EngineThread, form: str) -> None:
    """A model that begins no call writes what it likes."""
    body = {"messages": [USER], "tools": [NEAR], "max_tokens": 30, "temperature": 0, "min_tokens": 30}
    with TestClient(create_app(caller, ServerConfig(tool_format=form))) as client:
        choice = ok(client, CHAT, **body, bad_words=["{", "<"])["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"]
    assert "tool_calls" not in choice["message"]


def test_a_strict_tool_of_a_response(caller: EngineThread) -> None:
    """The same in Responses; the response tells the tool again."""
    tool = {"type": "function", **NEAR["function"]}  # type: ignore[dict-item]
    bias = say(caller, "<tool_call>")
    with TestClient(create_app(caller)) as client:
        answer = ok(
            client, RESPONSES, input="a", tools=[tool], logit_bias=bias, parallel_tool_calls=False, seed=1
        )
    openai.check("Response", answer)
    assert [item["type"] for item in answer["output"]] == ["function_call"]
    jsonschema.validate(json.loads(answer["output"][0]["arguments"]), SCHEMA)
    assert answer["tools"][0]["strict"] is True


@pytest.mark.parametrize(
    ("form", "text", "taken"),
    [
        ("hermes", "", True),
        ("hermes", "a <tool_ {b} \u00e9\n", True),
        ("hermes", 'a <tool_call>\n{"name": "count", "arguments": {"n": 1}}\n</tool_call> b\n', True),
        ("hermes", '<tool_call>{"name":"any","arguments":{"z":[1]}}</tool_call>', True),
        ("hermes", "a <tool_call>", False),
        ("hermes", "a <tool_call>b", False),
        ("hermes", '<tool_call>{"name": "other"', False),
        ("hermes", '<tool_call>{"name": "count", "arguments": {"n": 3', False),
        ("hermes", '<tool_call>{"name": "count", "arguments": {"n": 1}}', False),
        ("llama", "", True),
        ("llama", " a {b}", True),
        ("llama", '{"name": "count", "parameters": {"n": 2}}; {"name": "any", "parameters": {}}', True),
        ("llama", '{"name": "count", "parameters": {"n": 3', False),
        ("llama", ' {"answer"', False),
    ],
)
def test_what_may_be_written(caller: EngineThread, form: str, text: str, taken: bool) -> None:
    """Plain text is free; where a call has begun only a whole one of a declared tool can follow."""
    strict = {"type": "function", "function": {**COUNT["function"], "strict": True}}  # type: ignore[dict-item]
    tools = read_tools([strict, {"type": "function", "function": {"name": "any"}}], None, None)
    assert tools is not None
    engine = caller.engine
    grammars = Grammars(engine.tokenizer, engine.vocab_size, [engine.tokenizer.encode("A")[0]])
    matcher = grammars.compile(StructuredOutputs(grammar=write_grammar(tools, form)))
    ids = engine.tokenizer.encode(text, add_special_tokens=False)
    assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is taken


@pytest.mark.parametrize(
    ("url", "fields", "param"),
    [
        (CHAT, {"response_format": 5}, "response_format"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_object", "x": 1}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}},
            "response_format.json_schema",
        ),
        (
            CHAT,
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": {"type": "nothing"}},
                }
            },
            "response_format",
        ),
        (CHAT, {"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (CHAT, {"response_format": FORMAT, "tools": [NEAR], "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"response_format": FORMAT, "tools": [NEAR]}, "tools"),
        (CHAT, {"structured_outputs": {"regex": "a"}, "tools": [COUNT, NEAR]}, "tools"),
        (CHAT, {"tools": [UNKNOWN]}, "tools"),
        (RESPONSES, {"tools": [{"type": "function", **UNKNOWN["function"]}]}, "tools"),
        (COMPLETIONS, {"structured_outputs": {}}, "structured_outputs"),
        (COMPLETIONS, {"structured_outputs": {"regex": "("}}, "structured_outputs"),
        (COMPLETIONS, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        (COMPLETIONS, {"structured_outputs": {"other": "a"}}, "structured_outputs"),
        (COMPLETIONS, {"structured_outputs": {"regex": 5}}, "structured_outputs"),
        (COMPLETIONS, {"response_format": FORMAT}, "response_format"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "s"}}}, "text.format"),
    ],
)
def test_refusals(client: TestClient, url: str, fields: dict[str, Any], param: str) -> None:
    """A form that cannot be enforced is refused by the field that states it."""
    prompts = {COMPLETIONS: {"prompt": "a"}, CHAT: {"messages": [USER]}, RESPONSES: {"input": "a"}}
    answer = client.post(url, json={**prompts[url], **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_slow_compiles_hold_up_nobody(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """While more forms are being compiled than there are threads for text and for forms, other requests
    are answered; then each has its form, and one that cannot be enforced its refusal."""
    gate, begun, compile_ = threading.Event(), threading.Semaphore(0), Grammars._compile

    def waiting(self: Grammars, kind: str, text: str) -> Any:
        begun.release()
        assert gate.wait(60)
        return compile_(self, kind, text)

    monkeypatch.setattr(Grammars, "_compile", waiting)
    count = SLOW_THREADS + TEXT_THREADS + 1
    forms = [{"regex": f"[ab]{{2}}{i}{'s' if stream else 'w'}"} for i in range(count)] + [{"regex": "("}]

    def ask(form: dict[str, Any]) -> Any:
        return client.post(CHAT, json={"messages": [USER], "structured_outputs": form, "seed": 1})

    with ThreadPoolExecutor(len(forms)) as threads:
        try:
            slow = [threads.submit(ask, form) for form in forms]
            assert begun.acquire(timeout=60)
            plain = {"messages": [USER], "max_tokens": 8, "ignore_eos": True, "stream": stream}
            for _ in range(3):
                assert client.post(CHAT, json=plain).status_code == 200
            assert not any(answer.done() for answer in slow)
        finally:
            gate.set()
        *answers, refused = [answer.result(timeout=60) for answer in slow]
    for form, answer in zip(forms, answers, strict=False):
        text = answer.json()["choices"][0]["message"]["content"]
        assert text[2:] == form["regex"][7:]
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "structured_outputs"
