"""Lower tiers: what goes down, what comes back, what survives a restart, what is never served."""

from __future__ import annotations

import random

import pytest

from octavo.kv import (
    Drop,
    Granted,
    InvalidArgument,
    Move,
    NoRoom,
    Place,
    Pool,
    ProtocolError,
    Record,
    Scope,
    Tier,
)
from tests.kv.helpers import compute, distinct, prefill


def test_evicted_blocks_go_to_the_host_and_come_back_on_a_hit() -> None:
    """A prompt pushed out by another is found in host slots, and reserve() brings it back."""
    pool = Pool(4, 4, host_blocks=8)
    tokens = distinct(1, 16)
    prefill(pool, tokens).close()
    prefill(pool, distinct(2, 16)).close()
    stats = pool.stats()
    assert (stats.demotions, stats.host.cached) == (4, 4)
    assert pool.probe([*tokens, 0]).num_tokens == 16
    seq = pool.open(tokens)
    assert seq.num_cached == 15
    assert not seq.on_device
    assert seq.reserve(1)
    moves = [t for t in pool.drain().transfers if isinstance(t, Move) and t.dst.tier is Tier.DEVICE]
    assert [move.src.tier for move in moves] == [Tier.HOST] * 4
    assert pool.stats().promotions == 4
    pool.check()


def test_a_partial_hit_below_is_copied_straight_into_a_private_block() -> None:
    """Matching 6 of 8 tokens in host slots takes two blocks, not three, and leaves the source findable."""
    pool = Pool(3, 4, host_blocks=8)
    tokens = distinct(1, 8)
    prefill(pool, tokens).close()
    prefill(pool, distinct(2, 12)).close()
    seq = pool.open([*tokens[:6], 7, 7])
    assert seq.num_cached == 6
    compute(pool, seq, [7, 7])
    assert len(seq.table) == 2
    seq.close()
    assert pool.probe([*tokens, 0]).num_tokens == 8


def test_full_host_spills_to_disk_with_a_record() -> None:
    """The host's oldest goes on to disk, named by exact tokens and its parent's uid."""
    pool = Pool(2, 4, host_blocks=2, disk_blocks=4)
    moves: list[Move] = []
    for i in range(3):
        seq = pool.open(distinct(i, 8), Scope("m", salt="s"))
        assert seq.reserve(8)
        seq.extend(8)
        moves += [t for t in pool.drain().transfers if isinstance(t, Move)]
        seq.commit(distinct(i, 8))
        seq.close()
        pool.check()
    spilled = [move for move in moves if move.dst.tier is Tier.DISK]
    assert [move.src.tier for move in spilled] == [Tier.HOST] * 2
    tail, head = (move.record for move in spilled)
    assert tail is not None
    assert head is not None
    assert (tail.parent, head.parent) == (head.uid, b"")
    assert tail.scope == Scope("m", salt="s")
    assert pool.stats().disk.cached == 2
    assert pool.probe([*distinct(0, 8), 0], Scope("m", salt="s")).num_tokens == 8
    assert pool.probe([*distinct(0, 8), 0], Scope("m")).num_tokens == 0, "another tenant finds nothing"


def test_two_requests_for_one_host_prefix_bring_it_back_once() -> None:
    """Both opened before either reserved: the second shares the first one's blocks."""
    pool = Pool(6, 4, host_blocks=8)
    tokens = distinct(1, 16)
    prefill(pool, tokens).close()
    prefill(pool, distinct(2, 24)).close()
    a, b = pool.open([*tokens, 1]), pool.open([*tokens, 2])
    assert a.reserve(1)
    assert b.reserve(1)
    assert a.table[:4].tolist() == b.table[:4].tolist()
    assert pool.stats().promotions == 4
    pool.check()


def test_suspend_and_resume() -> None:
    """A suspended sequence holds no device block, and comes back with all its tokens."""
    pool = Pool(4, 4, host_blocks=4)
    seq = prefill(pool, distinct(1, 14))
    assert seq.suspend() == Granted(4)
    assert (pool.stats().held, pool.stats().host.held) == (0, 4)
    other = prefill(pool, distinct(2, 16))
    assert seq.resume() == NoRoom(4)
    other.close()
    assert seq.resume() == Granted(4)
    assert (seq.length, len(seq.table)) == (14, 4)
    assert pool.stats().host.held == 0
    compute(pool, seq, [1, 2])


