"""The pool: what sequences are opened on, and what an engine asks.

Sequences take blocks and give them back (sequence.py); blocks.py knows who holds what and where; tree.py
what can be found. The pool joins them, keeps every block table as a row of one array, and hands over
what is to be carried out.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import chain

import numpy as np
import numpy.typing as npt

from octavo.kv import watch
from octavo.kv.blocks import Blocks
from octavo.kv.errors import InvalidArgument
from octavo.kv.eviction import LRU, EvictionPolicy, Expiring
from octavo.kv.restore import persist, restore
from octavo.kv.sequence import Sequence
from octavo.kv.types import (
    DEFAULT_SCOPE,
    TOKEN_BYTES,
    Actions,
    Event,
    Fit,
    Hit,
    Place,
    PoolStats,
    Record,
    Scope,
    Tier,
    Tokens,
    token_bytes,
)
from octavo.kv.watch import Watch

MAX_BLOCK_SIZE = 256
_NOTHING = Actions((), ())
_INITIAL_ROWS = 16
_INITIAL_COLUMNS = 32


class Pool:
    """Virtual memory for the KV cache of one device, with optional host and disk tiers below it.

    num_blocks: device blocks, ids 0..num_blocks-1, every one usable. block_size: token slots per
    block, 1..256. prefix_caching: publish computed blocks so that later sequences can reuse them; off,
    a block is free as soon as nobody holds it, and only fork() shares. policy: the device's eviction
    order. host_blocks, disk_blocks: slots of the lower tiers, where evicted blocks go and come back
    from. record_events: keep what becomes findable or stops being so, for events(). debug: remember
    where each sequence was opened, for leaks(). Raises InvalidArgument for sizes out of range. Not
    thread-safe.
    """

    gives_back_tail = True
    """Whether truncate() makes room for others."""

    grows = True
    """Whether an admitted sequence may ever need more blocks than its first reserve() took."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        policy: EvictionPolicy | None = None,
        host_blocks: int = 0,
        disk_blocks: int = 0,
        record_events: bool = False,
        debug: bool = False,
    ) -> None:
        if not 1 <= num_blocks < 2**31:
            raise InvalidArgument(f"num_blocks must be at least 1 and below 2**31, got {num_blocks}")
        if not 1 <= block_size <= MAX_BLOCK_SIZE:
            raise InvalidArgument(f"block_size must be 1..{MAX_BLOCK_SIZE}, got {block_size}")
        for name, value in (("host_blocks", host_blocks), ("disk_blocks", disk_blocks)):
            if not 0 <= value < 2**31:
                raise InvalidArgument(f"{name} must be at least 0 and below 2**31, got {value}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._key_bytes = block_size * TOKEN_BYTES
        order = policy if policy is not None else LRU()  # an empty policy is falsy
        sizes = (num_blocks, host_blocks, disk_blocks)
        self._blocks = Blocks(sizes, block_size, order, record_events=record_events)
        self._tree = self._blocks.tree
        self._tables = np.full((_INITIAL_ROWS, _INITIAL_COLUMNS), -1, np.int32)
        self._open: dict[int, Sequence] = {}  # by table row
        self._free_rows: list[int] = list(range(_INITIAL_ROWS - 1, -1, -1))
        self._sites: dict[int, str] | None = {} if debug else None
        self._queried = self._found = 0
        self._windowed = False  # whether forget() was ever used: then a held block's ancestors may not be

    # -- what callers ask ----------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Device blocks that reserve() could take now: free + cached. O(1)."""
        return self._blocks.available

    @property
    def host_room(self) -> int:
        """Host slots that suspend() could take now: free + cached. O(1)."""
        return self._blocks.room(Tier.HOST)

    def gain(self, seqs: Seq[Sequence]) -> int:
        """Device blocks that would become available if these sequences left the device together.

        Blocks that others hold, too, do not count, nor do those that a copy still waits for. O(blocks).
        """
        refs, tables = self._blocks.refs, self._tables
        rows = [tables[seq.row, seq._forgotten : seq._num_blocks].tolist() for seq in seqs]
        rows.append([seq._spare for seq in seqs if seq._spare >= 0])
        held = Counter(chain.from_iterable(rows))
        return sum(refs[block] == count for block, count in held.items())

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
        """What open() would reuse of `tokens`, from every tier. Changes nothing. O(tokens)."""
        root = self._tree.find_root(scope)
        if root is None or not self.prefix_caching:
            return Hit(0, 0)
        blocks, _, shared = self._match(token_bytes(tokens), root)
        return Hit(len(blocks) * self.block_size + shared, len(blocks))

    def open(self, tokens: Tokens, scope: Scope = DEFAULT_SCOPE, *, priority: int = 0) -> Sequence:
        """Start a sequence for `tokens`, holding the longest cached prefix that leaves one to compute.

        Takes no new block; what lies in a lower tier is brought back by the first reserve(). priority:
        of its blocks, for the Priority policy. O(tokens). Raises InvalidArgument for token ids that
        are not int32.
        """
        data = token_bytes(tokens)
        seq = Sequence(self, self._take_row(), self._tree.enter(scope), priority)
        if self._sites is not None:
            self._sites[seq.row] = "".join(traceback.format_stack(limit=4)[:-1])
        seq._opened = data
        if self.prefix_caching:
            blocks, partial, shared = self._match(data, seq._root)
            if partial >= 0:
                blocks.append(partial)
            seq._adopt(blocks, data, shared)
            self._queried += len(data) // TOKEN_BYTES
            self._found += seq.num_cached
        return seq

    def pin(self, tokens: Tokens, scope: Scope = DEFAULT_SCOPE) -> Sequence:
        """Keep what is cached of `tokens` from being evicted until the handle returned is closed."""
        return self.open(np.append(np.frombuffer(token_bytes(tokens), np.int32), np.int32(0)), scope)

    def drain(self) -> Actions:
        """Hand over what to carry out before the next forward pass, and unpin what waited for it."""
        if not self._blocks.transfers and not self._blocks.copies:
            return _NOTHING
        transfers = tuple(self._blocks.transfers)
        self._blocks.transfers.clear()
        return Actions(self._blocks.take_copies(), transfers)

    def lost(self, place: Place) -> list[Sequence]:
        """A transfer to `place` failed: nothing is served from it or from what follows it.

        Returns the open sequences that hold it, which the caller must close and compute again.
        O(open sequences + what followed it).
        """
        block = self._blocks.bases[place.tier] + place.slot
        if self._tree.key[block] is not None:
            self._blocks.drop(block)
        return [
            seq
            for seq in self._open.values()
            if block in seq.table or any(entry.block == block for entry in seq._parked)
        ]

    def clear(self) -> None:
        """Forget everything that can be found (new weights, say). Open sequences keep what they hold."""
        for root in self._tree.roots().values():
            for child in self._tree.children(root):
                self._blocks.drop(child)
        for seq in self._open.values():
            seq._private = True
        if self._blocks.record_events:
            self._blocks.events.append(Event("cleared"))

    def expire(self, now: int) -> None:
        """Set the logical time, and forget cached blocks whose time to live has run out; needs an
        Expiring policy. A block's time starts when its last holder leaves, and again in a lower tier.
        O(blocks that expire). Raises InvalidArgument for another policy."""
        for policy in self._blocks.policies:
            if not isinstance(policy, Expiring):
                raise InvalidArgument("expire() needs a pool with an Expiring policy")
            policy.now = now
            for block in policy.expired():
                if self._tree.key[block] is not None and self._blocks.refs[block] == 0:
                    self._blocks.drop(block)

    def persist(self) -> None:
        """Move every cached block of device and host to the disk tier, as far as it has room: before a
        shutdown. Follow with drain(). O(cached blocks)."""
        persist(self._blocks)

    def restore(self, records: Iterable[tuple[int, Record]]) -> list[int]:
        """Make findable again what a disk tier holds from before: (slot, record) in any order.

        Into an empty pool only. Returns the slots that lead nowhere (an ancestor is missing, or an
        equal block is there already), for the store to drop. O(records).
        """
        return restore(self._blocks, records, self._key_bytes)

    def events(self) -> list[Event]:
        """What became findable or stopped being so since the last call; needs record_events."""
        events, self._blocks.events = self._blocks.events, []
        return events

    def leaks(self) -> list[str]:
        """Where each sequence still open was opened; needs debug."""
        return [] if self._sites is None else [self._sites.get(row, "a fork") for row in self._open]

    def stats(self) -> PoolStats:
        """Blocks by state and counts since the start. O(1)."""
        blocks = self._blocks
        device = blocks.tier_stats(Tier.DEVICE)
        return PoolStats(
            num_blocks=self.num_blocks,
            free=device.free,
            held=device.held,
            cached=device.cached,
            sequences=len(self._open),
            host=blocks.tier_stats(Tier.HOST),
            disk=blocks.tier_stats(Tier.DISK),
            queried_tokens=self._queried,
            hit_tokens=self._found,
            evictions=blocks.evictions,
            demotions=blocks.demotions,
            promotions=blocks.promotions,
            copies=blocks.num_copies,
            merges=blocks.merges,
        )

    def watch(self) -> Watch:
        """Note which blocks change from now on, until unwatch(); a second call gives the same Watch. O(1)."""
        return watch.start(self._blocks)

    def unwatch(self) -> None:
        """Note no more. O(1)."""
        watch.stop(self._blocks)

    def num_shared(self) -> int:
        """Device blocks with more than one holder. O(num_blocks)."""
        return sum(count > 1 for count in self._blocks.refs[: self.num_blocks])

    def check(self) -> None:
        """Walk every invariant and raise InvariantViolated at the first broken one. O(blocks + tables)."""
        from octavo.kv.check import check_pool

        check_pool(self)

    # -- for Sequence --------------------------------------------------------------------------

    def _match(self, data: bytes, root: int) -> tuple[list[int], int, int]:
        """Whole cached blocks, then the block that shares `shared` more tokens (or -1, 0)."""
        tree, width = self._tree, self._key_bytes
        limit = len(data) - TOKEN_BYTES  # one token is left to compute
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

    def _take_row(self) -> int:
        """A free row of the table array, which doubles when there is none."""
        if not self._free_rows:
            rows = len(self._tables)
            self._tables = np.pad(self._tables, ((0, rows), (0, 0)), constant_values=-1)
            self._free_rows = list(range(2 * rows - 1, rows - 1, -1))
        return self._free_rows.pop()

    def _give_row(self, row: int) -> None:
        self._free_rows.append(row)
        if self._sites is not None:
            self._sites.pop(row, None)

    def _widen(self, columns: int) -> None:
        """Make every row at least `columns` wide; doubling keeps the amortised cost constant."""
        have = self._tables.shape[1]
        if columns > have:
            wider = max(columns, 2 * have)
            self._tables = np.pad(self._tables, ((0, 0), (0, wider - have)), constant_values=-1)
