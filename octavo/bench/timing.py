"""Fair comparisons on a shared machine: everything that is compared runs in turn, over and over."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

Timed = Callable[[], object]


def race(seconds: float, runners: Mapping[str, Timed]) -> dict[str, float]:
    """The fastest run of each in seconds, all run in turn for so many seconds in all, twice at least."""
    best = dict.fromkeys(runners, float("inf"))
    for runner in runners.values():
        runner()
    end = time.perf_counter() + seconds
    while True:
        for name, runner in runners.items():
            begin = time.perf_counter()
            runner()
            best[name] = min(best[name], time.perf_counter() - begin)
        if time.perf_counter() >= end:
            return best
