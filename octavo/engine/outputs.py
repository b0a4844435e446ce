"""What the engine hands out: deltas as they come, and whole outputs."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SequenceDelta:
    """What one sequence gained in a step.

    text never splits a character and never shows any part of a stop string; it may be empty while
    more tokens are needed to know. finish_reason: "stop", "length", "abort" or None while it goes on.
    stop_reason: the stop string or stop token id that ended it, None for end-of-text.
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestDelta:
    """What one request gained in a step. With `error` set it is the last one."""

    request_id: int
    deltas: list[SequenceDelta]
    finished: bool
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    error: Exception | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One finished sequence. Its text is all the deltas' text."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class RequestOutput:
    """A finished request. num_cached_tokens: prompt tokens whose KV the cache had."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
