"""Octavo as it is installed: `octavo serve MODEL` with its defaults, asked over HTTP on 127.0.0.1.

Options are those of the command without their dashes (weights=float32, kv-dtype=int8); stream=true streams
every answer. Only where a workload limits the KV cache is --num-blocks given.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

from bench.compare.client import Client, free_port

PACKAGE = "octavo"
INSTALL: list[list[str]] = []
BLOCK = 16
SHOWN = ("weights", "products", "KV dtype", "KV block", "KV capacity", "attention", "threads", "batch")


def label(options: dict[str, Any]) -> str:
    """The column's title: how the weights are computed with, then any other option."""
    rest = dict(options)
    weights = rest.pop("weights", "auto")
    title = {"float32": "Octavo f32", "auto": "Octavo"}.get(weights, f"Octavo {weights}")
    return " ".join([title, *(f"{k}={v}" for k, v in rest.items())])


def command(setup: dict[str, Any], port: int) -> list[str]:
    """The command line, without the interpreter."""
    words = ["-c", "import sys; from octavo.cli.main import main; sys.exit(main())"]
    words += ["serve", setup["model"], "--port", str(port), "--threads", str(setup["threads"])]
    if setup["kv_limited"]:
        words += ["--block-size", str(BLOCK), "--num-blocks", str(setup["kv_tokens"] // BLOCK)]
    for name, value in setup["options"].items():
        if name != "stream":
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


class Engine:
    """The server as a child process, and its client."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._stream = True if setup["options"].get("stream") else None
        port = free_port()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the server
        words = [sys.executable, *command(setup, port)]
        wide = {**os.environ, "COLUMNS": "500"}  # its table of what it runs with, without line breaks
        child = subprocess.Popen(words, stdout=self._log, stderr=subprocess.STDOUT, env=wide)
        self.pids = [child.pid]
        self._client = Client(port, child)
        try:
            self._client.wait("/health/ready")
        except RuntimeError as error:
            self._client.close()
            raise RuntimeError(f"{error}: {self._said()[-300:]}") from None
        found = dict(re.findall(r"^\W+(\w[\w ,]*?)\s*[│|]\s*(.*?)\s*[│|]?$", self._said(), re.M))
        self.facts = {"version": importlib.metadata.version("octavo")}
        self.facts |= {name: found[name] for name in SHOWN if name in found}

    def run(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Post all requests at once."""
        return self._client.run(requests, "/v1/completions", body, read, self._stream)

    def close(self) -> None:
        """End the server."""
        self._client.close()

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")


def body(request: dict[str, Any], stream: bool) -> dict[str, Any]:
    """An OpenAI completion of token ids, which answers with token ids."""
    asked = {name: request[name] for name in ("prompt", "max_tokens", "n", "temperature")}
    asked |= {"ignore_eos": True, "return_token_ids": True, "stream": stream}
    return asked | ({"stream_options": {"include_usage": True}} if stream else {})


def read(event: dict[str, Any]) -> tuple[int | None, list[tuple[int, list[int]]], str | None]:
    """See client.Read."""
    if "error" in event:
        return None, [], str(event["error"])[:200]
    pieces = [(choice["index"], choice.get("token_ids") or []) for choice in event["choices"]]
    return (event.get("usage") or {}).get("prompt_tokens"), pieces, None
