"""Typed errors of the HTTP layer, and the one place that turns any error into an answer.

Every error has the body `{"error": {"message", "type", "param", "code"}}`. Input is never echoed at
length, so a small bad request cannot produce a large answer.
"""

from __future__ import annotations

import json
import logging
import math
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from octavo import sched
from octavo.engine.errors import EngineDead
from octavo.errors import InvalidRequest, OctavoError

logger = logging.getLogger("octavo.server")

MAX_MESSAGE_CHARS = 4000
MAX_RETRY_SECONDS = 600
CLIENT_LEFT = 499
"""nginx's status for a client that left before the answer; nobody receives it."""


class ApiError(OctavoError):
    """An error that fixes its own HTTP status."""

    status = 500
    type = "server_error"
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] | None = None


class Unauthorized(ApiError):
    """No API key, or not the right one."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"
    headers = {"WWW-Authenticate": "Bearer"}  # noqa: RUF012


class UnknownModel(ApiError):
    """A model name that this server does not serve."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"
    param = "model"


class BodyTooLarge(ApiError):
    """More request body than the server reads."""

    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class UnsupportedEncoding(ApiError):
    """A body that is compressed: how much it would become cannot be known before it is read."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_encoding"


class Busy(ApiError):
    """What the request needs is in use; trying later helps. retry_after: in how many seconds, likely."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(Busy):
    """As many sequences are open as may be."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class TooManyRequests(Busy):
    """A key has as many requests under way as it may have."""

    status = 429
    type = "rate_limit_error"
    code = "too_many_requests"


class BodyMemoryFull(Busy):
    """The bodies of other requests fill the memory that is set aside for them."""

    status = 503
    code = "body_memory_full"


class BodyTimeout(ApiError):
    """The client took too long to send its request."""

    status = 408
    type = "invalid_request_error"
    code = "body_timeout"
    headers = {"Connection": "close"}  # noqa: RUF012


class RequestTimeout(ApiError):
    """The request took longer than the server lets any take."""

    status = 504
    code = "request_timeout"


class EngineFailure(ApiError):
    """The engine gave up on this request."""

    code = "engine_failure"


class EngineUnavailable(ApiError):
    """The engine takes no requests: still loading, draining, stopped, stuck or dead."""

    status = 503
    code = "engine_unavailable"
    headers = {"Retry-After": "5"}  # noqa: RUF012


def error_body(message: str, type: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The OpenAI error object."""
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + " ..."
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """The HTTP status and the body for any error. What is not ours is logged and not shown."""
    if isinstance(error, ApiError):
        return error.status, error_body(str(error), error.type, error.param, error.code)
    if isinstance(error, InvalidRequest):
        return 400, error_body(str(error), "invalid_request_error", error.param, error.code)
    if isinstance(error, EngineDead):
        return EngineUnavailable.status, error_body(str(error), "server_error", code=EngineUnavailable.code)
    if isinstance(error, sched.QueueFull):
        return QueueFull.status, error_body(str(error), QueueFull.type, code=QueueFull.code)
    if isinstance(error, OctavoError):
        logger.error("a request failed: %s", error, exc_info=error)
        return 500, error_body(str(error), "server_error")
    if isinstance(error, HTTPException):
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        return error.status_code, error_body(str(error.detail), kind)
    return 500, error_body("internal error; the server's log has the details", "server_error")


def dump_json(value: Any) -> bytes:
    """Compact JSON in UTF-8. Refuses NaN and infinity, and never fails on a lone surrogate."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


class JsonResponse(Response):
    """An answer made by `dump_json`."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dump_json(content)


async def _answer(request: Request, error: Exception) -> Response:
    return answer_for(error)


def answer_for(error: Exception) -> Response:
    """The HTTP answer for any error."""
    status, body = describe(error)
    headers = getattr(error, "headers", None)
    if isinstance(error, (Busy, sched.QueueFull)):
        seconds = min(max(1, math.ceil(error.retry_after or 1)), MAX_RETRY_SECONDS)
        headers = {"Retry-After": str(seconds)}
    return JsonResponse(body, status_code=status, headers=headers)


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)


def install(app: FastAPI) -> None:
    """Make every error of `app` an OpenAI error body."""
    app.add_exception_handler(OctavoError, _answer)
    app.add_exception_handler(HTTPException, _answer)
    app.add_exception_handler(ClientDisconnect, _client_left)
