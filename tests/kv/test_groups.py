"""Groups of layers: a full one and windowed ones, at one length, each with its own tables."""

from __future__ import annotations

import random

import pytest

from octavo.kv import Group, GroupedPool, InvalidArgument, NoRoom
from octavo.kv.groups import GroupedSequence
from tests.kv.helpers import distinct


def run(pool: GroupedPool, seq: GroupedSequence, tokens: list[int], chunk: int = 8) -> None:
    """Compute `tokens` in chunks."""
    for at in range(0, len(tokens), chunk):
        part = tokens[at : at + chunk]
        assert seq.reserve(len(part))
        seq.extend(len(part))
        pool.drain()
        seq.commit(part)
        pool.check()


def make(full: int = 64, windowed: int = 8, window: int = 10) -> GroupedPool:
    return GroupedPool({"full": Group(full), "window": Group(windowed, window)}, 4)


def test_a_windowed_group_holds_only_its_window() -> None:
    """200 tokens in a group of 8 blocks with a window of 10: what the next query sees is always there."""
    pool = make()
    seq = pool.open([0])
    for token in distinct(1, 200):
        run(pool, seq, [token])
        table = seq.parts["window"].table.tolist()
        first = max(0, seq.length - 9)
        assert all(block >= 0 for block in table[first // 4 :])
        assert pool.pools["window"].stats().held <= 5
    assert pool.pools["full"].stats().held == 50
    seq.close()


def test_groups_have_slots_of_their_own() -> None:
    """The same positions get slots by each group's table."""
    pool = make()
    a, b = pool.open([0]), pool.open([1])
    run(pool, a, distinct(1, 40))
    assert b.reserve(6)
    slots = b.extend(6)
    for name, part in b.parts.items():
        assert slots[name].tolist() == [part.table[i // 4] * 4 + i % 4 for i in range(6)]


def test_what_every_group_has_is_reused() -> None:
    """A prefix that the windowed group had to give up is computed again in all of them."""
    pool = make(windowed=6)
    tokens = distinct(1, 24)
    seq = pool.open(tokens)
    run(pool, seq, tokens)
    seq.close()
    assert pool.probe([*tokens, 0]).num_tokens == 24
    again = pool.open([*tokens, 0])
    assert again.num_cached == again.length == 24
    again.close()
    other = pool.open(distinct(2, 24))
    run(pool, other, distinct(2, 24))
    other.close()
    hit = pool.probe([*tokens, 0])
    assert hit.num_tokens < 24
    last = pool.open([*tokens, 0])
    assert {part.length for part in last.parts.values()} == {hit.num_tokens}


def test_a_refusal_leaves_no_trace_in_any_group() -> None:
    """One group is full: no group takes a block."""
    pool = make(full=64, windowed=3)
    seq = pool.open([0])
    before = {name: p.stats() for name, p in pool.pools.items()}
    assert seq.reserve(16) == NoRoom(1)
    assert {name: p.stats() for name, p in pool.pools.items()} == before


def test_can_ever_fit_counts_windows() -> None:
    """A long context fits a small windowed group, and the full one decides."""
    pool = make(full=20, windowed=5)
    assert pool.can_ever_fit(80)
    fit = pool.can_ever_fit(81)
    assert (fit.ok, fit.need, fit.have) == (False, 21, 20)
    assert not make(windowed=4).can_ever_fit(80)


def test_random_use_keeps_every_invariant() -> None:
    """Random prompts, forks and ends over three groups: one length, right windows, nothing left held."""
    rng = random.Random(4)
    groups = {"full": Group(40), "near": Group(30, 5), "far": Group(30, 17)}
    pool = GroupedPool(groups, 3)
    open_: list[GroupedSequence] = []
    for _ in range(800):
        kind = rng.random()
        if kind < 0.3 and len(open_) < 5:
            open_.append(pool.open([rng.randrange(2) for _ in range(rng.randint(1, 20))]))
        elif kind < 0.8 and open_:
            seq = rng.choice(open_)
            n = rng.randint(1, 6)
            if seq.reserve(n):
                tokens = [rng.randrange(2) for _ in range(n)]
                seq.extend(n)
                pool.drain()
                seq.commit(tokens)
        elif kind < 0.9 and open_ and len(open_) < 5:
            seq = rng.choice(open_)
            if all(part.on_device for part in seq.parts.values()):
                open_.append(seq.fork())
        elif open_:
            open_.pop(rng.randrange(len(open_))).close()
        pool.check()
        for seq in open_:
            assert len({part.length for part in seq.parts.values()}) == 1
            for name, part in seq.parts.items():
                window = groups[name].window or seq.length
                seen = part.table.tolist()[max(0, seq.length - window + 1) // 3 : -(-seq.length // 3)]
                assert all(block >= 0 for block in seen)
    for seq in open_:
        seq.close()
    assert all(p.stats().held == 0 for p in pool.pools.values())


def test_bad_groups_are_named() -> None:
    """No group, and a window of nothing."""
    with pytest.raises(InvalidArgument, match="group"):
        GroupedPool({}, 4)
    with pytest.raises(InvalidArgument, match="window"):
        Group(4, 0)
