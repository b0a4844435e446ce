"""Scheduling: who runs next and with how many tokens. No torch; decides and returns plain data."""

from octavo.sched.config import ORDERS, PREEMPTION_MODES, SchedulerConfig
from octavo.sched.costs import Costs, Decodes
from octavo.sched.errors import NeverFits, QueueFull, SchedulerError, Stuck
from octavo.sched.plan import Plan, PlanEntry
from octavo.sched.request import AnyPool, Branch, Request, State
from octavo.sched.scheduler import Scheduler
from octavo.sched.stats import SchedulerStats

__all__ = [
    "ORDERS",
    "PREEMPTION_MODES",
    "AnyPool",
    "Branch",
    "Costs",
    "Decodes",
    "NeverFits",
    "Plan",
    "PlanEntry",
    "QueueFull",
    "Request",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerError",
    "SchedulerStats",
    "State",
    "Stuck",
]
