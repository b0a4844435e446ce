"""The seam to lower tiers: who keeps the bytes of blocks that left the device.

The pool decides which block lies in which slot of which tier and returns moves; an executor carries
them out with a Store per tier. Nothing here does any I/O.

    device block --put--> host slot --put--> disk slot        demotion, when a tier is full
    device block <--get-- host slot                            promotion, on a hit
    device block <-----------------get------ disk slot
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from octavo.kv.errors import KVError
from octavo.kv.types import Record

Bytes = npt.NDArray[np.uint8]

__all__ = ["BlockLost", "Bytes", "Record", "Store"]


class BlockLost(KVError):
    """A slot's bytes are gone or damaged: they must be computed again, never served."""


class Store(Protocol):
    """Keeps the bytes of blocks by slot number, 0..num_slots-1. One thread calls it."""

    num_slots: int

    def put(self, slot: int, record: Record | None, data: Bytes) -> None:
        """Keep `data` (block_bytes uint8) in `slot`, replacing what it held, all or nothing.

        A slot without a record belongs to a suspended sequence and does not survive a restart.
        """

    def get(self, slot: int, out: Bytes) -> None:
        """Fill `out` with the bytes last put in `slot`. Raises BlockLost if they are not intact."""

    def drop(self, slot: int) -> None:
        """Forget what `slot` holds: recover() will not name it again. Dropping an empty slot is fine."""

    def recover(self) -> Iterator[tuple[int, Record]]:
        """The slots that hold intact records from before, each once. Empty for a tier in memory."""

    def close(self) -> None:
        """Release everything; what was put in a tier that outlives the process is on its way there."""
