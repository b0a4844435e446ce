"""A server as a child process and its client over HTTP on 127.0.0.1: the same for every peer that serves.

Standard library only. One thread a request, which sleeps in a read until its answer comes; an answer is
streamed only where its first token's time is wanted, so that the client takes next to no CPU of its own.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

START_LIMIT_S = 180
STOP_LIMIT_S = 30

# event -> (prompt tokens or None, [(sample, token ids)], error or None)
Read = Callable[[dict[str, Any]], tuple[int | None, list[tuple[int, list[int]]], str | None]]


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Client:
    """Requests to a server that listens on `port` of this machine; `child` is its process, if it has one."""

    def __init__(self, port: int, child: subprocess.Popen[bytes] | None = None) -> None:
        self._port, self._child = port, child

    def wait(self, path: str) -> None:
        """Until a GET of `path` is answered with 200. Raises RuntimeError when that does not come."""
        limit = time.monotonic() + START_LIMIT_S
        while time.monotonic() < limit:
            if self._child is not None and self._child.poll() is not None:
                raise RuntimeError(f"the server ended with status {self._child.returncode}")
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
                connection.request("GET", path)
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            finally:
                connection.close()
            time.sleep(0.02)
        raise RuntimeError(f"the server was not ready in {START_LIMIT_S} s")

    def close(self) -> None:
        """End the child, by force when it does not by itself."""
        if self._child is None:
            return
        self._child.terminate()
        try:
            self._child.wait(timeout=STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def run(
        self,
        requests: list[dict[str, Any]],
        path: str,
        body: Callable[[dict[str, Any], bool], dict[str, Any]],
        read: Read,
        stream: bool | None = None,
    ) -> list[dict[str, Any]]:
        """Post all requests at once. `stream` None: only a single request with a single sample."""
        if stream is None:
            stream = len(requests) == 1 and requests[0]["n"] == 1
        bodies = [json.dumps(body(request, stream)) for request in requests]
        start = time.perf_counter()
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(
                pool.map(
                    lambda pair: self._post(path, pair[0]["n"], pair[1], read, start), zip(requests, bodies)
                )
            )

    def _post(self, path: str, n: int, body: str, read: Read, start: float) -> dict[str, Any]:
        answer: dict[str, Any] = {"prompt": None, "tokens": [[] for _ in range(n)]}
        answer |= {"first": None, "end": None, "error": None}
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            streamed = "event-stream" in (response.getheader("Content-Type") or "")
            for event in _events(response if streamed else [response.read()]):
                prompt, pieces, error = read(event)
                answer["prompt"] = prompt if prompt is not None else answer["prompt"]
                answer["error"] = error or answer["error"]
                for sample, ids in pieces:
                    answer["tokens"][sample] += ids
                if any(ids for _, ids in pieces):
                    answer["end"] = time.perf_counter() - start
                    if streamed and answer["first"] is None:
                        answer["first"] = answer["end"]
            if response.status != 200:
                answer["error"] = answer["error"] or f"status {response.status}"
        except (OSError, http.client.HTTPException) as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        if answer["end"] is None:
            answer["end"] = time.perf_counter() - start
        return answer


def _events(lines: Iterable[bytes]) -> Iterable[dict[str, Any]]:
    """The JSON objects of a body or of a stream's data lines; a list counts as its items."""
    for line in lines:
        text = line.removeprefix(b"data: ").strip()
        if text[:1] in (b"{", b"["):
            found = json.loads(text) if not text.startswith(b"[DONE]") else []
            yield from found if isinstance(found, list) else [found]
