"""Tools: the parsers against random cuts, and chat over an engine that says what a script holds."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from fastapi.testclient import TestClient

from octavo.server import ServerConfig, create_app
from octavo.server.tools import Arguments, CallStart, Content, form_of, make_parser

from .fake_engine import FakeEngineThread
from .sse import events

URL = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "a \\"}<b>"}}\n</tool_call>'

# text -> content, [(name, arguments)]
HERMES = [
    ("plain", "plain", []),
    ("", "", []),
    ("  a \n b \n", "  a \n b \n", []),
    (CALL, "", [("weather", '{"place": "a \\"}<b>"}')]),
    (f"Let me see.\n{CALL}", "Let me see.", [("weather", '{"place": "a \\"}<b>"}')]),
    (f"{CALL}\n{CALL}\n", "", [("weather", '{"place": "a \\"}<b>"}')] * 2),
    (f"x {CALL} y", "xy", [("weather", '{"place": "a \\"}<b>"}')]),
    (
        '<tool_call>{"arguments": {"a": [1, {}]}, "name": "clock"}</tool_call>',
        "",
        [("clock", '{"a": [1, {}]}')],
    ),
    ('<tool_call>{"name":"clock","parameters":{}}</tool_call>', "", [("clock", "{}")]),
    ('<tool_call>{"name":"clock"}</tool_call>', "", [("clock", "")]),
    ('<tool_call>{"name":"clock","arguments":"{\\"a\\": 1}"}</tool_call>', "", [("clock", '{"a": 1}')]),
    ('<tool_call>{"name":"clock","arguments":{}}}</tool_call>z', "z", [("clock", "{}")]),
    (
        '<tool_call>[{"name":"clock","arguments":{"a":1}}, {"name":"weather","arguments":{}}]</tool_call>',
        "",
        [("clock", '{"a":1}'), ("weather", "{}")],
    ),
    ("a <tool_", "a <tool_", []),
    ("a <tool_call> no call </tool_call>", "a <tool_call> no call </tool_call>", []),
    ('<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
    ('<tool_call>{"na', '<tool_call>{"na', []),
    ('<tool_call>{"name": 5}', '<tool_call>{"name": 5}', []),
    ('<tool_call>{"name": "clock", "arguments": {"a": "x', "", [("clock", '{"a": "x')]),
]
LLAMA = [
    ("plain", "plain", []),
    ('{"name": "clock", "parameters": {"a": 1}}', "", [("clock", '{"a": 1}')]),
    (' {"type": "function", "name": "clock", "parameters": {}}\n', "", [("clock", "{}")]),
    (
        '{"name": "clock", "parameters": {}}; {"name": "weather", "parameters": {"b": "}"}}',
        "",
        [("clock", "{}"), ("weather", '{"b": "}"}')],
    ),
    ('{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    ('{"answer": 5}', '{"answer": 5}', []),
    ('{"name"', '{"name"', []),
    ('see {"name": "clock"}', 'see {"name": "clock"}', []),
    ('{"name": "clock", "parameters": {}} and so', "and so", [("clock", "{}")]),
    ('{"name": "clock", "parameters": {"a', "", [("clock", '{"a')]),
]


def parse(form: str, parts: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls of a text that comes in `parts`; checks ids and indexes on the way."""
    parser, content, calls, ids = make_parser(form, ["weather", "clock"]), "", [], []
    found = [event for part in parts for event in parser.feed(part)] + list(parser.finish())
    for event in found:
        if isinstance(event, Content):
            assert event.text
            content += event.text
        elif isinstance(event, CallStart):
            assert event.index == len(calls)
            calls.append((event.name, ""))
            ids.append(event.id)
        else:
            assert isinstance(event, Arguments)
            assert event.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    assert len(set(ids)) == len(ids) == parser.num_calls
    return content, calls


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [("hermes", *case) for case in HERMES] + [("llama", *case) for case in LLAMA],
)
def test_parsers(form: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    """However a text is cut into pieces, the same content and calls come of it."""
    rng = random.Random(text)
    assert parse(form, [text]) == (content, calls)
    assert parse(form, list(text)) == (content, calls)
    for _ in range(50):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 8)))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(form, parts) == (content, calls)


@pytest.mark.parametrize("form", ["hermes", "llama"])
def test_random_text(form: str) -> None:
    """Any text at all gives the same in one piece and in many, and raises nothing."""
    rng = random.Random(5)
    atoms = [
        "<tool_call>",
        "</tool_call>",
        "{",
        "}",
        '"',
        "name",
        "arguments",
        ":",
        ",",
        " ",
        "\n",
        "\\",
        "[",
        "]",
    ]
    atoms += ['{"name": "clock", "arguments": {}}', "clock", ";", "é"]
    for _ in range(3000):
        text = "".join(rng.choices(atoms, k=rng.randint(1, 14)))
        assert parse(form, [text]) == parse(form, list(text)), text


