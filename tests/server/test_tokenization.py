"""/tokenize and /detokenize over a real tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from octavo.engine import EngineThread
from octavo.server import create_app

from .tiny_chat import engine_thread, tiny_with_tools

USER = {"role": "user", "content": "A book"}
TOOL = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineThread]:
    thread = engine_thread(tiny_with_tools(tmp_path_factory.mktemp("tiny")))
    yield thread
    thread.shutdown(timeout=10)


@pytest.fixture(scope="module")
def client(engine: EngineThread) -> Iterator[TestClient]:
    with TestClient(create_app(engine), raise_server_exceptions=False) as client:
        yield client


@pytest.mark.parametrize("text", ["A book", "", "caf\u00e9 \U0001f600", "<|im_start|>"])
def test_round_trip(client: TestClient, engine: EngineThread, text: str) -> None:
    """Tokens of a text and back; the ids are those that a completion of it counts."""
    answer = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == engine.engine.tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == engine.engine.max_model_len
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL]}, {"add_generation_prompt": False}])
def test_messages(client: TestClient, fields: dict[str, Any]) -> None:
    """Messages give the very ids that the chat route gives the model."""
    ids = client.post("/tokenize", json={"messages": [USER], **fields}).json()["tokens"]
    body = {"messages": [USER], "max_tokens": 1, "return_token_ids": True, **fields}
    assert client.post("/v1/chat/completions", json=body).json()["prompt_token_ids"] == ids


def test_special_tokens_of_detokenize(client: TestClient, engine: EngineThread) -> None:
    """Control tokens are shown unless they are to be skipped."""
    ids = engine.engine.tokenizer.encode("<|im_start|>a", allow_control=True)
    assert client.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "<|im_start|>a"
    body = {"tokens": ids, "skip_special_tokens": True}
    assert client.post("/detokenize", json=body).json()["prompt"] == "a"


@pytest.mark.parametrize(
    ("url", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "other": 1}, "other"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [USER], "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
    ],
)
def test_refusals(client: TestClient, url: str, body: dict[str, Any], param: str) -> None:
    """What cannot be read is refused by name."""
    answer = client.post(url, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
