"""Every answer and every event of a stream is what OpenAI's published schemas say, over a real tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from fastapi.testclient import TestClient

from octavo.engine import EngineThread
from octavo.server import create_app
from octavo.server.fields import CHAT_REFUSALS, COMPLETION_REFUSALS
from octavo.server.responses.schema import ResponsesRequest
from octavo.server.schemas import ChatRequest, CompletionRequest

from . import openai
from .sse import events
from .test_tools import CALL, CLOCK, WEATHER
from .tiny_chat import engine_thread, tiny_with_tools

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
USER = {"role": "user", "content": "A book"}
SHORT = {"max_tokens": 6, "seed": 1, "ignore_eos": True}
FLAT = [{"type": "function", **tool["function"]} for tool in (WEATHER, CLOCK)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineThread]:
    thread = engine_thread(tiny_with_tools(tmp_path_factory.mktemp("tiny")))
    yield thread
    thread.shutdown(timeout=10)


@pytest.fixture(scope="module")
def client(engine: EngineThread) -> Iterator[TestClient]:
    with TestClient(create_app(engine), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def scripted(engine: EngineThread, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have the model say a text: its tokens are bytes, so each step's choice is forced by a bias."""

    def say(text: str) -> None:
        tokenizer = engine.engine.tokenizer
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        from octavo.engine import engine as module

        real = module.choose

        def forced(plan: Any, *others: Any) -> Any:
            found = real(plan, *others)
            sampled = [entry for entry in plan.entries if entry.num_samples]
            for entry, choices in zip(sampled, [c for c in found if c], strict=True):
                number = len(entry.branch.tokens) - len(entry.branch.request.prompt)
                if number < len(ids):
                    choices[:] = [choice._replace(token=ids[number]) for choice in choices]
            return found

        monkeypatch.setattr(module, "choose", forced)

    return say


BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": ["A book", "of"], "n": 2, **SHORT}),
    (COMPLETIONS, {"prompt": "A book", "echo": True, "logprobs": 3, **SHORT}),
    (COMPLETIONS, {"prompt": "A book", "echo": True, "max_tokens": 0}),
    (COMPLETIONS, {"prompt": [1, 2], "logprobs": 0, "best_of": 2, "return_token_ids": True, **SHORT}),
    (COMPLETIONS, {"prompt": "A", "stop": "e", "max_tokens": 30, "prompt_logprobs": 1}),
    (COMPLETIONS, {"prompt": "A", "use_beam_search": True, "n": 2, "temperature": 0, "max_tokens": 4}),
    (CHAT, {"messages": [USER], "n": 2, **SHORT}),
    (CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": 2, "service_tier": "auto", **SHORT}),
    (CHAT, {"messages": [USER], "tools": [WEATHER], "return_token_ids": True, "prompt_logprobs": 0, **SHORT}),
    (CHAT, {"messages": [USER], "max_completion_tokens": 2, "temperature": 1.5}),
]
WHOLE = {COMPLETIONS: "CreateCompletionResponse", CHAT: "CreateChatCompletionResponse", RESPONSES: "Response"}
CHUNK = {COMPLETIONS: "CreateCompletionResponse", CHAT: "CreateChatCompletionStreamResponse"}


@pytest.mark.parametrize(("url", "body"), BODIES)
def test_answers(client: TestClient, url: str, body: dict[str, Any]) -> None:
    """Whole answers and all chunks, with the usage chunk and without."""
    answer = client.post(url, json=body)
    assert answer.status_code == 200, answer.text
    openai.check(WHOLE[url], answer.json())
    for options in (None, {"include_usage": True}):
        found = events(client.post(url, json={**body, "stream": True, "stream_options": options}))
        assert found
        for chunk in found:
            openai.check(CHUNK[url], chunk)
        assert ("usage" in found[-1]) is (options is not None)


@pytest.mark.parametrize("text", ["Hello.", f"Let me see. {CALL}", CALL + CALL])
def test_calls(client: TestClient, scripted: Any, text: str) -> None:
    """Calls of tools, whole and streamed, on both routes."""
    scripted(text)
    body = {"messages": [USER], "tools": [WEATHER, CLOCK]}
    answer = client.post(CHAT, json=body).json()
    openai.check(WHOLE[CHAT], answer)
    assert answer["choices"][0]["finish_reason"] == ("tool_calls" if "<" in text else "stop")
    assert len(answer["choices"][0]["message"].get("tool_calls", [])) == text.count("</tool_call>")
    for chunk in events(client.post(CHAT, json={**body, "stream": True})):
        openai.check(CHUNK[CHAT], chunk)


