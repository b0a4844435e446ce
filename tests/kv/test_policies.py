"""Eviction orders, pins, windows, events and leaks."""

from __future__ import annotations

import random

import pytest

from octavo.kv import LFU, LRU, Expiring, InvalidArgument, Pool, Priority, Scope, Tier
from octavo.kv.eviction import EvictionPolicy
from tests.kv.helpers import compute, distinct, prefill


def found(pool: Pool, *starts: int, length: int = 8) -> list[int]:
    return [pool.probe([*distinct(i, length), 0]).num_tokens for i in starts]


def test_lfu_keeps_what_is_used_often() -> None:
    """A prompt used three times outlives later ones used once."""
    pool = Pool(6, 4, policy=LFU())
    for _ in range(3):
        prefill(pool, distinct(1, 8)).close()
    prefill(pool, distinct(2, 8)).close()
    prefill(pool, distinct(3, 8)).close()
    prefill(pool, distinct(4, 8)).close()
    assert found(pool, 1, 2, 3, 4) == [8, 0, 8, 8]


def test_priority_keeps_the_important() -> None:
    """Blocks of a request with priority go last, however old; ties go by age."""
    pool = Pool(6, 4, policy=Priority())
    with pool.open(distinct(1, 8), priority=5) as seq:
        compute(pool, seq, distinct(1, 8))
    for i in (2, 3, 4, 5):
        prefill(pool, distinct(i, 8)).close()
    assert found(pool, 1, 2, 3, 4, 5) == [8, 0, 0, 8, 8]


@pytest.mark.parametrize("policy", [LRU, LFU, Priority])
def test_policies_name_leaves_of_what_is_cached(policy: type[EvictionPolicy]) -> None:
    """Random use: every eviction takes a block that nothing on the device continues."""
    rng = random.Random(3)
    pool = Pool(12, 2, policy=policy())
    evict = pool._blocks.evict

    def checked(block: int) -> None:
        below = [c for c in pool._tree.children(block) if c < pool.num_blocks]
        assert not below
        evict(block)

    pool._blocks.evict = checked  # type: ignore[method-assign]
    for _ in range(500):
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 14))]
        with pool.open(tokens, priority=rng.randrange(3)) as seq:
            compute(pool, seq, tokens[seq.num_cached :])
    assert pool.stats().evictions > 100


@pytest.mark.parametrize("policy", [LRU, LFU, Priority])
def test_policy_against_a_plain_list(policy: type[EvictionPolicy]) -> None:
    """Random adds and removes: the victim is the minimum of (rank, time of release)."""
    rng, order, age = random.Random(5), policy(), 0.0
    plain: dict[int, tuple[float, int]] = {}
    for step in range(5000):
        if plain and rng.random() < 0.45:
            block = order.victim() if rng.random() < 0.5 else rng.choice(list(plain))
            order.remove(block)
            del plain[block]
        else:
            block, uses, priority = rng.randrange(200), rng.randrange(4), rng.randrange(3)
            if block not in plain:
                order.add(block, uses, priority)
                rank = age + uses if policy is LFU else priority if policy is Priority else 0
                plain[block] = (rank, step)
        assert len(order) == len(plain)
        assert set(order) == set(plain)
        if plain:
            assert order.victim() == min(plain, key=lambda b: plain[b])
            age = max(age, plain[order.victim()][0])


def test_cached_blocks_expire() -> None:
    """A time to live counts from the last use, in lower tiers from when the block came there."""
    pool = Pool(4, 4, policy=Expiring(LRU(), ttl=10), host_blocks=4)
    prefill(pool, distinct(1, 8)).close()
    pool.expire(6)
    prefill(pool, distinct(2, 8)).close()
    pool.expire(9)
    assert found(pool, 1, 2) == [8, 8]
    pool.expire(10)
    assert found(pool, 1, 2) == [0, 8]
    held = pool.open([*distinct(2, 8), 0])
    pool.expire(100)
    assert found(pool, 2) == [8], "what is held does not expire"
    held.close()
    prefill(pool, distinct(3, 16)).close()
    pool.expire(109)
    assert found(pool, 2) == [8]
    pool.expire(110)
    assert found(pool, 2) == [0]
    pool.check()
    with pytest.raises(InvalidArgument, match="Expiring"):
        Pool(4, 4).expire(1)


def test_pinned_blocks_stay() -> None:
    """All cached blocks pinned: nothing can be evicted; unpinned, they can."""
    pool = Pool(4, 4)
    prefill(pool, distinct(1, 16)).close()
    pin = pool.pin(distinct(1, 16))
    assert pool.available == 0
    other = pool.open(distinct(2, 4))
    assert not other.reserve(4)
    pin.close()
    assert other.reserve(4)
    pool.check()


