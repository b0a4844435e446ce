"""What snapshot and frames of a Recorder say, put together: for terminals, replays and tests.

snapshot -> Mirror -> apply(frame) -> apply(frame) ...
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Frame = dict[str, Any]


@dataclass(slots=True)
class Row:
    """A sequence. state: "r" running, "w" waiting, "s" suspended. tokens: known, prompt included.
    committed: tokens whose KV is written. table: its block ids by logical number."""

    name: str
    state: str
    prompt: int
    cached: int
    tokens: int
    committed: int
    max_tokens: int
    preemptions: int
    table: list[int] = field(default_factory=list)


class Mirror:
    """The state of blocks, sequences and counts. Raises ValueError for a frame that does not follow."""

    def __init__(self, snapshot: Frame) -> None:
        if snapshot.get("kind") != "snapshot":
            raise ValueError("the first frame must be a snapshot")
        self.model: str = snapshot["model"]
        self.block_size: int = snapshot["block_size"]
        self.num_blocks: int = snapshot["num_blocks"]
        self.refs = _unpacked(snapshot["refs"], np.uint16)
        self.fill = _unpacked(snapshot["fill"], np.uint16)
        self.parent = _unpacked(snapshot["parent"], np.int32)
        self.rows: dict[str, Row] = {}
        self.counts: dict[str, int] = {}
        self.why = ""  # what the first that waits waits for, as in SchedulerStats.blocked
        self.time = 0.0
        self._apply(snapshot)

    def apply(self, frame: Frame) -> None:
        """One frame more."""
        blocks = np.asarray(frame.get("blocks", []), np.int64).reshape(-1, 4)
        ids = blocks[:, 0]
        self.refs[ids], self.fill[ids], self.parent[ids] = blocks[:, 1], blocks[:, 2], blocks[:, 3]
        self._apply(frame)

    def _apply(self, frame: Frame) -> None:
        for values in frame.get("seqs", ()):
            before = self.rows.get(values[0])
            row = Row(*values[:8])
            row.table = before.table if before is not None else []
            if len(values) > 8:
                first, *ids = values[8]
                if first > len(row.table):
                    raise ValueError(
                        f"sequence {row.name}: a table from {first} on after {len(row.table)} blocks"
                    )
                row.table = row.table[:first] + ids
            self.rows[row.name] = row
        for name in frame.get("gone", ()):
            self.rows.pop(name, None)
        self.counts = frame.get("counts", self.counts)
        self.why = frame.get("why", self.why)
        self.time = frame.get("t", self.time)


def _unpacked(text: str, dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), np.dtype(dtype).newbyteorder("<")).astype(dtype)
