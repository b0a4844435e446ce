"""The memory behind a cache: when its pages come, and that nothing changes what they hold."""

from __future__ import annotations

import mmap
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo.attention import pages
from octavo.attention.pages import HUGE_PAGE, Ahead, populate, uninitialised

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/pagemap")


def resident(part: Tensor) -> float:
    """The share of a tensor's pages that the system has given."""
    if not part.numel():
        return 0.0
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


def ended(ahead: Ahead) -> None:
    """Wait until it has nothing to do."""
    thread = ahead._thread
    assert thread is not None
    thread.join()


@linux
@pytest.mark.parametrize("block_bytes", [3 * 2**12, HUGE_PAGE // 4, HUGE_PAGE, 2 * HUGE_PAGE])
def test_blocks_are_there_before_they_are_used(block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was reached, all tensors have half of AHEAD beyond it, and little more than all of it."""
    monkeypatch.setattr(pages, "AHEAD", 24 * HUGE_PAGE)
    count = 3
    each, margin = max(1, HUGE_PAGE // block_bytes), 24 * HUGE_PAGE // count // block_bytes
    blocks = 5 * margin
    tensors = [uninitialised((blocks, block_bytes), torch.uint8) for _ in range(count)]
    for tensor in tensors:
        tensor[0, :9] = 7
    ahead = Ahead(tensors)
    block = 0
    while block < blocks:
        ahead.reached(block)
        ended(ahead)
        for tensor in tensors:
            assert resident(tensor[block : block + margin // 2]) == 1
            assert resident(tensor[block + margin + 2 * each + 1 :]) == 0
        block += margin // 3 + 1
    assert all(resident(tensor) == 1 for tensor in tensors)
    assert all(bool((tensor[0, :9] == 7).all()) for tensor in tensors)
    threads = ahead._thread
    ahead.reached(blocks - 1)
    assert ahead._thread is threads, "there is no more to do"


@linux
def test_stopping_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """stop() in the midst of it returns when the thread has ended, and may be called at any time."""
    tensor = uninitialised((64, HUGE_PAGE), torch.uint8)
    ahead = Ahead([tensor])
    ahead.stop()
    ahead.reached(0)
    ahead.stop()
    assert all(thread.name != "octavo-pages" for thread in threading.enumerate())


@linux
def test_many_parts_take_no_more_than_their_sizes() -> None:
    """A model's layers have a part each: what exceeds a whole number of huge pages comes in small ones."""

    def held() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

    size, before = HUGE_PAGE + HUGE_PAGE // 8, held()
    parts = [uninitialised((size,), torch.uint8).fill_(1) for _ in range(24)]
    grown = held() - before
    assert len(parts) * size * 0.9 < grown < len(parts) * size * 1.1
