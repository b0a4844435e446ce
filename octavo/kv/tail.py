"""The tail of a sequence: the block that `length` stands in, and whether it may be written in place.

    [ 11: a b c . ]      the next token goes here, if nobody else depends on that slot
          length ^

The tail may be shared, or published with tokens past `length`. It is written in place when this sequence
alone depends on the slots from `length` on: it stands in no other table or was claimed (`_claim`) before
others came, and nothing is published there. Else the first write copies, into a block held for it (`_spare`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.kv.errors import NotReserved
from octavo.kv.types import TOKEN_BYTES

if TYPE_CHECKING:
    from octavo.kv.sequence import Sequence


def block_of(seq: Sequence) -> int:
    """The id of the block that `length` stands in, wherever it lies."""
    index = seq.length // seq._pool.block_size
    if index >= seq._num_blocks and seq._parked:
        return seq._parked[index - seq._num_blocks].block
    return int(seq._pool._tables[seq.row, index])


def shared(seq: Sequence) -> int:
    """The block that the next write must copy first, or -1 if it may write in place."""
    blocks = seq._pool._blocks
    offset = seq.length % seq._pool.block_size
    if offset == 0:
        return -1
    tail = block_of(seq)
    if tail >= blocks.num_device:
        return -1  # brought back, it will be this sequence's alone
    key = seq._pool._tree.key[tail]
    if key is not None and len(key) > offset * TOKEN_BYTES:
        return tail
    return -1 if tail == seq._claim or blocks.sharers(tail) == 1 else tail


def awaits_copy(seq: Sequence, position: int) -> bool:
    """Whether the block at `position` still waits for its copy."""
    index = position // seq._pool.block_size
    return index < seq._num_blocks and int(seq.table[index]) in seq._pool._blocks.copies


def copy(seq: Sequence, src: int) -> None:
    """Replace the shared tail by the spare block, to be filled by a copy. Raises NotReserved without one."""
    if seq._spare < 0:
        raise NotReserved("the tail block came to be shared after reserve(); reserve again")
    pool, size = seq._pool, seq._pool.block_size
    dst, seq._spare = seq._spare, -1
    pool._tables[seq.row, seq.length // size] = dst
    pool._blocks.queue_copy(src, dst, seq.length % size)


def give_spare(seq: Sequence) -> None:
    """Let go of the block that was held for a copy, if any."""
    if seq._spare >= 0:
        seq._pool._blocks.release(seq._spare)
        seq._spare = -1
