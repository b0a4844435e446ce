"""`octavo serve` as a process of its own, over a fake engine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from octavo.cli.main import main
from octavo.cli.serve import ready_text
from tests.server.conftest import wait_for
from tests.server.fake_engine import FakeEngineThread

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, sys, threading, time
from octavo.cli import loading
from octavo.cli.errors import CommandError
from octavo.cli.main import main
from tests.server.fake_engine import FakeEngineThread
thread = FakeEngineThread()
if "GO" in os.environ:  # prompt "a" gets one token, and the next once that file is there
    thread.hold_before, thread.hold_prompt = 1, "a"
    def go_on():
        while not os.path.exists(os.environ["GO"]):
            time.sleep(0.01)
        thread.hold_before = None
    threading.Thread(target=go_on, daemon=True).start()
def start(engine):
    thread.start()
    return thread
def load(config):
    if "HOLD" in os.environ:  # loading goes on until that file is there
        while not os.path.exists(os.environ["HOLD"]):
            time.sleep(0.01)
        if open(os.environ["HOLD"]).read():
            raise CommandError("the model cannot be read")
    print("loaded", flush=True)
    return thread.engine
loading.load_engine = load
loading.start_thread = start
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
def test_serves_until_a_signal(start: Start, port: int, tmp_path: Path, number: signal.Signals) -> None:
    """It prints the table, the URL and an example that works; a signal ends it cleanly with code 0."""
    go = tmp_path / "go"
    process = start("--port", str(port), GO=str(go))
    shown = read_until(process, "try: curl")
    url = f"http://127.0.0.1:{port}"
    assert "fake/model" in shown
    assert "off: only this machine can connect" in shown
    assert f"listening on {url} " in shown
    body = shown.rpartition("-d '")[2].rpartition("'")[0]
    # As curl sends it: a form by its content type.
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = httpx.post(f"{url}/v1/completions", content=body, headers=headers, timeout=60)
    assert answer.status_code == 200
    json = {"prompt": "a", "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=json, timeout=60) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        process.send_signal(number)
        read_until(process, "stopping: open requests")
        go.touch()
        assert "data: [DONE]" in list(lines)  # an open answer may finish
    out, err = process.communicate(timeout=60)
    assert out.endswith("end 0 True 0\n")
    assert process.returncode == 0
    assert access_only(err), err


def test_long_answers_are_cut(start: Start, port: int, tmp_path: Path) -> None:
    """After the grace time an open stream ends with an error event, and the process ends cleanly."""
    process = start("--port", str(port), "--drain-timeout", "0.3", GO=str(tmp_path / "never"))
    read_until(process, "try: curl")
    url = f"http://127.0.0.1:{port}/v1/completions"
    with httpx.stream("POST", url, json={"prompt": "a", "stream": True}, timeout=60) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        process.send_signal(signal.SIGTERM)
        assert "the engine was shut down" in [line for line in lines if line][-1]
    out, err = process.communicate(timeout=60)
    assert out.endswith("end 0 True 0\n")
    assert process.returncode == 0
    assert access_only(err), err


def access_only(err: str) -> bool:
    """Whether standard error holds nothing but the log's lines: requests, and the server's life."""
    expected = re.compile(r"\S+ \S+ INFO octavo\.(access request |server (ready|draining|stopped))")
    return all(expected.match(line) for line in err.splitlines()) and " stopped" in err


def test_loading(start: Start, port: int, tmp_path: Path) -> None:
    """The port answers before the model is loaded: alive, not ready; requests get a 503 until it is."""
    hold, url = tmp_path / "go", f"http://127.0.0.1:{port}"
    process = start("--port", str(port), HOLD=str(hold))
    wait_for(lambda: reachable(port), 60)
    assert httpx.get(f"{url}/health/live").json()["state"] == "loading"
    for path in ("/health/ready", "/health", "/v1/models"):
        assert httpx.get(url + path).status_code == 503
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 503
    assert "loading" in answer.json()["error"]["message"]
    hold.touch()
    read_until(process, "try: curl")
    assert httpx.get(f"{url}/health/ready").status_code == 200
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_loading_fails(start: Start, port: int, tmp_path: Path) -> None:
    """A model that cannot be loaded ends the process with one line, though the port was answering."""
    hold = tmp_path / "go"
    process = start("--port", str(port), HOLD=str(hold))
    wait_for(lambda: reachable(port), 60)
    hold.write_text("fail")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err == "octavo: error: the model cannot be read\n"


def test_signal_while_loading(start: Start, port: int, tmp_path: Path) -> None:
    """SIGTERM while the model is loading ends the process at once."""
    process = start("--port", str(port), HOLD=str(tmp_path / "never"))
    wait_for(lambda: reachable(port), 60)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_drain(start: Start, port: int, tmp_path: Path) -> None:
    """While draining, what is under way goes on, not ready is said, and new requests are refused."""
    go = tmp_path / "go"
    process = start("--port", str(port), GO=str(go))
    read_until(process, "try: curl")
    url = f"http://127.0.0.1:{port}"
    body = {"prompt": "a", "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{url}/health/ready").status_code == 503)
        assert httpx.get(f"{url}/health/live").json()["state"] == "draining"
        refused = httpx.post(f"{url}/v1/completions", json=body)
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
        go.touch()
        assert "data: [DONE]" in list(lines)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_second_signal_ends_the_drain(start: Start, port: int, tmp_path: Path) -> None:
    """A second signal does not wait for --drain-timeout; the open stream still ends with an error event."""
    process = start("--port", str(port), "--drain-timeout", "3600", GO=str(tmp_path / "never"))
    read_until(process, "try: curl")
    url = f"http://127.0.0.1:{port}/v1/completions"
    with httpx.stream("POST", url, json={"prompt": "a", "stream": True}, timeout=60) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        process.send_signal(signal.SIGTERM)
        read_until(process, "stopping: open requests")
        process.send_signal(signal.SIGTERM)
        assert '"error"' in [line for line in lines if line][-1]
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_api_keys_from_a_file(start: Start, port: int, tmp_path: Path) -> None:
    """--api-keys reads a file; every key of it opens the server, and their names are shown, not they."""
    path = tmp_path / "keys.toml"
    path.write_text('[[key]]\nname = "ann"\nkey = "s3cret"\n[[key]]\nname = "bob"\nkey = "other"\n')
    process = start("--port", str(port), "--api-keys", str(path))
    shown = read_until(process, "try: curl")
    assert "2 (ann, bob)" in shown
    assert "s3cret" not in shown
    url = f"http://127.0.0.1:{port}/v1/models"
    for key, status in (("s3cret", 200), ("other", 200), ("ann", 401)):
        assert httpx.get(url, headers={"Authorization": f"Bearer {key}"}).status_code == status


def test_tls(start: Start, port: int, tmp_path: Path) -> None:
    """With a certificate the server speaks HTTPS, and the printed URL says so."""
    cert, key = certificate(tmp_path)
    process = start("--port", str(port), "--tls-cert", str(cert), "--tls-key", str(key))
    assert f"https://127.0.0.1:{port}/v1" in read_until(process, "try: curl")
    trust = ssl.create_default_context(cafile=str(cert))
    assert httpx.get(f"https://localhost:{port}/health", verify=trust).status_code == 200


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--tls-cert", "x.pem"), "--tls-key"),
        (("--tls-cert", "x.pem", "--tls-key", "y.pem"), "x.pem"),
        (("--api-keys", "none.toml"), "none.toml"),
        (("--api-keys", "weights"), "--schedule fair"),
        (("--api-keys", "none.toml", "--api-key", "k"), "--api-keys"),
    ],
)
def test_bad_files(
    engine: FakeEngineThread,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    options: tuple[str, ...],
    named: str,
) -> None:
    """A missing or half given file is refused before anything is loaded, by its name."""
    path = tmp_path / "keys.toml"
    path.write_text('[[key]]\nname = "a"\nkey = "k"\nweight = 2\n')
    assert main(["serve", *(str(path) if option == "weights" else option for option in options)]) == 2
    assert named in capsys.readouterr().err
    assert engine.configs == []


def certificate(directory: Path) -> tuple[Path, Path]:
    """A self-signed certificate for localhost, made by openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    cert, key = directory / "cert.pem", directory / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return cert, key


def reachable(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_port_in_use(start: Start) -> None:
    """A taken port is one line that names the option, exit code 2, and no model is loaded for it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start("--port", str(taken.getsockname()[1]))
        out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "loaded" not in out
    assert err.startswith("octavo: error: ")
    assert len(err.splitlines()) == 1
    assert "--port" in err


def test_unknown_host(start: Start, port: int) -> None:
    """An address that is not this machine's is refused by the option's name."""
    process = start("--port", str(port), "--host", "192.0.2.1")
    _, err = process.communicate(timeout=60)
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
    assert "--max-queue" in httpx.post(url, json={"prompt": "a", "n": 3}).json()["error"]["message"]
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
