"""ASGI middleware around all routes: a name and a log line for every request, and no crash unanswered.

client -> RequestLog -> CORS -> API key -> BodyAccount -> CrashGuard -> routes
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.admission import Hold
from octavo.server.context import ServerContext
from octavo.server.errors import answer_for

access = logging.getLogger("octavo.access")
logger = logging.getLogger("octavo.server")

_LABEL = re.compile(rb"[\x21-\x7e]{1,128}\Z")
QUIET_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/metrics"})
"""Asked every few seconds by machines: logged at debug level."""


class RequestLog:
    """Gives every answer an `x-request-id`, the client's own label where it sent one, and logs one line.

    Routes add to `scope["state"]["log"]` what they know: tokens, finish reasons. Nothing of a prompt
    comes here. Also counts the POST requests that are under way, for the drain at the end.
    """

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        label = _request_id(scope)
        state = scope.setdefault("state", {})
        state["request_id"], state["log"] = label, {}
        record: dict[str, Any] = {"status": 0, "bytes": 0}

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record["status"] = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", label.encode())]
            elif message["type"] == "http.response.body":
                record["bytes"] += len(message.get("body", b""))
            await send(message)

        posted = scope["method"] == "POST"
        self._context.under_way += posted
        begin = time.perf_counter()
        try:
            await self._app(scope, receive, counted)
        finally:
            self._context.under_way -= posted
            self._log(scope, record, time.perf_counter() - begin)

    def _log(self, scope: Scope, record: dict[str, Any], seconds: float) -> None:
        state, client, key = scope["state"], scope.get("client"), scope["state"].get("key")
        fields = {
            "client": client[0] if client else None,
            "method": scope["method"],
            "path": scope["path"][:200],
            **record,
            "seconds": round(seconds, 4),
            "key": key.name if key is not None else None,
            "request_id": state["request_id"],
            **state["log"],
        }
        level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
        access.log(level, "request", extra={"fields": {k: v for k, v in fields.items() if v is not None}})


class BodyAccount:
    """Gives a request an account of what its body takes of the server's memory, `scope["state"]["body"]`,
    and closes it when the request has ended, however it does: what was made of the bytes lives as long."""

    def __init__(self, app: ASGIApp, context: ServerContext) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        hold = scope.setdefault("state", {})["body"] = Hold(self._context.bodies)
        try:
            await self._app(scope, receive, send)
        finally:
            hold.give_back()


class CrashGuard:
    """Turns an exception that no route expected into a 500 with an error body, and logs it.

    Innermost, so that such answers too have a request id, CORS headers and a log line.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except ClientDisconnect:
            logger.debug("a client left before its answer")
        except Exception as error:
            if started:
                raise  # half an answer is out: the connection must end
            logger.exception("a request failed in an unexpected way")
            await answer_for(error)(scope, receive, send)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _LABEL.match(value):
            return str(value.decode("ascii"))
    return f"req-{uuid.uuid4().hex}"
