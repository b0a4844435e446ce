"""The same API as Pool and Sequence, slow and obvious: what Pool must agree with, operation by operation.

Everything is a dict or a list, and nothing derived is stored: counts are counted, prefixes are found
by looking at every published block, and the block to evict is the leaf that was released longest ago.
Ids, copies, transfers and victims are the same as Pool's, so that a test can compare whole states.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.kv.oracle_sequence import OracleSequence, Path, Published
from octavo.kv.types import (
    DEFAULT_SCOPE,
    Actions,
    Copy,
    Drop,
    Fit,
    Hit,
    Move,
    Place,
    Scope,
    Tier,
    Tokens,
    token_bytes,
)

__all__ = ["OraclePool", "OracleSequence"]


class OraclePool:
    """See octavo.kv.Pool. Every call may look at every block."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        host_blocks: int = 0,
        disk_blocks: int = 0,
    ) -> None:
        self.num_blocks, self.block_size, self.prefix_caching = num_blocks, block_size, prefix_caching
        self.sizes = (num_blocks, host_blocks, disk_blocks)
        self.bases = (0, num_blocks, num_blocks + host_blocks)
        self.free = [list(range(b + n - 1, b - 1, -1)) for b, n in zip(self.bases, self.sizes, strict=True)]
        self.published: dict[int, Published] = {}
        self.cached: dict[int, int] = {}  # id -> when its last holder left, or when it came to its tier
        self.owner: dict[int, OracleSequence] = {}  # block -> who may write its next slot in place
        self.sequences: list[OracleSequence] = []
        self.extra: list[int] = []  # blocks held for a moment between two owners
        self.copies: list[Copy] = []
        self.transfers: list[Move | Drop] = []
        self.clock = 0

    @property
    def available(self) -> int:
        return self.room(Tier.DEVICE)

    def room(self, tier: Tier) -> int:
        return len(self.free[tier]) + sum(self.tier(b) == tier for b in self.cached)

    def tier(self, block: int) -> Tier:
        return Tier(sum(block >= base for base in self.bases[1:]))

    def place(self, block: int) -> Place:
        return Place(self.tier(block), block - self.bases[self.tier(block)])

    def can_ever_fit(self, num_tokens: int) -> Fit:
        need = -(-num_tokens // self.block_size)
        return Fit(need <= self.num_blocks, need, self.num_blocks)

    def probe(self, tokens: Tokens, scope: Scope = DEFAULT_SCOPE) -> Hit:
        blocks, shared = self._match(tuple(int(t) for t in tokens), scope)
        full = len(blocks) - (shared > 0)
        return Hit(full * self.block_size + shared, full)

    def open(self, tokens: Tokens, scope: Scope = DEFAULT_SCOPE) -> OracleSequence:
        wanted = tuple(int(t) for t in tokens)
        blocks, shared = self._match(wanted, scope)
        length = (len(blocks) - (shared > 0)) * self.block_size + shared
        for block in blocks:
            self.cached.pop(block, None)
        seq = OracleSequence(
            self, scope, [], list(wanted[:length]), length, length, private=not self.prefix_caching
        )
        for i, block in enumerate(blocks):
            if block < self.num_blocks and not seq.parked:
                seq.blocks.append(block)
            else:
                own = wanted[:length][i * self.block_size : (i + 1) * self.block_size]
                seq.parked.append((block, own))
        self.sequences.append(seq)
        return seq

    def _match(self, tokens: Path, scope: Scope) -> tuple[list[int], int]:
        """Whole blocks that match, and at the end perhaps one that matches in its first `shared` slots."""
        size, usable = self.block_size, tokens[:-1]  # one token is left to compute
        blocks: list[int] = []
        while True:
            before = usable[: len(blocks) * size]
            rest = usable[len(blocks) * size :][:size]
            here = {b: p.own for b, p in self.find(scope, before).items()}
            whole = [b for b, own in here.items() if own == rest and len(own) == size]
            if not whole:
                break
            blocks += whole
        best, shared = _most_shared(here, rest)
        return ([*blocks, best], shared) if shared else (blocks, 0)

    def find(self, scope: Scope, before: Path) -> dict[int, Published]:
        """Every published block right after these tokens."""
        return {b: p for b, p in self.published.items() if p.scope == scope and p.before == before}

    def drain(self) -> Actions:
        transfers, copies = tuple(self.transfers), tuple(self.copies)
        self.transfers = []
        while self.copies:
            self.settle(self.copies.pop(0).src)
        return Actions(copies, transfers)

    def states(self) -> list[tuple[int, int, int]]:
        """Free, held and cached per tier."""
        out = []
        for tier in Tier:
            free, cached = len(self.free[tier]), sum(self.tier(b) == tier for b in self.cached)
            out.append((free, self.sizes[tier] - free - cached, cached))
        return out

    # -- for OracleSequence --------------------------------------------------------------------

    def refs(self, block: int) -> int:
        """Count the holders of a block."""
        held = sum(seq.held().count(block) for seq in self.sequences) + self.extra.count(block)
        return held + sum(copy.src == block for copy in self.copies)

    def disown(self, seq: OracleSequence, but: int = -1) -> None:
        """`seq` may write no block in place any more, except `but`."""
        self.owner = {b: s for b, s in self.owner.items() if s is not seq or b == but}

    def take(self, count: int) -> list[int]:
        while len(self.free[0]) < count:
            self.evict(self._oldest(Tier.DEVICE))
        return [self.free[0].pop() for _ in range(count)]

    def slot(self, tier: Tier) -> int:
        if not self.free[tier]:
            self.evict(self._oldest(tier))
        return self.free[tier].pop()

    def _oldest(self, tier: Tier) -> int:
        """Partly filled blocks first, then what was released longest ago."""
        here = [b for b in self.cached if self.tier(b) == tier]
        return min(here, key=lambda b: (len(self.published[b].own) == self.block_size, self.cached[b]))

    def evict(self, block: int) -> None:
        """Into the next tier that has or can make room, else out with all that continues it."""
        low = -1
        for tier in (Tier.HOST, Tier.DISK):
            if low < 0 and tier > self.tier(block) and self.room(tier):
                low = self.slot(tier)
        if block not in self.published:
            if low >= 0:
                self.free[self.tier(low)].append(low)
        elif low < 0:
            self.drop(block)
        else:
            self.published[low] = self.published.pop(block)
            self.transfers.append(Move(self.place(block), self.place(low)))
            del self.cached[block]
            self._cache(low)
            self.free[self.tier(block)].append(block)

    def give(self, pop: Callable[[], int]) -> None:
        """A holder lets go: `pop` takes the block out of the list that held it and returns it."""
        self.settle(pop())

    def settle(self, block: int) -> None:
        """A holder of `block` has gone: if it was the last, the block becomes cached or free."""
        if block < 0 or self.refs(block):
            return
        if block in self.published:
            self._cache(block)
        else:
            self.discard(block)

    def _cache(self, block: int) -> None:
        self.clock += 1
        self.cached[block] = self.clock

    def discard(self, block: int) -> None:
        """An unpublished block that nobody holds is free, and a copy due to it is not made."""
        for copy in [c for c in self.copies if c.dst == block]:
            self.copies.remove(copy)
            self.settle(copy.src)
        if self.tier(block) is Tier.DISK:
            self.transfers.append(Drop(self.place(block)))
        self.free[self.tier(block)].append(block)

    def cut_back(self, block: int, keep: int) -> None:
        """Publish `block` with its first `keep` tokens only, dropping everything below it."""
        for child in self._children(block)[::-1]:
            self.drop(child)
        page = self.published.pop(block)
        own = page.own[:keep]
        if not any(p.own[:keep] == own for p in self.find(page.scope, page.before).values()):
            self.published[block] = Published(page.scope, page.before, own)

    def drop(self, block: int) -> None:
        """A block and all that continues it can be found no more."""
        order = [block]
        for node in order:
            order += self._children(node)
        for node in reversed(order):
            del self.published[node]
            if self.cached.pop(node, None) is not None:
                self.discard(node)

    def _children(self, block: int) -> list[int]:
        """Published blocks that continue this one, in key order."""
        page = self.published[block]
        if len(page.own) < self.block_size:
            return []
        found = self.find(page.scope, page.before + page.own)
        return sorted(found, key=lambda b: token_bytes(found[b].own))


def _most_shared(children: dict[int, Path], query: Path) -> tuple[int, int]:
    """The child that shares most leading tokens; on a tie the first at or after the query in key
    order, else the last before it."""

    def shared(own: Path) -> int:
        n = 0
        for a, b in zip(own, query, strict=False):
            if a != b:
                break
            n += 1
        return n

    most = max((shared(own) for own in children.values()), default=0)
    if most == 0:
        return -1, 0
    target = token_bytes(query)
    keys = {token_bytes(own): b for b, own in children.items() if shared(own) == most}
    after = [key for key in keys if key >= target]
    return keys[min(after) if after else max(keys)], most
