"""The settings of the HTTP server, apart from the engine's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerConfig:
    """How the HTTP API behaves.

    `api_key`: when set, every route but /health asks for `Authorization: Bearer <api_key>`.
    `max_open_sequences`: running and waiting together, over all requests; more are answered with 429.
    `max_body_bytes`: a larger request body is answered with 413.
    """

    api_key: str | None = None
    max_open_sequences: int = 576
    max_body_bytes: int = 16 * 1024 * 1024
