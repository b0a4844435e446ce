"""Server-sent events, and the rule that work ends when its client leaves."""

from __future__ import annotations

import asyncio
import logging
import time
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
STILL_HERE = b": still here\n\n"
QUIET_SECONDS = 15.0
"""Of silence before a comment. Proxies commonly close a connection on which nothing comes for 30 to 60 s."""
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
    as an event `{"error": ...}`, and the stream ends there. Where nothing is to be said for QUIET_SECONDS, as
    while a request is queued, headers and a comment go out, which clients ignore and proxies count as life.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]  # the base class counted an empty body
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send_all(_Wire(send, self.raw_headers)))
        except ClientDisconnect:
            logger.debug("a client left its stream")

    async def _send_all(self, wire: _Wire) -> None:
        keeper = asyncio.create_task(wire.keep_alive())
        try:
            async with aclosing(self._events) as events:
                while (chunk := await self._next(events, wire)) is not None:
                    await wire.write(chunk)
                    # Neither a full queue nor a send need to wait: others, and a lost connection, get a turn.
                    await asyncio.sleep(0)
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        await wire.end()

    async def _next(self, events: AsyncGenerator[bytes, None], wire: _Wire) -> bytes | None:
        """The next event; a failure becomes the last one, as the generator is finished after it."""
        try:
            return await anext(events, None)
        except Exception as error:
            if not wire.begun:
                raise
            if not isinstance(error, OctavoError):
                logger.exception("a stream failed")
            return event(describe(error)[1])


class _Wire:
    """What goes to one client: headers before the first bytes, and comments in long silences."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers
        self._turn = asyncio.Lock()
        self._last = time.monotonic()
        self.begun = False

    async def write(self, data: bytes) -> None:
        """Send bytes of the body, once what is being sent has gone."""
        async with self._turn:
            await self._body(data, more=True)
            self._last = time.monotonic()

    async def end(self) -> None:
        """Send that nothing more comes."""
        await self._body(b"", more=False)

    async def _body(self, data: bytes, more: bool) -> None:
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def keep_alive(self) -> None:
        """Send a comment after each QUIET_SECONDS without a word, until cancelled."""
        while True:
            left = self._last + QUIET_SECONDS - time.monotonic()
            if left > 0:
                await asyncio.sleep(left)
            elif self._turn.locked():  # the client does not read
                await asyncio.sleep(QUIET_SECONDS)
            else:
                await self.write(STILL_HERE)
