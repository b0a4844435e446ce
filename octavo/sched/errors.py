"""Typed errors of octavo.sched."""

from __future__ import annotations

from octavo.errors import InvalidRequest, OctavoError


class SchedulerError(OctavoError):
    """Any error of the scheduler that is not the caller's input."""


class NeverFits(InvalidRequest):
    """A request that could not run even in an empty pool; refused at submission."""


class QueueFull(SchedulerError):
    """As many branches run and wait as may. retry_after: in how long a place is likely, in the caller's
    clock; None where too little was started yet to tell."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Stuck(SchedulerError):
    """A request that runs alone and still finds no room: the estimate at the door was wrong."""
