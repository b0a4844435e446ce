"""What the engine hands out: deltas as they come, and whole outputs."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.engine.logprobs import TokenLogprobs


@dataclass(slots=True)
class SequenceDelta:
    """What one sequence gained in a step.

    text never splits a character and never shows any part of a stop string; it may be empty while
    more tokens are needed to know. finish_reason: "stop", "length", "abort" or None while it goes on.
    stop_reason: the stop string or stop token id that ended it, None for end-of-text. logprobs: one per
    token of token_ids where the request asked for them. cumulative_logprob: of all tokens so far, where
    logprobs or best_of were asked for. score: of a beam, its logprob / length ** length_penalty.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    score: float | None = None

    def add(self, delta: SequenceDelta) -> None:
        """Take in what the same sequence gained next."""
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.cumulative_logprob = delta.cumulative_logprob
        self.score = delta.score
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs


@dataclass(slots=True)
class RequestDelta:
    """What one request gained in a step, or in several. With `error` set it is the last one.

    prompt_logprobs: one per prompt token, None for the first; all of them, in the delta that comes when
    the prompt is computed, where the request asked for them. num_guessed, num_accepted: tokens guessed by
    speculation so far, and those that came true.
    """

    request_id: int
    deltas: list[SequenceDelta]
    finished: bool
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    error: Exception | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_guessed: int = 0
    num_accepted: int = 0

    def add(self, delta: RequestDelta) -> None:
        """Take in what the same request gained next; neither has an error."""
        known = {sequence.index: sequence for sequence in self.deltas}
        for sequence in delta.deltas:
            if sequence.index in known:
                known[sequence.index].add(sequence)
            else:
                self.deltas.append(sequence)
        self.finished = delta.finished
        self.num_cached_tokens = delta.num_cached_tokens
        self.num_guessed, self.num_accepted = delta.num_guessed, delta.num_accepted
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs


@dataclass(slots=True)
class CompletionOutput(SequenceDelta):
    """One finished sequence: all of its deltas together."""


@dataclass(slots=True)
class RequestOutput:
    """A finished request. num_cached_tokens: prompt tokens whose KV the cache had."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_guessed: int = 0
    num_accepted: int = 0
