"""Who guesses the tokens of speculation: from a sequence's own text (guess.py), or a draft model (draft.py).

    running branches -> wanted() -> Proposer.propose() -> Branch.draft -> the step -> Proposer.checked()

A proposer may propose anything: the step keeps a guess only if it is the token that it samples there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from octavo.engine.live import Live
from octavo.sched import Branch, Request


class Wanted(NamedTuple):
    """A branch that may guess up to `room` tokens now, and its request."""

    live: Live
    branch: Branch
    room: int


class Proposer(Protocol):
    """One way to guess. Called on the engine's thread."""

    def propose(self, wanted: Sequence[Wanted], company: int) -> None:
        """Set the `draft` of each branch. company: sequences in the step."""

    def checked(self, live: Live, branch: Branch, guessed: int, accepted: int) -> None:
        """The step checked this many guesses of a branch, and so many came true."""

    def settle(self) -> None:
        """A step is over or a request was given up: what is kept of branches that do not run any more can
        be let go."""

    def note(self) -> str:
        """For the start-up table."""


def wanted(running: Sequence[Branch], lives: Mapping[Request, Live]) -> list[Wanted]:
    """The running branches that may guess: those that decode, are forked, and have more than one token to
    go. Clears what they guessed before."""
    found = []
    for branch in running:
        branch.draft = []
        live = lives[branch.request]
        room = branch.tokens_left - 1
        alone = not (branch.request.beams or branch.request.unforked)
        if alone and branch.remaining == 1 and room > 0:
            found.append(Wanted(live, branch, room))
    return found


class OwnText:
    """Guesses of each sequence from its own text; kept in its BranchState."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def propose(self, wanted: Sequence[Wanted], company: int) -> None:
        """See Proposer."""
        for live, branch, room in wanted:
            guesser = live.state(branch).guesser
            branch.draft = guesser.guess(room, company) if guesser is not None else []

    def checked(self, live: Live, branch: Branch, guessed: int, accepted: int) -> None:
        """See Proposer."""
        guesser = live.state(branch).guesser
        if guesser is not None:
            guesser.check(guessed, accepted)

    def settle(self) -> None:
        """Nothing is kept."""

    def note(self) -> str:
        """See Proposer."""
        return f"up to {self._limit} tokens guessed from a sequence's own text (speculate)"
