"""Bounds on what a server holds for its clients: open sequences, requests of a key, bytes of bodies.

    Room      `limit` units; Hold: how many of them one request has, and since when
    Gate      the Room of open sequences, with its refusals

A refusal says when to come back. By Little's law units come free at the rate taken / stay, where stay is how
long a unit is held: the mean of the latest that came back, or the mean age of those that are out where that
is more, as it is when nothing comes back any longer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from octavo.errors import InvalidRequest
from octavo.server.errors import QueueFull

_STAYS_KEPT = 64


class Room:
    """`limit` units of something. `clock` gives seconds."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.taken = 0
        self.clock = clock
        self._moments = 0.0  # over all units that are out: when each was taken, in sum
        self._stays: deque[tuple[float, int]] = deque(maxlen=_STAYS_KEPT)  # (seconds, units)

    def missing(self, wanted: int) -> int:
        """How many units must come back before `wanted` more fit."""
        return max(0, self.taken + wanted - self.limit)

    def seconds_until(self, wanted: int) -> float:
        """In how long so many will likely be free; 0 where nothing was seen yet. O(64)."""
        if not self.taken:
            return 0.0
        stay = self.clock() - self._moments / self.taken
        if self._stays:
            total = sum(units for _, units in self._stays)
            stay = max(stay, sum(seconds * units for seconds, units in self._stays) / total)
        return self.missing(wanted) * stay / self.taken

    def _move(self, units: int, moments: float) -> None:
        self.taken += units
        self._moments = self._moments + moments if self.taken else 0.0

    def _note(self, seconds: float, units: int) -> None:
        self._stays.append((seconds, units))


class Hold:
    """Units of a room that one request holds, from none to many and back."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._moments = 0.0
        self.count = 0

    def take(self, count: int) -> None:
        """Hold so many more; whether they fit is for the caller to ask first."""
        moments = count * self._room.clock()
        self.count += count
        self._moments += moments
        self._room._move(count, moments)

    def give_back(self, count: int | None = None) -> None:
        """Free `count` of them, all if None."""
        count = self.count if count is None else count
        if not count:
            return
        moment = self._moments / self.count
        self.count -= count
        self._moments -= moment * count
        self._room._move(-count, -moment * count)
        self._room._note(self._room.clock() - moment, count)


class Gate:
    """Counts open sequences; a request with `n=3` takes three places and gives them back when it ends.

    A client that reads slowly must not hold those of work that is done, so they come back one by one.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._room = Room(limit, clock)

    @property
    def open(self) -> int:
        """Sequences that are open."""
        return self._room.taken

    def check(self, wanted: int) -> None:
        """Raise InvalidRequest when `wanted` places never fit, QueueFull when they do not fit now."""
        limit = self._room.limit
        if wanted > limit:
            raise InvalidRequest(
                f"the request asks for {wanted} sequences (prompts x n); the server takes at most "
                f"{limit} at once. Send fewer, or start it with a larger --max-queue",
                param="n",
            )
        if self._room.missing(wanted):
            raise QueueFull(
                f"the queue is full: {self.open} of {limit} sequences are open and the request asks "
                f"for {wanted}. Try again later, or start the server with a larger --max-queue",
                self._room.seconds_until(wanted),
            )

    @contextmanager
    def places(self, wanted: int) -> Iterator[Hold]:
        """Hold `wanted` places inside the `with` block, or until they are given back; raises as `check`."""
        self.check(wanted)
        held = Hold(self._room)
        held.take(wanted)
        try:
            yield held
        finally:
            held.give_back()
