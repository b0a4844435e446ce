"""The real server under clients that leave, dawdle and hang: nothing leaks, and others are not slowed."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from octavo.engine import EngineThread
from octavo.server import ServerConfig, create_app
from octavo.server import protocol as server_protocol
from octavo.server.context import TEXT_THREADS
from octavo.server.run import HttpServer
from tests.engine.helpers import Hold

from .conftest import wait_for
from .http_load import ask, request_bytes, storm
from .tiny_chat import engine_thread, tiny_with_tools


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_with_tools(tmp_path_factory.mktemp("tiny"))


class Running:
    """A server on a free port, with a look at its event loop."""

    def __init__(self, engine: EngineThread) -> None:
        self.engine = engine
        self.app = create_app(engine, ServerConfig(max_open_sequences=5000))
        self.sock = socket.socket()
        self.sock.bind(("127.0.0.1", 0))
        self.port: int = self.sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = HttpServer(self.app, self.sock)
        self.server.start()

    def tasks(self) -> int:
        """Tasks of the server's loop, as the loop itself counts them."""
        found: list[int] = []
        loop = self.server.loop
        assert loop is not None
        loop.call_soon_threadsafe(lambda: found.append(len(asyncio.all_tasks(loop))))
        wait_for(lambda: bool(found))
        return found[0]

    def fill_threads(self) -> None:
        """Have the pool for texts start all its threads, which it else does when it needs them."""
        together = threading.Barrier(TEXT_THREADS + 1)
        for _ in range(TEXT_THREADS):
            self.app.state.context._threads.submit(together.wait)
        together.wait()

    def asked(self, count: int) -> None:
        """Wait until so many requests have come to the engine."""
        wait_for(lambda: self.engine.engine._next_id >= count)

    def idle(self) -> bool:
        """Whether nothing of any request is left in server or engine."""
        stats = self.engine.stats()
        return (
            stats["blocks_held"] == stats["num_running"] == stats["num_waiting"] == 0
            and self.app.state.context.under_way == 0
            and self.app.state.context.gate.open == 0
            and not self.engine._streams
        )

    def stop(self) -> None:
        self.server.stop()
        self.engine.shutdown(timeout=10)
        self.sock.close()


@pytest.fixture
def start(checkpoint: Path) -> Iterator[Callable[..., Running]]:
    """`start(**engine options)`; stopped after the test."""
    with ExitStack() as stack:

        def make(**options: object) -> Running:
            running = Running(engine_thread(checkpoint, **options))
            stack.callback(running.stop)
            return running

        yield make


