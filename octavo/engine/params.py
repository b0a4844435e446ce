"""How to sample: the parameters of a request, checked where they enter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.engine.structured import StructuredOutputs
from octavo.errors import InvalidRequest

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: logits divided by less overflow float32."""

MAX_STOPS = 64
MAX_STOP_CHARS = 1000
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_BAD_WORDS = 256
MAX_BAD_WORD_IDS = 64
MAX_BEST_OF = 128
MAX_BEAMS = 64


@dataclass(frozen=True)
class SamplingParams:
    """What to sample and when to stop.

    n: sequences per prompt. best_of: compute that many and give the n with the greatest cumulative
    logprob, likeliest first; with more than n they come when all are done. max_tokens: per sequence; None
    takes the room that the context leaves; 0 only with prompt_logprobs. min_tokens: no end-of-text, stop
    token or stop string before these.
    temperature: 0 is greedy. top_k: keep the k likeliest, 0 or -1 keeps all. top_p: keep the smallest set
    with that much probability. min_p: keep tokens with at least that share of the likeliest one's
    probability. seed: with one, the same tokens whatever else the engine serves; without, each run differs.
    stop: strings that end the text and are left out of it. stop_token_ids: likewise for tokens.
    ignore_eos: go on past end-of-text.

    presence_penalty, frequency_penalty: -2..2, taken from a token's logit once, or as often as it is in
    the output. repetition_penalty: 0.01..100, divides the positive and multiplies the negative logits of
    tokens that are in prompt or output. logit_bias: token id -> -100..100, added to its logit; at most
    1024. bad_words: strings that the text never contains, however they are spelled in tokens; at most 256.
    bad_words_ids: token sequences that are never completed, prompt included; at most 256 of 64 tokens.
    logprobs: give each token's logprob and those of the 0..20 likeliest; prompt_logprobs: the same for the
    prompt. Both are of the model's own distribution, before bias, penalties, temperature and filters.
    A request with prompt_logprobs computes its whole prompt: cached KV has no logits.
    truncate_prompt_tokens: keep only that many of the prompt's last tokens.
    structured_outputs: the form that the whole output has; it ends when the form is complete.

    beam_width: search with that many beams (2..64) as Hugging Face does, and give the n best, which come
    when the search is over; nothing is sampled, so temperature must be 0 or 1, and filters, stop strings,
    logprobs and best_of are refused. length_penalty: beams are ranked by logprob / length ** length_penalty.
    early_stopping: True ends with the first beam_width finished beams, False when no running beam is likely
    to beat them, "never" when none can.

    Raises InvalidRequest, naming the parameter.
    """

    n: int = 1
    best_of: int | None = None
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: str | Sequence[str] = ()
    bad_words_ids: Sequence[Sequence[int]] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}))
        object.__setattr__(self, "bad_words_ids", tuple(tuple(ids) for ids in self.bad_words_ids or ()))
        self._check_lengths()
        self._check_filters()
        self._check_words("stop", MAX_STOPS)
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31)
        self._check_words("bad_words", MAX_BAD_WORDS)
        self._check_bias()
        self._check_beams()
        form = self.structured_outputs
        if form is not None and not isinstance(form, StructuredOutputs):
            message = f"structured_outputs must be StructuredOutputs, got {form!r:.80}"
            raise InvalidRequest(message, param="structured_outputs")
        if form is not None and self.ignore_eos:
            message = "ignore_eos cannot be used with structured_outputs, which end by themselves"
            raise InvalidRequest(message, param="ignore_eos")

    def _check_lengths(self) -> None:
        _integer("n", self.n, 1, 2**16)
        if self.best_of is not None:
            _integer("best_of", self.best_of, 1, MAX_BEST_OF + 1)
            if self.best_of < self.n:
                raise InvalidRequest(f"best_of {self.best_of} is less than n {self.n}", param="best_of")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1 if self.prompt_logprobs is None else 0, 2**31)
        _integer("min_tokens", self.min_tokens, 0, 2**31)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}"
            raise InvalidRequest(message, param="min_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS + 1)
        if self.truncate_prompt_tokens is not None:
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, 2**31)

    def _check_filters(self) -> None:
        _number("temperature", self.temperature, 0.0, math.inf)
        _integer("top_k", self.top_k, -1, 2**31)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise InvalidRequest("top_p must be above 0 and at most 1, got 0", param="top_p")
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)

    def _check_words(self, name: str, limit: int) -> None:
        words = getattr(self, name)
        if len(words) > limit:
            raise InvalidRequest(f"{name} has {len(words)} strings, at most {limit} are taken", param=name)
        for text in words:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
                message = f"each {name} must be a string of 1..{MAX_STOP_CHARS} characters, got {text!r:.80}"
                raise InvalidRequest(message, param=name)
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise InvalidRequest(f"{name} has half a surrogate pair: {text!r:.80}", param=name)

    def _check_bias(self) -> None:
        if len(self.logit_bias) > MAX_BIASES:
            raise InvalidRequest(
                f"logit_bias has {len(self.logit_bias)} tokens, at most {MAX_BIASES} are taken",
                param="logit_bias",
            )
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, 2**31)
            _number("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
        if len(self.bad_words_ids) > MAX_BAD_WORDS:
            raise InvalidRequest(
                f"bad_words_ids has {len(self.bad_words_ids)} sequences, at most {MAX_BAD_WORDS} are taken",
                param="bad_words_ids",
            )
        for ids in self.bad_words_ids:
            if not 1 <= len(ids) <= MAX_BAD_WORD_IDS:
                message = f"each of bad_words_ids must have 1..{MAX_BAD_WORD_IDS} tokens, got {len(ids)}"
                raise InvalidRequest(message, param="bad_words_ids")
            for token in ids:
                _integer("bad_words_ids", token, 0, 2**31)

    @property
    def width(self) -> int:
        """Sequences that are computed."""
        return self.beam_width or self.best_of or self.n

    @property
    def ranked(self) -> bool:
        """Whether the best are chosen of more samples than are given."""
        return self.best_of is not None and self.best_of > self.n

    @property
    def penalised(self) -> bool:
        """Whether what was said already changes logits."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    def _check_beams(self) -> None:
        _number("length_penalty", self.length_penalty, -10.0, 10.0)
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            message = f'early_stopping must be true, false or "never", got {self.early_stopping!r:.80}'
            raise InvalidRequest(message, param="early_stopping")
        if self.beam_width is None:
            for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != default:
                    raise InvalidRequest(f"{name} is for beam search: give beam_width too", param=name)
            return
        _integer("beam_width", self.beam_width, 2, MAX_BEAMS + 1)
        if self.n > self.beam_width:
            raise InvalidRequest(f"n {self.n} is more than beam_width {self.beam_width}", param="n")
        neutral: dict[str, tuple[Any, ...]] = {
            "temperature": (0, 1), "top_k": (0, -1), "top_p": (1,), "min_p": (0,), "stop": ((),),
            "logprobs": (None,), "best_of": (None,),
        }  # fmt: skip
        for name, values in neutral.items():
            if getattr(self, name) not in values:
                message = f"{name} {getattr(self, name)!r:.80} cannot be used with beam_width; leave it out"
                raise InvalidRequest(message, param=name)
        if self.max_tokens == 0:
            raise InvalidRequest("max_tokens 0 cannot be used with beam_width", param="max_tokens")

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
