"""A watcher's mirror, kept by what take() names alone, equals the pool after any operation."""

from __future__ import annotations

import random

import pytest

from octavo.kv import Pool, Tier
from octavo.kv.blocks import Blocks
from octavo.kv.watch import BlockView, Watch
from tests.kv.driver import Driver


def views(pool: Pool, watch: Watch) -> list[BlockView]:
    """Every device block, read afresh."""
    return [watch.view(block) for block in range(pool.num_blocks)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("caching", "host", "disk"), [(True, 0, 0), (True, 6, 0), (True, 5, 9), (False, 0, 0), (False, 6, 0)]
)
def test_the_mirror_is_exact(seed: int, caching: bool, host: int, disk: int) -> None:
    """Whatever happens, in any tier and with windows: no change of a device block goes unnoticed."""
    rng = random.Random(seed)
    driver = Driver(24, rng.choice((1, 2, 4)), caching, host, disk)
    driver.windows = seed % 2 == 1
    for _ in range(60):
        driver.random_step(rng, 3, 20)
    watch = driver.pool.watch()
    mirror = views(driver.pool, watch)
    evictions, noted = driver.pool.stats().evictions, 0
    for _ in range(250):
        for _ in range(rng.randint(1, 3)):
            driver.random_step(rng, 3, 20)
        changes = watch.take()
        for block in changes.touched:
            if block < driver.pool.num_blocks:
                mirror[block] = watch.view(block)
        noted += len(changes.evicted)
        assert mirror == views(driver.pool, watch)
    assert noted <= driver.pool.stats().evictions - evictions
    assert noted > 0 or not caching
    driver.pool.unwatch()


def test_watching_is_undone() -> None:
    """An unwatched pool runs the plain methods again; watching twice gives one Watch."""
    pool = Pool(8, 2)
    assert type(pool._blocks) is Blocks
    watch = pool.watch()
    assert pool.watch() is watch
    seq = pool.open([1, 2, 3])
    seq.reserve(3)
    seq.extend(3)
    seq.commit([1, 2, 3])
    first, second = seq.table.tolist()
    assert watch.take().touched >= {first, second}
    assert watch.view(first) == (1, 2, -2)
    assert watch.view(second) == (1, 1, first)
    assert watch.allocated == 2
    pool.unwatch()
    assert type(pool._blocks) is Blocks
    assert not hasattr(pool._blocks, "watch")
    seq.close()
    assert watch.take().touched == set()
    pool.check()


def test_evictions_are_named_in_order() -> None:
    """Cached blocks pushed out are listed, leaves first, and only those of the device."""
    pool = Pool(4, 1, host_blocks=2)
    seq = pool.open([1, 2, 3])
    seq.reserve(3)
    seq.extend(3)
    seq.commit([1, 2, 3])
    table = seq.table.tolist()
    seq.close()
    watch = pool.watch()
    other = pool.open([9, 9, 9, 9])
    other.reserve(4)
    assert watch.take().evicted == table[::-1]
    assert pool.stats().host.cached == 2
    assert pool.stats().evictions == 3
    assert Tier.HOST in (pool._blocks.tier(block) for block in range(4, 6))
