"""The API key: ASGI middleware that refuses a request before anything of it is read."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.errors import JsonResponse, Unauthorized, describe

OPEN_PATHS = frozenset({"/health"})
"""Probes carry no key, and /health tells no secret."""


class ApiKeyMiddleware:
    """Asks every path but OPEN_PATHS for `Authorization: Bearer <key>`, compared in constant time."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS or self._admits(scope):
            await self._app(scope, receive, send)
            return
        error = Unauthorized("send the API key of this server as 'Authorization: Bearer <key>'")
        status, body = describe(error)
        await JsonResponse(body, status_code=status, headers=error.headers)(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, given = value.partition(b" ")
                return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._key)
        return False
