"""`octavo serve` as a process of its own, over a fake engine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from octavo.cli.main import main
from octavo.cli.serve import ready_text
from tests.server.fake_engine import FakeEngineThread

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, sys
from octavo.cli import loading, serve
from octavo.cli.main import main
from tests.server.fake_engine import FakeEngineThread
thread = FakeEngineThread(delay=0.1)
def start(engine):
    thread.start()
    return thread
loading.load_engine = lambda config: print("loaded", flush=True) or thread.engine
loading.start_thread = start
serve.GRACE_SECONDS = float(os.environ.get("GRACE", serve.GRACE_SECONDS))
code = main(sys.argv[1:])
print("end", code, thread.stopped, thread.running, flush=True)
sys.exit(code)
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start `octavo serve` with these options; killed after the test if it still runs."""
    with ExitStack() as stack:

        def run(*options: str, **variables: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, "serve", *options],
                cwd=ROOT,
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield run


@pytest.fixture
def port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Standard output up to the line that holds `text`."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"no {text!r} in: {seen}{process.stderr.read() if process.stderr else ''}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serves_until_a_signal(start: Start, port: int, number: signal.Signals) -> None:
    """It prints the table, the URL and an example that works; a signal ends it cleanly with code 0."""
    process = start("--port", str(port))
    shown = read_until(process, "try: curl")
    url = f"http://127.0.0.1:{port}"
    assert "fake/model" in shown
    assert "off: only this machine can connect" in shown
    assert f"listening on {url} " in shown
    body = shown.rpartition("-d '")[2].rpartition("'")[0]
    # As curl sends it: a form by its content type.
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = httpx.post(f"{url}/v1/completions", content=body, headers=headers)
    assert answer.status_code == 200
    with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "a", "stream": True}) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        process.send_signal(number)
        assert "data: [DONE]" in list(lines)  # an open answer may finish
    out, err = process.communicate(timeout=10)
    assert out.endswith("end 0 True 0\n")
    assert (process.returncode, err) == (0, "")


def test_long_answers_are_cut(start: Start, port: int) -> None:
    """After the grace time an open stream ends with an error event, and the process ends cleanly."""
    process = start("--port", str(port), GRACE="0.3")
    read_until(process, "try: curl")
    url = f"http://127.0.0.1:{port}/v1/completions"
    with httpx.stream("POST", url, json={"prompt": "a", "stream": True}) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        process.send_signal(signal.SIGTERM)
        assert "the engine was shut down" in [line for line in lines if line][-1]
    out, err = process.communicate(timeout=10)
    assert out.endswith("end 0 True 0\n")
    assert (process.returncode, err) == (0, "")


def test_port_in_use(start: Start) -> None:
    """A taken port is one line that names the option, exit code 2, and no model is loaded for it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start("--port", str(taken.getsockname()[1]))
        out, err = process.communicate(timeout=10)
    assert process.returncode == 2
    assert "loaded" not in out
    assert err.startswith("octavo: error: ")
    assert len(err.splitlines()) == 1
    assert "--port" in err


def test_unknown_host(start: Start, port: int) -> None:
    """An address that is not this machine's is refused by the option's name."""
    process = start("--port", str(port), "--host", "192.0.2.1")
    _, err = process.communicate(timeout=10)
    assert process.returncode == 2
    assert "--host" in err


def test_api_key_from_the_environment(start: Start, port: int) -> None:
    """OCTAVO_API_KEY sets the key without showing it on the command line or in the output."""
    process = start("--port", str(port), OCTAVO_API_KEY="s3cret")
    shown = read_until(process, "try: curl")
    assert "s3cret" not in shown
    assert "$OCTAVO_API_KEY" in shown
    url = f"http://127.0.0.1:{port}/v1/models"
    assert httpx.get(url).status_code == 401
    assert httpx.get(url, headers={"Authorization": "Bearer s3cret"}).status_code == 200


@pytest.mark.parametrize("key", ["", " ", " x"])
def test_bad_api_key(engine: FakeEngineThread, capsys: pytest.CaptureFixture[str], key: str) -> None:
    """An empty key would let nobody or everybody in: refused at the start."""
    assert main(["serve", "--api-key", key]) == 2
    assert "--api-key" in capsys.readouterr().err
    assert engine.configs == []


def test_queue_limit_counts_running_and_waiting(start: Start, port: int) -> None:
    """--max-num-seqs 1 --max-queue 1 takes two sequences; a third is a 400 that names --max-queue."""
    process = start("--port", str(port), "--max-num-seqs", "1", "--max-queue", "1")
    read_until(process, "try: curl")
    url = f"http://127.0.0.1:{port}/v1/completions"
    begin = time.monotonic()
    assert "--max-queue" in httpx.post(url, json={"prompt": "a", "n": 3}).json()["error"]["message"]
    assert time.monotonic() - begin < 1
    assert httpx.post(url, json={"prompt": "a", "n": 2, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("0.0.0.0", "http://127.0.0.1:80/v1"),
        ("::", "http://[::1]:80/v1"),
        ("::1", "http://[::1]:80/v1"),
        ("box", "http://box:80/v1"),
    ],
)
def test_ready_text(host: str, shown: str) -> None:
    """The printed URL can be opened: a wildcard address is shown as this machine's own."""
    assert shown in ready_text(host, 80, False)
