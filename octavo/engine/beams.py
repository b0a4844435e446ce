"""Beam search with Hugging Face's semantics: which beams go on, which are finished, when it is over.

    every running beam offers its best continuations       offer()
      all have offered?                                    ready
        the best of all of them, by accumulated logprob    advance()
          ended ones among the first `width`  -> finished, by score = sum / length ** length_penalty
          the best `width` that did not end   -> run on; each names its parent and its token

Beams are branches: a parent that goes on twice is forked, one that does not is dropped, which costs table
edits and, at the next write, a copy of one block. A beam that lost its KV to a preemption has already
offered or will when it is back; the others wait for it, idle.

Decides, and holds no branch: beam_steps.py carries out. The rules are those of transformers'
GenerationMixin._beam_search (5.x), stated in the comments where they surprise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.engine.params import SamplingParams

_NEVER = np.float32(-1e9)


class Move(NamedTuple):
    """A beam of the next round: the place of its parent among the running ones, and its token."""

    parent: int
    token: int


class Finished(NamedTuple):
    """A finished beam. tokens: its output, what ended it included."""

    score: float
    tokens: tuple[int, ...]


@dataclass(slots=True)
class _Beam:
    tokens: tuple[int, ...]
    total: np.float32  # of its tokens' logprobs, as adjusted by penalties
    offer: tuple[npt.NDArray[np.float32], list[int]] | None = None  # totals and tokens, best first


@dataclass(slots=True)
class BeamSearch:
    """The search of one request. ends: token ids that end a beam."""

    params: SamplingParams
    max_tokens: int
    ends: frozenset[int]
    finished: list[Finished] = field(default_factory=list)  # best first, at most `width`
    over: bool = False
    _running: list[_Beam] = field(default_factory=lambda: [_Beam((), np.float32(0))])
    _hopeful: bool = True  # whether a running beam might still become one of the best

    @property
    def width(self) -> int:
        """Beams that run."""
        return self.params.width

    @property
    def keep(self) -> int:
        """Continuations to consider: enough for `width` to remain if every end token is among them."""
        return max(2, 1 + len(self.ends)) * self.width

    @property
    def ready(self) -> bool:
        """Whether every running beam has offered."""
        return all(beam.offer is not None for beam in self._running)

    def offer(self, place: int, logprobs: npt.NDArray[np.float32], tokens: list[int]) -> None:
        """The `keep` likeliest next tokens of the beam at `place`, likeliest first, and their logprobs."""
        beam = self._running[place]
        beam.offer = (logprobs + beam.total, tokens)

    def advance(self) -> list[Move]:
        """Take every offer; returns the beams that run on, best first, or none when it is over."""
        beams = self._running
        offers = [beam.offer for beam in beams if beam.offer is not None]
        totals = np.concatenate([totals for totals, _ in offers])
        order = np.argsort(-totals, kind="stable")[: self.keep]
        starts = np.cumsum([0] + [len(tokens) for _, tokens in offers])
        parents = np.searchsorted(starts, order, "right") - 1
        moves = [
            Move(int(parent), offers[parent][1][at - starts[parent]]) for parent, at in zip(parents, order)
        ]
        length = len(beams[0].tokens) + 1
        last = length >= self.max_tokens
        ended = [last or move.token in self.ends for move in moves]
        self._finish(moves, totals[order], ended, length)
        # When fewer than `width` go on, Hugging Face fills up with beams at -1e9; they cannot win, and the
        # search is over where none goes on.
        on = [i for i, end in enumerate(ended) if not end and np.isfinite(totals[order[i]])][: self.width]
        chosen = [(moves[i], totals[order[i]]) for i in on]
        self._running = [
            _Beam((*beams[move.parent].tokens, move.token), np.float32(total)) for move, total in chosen
        ]
        self._judge(length)
        full = len(self.finished) == self.width
        self.over = not chosen or not self._hopeful or (full and self.params.early_stopping is True)
        return [] if self.over else [move for move, _ in chosen]

    def _finish(
        self, moves: Sequence[Move], totals: npt.NDArray[np.float32], ended: Sequence[bool], length: int
    ) -> None:
        """Keep the best of those that ended. Only the first `width` continuations count; the rest are
        there to run on."""
        found = list(self.finished)
        for move, total, end in list(zip(moves, totals, ended, strict=True))[: self.width]:
            if end and np.isfinite(total):
                tokens = (*self._running[move.parent].tokens, move.token)
                found.append(Finished(float(total / np.float32(length**self.params.length_penalty)), tokens))
        found.sort(key=lambda beam: -beam.score)  # stable: of equals the earlier stays
        self.finished = found[: self.width]

    def _judge(self, length: int) -> None:
        """Whether the best running beam could still beat the worst finished one.

        Its best score is taken at its present length, or with early_stopping "never" and a positive
        length penalty at the greatest length there is.
        """
        params = self.params
        longest = params.early_stopping == "never" and params.length_penalty > 0
        best = self._running[0].total if self._running else _NEVER
        best_score = best / np.float32((self.max_tokens if longest else length) ** params.length_penalty)
        full = len(self.finished) == self.width
        worst = np.float32(self.finished[-1].score) if full else _NEVER
        self._hopeful = self._hopeful and bool(best_score > worst)
