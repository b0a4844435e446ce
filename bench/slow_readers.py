"""What slow readers cost others: a normal stream's time alone, and beside clients that read nothing.

    python -m bench.slow_readers MODEL [--slow 500] [--half-open 200]

Starts `octavo serve MODEL`, takes the median time of a stream of 100 tokens, connects clients that ask for
four long answers with logprobs and never read, and others that send half a request, waits until the engine
is done with them, and measures again. Prints both medians and their ratio.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time

import httpx

BODY = {"prompt": "A book", "max_tokens": 100, "temperature": 0, "ignore_eos": True, "stream": True}
ROUNDS = 40


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--slow", type=int, default=500)
    parser.add_argument("--half-open", type=int, default=200)
    args = parser.parse_args()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = int(sock.getsockname()[1])
    code = "import sys; from octavo.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "serve", args.model, "--port", str(port), "--max-queue", "10000"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    held: list[socket.socket] = []
    try:
        wait_until_ready(server, port)
        measure(port, 5)
        alone = measure(port, ROUNDS)
        held = hold(port, args.slow, args.half_open)
        wait_until_computed(port)
        beside = measure(port, ROUNDS)
    finally:
        for sock in held:
            sock.close()
        server.terminate()
        server.wait()
    print(f"a stream of {BODY['max_tokens']} tokens, median of {ROUNDS}: {alone * 1000:.1f} ms alone,")
    print(
        f"{beside * 1000:.1f} ms beside {args.slow} slow readers and {args.half_open} half-open connections:"
    )
    print(f"{beside / alone:.2f} times")


def wait_until_ready(server: subprocess.Popen[bytes], port: int) -> None:
    """Until requests are taken."""
    while True:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        if server.poll() is not None:
            raise SystemExit("the server ended")
        time.sleep(0.1)


def measure(port: int, rounds: int) -> float:
    """Median seconds of a stream from connect to its end."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        text = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=BODY, timeout=120).text
        times.append(time.perf_counter() - begin)
        assert text.endswith("data: [DONE]\n\n"), text[-300:]
    return statistics.median(times)


def hold(port: int, slow: int, half_open: int) -> list[socket.socket]:
    """Connections that will not read, and such that will not speak."""
    data = json.dumps({**BODY, "n": 4, "logprobs": 20}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    held = []
    for number in range(slow + half_open):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.connect(("127.0.0.1", port))
        sock.sendall(head + data if number < slow else head[:30])
        held.append(sock)
    return held


def wait_until_computed(port: int) -> None:
    """Until the engine has nothing to do: the answers then wait for readers."""
    while True:
        time.sleep(0.5)
        stats = httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).json()
        if not stats["num_running"] and not stats["num_waiting"]:
            return


if __name__ == "__main__":
    main()
