"""The scheduler's options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from octavo.errors import InvalidRequest

OrderName: TypeAlias = Literal["fcfs", "priority", "prefix", "fair"]
PreemptionMode: TypeAlias = Literal["auto", "recompute", "swap"]
ORDERS: tuple[str, ...] = get_args(OrderName)
PREEMPTION_MODES: tuple[str, ...] = get_args(PreemptionMode)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """max_num_seqs: branches that run at once. max_batched_tokens: tokens one step computes at most.
    max_model_len: tokens of a prompt and its output together. watermark: the share of the pool that
    admission leaves free while anything runs.

    order: who is admitted first, see queue.py. tenant_weights: for "fair", a tenant's share, 1 if not
    named. max_wait: steps after which a waiting request is overdue; then only older ones go before it.
    max_queue: branches that may wait beyond those that run at once; None is no limit. preemption: what
    becomes of a victim's KV, see preemption.py. max_preemptions: of one branch; then it keeps its memory
    to the end.
    max_gap: how many times longer prefill may make a step while somebody reads a stream.

    Raises InvalidRequest for a value out of range.
    """

    max_num_seqs: int = 64
    max_batched_tokens: int = 2048
    max_model_len: int = 8192
    watermark: float = 0.01
    order: OrderName = "fcfs"
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    max_wait: int = 500
    max_queue: int | None = None
    preemption: PreemptionMode = "auto"
    max_preemptions: int = 4
    max_gap: float = 2.0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_batched_tokens", "max_model_len", "max_wait", "max_preemptions"):
            _integer(name, getattr(self, name))
        if self.max_queue is not None:
            _integer("max_queue", self.max_queue)
        if not 0 <= self.watermark < 1:
            raise InvalidRequest(f"watermark must be in [0, 1), got {self.watermark}", param="watermark")
        if not 1 < self.max_gap < math.inf:
            raise InvalidRequest(f"max_gap must be above 1 and finite, got {self.max_gap}", param="max_gap")
        for name, names in (("order", ORDERS), ("preemption", PREEMPTION_MODES)):
            if getattr(self, name) not in names:
                raise InvalidRequest(
                    f"{name} must be one of {', '.join(names)}, got {getattr(self, name)!r}", param=name
                )
        for tenant, weight in self.tenant_weights.items():
            if not isinstance(weight, (int, float)) or isinstance(weight, bool) or not 0 < weight < math.inf:
                raise InvalidRequest(
                    f"the weight of tenant {tenant!r:.80} must be a number above 0, got {weight!r:.80}",
                    param="tenant_weights",
                )

    @property
    def max_running(self) -> int:
        """Branches that run at once: each needs at least one token of every step's budget."""
        return min(self.max_num_seqs, self.max_batched_tokens)


def _integer(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise InvalidRequest(f"{name} must be an integer from 1 to 2**31 - 1, got {value!r:.80}", param=name)
