"""How to sample: the parameters of a request, checked where they enter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import InvalidRequest

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: logits divided by less overflow float32."""

MAX_STOPS = 64
MAX_STOP_CHARS = 1000


@dataclass(frozen=True)
class SamplingParams:
    """What to sample and when to stop.

    n: sequences per prompt. max_tokens: per sequence; None takes the room that the context leaves.
    min_tokens: no end-of-text, stop token or stop string before these. temperature: 0 is greedy.
    top_k: keep the k likeliest, 0 or -1 keeps all. top_p: keep the smallest set with that much
    probability. min_p: keep tokens with at least that share of the likeliest one's probability.
    seed: with one, the same tokens whatever else the engine serves; without, each run differs.
    stop: strings that end the text and are left out of it. stop_token_ids: likewise for tokens.
    ignore_eos: go on past end-of-text. Raises InvalidRequest, naming the parameter.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        _integer("n", self.n, 1, 2**16)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31)
        _integer("min_tokens", self.min_tokens, 0, 2**31)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}"
            raise InvalidRequest(message, param="min_tokens")
        _number("temperature", self.temperature, 0.0, math.inf)
        _integer("top_k", self.top_k, -1, 2**31)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise InvalidRequest("top_p must be above 0 and at most 1, got 0", param="top_p")
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64)
        self._check_stops(stops)

    def _check_stops(self, stops: tuple[str, ...]) -> None:
        if len(stops) > MAX_STOPS:
            raise InvalidRequest(
                f"stop has {len(stops)} strings, at most {MAX_STOPS} are taken", param="stop"
            )
        for text in stops:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
                message = f"each stop must be a string of 1..{MAX_STOP_CHARS} characters, got {text!r:.80}"
                raise InvalidRequest(message, param="stop")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_BELOW


def _integer(name: str, value: Any, low: int, below: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < below:
        raise InvalidRequest(
            f"{name} must be an integer from {low} to {below - 1}, got {value!r:.80}", param=name
        )


def _number(name: str, value: Any, low: float, high: float) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or not low <= value <= high:
        span = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise InvalidRequest(f"{name} must be a number {span}, got {value!r:.80}", param=name)
