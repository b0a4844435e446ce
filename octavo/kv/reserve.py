"""Room for a sequence's next tokens: what it takes, and taking it, all or nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from octavo.kv import parked, tail
from octavo.kv.errors import InvalidArgument
from octavo.kv.types import TOKEN_BYTES, Granted, NoRoom

if TYPE_CHECKING:
    from octavo.kv.sequence import Sequence


class Need(NamedTuple):
    """New blocks for the table, whether a spare is needed for a copy, whether cutting the tail back
    avoids that copy, what to bring back, and how many blocks are missing (0 or less: none)."""

    grow: int
    copies: bool
    cut_back: bool
    back: parked.BringBack | None
    short: int


def need(seq: Sequence, n: int) -> Need:
    """What room for `n` more tokens would take. Pure. O(parked blocks). Raises InvalidArgument."""
    if n < 1:
        raise InvalidArgument(f"reserve needs n >= 1, got {n}")
    pool, blocks = seq._pool, seq._pool._blocks
    grow = max(0, pool.blocks_for(seq.length + n) - seq._num_blocks - len(seq._parked))
    src = tail.shared(seq)
    copies = src >= 0 and seq._spare < 0
    back = parked.plan(seq) if seq._parked else None
    short = grow + copies + (back.cost if back else 0) - blocks.available
    cut_back = short > 0 and copies and blocks.refs[src] == 1
    return Need(grow, copies, cut_back, back, short - cut_back)


def reserve(seq: Sequence, n: int) -> Granted | NoRoom:
    """See Sequence.reserve."""
    wanted = need(seq, n)
    if wanted.short > 0:
        return NoRoom(wanted.short)
    pool, copies = seq._pool, wanted.copies
    if wanted.cut_back:
        last = tail.block_of(seq)
        key = pool._tree.key[last]
        assert key is not None  # one holder and still not writable: it is published past `length`
        pool._blocks.cut_back(last, key[: (seq.length % pool.block_size) * TOKEN_BYTES])
        copies = False
    if wanted.back:
        parked.bring_back(seq, wanted.back)
    if copies or wanted.grow:
        taken = pool._blocks.allocate(wanted.grow + copies, seq._priority)
        if copies:
            seq._spare = taken.pop()
        seq._append(taken)
    if seq.length % pool.block_size and tail.shared(seq) < 0:
        seq._claim = tail.block_of(seq)
        tail.give_spare(seq)
    return Granted(wanted.grow + copies + (wanted.back.new if wanted.back else 0))
