"""The live memory map: a page at /, its parts, and the stream of frames that it draws.

    GET /                      the page (web/index.html; no build step, nothing from other hosts)
    GET /memory/NAME           its scripts and styles
    GET /memory/info           what this server is: live or a replay, and what it may show
    GET /memory/events         server-sent events: a snapshot, then frames (docs/memory-map.md)
    GET /memory/block/ID       what a block holds: how many tokens; ids and text only with show_text

All of it asks for the API's key where there is one. A browser cannot send that header by itself, so here
the key is also taken as the password of HTTP's basic scheme, for which every browser has a prompt.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import AsyncGenerator
from contextlib import suppress
from importlib.resources import files

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.engine.feed import Feed
from octavo.errors import InvalidRequest
from octavo.server.errors import ApiError, JsonResponse
from octavo.server.stream import EventStream

router = APIRouter()

MAX_BEHIND = 100
"""Frames that a slow client may be behind before it is dropped; it comes back with a snapshot."""
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class NoSuchPart(ApiError):
    """A path under /memory/ that is none."""

    status = 404
    type = "invalid_request_error"


def load_web() -> dict[str, bytes]:
    """The page's parts by name, read once."""
    folder = files("octavo.server") / "web"
    return {
        item.name: item.read_bytes() for item in folder.iterdir() if item.name.rpartition(".")[2] in TYPES
    }


def part(web: dict[str, bytes], name: str) -> Response:
    """One part of the page. Raises NoSuchPart."""
    if name not in web:
        raise NoSuchPart(f"the memory map has no part {name[:80]!r}")
    kind = TYPES[name.rpartition(".")[2]]
    return Response(web[name], media_type=f"{kind}; charset=utf-8", headers=HEADERS)


@router.get("/", response_model=None)
async def page(request: Request) -> Response:
    """The page."""
    return part(request.app.state.web, "index.html")


@router.get("/memory/info", response_model=None)
async def info(request: Request) -> Response:
    """Live, and whether tokens may be shown."""
    return JsonResponse({"mode": "live", "show_text": request.app.state.context.config.show_text})


@router.get("/memory/events", response_model=None)
async def events(request: Request) -> Response:
    """A snapshot and every frame after it, as server-sent events, while the client stays."""
    request.app.state.context.check(None)
    return EventStream(frames(request.app.state.feed))


@router.get("/memory/block/{block}", response_model=None)
async def block(request: Request, block: int) -> Response:
    """What a block holds now."""
    request.app.state.context.check(None)
    feed: Feed = request.app.state.feed
    if not feed.recorder.attached:
        raise InvalidRequest("nobody watches the memory map: open /memory/events first")
    show = request.app.state.context.config.show_text
    answer = request.app.state.context.engine.ask(lambda: feed.recorder.contents(block, text=show))
    return JsonResponse(await asyncio.wrap_future(answer))


@router.get("/memory/{name}", response_model=None)
async def web_part(request: Request, name: str) -> Response:
    """A script, a style or the icon."""
    return part(request.app.state.web, name)


async def frames(feed: Feed) -> AsyncGenerator[bytes, None]:
    """Encoded events for one client. One that falls behind is dropped; the page connects again."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | None] = asyncio.Queue()

    def watcher(data: bytes | None) -> None:
        with suppress(RuntimeError):  # a loop that has gone has nobody left to tell
            loop.call_soon_threadsafe(queue.put_nowait, data)

    feed.subscribe(watcher)
    try:
        while True:
            data = await queue.get()
            if data is None or queue.qsize() > MAX_BEHIND:
                return
            yield b"data: " + data + b"\n\n"
    finally:
        feed.unsubscribe(watcher)


class BrowserKeyMiddleware:
    """Before the API's key is checked: on the map's paths, a basic password stands for a bearer key.

    Only there and only for GET: a browser repeats such a password by itself, and another site must not be
    able to have it spend tokens.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD") or not _is_map(scope["path"]):
            await self._app(scope, receive, send)
            return

        async def send_with_prompt(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 401:
                headers = [pair for pair in message["headers"] if pair[0].lower() != b"www-authenticate"]
                prompt = b'Basic realm="Octavo: any user name, the API key as password", charset="UTF-8"'
                message = {**message, "headers": [*headers, (b"www-authenticate", prompt)]}
            await send(message)

        headers = [_as_bearer(name, value) for name, value in scope["headers"]]
        await self._app({**scope, "headers": headers}, receive, send_with_prompt)


def _is_map(path: str) -> bool:
    return path == "/" or path.startswith("/memory/")


def _as_bearer(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    scheme, _, given = value.partition(b" ")
    if name != b"authorization" or scheme.lower() != b"basic":
        return name, value
    try:
        _, _, key = base64.b64decode(given, validate=True).partition(b":")
    except binascii.Error:
        return name, value
    return name, b"Bearer " + key


def install(app: FastAPI) -> None:
    """Add the routes to an application that sets `state.feed` when its engine is there."""
    app.state.web = load_web()
    app.include_router(router)