@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=pytest.mark.proof)])
def test_leaving_in_every_state(start: Callable[..., Running], count: int) -> None:
    """`count` requests over 64 connections, a third dropped queued, in prefill, mid-stream, with n = 4:
    then nothing is held, no task is left, memory has not grown, and the pool is sound."""
    running = start(max_num_seqs=8, checked=False, num_blocks=300)
    before = running.tasks()
    running.fill_threads()
    asyncio.run(storm(running.port, max(150, count // 5), 64, seed=1))
    wait_for(running.idle)
    gc.collect()
    threads = threading.active_count()
    warm = psutil.Process().memory_info().rss
    ends = asyncio.run(storm(running.port, count, 64, seed=2))
    wait_for(running.idle)
    assert ends["dropped"] == -(-count // 3)
    assert ends["200"] == count - ends["dropped"]
    wait_for(lambda: running.tasks() <= before)
    gc.collect()
    grown = psutil.Process().memory_info().rss / warm
    print(f"{count} requests: {dict(ends)}; resident memory {warm >> 20} MiB, then {grown:.4f} times that")
    assert grown < 1.03
    assert threading.active_count() <= threads
    running.engine.engine.pool.check()
    assert (
        httpx.post(f"{running.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
    )


def test_a_queued_request_that_leaves_touches_no_other(start: Callable[..., Running]) -> None:
    """One sequence at a time: A runs, B waits and leaves; A's stream is the same as without B."""
    running = start(max_num_seqs=1)
    body = {"prompt": "A book", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
    alone = httpx.post(f"{running.url}/v1/completions", json=body).text

    def text(answer: str) -> str:
        chunks = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    scheduler = running.engine.engine.scheduler
    # A, well after its first text, while B comes and goes.
    hold = Hold(running.engine, lambda: any(len(branch.tokens) > 40 for branch in scheduler.running))
    with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        first = next(lines)
        with socket.create_connection(("127.0.0.1", running.port)) as other:
            other.sendall(request_bytes({"prompt": "B", "max_tokens": 50, "ignore_eos": True}))
            wait_for(lambda: len(scheduler.waiting) == 1)
        wait_for(lambda: not scheduler.waiting and running.app.state.context.under_way == 1)
        hold.go_on()
        rest = "\n".join([first, *lines])
    assert text(rest) == text(alone) != ""
    assert "[DONE]" in rest


def test_half_open_connections_are_closed(start: Callable[..., Running], monkeypatch) -> None:
    """A connection that says nothing, or half a request head, is closed after a while; a body that does
    not come is a 408; a good request meanwhile is answered, and a kept connection is not cut in the head."""
    connect, made = server_protocol.BoundedProtocol.connection_made, list[object]()

    def counted(protocol: server_protocol.BoundedProtocol, transport: asyncio.Transport) -> None:
        connect(protocol, transport)
        made.append(transport)

    monkeypatch.setattr(server_protocol.BoundedProtocol, "connection_made", counted)
    monkeypatch.setattr(server_protocol, "HEAD_SECONDS", 0.3)
    running = start()
    running.app.state.context.config = ServerConfig(body_seconds=0.3)
    silent, halves = (socket.create_connection(("127.0.0.1", running.port)) for _ in "ab")
    halves.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
    slow = socket.create_connection(("127.0.0.1", running.port))
    slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    wait_for(lambda: len(made) == 3)
    monkeypatch.setattr(server_protocol, "HEAD_SECONDS", 60.0)  # for those that are in order
    with httpx.Client(timeout=60) as kept:
        assert kept.get(f"{running.url}/health").status_code == 200
        for sock in (silent, halves):
            sock.settimeout(60)
            assert sock.recv(100) == b""
        assert kept.get(f"{running.url}/health").status_code == 200
    slow.settimeout(60)
    assert slow.recv(1000).startswith(b"HTTP/1.1 408")
    for sock in (silent, halves, slow):
        sock.close()
    wait_for(running.idle)


def test_a_reader_that_takes_nothing_is_cut(start: Callable[..., Running], monkeypatch) -> None:
    """A client that does not read its answer is cut after a while, and its request ends."""
    monkeypatch.setattr(server_protocol, "STALL_SECONDS", 0.3)
    running = start()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.connect(("127.0.0.1", running.port))
        body = {"prompt": ["a"] * 20, "n": 4, "ignore_eos": True, "stream": True, "logprobs": 20}
        sock.sendall(request_bytes(body))
        running.asked(20)
        wait_for(running.idle)


def test_slow_readers_and_half_open_connections(start: Callable[..., Running]) -> None:
    """Beside clients that read nothing and others that say nothing, a stream is what it was before."""
    running = start(max_num_seqs=64, checked=False, num_blocks=2000)
    body = {"prompt": "A book", "max_tokens": 60, "temperature": 0, "ignore_eos": True}

    def said() -> str:
        answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=None)
        assert answer.status_code == 200
        return answer.json()["choices"][0]["text"]

    alone, held = said(), list[socket.socket]()
    try:
        slow = request_bytes({**body, "n": 4, "logprobs": 20, "stream": True})
        for number in range(90):
            sock = socket.socket()
            held.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock.connect(("127.0.0.1", running.port))
            sock.sendall(slow if number < 60 else b"POST /v1/completions HTTP/1.1\r\n")
        wait_for(lambda: running.app.state.context.under_way == 60)
        assert said() == alone
        wait_for(lambda: running.app.state.context.gate.open == 0)
        assert said() == alone
    finally:
        for sock in held:
            sock.close()
    wait_for(running.idle)


def test_five_megabytes_do_not_stall(start: Callable[..., Running], monkeypatch) -> None:
    """While 5 MB of text are tokenized, health and a stream go on; the text is then refused as too long."""
    running = start()
    answers: list[httpx.Response] = []
    some_served, tokenizer = threading.Event(), running.engine.engine.tokenizer
    encode = tokenizer.encode

    def not_at_once(text: str, *args: Any, **more: Any) -> list[int]:
        if len(text) > 1000:
            assert some_served.wait(60)
        return encode(text, *args, **more)

    monkeypatch.setattr(tokenizer, "encode", not_at_once)
    huge = {"prompt": "The quick brown fox jumps over it. " * 150_000}

    def send() -> None:
        answers.append(httpx.post(f"{running.url}/v1/completions", json=huge, timeout=120))

    posted = threading.Thread(target=send)
    posted.start()
    served = 0
    while posted.is_alive():
        assert httpx.get(f"{running.url}/health", timeout=60).status_code == 200
        body = {"prompt": "a", "max_tokens": 3, "stream": True}
        assert "[DONE]" in httpx.post(f"{running.url}/v1/completions", json=body, timeout=60).text
        served += 1
        if served == 3:
            some_served.set()
    assert served >= 3
    assert answers[0].status_code == 400
    assert str(running.engine.engine.max_model_len) in answers[0].json()["error"]["message"]


def test_normal_close_while_waiting(start: Callable[..., Running]) -> None:
    """A client that closes in order, not by a reset, is noticed as well."""
    running = start(max_num_seqs=1)

    async def leave() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(request_bytes({"prompt": "a", "ignore_eos": True, "n": 4}))
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        await writer.wait_closed()
        assert await ask(running.port, {"prompt": "b", "max_tokens": 1}, None, random.Random(0)) == "200"

    asyncio.run(leave())
    wait_for(running.idle)


def test_a_slow_reader_holds_no_place(start: Callable[..., Running], monkeypatch) -> None:
    """Work that is done gives its places in the queue back, though its client has not read a byte."""
    running = start()
    gate = running.app.state.context.gate
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.connect(("127.0.0.1", running.port))
        body = {"prompt": ["a"] * 10, "n": 4, "max_tokens": 100, "ignore_eos": True, "stream": True}
        sock.sendall(request_bytes({**body, "logprobs": 20}))
        running.asked(10)
        wait_for(lambda: gate.open == 0)
        assert running.app.state.context.under_way == 1
    wait_for(running.idle)


@pytest.mark.parametrize(
    "junk", [b"hello\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000]
)
def test_what_is_no_http(start: Callable[..., Running], junk: bytes) -> None:
    """Bytes that are no HTTP request get an error object and the end of the connection."""
    running = start()
    with socket.create_connection(("127.0.0.1", running.port)) as sock:
        sock.settimeout(60)
        sock.sendall(junk)
        answer = b""
        while chunk := sock.recv(4096):
            answer += chunk
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_a_client_that_sends_ahead_and_leaves(start: Callable[..., Running]) -> None:
    """One that sends its next request before it has its answer is answered twice; one that leaves then ends
    its request; one that sends without end is cut."""
    running = start()
    short = {"prompt": "a", "ignore_eos": True, "max_tokens": 2}

    def send_two(**fields: object) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", running.port), timeout=60)
        body = {"prompt": "a", "ignore_eos": True, "n": 4, **fields}
        sock.sendall(request_bytes(body).replace(b"Connection: close\r\n", b""))
        wait_for(lambda: running.app.state.context.gate.open == 4)
        sock.sendall(request_bytes(short))
        return sock

    hold = Hold(running.engine)  # so that the first is under way when more comes
    with send_two(max_tokens=6) as patient:
        hold.go_on()
        answers = b""
        while chunk := patient.recv(4096):
            answers += chunk
    assert answers.count(b"HTTP/1.1 200") == 2
    Hold(running.engine)  # nothing ends by itself any more
    with send_two():
        time.sleep(0.2)  # the server has seen what came ahead, mostly
    wait_for(running.idle)
    with send_two() as floods, suppress(ConnectionError):
        while True:
            floods.sendall(b"x" * 10_000)
    wait_for(running.idle)


def test_a_refused_body_that_never_ends(start: Callable[..., Running], monkeypatch) -> None:
    """A client that goes on sending a body that was refused has its answer, and is closed after a while."""
    received = server_protocol.BoundedProtocol.data_received

    def then_hurry(protocol: server_protocol.BoundedProtocol, data: bytes) -> None:
        monkeypatch.setattr(server_protocol, "HEAD_SECONDS", 0.3)  # from the head on
        received(protocol, data)

    monkeypatch.setattr(server_protocol.BoundedProtocol, "data_received", then_hurry)
    running = start()
    running.app.state.context.config = ServerConfig(max_body_bytes=1000)
    with socket.create_connection(("127.0.0.1", running.port), timeout=60) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n")
        assert sock.recv(1000).startswith(b"HTTP/1.1 413")

        def cut() -> bool:
            try:
                sock.sendall(b" ")
            except ConnectionError:
                return True
            return False

        wait_for(cut)