def test_a_full_host_refuses_to_suspend_and_changes_nothing() -> None:
    """NoRoom in host slots; the sequence goes on as it is."""
    pool = Pool(4, 4, host_blocks=3)
    seq = prefill(pool, distinct(1, 14))
    table = seq.table.tolist()
    assert seq.suspend() == NoRoom(1)
    assert seq.table.tolist() == table
    compute(pool, seq, [1])


def test_blocks_shared_with_a_running_sequence_are_shared_again() -> None:
    """Suspending one of two sharers copies what they share; resuming finds it on the device."""
    pool = Pool(8, 4, host_blocks=8)
    a = prefill(pool, distinct(1, 12))
    b = pool.open([*distinct(1, 12), 5])
    compute(pool, b, [5])
    assert b.suspend() == Granted(4)
    assert len(a.table) == 3
    assert b.resume() == Granted(1)
    assert b.table[:3].tolist() == a.table.tolist()
    pool.check()


def test_suspend_needs_settled_tokens_and_drained_copies() -> None:
    """Unwritten KV, or KV still to be copied, cannot be moved."""
    pool = Pool(8, 4, host_blocks=8)
    seq = pool.open([1, 2, 3])
    seq.reserve(2)
    seq.extend(2)
    with pytest.raises(ProtocolError, match="2 tokens not committed"):
        seq.suspend()
    pool.drain()
    seq.commit([1, 2])
    child = seq.fork()
    child.reserve(1)
    child.extend(1)
    child.truncate(2)
    with pytest.raises(ProtocolError, match="drain"):
        child.suspend()
    seq.suspend()
    with pytest.raises(ProtocolError, match="brought back"):
        seq.fork()
    pool.check()


def test_a_lost_block_is_never_served() -> None:
    """When a transfer back fails, its block and all after it leave the tree, and its holders are named."""
    pool = Pool(4, 4, host_blocks=8)
    tokens = distinct(1, 16)
    prefill(pool, tokens).close()
    prefill(pool, distinct(2, 16)).close()
    seq = pool.open([*tokens[:13], 9])
    assert seq.reserve(1)
    bad = [t.dst.slot for t in pool.drain().transfers if isinstance(t, Move)][-2]
    assert pool.lost(Place(Tier.DEVICE, bad)) == [seq]
    index = seq.table.tolist().index(bad)
    pool.check()
    seq.close()
    pool.check()
    assert pool.probe([*tokens, 0]).num_tokens <= 4 * index


def test_cached_tokens_are_found_after_a_restart() -> None:
    """persist() moves everything to disk; a new pool restores it from the records alone, in any order."""
    pool = Pool(16, 4, host_blocks=2, disk_blocks=16)
    prompts = [distinct(1, 14), [*distinct(1, 8), 5, 5, 5], distinct(2, 9)]
    for prompt in prompts:
        prefill(pool, prompt, Scope("m")).close()
    pool.persist()
    disk: dict[int, Record] = {}
    for transfer in pool.drain().transfers:
        if isinstance(transfer, Drop):
            disk.pop(transfer.place.slot, None)
        elif transfer.dst.tier is Tier.DISK:
            assert transfer.record is not None
            disk[transfer.dst.slot] = transfer.record
    assert pool.stats().cached == pool.stats().host.cached == 0
    entries = list(disk.items())
    random.Random(1).shuffle(entries)
    again = Pool(16, 4, disk_blocks=16)
    assert again.restore(entries) == []
    again.check()
    for prompt in prompts:
        assert again.probe([*prompt, 0], Scope("m")).num_tokens == len(prompt)
        assert again.probe([*prompt, 0], Scope("m", salt="another tenant")).num_tokens == 0
        seq = again.open([*prompt, 0], Scope("m"))
        compute(again, seq, [0])
        seq.close()


