"""Typed errors of octavo.sched."""

from __future__ import annotations

from octavo.errors import InvalidRequest, OctavoError


class SchedulerError(OctavoError):
    """Any error of the scheduler that is not the caller's input."""


class NeverFits(InvalidRequest):
    """A request that could not run even in an empty pool; refused at submission."""


class Stuck(SchedulerError):
    """A request that runs alone and still finds no room: the estimate at the door was wrong."""