RESPONSES_BODIES: list[dict[str, Any]] = [
    {"input": "A book", "max_output_tokens": 4},
    {
        "input": "A book",
        "max_output_tokens": 60,
        "stop": "e",
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
    },
    {"input": [USER], "top_logprobs": 2, "max_output_tokens": 3, "user": "u", "safety_identifier": "s"},
    {"input": [USER], "tools": FLAT, "tool_choice": "auto", "max_output_tokens": 3, "temperature": 0.5},
]


def response_events(client: TestClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a streamed response; each is valid, named, and numbered."""
    answer = client.post(RESPONSES, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    found = []
    for block in answer.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        openai.check(EVENTS[event["type"]], event)
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


EVENTS = {
    "response.created": "ResponseCreatedEvent",
    "response.in_progress": "ResponseInProgressEvent",
    "response.completed": "ResponseCompletedEvent",
    "response.incomplete": "ResponseIncompleteEvent",
    "response.failed": "ResponseFailedEvent",
    "response.output_item.added": "ResponseOutputItemAddedEvent",
    "response.output_item.done": "ResponseOutputItemDoneEvent",
    "response.content_part.added": "ResponseContentPartAddedEvent",
    "response.content_part.done": "ResponseContentPartDoneEvent",
    "response.output_text.delta": "ResponseTextDeltaEvent",
    "response.output_text.done": "ResponseTextDoneEvent",
    "response.function_call_arguments.delta": "ResponseFunctionCallArgumentsDeltaEvent",
    "response.function_call_arguments.done": "ResponseFunctionCallArgumentsDoneEvent",
}


@pytest.mark.parametrize("body", RESPONSES_BODIES)
def test_responses(client: TestClient, body: dict[str, Any]) -> None:
    """A response and its events; what the events say adds up to the response."""
    body = {**body, "seed": 1}
    answer = client.post(RESPONSES, json=body)
    assert answer.status_code == 200, answer.text
    openai.check("Response", answer.json())
    found = response_events(client, body)
    compare(found, answer.json())


@pytest.mark.parametrize("text", ["Hello.", f"Let me see. {CALL}", CALL + CALL])
def test_response_calls(client: TestClient, scripted: Any, text: str) -> None:
    """Function calls of a response."""
    scripted(text)
    body = {"input": "hi", "tools": FLAT}
    answer = client.post(RESPONSES, json=body).json()
    openai.check("Response", answer)
    assert answer["status"] == "completed"
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    assert [call["arguments"] for call in calls] == ['{"place": "a \\"}<b>"}'] * text.count("</tool_call>")
    compare(response_events(client, body), answer)


def compare(found: list[dict[str, Any]], answer: dict[str, Any]) -> None:
    """The stream's last response equals the whole one but for ids and times; deltas add up to its items."""
    last = found[-1]["response"]
    assert bare(last) == bare(answer)
    assert found[-1]["type"] == f"response.{answer['status']}"
    for at, item in enumerate(last["output"]):
        mine = [event for event in found if event.get("output_index") == at]
        assert (mine[0]["type"], mine[-1]["type"]) == (
            "response.output_item.added",
            "response.output_item.done",
        )
        assert mine[-1]["item"] == item
        said = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        assert said == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


def bare(value: Any) -> Any:
    """Without ids, times, cache hits and the last digits of logprobs."""
    if isinstance(value, dict):
        gone = ("id", "call_id", "created_at", "completed_at", "cached_tokens")
        return {key: bare(item) for key, item in value.items() if key not in gone}
    if isinstance(value, list):
        return [bare(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


def test_models_and_errors(client: TestClient) -> None:
    """The lists of models, and refusals of all kinds."""
    openai.check("ListModelsResponse", client.get("/v1/models").json())
    openai.check("Model", client.get("/v1/models").json()["data"][0])
    for url in (COMPLETIONS, CHAT, RESPONSES, "/nothing"):
        for body in ({}, {"colour": 1}, {"model": "other"}, {"temperature": -1}):
            answer = client.post(url, json=body)
            assert 400 <= answer.status_code < 500
            openai.check("ErrorResponse", answer.json())


@pytest.mark.parametrize(
    ("name", "schema", "refusals"),
    [
        ("CreateCompletionRequest", CompletionRequest, COMPLETION_REFUSALS),
        ("CreateChatCompletionRequest", ChatRequest, CHAT_REFUSALS),
        ("CreateResponse", ResponsesRequest, ResponsesRequest.refusals),
    ],
)
def test_every_field_is_known(name: str, schema: Any, refusals: Any) -> None:
    """No field of OpenAI's requests is unknown here: each is honoured or refused by name, and not both."""
    known = set(schema.model_fields) | set(refusals)
    assert set(openai.request_fields(name)) - known == set()
    assert set(schema.model_fields) & set(refusals) == set()


def test_the_check_can_fail() -> None:
    """A wrong answer is not valid."""
    with pytest.raises(jsonschema.ValidationError):
        openai.check("CreateCompletionResponse", {"id": "x", "object": "other", "choices": []})
