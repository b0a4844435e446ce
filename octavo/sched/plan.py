"""The plan of one step: plain data for the engine to execute."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.kv import Actions
from octavo.sched.request import Branch


class PlanEntry(NamedTuple):
    """Compute `tokens`, at positions start.. of `branch`, into `slots` (int64, one per token).

    num_samples: how many next tokens to sample from the last position's logits: 0 while the prompt is
    not done, 1 as a rule, n when the branches of a request are about to be made. num_draft: how many of
    `tokens`, at the end, are guesses; the logits of the last known token and of each guess are needed.
    """

    branch: Branch
    start: int
    tokens: list[int]
    slots: npt.NDArray[np.int64]
    num_samples: int
    num_draft: int = 0

    @property
    def row(self) -> int:
        """The branch's row of the pool's tables."""
        assert self.branch.kv is not None
        return self.branch.kv.row


class Plan(NamedTuple):
    """One step: first `actions`, then one forward pass over `entries`.

    preempted: branches that gave their blocks back to make room. stuck: requests that had to be given
    up, with their blocks already returned.
    """

    entries: tuple[PlanEntry, ...]
    actions: Actions
    preempted: tuple[Branch, ...]
    stuck: tuple[Branch, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that this step computes."""
        return sum(len(entry.tokens) for entry in self.entries)
