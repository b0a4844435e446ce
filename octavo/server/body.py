"""From the bytes of a request body to a checked schema."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from fastapi import Request
from pydantic_core import from_json

from octavo.errors import InvalidRequest
from octavo.server.admission import Hold
from octavo.server.context import ServerContext
from octavo.server.errors import BodyMemoryFull, BodyTimeout, BodyTooLarge, UnsupportedEncoding
from octavo.server.schemas import Schema

Body = TypeVar("Body", bound=Schema)

INLINE_BYTES = 64 * 1024
"""A larger body is decoded in a thread, so that it does not hold up other clients' streams."""


async def read_request(request: Request, context: ServerContext, schema: type[Body]) -> Body:
    """Read, decode and check the body.

    Raises UnsupportedEncoding, BodyTimeout, BodyTooLarge, BodyMemoryFull, InvalidRequest, or
    ClientDisconnect.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise UnsupportedEncoding(
            f"the request body has content-encoding {encoding[:40]!r}; this server reads it only as it is"
        )
    seconds = context.config.body_seconds
    try:
        async with asyncio.timeout(seconds):
            body = await _read_bytes(request, context)
    except TimeoutError:
        raise BodyTimeout(f"the request body did not arrive within {seconds:g} s") from None
    if len(body) <= INLINE_BYTES:
        return _decode(body, schema)
    decoded: Body = await context.off_loop_for(len(body))(_decode, body, schema)
    return decoded


async def _read_bytes(request: Request, context: ServerContext) -> bytearray:
    """The body, each part of it on the request's account before the next is read."""
    hold: Hold = request.state.body
    announced = request.headers.get("content-length", "")
    if announced.isdecimal():
        _check(int(announced), int(announced), context)
    body = bytearray()
    async for chunk in request.stream():
        _check(len(body) + len(chunk), len(chunk), context)
        hold.take(len(chunk))
        body += chunk
    return body


def _check(length: int, more: int, context: ServerContext) -> None:
    """Raise when a body of `length` may never be read, or `more` bytes of it not now.

    What is announced is not set aside: who sends nothing takes nothing from others.
    """
    limit, bodies = context.config.max_body_bytes, context.bodies
    if length > limit:
        raise BodyTooLarge(
            f"the request body has {length} bytes or more, and this server reads {limit} (max_body_bytes)"
        )
    if bodies.missing(more):
        raise BodyMemoryFull(
            f"request bodies take {bodies.taken} of the {bodies.limit} bytes that this server holds of them "
            f"at once, and {more} more do not fit. Try again later, or start it with a larger "
            "--max-body-memory",
            bodies.seconds_until(more),
        )


def _decode(body: bytearray, schema: type[Body]) -> Body:
    try:
        data: Any = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidRequest("the request body must be a JSON object")
    return schema.parse(data)
