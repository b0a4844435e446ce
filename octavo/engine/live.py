"""A request in the engine: what the scheduler does not need to know of it.

    Live             one request: parameters, seed, what ends it, logprobs of its prompt
      BranchState    one sequence of it: its text so far, and what its past does to its next token

A branch's state is made when the branch is, grows a token at a time, and outlives preemptions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from octavo.engine.bad_words import BadWords, Spellings
from octavo.engine.beams import BeamSearch
from octavo.engine.detokenizer import Detokenizer
from octavo.engine.guess import NgramGuesser
from octavo.engine.logprobs import TokenLogprobs
from octavo.engine.outputs import SequenceDelta
from octavo.engine.params import SamplingParams
from octavo.engine.penalties import TokenCounts
from octavo.models import Tokenizer
from octavo.sched import Branch, Request


@dataclass(eq=False, slots=True)
class BranchState:
    """One sequence. counts, bad_words, matcher (of structured_outputs) and guesser are None where nothing
    needs them."""

    text: Detokenizer
    counts: TokenCounts | None
    bad_words: BadWords | None
    matcher: LLMatcher | None = None
    guesser: NgramGuesser | None = None
    cumulative_logprob: float = 0.0

    def add(self, token: int) -> None:
        """A token was sampled: what the next one depends on."""
        if self.counts is not None:
            self.counts.add(token)
        if self.bad_words is not None:
            self.bad_words.add(token)
        if self.matcher is not None:
            self.matcher.consume_token(token)
        if self.guesser is not None:
            self.guesser.add(token)

    @property
    def complete(self) -> bool:
        """Whether the form that the output must have allows nothing more."""
        return self.matcher is not None and self.matcher.is_stopped()

    def after(self, token: int) -> BranchState:
        """What bans and penalties would be if `token` came next; this state is left unchanged."""
        if self.counts is None and self.bad_words is None:
            return self
        counts = self.counts.copy() if self.counts is not None else None
        bad_words = self.bad_words.copy() if self.bad_words is not None else None
        state = BranchState(self.text, counts, bad_words)
        state.add(token)
        return state

    def fork(self, text: Detokenizer) -> BranchState:
        """The state of a sequence with the same past, to go on apart."""
        counts = self.counts.copy() if self.counts is not None else None
        bad_words = self.bad_words.copy() if self.bad_words is not None else None
        matcher = self.matcher.deep_copy() if self.matcher is not None else None
        return BranchState(text, counts, bad_words, matcher)


@dataclass(eq=False, slots=True)
class Live:
    """One request. spellings: the tokenizer's, if bad_words need them. matcher: at the beginning of a text
    of the form that the request wants. guesses: how many a sequence may make a step.

    prompt_logprobs: one per prompt token as far as computed, None for the first, which nothing precedes;
    None if not asked for. held: with best_of, the deltas of each sequence until all are done. search: the
    beam search, if it is one, and beams: the branches of its running beams, in its order.
    """

    id: int
    request: Request
    params: SamplingParams
    seed: int
    tokenizer: Tokenizer
    spellings: Spellings | None = None
    stop_ids: frozenset[int] = frozenset()  # end the sequence, end-of-text included unless ignored
    eos_ids: frozenset[int] = frozenset()
    states: dict[Branch, BranchState] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    prompt_sent: bool = False  # they have been handed out
    held: dict[int, SequenceDelta] = field(default_factory=dict)
    search: BeamSearch | None = None
    beams: list[Branch] = field(default_factory=list)
    matcher: LLMatcher | None = None
    guesses: int = 0
    num_guessed: int = 0
    num_accepted: int = 0
    error: Exception | None = None  # why it cannot go on

    def state(self, branch: Branch) -> BranchState:
        """The state of a branch, made when it is first asked for."""
        state = self.states.get(branch)
        if state is None:
            state = self.states[branch] = self._new_state()
        return state

    def fork_state(self, parent: Branch, child: Branch) -> None:
        """`child` goes on from what `parent` has come to. Beams alone are forked so late, and have no
        text before they are finished."""
        self.states[child] = self.state(parent).fork(self.new_text())

    def checked(self, guessed: int, accepted: int) -> None:
        """The step checked this many guesses, and so many came true."""
        self.num_guessed += guessed
        self.num_accepted += accepted

    def new_text(self) -> Detokenizer:
        """The empty text of a sequence."""
        return Detokenizer(self.tokenizer.decode, self.request.prompt, self.params.stop)

    def banned(self, state: BranchState, position: int) -> npt.NDArray[np.int64] | None:
        """Ids that may not be token number `position` of the output."""
        if state.bad_words is None and position >= self.params.min_tokens:
            return None
        parts = []
        if position < self.params.min_tokens:
            parts.append(np.array(sorted(self.stop_ids | self.eos_ids), np.int64))
        if state.bad_words is not None:
            parts.append(state.bad_words.banned())
        return np.concatenate(parts)

    def _new_state(self) -> BranchState:
        params, prompt = self.params, self.request.prompt
        bad = params.bad_words or params.bad_words_ids
        return BranchState(
            self.new_text(),
            TokenCounts(prompt) if params.penalised else None,
            BadWords(params.bad_words, params.bad_words_ids, self.spellings, prompt) if bad else None,
            self.matcher.deep_copy() if self.matcher is not None else None,
            NgramGuesser(prompt, self.guesses) if self.guesses else None,
        )
