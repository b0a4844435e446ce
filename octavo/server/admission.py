"""How many sequences may be open at once, so that the queue and its memory have a bound."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from octavo.errors import InvalidRequest
from octavo.server.errors import QueueFull


class Gate:
    """Counts open sequences; a request with `n=3` takes three places and gives them back when it ends."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.open = 0

    def check(self, wanted: int) -> None:
        """Raise InvalidRequest when `wanted` places never fit, QueueFull when they do not fit now."""
        if wanted > self.limit:
            raise InvalidRequest(
                f"the request asks for {wanted} sequences (prompts x n); the server takes at most "
                f"{self.limit} at once. Send fewer, or start it with a larger --max-queue",
                param="n",
            )
        if self.open + wanted > self.limit:
            raise QueueFull(
                f"the queue is full: {self.open} of {self.limit} sequences are open and the request asks "
                f"for {wanted}. Try again later, or start the server with a larger --max-queue"
            )

    @contextmanager
    def places(self, wanted: int) -> Iterator[Places]:
        """Hold `wanted` places inside the `with` block, or until they are given back; raises as `check`."""
        self.check(wanted)
        held = Places(self, wanted)
        try:
            yield held
        finally:
            held.give_back(held.count)


class Places:
    """Places that a request holds. A client that reads slowly must not hold those of work that is done."""

    def __init__(self, gate: Gate, count: int) -> None:
        self._gate = gate
        self.count = count
        gate.open += count

    def give_back(self, count: int) -> None:
        """Free `count` of them."""
        self._gate.open -= count
        self.count -= count
