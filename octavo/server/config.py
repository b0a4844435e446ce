"""The settings of the HTTP server, apart from the engine's."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import InvalidRequest
from octavo.server.keys import ApiKey


@dataclass(frozen=True)
class ServerConfig:
    """How the HTTP API behaves.

    `keys`: with any, every route but the health routes asks for `Authorization: Bearer <key>`.
    `max_open_sequences`: running and waiting together, over all requests; more are answered with 429.
    `max_body_bytes`: a larger request body is answered with 413.
    `max_body_memory`: bytes of request bodies held at once, each from its first byte to the end of its
    request; a body that does not fit is answered with 503. At least `max_body_bytes`.
    `body_seconds`: how long a client may take to send a body; longer is answered with 408.
    `request_seconds`: how long a request may take, waiting included; longer ends with code request_timeout.
    `cors_origins`: web pages from these origins may read answers; "*" is any. None by default.
    `log_prompts`: write what was asked and answered to the log, which otherwise never holds any of it.
    `memory_map`: serve the live map of the KV cache at /. `show_text`: there, also what the blocks hold.
    `tool_format`: "hermes" or "llama" as the form of tool calls; "auto" looks at the chat template.
    """

    keys: tuple[ApiKey, ...] = ()
    max_open_sequences: int = 576
    max_body_bytes: int = 16 * 1024 * 1024
    max_body_memory: int = 256 * 1024 * 1024
    body_seconds: float = 60.0
    request_seconds: float = 3600.0
    cors_origins: tuple[str, ...] = ()
    log_prompts: bool = False
    tool_format: str = "auto"
    memory_map: bool = True
    show_text: bool = False

    def __post_init__(self) -> None:
        if self.max_body_memory < self.max_body_bytes:
            raise InvalidRequest(
                f"max_body_memory ({self.max_body_memory} bytes) is less than max_body_bytes "
                f"({self.max_body_bytes}), so such a body would never be read",
                param="max_body_memory",
            )
