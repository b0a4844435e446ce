"""Who waits, and in which order they are tried.

    by age     [ a0 ][ a1 ][ a2 ][ a3 ][ a4 ] ...          every waiting branch, the oldest first
                 overdue: max_wait steps    |
                 or more since submit()     +--- the others, in the order of the policy

    fcfs       by age                              priority   highest first, then by age
    prefix     longest cached prefix first, then by age, among the oldest
    fair       by age within a tenant; among tenants, the least served for its weight first

Overdue branches go first, by age, whatever the policy: that is all the ageing there is, and it gives the
bound: once a branch is overdue, nobody who came after it starts before it.

Service in "fair" is counted as in the virtual token counter of Sheng et al. (OSDI 2024): a prompt token
to compute counts 1, a sampled one 2, divided by the tenant's weight; a tenant that comes back is lifted to
the least served of those that wait, so nobody saves up while away.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from octavo.sched.config import SchedulerConfig
from octavo.sched.request import Branch, Request

SAMPLED_WEIGHT = 2
_TENANTS_KEPT = 4096
_WINDOW = 64


def _age(branch: Branch) -> tuple[int, int]:
    return branch.age


def _urgency(branch: Branch) -> tuple[int, int, int]:
    return -branch.request.priority, *branch.age


class Queue:
    """The waiting branches. Adding, removing and counting are O(log n) and a move of n pointers."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._order = config.order
        self._max_wait = config.max_wait
        self._weights = config.tenant_weights
        self._by_age: list[Branch] = []
        self._by_urgency: list[Branch] = []  # for "priority"
        self._tenants: dict[str, list[Branch]] = {}  # for "fair": those with anybody waiting, by age
        self._service: dict[str, float] = {}
        self._floor = 0.0  # what the latest tenant served had

    def __len__(self) -> int:
        return len(self._by_age)

    def __iter__(self) -> Iterator[Branch]:
        """By age."""
        return iter(self._by_age)

    def push(self, branch: Branch) -> None:
        """A branch waits from now on."""
        insort(self._by_age, branch, key=_age)
        if self._order == "priority":
            insort(self._by_urgency, branch, key=_urgency)
        elif self._order == "fair":
            tenant = branch.request.tenant
            if tenant not in self._tenants:
                self._lift(tenant)
            insort(self._tenants.setdefault(tenant, []), branch, key=_age)

    def remove(self, branch: Branch) -> None:
        """It waits no more."""
        del self._by_age[bisect_left(self._by_age, branch.age, key=_age)]
        if self._order == "priority":
            del self._by_urgency[bisect_left(self._by_urgency, _urgency(branch), key=_urgency)]
        elif self._order == "fair":
            waiting = self._tenants[branch.request.tenant]
            del waiting[bisect_left(waiting, branch.age, key=_age)]
            if not waiting:
                del self._tenants[branch.request.tenant]

    def overdue(self, request: Request, step: int) -> bool:
        """Whether it has been here long enough to go before all that came after it."""
        return step - request.arrived_at >= self._max_wait

    def rank(self, branch: Branch, step: int) -> tuple[int, int, int, int]:
        """Who gets memory first: smaller goes before. By age, or by priority until overdue."""
        if self._order != "priority" or self.overdue(branch.request, step):
            return 0, 0, *branch.age
        return 1, *_urgency(branch)

    def candidates(self, step: int) -> Iterator[Branch]:
        """The waiting branches but idle ones, in the order in which to try them, a bounded number where
        that costs.

        The queue may lose those that were handed out, nothing else, while this is running.
        """
        late: list[Branch] = []
        for branch in self._by_age:
            if len(late) == _WINDOW or not self.overdue(branch.request, step):
                break
            if not branch.idle:
                late.append(branch)
        yield from late
        if len(late) == _WINDOW:
            return
        if self._order == "fair":
            yield from self._by_service(set(late))
            return
        if self._order == "priority":
            taken = set(late)
            rest = [b for b in self._by_urgency[: _WINDOW + len(late)] if b not in taken and not b.idle]
        else:
            rest = self._by_age[: _WINDOW + len(late)]
            rest = [b for b in rest if not self.overdue(b.request, step) and not b.idle]
            if self._order == "prefix":
                rest.sort(key=lambda b: (-b.hit, *b.age))
        yield from rest

    def window(self) -> list[Branch]:
        """Those among which "prefix" chooses."""
        return self._by_age[:_WINDOW]

    def charge(self, request: Request, tokens: float) -> None:
        """A request was given so much service."""
        if self._order == "fair":
            tenant = request.tenant
            share = tokens / self._weights.get(tenant, 1.0)
            self._service[tenant] = self._service.get(tenant, self._floor) + share

    def service(self, tenant: str) -> float:
        """What a tenant was given, for its weight."""
        return self._service.get(tenant, self._floor)

    def _by_service(self, taken: set[Branch]) -> Iterator[Branch]:
        """Each time the oldest of the tenant that is least served by then."""
        left = {
            tenant: [b for b in waiting[:_WINDOW] if b not in taken and not b.idle]
            for tenant, waiting in self._tenants.items()
        }
        for waiting in left.values():
            waiting.reverse()
        while left := {tenant: waiting for tenant, waiting in left.items() if waiting}:
            tenant = min(left, key=lambda t: (self.service(t), left[t][-1].age))
            self._floor = max(self._floor, self.service(tenant))
            yield left[tenant].pop()

    def _lift(self, tenant: str) -> None:
        """A tenant comes (back): it starts level with the least served of those that wait."""
        level = min((self.service(other) for other in self._tenants), default=self._floor)
        self._service[tenant] = max(self._service.get(tenant, level), level)
        if len(self._service) > _TENANTS_KEPT:
            # Who is not ahead of the rest would be lifted anyway; those least ahead are forgiven the most.
            away = [t for t in self._service if t not in self._tenants and t != tenant]
            away.sort(key=self._service.__getitem__, reverse=True)
            for other in away[_TENANTS_KEPT // 2 :]:
                del self._service[other]
