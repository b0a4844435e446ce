"""ASGI middleware that asks for a key before anything of a request is read, and counts a key's requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.errors import TooManyRequests, Unauthorized, answer_for
from octavo.server.keys import ApiKey, Keyring

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
"""Probes carry no key, and the health routes tell no secret."""


class ApiKeyMiddleware:
    """Lets a request through with its key in `scope["state"]["key"]`, or answers 401 or 429."""

    def __init__(self, app: ASGIApp, keys: Iterable[ApiKey]) -> None:
        self._app = app
        self._keyring = Keyring(keys)
        self._open: Counter[str] = Counter()  # requests under way, by the key's name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        key = self._keyring.find(_secret(scope))
        if key is None:
            error = Unauthorized("send an API key of this server as 'Authorization: Bearer <key>'")
            await answer_for(error)(scope, receive, send)
            return
        scope.setdefault("state", {})["key"] = key
        if scope["method"] != "POST" or key.max_concurrent is None:
            await self._app(scope, receive, send)
            return
        if self._open[key.name] >= key.max_concurrent:
            busy = TooManyRequests(
                f"{self._open[key.name]} requests of key {key.name!r} are under way, which is the limit of "
                f"that key (max_concurrent = {key.max_concurrent}). Try again when one has ended"
            )
            await answer_for(busy)(scope, receive, send)
            return
        with self._counted(key):
            await self._app(scope, receive, send)

    @contextmanager
    def _counted(self, key: ApiKey) -> Iterator[None]:
        self._open[key.name] += 1
        try:
            yield
        finally:
            self._open[key.name] -= 1


def _secret(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, given = value.partition(b" ")
            return bytes(given.strip()) if scheme.lower() == b"bearer" else b""
    return b""
