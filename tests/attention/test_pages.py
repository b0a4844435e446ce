"""The memory behind a cache: when its pages come, and that nothing changes what they hold."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo.attention.pages import HUGE_PAGE, Ahead, populate, uninitialised

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/pagemap")


def resident(part: Tensor) -> float:
    """The share of a tensor's pages that the system has given."""
    first = part.data_ptr() // mmap.PAGESIZE
    last = (part.data_ptr() + part.numel() * part.element_size() - 1) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        file.seek(8 * first)
        entries = torch.frombuffer(bytearray(file.read(8 * (last - first + 1))), dtype=torch.int64)
    return float((entries < 0).float().mean())  # bit 63: present


@linux
def test_populate_gives_pages_and_keeps_their_contents() -> None:
    tensor = uninitialised((4, HUGE_PAGE), torch.uint8)
    assert resident(tensor) == 0
    tensor[1, :100] = torch.arange(100, dtype=torch.uint8)
    assert populate(tensor[1:3])
    assert resident(tensor[1:3]) == 1
    assert resident(tensor[3]) == 0
    assert torch.equal(tensor[1, :100], torch.arange(100, dtype=torch.uint8))
    assert not tensor[1, 100:].any()


def test_what_has_no_whole_page_is_left_alone() -> None:
    assert not populate(torch.empty(0))
    assert not populate(torch.empty(100, dtype=torch.uint8))


@linux
@pytest.mark.parametrize("block_bytes", [3 * 2**12, HUGE_PAGE // 4, HUGE_PAGE, 2 * HUGE_PAGE])
def test_pieces_come_one_a_step_before_blocks_reach_them(block_bytes: int) -> None:
    """Blocks used one after another: all tensors have the piece of a block before it is used, no step brings
    more than its share, and little more than a piece of each is there early."""
    count, each = 3, max(1, HUGE_PAGE // block_bytes)
    blocks = 4 * each
    tensors = [uninitialised((blocks, block_bytes), torch.uint8) for _ in range(count)]
    ahead = Ahead(tensors)
    for block in range(blocks):
        assert all(resident(tensor[block]) == 1 for tensor in tensors), "before it is used"
        before = sum(resident(tensor) for tensor in tensors)
        early = (block // each + 3) * each  # a piece, and what its last huge page holds of the next
        for _ in range(-(-count // each)):  # where a block is more than its share of a piece, steps are long
            ahead.reached(block)
        gained = sum(resident(tensor) for tensor in tensors) - before
        assert gained <= -(-count // each) * (each + 1) / blocks
        assert all(resident(tensor[early:]) == 0 for tensor in tensors if early < blocks)
    ahead.reached(blocks - 1)  # there is no more


@linux
def test_many_blocks_at_once_are_not_populated_again() -> None:
    """A step that jumps ahead has touched its blocks itself: the next piece is the one after."""
    tensor, other = (uninitialised((64, HUGE_PAGE // 4), torch.uint8) for _ in range(2))
    ahead = Ahead([tensor, other])
    tensor[:20] = 1
    ahead.reached(19)
    assert resident(tensor[20:24]) == 1
    assert resident(tensor[24:]) == 0
    assert bool((tensor[:20] == 1).all())
