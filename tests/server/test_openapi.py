"""The served OpenAPI document: it names every route, and random requests by it never end in a 5xx."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count as count_from
from typing import Any

import hypothesis
import jsonschema
import pytest
import schemathesis
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from schemathesis.checks import CHECKS
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from octavo.engine import EngineThread
from octavo.server import ServerConfig, create_app
from octavo.server.keys import ApiKey
from octavo.server.openapi import request_schema
from octavo.server.schemas import ChatRequest, CompletionRequest

from .conftest import wait_for
from .fake_engine import FakeEngineThread
from .tiny_chat import engine_thread, tiny_with_tools

CANARY = {"prompt": "A book", "temperature": 0, "max_tokens": 20, "ignore_eos": True}
OTHERS = ("octavo.server.memory_map",)
"""Modules whose routes are pages for people, and not described."""


def routes(app: Any) -> set[tuple[str, str]]:
    """(method, path) of every route of the API."""

    def walk(items: Any) -> Iterator[APIRoute]:
        for route in items:
            if isinstance(route, APIRoute):
                yield route
            else:  # what include_router made
                yield from walk(getattr(getattr(route, "original_router", route), "routes", ()))

    return {
        (method, route.path.replace(":path", ""))
        for route in walk(app.routes)
        if route.endpoint.__module__ not in OTHERS
        for method in route.methods - {"HEAD"}
    }


def test_every_route_is_described(engine: FakeEngineThread) -> None:
    """The document has each route of the application and no other."""
    app = create_app(engine)
    paths = TestClient(app).get("/openapi.json").json()["paths"]
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert len(described) >= 12
    assert described == routes(app)


def test_a_key_is_described(engine: FakeEngineThread) -> None:
    """With keys the document says so, and asks for one itself."""
    client = TestClient(create_app(engine, ServerConfig(keys=(ApiKey.from_secret("k"),))))
    assert client.get("/openapi.json").status_code == 401
    found = client.get("/openapi.json", headers={"Authorization": "Bearer k"}).json()
    assert found["security"] == [{"key": []}]
    assert found["paths"]["/health"]["get"]["security"] == []


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            CompletionRequest,
            [{"prompt": "a"}, {"prompt": [1]}, {"prompt": ["a"], "suffix": None}, {"prompt": "a", "n": None}],
            [
                {},
                {"prompt": ""},
                {"prompt": "a", "suffix": "x"},
                {"prompt": "a", "x": 1},
                {"prompt": "a", "n": 0},
            ],
        ),
        (
            ChatRequest,
            [{"messages": [{"role": "user", "content": "a"}], "tools": [], "stop": "a"}],
            [{"messages": []}, {"messages": [{"role": "user", "content": "a"}], "store": True}],
        ),
    ],
)
def test_schemas_and_server_agree(
    client: TestClient, schema: Any, good: list[dict[str, Any]], bad: list[dict[str, Any]]
) -> None:
    """What a schema allows the server takes, and what it does not the server refuses."""
    url = "/v1/completions" if schema is CompletionRequest else "/v1/chat/completions"
    for bodies, status in ((good, 200), (bad, 400)):
        for body in bodies:
            valid = jsonschema.Draft202012Validator(request_schema(schema)).is_valid(body)
            assert valid is (status == 200), body
            assert client.post(url, json=body).status_code == status, body


def canary(client: TestClient) -> str:
    answer = client.post("/v1/completions", json=CANARY)
    assert answer.status_code == 200
    return answer.json()["choices"][0]["text"]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineThread]:
    thread = engine_thread(tiny_with_tools(tmp_path_factory.mktemp("tiny")), max_model_len=64)
    yield thread
    thread.shutdown(timeout=10)


@pytest.mark.parametrize("count", [90, pytest.param(5000, marks=pytest.mark.proof)])
def test_random_requests(real: EngineThread, count: int) -> None:
    """`count` random requests and no fewer, half of them wrong on purpose, to all operations: no 5xx, every
    answer as described; afterwards nothing is held and the canary says what it said at first."""
    app = create_app(real)
    client = TestClient(app, raise_server_exceptions=False)
    cold, seen = canary(client), Counter[str]()
    assert CHECKS  # the checks are loaded
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    operations = [operation.ok() for operation in schema.get_all_operations()]
    assert {operation.label for operation in operations} == {
        f"{method} {path}" for method, path in routes(app) if path != "/openapi.json"
    }
    with client:
        for number in count_from(1):
            # One without parameters has few requests to send; the others make up for it in later rounds.
            for operation in operations:
                seen[operation.label] += drive(client, operation, min(50, -(-count // 8)), number)
            if seen.total() >= count:
                break
        print(f"{seen.total()} cases: {dict(seen)}")
        assert min(seen[operation.label] for operation in operations) >= 1
        wait_for(lambda: real.stats()["blocks_held"] == 0)
        assert canary(client) == cold


def drive(client: TestClient, operation: Any, count: int, seed: int) -> int:
    """Send up to `count` requests to one operation and check each answer; returns how many there were."""
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    strategy = hypothesis.strategies.one_of(*(operation.as_strategy(generation_mode=mode) for mode in modes))
    sent = 0

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
        database=None,
    )
    @hypothesis.given(case=strategy)
    def send(case: Any) -> None:
        nonlocal sent
        answer = case.call(session=client)
        sent += 1
        assert answer.status_code < 500, (case.body, answer.text)
        case.validate_response(
            answer,
            checks=[status_code_conformance, content_type_conformance, response_schema_conformance],
        )

    send()
    return sent
