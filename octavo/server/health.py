"""Health routes. They need no key and answer at once, whatever the engine does; to HEAD without a body.

GET /health/live    200 unless the engine is dead or hangs: then only a restart helps
GET /health/ready   200 while requests are taken: not while loading or draining
GET /health         as ready, with counts of sequences and blocks
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.server.context import ServerContext
from octavo.server.errors import EngineUnavailable, JsonResponse

router = APIRouter()


@router.api_route("/health", methods=["GET", "HEAD"], response_model=None)
async def health(request: Request) -> Response:
    """200 with the engine's counts while requests are taken, else 503."""
    context: ServerContext = request.app.state.context
    context.check(None)
    return JsonResponse({"status": "ok", **context.engine.stats()})


@router.api_route("/health/ready", methods=["GET", "HEAD"], response_model=None)
async def ready(request: Request) -> Response:
    """200 while requests are taken, else 503 that says why."""
    context: ServerContext = request.app.state.context
    context.check(None)
    return JsonResponse({"status": "ok", "state": context.state})


@router.api_route("/health/live", methods=["GET", "HEAD"], response_model=None)
async def live(request: Request) -> Response:
    """200 while loading, serving and draining; 503 when the engine is dead or hangs."""
    context: ServerContext = request.app.state.context
    state = context.state
    if state in ("dead", "stuck"):
        raise EngineUnavailable(f"the engine is {state}; restart the server")
    return JsonResponse({"status": "ok", "state": state})
