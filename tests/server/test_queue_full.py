"""A full queue over HTTP: 429 with Retry-After at once, places come back, and those admitted are served."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from octavo.sched import QueueFull
from octavo.server import errors


@pytest.mark.parametrize(
    ("seconds", "header"), [(None, "1"), (0.0, "1"), (2.2, "3"), (59.0, "59"), (1e9, "600")]
)
@pytest.mark.parametrize("refusal", [QueueFull, errors.QueueFull])
def test_a_full_queue_is_a_429_that_says_when(
    refusal: type[Exception], seconds: float | None, header: str
) -> None:
    """Status, type, code and a whole number of seconds, of the scheduler's refusal and the server's own."""
    app = FastAPI()
    errors.install(app)

    @app.get("/")
    def full() -> None:
        raise refusal("4 sequences wait", seconds)

    answer = TestClient(app).get("/")
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == header
    assert answer.json()["error"]["code"] == "queue_full"
    assert answer.json()["error"]["message"] == "4 sequences wait"
