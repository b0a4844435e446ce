"""What measure() and WasteLog say of paged and contiguous pools."""

import pytest

from octavo.kv import Pool
from octavo.kv.contiguous import ContiguousPool
from octavo.kv.waste import Waste, WasteLog, measure
from tests.kv.helpers import distinct, prefill

LENGTHS = (25, 47, 12)


def contiguous(pool: ContiguousPool, tokens: int, final_len: int | None = None):
    """A sequence of `tokens` computed tokens."""
    seq = pool.open([0] * tokens, final_len=final_len)
    assert seq.reserve(tokens)
    seq.extend(tokens)
    pool.drain()
    seq.commit([0] * tokens)
    pool.check()
    return seq


def test_line_1_whole_contexts_against_blocks() -> None:
    """Contexts of 2,048 take 6,144 slots for 84 tokens; blocks of 16 take 96, 12 of them padding."""
    whole = ContiguousPool(8192, "max", max_len=2048)
    seqs = [contiguous(whole, n) for n in LENGTHS]
    assert measure(whole, seqs) == Waste(6144, 84, 0, 6144 - 84, 0, 8192 - 6144)
    paged = Pool(512, 16)
    pages = [prefill(paged, distinct(i, n)) for i, n in enumerate(LENGTHS)]
    waste = measure(paged, pages)
    assert waste == Waste(96, 84, 0, 12, 0, 8192 - 96)
    assert waste.reserved * 64 == 6144
    assert waste.total == 8192


def test_line_2_free_slots_that_a_region_cannot_use_are_external() -> None:
    """Regions of 1,500 and 800 free slots: all 2,300 are external waste to a request for 2,048."""
    pool = ContiguousPool(2400, "oracle")
    gap, _wall, _ = (
        contiguous(pool, 1500, 1500), contiguous(pool, 100, 100), contiguous(pool, 800, 800),
    )  # fmt: skip
    gap.close()
    _.close()
    assert pool.stats().free == 2300
    waste = measure(pool, [_wall], head=2048)
    assert (waste.external, waste.free) == (2300, 0)
    assert measure(pool, [_wall], head=1000).external == 800
    assert measure(pool, [_wall]).external == 0
    assert measure(Pool(150, 16), [], head=2048).external == 0


@pytest.mark.parametrize("block_size", [1, 7, 16, 64, 256])
@pytest.mark.parametrize("count", [1, 5])
def test_line_4_paged_waste_is_under_a_block_per_request(block_size: int, count: int) -> None:
    """Waste grows with the number of requests, and stays under a block for each."""
    pool = Pool(200, block_size)
    seqs = [prefill(pool, distinct(i, 17 + i)) for i in range(count)]
    waste = measure(pool, seqs)
    assert waste.used == sum(17 + i for i in range(count))
    assert waste.internal == sum(-(17 + i) % block_size for i in range(count)) < count * block_size


def test_a_shared_block_counts_once() -> None:
    """A fork adds no used and no reserved slot, until it writes its own."""
    pool = Pool(16, 16)
    a = prefill(pool, distinct(1, 24))
    alone = measure(pool, [a])
    b = a.fork()
    assert measure(pool, [a, b]) == alone == Waste(32, 24, 0, 8, 0, 224)
    assert b.reserve(1)
    b.extend(1)
    pool.drain()
    assert measure(pool, [a, b]) == Waste(48, 24 + 9, 0, 8 + 7, 0, 208)


def test_cached_blocks_are_free() -> None:
    """What is only cached can be had at once."""
    pool = Pool(16, 16)
    prefill(pool, distinct(1, 24)).close()
    assert pool.stats().cached == 2
    assert measure(pool, []) == Waste(0, 0, 0, 0, 0, 256)


@pytest.mark.parametrize(
    ("policy", "reserved"), [("max", 128), ("pow2", 32), ("oracle", 40)], ids=["max", "pow2", "oracle"]
)
def test_known_final_lengths_split_reservation_from_internal(policy: str, reserved: int) -> None:
    """Of 20 tokens that become 40, what lies beyond 40 will never be used."""
    pool = ContiguousPool(256, policy, max_len=128)  # type: ignore[arg-type]
    seq = contiguous(pool, 20, 40)
    waste = measure(pool, [seq], final_len=lambda seq: 40)
    assert waste.reserved == reserved
    assert waste.reservation == min(reserved, 40) - 20
    assert waste.internal == max(0, reserved - 40)


def test_log_means_and_shares() -> None:
    """Two samples: the means are halfway, the shares of what is taken leave the free out."""
    pool = ContiguousPool(100, "max", max_len=40)
    log = WasteLog(pool, final_len=lambda seq: 30)
    log.sample(0, [])
    seq = contiguous(pool, 20)
    assert log.sample(1, [seq], head=40) == Waste(40, 20, 10, 10, 0, 60)
    summary = log.summary()
    assert summary.samples == 2
    assert summary.slots == (10, 5, 5, 0, 80)
    assert summary.of_pool == (0.1, 0.05, 0.05, 0, 0.8)
    assert summary.of_taken == (0.5, 0.25, 0.25, 0, 0)
    assert WasteLog(pool).summary().of_pool == (0, 0, 0, 0, 0)
