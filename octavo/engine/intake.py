"""Requests where they enter: checked, and given the state that the engine keeps of them.

    prompt, params --resolve, on any thread--> Resolved --live, on the engine's thread--> Live

Owns what is made once per model for some requests: the spellings of its tokens, compiled grammars. What
takes long is done in resolve(), so that no step waits for it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llguidance import LLMatcher

from octavo.engine.bad_words import Spellings
from octavo.engine.beams import BeamSearch
from octavo.engine.grammar import Grammars
from octavo.engine.live import Live
from octavo.engine.params import SamplingParams
from octavo.errors import CONTEXT_EXCEEDED, InvalidRequest
from octavo.kv import Scope
from octavo.models import LoadedModel
from octavo.sched import Request, Scheduler


@dataclass(frozen=True, slots=True)
class Resolved:
    """A request that was checked, to be queued once. request: with its max_tokens settled. matcher: at the
    beginning of a text of the form that it wants, None without."""

    request: Request
    params: SamplingParams
    matcher: LLMatcher | None


def slow_to_resolve(params: SamplingParams) -> bool:
    """Whether checking a request may take seconds: a form is to be compiled, or a whole vocabulary spelt."""
    return params.structured_outputs is not None or bool(params.bad_words)


class Intake:
    """Checks requests for one model. guesses: how many tokens a sequence may guess a step."""

    def __init__(
        self, model: LoadedModel, scheduler: Scheduler, max_model_len: int, guesses: int = 0
    ) -> None:
        self.max_model_len = max_model_len
        self.vocab_size = model.config.vocab_size
        self._model = model
        self._scheduler = scheduler
        self._guesses = guesses
        self._scope = Scope(model=model.path.name)
        self._grammars: Grammars | None = None
        self._spellings: Spellings | None = None
        self._lock = threading.Lock()

    @property
    def grammars(self) -> Grammars:
        """The compiler of structured_outputs, made when first asked for. Safe from any thread."""
        with self._lock:
            if self._grammars is None:
                self._grammars = Grammars(
                    self._model.tokenizer, self.vocab_size, sorted(self._model.eos_token_ids)
                )
            return self._grammars

    @property
    def spellings(self) -> Spellings:
        """How the tokens spell text, made when first asked for. Safe from any thread."""
        with self._lock:
            if self._spellings is None:
                self._spellings = Spellings(self._model.tokenizer)
            return self._spellings

    def resolve(self, prompt: Sequence[int], params: SamplingParams, salt: str | None = None) -> Resolved:
        """See Engine.resolve."""
        if not prompt:
            raise InvalidRequest("the prompt is empty: give at least one token", param="prompt")
        if set(map(type, prompt)) != {int} or min(prompt) < 0 or max(prompt) >= self.vocab_size:
            wrong = next(
                at
                for at, token in enumerate(prompt)
                if type(token) is not int or not 0 <= token < self.vocab_size
            )
            raise InvalidRequest(
                f"prompt token {wrong} is {prompt[wrong]!r:.40}; ids are integers from 0 to "
                f"{self.vocab_size - 1}",
                param="prompt",
            )
        self._check_ids(params)
        prompt = prompt[-params.truncate_prompt_tokens :] if params.truncate_prompt_tokens else prompt
        room = self.max_model_len - len(prompt)
        if room < 1:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens and the context holds {self.max_model_len}, "
                "which leaves no room for one more: shorten the prompt or raise max_model_len",
                param="prompt",
                code=CONTEXT_EXCEEDED,
            )
        if params.min_tokens > room:
            raise InvalidRequest(
                f"min_tokens is {params.min_tokens}, but the context leaves room for {room}",
                param="min_tokens",
            )
        max_tokens = params.max_tokens if params.max_tokens is not None else room
        scored = params.prompt_logprobs is not None
        self._scheduler.check_fits(len(prompt), max_tokens, params.width)
        beams = params.beam_width is not None
        scope = self._scope if salt is None else replace(self._scope, salt=salt)
        if params.bad_words:
            _ = self.spellings  # made here, not on the engine's thread
        form = params.structured_outputs
        matcher = self.grammars.compile(form) if form is not None else None
        request = Request(list(prompt), max_tokens, params.width, scope, score_prompt=scored, beams=beams)
        return Resolved(request, params, matcher)

    def live(self, number: int, resolved: Resolved) -> Live:
        """The engine's state of a request that was submitted."""
        eos, request, params = self._model.eos_token_ids, resolved.request, resolved.params
        live = Live(
            id=number,
            request=request,
            params=params,
            seed=params.seed if params.seed is not None else secrets.randbits(64),
            tokenizer=self._model.tokenizer,
            spellings=self.spellings if params.bad_words else None,
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos),
            eos_ids=eos,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
            guesses=0 if request.beams else self._guesses,
            matcher=resolved.matcher,
        )
        if request.beams:
            live.search = BeamSearch(params, request.max_tokens, live.stop_ids)
            live.beams = list(request.branches)
        return live

    def _check_ids(self, params: SamplingParams) -> None:
        """Refuse token ids of parameters that the model does not have."""
        named = [("logit_bias", token) for token in params.logit_bias]
        named += [("bad_words_ids", token) for ids in params.bad_words_ids for token in ids]
        for name, token in named:
            if token >= self.vocab_size:
                raise InvalidRequest(
                    f"{name} has token {token}; ids are integers from 0 to {self.vocab_size - 1}", param=name
                )
