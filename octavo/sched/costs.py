"""What steps and transfers cost, as data: measured by whoever executes plans, used by the policy.

    seconds of a step = decode(rows) + token x chunk tokens + pair x (chunk token, earlier token) pairs

Only ratios matter to the policy, so the unit may be anything. sched/ never reads a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Costs:
    """step: a step apart from its tokens. token: one more prompt token in it. pair: one such token
    attending to one earlier token. block: one block moved between device and host, one way. decodes:
    the cost of a step of that many decodes and nothing else, where it was observed.

    The defaults are in units of one prompt token, of a small model on a CPU.
    """

    step: float = 20.0
    token: float = 1.0
    pair: float = 1 / 2000
    block: float = 0.2
    decodes: Mapping[int, float] = field(default_factory=dict)

    def decode(self, rows: int) -> float:
        """A step that decodes `rows` branches; from the nearest number observed, else estimated."""
        found = self.decodes.get(rows)
        if found is not None:
            return found
        if not self.decodes:
            return self.step + self.token * rows
        near = min(self.decodes, key=lambda known: (abs(known - rows), known))
        return max(self.decodes[near] + self.token * (rows - near), self.token * rows)

    def chunk(self, tokens: int, start: int) -> float:
        """What a prompt chunk of `tokens` from position `start` adds to a step."""
        return tokens * (self.token + self.pair * (start + tokens / 2))

    def chunk_within(self, limit: float, start: int) -> int:
        """The most tokens from position `start` that add no more than `limit` to a step."""
        linear = self.token + self.pair * start
        if limit <= 0:
            return 0
        if self.pair <= 0:
            return int(limit / linear)
        # pair / 2 x n^2 + linear x n = limit, in the form that does not cancel
        return int(2 * limit / (linear + (linear * linear + 2 * self.pair * limit) ** 0.5))
