"""A ContiguousPool against a plain model of it, over a simulated memory.

The model stores no free list and no counts: a block is free when no region that a sequence or a move
still refers to contains it, and room is found by trying every start. As in driver.py, memory remembers
for every slot the exact tokens whose KV it holds, so a missing, late or misplaced copy shows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from octavo.kv import Copy, Granted, NoRoom, ProtocolError
from octavo.kv.contiguous import ContiguousPool, Policy
from octavo.kv.contiguous_sequence import ContiguousSequence

Blocks = list[int]


@dataclass(eq=False)
class ModelMove:
    """`slots` slots due in `target`, from the blocks `src`, which lie in the regions `pins`."""

    target: Blocks
    src: Blocks
    slots: int
    pins: list[Blocks]


@dataclass(eq=False)
class Pair:
    """A sequence, its model, the tokens committed and those handed out."""

    real: ContiguousSequence
    final: int
    region: Blocks = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.tokens) + len(self.pending)


class ContiguousDriver:
    """Applies each operation to both sides and compares tables, slots, copies and counts."""

    def __init__(self, num_blocks: int, block_size: int, policy: Policy, max_len: int) -> None:
        self.pool = ContiguousPool(num_blocks * block_size, policy, max_len=max_len, block_size=block_size)
        self.pairs: list[Pair] = []
        self.moves: list[ModelMove] = []
        self.memory: dict[tuple[int, int], tuple[int, ...]] = {}
        self.num_copies = self.num_around = self.num_moved = 0

    # -- the model -----------------------------------------------------------------------------

    def free(self, *without: Blocks) -> set[int]:
        """Blocks in no region but those given."""
        regions = [p.region for p in self.pairs] + [pin for move in self.moves for pin in move.pins]
        used = {b for region in regions if not any(region is w for w in without) for b in region}
        return set(range(self.pool.num_blocks)) - used

    def find(self, count: int, free: set[int]) -> Blocks | None:
        """The lowest `count` consecutive free blocks."""
        starts = range(self.pool.num_blocks - count + 1)
        return next((list(range(s, s + count)) for s in starts if free.issuperset(range(s, s + count))), None)

    def longest(self) -> int:
        """The most consecutive free blocks."""
        free = self.free()
        return max((n for n in range(self.pool.num_blocks + 1) if self.find(n, free) is not None), default=0)

    def size(self, tokens: int, final: int) -> int:
        """Blocks of a region for `tokens` tokens under the policy."""
        pool, slots = self.pool, 1
        if pool.policy == "pow2":
            while slots < tokens:
                slots *= 2
            slots = min(slots, pool.max_len)
        else:
            slots = final if pool.policy == "oracle" else pool.max_len
        return -(-slots // pool.block_size)

    def move_of(self, region: Blocks) -> ModelMove | None:
        return next((move for move in self.moves if move.target is region), None)

    def source(self, region: Blocks) -> tuple[Blocks, list[Blocks]]:
        """Where the data of a region lies now, and what must stay for it."""
        due = self.move_of(region)
        if due is None:
            return list(region), [region]
        return due.src, due.pins + [region] * bool(set(due.src[: self.filled(due)]) & set(region))

    def filled(self, move: ModelMove) -> int:
        return -(-move.slots // self.pool.block_size)

    def place(self, pair: Pair, want: int) -> Blocks | None:
        """A region for a sequence that has one already: in place, first fit, or around itself."""
        old, free, due = pair.region, self.free(), self.move_of(pair.region)
        longer = list(range(old[0], old[0] + want))
        if free.issuperset(longer[len(old) :]):
            return longer
        found = self.find(want, free)
        pinned = any(pin is old for move in self.moves for pin in move.pins)
        if found is not None or pinned or any(region is old for region in self.source(old)[1] if due):
            return found
        around = self.free(old)
        kept = 0 if due else -(-len(pair.tokens) // self.pool.block_size)
        data = set(old[:kept])
        for start in range(self.pool.num_blocks - want + 1):
            region = list(range(start, start + want))
            touches = {b - 1 for b in region} | {b + 1 for b in region} | set(region)
            if around.issuperset(region) and touches & set(old) and not data & set(region[:kept]):
                return region
        return None

    # -- operations ----------------------------------------------------------------------------

    def open(self, final: int) -> Pair:
        pair = Pair(self.pool.open([1, 2, 3], final_len=final), final)
        self.pairs.append(pair)
        return pair

    def reserve(self, pair: Pair, n: int) -> bool:
        """Reserve on both sides; False when there is no room, or when the region cannot move yet."""
        if pair.length + n <= len(pair.region) * self.pool.block_size:
            assert isinstance(answer := pair.real.reserve(n), Granted)
            assert answer.num_blocks == 0
            return True
        want = self.size(pair.length + n, pair.final)
        found = self.place(pair, want) if pair.region else self.find(want, self.free())
        before = self.snapshot()
        if found is None:
            refused = pair.real.reserve(n)
            assert isinstance(refused, NoRoom)
            assert 0 < refused.short_by <= want - self.longest()
            assert self.snapshot() == before, "a refused reserve left a trace"
            return False
        moves = bool(pair.region) and found[0] != pair.region[0]
        if moves and pair.pending:
            with pytest.raises(ProtocolError):
                pair.real.reserve(n)
            assert self.snapshot() == before
            return False
        assert isinstance(answer := pair.real.reserve(n), Granted)
        assert answer.num_blocks == want - len(pair.region)
        if moves:
            self.num_moved += 1
            self.relocate(pair, found)
        elif pair.region:
            pair.region += found[len(pair.region) :]
        else:
            pair.region = found
        return True

    def relocate(self, pair: Pair, new: Blocks) -> None:
        """The sequence's data is to be copied from its old region, or from where that was to get it."""
        old = pair.region
        src, pins = self.source(old)
        self.moves = [move for move in self.moves if move.target is not old]
        pair.region = new
        if pair.tokens:
            self.moves.append(ModelMove(new, src, len(pair.tokens), pins))
        if set(old) & set(new):
            self.num_around += 1
            old[:] = [b for b in old if b not in new]

    def extend(self, pair: Pair, tokens: list[int]) -> None:
        size = self.pool.block_size
        positions = range(pair.length, pair.length + len(tokens))
        want = [pair.region[p // size] * size + p % size for p in positions]
        assert pair.real.extend(len(tokens)).tolist() == want
        pair.pending += tokens

    def forward(self) -> None:
        """Drain, copy, write what was handed out, commit, read everything back."""
        size = self.pool.block_size
        copies = []
        for move in self.moves:
            for i in range(self.filled(move)):
                count = min(size, move.slots - i * size)
                copies.append(Copy(move.src[i], move.target[i], count))
        assert list(self.pool.drain().copies) == copies
        assert not {c.src for c in copies} & {c.dst for c in copies}, "copies depend on each other"
        self.moves.clear()
        self.num_copies += len(copies)
        read = [[self.memory[c.src, slot] for slot in range(c.num_slots)] for c in copies]
        for copy, slots in zip(copies, read, strict=True):
            for slot, identity in enumerate(slots):
                self.memory[copy.dst, slot] = identity
        for pair in self.pairs:
            for token in pair.pending:
                pair.tokens.append(token)
                block, offset = divmod(len(pair.tokens) - 1, size)
                self.memory[int(pair.real.table[block]), offset] = tuple(pair.tokens)
            pair.real.commit(pair.pending)
            pair.pending = []
        for pair in self.pairs:
            for position in range(len(pair.tokens)):
                block, offset = divmod(position, size)
                assert self.memory[pair.region[block], offset] == tuple(pair.tokens[: position + 1])

    def fork(self, pair: Pair) -> None:
        child = Pair(pair.real.fork(), pair.final)
        want = self.find(self.size(pair.length, pair.final), self.free()) if pair.length else None
        if want is not None:
            src, pins = self.source(pair.region)
            child.region, child.tokens = want, list(pair.tokens)
            self.moves.append(ModelMove(want, src, len(pair.tokens), pins))
        self.pairs.append(child)

    def truncate(self, pair: Pair, length: int) -> None:
        pair.real.truncate(length)
        kept = (pair.tokens + pair.pending)[:length]
        pair.tokens, pair.pending = kept[: len(pair.tokens)], kept[len(pair.tokens) :]
        self.cut(pair.region, len(pair.tokens))

    def close(self, pair: Pair) -> None:
        pair.real.close()
        self.pairs.remove(pair)
        self.cut(pair.region, 0)

    def cut(self, region: Blocks, slots: int) -> None:
        for move in self.moves:
            if move.target is region:
                move.slots = min(move.slots, slots)
        self.moves = [move for move in self.moves if move.slots]

    # -- comparisons and play --------------------------------------------------------------------

    def snapshot(self) -> object:
        """All that a refused call must leave alone."""
        tables = [(p.real.length, p.real.committed, p.real.table.tolist()) for p in self.pairs]
        return self.pool.stats(), self.pool.available, tables

    def compare(self) -> None:
        """check() holds, and everything visible agrees with the model."""
        self.pool.check()
        stats = self.pool.stats()
        assert stats.free == len(self.free())
        assert (stats.sequences, stats.copies) == (len(self.pairs), self.num_copies)
        assert self.pool.available == self.longest()
        for pair in self.pairs:
            assert pair.real.table.tolist() == pair.region
            assert (pair.real.length, pair.real.committed) == (pair.length, len(pair.tokens))
            assert pair.real.capacity == len(pair.region) * self.pool.block_size

    def random_step(self, rng: random.Random, most: int = 6, forward: float = 0.2) -> None:
        """One operation chosen at random, then compare(). most: sequences at once. forward: how often
        a step runs; seldom, and regions move while their copies are still due."""
        kind, ready = rng.random(), [p for p in self.pairs if not p.pending]
        if not self.pairs or (kind < 0.15 and len(self.pairs) < most):
            self.open(rng.randint(1, self.pool.max_len))
        elif kind < 0.55:
            pair = rng.choice(self.pairs)
            limit = pair.final if self.pool.policy == "oracle" else self.pool.max_len
            if pair.length < limit:
                n = min(rng.randint(1, rng.choice((1, 4, limit))), limit - pair.length)
                if self.reserve(pair, n) and rng.random() < 0.9:
                    self.extend(pair, [rng.randrange(3) for _ in range(rng.randint(1, n))])
        elif kind < 0.55 + forward:
            self.forward()
        elif kind < 0.83 and ready and len(self.pairs) < most:
            self.fork(rng.choice(ready))
        elif kind < 0.89:
            pair = rng.choice(self.pairs)
            self.truncate(pair, rng.randint(0, pair.length))
        else:
            self.close(rng.choice(self.pairs))
        self.compare()

    def finish(self) -> None:
        """Close everything: the pool is one free region."""
        for pair in list(self.pairs):
            self.close(pair)
        self.forward()
        self.compare()
        assert self.pool.available == self.pool.stats().free == self.pool.num_blocks