def test_clear_forgets_everything_but_what_is_held() -> None:
    """After clear() nothing old is found, and what was open publishes nothing any more."""
    pool = Pool(16, 4, host_blocks=4)
    prefill(pool, distinct(1, 8)).close()
    seq = prefill(pool, distinct(2, 6))
    pool.clear()
    pool.check()
    assert found(pool, 1, 2) == [0, 0]
    compute(pool, seq, [1, 2, 3, 4])
    seq.close()
    assert pool.stats().free == 16
    prefill(pool, distinct(1, 8)).close()
    assert found(pool, 1) == [8]


def test_what_is_revoked_is_found_by_nobody() -> None:
    """A sequence whose KV turned out wrong: nothing that it holds is found, in any tier, nor what others
    published after it; those who share it keep it and publish nothing more; other prefixes stay."""
    pool = Pool(16, 4, host_blocks=8)
    tokens = distinct(1, 8)
    prefill(pool, distinct(2, 8)).close()
    bad = prefill(pool, [*tokens, *distinct(3, 6)])
    mate = pool.open([*tokens, *distinct(4, 6)])
    compute(pool, mate, distinct(4, 6))
    gone = pool.open([*tokens, *distinct(5, 4)])
    compute(pool, gone, distinct(5, 4))
    gone.close()
    bad.revoke()
    pool.check()
    bad.close()
    assert [pool.probe([*tokens, *distinct(i, 6), 0]).num_tokens for i in (3, 4, 5)] == [0, 0, 0]
    assert found(pool, 2) == [8]
    assert mate.length == 14
    compute(pool, mate, [7] * 9)
    mate.close()
    pool.check()
    assert found(pool, 1) == [0]
    assert pool.stats().held == 0
    prefill(pool, tokens).close()
    assert found(pool, 1) == [8], "computed again, it is found again"


def test_a_window_gives_back_what_it_left() -> None:
    """forget() frees blocks behind a position; they stay findable until their room is needed."""
    pool = Pool(8, 4)
    seq = prefill(pool, distinct(1, 24))
    seq.forget(18)
    assert seq.table.tolist()[:4] == [-1] * 4
    assert pool.stats().held == 2
    assert pool.stats().cached == 4
    assert found(pool, 1, length=24) == [24]
    for i in range(40):
        compute(pool, seq, [i])
        seq.forget(seq.length - 8)
    assert pool.stats().held <= 4
    seq.close()
    pool.check()


def test_events_tell_a_router_what_can_be_found() -> None:
    """Replaying stored and removed events gives exactly the published blocks, by tier and parent."""
    rng = random.Random(8)
    pool = Pool(10, 2, host_blocks=4, disk_blocks=4, record_events=True)
    known: dict[bytes, tuple[Tier, bytes, Scope, bytes]] = {}
    for _ in range(300):
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 12))]
        with pool.open(tokens, Scope(salt=rng.choice("ab"))) as seq:
            compute(pool, seq, tokens[seq.num_cached :])
        for event in pool.events():
            if event.kind == "stored":
                assert event.block not in known
                assert event.parent == b"" or event.parent in known
                known[event.block] = (event.tier, event.parent, event.scope, event.tokens)
            else:
                assert event.kind == "removed"
                assert known.pop(event.block)[0] == event.tier
        tree, blocks = pool._tree, pool._blocks
        want = {
            tree.uid(b): (blocks.tier(b), tree.uid(tree.parent(b)), tree.scope(b), key)
            for b, key in enumerate(tree.key)
            if key is not None
        }
        assert known == want
    pool.clear()
    assert pool.events()[-1].kind == "cleared"


def test_hit_counts_add_up() -> None:
    """queried and hit tokens are those of open()."""
    pool = Pool(8, 4)
    for _ in range(3):
        prefill(pool, distinct(1, 10)).close()
    stats = pool.stats()
    assert (stats.queried_tokens, stats.hit_tokens) == (30, 18)


def _forgetful(pool: Pool) -> None:
    pool.open([1, 2, 3])


def test_a_leaked_sequence_is_named_by_where_it_was_opened() -> None:
    """debug=True: leaks() gives the line that opened each sequence still open."""
    pool = Pool(8, 4, debug=True)
    _forgetful(pool)
    with pool.open([1]):
        pass
    (site,) = pool.leaks()
    assert "_forgetful" in site
