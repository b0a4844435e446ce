"""What every store checks of its arguments, on both sides of the seam."""

from __future__ import annotations

import numpy as np

from octavo.kv.errors import InvalidArgument
from octavo.kv.store import Bytes


def check_size(name: str, value: int, high: int) -> None:
    """Raise InvalidArgument unless `value` is an integer from 1 to `high`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
        raise InvalidArgument(f"{name} must be an integer from 1 to {high}, got {value!r}")


def check_slot(slot: int, num_slots: int) -> None:
    """Raise InvalidArgument unless `slot` is one of 0..num_slots-1."""
    # Without this, slot -1 would be the last row of an array and an offset inside the file's tables.
    if not 0 <= slot < num_slots:
        raise InvalidArgument(f"slot {slot} is outside 0..{num_slots - 1}")


def check_buffer(buffer: Bytes, num_bytes: int, *, writeable: bool = False) -> None:
    """Raise InvalidArgument unless `buffer` is `num_bytes` contiguous uint8, writeable if it must be."""
    if buffer.dtype != np.uint8 or buffer.shape != (num_bytes,):
        raise InvalidArgument(f"a block is {num_bytes} uint8, got {buffer.dtype} {buffer.shape}")
    if not buffer.flags.c_contiguous or (writeable and not buffer.flags.writeable):
        raise InvalidArgument("a block's buffer must be contiguous, and writeable where it is filled")
