"""From the bytes of a request body to a checked schema."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from fastapi import Request
from pydantic_core import from_json

from octavo.errors import InvalidRequest
from octavo.server.context import ServerContext
from octavo.server.errors import BodyTimeout, BodyTooLarge
from octavo.server.schemas import Schema

Body = TypeVar("Body", bound=Schema)

INLINE_BYTES = 64 * 1024
"""A larger body is decoded in a thread, so that it does not hold up other clients' streams."""


async def read_request(request: Request, context: ServerContext, schema: type[Body]) -> Body:
    """Read, decode and check the body.

    Raises BodyTimeout, BodyTooLarge, InvalidRequest, or ClientDisconnect.
    """
    seconds = context.config.body_seconds
    try:
        async with asyncio.timeout(seconds):
            body = await _read_bytes(request, context.config.max_body_bytes)
    except TimeoutError:
        raise BodyTimeout(f"the request body did not arrive within {seconds:g} s") from None
    if len(body) <= INLINE_BYTES:
        return _decode(body, schema)
    return await context.off_loop(_decode, body, schema)


async def _read_bytes(request: Request, limit: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise _too_large(limit)
    return bytes(body)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is larger than the {limit} bytes that this server reads")


def _decode(body: bytes, schema: type[Body]) -> Body:
    try:
        data: Any = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidRequest("the request body must be a JSON object")
    return schema.parse(data)
