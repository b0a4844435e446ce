"""The request bodies: every field that this server honours, with its type.

Types are strict: `true` is not 1 and "5" is not 5. A field that is absent or null keeps its default. What
a value may be (a temperature of at least 0, say) is for `SamplingParams` to judge, so that offline and
online use have one rule.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError

from octavo.engine.params import MAX_BIASES, MAX_LOGPROBS, SamplingParams
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
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")
RESERVED_VARIABLES = ("messages", "tools", "add_generation_prompt", "self")
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
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "bad_words",
    "truncate_prompt_tokens",
)
"""Fields that are SamplingParams' own, by name and meaning."""


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
Label = Annotated[str, Field(min_length=1, max_length=256)]
StreamOptions = dict[str, Any]
_TOKEN_ID = re.compile(r"[0-9]{1,9}\Z")


class Schema(BaseModel):
    """A body: strict types, unknown fields refused, nulls as if left out."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
    refusals: ClassVar[Refusals] = {}

    model: str | None = None

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
        """What no single field's type says."""


class SampledRequest(Schema):
    """What every route that generates has in common."""

    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: StopStrings = []
    stop_token_ids: StopTokenIds = []
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_BIASES), FailFast()] = {}
    bad_words: Annotated[list[str], FailFast()] = []
    structured_outputs: dict[str, Any] | None = None
    cache_salt: Label | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31)] = 0
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Labels: they name the caller and change nothing in an answer.
    user: str | None = None

    stream_choices: ClassVar[tuple[str, ...]] = ()

    def _check(self) -> None:
        for token in self.logit_bias:
            if not _TOKEN_ID.match(token):
                raise InvalidRequest(f"logit_bias: {token[:40]!r} is no token id", param="logit_bias")
        if self.stream_options is None:
            return
        if not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
        options = screen(
            self.stream_options, self.stream_choices, STREAM_OPTION_REFUSALS, prefix="stream_options."
        )
        for name, value in options.items():
            if not isinstance(value, bool):
                raise InvalidRequest(
                    f"stream_options.{name} must be true or false", param=f"stream_options.{name}"
                )
        if self.continuous_usage and not self.include_usage:
            raise InvalidRequest(
                "stream_options.continuous_usage_stats needs include_usage to be true",
                param="stream_options.continuous_usage_stats",
            )

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that carries the usage."""
        return bool(self.stream_options and self.stream_options.get("include_usage"))

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of such a stream carries the usage so far."""
        return bool(self.stream_options and self.stream_options.get("continuous_usage_stats"))

    @property
    def names(self) -> dict[str, str]:
        """What the route calls a parameter of the engine, where that is another name."""
        return {}

    def sampling_params(self) -> SamplingParams:
        """The engine's parameters; fields that were not given keep the engine's defaults."""
        given = {name: getattr(self, name) for name in SAMPLING_FIELDS if name in self.model_fields_set}
        bias = {int(token): value for token, value in self.logit_bias.items()}
        return SamplingParams(**{**given, "logit_bias": bias, **self._further_params()})

    def _further_params(self) -> dict[str, Any]:
        """Parameters that a route makes of its own fields."""
        return {}


class GenerationRequest(SampledRequest):
    """What completions and chat have in common."""

    n: Annotated[int, Field(ge=1)] = 1
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool = False
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    stream_choices = STREAM_OPTIONS

    def _check(self) -> None:
        super()._check()
        if not self.use_beam_search:
            for name in ("length_penalty", "early_stopping"):
                if name in self.model_fields_set:
                    raise InvalidRequest(f"{name} needs use_beam_search to be true", param=name)

    def _further_params(self) -> dict[str, Any]:
        params: dict[str, Any] = {"prompt_logprobs": self.prompt_logprobs}
        if self.use_beam_search:
            params |= {"beam_width": self._beams(), "length_penalty": self.length_penalty}
            params |= {"early_stopping": self.early_stopping}
        return params

    @property
    def names(self) -> dict[str, str]:
        return {"beam_width": "use_beam_search"} if self.use_beam_search else {}

    def _beams(self) -> int:
        """How many beams a search has: as many as are given back, where no more are asked for."""
        return self.n


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    refusals = COMPLETION_REFUSALS

    prompt: Any = None  # prompts.py reads it: four forms, and its errors must stay small
    echo: bool = False
    best_of: int | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True

    def _check(self) -> None:
        super()._check()
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise InvalidRequest(
                "max_tokens is 0: give at least 1, or ask for echo or prompt_logprobs as well",
                param="max_tokens",
            )

    def _further_params(self) -> dict[str, Any]:
        scores = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            scores = max(scores or 0, self.logprobs)
        elif self.max_tokens == 0 and scores is None:
            scores = 0  # the engine computes nothing only for those
        params = super()._further_params() | {"logprobs": self.logprobs, "prompt_logprobs": scores}
        return params if self.use_beam_search else params | {"best_of": self.best_of}

    def _beams(self) -> int:
        return self.best_of if self.best_of is not None else self.n


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    refusals = CHAT_REFUSALS

    messages: Any = None  # messages.py reads it
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: Any = None  # tools/ reads these two
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    response_format: Any = None  # structured.py reads it
    service_tier: Literal["auto", "default"] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def _check(self) -> None:
        super()._check()
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise InvalidRequest(
                f"max_tokens ({both[0]}) and max_completion_tokens ({both[1]}) differ; give one of them",
                param="max_completion_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(
                f"top_logprobs must be an integer from 0 to {MAX_LOGPROBS}, got {self.top_logprobs}",
                param="top_logprobs",
            )
        check_variables(self.chat_template_kwargs)

    @property
    def names(self) -> dict[str, str]:
        names = {**super().names, "prompt": "messages", "logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None and self.max_tokens is None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    def _further_params(self) -> dict[str, Any]:
        wanted = (self.top_logprobs or 0) if self.logprobs else None
        return super()._further_params() | {"logprobs": wanted}

    def sampling_params(self) -> SamplingParams:
        if self.max_completion_tokens is None or self.max_tokens is not None:
            return super().sampling_params()
        # model_copy counts the updated field as given.
        renamed = self.model_copy(
            update={"max_tokens": self.max_completion_tokens, "max_completion_tokens": None}
        )
        return renamed.sampling_params()


class TokenizeRequest(Schema):
    """POST /tokenize: a prompt or messages."""

    prompt: str | None = None
    messages: Any = None
    tools: Any = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False

    def _check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give prompt or messages, one of them", param="prompt")
        check_variables(self.chat_template_kwargs)


class DetokenizeRequest(Schema):
    """POST /detokenize."""

    tokens: Any = None  # checked like a prompt: it may hold millions of items
    skip_special_tokens: bool = False


def check_variables(variables: Mapping[str, Any]) -> None:
    """Refuse chat_template_kwargs that would stand for other fields."""
    for name in variables:
        if name in RESERVED_VARIABLES:
            raise InvalidRequest(
                f"chat_template_kwargs must not hold {name!r}: it has a field of its own",
                param="chat_template_kwargs",
            )


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
