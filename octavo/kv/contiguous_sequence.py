"""A sequence's handle on its one region of a ContiguousPool.

    position   0 ............... committed ........ length ................ capacity
               | KV is written    | handed out       | reserved by policy    |
    region     [ 13, 14, 15, 16, 17, 18, 19, ...                             ]

The counterpart of sequence.py: same calls, same order of calls, and a region in place of blocks.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from octavo.kv.errors import InvalidArgument, NotReserved, ProtocolError, SequenceClosed
from octavo.kv.regions import Region
from octavo.kv.types import TOKEN_BYTES, Granted, NoRoom, Tokens, token_bytes

if TYPE_CHECKING:
    from octavo.kv.contiguous import ContiguousPool


class ContiguousSequence:
    """A sequence's region. The API of octavo.kv.Sequence; made by ContiguousPool.open() and fork().

    num_cached: 0, or for a fork what was copied. length: slots handed out. committed: tokens whose KV
    is written. row: its row of ContiguousPool.tables. Every method raises SequenceClosed after close().
    """

    __slots__ = ("_closed", "_final_len", "_pool", "_region", "committed", "length", "num_cached", "row")

    def __init__(self, pool: ContiguousPool, final_len: int) -> None:
        self._pool = pool
        self._final_len = final_len
        self._region: Region | None = None
        self._closed = False
        self.num_cached = self.length = self.committed = 0
        self.row = pool._enter(self)

    @property
    def capacity(self) -> int:
        """Token slots of the region."""
        return self._region.count * self._pool.block_size if self._region else 0

    @property
    def table(self) -> npt.NDArray[np.int32]:
        """The region's block ids, in order: a view that the next change may move."""
        return self._pool._tables[self.row, : self._region.count if self._region else 0]

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._closed

    def reserve(self, n: int) -> Granted | NoRoom:
        """Make sure that the next `n` tokens have slots. All or nothing; Granted says by how many blocks.

        May move the region: the copies wait for drain(), and the old region is free after it. O(free
        regions + blocks). Raises InvalidArgument unless n >= 1 and the policy's length allows it, and
        ProtocolError when the region would have to move while handed-out slots are not committed.
        """
        self._check_open()
        if n < 1:
            raise InvalidArgument(f"reserve needs n >= 1, got {n}")
        if self.length + n <= self.capacity:
            return Granted(0)
        pool, old = self._pool, self._region
        want = pool._region_blocks(self.length + n, self._final_len)
        if old is None:
            start = pool._free.first_fit(want)
            if start < 0:
                return NoRoom(want - pool.available)
            self._settle(pool._take(start, want))
            return Granted(want)
        high = pool._free.around(old.start, old.end)[1]
        grown = want - old.count
        if high - old.start >= want:
            pool._free.take(old.end, old.start + want)
            old.count = want
            self._settle(old)
            return Granted(grown)
        start = pool._place(self, old, want)
        if start < 0:
            return NoRoom(want - max(pool.available, high - old.start))
        if self.committed != self.length:
            raise ProtocolError(
                f"the region must move, but {self.length - self.committed} slots handed out are not committed"
            )
        self._settle(pool._move(old, start, want, self.committed))
        return Granted(grown)

    @property
    def on_device(self) -> bool:
        """Always: there are no other tiers."""
        return True

    @property
    def num_parked(self) -> int:
        """None: there are no other tiers."""
        return 0

    def need(self, n: int) -> int:
        """Blocks by which reserve(n) would make the region longer, wherever they lie. O(1)."""
        self._check_open()
        if self.length + n <= self.capacity:
            return 0
        want = self._pool._region_blocks(self.length + n, self._final_len)
        return want - (self._region.count if self._region else 0)

    def extend(self, n: int) -> npt.NDArray[np.int64]:
        """Slots `[n]` for the next `n` tokens, consecutive. O(n). Raises NotReserved past `capacity`."""
        self._check_open()
        if n < 1 or self._region is None or self.length + n > self.capacity:
            raise NotReserved(f"extend({n}) at length {self.length}, reserved up to {self.capacity}")
        first = self._region.start * self._pool.block_size + self.length
        self.length += n
        return np.arange(first, first + n, dtype=np.int64)

    def commit(self, tokens: Tokens | int) -> None:
        """The KV of the next `tokens` was written. Nothing is published. O(tokens).

        Raises ProtocolError past `length`, or before drain() handed over the copies this builds on.
        """
        self._check_open()
        count = tokens if isinstance(tokens, int) else len(token_bytes(tokens)) // TOKEN_BYTES
        if count < 0:
            raise InvalidArgument(f"commit({count})")
        if not count:
            return
        if self.committed + count > self.length:
            raise ProtocolError(
                f"commit up to {self.committed + count}, but only {self.length} slots were handed out"
            )
        if self._region is not None and self._region in self._pool._moves:
            raise ProtocolError("commit before drain(): the region's first slots are still to be copied")
        self.committed += count

    def fork(self) -> ContiguousSequence:
        """Another sequence with a region and a copy of its own. O(blocks).

        Where no region is free the child comes back empty (length 0), to be computed again. Raises
        ProtocolError while slots are handed out whose KV is not committed.
        """
        self._check_open()
        if self.committed != self.length:
            raise ProtocolError(f"fork with {self.length - self.committed} tokens not committed")
        pool = self._pool
        child = ContiguousSequence(pool, self._final_len)
        if self._region is None or self.length == 0:
            return child
        want = pool._region_blocks(self.length, self._final_len)
        start = pool._free.first_fit(want)
        if start >= 0:
            region = pool._take(start, want)
            src, pins = pool._source(self._region)
            pool._queue(region, src, self.length, pins)
            child._settle(region)
            child.num_cached = child.length = child.committed = self.length
        return child

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on; the region stays as long as it was. O(1).

        Raises InvalidArgument unless 0 <= length <= self.length.
        """
        self._check_open()
        if not 0 <= length <= self.length:
            raise InvalidArgument(f"truncate({length}) outside 0..{self.length}")
        self.length = length
        self.committed = min(self.committed, length)
        self.num_cached = min(self.num_cached, length)
        if self._region is not None:
            self._pool._shorten(self._region, self.committed)

    def revoke(self) -> None:
        """Nothing: a contiguous sequence publishes none of its KV."""
        self._check_open()

    def close(self) -> None:
        """Give the region back. Raises SequenceClosed when called twice. O(free regions + blocks)."""
        self._check_open()
        pool = self._pool
        if self._region is not None:
            pool._shorten(self._region, 0)
            pool._release(self._region)
        self._region = None
        self._closed = True
        pool._leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._closed:
            self.close()

    def __repr__(self) -> str:
        if self._closed or self._region is None:
            return f"<ContiguousSequence {'closed' if self._closed else 'empty'}>"
        return f"<ContiguousSequence [{self._region.start}, {self._region.end}) length={self.length}>"

    def _check_open(self) -> None:
        if self._closed:
            raise SequenceClosed("this sequence was closed")

    def _settle(self, region: Region) -> None:
        """The region is new, or longer: write the table."""
        self._region = region
        self._pool._fill_row(self.row, region)
