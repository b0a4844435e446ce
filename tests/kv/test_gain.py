"""What a scheduler asks before it takes memory: gain(), need(), host_room, num_parked, against doing it."""

from __future__ import annotations

import random

import pytest

from octavo.kv import Granted, NoRoom, Pool, Sequence
from octavo.kv.contiguous import ContiguousPool


def fill(rng: random.Random, caching: bool) -> tuple[Pool, list[Sequence]]:
    """A pool with sequences that share prefixes and forks, some with reserved room or suspended."""
    pool = Pool(60, rng.choice((1, 3, 4)), prefix_caching=caching, host_blocks=20)
    shared = [rng.randrange(4) for _ in range(30)]
    seqs: list[Sequence] = []
    for _ in range(rng.randint(2, 8)):
        tokens = shared[: rng.randint(1, 30)] + [rng.randrange(4) for _ in range(rng.randint(1, 8))]
        seq = pool.open(tokens)
        count = len(tokens) - seq.num_cached
        if isinstance(seq.reserve(count + rng.randint(0, 6)), NoRoom):
            seq.close()
            continue
        seq.extend(count)
        pool.drain()
        seq.commit(tokens[seq.committed :])
        seqs.append(seq)
        if rng.random() < 0.4:
            seqs.append(seq.fork())
        elif rng.random() < 0.3:
            seq.suspend()
            pool.drain()
    return pool, seqs


@pytest.mark.parametrize("caching", [True, False])
def test_gain_is_what_closing_makes_available(caching: bool) -> None:
    """Random pools and subsets: gain() says beforehand by how much `available` rises."""
    seen = set()
    for seed in range(300):
        rng = random.Random(seed)
        pool, seqs = fill(rng, caching)
        chosen = rng.sample(seqs, rng.randint(0, len(seqs)))
        gain, before = pool.gain(chosen), pool.available
        for seq in chosen:
            seq.close()
        assert pool.available - before == gain
        seen.add(gain)
        pool.check()
    assert len(seen) > 10


@pytest.mark.parametrize("caching", [True, False])
def test_need_is_what_reserve_takes(caching: bool) -> None:
    """Random pools: need(n) is by how much reserve(n) lowers `available`, and more than there is where it
    refuses; bringing back what was suspended is part of it."""
    refused = brought = 0
    for seed in range(300):
        rng = random.Random(seed)
        pool, seqs = fill(rng, caching)
        for seq in seqs:
            count = rng.randint(1, 60)
            parked, before, need = seq.num_parked, pool.available, seq.need(count)
            assert (parked > 0) == (not seq.on_device)
            if isinstance(seq.reserve(count), Granted):
                # What is cut back to be written in place rather than copied was held before as well.
                assert before - pool.available == need
                brought += parked > 0
                assert seq.num_parked == 0
            else:
                assert need > before
                refused += 1
            pool.drain()
    assert min(refused, brought) > 10


def test_host_room_is_what_suspend_may_take() -> None:
    """A sequence of as many blocks as there is host room is suspended, one of a block more is not."""
    pool = Pool(16, 4, host_blocks=3)
    assert pool.host_room == 3
    for length, fits in ((16, False), (12, True)):
        tokens = [length] * length
        seq = pool.open(tokens)
        seq.reserve(length)
        seq.extend(length)
        pool.drain()
        seq.commit(tokens)
        assert bool(seq.suspend()) == fits
    assert pool.host_room == 0


def test_contiguous_counterparts() -> None:
    """Regions: gain() is their length, need() what growing would add; nothing is ever parked."""
    pool = ContiguousPool(64, "pow2", max_len=64, block_size=4)
    seq = pool.open([1] * 10)
    assert (seq.need(10), pool.gain([seq])) == (4, 0)
    seq.reserve(10)
    assert (seq.need(16), seq.need(17), pool.gain([seq])) == (0, 4, 4)
    assert (seq.num_parked, seq.on_device, pool.host_room, pool.gives_back_tail) == (0, True, 0, False)
