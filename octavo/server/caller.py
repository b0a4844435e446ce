"""Who makes a request: the key that it came with, what that allows, and its line in the log."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import Request

from octavo.engine.params import SamplingParams
from octavo.errors import InvalidRequest
from octavo.server.generation import Usage
from octavo.server.keys import ApiKey

logger = logging.getLogger("octavo.server")


@dataclass(frozen=True)
class Caller:
    """The key, None where none is asked for, the fields of the request's log line, and its body's size."""

    key: ApiKey | None = None
    request_id: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    body_bytes: int = 0

    @classmethod
    def of(cls, request: Request) -> Caller:
        """From what the middleware found out."""
        state = request.state
        return cls(getattr(state, "key", None), state.request_id, state.log, state.body.count)

    def check(self, params: SamplingParams) -> None:
        """Raise InvalidRequest when `params` ask for more than the key's max_tokens."""
        limit = self.key.max_tokens if self.key is not None else None
        if self.key is not None and limit is not None and (params.max_tokens or 0) > limit:
            raise InvalidRequest(
                f"max_tokens is {params.max_tokens}, and key {self.key.name!r} may ask for at most {limit}",
                param="max_tokens",
            )

    def bounded(self, params: SamplingParams, room: int) -> SamplingParams:
        """`params` for a prompt that leaves `room` tokens: where none were asked for, at most the key's
        max_tokens."""
        if self.key is None or self.key.max_tokens is None or params.max_tokens is not None or room < 1:
            return params
        return replace(params, max_tokens=min(self.key.max_tokens, room))

    def salt(self, given: str | None) -> str | None:
        """What separates cached prompts: the key's salt and the request's own, both where both are given."""
        parts = [self.key.salt if self.key is not None else None, given]
        return None if parts == [None, None] else json.dumps(parts)

    def note(self, usage: Usage) -> None:
        """Put the token counts in the log line."""
        body = usage.body()
        self.fields.update(
            prompt_tokens=body["prompt_tokens"],
            completion_tokens=body["completion_tokens"],
            cached_tokens=body["prompt_tokens_details"]["cached_tokens"],
        )

    def tell(self, prompts: list[Any], texts: list[str]) -> None:
        """Log what was asked and answered; only where the server was started to do so."""
        fields = {"request_id": self.request_id, "prompts": prompts, "texts": texts}
        logger.info("answered", extra={"fields": fields})
