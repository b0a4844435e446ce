"""Scheduling: who runs next and with how many tokens. No torch; decides and returns plain data."""

from octavo.sched.config import SchedulerConfig
from octavo.sched.errors import NeverFits, SchedulerError, Stuck
from octavo.sched.plan import Plan, PlanEntry
from octavo.sched.request import Branch, Request, State
from octavo.sched.scheduler import Scheduler, SchedulerStats

__all__ = [
    "Branch",
    "NeverFits",
    "Plan",
    "PlanEntry",
    "Request",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerError",
    "SchedulerStats",
    "State",
    "Stuck",
]
