"""Drives a Pool and its oracle through the same operations over a simulated memory.

The memory holds, for every slot, the identity of the KV that would lie there: the scope and all the
tokens up to and including that slot's. So a copy that is missing, late, short or from the wrong block,
and a block reused under the wrong prefix, all show as a wrong identity when a table is read back.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from octavo.kv import NoRoom, Pool, Scope, Sequence
from octavo.kv.oracle import OraclePool, OracleSequence

SCOPES = (Scope("m"), Scope("m", adapter="x"), Scope("m", salt="x"))


@dataclass(eq=False)
class Pair:
    """One sequence on both sides, the tokens it stands for, and those extended but not committed."""

    real: Sequence
    twin: OracleSequence
    scope: Scope
    tokens: list[int]
    pending: list[int] = field(default_factory=list)


class Driver:
    """Applies each operation to both sides, compares all that is visible, and runs check()."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        self.pool = Pool(num_blocks, block_size, prefix_caching=prefix_caching)
        self.oracle = OraclePool(num_blocks, block_size, prefix_caching=prefix_caching)
        self.pairs: list[Pair] = []
        self.memory: dict[tuple[int, int], tuple[Scope, tuple[int, ...]]] = {}

    # -- operations ----------------------------------------------------------------------------

    def open(self, tokens: list[int], scope: Scope) -> None:
        before = self.snapshot()
        hit = self.pool.probe(tokens, scope)
        assert self.snapshot() == before, "probe changed something"
        assert hit == self.oracle.probe(tokens, scope)
        real, twin = self.pool.open(tokens, scope), self.oracle.open(tokens, scope)
        assert real.num_cached == twin.num_cached == hit.num_tokens < max(len(tokens), 1)
        self.pairs.append(Pair(real, twin, scope, tokens[: real.num_cached]))
        self.read_back(self.pairs[-1])

    def reserve(self, pair: Pair, n: int) -> bool:
        before = self.snapshot()
        granted, wanted = pair.real.reserve(n), pair.twin.reserve(n)
        assert granted == wanted
        assert type(granted) is type(wanted)
        if isinstance(granted, NoRoom):
            assert granted.short_by > 0
            assert self.snapshot() == before, "a refused reserve left a trace"
            return False
        assert pair.real.capacity >= pair.real.length + n
        return True

    def extend(self, pair: Pair, tokens: list[int]) -> None:
        slots = pair.real.extend(len(tokens)).tolist()
        assert slots == pair.twin.extend(len(tokens))
        pair.pending += tokens

    def forward(self, pieces: random.Random | None = None) -> None:
        """Drain, copy, write every pending token, commit; perhaps in two pieces."""
        actions = self.pool.drain()
        assert actions == self.oracle.drain()
        for copy in actions.copies:
            for slot in range(copy.num_slots):
                self.memory[copy.dst, slot] = self.memory[copy.src, slot]
        size = self.pool.block_size
        for pair in self.pairs:
            path = list(pair.tokens)
            for token in pair.pending:
                block, offset = divmod(len(path), size)
                path.append(token)
                self.memory[int(pair.real.table[block]), offset] = (pair.scope, tuple(path))
        for pair in self.pairs:
            cut = pieces.randint(0, len(pair.pending)) if pieces else 0
            for piece in (pair.pending[:cut], pair.pending[cut:]):
                pair.real.commit(piece)
                pair.twin.commit(piece)
            pair.tokens += pair.pending
            pair.pending = []
        for pair in self.pairs:
            self.read_back(pair)

    def fork(self, pair: Pair) -> None:
        self.pairs.append(Pair(pair.real.fork(), pair.twin.fork(), pair.scope, list(pair.tokens)))

    def truncate(self, pair: Pair, length: int) -> None:
        pair.real.truncate(length)
        pair.twin.truncate(length)
        kept = (pair.tokens + pair.pending)[:length]
        pair.tokens, pair.pending = kept[: len(pair.tokens)], kept[len(pair.tokens) :]

    def close(self, pair: Pair) -> None:
        pair.real.close()
        pair.twin.close()
        self.pairs.remove(pair)

    # -- comparisons ---------------------------------------------------------------------------

    def snapshot(self) -> object:
        """All that a refused or pure call must leave alone."""
        pool = self.pool
        tables = [(p.real.length, p.real._spare, p.real.table.tolist()) for p in self.pairs]
        return (
            pool.stats(),
            list(pool._free),
            list(pool._policy),
            list(pool._refs),
            list(pool._tree.key),
            tables,
        )

    def read_back(self, pair: Pair) -> None:
        """Every committed position of a sequence holds exactly its own KV."""
        table, size = pair.real.table.tolist(), self.pool.block_size
        due = {copy.dst for copy in self.pool._copies.values()}
        for position in range(pair.real.committed):
            block, offset = table[position // size], position % size
            if block not in due:
                want = (pair.scope, tuple(pair.tokens[: position + 1]))
                assert self.memory[block, offset] == want

    def compare(self) -> None:
        """check() holds and everything visible agrees with the oracle."""
        self.pool.check()
        assert self.pool.stats() == self.oracle.stats(), f"{self.pool.stats()} != {self.oracle.stats()}"
        for pair in self.pairs:
            assert pair.real.table.tolist() == pair.twin.blocks
            assert (pair.real.length, pair.real.committed) == (pair.twin.length, pair.twin.committed)

    # -- random play ---------------------------------------------------------------------------

    def random_step(self, rng: random.Random, alphabet: int, longest: int) -> None:
        """One operation chosen at random, then compare()."""
        ready = [p for p in self.pairs if not p.pending]
        kind = rng.random()
        if not self.pairs or (kind < 0.16 and len(self.pairs) < 6):
            tokens = [rng.randrange(alphabet) for _ in range(rng.randint(0, longest))]
            self.open(tokens, SCOPES[rng.randrange(len(SCOPES))] if rng.random() < 0.2 else SCOPES[0])
        elif kind < 0.50:
            pair = rng.choice(self.pairs)
            n = rng.randint(1, rng.choice((1, 3, longest)))
            if self.reserve(pair, n) and rng.random() < 0.9:
                self.extend(pair, [rng.randrange(alphabet) for _ in range(rng.randint(1, n))])
        elif kind < 0.74:
            self.forward(rng if rng.random() < 0.3 else None)
        elif kind < 0.82 and ready and len(self.pairs) < 6:
            self.fork(rng.choice(ready))
        elif kind < 0.90:
            pair = rng.choice(self.pairs)
            self.truncate(pair, rng.randint(0, pair.real.length))
        else:
            self.close(rng.choice(self.pairs))
        self.compare()

    def finish(self) -> None:
        """Close everything: nothing is held, and free + cached is the whole pool."""
        for pair in list(self.pairs):
            self.close(pair)
        self.forward()
        self.compare()
        stats = self.pool.stats()
        assert stats.held == 0
        assert stats.free + stats.cached == stats.num_blocks
