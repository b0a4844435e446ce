"""The openai Python package in a scripted session with `octavo serve` on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from tests.server.clients.served import served
from tests.server.tiny_chat import tiny_with_tools

USER: list[Any] = [{"role": "user", "content": "A book"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "count",
        "parameters": {
            "type": "object",
            "properties": {"n": {"enum": [1, 2]}},
            "required": ["n"],
            "additionalProperties": False,
        },
    },
}
FORCED: Any = {"type": "function", "function": {"name": "count"}}


class Leaf(pydantic.BaseModel):
    """What an answer is to hold."""

    side: bool


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    path = tiny_with_tools(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024)
    with served(str(path), "--num-blocks", "400", "--api-key", "k") as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    (model,) = client.models.list()
    assert client.models.retrieve(model.id).id == model.id
    return model.id


def test_completions(client: openai.OpenAI, model: str) -> None:
    """A batch with logprobs; the stream of one says the same."""
    made = client.completions.create(
        model=model, prompt=["A book", "A leaf"], n=2, max_tokens=5, logprobs=2, seed=1, echo=True
    )
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    assert made.choices[0].logprobs is not None
    assert made.choices[0].logprobs.token_logprobs
    body: dict[str, Any] = {"model": model, "prompt": "A book", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**body)
    stream = client.completions.create(**body, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_chat(client: openai.OpenAI, model: str) -> None:
    """A message with logprobs; the stream says the same, and its last chunk has the usage."""
    body: dict[str, Any] = {"model": model, "messages": USER, "max_completion_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**body, logprobs=True, top_logprobs=2)
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.content or []) == whole.usage.completion_tokens
    *chunks, last = client.chat.completions.create(
        **body, stream=True, stream_options={"include_usage": True}
    )
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == whole.choices[0].message.content
    assert last.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_tools(client: openai.OpenAI, model: str) -> None:
    """A forced call, streamed by the library's own accumulator; its result goes back."""
    with client.chat.completions.stream(
        model=model, messages=USER, tools=[TOOL], tool_choice=FORCED, seed=1
    ) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.function.name == "count"
    assert json.loads(call.function.arguments)["n"] in (1, 2)
    history = [*USER, message, {"role": "tool", "tool_call_id": call.id, "content": "two"}]
    made = client.chat.completions.create(model=model, messages=history, tools=[TOOL], max_tokens=3)
    assert made.choices[0].finish_reason in ("length", "stop")


def test_parsed(client: openai.OpenAI, model: str) -> None:
    """chat.completions.parse sends a schema and reads an object."""
    made = client.chat.completions.parse(model=model, messages=USER, response_format=Leaf, seed=2)
    assert isinstance(made.choices[0].message.parsed, Leaf)


def test_responses(client: openai.OpenAI, model: str) -> None:
    """Responses: whole, streamed, parsed, and with a call."""
    made = client.responses.create(model=model, input="A book", max_output_tokens=8, temperature=0)
    assert made.status in ("completed", "incomplete")
    with client.responses.stream(model=model, input="A book", max_output_tokens=8, temperature=0) as stream:
        said = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert said == made.output_text
    parsed = client.responses.parse(model=model, input="A book", text_format=Leaf)
    assert isinstance(parsed.output_parsed, Leaf)
    flat: Any = {"type": "function", "strict": True, **TOOL["function"]}
    called = client.responses.create(
        model=model, input="A book", tools=[flat], tool_choice={"type": "function", "name": "count"}
    )
    assert called.output[0].type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": called.output[0].call_id, "output": "two"}
    again = client.responses.create(
        model=model,
        input=[*USER, called.output[0], result],
        max_output_tokens=3,  # type: ignore[list-item]
    )
    assert again.usage is not None


def test_errors(client: openai.OpenAI, model: str) -> None:
    """Refusals arrive as the library's own types, with the field that is at fault."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=model, messages=USER, audio={"voice": "x", "format": "wav"})
    assert refused.value.param == "audio"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
