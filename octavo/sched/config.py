"""The scheduler's options."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """max_num_seqs: branches that run at once. max_batched_tokens: tokens one step computes at most.
    max_model_len: tokens of a prompt and its output together. watermark: the share of the pool that
    admission leaves free while anything runs.

    Raises InvalidRequest for a value out of range.
    """

    max_num_seqs: int = 64
    max_batched_tokens: int = 2048
    max_model_len: int = 8192
    watermark: float = 0.01

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_batched_tokens", "max_model_len"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
                raise InvalidRequest(
                    f"{name} must be an integer from 1 to 2**31 - 1, got {value!r}", param=name
                )
        if not 0 <= self.watermark < 1:
            raise InvalidRequest(f"watermark must be in [0, 1), got {self.watermark}", param="watermark")

    @property
    def max_running(self) -> int:
        """Branches that run at once: each needs at least one token of every step's budget."""
        return min(self.max_num_seqs, self.max_batched_tokens)
