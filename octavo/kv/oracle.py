"""The same API as Pool and Sequence, slow and obvious: what Pool must agree with, operation by operation.

Everything is a dict or a list, and nothing derived is stored: counts are counted, prefixes are found
by looking at every published block, and the block to evict is the leaf that was released longest ago.
Ids, copies, transfers and victims are the same as Pool's, so that a test can compare whole states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.kv.errors import InvalidArgument, NotReserved, ProtocolError, SequenceClosed
from octavo.kv.types import (
    DEFAULT_SCOPE,
    Actions,
    Copy,
    Drop,
    Fit,
    Granted,
    Hit,
    Move,
    NoRoom,
    Place,
    Scope,
    Tier,
    Tokens,
    token_bytes,
)

Path = tuple[int, ...]


@dataclass(slots=True)
class _Published:
    """A block that can be found: its scope, the tokens before it, its own tokens."""

    scope: Scope
    before: Path
    own: Path


@dataclass(eq=False)
class OracleSequence:
    """See octavo.kv.Sequence. tokens: all those committed; blocks: the table, -1 where forgotten;
    parked: (id, tokens of it or None where not known) of what lies in lower tiers."""

    pool: OraclePool
    scope: Scope
    blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    length: int = 0
    num_cached: int = 0
    spare: list[int] = field(default_factory=list)
    parked: list[tuple[int, Path | None]] = field(default_factory=list)
    private: bool = False
    closed: bool = False

    @property
    def committed(self) -> int:
        return len(self.tokens)

    def reserve(self, n: int) -> Granted | NoRoom:
        self._check_open()
        if n < 1:
            raise InvalidArgument("n")
        pool = self.pool
        tail_block = self._tail() if self.length % pool.block_size else -1
        if pool.owner.get(tail_block) is self and self.length + n <= len(self.blocks) * pool.block_size:
            return Granted(0)
        grow = max(0, -(-(self.length + n) // pool.block_size) - len(self.blocks) - len(self.parked))
        copies = self._must_copy() and not self.spare
        shared, new, revived = self._plan()
        need = grow + copies + new + revived
        if need > pool.available:
            tail = self._tail() if copies else -1
            if not copies or pool.refs(tail) > 1:
                return NoRoom(need - pool.available)
            if need - 1 > pool.available:
                return NoRoom(need - 1 - pool.available)
            pool.cut_back(tail, self.length % pool.block_size)
            copies = False
        self._bring_back(shared)
        taken = pool.take(grow + copies)
        if copies:
            self.spare = [taken.pop()]
        self.blocks += taken
        self._claim_tail()
        if self.spare and self.pool.owner.get(self._tail()) is self:
            pool.give(self.spare.pop)
        return Granted(grow + copies + new)

    def extend(self, n: int) -> list[int]:
        self._check_open()
        pool = self.pool
        if n < 1 or self.length + n > len(self.blocks) * pool.block_size:
            raise NotReserved("n")
        if self._must_copy():
            if not self.spare:
                raise NotReserved("shared since")
            at = self.length // pool.block_size
            tail, dst = self.blocks[at], self.spare.pop()
            origin = next((c.src for c in pool.copies if c.dst == tail), tail)
            pool.copies.append(Copy(origin, dst, self.length % pool.block_size))
            self.blocks[at] = dst
            pool.settle(tail)
        elif self.spare:
            pool.give(self.spare.pop)
        positions = range(self.length, self.length + n)
        self.length += n
        self._claim_tail()
        return [self.blocks[p // pool.block_size] * pool.block_size + p % pool.block_size for p in positions]

    def commit(self, tokens: Tokens) -> None:
        self._check_open()
        pool, size = self.pool, self.pool.block_size
        new = [int(t) for t in tokens]
        if not new:
            return
        if self.committed + len(new) > self.length:
            raise ProtocolError("not handed out")
        if any(c.dst == self.blocks[self.committed // size] for c in pool.copies):
            raise ProtocolError("not drained")
        first = self.committed // size
        self.tokens += new
        if self.private:
            return
        for i in range(first, -(-self.committed // size)):
            self._publish(i, tuple(self.tokens[i * size : (i + 1) * size]))

    def _publish(self, i: int, own: Path) -> None:
        pool, block, size = self.pool, self.blocks[i], self.pool.block_size
        before = tuple(self.tokens[: i * size])
        if i and (
            self.blocks[i - 1] not in pool.published or len(pool.published[self.blocks[i - 1]].own) < size
        ):
            return
        siblings = pool.find(self.scope, before)
        if len(own) == size:
            for b, p in siblings.items():
                if p.own != own or b == block:
                    continue
                if b < pool.num_blocks:
                    self.blocks[i] = b
                    pool.cached.pop(b, None)
                    if pool.refs(block) == 0:
                        pool.published.pop(block, None)
                    pool.settle(block)
                    return
                pool.published[block] = pool.published.pop(b)
                if pool.cached.pop(b, None) is not None:
                    pool.discard(b)
                return
        elif any(b != block and p.own[: len(own)] == own for b, p in siblings.items()):
            return
        pool.published[block] = _Published(self.scope, before, own)

    def fork(self) -> OracleSequence:
        self._check_open()
        if self.committed != self.length or self.parked:
            raise ProtocolError("not committed")
        count = -(-self.length // self.pool.block_size)
        child = OracleSequence(
            self.pool, self.scope, self.blocks[:count], list(self.tokens), self.length, self.length,
            private=self.private,
        )  # fmt: skip
        self.pool.sequences.append(child)
        self.pool.disown(self)
        return child

    def truncate(self, length: int) -> None:
        self._check_open()
        size = self.pool.block_size
        forgotten = self.blocks.count(-1) + sum(block < 0 for block, _ in self.parked)
        if not ((forgotten + 1) * size if forgotten else 0) <= length <= self.length:
            raise InvalidArgument("length")
        if length < self.committed and length % size and length // size < self.committed // size:
            self.private = self.private or self._key(length // size) is None
        self._drop(-(-length // size))
        self.length = length
        del self.tokens[length:]
        if self.parked and length % size:
            self.parked[-1] = (self.parked[-1][0], tuple(self.tokens[-(length % size) :]))
        self.num_cached = min(self.num_cached, length)
        self.pool.disown(self, but=self._tail() if length % size else -1)
        if length % size and self._must_copy():
            self.pool.disown(self)

    def forget(self, before: int) -> None:
        self._check_open()
        if self.parked:
            raise ProtocolError("parked")
        for i in reversed(
            range(min(before // self.pool.block_size, self.committed // self.pool.block_size - 1))
        ):
            if self.blocks[i] >= 0:
                block, self.blocks[i] = self.blocks[i], -1
                self.pool.settle(block)

    def suspend(self) -> Granted | NoRoom:
        self._check_open()
        pool, size = self.pool, self.pool.block_size
        if self.committed != self.length:
            raise ProtocolError("not committed")
        if (
            self.length
            and not self.parked
            and any(c.dst == self.blocks[(self.length - 1) // size] for c in pool.copies)
        ):
            raise ProtocolError("not drained")
        count = -(-self.length // size)
        need = sum(block >= 0 for block in self.blocks[:count])
        if need > pool.room(Tier.HOST):
            return NoRoom(need - pool.room(Tier.HOST))
        self._drop(count)
        keys = [self._key(i) for i in range(len(self.blocks))]
        pool.disown(self)
        parked: list[tuple[int, Path | None]] = []
        while self.blocks:
            key, block = keys[len(self.blocks) - 1], self.blocks[-1]
            if block >= 0:
                slot = pool.slot(Tier.HOST)
                alone = pool.refs(block) == 1
                self.blocks.pop()
                parked.append((slot, key))
                self.parked.append((slot, key))  # held from now on
                pool.transfers.append(Move(pool.place(block), pool.place(slot)))
                if alone and block in pool.published and pool.published[block].own == key:
                    pool.published[slot] = pool.published.pop(block)
                pool.settle(block)
            else:
                self.blocks.pop()
                parked.append((-1, key))
        older = self.parked[: len(self.parked) - sum(slot >= 0 for slot, _ in parked)]
        self.parked = parked[::-1] + older
        return Granted(need)

    def resume(self) -> Granted | NoRoom:
        self._check_open()
        shared, new, revived = self._plan()
        if new + revived > self.pool.available:
            return NoRoom(new + revived - self.pool.available)
        self._bring_back(shared)
        return Granted(new)

    def close(self) -> None:
        self._check_open()
        self._drop(0)
        self.closed = True
        self.pool.disown(self)
        self.pool.sequences.remove(self)

    def _plan(self) -> tuple[list[int], int, int]:
        """Per parked block the device block to share or -1; how many are new, how many revived."""
        pool, size = self.pool, self.pool.block_size
        shared: list[int] = []
        linked = not self.blocks or self.blocks[-1] in pool.published
        for at, (block, key) in enumerate(self.parked, len(self.blocks)):
            here = block if block < pool.num_blocks else -1
            found = block in pool.published
            if here < 0 <= block and linked and key is not None and len(key) == size:
                for b, p in pool.find(self.scope, tuple(self.tokens[: at * size])).items():
                    if p.own == key and b < pool.num_blocks:
                        here, found = b, True
            shared.append(here)
            linked = found
        new = sum(here < 0 <= block for here, (block, _) in zip(shared, self.parked, strict=True))
        revived = sum(here in pool.cached for here in set(shared))
        return shared, new, revived

    def _bring_back(self, shared: list[int]) -> None:
        pool, size, first = self.pool, self.pool.block_size, len(self.blocks)
        entries = list(self.parked)
        for here, (block, _) in zip(shared, entries, strict=True):
            if here >= 0 and here != block:
                pool.cached.pop(here, None)
                pool.extra.append(here)
        fresh = pool.take(sum(here < 0 <= block for here, (block, _) in zip(shared, entries, strict=True)))
        pool.extra += fresh
        for here, (block, key) in zip(shared, entries, strict=True):
            self.parked.pop(0)
            if block < 0:
                self.blocks.append(-1)
                continue
            if here < 0:
                here = fresh.pop(0)
                if block in pool.published and pool.published[block].own == key:
                    pool.published[here] = pool.published.pop(block)
                pool.transfers.append(Move(pool.place(block), pool.place(here)))
            if here != block:
                pool.extra.remove(here)
            self.blocks.append(here)
            if here != block:
                pool.settle(block)
        for i, (block, key) in enumerate(entries, first):
            if self.private or block < 0 or key is None or len(key) < size:
                break
            self._publish(i, key)

    def _key(self, i: int) -> Path | None:
        """The tokens of a block, as far as they are known from what is published or committed last."""
        pool, size = self.pool, self.pool.block_size
        if i >= len(self.blocks):
            key = self.parked[i - len(self.blocks)][1]
            return key if key is not None and len(key) == size else None
        if i == self.committed // size:
            return None if self.private else tuple(self.tokens[i * size :])
        found = pool.published.get(self.blocks[i])
        return found.own if found is not None and len(found.own) == size else None

    def _tail(self) -> int:
        i = self.length // self.pool.block_size
        return (
            self.blocks[i]
            if i < len(self.blocks) or not self.parked
            else self.parked[i - len(self.blocks)][0]
        )

    def _check_open(self) -> None:
        if self.closed:
            raise SequenceClosed("closed")

    def _drop(self, keep: int) -> None:
        if self.spare:
            self.pool.give(self.spare.pop)
        while self.parked and len(self.blocks) + len(self.parked) > keep:
            self.pool.give(lambda: self.parked.pop()[0])
        while len(self.blocks) > keep:
            self.pool.give(self.blocks.pop)

    def _must_copy(self) -> bool:
        offset = self.length % self.pool.block_size
        if offset == 0:
            return False
        tail = self._tail()
        if tail >= self.pool.num_blocks:
            return False
        found = self.pool.published.get(tail)
        if found is not None and len(found.own) > offset:
            return True
        sharers = sum(tail in seq.held() for seq in self.pool.sequences)
        return self.pool.owner.get(tail) is not self and sharers > 1

    def held(self) -> list[int]:
        """Every block that this sequence holds, wherever it lies."""
        return [b for b in self.blocks + self.spare + [block for block, _ in self.parked] if b >= 0]

    def _claim_tail(self) -> None:
        pool = self.pool
        claims = self.length % pool.block_size and not self._must_copy()
        pool.disown(self)
        if claims:
            pool.owner[self._tail()] = self


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
        self.published: dict[int, _Published] = {}
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

    def find(self, scope: Scope, before: Path) -> dict[int, _Published]:
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
            self.published[block] = _Published(page.scope, page.before, own)

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
