"""A sequence's handle on its blocks.

    position   0 ............... committed ........ length .......... capacity
               | KV is written    | handed out       | reserved        |
    blocks     [ 0 ][ 5 ][ 9 ]     [ 11 ]             [ 3 ]              one row of the pool's table

open() starts with length = committed = num_cached. reserve() adds blocks at the right, extend() moves
`length`, commit() moves `committed` and publishes, truncate() moves all three back.

The tail block (the one that `length` stands in) may be written in place or must be copied first: tail.py.

What open() found in a lower tier, and all of a suspended sequence, is `_parked` (parked.py): held where it
lies, and brought back by the next reserve() or resume().
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from octavo.kv import parked, publish, reserve, tail
from octavo.kv.errors import InvalidArgument, NotReserved, ProtocolError, SequenceClosed
from octavo.kv.types import TOKEN_BYTES, Granted, NoRoom, Tokens, token_bytes

if TYPE_CHECKING:
    from octavo.kv.pool import Pool


_NOTHING_NEW = Granted(0)


class Sequence:
    """One branch of a request, as the pool sees it. Made by Pool.open() and fork(); end with close().

    num_cached: tokens whose KV was found at open. length: token slots handed out. committed: tokens
    whose KV is written. row: this sequence's row of Pool.tables. Every method raises SequenceClosed
    after close().
    """

    __slots__ = (
        "_claim", "_closed", "_forgotten", "_num_blocks", "_opened", "_parked", "_pool", "_priority",
        "_private", "_root", "_spare", "_tail", "committed", "length", "num_cached", "row",
    )  # fmt: skip

    def __init__(self, pool: Pool, row: int, root: int, priority: int) -> None:
        self._pool = pool
        self.row = row
        self._root = root
        self._priority = priority
        self._num_blocks = 0  # of the table, reserved ones included
        self._forgotten = 0  # leading table entries given back by forget()
        self._parked: list[parked.Parked] = []  # the blocks after those of the table
        self._spare = -1  # a block held for the copy that the next extend() makes
        # The tail block that only this sequence may write in place, -1 if none. While there is one,
        # nothing is published past `length` in it, and no spare is held.
        self._claim = -1
        self._opened = b""  # the tokens given to open()
        self._private = not pool.prefix_caching  # publishes nothing (any more)
        self._tail = b""  # the tokens committed in the block that `committed` stands in
        self._closed = False
        self.num_cached = self.length = self.committed = 0
        pool._open[row] = self

    @property
    def capacity(self) -> int:
        """Token slots in the blocks of the table, reserved ones included."""
        return self._num_blocks * self._pool.block_size

    @property
    def table(self) -> npt.NDArray[np.int32]:
        """The physical block ids, reserved ones included: a view that the next change may move.

        Entries that forget() gave back are -1."""
        return self._pool._tables[self.row, : self._num_blocks]

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    @property
    def on_device(self) -> bool:
        """Whether all of it is in the table; if not, reserve() or resume() brings it back."""
        return not self._parked

    @property
    def num_parked(self) -> int:
        """Its blocks that lie in lower tiers."""
        return len(self._parked)

    def reserve(self, n: int) -> Granted | NoRoom:
        """Make sure that the next `n` tokens have slots, and a spare block if the first must copy.

        All or nothing: NoRoom leaves no trace. Blocks that an earlier call reserved count, and what
        lies in lower tiers is brought back. When room is short, a published block that only this
        sequence holds is cut back and written in place rather than copied. O(new blocks). Raises
        InvalidArgument unless n >= 1.
        """
        self._check_open()
        if self._claim >= 0 and n > 0 and self.length + n <= self._num_blocks * self._pool.block_size:
            return _NOTHING_NEW  # a decode step, mostly: the tail is ours and has room
        return reserve.reserve(self, n)

    def shortage(self, n: int) -> int:
        """Blocks that reserve(n) would be short by now, 0 if it would be granted. Pure. O(parked blocks).

        Raises as reserve() does.
        """
        self._check_open()
        return max(0, reserve.need(self, n).short)

    def need(self, n: int) -> int:
        """Of the pool's available blocks, those that reserve(n) would take. Pure. O(parked blocks).

        Raises as reserve() does.
        """
        self._check_open()
        return reserve.need(self, n).short + self._pool.available

    def extend(self, n: int) -> npt.NDArray[np.int64]:
        """Slots `[n]` for the next `n` tokens: block * block_size + offset, in order.

        Queues a copy in the pool when the first token would be written into a block that others
        depend on. O(n). Raises NotReserved when reserve() did not cover it.
        """
        self._check_open()
        pool, size = self._pool, self._pool.block_size
        if n < 1 or self.length + n > self.capacity:
            raise NotReserved(f"extend({n}) at length {self.length}, reserved up to {self.capacity}")
        if self._claim < 0:
            shared = tail.shared(self)
            if shared >= 0:
                tail.copy(self, shared)
            else:  # whoever shared the tail may have gone
                tail.give_spare(self)
        first, self.length = self.length, self.length + n
        if n == 1:
            block = int(pool._tables[self.row, first // size])
            self._claim = block if self.length % size else -1
            return np.array([block * size + first % size], np.int64)
        positions = np.arange(first, self.length)
        owners = pool._tables[self.row, positions // size].astype(np.int64)
        self._claim = int(owners[-1]) if self.length % size else -1
        slots: npt.NDArray[np.int64] = owners * size + positions % size
        return slots

    def commit(self, tokens: Tokens | int) -> None:
        """The KV of the next `tokens` after `committed` has been written: publish it for reuse.

        tokens: the ids, or how many, where they are those given to open(), which saves reading them
        twice.

        A full block equal to a published one is merged into it (the table changes, the spare twin
        is given back); a partly filled tail is published up to its fill. O(tokens). Raises
        ProtocolError past `length` or before drain() handed over the copy that this KV builds on.
        """
        self._check_open()
        pool, known = self._pool, self._tail
        data = known + (self._given(tokens) if isinstance(tokens, int) else token_bytes(tokens))
        if len(data) == len(known):
            return
        committed = self.committed + (len(data) - len(known)) // TOKEN_BYTES
        if committed > self.length:
            raise ProtocolError(f"commit up to {committed}, but only {self.length} slots were handed out")
        if pool._blocks.copies and tail.awaits_copy(self, self.committed):
            raise ProtocolError("commit before drain(): the block's first slots are still to be copied")
        first = self.committed // pool.block_size
        self.committed = committed
        full = len(data) // pool._key_bytes
        self._tail = data[full * pool._key_bytes :]
        if self._private:
            return
        publish.publish(self, first, data)

    def fork(self) -> Sequence:
        """Another sequence with the same tokens so far, sharing every block. O(blocks).

        Raises ProtocolError while slots are handed out whose KV is not committed, or while part of it
        lies in a lower tier.
        """
        self._check_open()
        self._check_settled("fork")
        if self._parked:
            raise ProtocolError("fork before reserve() brought back what lies in a lower tier")
        pool = self._pool
        pool._tree.join(self._root)
        child = Sequence(pool, pool._take_row(), self._root, self._priority)
        count = pool.blocks_for(self.length)
        blocks = self.table[:count].tolist()
        for block in blocks[self._forgotten :]:
            pool._blocks.hold(block)
        child._append(blocks)
        child._forgotten = self._forgotten
        child.num_cached = child.length = child.committed = self.length
        child._tail = self._tail
        child._private = self._private
        child._opened = self._opened
        self._claim = -1
        return child

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on and give back what was reserved. O(blocks given back).

        Raises InvalidArgument unless 0 <= length <= self.length, or if forget() gave that part back.
        """
        self._check_open()
        pool, size = self._pool, self._pool.block_size
        gone = self._forgotten + sum(entry.block < 0 for entry in self._parked)
        least = (gone + 1) * size if gone else 0  # what forget() gave back is not there to go back to
        if not least <= length <= self.length:
            raise InvalidArgument(f"truncate({length}) outside {least}..{self.length}")
        if length < self.committed:
            offset = length % size * TOKEN_BYTES
            if length // size < self.committed // size and offset:  # back in a block that was full
                key = self._key_at(length // size)
                # A block that is not published has lost its tokens' names: nothing after it can be found.
                self._private = self._private or not key
                self._tail = (key or bytes(offset))[:offset]
            else:
                self._tail = self._tail[:offset]
            self.committed = length
        self._drop(pool.blocks_for(length))
        if self._parked and length % size:
            self._parked[-1] = self._parked[-1]._replace(key=self._tail)
        self.length = length
        self.num_cached = min(self.num_cached, length)
        if self._claim >= 0:
            ours = length % size and self._claim == tail.block_of(self) and tail.shared(self) < 0
            self._claim = self._claim if ours else -1

    def forget(self, before: int) -> None:
        """Give back the blocks that lie wholly before position `before`: a window has left them.

        Their table entries become -1; they stay findable while nobody needs their room. The last full
        block stays, for the next ones to be published after it. O(blocks given back).
        """
        self._check_open()
        if self._parked:
            raise ProtocolError("forget before reserve() brought back what lies in a lower tier")
        size = self._pool.block_size
        until = min(before // size, self.committed // size - 1)
        if until <= self._forgotten:
            return
        self._pool._windowed = True
        row = self._pool._tables[self.row]
        for block in row[self._forgotten : until][::-1].tolist():
            self._pool._blocks.release(block)
        row[self._forgotten : until] = -1
        self._forgotten = until

    def suspend(self) -> Granted | NoRoom:
        """Leave the device: every block's KV goes to a host slot held for this sequence.

        All or nothing: NoRoom (in host slots) changes nothing. Reserved blocks are given back.
        O(blocks). Raises ProtocolError while slots are handed out whose KV is not committed, or a copy
        that it builds on was not drained.
        """
        self._check_open()
        self._check_settled("suspend")
        if self.length and not self._parked and tail.awaits_copy(self, self.length - 1):
            raise ProtocolError("suspend before drain(): a block's first slots are still to be copied")
        return parked.suspend(self)

    def resume(self) -> Granted | NoRoom:
        """Bring everything back that lies in a lower tier; blocks that others hold by now are shared.

        All or nothing: NoRoom (in device blocks) leaves no trace. O(blocks).
        """
        self._check_open()
        if not self._parked:
            return Granted(0)
        back = parked.plan(self)
        short = back.cost - self._pool._blocks.available
        if short > 0:
            return NoRoom(short)
        parked.bring_back(self, back)
        return Granted(back.new)

    def revoke(self) -> None:
        """The KV that it holds turned out to be wrong: none of it can be found any more, nor what others
        published after it, and it publishes nothing again. Others that hold some of it keep it.
        O(blocks and what follows them)."""
        self._check_open()
        publish.withdraw(self)

    def close(self) -> None:
        """Give every block back; what was committed stays findable unless revoked. O(blocks).

        Raises SequenceClosed when called twice.
        """
        self._check_open()
        self._drop(0)
        self._closed = True
        pool = self._pool
        del pool._open[self.row]
        pool._give_row(self.row)
        pool._tree.leave(self._root)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._closed:
            self.close()

    def __repr__(self) -> str:
        if self._closed:
            return "<Sequence closed>"
        away = f" and {len(self._parked)} blocks in lower tiers" if self._parked else ""
        return f"<Sequence row={self.row} length={self.length} table={self.table.tolist()}{away}>"

    # -- inside --------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise SequenceClosed("this sequence was closed")

    def _check_settled(self, what: str) -> None:
        if self.committed != self.length:
            raise ProtocolError(f"{what} with {self.length - self.committed} tokens not committed")

    def _adopt(self, blocks: list[int], data: bytes, shared: int) -> None:
        """Hold the blocks that open() matched; the last one may be matched in part."""
        pool, width = self._pool, self._pool._key_bytes
        store = pool._blocks
        for block in blocks:
            store.hold(block, self._priority)
        whole = len(blocks) - (shared > 0)
        self.num_cached = self.length = self.committed = whole * pool.block_size + shared
        self._tail = data[whole * width : whole * width + shared * TOKEN_BYTES]
        near = len(blocks)
        if blocks and store.has_lower and max(blocks) >= store.num_device:
            near = next(i for i, block in enumerate(blocks) if block >= store.num_device)
            end = self.length * TOKEN_BYTES
            for i, block in enumerate(blocks[near:], near):
                self._parked.append(parked.Parked(block, data[i * width : min((i + 1) * width, end)]))
        self._append(blocks[:near])

    def _given(self, count: int) -> bytes:
        """The next `count` of the tokens given to open()."""
        start = self.committed * TOKEN_BYTES
        data = self._opened[start : start + count * TOKEN_BYTES]
        if count < 0 or len(data) < count * TOKEN_BYTES:
            given = len(self._opened) // TOKEN_BYTES
            raise InvalidArgument(f"commit({count}) at {self.committed}, but open() was given {given} tokens")
        return data

    def _append(self, blocks: list[int]) -> None:
        pool, have = self._pool, self._num_blocks
        pool._widen(have + len(blocks))
        pool._tables[self.row, have : have + len(blocks)] = blocks
        self._num_blocks = have + len(blocks)

    def _key_at(self, index: int) -> bytes | None:
        """The tokens of a committed full block, where known: published in full, or parked as such."""
        if index >= self._num_blocks:
            key: bytes | None = self._parked[index - self._num_blocks].key
        else:
            key = self._pool._tree.key[int(self.table[index])]
        return key if key is not None and len(key) == self._pool._key_bytes else None

    def _drop(self, keep: int) -> None:
        """Give back the spare and all blocks but the first `keep`, from the tail, so that the tail of
        a cached prefix is always evicted before what leads to it."""
        blocks, row = self._pool._blocks, self._pool._tables[self.row]
        tail.give_spare(self)
        while self._parked and self._num_blocks + len(self._parked) > keep:
            parked.let_go(self, self._parked.pop())
        first = max(keep, self._forgotten)
        blocks.release_all(row[first : self._num_blocks][::-1].tolist())
        if keep < self._num_blocks:
            row[keep : self._num_blocks] = -1
            self._num_blocks = keep
        self._forgotten = min(self._forgotten, self._num_blocks)
