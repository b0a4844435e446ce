"""`octavo serve` as a process, for clients to talk to."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx


@contextmanager
def served(*options: str) -> Iterator[str]:
    """The URL of a server with these options; ended by SIGTERM, and cleanly."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    code = "import sys; from octavo.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "serve", *options, "--port", str(port)]
    environment = {name: value for name, value in os.environ.items() if name != "OCTAVO_API_KEY"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, f"{url}/health/ready")
        yield url
        process.terminate()
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors, errors
    finally:
        process.kill()
        process.wait()


def _wait(process: subprocess.Popen[str], url: str) -> None:
    end = time.monotonic() + 120
    while True:
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, "the server did not get ready in two minutes"
        time.sleep(0.1)