def test_arguments_are_streamed() -> None:
    """Arguments go out as they come; nobody waits for the end of a long call."""
    parser = make_parser("hermes", ["clock"])
    (start,) = parser.feed('<tool_call>{"name": "clock", "arg')
    assert isinstance(start, CallStart)
    assert (start.index, start.name) == (0, "clock")
    seen = list(parser.feed('uments": {"a": "long'))
    assert "".join(event.text for event in seen if isinstance(event, Arguments)) == '{"a": "long'


@pytest.mark.parametrize(
    ("template", "option", "form", "native"),
    [
        (None, "auto", None, False),
        ("{{ messages }}", "auto", None, False),
        ("{{ messages }}", "hermes", "hermes", False),
        ("{{ tools }}<tool_call>", "auto", "hermes", True),
        ("{{ tools }}<|python_tag|>", "auto", "llama", True),
        ("{{ tools }}", "auto", None, True),
        ("{{ tools }}", "llama", "llama", True),
    ],
)
def test_form(template: str | None, option: str, form: str | None, native: bool) -> None:
    """The chat template shows the form; the option stands above it."""
    found = form_of(template, option)
    assert (found.form, found.native) == (form, native)


def say(engine: FakeEngineThread, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Have the fake answer with `text`, three characters a token."""
    pieces = [text[at : at + 3] for at in range(0, len(text), 3)]
    monkeypatch.setattr("tests.server.fake_engine.WORDS", pieces)


def ask(client: TestClient, stream: bool = False, **fields: Any) -> tuple[dict[str, Any], str]:
    """The message and the finish reason, the same from a stream and from a body."""
    body = {"messages": [USER], "tools": [WEATHER, CLOCK], **fields}
    if not stream:
        answer = client.post(URL, json=body)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        return choice["message"], choice["finish_reason"]
    message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    calls: list[dict[str, Any]] = []
    chunks = [
        c for chunk in events(client.post(URL, json={**body, "stream": True})) for c in chunk["choices"]
    ]
    for choice in chunks:
        if choice["delta"].get("content"):
            message["content"] = (message["content"] or "") + choice["delta"]["content"]
        for call in choice["delta"].get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append({"id": call["id"], "type": call["type"], "function": call["function"]})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    assert [c["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    if calls:
        message["tool_calls"] = calls
    return message, chunks[-1]["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
def test_call(client: TestClient, engine: FakeEngineThread, monkeypatch, stream: bool) -> None:
    """Calls come as tool_calls, the finish reason says so, and what was said before is content."""
    say(engine, monkeypatch, f"Let me see. {CALL}\n{CALL}")
    message, reason = ask(client, stream)
    assert reason == "tool_calls"
    assert message["content"] == "Let me see."
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [{"name": "weather", "arguments": '{"place": "a \\"}<b>"}'}] * 2
    assert json.loads(functions[0]["arguments"]) == {"place": 'a "}<b>'}
    assert engine.engine.tokenizer.variables["tools"][0] == WEATHER


@pytest.mark.parametrize("stream", [False, True])
def test_single_call(client: TestClient, engine: FakeEngineThread, monkeypatch, stream: bool) -> None:
    """Without parallel calls the answer ends with the first, and the engine is not kept busy."""
    say(engine, monkeypatch, f"{CALL}\n{CALL} and much more text that nobody asked for")
    engine.hold_before = -(-2 * len(CALL) // 3) + 1  # by itself it would not end
    message, reason = ask(client, stream, parallel_tool_calls=False)
    assert reason == "tool_calls"
    assert len(message["tool_calls"]) == 1
    assert (engine.running, engine.aborted) == (0, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_single_calls_of_several_choices(
    client: TestClient, engine: FakeEngineThread, monkeypatch, stream: bool
) -> None:
    """A choice that has ended with its call takes nothing more while others go on: reason, ids and all."""
    # The fake's second choice begins a token later in the text, so it is no call and goes on to the end.
    say(engine, monkeypatch, CALL + " and much more text that nobody asked for")
    body = {"messages": [USER], "tools": [WEATHER], "parallel_tool_calls": False, "n": 2}
    body |= {"return_token_ids": True, "stream": stream}
    answer = client.post(URL, json=body)
    ids: dict[int, list[int]] = {0: [], 1: []}
    reasons: dict[int, str] = {}
    for one in events(answer) if stream else [answer.json()]:
        for choice in one["choices"]:
            ids[choice["index"]] += choice["token_ids"]
            if choice["finish_reason"]:
                assert choice["index"] not in reasons
                reasons[choice["index"]] = choice["finish_reason"]
    assert reasons == {0: "tool_calls", 1: "stop"}
    until = CALL.index("}}\n") + 2  # the call is over with its braces
    assert len(ids[0]) == -(-until // 3) < len(ids[1])


@pytest.mark.parametrize("stream", [False, True])
def test_cut_off(client: TestClient, engine: FakeEngineThread, monkeypatch, stream: bool) -> None:
    """A call that max_tokens cuts is shown as far as it came, with finish reason length."""
    say(engine, monkeypatch, CALL)
    message, reason = ask(client, stream, max_tokens=20)
    assert reason == "length"
    assert message["tool_calls"][0]["function"]["arguments"].startswith('{"place"')


@pytest.mark.parametrize("stream", [False, True])
def test_none(client: TestClient, engine: FakeEngineThread, monkeypatch, stream: bool) -> None:
    """tool_choice none: the model is not told of tools, and its text is left alone."""
    say(engine, monkeypatch, CALL)
    message, reason = ask(client, stream, tool_choice="none")
    assert (message["content"], reason) == (CALL, "stop")
    assert "tools" not in engine.engine.tokenizer.variables


def test_history(client: TestClient, engine: FakeEngineThread, monkeypatch) -> None:
    """Past calls and results reach the template: arguments as an object, ids and names kept."""
    seen: list[Any] = []
    encode = type(engine.engine.tokenizer).encode_chat

    def watch(self: Any, messages: list[Any], *args: Any, **kwargs: Any) -> list[int]:
        seen.append(messages)
        return encode(self, [USER], *args, **kwargs)

    monkeypatch.setattr(type(engine.engine.tokenizer), "encode_chat", watch)
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": '{"a": 1}'}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "noon"}
    history = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    assert client.post(URL, json={"messages": history, "tools": [CLOCK]}).status_code == 200
    made = {**call, "function": {"name": "clock", "arguments": {"a": 1}}}
    assert seen[0][1:] == [{"role": "assistant", "content": "", "tool_calls": [made]}, result]


def test_description_where_the_template_has_none(engine: FakeEngineThread, monkeypatch) -> None:
    """With a form given, tools go into the system message, calls and results into text."""
    engine.engine.max_model_len = 5000
    monkeypatch.setattr(type(engine.engine.tokenizer), "chat_template", "{{ messages }}")
    refused = TestClient(create_app(engine)).post(URL, json={"messages": [USER], "tools": [CLOCK]})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tools"
    assert "--tool-format" in refused.json()["error"]["message"]

    client = TestClient(create_app(engine, ServerConfig(tool_format="hermes")))
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    history = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "tool_calls": [call]}]
    history.append({"role": "tool", "tool_call_id": "call_1", "content": "noon"})
    assert client.post(URL, json={"messages": history, "tools": [CLOCK]}).status_code == 200
    text = bytes(engine.seen[-1][0]).decode()
    assert text.startswith("system: Be brief.\n\nThese functions")
    assert '"name": "clock"' in text
    assert 'assistant: <tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>' in text
    assert "user: <tool_response>\nnoon\n</tool_response>" in text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{**CLOCK, "other": 1}]}, "tools[0].other"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
            "tools[0].function.strict",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x"),
        ({"tools": [CLOCK, CLOCK]}, "tools"),
        ({"tools": [CLOCK] * 129}, "tools"),
        ({"tools": [CLOCK], "tool_choice": "maybe"}, "tool_choice"),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice",
        ),
        ({"tools": [CLOCK], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": 5}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [CLOCK], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_refusals(client: TestClient, fields: dict[str, Any], param: str) -> None:
    """What is wrong with tools is refused by its place."""
    answer = client.post(URL, json={"messages": [USER], **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("call", "param"),
    [
        ({"id": "1", "type": "custom"}, "messages[1].tool_calls[0]"),
        ({"id": 1, "function": {"name": "f", "arguments": "{}"}}, "messages[1].tool_calls[0].id"),
        (
            {"id": "1", "function": {"name": "f", "arguments": "{"}},
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            {"id": "1", "function": {"name": "f", "arguments": "[]"}},
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            {"id": "1", "function": {"name": "f", "arguments": {}}},
            "messages[1].tool_calls[0].function.arguments",
        ),
    ],
)
def test_bad_history(client: TestClient, call: dict[str, Any], param: str) -> None:
    """A past call that cannot be written again is refused by its place."""
    answer = client.post(URL, json={"messages": [USER, {"role": "assistant", "tool_calls": [call]}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
