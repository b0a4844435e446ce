"""The application: all parts put together, and the routes about models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from octavo.engine.feed import Feed
from octavo.server import (
    chat,
    completions,
    errors,
    health,
    memory_map,
    metrics,
    openapi,
    responses,
    tokenization,
)
from octavo.server.auth import ApiKeyMiddleware
from octavo.server.config import ServerConfig
from octavo.server.context import ServerContext
from octavo.server.errors import JsonResponse
from octavo.server.heartbeat import beat
from octavo.server.middleware import BodyAccount, CrashGuard, RequestLog

if TYPE_CHECKING:
    from octavo.engine.thread import EngineThread

router = APIRouter()


def create_app(engine_thread: EngineThread | None, config: ServerConfig | None = None) -> FastAPI:
    """The ASGI application over an engine thread, which its owner starts and shuts down.

    Without one it says that it is loading, until `app.state.context.attach(engine_thread)`.
    """
    context = ServerContext(engine_thread, config or ServerConfig())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        beats = asyncio.create_task(beat(app.state))
        yield
        beats.cancel()
        context.close()

    # The pages that FastAPI adds would load scripts from other hosts and describe no body: off.
    app = FastAPI(title="Octavo", lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.state.context = context
    app.state.created = int(time.time())
    context.when_attached(lambda thread: setattr(app.state, "metrics", metrics.Metrics(thread.engine)))
    parts = (health, completions, chat, responses, tokenization, metrics, openapi)
    for routes in (router, *(part.router for part in parts)):
        app.include_router(routes)
    context.when_attached(lambda thread: setattr(app.state, "feed", Feed(thread)))
    if context.config.memory_map:
        memory_map.install(app)
    errors.install(app)
    # The last one added is the outermost.
    app.add_middleware(CrashGuard)
    app.add_middleware(BodyAccount, context=context)
    if context.config.keys:
        app.add_middleware(ApiKeyMiddleware, keys=context.config.keys)
        app.add_middleware(memory_map.BrowserKeyMiddleware)
    if context.config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=context.config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(RequestLog, context=context)
    return app


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
