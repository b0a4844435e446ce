"""Who may look on while the engine works: metrics, the live memory map, recorders.

    Engine.add_request -> added      Engine.abort -> aborted
    Engine.step        -> planned (before the forward pass) -> stepped (after the commit)

Every call happens on the engine's thread, so an observer must be quick and never raise. An engine without
observers does nothing for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine.outputs import RequestDelta
from octavo.sched import Plan, Request


class Observer:
    """Does nothing; subclasses override what they want to see."""

    def added(self, request_id: int, request: Request, arrived: float) -> None:
        """A request was queued; arrived: when its caller asked, in seconds of time.monotonic()."""

    def planned(self, plan: Plan) -> None:
        """A step is about to run: its slots are taken, its transfers are done, its copies are not."""

    def stepped(self, deltas: Sequence[RequestDelta]) -> None:
        """A step is over, and its KV is committed."""

    def aborted(self, request_id: int) -> None:
        """A request that had not finished was given up."""
