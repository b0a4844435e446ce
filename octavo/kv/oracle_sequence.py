"""The oracle's sequence: see oracle.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.kv.errors import InvalidArgument, NotReserved, ProtocolError, SequenceClosed
from octavo.kv.types import Copy, Granted, Move, NoRoom, Scope, Tier, Tokens

if TYPE_CHECKING:
    from octavo.kv.oracle import OraclePool

Path = tuple[int, ...]


@dataclass(slots=True)
class Published:
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
        pool.published[block] = Published(self.scope, before, own)

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

    def revoke(self) -> None:
        self._check_open()
        self.private = True
        for block in self.blocks + [block for block, _ in self.parked]:
            if block in self.pool.published:
                self.pool.drop(block)

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
