"""The memory that KV caches lie in: asked for in huge pages, which come when they are first written.

    tensors [num_blocks, ...]      one or more a layer, same block ids in all
    piece   HUGE_PAGE bytes of one of them: so many consecutive blocks

        layer 0   | piece | piece | ....      a pool hands out its lowest ids first, so without Ahead all
        layer 1   | piece | piece | ....      layers come to a new piece in the same step, and that step
        ...           ^                       waits for the system to clear one huge page a layer

`Ahead` has the pieces come before blocks reach them, beside the steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
import threading
import time
from collections.abc import Sequence

import torch
from torch import Tensor

HUGE_PAGE = 2**21  # bytes; on x86-64, and elsewhere a multiple of what memory is aligned to
AHEAD = 2**29
"""Bytes kept there beyond what is used: a long prompt takes all of its blocks at once, and the streams beside
it go on behind them."""
PAUSE = 3
"""Between two pieces, in times of what the first took."""
THREAD = "octavo-pages"
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14 and later


def uninitialised(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for a tensor: whole huge pages where the system has them, and small ones for what is left over.

    So it takes no more than its size: a model has a cache per layer, and were each rounded up to a whole
    huge page, dozens of small ones would take twice what the budget says.
    """
    size = math.prod(shape) * dtype.itemsize
    huge = size // HUGE_PAGE * HUGE_PAGE
    if not huge or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the mapping
    start = -whole.data_ptr() % HUGE_PAGE
    with contextlib.suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_NOHUGEPAGE)  # where the system gives them unasked
        pages.madvise(mmap.MADV_HUGEPAGE, start, huge)
    return whole[start : start + size].view(dtype).view(shape)


def populate(part: Tensor) -> bool:
    """Have the pages that lie wholly within a contiguous `part` there, without a change to what they hold.

    Returns whether the system did; where it cannot, they come when first written, as ever. The GIL is
    released meanwhile.
    """
    start = -(-part.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (part.data_ptr() + part.numel() * part.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= start or sys.platform != "linux":
        return False
    advise = ctypes.CDLL(None).madvise
    return bool(advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _POPULATE_WRITE) == 0)


class Ahead:
    """Keeps `AHEAD` bytes of a cache's memory populated beyond the blocks in use, in a thread of its own.

    tensors: `[num_blocks, ...]` contiguous, equally many blocks in each. The thread lives only while there
    is something to populate, at the lowest priority, and holds no lock that a step needs.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        sizes = [tensor[0].numel() * tensor.element_size() for tensor in tensors]
        self._blocks = max(1, HUGE_PAGE // max(sizes))  # a piece of every tensor
        self._ahead = AHEAD // sum(sizes)  # blocks
        self._next = 0  # the first block whose piece was not populated
        self._target = 0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def reached(self, block: int) -> None:
        """Blocks up to `block` are taken: populate the next ones where less than half of `AHEAD` is there."""
        wanted = min(block + 1 + self._ahead, len(self._tensors[0]))
        if self._next >= min(wanted, block + 1 + self._ahead // 2) or self._next == len(self._tensors[0]):
            return
        self._target = wanted
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._populate, name=THREAD, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Leave it at what there is, for good."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _populate(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while self._next < self._target and not self._stopped.is_set():
            piece = slice(self._next, self._next + self._blocks)
            for tensor in self._tensors:
                began = time.monotonic()
                populate(tensor[piece])
                # A step that runs meanwhile has a core less; most steps shall have all.
                self._stopped.wait(PAUSE * (time.monotonic() - began))
            self._next = min(piece.stop, len(self._tensors[0]))
