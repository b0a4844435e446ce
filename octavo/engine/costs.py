"""Measures what steps and transfers cost, for the scheduler's policy.

    a step of decodes alone      seconds, by number of rows             exponential average
    a step with prompt chunks    what is more than its decodes took,    line through (mean position,
                                 per chunk token                        seconds per token), fading
    transfers                    seconds per block                      exponential average

Everything fades, so that the figures follow the load, the context lengths and the machine.
"""

from __future__ import annotations

from octavo.sched import Costs, Plan

_FADE = 0.9
_DECODES_KEPT = 256


class StepMeter:
    """Keeps `costs` up to date, in seconds. Until there is a measurement they are the scheduler's own."""

    def __init__(self) -> None:
        self.costs = Costs()
        self._decodes: dict[int, float] = {}
        self._step = self._block = 0.0
        # Of seconds per chunk token (y) against mean position (x): weight, and fading sums.
        self._w = self._x = self._y = self._xx = self._xy = 0.0

    def step(self, plan: Plan, seconds: float) -> None:
        """A plan took `seconds`, from planning it to having its tokens."""
        chunks = [(len(e.tokens), e.start) for e in plan.entries if len(e.tokens) > 1 + e.num_draft]
        rows = len(plan.entries) - len(chunks)
        if chunks:
            self._note_chunks(chunks, rows, seconds)
        elif rows:
            before = self._decodes.pop(rows, seconds)
            if len(self._decodes) >= _DECODES_KEPT:
                del self._decodes[next(iter(self._decodes))]  # the one not seen for longest
            # A step that the machine held up says little of the next: it counts as half as much again.
            self._decodes[rows] = _FADE * before + (1 - _FADE) * min(seconds, 1.5 * before)
        self._publish()

    def transfers(self, blocks: int, seconds: float) -> None:
        """`blocks` blocks were moved between tiers in `seconds`."""
        if blocks:
            each = seconds / blocks
            self._block = _FADE * self._block + (1 - _FADE) * each if self._block else each
            self._publish()

    def _note_chunks(self, chunks: list[tuple[int, int]], rows: int, seconds: float) -> None:
        tokens = sum(count for count, _ in chunks)
        position = sum(count * (start + count / 2) for count, start in chunks) / tokens
        # A few rows more may cost nothing, or less than nothing; never plan with that.
        alone = self.costs.decode(rows) if rows and self._decodes else 0.0
        each = max(seconds - alone, seconds / (4 * (rows + tokens))) / tokens
        if self._w > 100:
            each = min(each, 2 * (self.costs.token + self.costs.pair * position))
        self._w = _FADE * self._w + tokens
        self._x = _FADE * self._x + tokens * position
        self._y = _FADE * self._y + tokens * each
        self._xx = _FADE * self._xx + tokens * position * position
        self._xy = _FADE * self._xy + tokens * position * each

    def _publish(self) -> None:
        if not self._w and not self._decodes:
            return
        token, pair = self._line()
        if not token:  # no prompt was timed yet: a row more costs at most its share of a step
            token = min(seconds / rows for rows, seconds in self._decodes.items())
        step = min(self._decodes.values(), default=20 * token)
        block = self._block if self._block else 0.2 * token
        self.costs = Costs(step, token, pair, block, self._decodes)

    def _line(self) -> tuple[float, float]:
        """Seconds per chunk token at position 0, and more per position."""
        if not self._w:
            return 0.0, 0.0
        x, y = self._x / self._w, self._y / self._w
        spread = self._xx / self._w - x * x
        slope = (self._xy / self._w - x * y) / spread if spread > 1 else 0.0
        slope = min(max(slope, 0.0), 0.9 * y / x if x else 0.0)
        return y - slope * x, slope
