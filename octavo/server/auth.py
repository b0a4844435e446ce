"""ASGI middleware that asks for a key before anything of a request is read, and counts a key's requests."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.admission import Hold, Room
from octavo.server.errors import TooManyRequests, Unauthorized, answer_for
from octavo.server.keys import ApiKey, Keyring

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
"""Probes carry no key, and the health routes tell no secret."""


class ApiKeyMiddleware:
    """Lets a request through with its key in `scope["state"]["key"]`, or answers 401 or 429."""

    def __init__(self, app: ASGIApp, keys: Iterable[ApiKey]) -> None:
        self._app = app
        keys = tuple(keys)
        self._keyring = Keyring(keys)
        # Requests under way, by the name of a key that has a limit.
        self._rooms = {key.name: Room(key.max_concurrent) for key in keys if key.max_concurrent is not None}

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
        room = self._rooms.get(key.name)
        if scope["method"] != "POST" or room is None:
            await self._app(scope, receive, send)
            return
        if room.missing(1):
            busy = TooManyRequests(
                f"{room.taken} requests of key {key.name!r} are under way, which is the limit of "
                f"that key (max_concurrent = {room.limit}). Try again when one has ended",
                room.seconds_until(1),
            )
            await answer_for(busy)(scope, receive, send)
            return
        hold = Hold(room)
        hold.take(1)
        try:
            await self._app(scope, receive, send)
        finally:
            hold.give_back()


def _secret(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, given = value.partition(b" ")
            return bytes(given.strip()) if scheme.lower() == b"bearer" else b""
    return b""
