"""Contiguous reservation: the policies, the moves, the model, and a scheduler that runs on it unchanged."""

import random

import pytest

from octavo.kv import (
    Copy,
    Granted,
    InvalidArgument,
    InvariantViolated,
    NoRoom,
    NotReserved,
    ProtocolError,
    SequenceClosed,
)
from octavo.kv.contiguous import ContiguousPool, Policy
from octavo.sched.config import SchedulerConfig
from octavo.sched.request import Request, State
from octavo.sched.scheduler import Scheduler
from tests.kv.contiguous_driver import ContiguousDriver

POLICIES: tuple[Policy, ...] = ("max", "pow2", "oracle")


def compute(pool: ContiguousPool, seq, count: int) -> list[int]:
    """Reserve, extend and commit `count` tokens; returns the slots."""
    assert seq.reserve(count)
    slots = seq.extend(count).tolist()
    pool.drain()
    seq.commit([7] * count)
    pool.check()
    return slots


def granted(seq, n: int) -> int:
    """Blocks that a reserve() took, which must not be refused."""
    answer = seq.reserve(n)
    assert isinstance(answer, Granted)
    return answer.num_blocks


def refused(seq, n: int) -> int:
    """Blocks that a reserve() was short by, which must be refused."""
    answer = seq.reserve(n)
    assert isinstance(answer, NoRoom)
    return answer.short_by


def prefill(pool: ContiguousPool, count: int, final_len: int | None = None):
    """A sequence of `count` computed tokens."""
    seq = pool.open([7] * count, final_len=final_len)
    compute(pool, seq, count)
    return seq


def test_line_1_whole_contexts() -> None:
    """Three requests of 25, 47 and 12 tokens reserve 3 x 2,048 = 6,144 slots for 84 tokens."""
    pool = ContiguousPool(6144, "max", max_len=2048)
    seqs = [prefill(pool, n) for n in (25, 47, 12)]
    assert [seq.capacity for seq in seqs] == [2048] * 3
    assert sum(seq.length for seq in seqs) == 84
    assert refused(pool.open([1]), 1) == 2048


def test_line_2_enough_in_all_but_nowhere_together() -> None:
    """Free regions of 1,500 and 800 slots cannot hold a contiguous 2,048, though 2,300 are free."""
    pool = ContiguousPool(2400, "oracle")
    a, _, c = (prefill(pool, 1, final) for final in (1500, 100, 800))
    a.close()
    c.close()
    assert pool.stats().free == 2300
    assert pool.available == 1500
    seq = pool.open([1], final_len=2048)
    assert refused(seq, 1) == 548
    assert pool.unusable(2048) == 2300
    assert prefill(pool, 1, 1500).table[0] == 0


