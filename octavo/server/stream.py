"""Server-sent events, and the rule that work ends when its client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import OctavoError
from octavo.server.errors import describe, dump_json

logger = logging.getLogger("octavo.server")
T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not hold events back


def event(value: Any) -> bytes:
    """One server-sent event. JSON has no raw line break, so a single data line is enough."""
    return b"data: " + dump_json(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """One event under the name in its `type`, as Responses has them."""
    return b"event: " + str(value["type"]).encode() + b"\n" + event(value)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; when the client leaves first, cancel it and raise ClientDisconnect.

    Returns only after `work` has cleaned up, so nothing of it is left in the engine.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_client_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends an async generator of encoded events.

    Headers wait for the first event: an error before it is an ordinary HTTP error. A later one is sent
    as an event `{"error": ...}`, and the stream ends there.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]  # the base class counted an empty body
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send_all(send))
        except ClientDisconnect:
            logger.debug("a client left its stream")

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            while (chunk := await self._next(events)) is not None:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                # Neither a full queue nor a send need to wait: others, and a lost connection, get a turn.
                await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self, events: AsyncGenerator[bytes, None]) -> bytes | None:
        """The next event; a failure becomes the last one, as the generator is finished after it."""
        try:
            return await anext(events, None)
        except OctavoError as error:
            return event(describe(error)[1])
        except Exception as error:
            logger.exception("a stream failed")
            return event(describe(error)[1])
