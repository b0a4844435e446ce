"""The memory that KV caches lie in: asked for in huge pages, which come when they are first written.

    tensors [num_blocks, ...]      one or more a layer, same block ids in all
    piece   HUGE_PAGE bytes of one of them: so many consecutive blocks

        layer 0   | piece | piece | ....      a pool hands out its lowest ids first, so without Ahead all
        layer 1   | piece | piece | ....      layers come to a new piece in the same step, and that step
        ...           ^                       waits for the system to clear one huge page a layer

`Ahead` has the pieces come one a step, before they are reached.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

HUGE_PAGE = 2**21  # bytes; on x86-64, and elsewhere a multiple of what memory is aligned to
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14 and later


def uninitialised(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for a tensor, from the first huge page's worth on in huge pages where the system has them."""
    size = math.prod(shape) * dtype.itemsize
    if size < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the mapping
    start = -whole.data_ptr() % HUGE_PAGE
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
    """Populates a cache's memory a piece a step, so that all layers have a piece when blocks reach it.

    tensors: `[num_blocks, ...]` contiguous, equally many blocks in each. The first piece of each is
    populated at once. Memory is taken only as blocks are: at most a piece of each tensor early.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        # Pieces of all tensors are as many blocks as one of the largest holds.
        largest = max(tensor[0].numel() * tensor.element_size() for tensor in tensors)
        self.blocks = max(1, HUGE_PAGE // largest)
        self._next = 0  # counts pieces: of every tensor the first, of every tensor the second, ...
        while self._next < len(tensors) and self._advance():
            pass

    def reached(self, block: int) -> None:
        """A step used blocks up to `block`: populate the next piece, if its turn has come.

        Evenly: when blocks reach the first of a piece, all tensors have theirs. Cost: at most HUGE_PAGE.
        """
        count = len(self._tensors)
        self._next = max(self._next, (block // self.blocks + 1) * count)  # written, so there
        if self._next < count + (block + 1) * count // self.blocks:
            self._advance()

    def _advance(self) -> bool:
        piece, index = divmod(self._next, len(self._tensors))
        part = self._tensors[index][piece * self.blocks : (piece + 1) * self.blocks]
        if not len(part):
            return False
        self._next += 1
        return populate(part)
