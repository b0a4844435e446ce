"""The application: routes about the server itself, and all parts put together."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from octavo.server import chat, completions, errors, metrics
from octavo.server.auth import ApiKeyMiddleware
from octavo.server.config import ServerConfig
from octavo.server.context import ServerContext
from octavo.server.errors import EngineUnavailable, JsonResponse

if TYPE_CHECKING:
    from octavo.engine.thread import EngineThread

router = APIRouter()


def create_app(engine_thread: EngineThread, config: ServerConfig | None = None) -> FastAPI:
    """The ASGI application over an engine thread, which its owner starts and shuts down."""
    context = ServerContext(engine_thread, config or ServerConfig())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        context.close()

    # The pages that FastAPI adds would load scripts from other hosts and describe no body: off.
    app = FastAPI(title="Octavo", lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.state.context = context
    app.state.created = int(time.time())
    app.state.metrics = metrics.Metrics(engine_thread.engine)
    for part in (router, completions.router, chat.router, metrics.router):
        app.include_router(part)
    errors.install(app)
    if context.config.api_key is not None:
        app.add_middleware(ApiKeyMiddleware, api_key=context.config.api_key)
    return app


@router.get("/health", response_model=None)
async def health(request: Request) -> Response:
    """200 while the engine thread runs, 503 while it does not. Needs no key."""
    engine = request.app.state.context.engine
    if not engine.alive:
        raise EngineUnavailable("the engine is not running: still loading, stopped or dead")
    return JsonResponse({"status": "ok", **engine.stats()})


@router.get("/v1/models", response_model=None)
async def list_models(request: Request) -> Response:
    """The one model that is served."""
    return JsonResponse({"object": "list", "data": [_model(request)]})


@router.get("/v1/models/{name:path}", response_model=None)
async def get_model(request: Request, name: str) -> Response:
    """The served model by its name, or 404."""
    request.app.state.context.check_name(name)
    return JsonResponse(_model(request))


def _model(request: Request) -> dict[str, Any]:
    context: ServerContext = request.app.state.context
    return {
        "id": context.model_name,
        "object": "model",
        "created": request.app.state.created,
        "owned_by": "octavo",
        "max_model_len": context.engine.engine.max_model_len,
    }
