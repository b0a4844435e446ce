"""The fields of POST /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from octavo.errors import InvalidRequest
from octavo.server.fields import Refusals, screen
from octavo.server.schemas import SampledRequest

LOGPROBS = "message.output_text.logprobs"
MAX_METADATA = 16
REFUSALS: Refusals = {
    "background": (False,),
    "context_management": (),
    "conversation": (),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
    "reasoning": ({}, {"effort": "none"}, {"effort": None}, {"effort": None, "summary": None}),
    "store": (False,),
}
_TEXT: Refusals = {"verbosity": ("medium",)}


class ResponsesRequest(SampledRequest):
    """POST /v1/responses."""

    refusals: ClassVar[Refusals] = REFUSALS

    input: Any = None  # input.py reads it
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    include: list[str] = Field(default_factory=list)
    top_logprobs: int | None = None
    text: dict[str, Any] = Field(default_factory=dict)
    tools: Any = None  # ../tools reads these two
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    truncation: Literal["disabled"] = "disabled"
    service_tier: Literal["auto", "default"] | None = None
    metadata: dict[str, str] = Field(default_factory=dict, max_length=MAX_METADATA)
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def with_logprobs(self) -> bool:
        """Whether the output text carries logprobs."""
        return LOGPROBS in self.include or bool(self.top_logprobs)

    @property
    def names(self) -> dict[str, str]:
        return {"prompt": "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}

    def _check(self) -> None:
        super()._check()
        for name in self.include:
            if name != LOGPROBS:
                raise InvalidRequest(
                    f"include may hold {LOGPROBS!r} only; {name[:64]!r} is not supported by this server",
                    param="include",
                )
        screen(self.text, ("format",), _TEXT, prefix="text.")

    def _further_params(self) -> dict[str, Any]:
        params: dict[str, Any] = {"max_tokens": self.max_output_tokens}
        return params | {"logprobs": (self.top_logprobs or 0) if self.with_logprobs else None}
