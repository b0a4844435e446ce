"""Fixtures: a fake engine thread, an in-process client, and a real server on a free port."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient

from octavo.server import create_app

from .fake_engine import FakeEngineThread


@pytest.fixture
def engine() -> FakeEngineThread:
    return FakeEngineThread()


@pytest.fixture
def client(engine: FakeEngineThread) -> Iterator[TestClient]:
    """The app without a network; a server error is an answer and not an exception."""
    with TestClient(create_app(engine), raise_server_exceptions=False) as client:
        yield client


Serve = Callable[..., str]


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The URL of a real server in a thread, stopped at the end."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        # Its own log configuration would keep the streams that pytest closes after the test.
        config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        try:
            wait_for(lambda: server.started)
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=10)


@pytest.fixture
def serve(engine: FakeEngineThread) -> Iterator[Serve]:
    """`serve(config) -> URL` of a real server in a thread; stopped after the test."""
    with ExitStack() as stack:
        yield lambda config=None: stack.enter_context(serving(create_app(engine, config)))


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Poll until `condition()`; fail after `seconds`, which is far more than a machine that is busy needs."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.01)
