"""What slow readers cost others: a normal stream's time alone, and beside clients that read nothing.

    python -m bench.slow_readers MODEL [--slow 500] [--half-open 200]

Starts `octavo serve MODEL`, takes the median time of a stream of 100 tokens, connects clients that ask for
four long answers with logprobs and never read, and others that send half a request, waits until the engine
is done with them, measures again, lets them go, and measures a third time: where the first and the last
differ by much, the machine was not quiet. The server itself closes what is half open after ten seconds
and cuts who reads nothing after sixty.
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
        held = hold(port, args.slow, slow_request())
        wait_until_computed(port)
        held += hold(port, args.half_open, b"POST /v1/completions HTTP/1.1\r\n")
        beside, present = measure(port, ROUNDS), sum(map(is_open, held))
        for sock in held:
            sock.close()
        time.sleep(1)
        after = measure(port, ROUNDS)
    finally:
        for sock in held:
            sock.close()
        server.terminate()
        server.wait()
    print(f"a stream of {BODY['max_tokens']} tokens, median of {ROUNDS}:")
    print(
        f"{alone * 1000:.1f} ms before, {after * 1000:.1f} after, {beside * 1000:.1f} beside {args.slow} slow"
    )
    print(f"readers and {args.half_open} half-open connections, of which {present} were there to the end:")
    print(f"{beside / min(alone, after):.2f} times the lesser")


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


def slow_request() -> bytes:
    """A request whose answer is more than the sockets' buffers hold."""
    data = json.dumps({**BODY, "n": 4, "max_tokens": 25, "logprobs": 20}).encode()
    return f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def hold(port: int, count: int, data: bytes) -> list[socket.socket]:
    """Connections that send `data` and nothing more, and read nothing."""
    held = []
    for _ in range(count):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.connect(("127.0.0.1", port))
        sock.sendall(data)
        held.append(sock)
    return held


def is_open(sock: socket.socket) -> bool:
    """Whether the server has not closed or cut the connection."""
    try:
        return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def wait_until_computed(port: int) -> None:
    """Until the engine has nothing to do: the answers then wait for readers."""
    while True:
        time.sleep(0.5)
        stats = httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).json()
        if not stats["num_running"] and not stats["num_waiting"]:
            return


if __name__ == "__main__":
    main()
