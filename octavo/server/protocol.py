"""uvicorn's HTTP protocol with bounds that it lacks, so that idle connections cost nothing for long.

a connection whose request head is not complete within HEAD_SECONDS is closed
one that goes on sending a body that was answered, and refused, longer than that is closed too
one that takes no byte of its answer for STALL_SECONDS is cut, which ends its request
one that sends more while its request is answered stays watched, so that leaving ends the request; of what
it sends MAX_AHEAD bytes are kept for after the answer, more cut it
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from octavo.server.errors import dump_json, error_body

HEAD_SECONDS = 10.0
STALL_SECONDS = 60.0
MAX_AHEAD = 64 * 1024


class BoundedProtocol(H11Protocol):
    """One connection."""

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()
        self._watch_ahead()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._disarm_head()
        self._disarm_stall()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(STALL_SECONDS, self._cut)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._disarm_stall()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is refused like anything else, with an error object; the connection ends."""
        body = dump_json(error_body(msg, "invalid_request_error"))
        headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
        events = (
            h11.Response(status_code=400, headers=[*headers, ("connection", "close")], reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch_ahead(self) -> None:
        """uvicorn stops reading where a client sends its next request too early, and then would not notice
        that it leaves."""
        if not self.flow.read_paused or self.conn.their_state is not h11.DONE:
            return
        if len(self.conn.trailing_data[0]) > MAX_AHEAD:
            self._cut()
        else:
            self.flow.resume_reading()

    def _watch_head(self) -> None:
        """Run the timer while a request head is awaited, or the rest of a body that is answered already."""
        idle = self.cycle is not None and self.timeout_keep_alive_task is not None  # uvicorn's own timer runs
        unread = self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY
        if (self.conn.their_state is not h11.IDLE and not unread) or idle:
            self._disarm_head()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

    def _cut(self) -> None:
        self.transport.abort()  # close() would wait for the bytes that nobody takes

    def _disarm_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _disarm_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
