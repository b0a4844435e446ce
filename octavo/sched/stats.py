"""What the scheduler counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class SchedulerStats:
    """Counts since the start.

    admitted: requests started. resumed: branches started again after a preemption. finished: branches.
    refused: requests, by reason (never_fits, queue_full). gave_up: requests that ended as Stuck.
    preempted: branches, by mode: recompute (all blocks given back), partial (the last blocks given
    back), swap (all moved to host memory), lost (a transfer failed). swap_full: swaps that the host
    had no room for, done as recompute. blocked: steps in which somebody waited though there was budget,
    by reason. computed: tokens; recomputed: those of them that a preempted branch had had before.
    guessed: tokens guessed by speculation, which count as computed; accepted: those that came true.
    swapped_out, swapped_in: blocks. queue_time, longest_queue_time: from submit() to the first start,
    summed over requests and the longest, in the caller's clock.
    """

    admitted: int = 0
    resumed: int = 0
    finished: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    gave_up: int = 0
    preempted: Counter[str] = field(default_factory=Counter)
    swap_full: int = 0
    blocked: Counter[str] = field(default_factory=Counter)
    computed: int = 0
    recomputed: int = 0
    guessed: int = 0
    accepted: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    queue_time: float = 0.0
    longest_queue_time: float = 0.0
    peak_running: int = 0
    peak_held_blocks: int = 0

    @property
    def preemptions(self) -> int:
        """Branches that had to stop and wait, whatever became of their KV."""
        return self.preempted.total()
