"""A store in host memory: one row per slot.

rows   [num_slots, block_bytes] uint8     committed by the system page by page, at the first put
full   [num_slots] bool                   which rows hold a block
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from octavo.engine.tiers.checks import check_buffer, check_size, check_slot
from octavo.engine.tiers.errors import StoreClosed, StoreFull
from octavo.kv.store import BlockLost, Bytes, Record


class HostStore:
    """Blocks in the memory of this process, `num_slots` of `block_bytes` bytes each.

    Address space is reserved at once; memory is taken as slots are first used and kept until close().
    Nothing is checksummed. One thread calls it.
    """

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        """Raises InvalidArgument for a size below 1, StoreFull where the system refuses so much."""
        check_size("num_slots", num_slots, 2**31 - 1)
        check_size("block_bytes", block_bytes, 2**40)
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        try:
            # Not zeros: an allocation of this size is fresh pages from the system, and none is
            # committed before it is written. A row is never read before its first put.
            self._rows: Bytes | None = np.empty((num_slots, block_bytes), np.uint8)
        except MemoryError as error:
            raise StoreFull(
                f"the host tier wants {num_slots * block_bytes} bytes ({num_slots} blocks of {block_bytes}), "
                "which the system refuses: lower its number of blocks"
            ) from error
        self._full = np.zeros(num_slots, np.bool_)

    def put(self, slot: int, record: Record | None, data: Bytes) -> None:
        """Copy `data` (block_bytes uint8) to `slot`. The record is not kept: nothing here is recovered.

        Raises InvalidArgument, StoreClosed. Cost: one copy of the block.
        """
        rows = self._open_rows()
        check_slot(slot, self.num_slots)
        check_buffer(data, self.block_bytes)
        rows[slot] = data
        self._full[slot] = True

    def get(self, slot: int, out: Bytes) -> None:
        """Copy `slot` to `out` (block_bytes uint8).

        Raises BlockLost for an empty slot, InvalidArgument, StoreClosed. Cost: one copy of the block.
        """
        rows = self._open_rows()
        check_slot(slot, self.num_slots)
        check_buffer(out, self.block_bytes, writeable=True)
        if not self._full[slot]:
            raise BlockLost(f"host slot {slot} is empty")
        out[:] = rows[slot]

    def drop(self, slot: int) -> None:
        """Forget what `slot` holds. O(1). Raises InvalidArgument, StoreClosed."""
        self._open_rows()
        check_slot(slot, self.num_slots)
        self._full[slot] = False

    def recover(self) -> Iterator[tuple[int, Record]]:
        """Yield nothing: memory does not outlive the process. Raises StoreClosed."""
        self._open_rows()
        return iter(())

    def close(self) -> None:
        """Give the memory back. A second call does nothing."""
        self._rows = None

    def _open_rows(self) -> Bytes:
        if self._rows is None:
            raise StoreClosed("the host store is closed")
        return self._rows
