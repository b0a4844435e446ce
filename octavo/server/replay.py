"""The memory map's page over a recording: the same parts, and the frames as one file."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from octavo.engine import recording
from octavo.server import errors, memory_map
from octavo.server.errors import JsonResponse, dump_json

router = APIRouter()


def create_replay_app(path: Path) -> FastAPI:
    """The ASGI application for one recording, which is read now. Raises BadRecording."""
    app = FastAPI(title="Octavo replay", openapi_url=None, redirect_slashes=False)
    app.state.web = memory_map.load_web()
    app.state.lines = b"".join(dump_json(frame) + b"\n" for frame in recording.read(path))
    app.include_router(router)
    errors.install(app)
    return app


@router.get("/", response_model=None)
async def page(request: Request) -> Response:
    """The page."""
    return memory_map.part(request.app.state.web, "index.html")


@router.get("/memory/info", response_model=None)
async def info() -> Response:
    """A replay: no text, since a recording has none."""
    return JsonResponse({"mode": "replay", "show_text": False})


@router.get("/memory/recording", response_model=None)
async def frames(request: Request) -> Response:
    """The whole recording, a JSON object a line."""
    return Response(request.app.state.lines, media_type="application/x-ndjson")


@router.get("/memory/{name}", response_model=None)
async def part(request: Request, name: str) -> Response:
    """A script, a style or the icon."""
    return memory_map.part(request.app.state.web, name)
