"""The request bodies: every field that this server honours, with its type.

Types are strict: `true` is not 1 and "5" is not 5. A field that is absent or null keeps its default. What
a value may be (a temperature of at least 0, say) is for `SamplingParams` to judge, so that offline and
online use have one rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError

from octavo.engine.params import SamplingParams
from octavo.errors import InvalidRequest
from octavo.server.fields import (
    CHAT_REFUSALS,
    COMPLETION_REFUSALS,
    STREAM_OPTION_REFUSALS,
    Refusals,
    screen,
)

MAX_STOPS = 16
MAX_STOP_TOKEN_IDS = 256
MAX_REPORTED = 3
SAMPLING_FIELDS = (
    "n",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


# FailFast: a list of a million wrong items is one error, not a million.
StopStrings = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(max_length=MAX_STOPS),
    FailFast(),
    BeforeValidator(_as_list),
]
StopTokenIds = Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS), FailFast()]


class GenerationRequest(BaseModel):
    """What completions and chat have in common."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
    refusals: ClassVar[Refusals]

    model: str | None = None
    n: Annotated[int, Field(ge=1)] = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: StopStrings = []
    stop_token_ids: StopTokenIds = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    # Labels: they name the caller and change nothing in an answer.
    user: str | None = None

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Self:
        """Check a decoded JSON object. Raises InvalidRequest that names the first fields at fault."""
        fields = screen(data, cls.model_fields, cls.refusals)
        try:
            request = cls.model_validate(fields)
        except ValidationError as error:
            raise _invalid(error) from None
        request._check()
        return request

    def _check(self) -> None:
        if self.stream_options is None:
            return
        if not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
        options = screen(
            self.stream_options, ("include_usage",), STREAM_OPTION_REFUSALS, prefix="stream_options."
        )
        if not isinstance(options.get("include_usage", False), bool):
            raise InvalidRequest(
                "stream_options.include_usage must be true or false", param="stream_options.include_usage"
            )

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that carries the usage."""
        return bool(self.stream_options and self.stream_options.get("include_usage"))

    def sampling_params(self) -> SamplingParams:
        """The engine's parameters; fields that were not given keep the engine's defaults."""
        return SamplingParams(
            **{name: getattr(self, name) for name in SAMPLING_FIELDS if name in self.model_fields_set}
        )


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    refusals = COMPLETION_REFUSALS

    prompt: Any = None  # prompts.py reads it: four forms, and its errors must stay small
    echo: bool = False
    best_of: int | None = None

    def _check(self) -> None:
        super()._check()
        if self.best_of is not None and self.best_of != self.n:
            raise InvalidRequest(
                f"best_of is not supported by this server; leave it out or set it to n ({self.n})",
                param="best_of",
            )


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    refusals = CHAT_REFUSALS

    messages: Any = None  # messages.py reads it
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None

    def _check(self) -> None:
        super()._check()
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise InvalidRequest(
                f"max_tokens ({both[0]}) and max_completion_tokens ({both[1]}) differ; give one of them",
                param="max_completion_tokens",
            )

    def sampling_params(self) -> SamplingParams:
        if self.max_completion_tokens is None or self.max_tokens is not None:
            return super().sampling_params()
        # model_copy counts the updated field as given.
        renamed = self.model_copy(
            update={"max_tokens": self.max_completion_tokens, "max_completion_tokens": None}
        )
        return renamed.sampling_params()


def _invalid(error: ValidationError) -> InvalidRequest:
    """The first few faults in one line, without the input that caused them."""
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    parts = [f"{_path(fault['loc'])}: {fault['msg']}" for fault in faults[:MAX_REPORTED]]
    if len(faults) > MAX_REPORTED:
        parts.append(f"and {len(faults) - MAX_REPORTED} more")
    return InvalidRequest("; ".join(parts), param=str(faults[0]["loc"][0]))


def _path(loc: tuple[int | str, ...]) -> str:
    first, *rest = loc
    return str(first) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest)
