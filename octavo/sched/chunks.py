"""How a step's room for prompts is divided.

    budget       max_batched_tokens        [ decodes | prompt chunks ............. ]
    spare        cost units, only where somebody reads a stream: what chunks may add to the step

A stream sees the step as the gap between two tokens. A step of decodes alone costs D, more as they grow;
chunks may make it max_gap x D, of which MARGIN is planned with, for what the estimate does not know. So a
long prompt gets a stated part of the machine and the streams keep the rest, however long the prompt is.
Every PROBE-th step has no chunk, so that D is seen.

The first prompt in rank gets half of the room, and what the others leave; the others go shortest first, so
a short prompt behind a long one has its first token long before the long one is done.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from octavo.sched.costs import Costs
from octavo.sched.request import Branch

MARGIN = 0.5
"""Of what chunks may add, the part that is planned with."""

PROBE = 16
"""While chunks are bounded, every so many steps one has none: what the bound is measured by has to be seen
now and then, for streams that grow cost more with each token."""

MIN_CHUNK = 4
"""Tokens of the first prompt that are computed however little room there is, so that it ends."""


@dataclass(slots=True)
class Draft:
    """A plan in the making."""

    budget: int
    costs: Costs
    spare: float = math.inf
    least: int = MIN_CHUNK
    chosen: dict[Branch, int] = field(default_factory=dict)
    preempted: list[Branch] = field(default_factory=list)
    stuck: list[Branch] = field(default_factory=list)
    resumed: bool = False

    def choose(self, branch: Branch, count: int) -> None:
        """`count` more tokens of `branch` are computed in this step."""
        assert branch.kv is not None
        chosen = self.chosen.get(branch, 0)
        if branch.remaining > 1:
            self.spare -= self.costs.chunk(chosen + count, branch.kv.length) - self._cost(branch)
        self.chosen[branch] = chosen + count
        self.budget -= count

    def drop(self, branch: Branch) -> None:
        """It is not part of the step after all."""
        self.budget += self.chosen.pop(branch, 0)

    def limit(self, max_gap: float) -> None:
        """Somebody reads one of the streams chosen so far: bound what chunks add to a step of these alone."""
        earlier = sum(branch.kv.length for branch in self.chosen if branch.kv is not None)
        self.spare = MARGIN * (max_gap - 1) * self.costs.decode(len(self.chosen), earlier)

    def no_chunks(self) -> None:
        """Leave this step to the decodes chosen so far."""
        self.spare, self.least = 0.0, 0

    @property
    def has_chunks(self) -> bool:
        """Whether a prompt gets tokens."""
        return any(branch.remaining > 1 for branch in self.chosen)

    @property
    def has_room(self) -> bool:
        """Whether another prompt could get a token."""
        return self.budget > 0 and self.spare > 0

    def chunk(self, branch: Branch, share: float = 1.0, *, first: bool = False) -> int:
        """Tokens that `branch` could get of `share` of the room that is left; the first prompt gets `least`,
        whatever they add."""
        assert branch.kv is not None
        chosen = self.chosen.get(branch, 0)
        wanted = branch.remaining - chosen
        count = min(wanted, math.ceil(self.budget * share))
        if math.isfinite(self.spare):
            within = self.costs.chunk_within(self.spare * share + self._cost(branch), branch.kv.length)
            count = min(count, max(within - chosen, self.least if first else 0))
        return max(0, count)

    def _cost(self, branch: Branch) -> float:
        """Of the branch's chunk so far."""
        assert branch.kv is not None
        chosen = self.chosen.get(branch, 0)
        return self.costs.chunk(chosen, branch.kv.length) if chosen else 0.0
