"""Memory for request bodies, over real sockets: a total that all share, and all of it given back."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from octavo.errors import InvalidRequest
from octavo.server import ServerConfig, create_app
from octavo.server.admission import Hold
from octavo.server.context import ServerContext
from octavo.server.run import HttpServer

from .conftest import wait_for
from .fake_engine import FakeEngineThread

URL = "/v1/completions"
LIMIT = 250_000


class Server:
    """A server on a free port whose bodies may take 100,000 bytes each and 250,000 together."""

    def __init__(self, engine: FakeEngineThread) -> None:
        app = create_app(engine, ServerConfig(max_body_bytes=100_000, max_body_memory=LIMIT))
        self.context: ServerContext = app.state.context
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = HttpServer(app, self._sock)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()
        self._sock.close()

    def connect(self, head: str, body: bytes = b"") -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        sock.sendall(f"POST {URL} HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode() + body)
        return sock

    def post(self, body: bytes) -> httpx.Response:
        return httpx.post(self.url + URL, content=body)


@pytest.fixture
def server(engine: FakeEngineThread) -> Iterator[Server]:
    engine.engine.max_model_len = 10**6
    running = Server(engine)
    yield running
    running.stop()


def body_of(size: int, **fields: Any) -> bytes:
    """A good body of exactly so many bytes."""
    bare = len(json.dumps({"prompt": "", "max_tokens": 1, **fields}))
    return json.dumps({"prompt": "a" * (size - bare), "max_tokens": 1, **fields}).encode()


def refused(answer: httpx.Response, more: int) -> None:
    """A 503 that names what is taken, the limit, what was wanted and the option, and says when."""
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "body_memory_full"
    assert all(part in error["message"] for part in (str(LIMIT), str(more), "--max-body-memory"))
    assert 1 <= int(answer.headers["retry-after"]) <= 600


def test_bodies_on_their_way(server: Server) -> None:
    """Three large bodies half sent leave no room for a fourth, but for a small one; who vanishes or ends
    gives its part back at once."""
    bodies, whole = server.context.bodies, body_of(90_000)
    parts = [server.connect("Content-Length: 90000", whole[:80_000]) for _ in range(3)]
    wait_for(lambda: bodies.taken == 240_000)
    refused(server.post(body_of(20_000)), 20_000)
    assert server.post(body_of(100)).status_code == 200
    assert httpx.get(server.url + "/health").status_code == 200
    parts[0].close()
    wait_for(lambda: bodies.taken == 160_000)
    assert server.post(body_of(20_000)).status_code == 200
    parts[1].sendall(whole[80_000:])
    assert parts[1].recv(100).startswith(b"HTTP/1.1 200")
    wait_for(lambda: bodies.taken == 80_000)
    parts[2].shutdown(socket.SHUT_WR)  # it will send no more
    wait_for(lambda: bodies.taken == 0)
    for sock in parts[1:]:
        sock.close()


def test_a_body_of_unknown_length(server: Server) -> None:
    """One that is sent in chunks is refused where it grows beyond what is left, and its part comes back."""
    whole = body_of(90_000)
    others = [server.connect("Content-Length: 90000", whole[:85_000]) for _ in range(2)]
    wait_for(lambda: server.context.bodies.taken == 170_000)
    answer = httpx.post(server.url + URL, content=(whole[at : at + 1000] for at in range(0, 90_000, 1000)))
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "body_memory_full"
    wait_for(lambda: server.context.bodies.taken == 170_000)
    for sock in others:
        sock.close()
    wait_for(lambda: server.context.bodies.taken == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_body_is_held_while_its_request_runs(
    server: Server, engine: FakeEngineThread, stream: bool
) -> None:
    """What was made of the bytes lives as long as the request: so does its account, until the client leaves
    or has its answer."""
    body = body_of(50_000, stream=stream)
    engine.stalled = True
    leaves = server.connect("Content-Length: 50000", body)
    stays = server.connect("Content-Length: 50000", body)
    wait_for(lambda: engine.running == 2)
    assert server.context.bodies.taken == 100_000
    leaves.close()
    wait_for(lambda: server.context.bodies.taken == 50_000)
    engine.stalled = False
    assert stays.recv(100).startswith(b"HTTP/1.1 200")
    wait_for(lambda: server.context.bodies.taken == 0)
    stays.close()


@pytest.mark.parametrize("body", [b"[" * 30_000, b'{"prompt": 5}', b'{"x": 1}', b""], ids=len)
def test_a_refused_body_comes_back(server: Server, body: bytes) -> None:
    """A body that is not understood is not held either."""
    assert server.post(body).status_code == 400
    wait_for(lambda: server.context.bodies.taken == 0)


def test_many_clients_in_every_state(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """However clients send, dawdle and vanish, what is held never passes the limit and ends at none."""
    take, peaks = Hold.take, list[int]()

    def watched(hold: Hold, count: int) -> None:
        take(hold, count)
        if hold._room is server.context.bodies:
            peaks.append(hold._room.taken)

    monkeypatch.setattr(Hold, "take", watched)

    def client(seed: int) -> str:
        rng = random.Random(seed)
        size = rng.randint(100, 100_000)
        body, cut = body_of(size), rng.choice((size, size, rng.randrange(size)))
        with server.connect(f"Content-Length: {size}\r\nConnection: close") as sock:
            try:
                for at in range(0, cut, 20_000):
                    sock.sendall(body[at : min(at + 20_000, cut)])
                return sock.recv(100).decode()[9:12] if cut == size else "left"
            except (ConnectionError, TimeoutError):
                return "closed"  # the answer came before all was sent

    with ThreadPoolExecutor(24) as threads:
        ends = list(threads.map(client, range(300)))
    assert {"200", "left"} <= set(ends) <= {"200", "503", "left", "closed"}
    assert max(peaks) <= LIMIT
    assert max(peaks) > LIMIT // 2
    wait_for(lambda: server.context.bodies.taken == 0)
    assert server.post(body_of(100_000)).status_code == 200


def test_less_than_one_body() -> None:
    """Memory that cannot hold one body of the largest size is refused when the server is made."""
    with pytest.raises(InvalidRequest, match=r"max_body_memory \(10 bytes\).*max_body_bytes \(20\)"):
        ServerConfig(max_body_bytes=20, max_body_memory=10)
