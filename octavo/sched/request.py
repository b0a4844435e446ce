"""A request and its branches, as the scheduler sees them.

    tokens of a branch   [ prompt ................ ][ sampled so far ... ]
                         0        kv.committed      num_prompt       len(tokens)
                         | KV is written | to compute: `remaining`     |

A branch is one sequence of a request. It starts as one; when the prompt is computed and n > 1, the
others are forked from it. While waiting a branch holds no KV (`kv` is None): what it had computed lies
in the prefix tree, findable by its own tokens.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from octavo.kv import DEFAULT_SCOPE, Scope, Sequence


class State(enum.Enum):
    """Where a branch is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """One call for completions. prompt: at least one token id; max_tokens: to sample, per branch.

    score_prompt: the logits at every position of the prompt are wanted, so none of it is taken from the
    cache but what was computed for this request before a preemption. `scored`: positions computed so far.
    beams: its n branches are beams: they are forked, dropped and continued by whoever searches.
    `arrival` is set by submit() and orders requests; `num_cached` is how many prompt tokens the cache
    had when the request was first admitted.
    """

    prompt: list[int]
    max_tokens: int
    n: int = 1
    scope: Scope = DEFAULT_SCOPE
    score_prompt: bool = False
    scored: int = 0
    beams: bool = False
    arrival: int = -1
    num_cached: int | None = None
    branches: list[Branch] = field(default_factory=list)
    made: int = 0  # branches so far, dropped ones included

    @property
    def finished(self) -> bool:
        """Whether every branch it will ever have is finished."""
        return all(branch.state is State.FINISHED for branch in self.branches)

    @property
    def unforked(self) -> bool:
        """Whether the branches after the first are still to be made."""
        return self.made < self.n


@dataclass(eq=False, slots=True)
class Branch:
    """One sequence of a request; `index` 0..n-1. `tokens` are the prompt and all that was sampled.

    draft: tokens guessed to come next, to be checked in the next step as far as there is room.
    idle: a beam whose next token depends on its request's other beams; it computes nothing until resumed.
    """

    request: Request
    index: int
    tokens: list[int]
    state: State = State.WAITING
    kv: Sequence | None = None
    num_preemptions: int = 0
    draft: list[int] = field(default_factory=list)
    idle: bool = False
    num_lost: int = 0  # tokens whose KV was given back by the latest preemption

    @property
    def age(self) -> tuple[int, int]:
        """Smaller is older: older branches get memory first."""
        return self.request.arrival, self.index

    @property
    def output(self) -> list[int]:
        """The sampled tokens."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def remaining(self) -> int:
        """Known tokens whose KV is not yet computed; 1 while decoding, 0 while idle. Only while running."""
        assert self.kv is not None
        return len(self.tokens) - self.kv.length
