"""The same API as Pool and Sequence, slow and obvious: what Pool must agree with, operation by operation.

Everything is a dict or a list, and nothing derived is stored: counts are counted, prefixes are found
by looking at every published block, and the block to evict is the leaf that was released longest ago.
Ids, copies and victims are the same as Pool's, so that a test can compare whole states.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.kv.errors import InvalidArgument, NotReserved, ProtocolError, SequenceClosed
from octavo.kv.types import (
    DEFAULT_SCOPE,
    Actions,
    Copy,
    Fit,
    Granted,
    Hit,
    NoRoom,
    PoolStats,
    Scope,
    Tokens,
    token_bytes,
)


@dataclass(slots=True)
class _Published:
    """A block that can be found: its scope, the tokens before it, its own tokens."""

    scope: Scope
    before: tuple[int, ...]
    own: tuple[int, ...]


@dataclass(eq=False)
class OracleSequence:
    """See octavo.kv.Sequence; `tokens` are all those committed."""

    pool: OraclePool
    scope: Scope
    blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    length: int = 0
    num_cached: int = 0
    spare: list[int] = field(default_factory=list)
    closed: bool = False

    @property
    def committed(self) -> int:
        return len(self.tokens)

    def reserve(self, n: int) -> Granted | NoRoom:
        self._check_open()
        if n < 1:
            raise InvalidArgument("n")
        pool = self.pool
        grow = max(0, -(-(self.length + n) // pool.block_size) - len(self.blocks))
        copies = self._must_copy() and not self.spare
        need = grow + copies
        if need > pool.available:
            tail = self.blocks[self.length // pool.block_size] if copies else -1
            if not copies or pool.refs(tail) > 1:
                return NoRoom(need - pool.available)
            if need - 1 > pool.available:
                return NoRoom(need - 1 - pool.available)
            pool.cut_back(tail, self.length % pool.block_size)
            need, copies = need - 1, False
        taken = pool.take(need)
        if copies:
            self.spare = [taken.pop()]
        self.blocks += taken
        self._claim_tail()
        return Granted(need)

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
            pool.num_copies += 1
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
        if not pool.prefix_caching:
            return
        for i in range(first, -(-self.committed // size)):
            before = tuple(self.tokens[: i * size])
            own = tuple(self.tokens[i * size : (i + 1) * size])
            self._publish(i, before, own)

    def _publish(self, i: int, before: tuple[int, ...], own: tuple[int, ...]) -> None:
        pool, block = self.pool, self.blocks[i]
        siblings = {b: p for b, p in pool.published.items() if p.scope == self.scope and p.before == before}
        if len(own) == pool.block_size:
            for b, p in siblings.items():
                if p.own == own and b != block:
                    pool.merges += 1
                    self.blocks[i] = b
                    pool.cached.pop(b, None)
                    if pool.refs(block) == 0:
                        pool.published.pop(block, None)
                    pool.settle(block)
                    return
        elif any(b != block and p.own[: len(own)] == own for b, p in siblings.items()):
            return
        pool.published[block] = _Published(self.scope, before, own)

    def fork(self) -> OracleSequence:
        self._check_open()
        if self.committed != self.length:
            raise ProtocolError("not committed")
        count = -(-self.length // self.pool.block_size)
        child = OracleSequence(
            self.pool, self.scope, self.blocks[:count], list(self.tokens), self.length, self.length
        )
        self.pool.sequences.append(child)
        self.pool.disown(self)
        return child

    def truncate(self, length: int) -> None:
        self._check_open()
        if not 0 <= length <= self.length:
            raise InvalidArgument("length")
        self._drop(-(-length // self.pool.block_size))
        self.length = length
        del self.tokens[length:]
        self.num_cached = min(self.num_cached, length)
        tail = self.blocks[-1] if length % self.pool.block_size else -1
        self.pool.disown(self, but=tail)

    def close(self) -> None:
        self._check_open()
        self._drop(0)
        self.closed = True
        self.pool.disown(self)
        self.pool.sequences.remove(self)

    def _check_open(self) -> None:
        if self.closed:
            raise SequenceClosed("closed")

    def _drop(self, keep: int) -> None:
        if self.spare:
            self.pool.give(self.spare.pop)
        while len(self.blocks) > keep:
            self.pool.give(self.blocks.pop)

    def _must_copy(self) -> bool:
        offset = self.length % self.pool.block_size
        if offset == 0:
            return False
        tail = self.blocks[self.length // self.pool.block_size]
        found = self.pool.published.get(tail)
        if found is not None and len(found.own) > offset:
            return True
        sharers = sum(tail in seq.blocks for seq in self.pool.sequences)
        return self.pool.owner.get(tail) is not self and sharers > 1

    def _claim_tail(self) -> None:
        pool = self.pool
        claims = self.length % pool.block_size and not self._must_copy()
        pool.disown(self)
        if claims:
            pool.owner[self.blocks[self.length // pool.block_size]] = self


class OraclePool:
    """See octavo.kv.Pool. Every call may look at every block."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.num_blocks, self.block_size, self.prefix_caching = num_blocks, block_size, prefix_caching
        self.free = list(range(num_blocks - 1, -1, -1))
        self.published: dict[int, _Published] = {}
        self.cached: dict[int, int] = {}  # block -> when its last holder left
        self.owner: dict[int, OracleSequence] = {}  # block -> who may write its next slot in place
        self.sequences: list[OracleSequence] = []
        self.copies: list[Copy] = []
        self.clock = self.evictions = self.num_copies = self.merges = 0

    @property
    def available(self) -> int:
        return len(self.free) + len(self.cached)

    def can_ever_fit(self, num_tokens: int) -> Fit:
        need = -(-num_tokens // self.block_size)
        return Fit(need <= self.num_blocks, need, self.num_blocks)

    def probe(self, tokens: Tokens, scope: Scope = DEFAULT_SCOPE) -> Hit:
        blocks, shared = self._find(tuple(int(t) for t in tokens), scope)
        full = len(blocks) - (shared > 0)
        return Hit(full * self.block_size + shared, full)

    def open(self, tokens: Tokens, scope: Scope = DEFAULT_SCOPE) -> OracleSequence:
        wanted = tuple(int(t) for t in tokens)
        blocks, shared = self._find(wanted, scope)
        length = (len(blocks) - (shared > 0)) * self.block_size + shared
        for block in blocks:
            self.cached.pop(block, None)
        seq = OracleSequence(self, scope, blocks, list(wanted[:length]), length, length)
        self.sequences.append(seq)
        return seq

    def _find(self, tokens: tuple[int, ...], scope: Scope) -> tuple[list[int], int]:
        """Whole blocks that match, and at the end perhaps one that matches in its first `shared` slots."""
        size, usable = self.block_size, tokens[:-1]  # one token is left to compute
        blocks: list[int] = []
        while True:
            before = usable[: len(blocks) * size]
            rest = usable[len(blocks) * size :][:size]
            here = {b: p.own for b, p in self.published.items() if p.scope == scope and p.before == before}
            whole = [b for b, own in here.items() if own == rest and len(own) == size]
            if not whole:
                break
            blocks += whole
        best, shared = _most_shared(here, rest)
        return ([*blocks, best], shared) if shared else (blocks, 0)

    def drain(self) -> Actions:
        done = tuple(self.copies)
        while self.copies:
            self.settle(self.copies.pop(0).src)
        return Actions(done)

    def stats(self) -> PoolStats:
        free, cached = len(self.free), len(self.cached)
        held = self.num_blocks - free - cached
        return PoolStats(
            self.num_blocks,
            free,
            held,
            cached,
            len(self.sequences),
            self.evictions,
            self.num_copies,
            self.merges,
        )

    # -- for OracleSequence --------------------------------------------------------------------

    def refs(self, block: int) -> int:
        """Count the holders of a block."""
        tables = sum(seq.blocks.count(block) + seq.spare.count(block) for seq in self.sequences)
        return tables + sum(copy.src == block for copy in self.copies)

    def disown(self, seq: OracleSequence, but: int = -1) -> None:
        """`seq` may write no block in place any more, except `but`."""
        self.owner = {b: s for b, s in self.owner.items() if s is not seq or b == but}

    def take(self, count: int) -> list[int]:
        while len(self.free) < count:
            leaves = [b for b in self.cached if not self._children(b)]
            self._evict(min(leaves, key=lambda b: self.cached[b]))
        return [self.free.pop() for _ in range(count)]

    def give(self, pop: object) -> None:
        """A holder lets go: `pop` takes the block out of the list that held it and returns it."""
        assert callable(pop)
        self.settle(pop())

    def settle(self, block: int) -> None:
        """A holder of `block` has gone: if it was the last, the block becomes cached or free."""
        if self.refs(block):
            return
        if block in self.published:
            self.clock += 1
            self.cached[block] = self.clock
            return
        for copy in [c for c in self.copies if c.dst == block]:
            self.copies.remove(copy)
            self.settle(copy.src)
        self.free.append(block)

    def cut_back(self, block: int, keep: int) -> None:
        """Publish `block` with its first `keep` tokens only, evicting everything below it."""
        for child in self._children(block):
            self._evict_below(child)
        page = self.published[block]
        own = page.own[:keep]
        covered = any(
            b != block and p.scope == page.scope and p.before == page.before and p.own[:keep] == own
            for b, p in self.published.items()
        )
        if covered:
            del self.published[block]
        else:
            page.own = own

    def _evict_below(self, block: int) -> None:
        for child in self._children(block):
            self._evict_below(child)
        self._evict(block)

    def _children(self, block: int) -> list[int]:
        """Published blocks that continue this one, the last in key order first."""
        page = self.published[block]
        if len(page.own) < self.block_size:
            return []
        path = page.before + page.own
        found = [b for b, p in self.published.items() if p.scope == page.scope and p.before == path]
        return sorted(found, key=lambda b: token_bytes(self.published[b].own), reverse=True)

    def _evict(self, block: int) -> None:
        del self.cached[block], self.published[block]
        self.free.append(block)
        self.evictions += 1


def _most_shared(children: dict[int, tuple[int, ...]], query: tuple[int, ...]) -> tuple[int, int]:
    """The child that shares most leading tokens; on a tie the first at or after the query in key
    order, else the last before it."""

    def shared(own: tuple[int, ...]) -> int:
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
