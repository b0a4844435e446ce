"""Drives a Pool and its oracle through the same operations over a simulated memory.

The memory holds, for every slot, the identity of the KV that would lie there: the scope and all the
tokens up to and including that slot's. So a copy that is missing, late, short or from the wrong block,
and a block reused under the wrong prefix, all show as a wrong identity when a table is read back.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from octavo.kv import Drop, Move, NoRoom, Place, Pool, Scope, Sequence, Tier
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


def device(block: int) -> Place:
    """Where a device block lies."""
    return Place(Tier.DEVICE, int(block))


class Driver:
    """Applies each operation to both sides, compares all that is visible, and runs check()."""

    def __init__(
        self, num_blocks: int, block_size: int, prefix_caching: bool = True, host: int = 0, disk: int = 0
    ) -> None:
        options = {"prefix_caching": prefix_caching, "host_blocks": host, "disk_blocks": disk}
        self.pool = Pool(num_blocks, block_size, **options)
        self.oracle = OraclePool(num_blocks, block_size, **options)
        self.history: list[list[int]] = []  # tokens of the sequences closed last
        self.windows = False  # whether random_step() forgets
        self.pairs: list[Pair] = []
        self.memory: dict[tuple[Place, int], tuple[Scope, tuple[int, ...]] | None] = {}

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
        assert pair.real.on_device
        return True

    def extend(self, pair: Pair, tokens: list[int]) -> None:
        slots = pair.real.extend(len(tokens)).tolist()
        assert slots == pair.twin.extend(len(tokens))
        pair.pending += tokens

    def forward(self, pieces: random.Random | None = None) -> None:
        """Drain, copy, write every pending token, commit; perhaps in two pieces."""
        self.drain()
        size = self.pool.block_size
        for pair in self.pairs:
            path = list(pair.tokens)
            for token in pair.pending:
                block, offset = divmod(len(path), size)
                path.append(token)
                self.memory[device(pair.real.table[block]), offset] = (pair.scope, tuple(path))
        for pair in self.pairs:
            cut = pieces.randint(0, len(pair.pending)) if pieces else 0
            for piece in (pair.pending[:cut], pair.pending[cut:]):
                pair.real.commit(piece)
                pair.twin.commit(piece)
            pair.tokens += pair.pending
            pair.pending = []
        for pair in self.pairs:
            self.read_back(pair)

    def drain(self) -> None:
        """Carry out what both sides ask for, which is the same."""
        actions, wanted = self.pool.drain(), self.oracle.drain()
        assert actions.copies == wanted.copies
        assert [t[:2] for t in actions.transfers] == [t[:2] for t in wanted.transfers]
        slots = range(self.pool.block_size)
        for transfer in actions.transfers:
            if isinstance(transfer, Drop):
                for slot in slots:
                    self.memory[transfer.place, slot] = None
                continue
            assert isinstance(transfer, Move)
            assert (transfer.record is not None) == (transfer.dst.tier is Tier.DISK)
            for slot in slots:
                self.memory[transfer.dst, slot] = self.memory.get((transfer.src, slot))
        for copy in actions.copies:
            for slot in range(copy.num_slots):
                self.memory[device(copy.dst), slot] = self.memory[device(copy.src), slot]

    def suspend(self, pair: Pair) -> None:
        before = self.snapshot()
        done, wanted = pair.real.suspend(), pair.twin.suspend()
        assert (done, type(done)) == (wanted, type(wanted))
        if isinstance(done, NoRoom):
            assert self.snapshot() == before, "a refused suspend left a trace"
        else:
            assert pair.real.capacity == 0

    def resume(self, pair: Pair) -> None:
        before = self.snapshot()
        done, wanted = pair.real.resume(), pair.twin.resume()
        assert (done, type(done)) == (wanted, type(wanted))
        if isinstance(done, NoRoom):
            assert self.snapshot() == before, "a refused resume left a trace"
        else:
            assert pair.real.on_device

    def forget(self, pair: Pair, before: int) -> None:
        pair.real.forget(before)
        pair.twin.forget(before)

    def fork(self, pair: Pair) -> None:
        self.pairs.append(Pair(pair.real.fork(), pair.twin.fork(), pair.scope, list(pair.tokens)))

    def truncate(self, pair: Pair, length: int) -> None:
        pair.real.truncate(length)
        pair.twin.truncate(length)
        kept = (pair.tokens + pair.pending)[:length]
        pair.tokens, pair.pending = kept[: len(pair.tokens)], kept[len(pair.tokens) :]

    def revoke(self, pair: Pair) -> None:
        """Nothing that it holds can be found afterwards."""
        pair.real.revoke()
        pair.twin.revoke()
        for block in [*pair.real.table.tolist(), *(entry.block for entry in pair.real._parked)]:
            assert block < 0 or self.pool._tree.key[block] is None

    def close(self, pair: Pair) -> None:
        pair.real.close()
        pair.twin.close()
        self.pairs.remove(pair)
        self.history = [*self.history[-7:], pair.tokens]

    # -- comparisons ---------------------------------------------------------------------------

    def snapshot(self) -> object:
        """All that a refused or pure call must leave alone."""
        pool, blocks = self.pool, self.pool._blocks
        tables = [
            (p.real.length, p.real._spare, p.real.table.tolist(), list(p.real._parked)) for p in self.pairs
        ]
        lists = [
            list(x) for x in (*blocks.free, *blocks.policies, blocks.refs, blocks.tree.key, blocks.transfers)
        ]
        return pool.stats()._replace(queried_tokens=0, hit_tokens=0), lists, tables

    def read_back(self, pair: Pair) -> None:
        """Every committed position of a sequence holds exactly its own KV, wherever it lies."""
        if self.pool._blocks.transfers:
            return  # on its way: read after the next drain
        size, real = self.pool.block_size, pair.real
        places = [device(b) if b >= 0 else None for b in real.table.tolist()]
        places += [
            self.pool._blocks.place(entry.block) if entry.block >= 0 else None for entry in real._parked
        ]
        due = {device(copy.dst) for copy in self.pool._blocks.copies.values()}
        for position in range(real.committed):
            place, offset = places[position // size], position % size
            if place is not None and place not in due:
                want = (pair.scope, tuple(pair.tokens[: position + 1]))
                assert self.memory[place, offset] == want

    def compare(self) -> None:
        """check() holds and everything visible agrees with the oracle."""
        self.pool.check()
        stats = self.pool.stats()
        states = [(t.free, t.held, t.cached) for t in (stats, stats.host, stats.disk)]
        assert states == self.oracle.states()
        for pair in self.pairs:
            assert pair.real.table.tolist() == pair.twin.blocks
            assert [entry.block for entry in pair.real._parked] == [block for block, _ in pair.twin.parked]
            assert (pair.real.length, pair.real.committed) == (pair.twin.length, pair.twin.committed)
            self.read_back(pair)

    # -- random play ---------------------------------------------------------------------------

    def random_step(self, rng: random.Random, alphabet: int, longest: int) -> None:
        """One operation chosen at random, then compare()."""
        ready = [p for p in self.pairs if not p.pending]
        here = [p for p in ready if p.real.on_device]
        kind = rng.random()
        if not self.pairs or (kind < 0.16 and len(self.pairs) < 6):
            tokens = [rng.randrange(alphabet) for _ in range(rng.randint(0, longest))]
            if self.history and rng.random() < 0.5:  # something seen before, up to anywhere
                old = rng.choice(self.history)
                tokens = old[: rng.randint(0, len(old))] + tokens[: rng.randint(0, 3)]
            self.open(tokens, SCOPES[rng.randrange(len(SCOPES))] if rng.random() < 0.2 else SCOPES[0])
        elif kind < 0.48:
            pair = rng.choice(self.pairs)
            n = rng.randint(1, rng.choice((1, 3, longest)))
            if self.reserve(pair, n) and rng.random() < 0.9:
                self.extend(pair, [rng.randrange(alphabet) for _ in range(rng.randint(1, n))])
        elif kind < 0.72:
            self.forward(rng if rng.random() < 0.3 else None)
        elif kind < 0.73:
            self.revoke(rng.choice(self.pairs))
        elif kind < 0.79 and here and len(self.pairs) < 6:
            self.fork(rng.choice(here))
        elif kind < 0.84 and ready and self.pool.stats().host.slots:
            self.drain()
            self.suspend(rng.choice(ready))
        elif kind < 0.87 and ready:
            self.resume(rng.choice(ready))
        elif kind < 0.88 and here and self.windows:
            pair = rng.choice(here)
            self.forget(pair, rng.randint(0, pair.real.length))
        elif kind < 0.93:
            pair = rng.choice(self.pairs)
            gone = pair.real._forgotten + sum(entry.block < 0 for entry in pair.real._parked)
            least = (gone + 1) * self.pool.block_size if gone else 0
            self.truncate(pair, rng.randint(min(least, pair.real.length), pair.real.length))
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
