"""Notes which blocks changed, for whoever shows them. Costs nothing while nobody watches.

    pool.watch() -> Watch     watch.take() -> Changes(touched ids, evicted ids)     pool.unwatch()

While a pool is watched its Blocks is a `WatchedBlocks`: the same object with methods that also put the ids
concerned into a set. A look at some ids (`view`) then reads state, so what is noted twice is read once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from octavo.kv.blocks import Blocks
from octavo.kv.types import TOKEN_BYTES

NOT_PUBLISHED = -1
LOWER_TIER = -(2**31)
MAX_EVICTED = 4096
"""Evicted ids kept between two takes; the count of evictions is in PoolStats."""


class BlockView(NamedTuple):
    """A device block as it is now. refs: its holders; 0 with fill > 0 is cached. fill: tokens it is
    published with, 0 if it is not. parent: the block before it in the prefix tree, a root (-2 and below),
    NOT_PUBLISHED, or LOWER_TIER."""

    refs: int
    fill: int
    parent: int


class Changes(NamedTuple):
    """Ids since the last take: blocks that may look otherwise now, those among them that were allocated,
    and device blocks that were evicted, oldest first."""

    touched: set[int]
    fresh: set[int]
    evicted: list[int]


class Watch:
    """What a watched pool noted. Made by Pool.watch()."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self.touched: set[int] = set()
        self.fresh: set[int] = set()
        self.evicted: list[int] = []
        self.allocated = 0

    def take(self) -> Changes:
        """The changes since the last call. O(1)."""
        changes = Changes(self.touched, self.fresh, self.evicted)
        self.touched, self.fresh, self.evicted = set(), set(), []
        return changes

    def view(self, block: int) -> BlockView:
        """One device block. O(1)."""
        tree = self._blocks.tree
        key = tree.key[block]
        if key is None:
            return BlockView(self._blocks.refs[block], 0, NOT_PUBLISHED)
        parent = tree.parent(block)
        if parent >= self._blocks.num_device:
            parent = LOWER_TIER
        return BlockView(self._blocks.refs[block], len(key) // TOKEN_BYTES, parent)

    def tokens(self, block: int) -> bytes:
        """The int32 tokens that a device block is published with; b"" if it is not."""
        return self._blocks.tree.key[block] or b""


class WatchedBlocks(Blocks):
    """Blocks that tell its Watch. Each method does what its namesake does, and notes the ids."""

    watch: Watch

    def hold(self, block: int, priority: int = 0, *, use: bool = True) -> None:
        self.watch.touched.add(block)
        super().hold(block, priority, use=use)

    def release(self, block: int) -> None:
        self.watch.touched.add(block)
        super().release(block)

    def release_all(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        self.watch.touched.update(blocks)
        super().release_all(blocks)

    def allocate(self, count: int, priority: int = 0) -> list[int]:
        taken = super().allocate(count, priority)
        self.watch.touched.update(taken)
        self.watch.fresh.update(taken)
        self.watch.allocated += len(taken)
        return taken

    def publish(self, block: int, parent: int, key: bytes) -> None:
        self.watch.touched.add(block)
        super().publish(block, parent, key)

    def publish_chain(self, blocks: Sequence[int], parent: int, keys: Sequence[bytes]) -> None:
        self.watch.touched.update(blocks)
        super().publish_chain(blocks, parent, keys)

    def _unpublish(self, block: int) -> None:
        self.watch.touched.add(block)
        super()._unpublish(block)

    def _discard(self, block: int) -> None:
        self.watch.touched.add(block)
        super()._discard(block)

    def evict(self, block: int) -> None:
        before = self.evictions
        self.watch.touched.add(block)
        super().evict(block)
        if self.evictions > before and len(self.watch.evicted) < MAX_EVICTED and block < self.num_device:
            self.watch.evicted.append(block)

    def relocate(self, block: int, to: int) -> None:
        self.watch.touched.update((block, to))
        super().relocate(block, to)
        self.watch.touched.update(self.tree.children(to))

    def fetch(self, block: int, to: int, key: bytes) -> None:
        self.watch.touched.update((block, to))
        super().fetch(block, to, key)
        if self.tree.key[to] is not None:
            self.watch.touched.update(self.tree.children(to))

    def supersede(self, equal: int, block: int) -> None:
        self.watch.touched.update((equal, block))
        super().supersede(equal, block)
        self.watch.touched.update(self.tree.children(block))


def start(blocks: Blocks) -> Watch:
    """Have `blocks` note its changes from now on. O(1)."""
    if not isinstance(blocks, WatchedBlocks):
        # The methods are looked up on the class, so an unwatched pool pays nothing, not even a test.
        blocks.__class__ = WatchedBlocks
        assert isinstance(blocks, WatchedBlocks)
        blocks.watch = Watch(blocks)
    return blocks.watch


def stop(blocks: Blocks) -> None:
    """Note no more."""
    if isinstance(blocks, WatchedBlocks):
        del blocks.watch
        plain: Blocks = blocks
        plain.__class__ = Blocks