def test_records_that_lead_nowhere_are_returned() -> None:
    """A missing ancestor, an equal twin, a foreign block size and a second root are not restored."""
    scope, other = Scope("m"), Scope("n")
    key = [bytes(range(16 * i, 16 * i + 16)) for i in range(4)]
    uid = [bytes([i]) * 16 for i in range(6)]
    records = [
        (0, Record(uid[0], b"", scope, key[0])),
        (1, Record(uid[1], uid[0], scope, key[1])),
        (2, Record(uid[2], uid[5], scope, key[2])),  # its parent is not there
        (3, Record(uid[3], b"", scope, key[0])),  # equal to slot 0
        (4, Record(uid[4], uid[1], other, key[2])),  # under another scope than its parent
        (5, Record(uid[5][:15] + b"x", b"", scope, bytes(20))),  # longer than a block
    ]
    pool = Pool(4, 4, disk_blocks=8)
    left = set(pool.restore(records))
    assert left - {0, 3} == {2, 4, 5}
    assert len(left) == 4, "one of the equal ones stays, and what follows either"
    pool.check()
    assert pool.stats().disk.cached == 2
    with pytest.raises(ProtocolError):
        pool.restore([])
    with pytest.raises(InvalidArgument, match="slot 8"):
        Pool(4, 4, disk_blocks=8).restore([(8, records[0][1])])


def test_disk_alone_below_the_device() -> None:
    """Without a host tier, evicted blocks go straight to disk and come straight back."""
    pool = Pool(2, 4, disk_blocks=4)
    prefill(pool, distinct(1, 8)).close()
    prefill(pool, distinct(2, 8)).close()
    seq = pool.open([*distinct(1, 7), 0])
    assert seq.num_cached == 7
    assert seq.reserve(1)
    places = [t.src.tier for t in pool.drain().transfers if isinstance(t, Move) and t.dst.tier is Tier.DEVICE]
    assert places == [Tier.DISK] * 2
    pool.check()


def test_transfers_are_in_an_order_that_works() -> None:
    """A slot that is emptied and refilled in one step is read before it is written."""
    pool = Pool(2, 4, host_blocks=2)
    contents: dict[Place, object] = {}
    for i in (1, 2, 1, 2, 1):
        tokens = distinct(i, 8)
        seq = pool.open([*tokens[:7], 0])
        assert seq.reserve(1 if seq.num_cached else 8)
        for transfer in pool.drain().transfers:
            assert isinstance(transfer, Move)
            contents[transfer.dst] = contents.get(transfer.src)
        if seq.num_cached:
            held = [contents[Place(Tier.DEVICE, block)] for block in seq.table.tolist()]
            assert held[0] == (i, 0)
        else:
            seq.extend(8)
            seq.commit(tokens)
            for n, block in enumerate(seq.table.tolist()):
                contents[Place(Tier.DEVICE, block)] = (i, n)
        seq.close()
        pool.check()


def test_nothing_is_published_after_a_block_that_became_private() -> None:
    """A dropped ancestor leaves a running sequence's blocks private, partly published tail included:
    what it computes next must not be found under the wrong prefix."""
    pool = Pool(8, 4)
    seq = prefill(pool, distinct(1, 10))
    pool._blocks.drop(int(seq.table[1]))  # as when its room is taken after forget()
    pool.check()
    compute(pool, seq, [1, 2, 3])
    compute(pool, seq, [4])
    pool.check()
    assert pool.probe([*distinct(1, 10), 1, 2, 3, 4, 5]).num_tokens == 4
    seq.truncate(9)
    compute(pool, seq, [7, 7, 7, 7])
    pool.check()
    assert pool.probe([*distinct(1, 9), 7, 7, 7, 7, 5]).num_tokens == 4


def test_a_suspended_window_cannot_go_back_behind_it() -> None:
    """truncate() into what forget() gave back is refused, on the device and in host slots."""
    pool = Pool(16, 4, host_blocks=16)
    seq = prefill(pool, distinct(1, 24))
    seq.forget(16)
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=r"outside 20\.\.24"):
            seq.truncate(19)
        assert seq.suspend()
    assert seq.resume()
    compute(pool, seq, [1, 2, 3, 4, 5])
    assert seq.table.tolist()[:4] == [-1] * 4
