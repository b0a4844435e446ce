"""Measures what steps and transfers cost, for the scheduler's policy.

    a step of decodes alone      seconds, by number of rows             exponential average
                                 per earlier token of its rows          slope around slower averages, fading
    a step with prompt chunks    what is more than its decodes and      line through (mean position,
                                 fetching the chunks' earlier tokens    seconds per token), fading
                                 take, per chunk token
    transfers                    seconds per block                      exponential average

Everything fades, so that the figures follow the load, the context lengths and the machine.
"""

from __future__ import annotations

from octavo.sched import Costs, Decodes, Plan

_FADE = 0.9
_QUICK = 0.8  # decodes alone: beside a long prompt they are seen now and then only
_SLOW = 0.95  # the averages that the slope of decodes is taken around: contexts grow by a token a step
_SLOPE = 0.99
_DOUBT = 1e5  # tokens squared: as if ten steps, 100 earlier tokens off the average, had cost no more for it
_DECODES_KEPT = 256


class StepMeter:
    """Keeps `costs` up to date, in seconds. Until there is a measurement they are the scheduler's own."""

    def __init__(self) -> None:
        self.costs = Costs()
        self._decodes: dict[int, Decodes] = {}
        self._around: dict[int, Decodes] = {}
        self._dxx = self._dxy = 0.0  # of seconds against earlier tokens, around `_around`
        self._block = 0.0
        # Of seconds per chunk token (y) against mean position (x): weight, and fading sums.
        self._w = self._x = self._y = self._xx = self._xy = 0.0

    def step(self, plan: Plan, seconds: float) -> None:
        """A plan took `seconds`, from planning it to having its tokens."""
        chunks, rows, earlier = [], 0, 0
        for entry in plan.entries:
            if len(entry.tokens) > 1 + entry.num_draft:
                chunks.append((len(entry.tokens), entry.start))
            else:
                rows, earlier = rows + 1, earlier + entry.start
        if chunks:
            self._note_chunks(chunks, rows, earlier, seconds)
        elif rows:
            self._note_decodes(rows, earlier, seconds)
        self._publish()

    def transfers(self, blocks: int, seconds: float) -> None:
        """`blocks` blocks were moved between tiers in `seconds`."""
        if blocks:
            each = seconds / blocks
            self._block = _FADE * self._block + (1 - _FADE) * each if self._block else each
            self._publish()

    def _note_decodes(self, rows: int, earlier: int, seconds: float) -> None:
        if rows not in self._decodes:
            if len(self._decodes) >= _DECODES_KEPT:
                oldest = next(iter(self._decodes))  # the one not seen for longest
                del self._decodes[oldest], self._around[oldest]
            self._decodes[rows] = self._around[rows] = Decodes(seconds, earlier)
            return
        before, around = self._decodes.pop(rows), self._around[rows]
        # A step that the machine held up says little of the next: it counts as half as much again.
        seconds = min(seconds, 1.5 * self.costs.decode(rows, earlier))
        dx, dy = earlier - around.earlier, seconds - around.seconds
        self._dxx = _SLOPE * self._dxx + dx * dx
        self._dxy = _SLOPE * self._dxy + dx * dy
        self._decodes[rows] = _toward(before, _QUICK, seconds, earlier)
        self._around[rows] = _toward(around, _SLOW, seconds, earlier)

    def _note_chunks(self, chunks: list[tuple[int, int]], rows: int, earlier: int, seconds: float) -> None:
        tokens = sum(count for count, _ in chunks)
        position = sum(count * (start + count / 2) for count, start in chunks) / tokens
        # A few rows more may cost nothing, or less than nothing; never plan with that.
        alone = self.costs.decode(rows, earlier) if rows and self._decodes else 0.0
        alone += self.costs.read * sum(start for _, start in chunks) if self._decodes else 0.0
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
        cheapest = min((found.seconds for found in self._decodes.values()), default=20 * token)
        if not token:  # no prompt was timed yet: a row more costs at most its share of a step
            token = min(found.seconds / rows for rows, found in self._decodes.items())
        block = self._block if self._block else 0.2 * token
        self.costs = Costs(cheapest, token, pair, self._read(), block, self._decodes)

    def _read(self) -> float:
        """Seconds per earlier token of a decode; never more than explains all that a step takes."""
        slope = max(self._dxy / (self._dxx + _DOUBT), 0.0)
        return min([slope, *(f.seconds / f.earlier for f in self._decodes.values() if f.earlier > 0)])

    def _line(self) -> tuple[float, float]:
        """Seconds per chunk token at position 0, and more per position."""
        if not self._w:
            return 0.0, 0.0
        x, y = self._x / self._w, self._y / self._w
        spread = self._xx / self._w - x * x
        slope = (self._xy / self._w - x * y) / spread if spread > 1 else 0.0
        slope = min(max(slope, 0.0), 0.9 * y / x if x else 0.0)
        return y - slope * x, slope


def _toward(average: Decodes, fade: float, seconds: float, earlier: float) -> Decodes:
    """The exponential average after one more observation."""
    return Decodes(
        fade * average.seconds + (1 - fade) * seconds, fade * average.earlier + (1 - fade) * earlier
    )
