"""A request and its branches, as the scheduler sees them.

    tokens of a branch   [ prompt ................ ][ sampled so far ... ]
                         0        kv.committed      num_prompt       len(tokens)
                         | KV is written | to compute: `remaining`     |

A branch is one sequence of a request. It starts as one; when the prompt is computed and n > 1, the
others are forked from it. A waiting branch holds no KV, with two exceptions: one that gave back only its
last blocks keeps the others, and one that was swapped out keeps its host slots. What it gave back may
still lie in the prefix tree, findable by its own tokens.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TypeAlias

from octavo.kv import DEFAULT_SCOPE, Pool, Scope, Sequence
from octavo.kv.contiguous import ContiguousPool
from octavo.kv.contiguous_sequence import ContiguousSequence

AnyPool: TypeAlias = Pool | ContiguousPool
AnySequence: TypeAlias = Sequence | ContiguousSequence


class State(enum.Enum):
    """Where a branch is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """One call for completions. prompt: at least one token id; max_tokens: to sample, per branch.

    priority: higher goes first, where the order is "priority"; kept by the KV blocks as well. tenant:
    whose share it is charged to, where the order is "fair". interactive: somebody reads the tokens as
    they come, so long gaps between them are to be avoided. score_prompt: the logits at every position of
    the prompt are wanted, so none of it is taken from the cache but what was computed for this request
    before a preemption; `scored`: positions computed so far. beams: its n branches are beams: they are
    forked, dropped and continued by whoever searches.

    Set by the scheduler: `arrival` orders requests; `arrived_at` is the step of submit() and
    `submitted_at` its time; `num_cached` is how many prompt tokens the cache had when the request was
    first admitted, None before.
    """

    prompt: list[int]
    max_tokens: int
    n: int = 1
    scope: Scope = DEFAULT_SCOPE
    score_prompt: bool = False
    scored: int = 0
    beams: bool = False
    priority: int = 0
    tenant: str = ""
    interactive: bool = False
    arrival: int = -1
    arrived_at: int = 0
    submitted_at: float = 0.0
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

    draft: tokens guessed to come next, to be checked in the next step as far as there is room. idle: a beam
    whose next token depends on its request's other beams; it computes nothing until resumed.
    computed: tokens that had KV at some time. opened: how many its present KV was opened with. need, hit,
    probed_at: what the latest attempt to admit it found, see admission.py. first_at: the step since which
    it is the first that does not fit.
    """

    request: Request
    index: int
    tokens: list[int]
    state: State = State.WAITING
    kv: AnySequence | None = None
    num_preemptions: int = 0
    draft: list[int] = field(default_factory=list)
    idle: bool = False
    computed: int = 0
    opened: int = 0
    need: int = 0
    hit: int = 0
    probed_at: int = -1
    first_at: int = -1

    @property
    def age(self) -> tuple[int, int]:
        """Smaller is older."""
        return self.request.arrival, self.index

    @property
    def output(self) -> list[int]:
        """The sampled tokens."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def num_output(self) -> int:
        """How many tokens were sampled."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be sampled."""
        return self.request.max_tokens - self.num_output

    @property
    def width(self) -> int:
        """Branches that this one stands for: all n of its request until they are forked."""
        return self.request.n if self.request.unforked else 1

    @property
    def remaining(self) -> int:
        """Known tokens whose KV is not yet computed; 1 while decoding, 0 while idle. Only where it has KV."""
        assert self.kv is not None
        return len(self.tokens) - self.kv.length
