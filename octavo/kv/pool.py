"""The pool of physical blocks: who holds each, which are free, which are cached, and what to copy.

    block:   0       1       2       3       4       5
    count:   2       1       0       0       1       0
    key:     [..16]  -       [..16]  -       [..3]   [..9]
    state:   held    held    cached  free    held    cached

A block is free (on `_free`), held (count > 0) or cached (count 0 and published in the tree, known to
the eviction policy). Sequences ask for blocks and give them back; the pool evicts cached blocks when
the free list is empty. It decides and returns data: the copies wait in `_copies` until drain().
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.kv.errors import InvalidArgument
from octavo.kv.eviction import LRU, EvictionPolicy
from octavo.kv.sequence import Sequence
from octavo.kv.tree import PrefixTree
from octavo.kv.types import (
    DEFAULT_SCOPE,
    TOKEN_BYTES,
    Actions,
    Copy,
    Fit,
    Hit,
    PoolStats,
    Scope,
    Tokens,
    token_bytes,
)

MAX_BLOCK_SIZE = 256
_INITIAL_ROWS = 16
_INITIAL_COLUMNS = 32


class Pool:
    """Virtual memory for the KV cache of one device.

    num_blocks: blocks, ids 0..num_blocks-1, every one usable. block_size: token slots per block,
    1..256. prefix_caching: publish computed blocks so that later sequences can reuse them; off, a
    block is free as soon as nobody holds it, and only fork() shares. policy: the eviction order.
    Raises InvalidArgument for sizes out of range. Not thread-safe.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        policy: EvictionPolicy | None = None,
    ) -> None:
        if not 1 <= num_blocks < 2**31:
            raise InvalidArgument(f"num_blocks must be at least 1 and below 2**31, got {num_blocks}")
        if not 1 <= block_size <= MAX_BLOCK_SIZE:
            raise InvalidArgument(f"block_size must be 1..{MAX_BLOCK_SIZE}, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._key_bytes = block_size * TOKEN_BYTES
        self._refs: list[int] = [0] * num_blocks
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))  # a stack: reuse the warmest
        self._tree = PrefixTree(num_blocks)
        self._policy: EvictionPolicy = policy if policy is not None else LRU()
        self._copies: dict[int, Copy] = {}  # by dst; each holds a reference on its src until drain()
        self._pins: dict[int, int] = {}  # src -> how many of its references are such copies
        self._tables = np.full((_INITIAL_ROWS, _INITIAL_COLUMNS), -1, np.int32)
        self._open: dict[int, Sequence] = {}  # by table row
        self._free_rows: list[int] = list(range(_INITIAL_ROWS - 1, -1, -1))
        self._evictions = self._num_copies = self._merges = 0

    # -- what callers ask ----------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Blocks that reserve() could take now: free + cached. O(1)."""
        return len(self._free) + len(self._policy)

    @property
    def tables(self) -> npt.NDArray[np.int32]:
        """Every block table, one row each, padded with -1. The array moves when it grows."""
        return self._tables

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def can_ever_fit(self, num_tokens: int) -> Fit:
        """Whether an empty pool could hold a sequence of `num_tokens`; need and have in blocks."""
        need = self.blocks_for(num_tokens)
        return Fit(need <= self.num_blocks, need, self.num_blocks)

    def probe(self, tokens: Tokens, scope: Scope = DEFAULT_SCOPE) -> Hit:
        """What open() would reuse of `tokens`. Changes nothing. O(tokens)."""
        root = self._tree.find_root(scope)
        if root is None or not self.prefix_caching:
            return Hit(0, 0)
        blocks, _, shared = self._match(token_bytes(tokens), root)
        return Hit(len(blocks) * self.block_size + shared, len(blocks))

    def open(self, tokens: Tokens, scope: Scope = DEFAULT_SCOPE) -> Sequence:
        """Start a sequence for `tokens`, holding the longest cached prefix that leaves one to compute.

        Takes no new block. O(tokens). Raises InvalidArgument for token ids that are not int32.
        """
        data = token_bytes(tokens)
        root = self._tree.enter(scope)
        seq = Sequence(self, self._take_row(), root)
        if self.prefix_caching:
            blocks, partial, shared = self._match(data, root)
            if partial >= 0:
                blocks.append(partial)
            seq._adopt(blocks, data, shared)
        return seq

    def drain(self) -> Actions:
        """Hand over the copies to apply before the next forward pass, and unpin their sources."""
        copies = tuple(self._copies.values())
        self._copies.clear()
        self._pins.clear()
        for copy in copies:
            self._release(copy.src)
        return Actions(copies)

    def stats(self) -> PoolStats:
        """Blocks by state and counts since the start. O(1)."""
        free, cached = len(self._free), len(self._policy)
        return PoolStats(
            num_blocks=self.num_blocks,
            free=free,
            held=self.num_blocks - free - cached,
            cached=cached,
            sequences=len(self._open),
            evictions=self._evictions,
            copies=self._num_copies,
            merges=self._merges,
        )

    def check(self) -> None:
        """Walk every invariant and raise InvariantViolated at the first broken one. O(blocks + tables)."""
        from octavo.kv.check import check_pool

        check_pool(self)

    # -- for Sequence --------------------------------------------------------------------------

    def _match(self, data: bytes, root: int) -> tuple[list[int], int, int]:
        """Whole cached blocks, then the block that shares `shared` more tokens (or -1, 0)."""
        tree, width = self._tree, self._key_bytes
        limit = len(data) - TOKEN_BYTES  # one token is left to compute (invariant 4)
        node, blocks, at = root, [], 0
        while at + width <= limit:
            child = tree.find(node, data[at : at + width])
            if child < 0:
                break
            blocks.append(child)
            node = child
            at += width
        rest = data[at : min(at + width, limit)]
        if not rest:
            return blocks, -1, 0
        partial, shared = tree.longest(node, rest)
        return blocks, partial, shared

    def _allocate(self, count: int) -> list[int]:
        """Take `count` blocks, evicting as needed. The caller has checked `available`."""
        free = self._free
        while len(free) < count:
            self._evict(self._policy.victim())
        taken = [free.pop() for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        return taken

    def _evict(self, block: int) -> None:
        """Turn a cached leaf into a free block."""
        self._policy.remove(block)
        self._tree.unpublish(block)
        self._free.append(block)
        self._evictions += 1

    def _hold(self, block: int) -> None:
        """One holder more."""
        if self._refs[block] == 0:
            self._policy.remove(block)
        self._refs[block] += 1

    def _release(self, block: int) -> None:
        """One holder fewer; the last one leaves the block cached if published, else free."""
        refs = self._refs[block] - 1
        self._refs[block] = refs
        if refs:
            return
        if self._tree.key[block] is not None:
            self._policy.add(block)
        else:
            self._discard(block)

    def _discard(self, block: int) -> None:
        """Free an unpublished block that nobody holds, and drop a copy still due to it."""
        copy = self._copies.pop(block, None)
        if copy is not None:
            self._pins[copy.src] -= 1
            self._release(copy.src)
        self._free.append(block)

    def _merge(self, block: int, equal: int) -> None:
        """A sequence gives up `block` for `equal`, which holds the same tokens."""
        self._hold(equal)
        self._merges += 1
        if self._refs[block] == 1 and self._tree.key[block] is not None:
            self._tree.unpublish(block)  # it was published with fewer of the same tokens
        self._release(block)

    def _sharers(self, block: int) -> int:
        """Sequences that hold `block`. Copies to be made from it do not count: they read it before
        the forward pass writes, and only slots that nobody will write."""
        return self._refs[block] - self._pins.get(block, 0)

    def _queue_copy(self, src: int, dst: int, num_slots: int) -> None:
        """Copy before the next forward. The caller's reference on `src` passes to the copy.

        A source that itself still waits to be filled is bypassed, so that copies stay independent:
        nothing was committed in it since, so its first `num_slots` are those of its own source.
        """
        due = self._copies.get(src)
        if due is not None:
            self._hold(due.src)
            self._release(src)
            src = due.src
        self._copies[dst] = Copy(src, dst, num_slots)
        self._pins[src] = self._pins.get(src, 0) + 1
        self._num_copies += 1

    def _take_over(self, block: int, keep: bytes) -> None:
        """Cut a published block down to `keep`, so that its only holder may write behind that.

        Everything cached below it goes: with one holder, who stands at this block, nothing there
        is held (invariant 3).
        """
        stack = self._tree.children(block)
        while stack:
            children = self._tree.children(stack[-1])
            if children:
                stack += children
            else:
                self._evict(stack.pop())
        parent = self._tree.parent[block]
        self._tree.unpublish(block)
        if not self._tree.covers(parent, keep):
            self._tree.publish(block, parent, keep)

    def _take_row(self) -> int:
        """A free row of the table array, which doubles when there is none."""
        if not self._free_rows:
            rows = len(self._tables)
            self._tables = np.pad(self._tables, ((0, rows), (0, 0)), constant_values=-1)
            self._free_rows = list(range(2 * rows - 1, rows - 1, -1))
        return self._free_rows.pop()

    def _give_row(self, row: int) -> None:
        self._free_rows.append(row)

    def _widen(self, columns: int) -> None:
        """Make every row at least `columns` wide; doubling keeps the amortised cost constant."""
        have = self._tables.shape[1]
        if columns > have:
            wider = max(columns, 2 * have)
            self._tables = np.pad(self._tables, ((0, 0), (0, wider - have)), constant_values=-1)
