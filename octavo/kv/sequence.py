"""A sequence's handle on its blocks.

    position   0 ............... committed ........ length .......... capacity
               | KV is written    | handed out       | reserved        |
    blocks     [ 0 ][ 5 ][ 9 ]     [ 11 ]             [ 3 ]              one row of the pool's table

open() starts with length = committed = num_cached. reserve() adds blocks at the right, extend() moves
`length`, commit() moves `committed` and publishes, truncate() moves all three back.

The tail block (the one that `length` stands in) may be shared, or published with tokens past `length`.
It is written in place when this sequence alone depends on the slots from `length` on: it holds the
only table entry or has claimed the block, and nothing is published there. Else the first write copies.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from octavo.kv.errors import InvalidArgument, NotReserved, ProtocolError, SequenceClosed
from octavo.kv.types import TOKEN_BYTES, Granted, NoRoom, Tokens, token_bytes

if TYPE_CHECKING:
    from octavo.kv.pool import Pool


class Sequence:
    """One branch of a request, as the pool sees it. Made by Pool.open() and fork(); end with close().

    num_cached: tokens whose KV was found at open. length: token slots handed out. committed: tokens
    whose KV is written. row: this sequence's row of Pool.tables. Every method raises SequenceClosed
    after close().
    """

    __slots__ = (
        "_claim", "_closed", "_num_blocks", "_pool", "_root", "_spare", "_tail",
        "committed", "length", "num_cached", "row",
    )  # fmt: skip

    def __init__(self, pool: Pool, row: int, root: int) -> None:
        self._pool = pool
        self.row = row
        self._root = root
        self._num_blocks = 0  # of the table, reserved ones included
        self._spare = -1  # a block held for the copy that the next extend() makes
        self._claim = -1  # the tail block that only this sequence may write in place
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
        """The physical block ids, reserved ones included: a view that the next change may move."""
        return self._pool._tables[self.row, : self._num_blocks]

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    def reserve(self, n: int) -> Granted | NoRoom:
        """Make sure that the next `n` tokens have slots, and a spare block if the first must copy.

        All or nothing: NoRoom leaves no trace. Blocks that an earlier call reserved count. When room
        is short, a published block that only this sequence holds is cut back and written in place
        rather than copied. O(new blocks). Raises InvalidArgument unless n >= 1.
        """
        self._check_open()
        if n < 1:
            raise InvalidArgument(f"reserve needs n >= 1, got {n}")
        pool = self._pool
        grow = max(0, pool.blocks_for(self.length + n) - self._num_blocks)
        tail = self._shared_tail()
        need = grow + (tail >= 0 and self._spare < 0)
        short = need - pool.available
        if short > 0:
            if tail < 0 or self._spare >= 0 or pool._refs[tail] > 1:
                return NoRoom(short)
            if short > 1:
                return NoRoom(short - 1)
            keep = (self.length % pool.block_size) * TOKEN_BYTES
            key = pool._tree.key[tail]
            assert key is not None  # one holder and still not writable: it is published past `length`
            pool._take_over(tail, key[:keep])
            need -= 1
        if need:
            self._take(need, grow)
        if self.length % pool.block_size and self._shared_tail() < 0:
            self._claim = self._tail_block()
        return Granted(need)

    def extend(self, n: int) -> npt.NDArray[np.int64]:
        """Slots `[n]` for the next `n` tokens: block * block_size + offset, in order.

        Queues a copy in the pool when the first token would be written into a block that others
        depend on. O(n). Raises NotReserved when reserve() did not cover it.
        """
        self._check_open()
        pool, size = self._pool, self._pool.block_size
        if n < 1 or self.length + n > self.capacity:
            raise NotReserved(f"extend({n}) at length {self.length}, reserved up to {self.capacity}")
        shared = self._shared_tail()
        if shared >= 0:
            self._copy_tail(shared)
        elif self._spare >= 0:  # whoever shared the tail has gone
            pool._release(self._spare)
            self._spare = -1
        first, self.length = self.length, self.length + n
        if n == 1:
            block = int(pool._tables[self.row, first // size])
            slots = np.array([block * size + first % size], np.int64)
        else:
            positions = np.arange(first, self.length)
            blocks = pool._tables[self.row, positions // size].astype(np.int64)
            slots = blocks * size + positions % size
        self._claim = self._tail_block() if self.length % size else -1
        return slots

    def commit(self, tokens: Tokens) -> None:
        """The KV of the next `tokens` after `committed` has been written: publish it for reuse.

        A full block equal to a published one is merged into it (the table changes, the spare twin
        is given back); a partly filled tail is published up to its fill. O(tokens). Raises
        ProtocolError past `length` or before drain() handed over the copy that this KV builds on.
        """
        self._check_open()
        pool, tail = self._pool, self._tail
        data = tail + token_bytes(tokens)
        if len(data) == len(tail):
            return
        committed = self.committed + (len(data) - len(tail)) // TOKEN_BYTES
        if committed > self.length:
            raise ProtocolError(f"commit up to {committed}, but only {self.length} slots were handed out")
        if pool._copies and self._num_blocks and self._tail_due(self.committed):
            raise ProtocolError("commit before drain(): the block's first slots are still to be copied")
        first = self.committed // pool.block_size
        self.committed = committed
        full = len(data) // pool._key_bytes
        self._tail = data[full * pool._key_bytes :]
        if not pool.prefix_caching:
            return
        row = pool._tables[self.row]
        parent = int(row[first - 1]) if first else self._root
        for i in range(full):
            key = data[i * pool._key_bytes : (i + 1) * pool._key_bytes]
            parent = self._publish_full(first + i, parent, key)
        if self._tail:
            self._publish_tail(int(row[first + full]), parent)

    def fork(self) -> Sequence:
        """Another sequence with the same tokens so far, sharing every block. O(blocks).

        Raises ProtocolError while slots are handed out whose KV is not committed.
        """
        self._check_open()
        if self.committed != self.length:
            raise ProtocolError(f"fork with {self.length - self.committed} tokens not committed")
        pool = self._pool
        pool._tree.join(self._root)
        child = Sequence(pool, pool._take_row(), self._root)
        count = pool.blocks_for(self.length)
        blocks = self.table[:count].tolist()
        for block in blocks:
            pool._refs[block] += 1
        child._append(blocks)
        child.num_cached = child.length = child.committed = self.length
        child._tail = self._tail
        self._claim = -1
        return child

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on and give back what was reserved. O(blocks given back).

        Raises InvalidArgument unless 0 <= length <= self.length.
        """
        self._check_open()
        if not 0 <= length <= self.length:
            raise InvalidArgument(f"truncate({length}) outside 0..{self.length}")
        pool, size = self._pool, self._pool.block_size
        keep = pool.blocks_for(length)
        if length < self.committed:
            offset = length % size * TOKEN_BYTES
            if length // size < self.committed // size:  # back in a block that was full
                key = pool._tree.key[int(self.table[length // size])]
                self._tail = key[:offset] if key is not None else b"\0" * offset  # unread without a tree
            else:
                self._tail = self._tail[:offset]
            self.committed = length
        self._drop(keep)
        self.length = length
        self.num_cached = min(self.num_cached, length)
        if length % size == 0 or self._claim != self._tail_block():
            self._claim = -1

    def close(self) -> None:
        """Give every block back; what was committed stays findable. O(blocks).

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
        return f"<Sequence row={self.row} length={self.length} table={self.table.tolist()}>"

    # -- inside --------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise SequenceClosed("this sequence was closed")

    def _adopt(self, blocks: list[int], data: bytes, shared: int) -> None:
        """Hold the blocks that open() matched; the last one may be matched in part."""
        pool = self._pool
        for block in blocks:
            pool._hold(block)
        self._append(blocks)
        whole = len(blocks) - (shared > 0)
        self.num_cached = self.length = self.committed = whole * pool.block_size + shared
        at = whole * pool._key_bytes
        self._tail = data[at : at + shared * TOKEN_BYTES]

    def _append(self, blocks: list[int]) -> None:
        pool, have = self._pool, self._num_blocks
        pool._widen(have + len(blocks))
        pool._tables[self.row, have : have + len(blocks)] = blocks
        self._num_blocks = have + len(blocks)

    def _take(self, need: int, grow: int) -> None:
        """Allocate `grow` blocks for the table and, if `need` is one more, the spare."""
        blocks = self._pool._allocate(need)
        if need > grow:
            self._spare = blocks.pop()
        if blocks:
            self._append(blocks)

    def _tail_block(self) -> int:
        return int(self._pool._tables[self.row, self.length // self._pool.block_size])

    def _shared_tail(self) -> int:
        """The block that the next write must copy first, or -1 if it may write in place."""
        pool = self._pool
        offset = self.length % pool.block_size
        if offset == 0:
            return -1
        tail = self._tail_block()
        key = pool._tree.key[tail]
        if key is not None and len(key) > offset * TOKEN_BYTES:
            return tail
        return -1 if tail == self._claim or pool._sharers(tail) == 1 else tail

    def _tail_due(self, position: int) -> bool:
        """Whether the block at `position` still waits for its copy."""
        index = position // self._pool.block_size
        return index < self._num_blocks and int(self.table[index]) in self._pool._copies

    def _copy_tail(self, src: int) -> None:
        """Replace the shared tail by the spare block, to be filled by a copy."""
        if self._spare < 0:
            raise NotReserved("the tail block came to be shared after reserve(); reserve again")
        pool, size = self._pool, self._pool.block_size
        dst, self._spare = self._spare, -1
        pool._tables[self.row, self.length // size] = dst
        pool._queue_copy(src, dst, self.length % size)

    def _publish_full(self, index: int, parent: int, key: bytes) -> int:
        """Publish the full block at `index`, or merge it into an equal one; returns who is there now."""
        pool, tree = self._pool, self._pool._tree
        block = int(pool._tables[self.row, index])
        equal = tree.find(parent, key)
        if equal >= 0 and equal != block:
            pool._tables[self.row, index] = equal
            pool._merge(block, equal)
            return equal
        if equal < 0:
            if tree.key[block] is None:
                tree.publish(block, parent, key)
            else:
                tree.rekey(block, key)
        return block

    def _publish_tail(self, block: int, parent: int) -> None:
        """Publish a partly filled tail, unless a sibling already begins with the same tokens."""
        tree = self._pool._tree
        if tree.covers(parent, self._tail):
            return
        if tree.key[block] is None:
            tree.publish(block, parent, self._tail)
        else:
            tree.rekey(block, self._tail)

    def _drop(self, keep: int) -> None:
        """Give back the spare and all blocks but the first `keep`, from the tail, so that the tail of
        a cached prefix is always evicted before what leads to it."""
        pool = self._pool
        if self._spare >= 0:
            pool._release(self._spare)
            self._spare = -1
        row = pool._tables[self.row]
        for block in row[keep : self._num_blocks][::-1].tolist():
            pool._release(block)
        row[keep : self._num_blocks] = -1
        self._num_blocks = keep
