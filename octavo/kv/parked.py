"""The part of a sequence that lies outside the device: how it gets there, and how it comes back.

    table    [ 0 ][ 5 ]                                on the device
    parked           [ host 3 ][ host 8 ][ disk 1 ]    held where it lies, in the order of positions

After open() the parked blocks are published nodes that were found in lower tiers, from the first such one
on. After suspend() all blocks are parked in host slots: as nodes, where the sequence alone held them; as
private copies, where others go on using the block on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from octavo.kv.publish import publish_full
from octavo.kv.types import Granted, NoRoom, Tier

if TYPE_CHECKING:
    from octavo.kv.sequence import Sequence


class Parked(NamedTuple):
    """A held block, and the tokens of it that the sequence has (b"" where prefix caching is off).

    block -1 stands for one that forget() gave back.
    """

    block: int
    key: bytes


class BringBack(NamedTuple):
    """What bringing back takes: per parked block the device block to share, or -1 for a new one.

    new: blocks to allocate. cost: of what is available, with cached blocks that will be held.
    """

    shared: list[int]
    new: int
    cost: int


def plan(seq: Sequence) -> BringBack:
    """How to bring a sequence's parked blocks back. Pure. O(blocks)."""
    pool = seq._pool
    blocks, tree = pool._blocks, pool._tree
    parent: int | None = int(seq.table[-1]) if seq._num_blocks else seq._root
    if parent is not None and parent >= 0 and tree.key[parent] is None:
        parent = None
    shared: list[int] = []
    revived: set[int] = set()
    new = 0
    for block, key in seq._parked:
        here = block if block < blocks.num_device else -1
        node: int | None = block if block >= 0 and tree.key[block] is not None else None
        if here < 0 <= block and parent is not None and len(key) == pool._key_bytes:
            equal = tree.find(parent, key)
            if 0 <= equal < blocks.num_device:
                here = node = equal
                if blocks.refs[equal] == 0:
                    revived.add(equal)
        shared.append(here)
        new += here < 0 <= block
        parent = node
    return BringBack(shared, new, new + len(revived))


def bring_back(seq: Sequence, back: BringBack) -> None:
    """Carry out a plan made just now, when `back.cost` blocks are available."""
    pool = seq._pool
    blocks = pool._blocks
    entries, seq._parked = seq._parked, []
    for entry, here in zip(entries, back.shared, strict=True):
        if here >= 0 and here != entry.block:
            blocks.hold(here, seq._priority, use=False)  # before allocating might evict it
    fresh = iter(blocks.allocate(back.new, seq._priority))
    first = seq._num_blocks
    row = []
    for entry, here in zip(entries, back.shared, strict=True):
        if entry.block < 0:
            seq._forgotten += 1
        elif here < 0:
            here = next(fresh)
            blocks.fetch(entry.block, here, entry.key)
        elif here != entry.block:
            blocks.release(entry.block)
        row.append(here)
    seq._append(row)
    if not seq._private:
        # What was private in its slot becomes findable again, where its prefix is.
        parent = int(seq.table[first - 1]) if first else seq._root
        for index, entry in enumerate(entries, first):
            if entry.block < 0 or len(entry.key) < pool._key_bytes:
                break
            parent = publish_full(seq, index, parent, entry.key)


def suspend(seq: Sequence) -> Granted | NoRoom:
    """Park all of a settled sequence in host slots; see Sequence.suspend."""
    pool = seq._pool
    blocks = pool._blocks
    count = pool.blocks_for(seq.length)
    on_device = seq.table[: min(count, seq._num_blocks)].tolist()
    need = len(on_device) - seq._forgotten
    short = need - blocks.room(Tier.HOST)
    if short > 0:
        return NoRoom(short)
    seq._drop(count)
    keys = [_key(seq, index) for index in range(len(on_device))]
    entries = []
    for block, key in zip(reversed(on_device), reversed(keys), strict=True):
        entries.append(Parked(-1 if block < 0 else _park(seq, block, key), key))
    seq._parked = entries[::-1] + seq._parked
    pool._tables[seq.row, : seq._num_blocks] = -1
    seq._num_blocks = seq._forgotten = 0
    seq._claim = -1
    return Granted(need)


def let_go(seq: Sequence, entry: Parked) -> None:
    """Give up one parked block."""
    if entry.block >= 0:
        seq._pool._blocks.release(entry.block)


def _key(seq: Sequence, index: int) -> bytes:
    """The tokens that the sequence has in its block at `index`; b"" where they are not known."""
    if index == seq.committed // seq._pool.block_size:
        return b"" if seq._private else seq._tail
    return (seq._key_at(index) or b"") if seq.table[index] >= 0 else b""


def _park(seq: Sequence, block: int, key: bytes) -> int:
    """Move one block of a sequence to a host slot that it holds; returns the slot's id."""
    blocks = seq._pool._blocks
    slot = blocks.take_slot(Tier.HOST)
    blocks.refs[slot] = blocks.uses[slot] = 1
    blocks.priority[slot] = seq._priority
    if blocks.refs[block] == 1 and blocks.tree.key[block] == key:
        blocks.relocate(block, slot)
    else:
        blocks.transfer(block, slot)
    blocks.release(block)
    return slot
