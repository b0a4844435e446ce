"""Raw HTTP clients that behave badly on purpose: they leave, dawdle, or never say what they want."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections import Counter
from contextlib import suppress
from typing import Any

DROPS = ("at once", "queued", "prefill", "mid-stream")


def request_bytes(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    """A POST with that body, on a connection of its own."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def ask(port: int, body: dict[str, Any], drop: str | None, rng: random.Random) -> str:
    """One request; how it ended: the status, or dropped. A drop closes the connection with a reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request_bytes(body))
        await writer.drain()
        if drop is not None:
            if drop == "mid-stream":
                await reader.readuntil(b"\r\n\r\n")
                for _ in range(rng.randint(1, 4)):
                    with suppress(asyncio.IncompleteReadError):
                        await reader.readuntil(b"\n\n")
            elif drop != "at once":
                await asyncio.sleep(rng.uniform(0, 0.3 if drop == "queued" else 0.05))
            return "dropped"
        answer = await reader.read()
        status = answer.split(b" ", 2)[1].decode()
        if status == "200" and body.get("stream"):
            assert answer.rstrip().endswith(b"0") or b"data: [DONE]" in answer
        return status
    finally:
        sock = writer.get_extra_info("socket")
        if drop is not None and sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        writer.close()


def random_body(rng: random.Random) -> dict[str, Any]:
    """Short and long prompts, shared beginnings, one and four sequences, streamed and not."""
    prompt = [rng.randrange(4)] * rng.choice((3, 20, 60)) + [
        rng.randrange(200) for _ in range(rng.randint(1, 30))
    ]
    return {
        "prompt": prompt,
        "n": rng.choice((1, 1, 4)),
        "max_tokens": rng.randint(1, 24),
        "stream": rng.random() < 0.6,
        "ignore_eos": True,
    }


async def storm(port: int, count: int, connections: int, seed: int) -> Counter[str]:
    """`count` requests over `connections` at a time, a third of them dropped, in every state in turn."""
    rng, ends, left = random.Random(seed), Counter[str](), iter(range(count))

    async def worker() -> None:
        for number in left:
            body = random_body(rng)
            drop = DROPS[number // 3 % len(DROPS)] if number % 3 == 0 else None
            if drop == "mid-stream":
                body["stream"] = True
            if number % 12 == 0:
                body["n"] = 4
            ends[await ask(port, body, drop, rng)] += 1

    await asyncio.gather(*(worker() for _ in range(connections)))
    return ends
