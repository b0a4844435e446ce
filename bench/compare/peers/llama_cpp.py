"""llama.cpp's server over HTTP on 127.0.0.1; it computes with the weights as the GGUF file stores them.

Q4_1 is not its fastest: with AVX-512 it multiplies many rows in bfloat16 more than twice as fast. weights=
f32, f16 or bf16 runs the file as its own llama-quantize converts it, f32 without any loss.

Options: build=native (built here for this machine's instructions, the default) or wheel (xllamacpp, compiled
for AVX2, which also stands in, and says so, where the build fails), or server=PATH of a llama-server;
stream=true streams every answer; any other is one of llama-server's, without its dashes (flash-attn=off).
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.compare.client import Client, free_port

PACKAGE = "xllamacpp"
INSTALL = [["xllamacpp==2026.10.11549"]]
OWN = ("build", "server", "stream", "version", "weights", "model")


def label(options: dict[str, Any]) -> str:
    """The column's title."""
    kind = "AVX2 wheel" if options.get("build") == "wheel" else "native"
    rest = " ".join(f"{k}={v}" for k, v in options.items() if k not in OWN or k == "stream")
    weights = options.get("weights", "as stored")
    return " ".join(filter(None, (f"llama.cpp server ({weights}, {kind})", rest)))


def prepare(options: dict[str, Any], model: Path, root: Path) -> tuple[dict[str, Any], list[str]]:
    """Options with the server's path, built first; the wheel's and a note where that is impossible."""
    from bench.compare.install import InstallFailed
    from bench.compare.llama_build import VERSION, BuildFailed, converted, server

    kind, notes = options.get("weights"), []
    if options.get("build") != "wheel" and "server" not in options:
        try:
            options = {**options, "build": "native", "server": str(server(root)), "version": VERSION}
        except BuildFailed as error:
            options = {**options, "build": "wheel"}
            notes = [f"no native build, so the AVX2 wheel was run: {error}"]
    if kind is not None:
        if options["build"] != "native":
            raise InstallFailed(f"weights={kind} needs the native build's llama-quantize")
        try:
            options = {**options, "model": str(converted(root, model, kind))}
        except BuildFailed as error:
            raise InstallFailed(str(error)) from None
    return options, notes


class Engine:
    """The server, in this process (wheel) or as a child, and its client."""

    def __init__(self, setup: dict[str, Any]) -> None:
        options = setup["options"]
        port = free_port()
        self._stream = True if options.get("stream") else None
        self._server = None
        if "server" not in options:
            self.facts, self._client = self._embed(setup, port), Client(port)
            self._client.wait("/health")
            return
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the server
        child = subprocess.Popen(command(setup, port), stdout=self._log, stderr=subprocess.STDOUT)
        self.pids, self._client = [child.pid], Client(port, child)
        self.installed = {"MiB": Path(options["server"]).stat().st_size / 2**20, "packages": 1}
        try:
            self._client.wait("/health")
        except RuntimeError as error:
            self._client.close()
            raise RuntimeError(f"{error}: {self._said()[-300:]}") from None
        self.facts = {"version": options.get("version", options["server"])}
        built = re.search(r"system_info: .*", self._said())
        if built:
            self.facts["built for"] = built[0]
        self.facts["options"] = " ".join(command(setup, port)[3:])

    def run(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Post all requests at once."""
        return self._client.run(requests, "/completion", body, read, self._stream)

    def close(self) -> None:
        """End the child; the embedded server ends with the process."""
        self._client.close()

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def _embed(self, setup: dict[str, Any], port: int) -> dict[str, str]:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = setup["model"]
        params.n_ctx, params.kv_unified = context(setup)
        params.n_parallel = setup["slots"]
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = setup["threads"]
        params.n_cache_reuse = CACHE_REUSE
        params.hostnames, params.port = ["127.0.0.1"], port
        params.n_gpu_layers, params.verbosity = 0, 1  # errors only
        self._server = xllamacpp.Server(params)
        return {"version": xllamacpp.__version__, "built for": xllamacpp.get_system_info()}


_UNIFIED = ("--no-kv-unified", "--kv-unified")
UNIT = 256  # a slot's context is a multiple of so many tokens
CACHE_REUSE = 256  # tokens of a chunk that may be reused at another place


def context(setup: dict[str, Any]) -> tuple[int, bool]:
    """Tokens of the KV cache, and whether all slots share it.

    Shared, every sequence's attention reads the others' entries too, to mask them: W2 takes a sixth longer.
    So each slot has its own, long enough for any request, unless memory is limited.
    """
    if setup["kv_limited"]:
        return setup["kv_tokens"], True
    return setup["slots"] * -(-setup["max_len"] // UNIT) * UNIT, False


def command(setup: dict[str, Any], port: int) -> list[str]:
    """The command line; flash attention and the cache of prompts in memory are on by default."""
    threads = str(setup["threads"])
    words = [
        setup["options"]["server"],
        "-m",
        setup["options"].get("model", setup["model"]),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    size, unified = context(setup)
    words += ["-c", str(size), "-np", str(setup["slots"]), _UNIFIED[unified]]
    words += ["-t", threads, "-tb", threads, "--cache-reuse", str(CACHE_REUSE)]
    for name, value in setup["options"].items():
        if name not in OWN:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def body(request: dict[str, Any], stream: bool) -> dict[str, Any]:
    """Its own form of completion, as only that gives token ids back."""
    return {
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


def read(event: dict[str, Any]) -> tuple[int | None, list[tuple[int, list[int]]], str | None]:
    """See client.Read."""
    if "error" in event:
        return None, [], str(event["error"])[:200]
    # A stream's last event repeats nothing; a whole answer has all tokens, and is a list where n > 1.
    return event.get("tokens_evaluated"), [(event.get("index", 0), event.get("tokens", []))], None


if __name__ == "__main__":
    from bench.compare.llama_build import server as build

    print(build(Path(sys.argv[1])))