@pytest.mark.parametrize(("policy", "capacity"), [("max", 112), ("pow2", 64), ("oracle", 48)])
def test_regions_are_whole_blocks_that_count_up(policy: Policy, capacity: int) -> None:
    """47 tokens in blocks of 16: a table of consecutive ids, rounded up from 100, 64 and 47 slots."""
    pool = ContiguousPool(1024, policy, max_len=100, block_size=16)
    prefill(pool, 1, 16)
    seq = pool.open([7] * 47, final_len=47)
    slots = compute(pool, seq, 47)
    first = int(seq.table[0])
    assert seq.capacity == capacity
    assert seq.table.tolist() == list(range(first, first + capacity // 16))
    assert slots == list(range(first * 16, first * 16 + 47))
    assert pool.tables[seq.row, : len(seq.table)].tolist() == seq.table.tolist()


def test_pow2_doubles_in_place_then_moves() -> None:
    """Growth takes the room behind; where that is held, a new region and one copy per block."""
    pool = ContiguousPool(256, "pow2", block_size=4)
    a = prefill(pool, 8)
    assert granted(a, 1) == 2
    assert a.table.tolist() == [0, 1, 2, 3]
    b = prefill(pool, 4)
    assert b.table.tolist() == [4]
    compute(pool, a, 6)
    assert granted(a, 4) == 4
    assert a.table.tolist() == list(range(5, 13))
    assert pool.stats().held == 4 + 1 + 8, "the old region stays until the copies are handed over"
    a.extend(4)
    with pytest.raises(ProtocolError):
        a.commit([7] * 4)
    want = tuple(Copy(i, 5 + i, 4 if i < 3 else 2) for i in range(4))
    assert pool.drain().copies == want
    assert pool.stats().held == 1 + 8
    a.commit([7] * 4)
    assert pool.stats().copies == 4


def test_around_itself_copies_are_independent() -> None:
    """Nine blocks: 3 kept at block 4 move to 0 within [0, 8), and no block is read and written."""
    pool = ContiguousPool(9, "pow2")
    wall, seq = prefill(pool, 4), prefill(pool, 3)
    wall.close()
    assert granted(seq, 2) == 4
    assert seq.table.tolist() == list(range(8))
    assert pool.drain().copies == (Copy(4, 0, 1), Copy(5, 1, 1), Copy(6, 2, 1))
    pool.check()


def test_fork_copies_everything() -> None:
    """40 tokens in blocks of 16: three copies, the last of 8 slots; a fork's fork reads the original."""
    pool = ContiguousPool(256, "pow2", block_size=16)
    a = prefill(pool, 40)
    b = a.fork()
    assert (b.length, b.committed, b.num_cached) == (40, 40, 40)
    c = b.fork()
    a.close()
    pool.check()
    first = (Copy(0, 4, 16), Copy(1, 5, 16), Copy(2, 6, 8))
    second = (Copy(0, 8, 16), Copy(1, 9, 16), Copy(2, 10, 8))
    assert pool.drain().copies == first + second
    assert c.table.tolist() == [8, 9, 10, 11]
    assert pool.stats().held == 8


def test_fork_without_room_starts_empty() -> None:
    """Where no region is free the branch is computed again; closing a fork cancels its copies."""
    pool = ContiguousPool(64, "max", max_len=32)
    a = prefill(pool, 20)
    b, c = a.fork(), a.fork()
    assert (b.length, c.length, c.capacity) == (20, 0, 0)
    b.close()
    assert pool.drain().copies == ()
    assert c.reserve(20)


def test_can_ever_fit_follows_the_policy() -> None:
    """max counts max_len, the oracle the length, pow2 its last two regions side by side."""
    assert ContiguousPool(64, "max", max_len=64).can_ever_fit(10) == (True, 64, 64)
    assert ContiguousPool(48, "max", max_len=64).can_ever_fit(10) == (False, 64, 48)
    assert ContiguousPool(640, "max", max_len=64).can_ever_fit(65) == (False, 65, 64)
    assert ContiguousPool(64, "oracle").can_ever_fit(64) == (True, 64, 64)
    assert ContiguousPool(64, "pow2").can_ever_fit(33) == (False, 96, 64)
    assert ContiguousPool(64, "pow2", max_len=40).can_ever_fit(33) == (False, 72, 64)
    assert ContiguousPool(64, "pow2", block_size=16).can_ever_fit(16) == (True, 1, 4)


def test_pow2_can_grow_alone_to_whatever_fits() -> None:
    """From wherever it stands, a sequence alone reaches every length that can_ever_fit() allows."""
    for num in range(3, 40):
        pool = ContiguousPool(num, "pow2")
        most = max(n for n in range(1, num + 1) if pool.can_ever_fit(n))
        for shift in range(num):
            for first in {1, 2, 3, most // 2, most} - {0}:
                pool = ContiguousPool(num, "pow2")
                wall = pool.open([1])
                seq = pool.open([1])
                pool._region_blocks = lambda n, final, size=shift: size  # type: ignore[method-assign]
                if shift:
                    assert wall.reserve(1)
                del pool._region_blocks
                if not seq.reserve(first):
                    continue
                wall.close()
                seq.extend(first)
                seq.commit([1] * first)
                while seq.length < most:
                    compute(pool, seq, 1)


def test_what_is_refused() -> None:
    """Bad arguments, lengths past what was told, calls out of order, and a double close."""
    for bad in (
        {"num_slots": 10, "block_size": 4, "policy": "pow2"},
        {"num_slots": 0, "policy": "pow2"},
        {"num_slots": 8, "policy": "max"},
        {"num_slots": 8, "policy": "buddy"},
        {"num_slots": 8, "policy": "max", "max_len": 0},
    ):
        with pytest.raises(InvalidArgument):
            ContiguousPool(**bad)
    pool = ContiguousPool(64, "oracle")
    with pytest.raises(InvalidArgument, match="final_len"):
        pool.open([1])
    seq = pool.open([1], final_len=4)
    with pytest.raises(InvalidArgument, match="final_len"):
        seq.reserve(5)
    with pytest.raises(InvalidArgument):
        seq.reserve(0)
    with pytest.raises(NotReserved):
        seq.extend(1)
    compute(pool, seq, 3)
    seq.extend(1)
    with pytest.raises(ProtocolError):
        seq.fork()
    with pytest.raises(ProtocolError):
        seq.commit([1, 2])
    with pytest.raises(InvalidArgument):
        seq.truncate(5)
    seq.close()
    with pytest.raises(SequenceClosed):
        seq.close()
    assert pool.probe([1, 2]).num_tokens == 0


def test_handed_out_slots_never_move() -> None:
    """A region with uncommitted slots grows in place or not at all."""
    pool = ContiguousPool(64, "pow2")
    a = prefill(pool, 4)
    prefill(pool, 4)
    assert a.reserve(4)
    pool.drain()
    a.extend(4)
    prefill(pool, 8)
    with pytest.raises(ProtocolError, match="must move"):
        a.reserve(1)
    a.commit([7] * 4)
    assert a.reserve(1)


def test_check_finds_damage() -> None:
    """A lost block, a wrong holder count and a wrong table row are each found by number."""
    for damage, number in (
        (lambda pool, seq: pool._free.take(20, 21), 1),
        (lambda pool, seq: setattr(seq._region, "holders", 2), 2),
        (lambda pool, seq: pool.tables.__setitem__((seq.row, 0), 9), 5),
        (lambda pool, seq: setattr(seq, "committed", 5), 6),
    ):
        pool = ContiguousPool(64, "pow2")
        seq = prefill(pool, 4)
        damage(pool, seq)
        with pytest.raises(InvariantViolated) as caught:
            pool.check()
        assert caught.value.number == number


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_random_play(policy: Policy, seed: int) -> None:
    """4,000 random operations agree with the plain model, check() after each."""
    rng = random.Random(f"{policy} {seed}")
    moved = around = 0
    for _ in range(20):
        size = rng.choice((1, 1, 2, 3, 4, 16))
        blocks = rng.randint(2, 24)
        driver = ContiguousDriver(blocks, size, policy, max_len=rng.randint(1, blocks * size))
        for _ in range(200):
            driver.random_step(rng)
        driver.finish()
        moved += driver.num_moved
        around += driver.num_around
    if policy == "pow2":
        assert moved > 15
        assert around > 0


@pytest.mark.parametrize("seed", range(4))
def test_moves_on_moves(seed: int) -> None:
    """10,000 operations on two or three sequences in tight pools, where regions move around themselves,
    and again before their copies were handed over, and are forked meanwhile."""
    rng = random.Random(seed)
    moved = around = 0
    for _ in range(100):
        blocks = rng.randint(6, 20)
        driver = ContiguousDriver(blocks, 1, "pow2", max_len=blocks)
        most, forward = rng.choice((2, 3)), rng.choice((0.05, 0.1, 0.2))
        for _ in range(100):
            driver.random_step(rng, most, forward)
        driver.finish()
        moved += driver.num_moved
        around += driver.num_around
    assert moved > 50
    assert around > 10


@pytest.mark.proof
@pytest.mark.parametrize("policy", POLICIES)
def test_long_random_play(policy: Policy) -> None:
    """100,000 random operations a policy."""
    rng = random.Random(policy)
    for _ in range(500):
        size, blocks = rng.choice((1, 2, 3, 4)), rng.randint(2, 30)
        driver = ContiguousDriver(blocks, size, policy, max_len=rng.randint(1, blocks * size))
        for _ in range(200):
            driver.random_step(rng)
        driver.finish()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block_size", [1, 4])
def test_a_scheduler_runs_on_it_unchanged(policy: Policy, block_size: int) -> None:
    """Requests of mixed lengths, some with two branches, all finish in a pool that forces waiting."""
    rng = random.Random(5)
    final = {}
    pool = ContiguousPool(
        192, policy, max_len=60, block_size=block_size, final_len=lambda tokens: final[int(tokens[0])]
    )
    scheduler = Scheduler(pool, SchedulerConfig(16, 64, 60, watermark=0.0))  # type: ignore[arg-type]
    requests = []
    for name in range(24):
        prompt, new = [name] * rng.randint(1, 40), rng.randint(1, 20)
        final[name] = len(prompt) + new - 1
        requests.append(Request(prompt, new, n=rng.choice((1, 1, 2))))
        scheduler.submit(requests[-1])
    steps = 0
    while scheduler.has_work:
        plan = scheduler.plan()
        assert not plan.stuck
        assert not {c.src for c in plan.actions.copies} & {c.dst for c in plan.actions.copies}
        slots = [slot for entry in plan.entries for slot in entry.slots.tolist()]
        assert len(set(slots)) == len(slots), "two tokens in one slot"
        grown = scheduler.complete(plan, [[0] * entry.num_samples for entry in plan.entries])
        for branch in grown:
            if len(branch.output) == branch.request.max_tokens and branch.state is not State.FINISHED:
                scheduler.finish(branch)
        pool.check()
        steps += 1
        assert steps < 5000
    assert all(request.finished for request in requests)
    assert pool.stats().free == pool.num_blocks
