"""How many tokens a branch will still sample, from its limit and from how long others became.

    lengths    1  2  3  4  5 .. 6  7 .. 8 ...      buckets, four to an octave
    ended      0  3  1  0  2       0      5        branches that ended of themselves there
    cut        0  0  4  0  1       1      0        branches cut off there: by max_tokens, or given up

A branch that was cut off would have become longer, nobody knows by how much, so plain averages would be
too low. The estimator is the product-limit one of Kaplan and Meier (1958): of those that came as far as a
bucket, the share that ended of itself in it. Old counts fade, so that it follows the traffic.
"""

from __future__ import annotations

import math

_PER_OCTAVE = 4
_BUCKETS = 31 * _PER_OCTAVE
_MEMORY = 512.0
"""Observations after which the counts are halved."""


def _bucket(length: int) -> int:
    return min(_BUCKETS - 1, int(_PER_OCTAVE * math.log2(length))) if length > 1 else 0


def _upper(bucket: int) -> float:
    """The longest length in a bucket, about."""
    return float(2.0 ** ((bucket + 1) / _PER_OCTAVE))


class Lengths:
    """The distribution of output lengths so far. observe() is O(1), left() O(buckets), about 120."""

    def __init__(self, unknown: int = 512) -> None:
        """unknown: tokens more that a branch is taken to sample where nobody came so far and ended."""
        self._unknown = unknown
        self._ended = [0.0] * _BUCKETS
        self._cut = [0.0] * _BUCKETS
        self._total = 0.0

    def observe(self, length: int, ended: bool) -> None:
        """A branch sampled `length` tokens; ended: of itself, and not because it had to."""
        (self._ended if ended else self._cut)[_bucket(max(1, length))] += 1
        self._total += 1
        if self._total >= 2 * _MEMORY:
            self._ended = [count / 2 for count in self._ended]
            self._cut = [count / 2 for count in self._cut]
            self._total /= 2

    def left(self, done: int, limit: int) -> int:
        """The mean number of tokens that a branch with `done` will still sample, `limit` at most.

        Means add up: the sum over all branches is what their memory is planned by.
        """
        if limit <= 0:
            return 0
        first = _bucket(max(1, done))
        at_risk = sum(self._ended[first:]) + sum(self._cut[first:])
        alive, mean, position = 1.0, 0.0, float(done)
        for bucket in range(first, _BUCKETS):
            if at_risk < 1 or position - done >= limit:
                break
            width = max(0.0, min(_upper(bucket), done + limit) - position)
            # Those that end in a bucket come half-way through it.
            ending = alive * self._ended[bucket] / at_risk
            mean += (alive - ending / 2) * width
            alive -= ending
            position += width
            at_risk -= self._ended[bucket] + self._cut[bucket]
        rest = max(0.0, done + limit - position)
        mean += alive * min(rest, self._unknown)
        return max(1, min(limit, round(mean)))
