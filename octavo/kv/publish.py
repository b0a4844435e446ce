"""Making a sequence's computed blocks findable, and taking that back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from octavo.kv.sequence import Sequence


def publish(seq: Sequence, first: int, data: bytes) -> None:
    """Publish the blocks from index `first` on, which hold the tokens of `data`, the last perhaps in part.

    Costs O(tokens). Full blocks may be replaced in the table by equal ones.
    """
    pool = seq._pool
    width, row = pool._key_bytes, pool._tables[seq.row]
    parent = int(row[first - 1]) if first else seq._root
    if parent == -1:  # forget() gave it back: nothing can be said to follow it
        return
    full = len(data) // width
    keys: list[bytes] = np.frombuffer(data, f"V{width}", full).tolist() if full else []
    i = 0
    while i < full:
        block = int(row[first + i])
        parent = publish_full(seq, first + i, parent, keys[i])
        i += 1
        if parent == block and i < full and not pool._tree.has_children(block):
            # Nothing continues a block that is new in the tree, so all after it are new, too.
            if pool._tree.fill(block) == pool.block_size:
                rest = row[first + i : first + full].tolist()
                pool._blocks.publish_chain(rest, block, keys[i:])
                parent = rest[-1]
            break
    if len(data) > full * width:
        _publish_tail(seq, int(row[first + full]), parent, data[full * width :])


def publish_full(seq: Sequence, index: int, parent: int, key: bytes) -> int:
    """Publish the full block at `index`, or merge it into an equal one; returns who is there now.

    After a parent that is not published in full (an ancestor was dropped, say) it stays private, and
    so does what follows it. An equal block in a lower tier gives way: what was just computed is nearer.
    """
    pool, tree = seq._pool, seq._pool._tree
    block = int(pool._tables[seq.row, index])
    if parent >= 0 and tree.fill(parent) < pool.block_size:
        return block
    equal = tree.find(parent, key)
    if equal < 0:
        pool._blocks.publish(block, parent, key)
    elif equal >= pool._blocks.num_device:
        pool._blocks.supersede(equal, block)
    elif equal != block:
        pool._tables[seq.row, index] = equal
        pool._blocks.merge(block, equal, seq._priority)
        return equal
    return block


def _publish_tail(seq: Sequence, block: int, parent: int, key: bytes) -> None:
    """Publish a partly filled tail, unless a sibling already begins with the same tokens."""
    tree = seq._pool._tree
    if (parent < 0 or tree.fill(parent) == seq._pool.block_size) and not tree.covers(parent, key):
        seq._pool._blocks.publish(block, parent, key)


def withdraw(seq: Sequence) -> None:
    """Make every block of `seq`, wherever it lies, unfindable, and the sequence private."""
    blocks, seq._private = seq._pool._blocks, True
    for block in [*seq.table.tolist(), *(entry.block for entry in seq._parked)]:
        if block >= 0 and blocks.tree.key[block] is not None:
            blocks.drop(block)
