"""Guesses a sequence's next tokens from its own text: what followed when its last tokens occurred before.

    ... the cat sat on the mat . The dog sat on the ?      last three: "sat on the", seen before
                ^^^^^^^^^^ mat .                             guess: "mat", "."

A guess is checked in the same forward pass that computes the next token anyway, and kept only where it is
the token that would have been sampled there, so the output is that of plain decoding. What a guess costs is
its share of a step; this decides how many are worth it from how many came true so far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_LONGEST, _SHORTEST = 3, 2  # tokens that must have occurred before
_FORGET = 0.9  # weight of what came before, at each check
_REST, _LONGEST_REST = 8, 256  # steps without guesses after they did not pay, doubled each time
STEP_COST = 10.0
"""What a step costs besides its tokens, in tokens: an estimate for small models on a CPU, not yet measured
(bench/speculation.py)."""


class Worth:
    """How many guesses of a sequence are worth their cost, from how many came true. limit: a step's most."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._hits, self._tries = 1.0, 2.0
        self._rest, self._resting = _REST, 0

    def count(self, company: int, price: float = 0.0) -> int:
        """How many to make in this step; none while resting, then one to see whether it has become better.

        company: sequences in the step. A guess that is accepted saves the sequence its share of a step,
        (STEP_COST + company) / company tokens; one that is not costs a token. price: what making one costs,
        as a part of a step.
        """
        if self._resting > 0:
            self._resting -= 1
            return 0 if self._resting else 1
        least = company / (company + STEP_COST) + price
        likely = min(self._hits / self._tries, 0.98)
        if likely < least:
            self._resting = self._rest
            self._rest = min(2 * self._rest, _LONGEST_REST)
            return 0
        # Each must come true often enough, all before it included.
        return min(int(math.log(least) / math.log(likely)), self._limit)

    def check(self, guessed: int, accepted: int) -> None:
        """The first `accepted` of `guessed` tokens came true."""
        self._hits = self._hits * _FORGET + accepted
        self._tries = self._tries * _FORGET + min(guessed, accepted + 1)
        if accepted == guessed:
            self._rest = _REST


class NgramGuesser:
    """The guesses for one sequence. tokens: its prompt and what was sampled so far. limit: guesses a step.

    add() is O(1); a guess O(its length). num_guessed and num_accepted count since the start.
    """

    def __init__(self, tokens: Sequence[int], limit: int) -> None:
        self._tokens: list[int] = []
        self._worth = Worth(limit)
        self._after: dict[tuple[int, ...], int] = {}  # the last tokens -> where what followed them begins
        self.num_guessed = self.num_accepted = 0
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """A token came."""
        tokens, end = self._tokens, len(self._tokens)
        for length in range(_SHORTEST, min(_LONGEST, end) + 1):
            self._after[tuple(tokens[end - length :])] = end
        tokens.append(token)

    def guess(self, most: int, company: int) -> list[int]:
        """At most `most` tokens that may come next; none where they are not likely to pay, see Worth."""
        start = self._found()
        if start is None:
            return []
        guessed: list[int] = []
        for at in range(start, start + min(self._worth.count(company), most)):
            known = len(self._tokens)
            guessed.append(self._tokens[at] if at < known else guessed[at - known])
        return guessed

    def check(self, guessed: int, accepted: int) -> None:
        """The first `accepted` of `guessed` tokens came true."""
        self.num_guessed += guessed
        self.num_accepted += accepted
        self._worth.check(guessed, accepted)

    def _found(self) -> int | None:
        """Where what followed the last tokens begins."""
        for length in range(_LONGEST, _SHORTEST - 1, -1):
            at = self._after.get(tuple(self._tokens[-length:]))
            if at is not None:
                return at
        return None
