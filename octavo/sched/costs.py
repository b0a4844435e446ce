"""What steps and transfers cost, as data: measured by whoever executes plans, used by the policy.

    seconds of a step = decode(rows) + read x earlier tokens of all decodes and chunks
                      + token x chunk tokens + pair x (chunk token, earlier token) pairs

read is what it takes to fetch a token's KV, which the tokens of a chunk share; pair is arithmetic.

Only ratios matter to the policy, so the unit may be anything. sched/ never reads a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Decodes(NamedTuple):
    """What a step of so many decodes and nothing else cost, and how many earlier tokens they had in all."""

    seconds: float
    earlier: float


@dataclass(frozen=True, slots=True)
class Costs:
    """step: a step apart from its tokens. token: one more prompt token in it. pair: one such token
    attending to one earlier token. read: fetching one earlier token, once for a decode or a chunk. block: one
    block moved between device and host, one way. decodes: steps of that many decodes and nothing else, where
    they were observed.

    The defaults are in units of one prompt token, of a small model on a CPU.
    """

    step: float = 20.0
    token: float = 1.0
    pair: float = 1 / 2000
    read: float = 1 / 1000
    block: float = 0.2
    decodes: Mapping[int, Decodes] = field(default_factory=dict)

    def decode(self, rows: int, earlier: int = 0) -> float:
        """A step that decodes `rows` branches that have `earlier` tokens in all; from the nearest number of
        rows observed, else estimated."""
        if not self.decodes:
            return self.step + self.token * rows + self.read * earlier
        near = (
            rows if rows in self.decodes else min(self.decodes, key=lambda known: (abs(known - rows), known))
        )
        seconds, seen = self.decodes[near]
        # However few the earlier tokens, the weights are read: never far below what was seen.
        seconds = max(seconds + self.read * (earlier - seen), seconds / 4)
        return seconds if near == rows else max(seconds + self.token * (rows - near), self.token * rows)

    def chunk(self, tokens: int, start: int) -> float:
        """What a prompt chunk of `tokens` from position `start` adds to a step."""
        return self.read * start + tokens * (self.token + self.pair * (start + tokens / 2))

    def chunk_within(self, limit: float, start: int) -> int:
        """The most tokens from position `start` that add no more than `limit` to a step."""
        limit -= self.read * start
        linear = self.token + self.pair * start
        if limit <= 0:
            return 0
        if self.pair <= 0:
            return int(limit / linear)
        # pair / 2 x n^2 + linear x n = limit, in the form that does not cancel
        return int(2 * limit / (linear + (linear * linear + 2 * self.pair * limit) ** 0.5))
