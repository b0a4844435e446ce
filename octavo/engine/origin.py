"""Where a request comes from: what the scheduler and the cache make of it. It changes no token."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """salt: cached prompts are shared only among requests of an equal one. priority: higher goes first,
    with the schedule "priority". tenant: whose share it is charged to, with "fair". interactive: somebody
    reads the tokens as they come.
    """

    salt: str | None = None
    priority: int = 0
    tenant: str = ""
    interactive: bool = True
