"""The worked example of docs/kv.md, line by line, on the real pool."""

import pytest

from octavo.kv import Copy, KVShape, NoRoom, Pool, Scope
from tests.kv.helpers import compute, distinct, prefill


def pool_with_tables(*tables: list[int], num_blocks: int = 64) -> tuple[Pool, list]:
    """A pool of blocks of 16 whose sequences have exactly these tables.

    Blocks are handed out by id from a stack; the order of the free list is set so that each
    sequence receives the ids of the example.
    """
    pool = Pool(num_blocks, 16)
    wanted = [block for table in tables for block in table]
    rest = [block for block in range(num_blocks - 1, -1, -1) if block not in wanted]
    pool._blocks.free[0][:] = rest + wanted[::-1]
    lengths = {1: 12, 2: 25, 3: 47}
    seqs = [prefill(pool, distinct(i + 1, lengths[len(table)])) for i, table in enumerate(tables)]
    assert [seq.table.tolist() for seq in seqs] == list(tables)
    return pool, seqs


def test_line_1_blocks_against_whole_contexts() -> None:
    """25, 47 and 12 tokens take 2 + 3 + 1 blocks of 16: 96 slots, 12 of them padding, 1/64 of 3 x 2,048."""
    pool = Pool(64, 16)
    seqs = [prefill(pool, distinct(i, n)) for i, n in enumerate((25, 47, 12))]
    assert [len(seq.table) for seq in seqs] == [2, 3, 1]
    slots = sum(seq.capacity for seq in seqs)
    assert slots == 96
    assert slots - sum(seq.length for seq in seqs) == 12
    assert slots * 64 == 3 * 2048


def test_line_2_blocks_need_no_contiguous_room() -> None:
    """With every second block held, a sequence still gets all the free ones, wherever they lie."""
    pool = Pool(16, 16)
    seqs = [prefill(pool, distinct(i, 16)) for i in range(16)]
    for seq in seqs[::2]:
        seq.close()
    big = prefill(pool, distinct(99, 8 * 16))
    assert sorted(big.table.tolist()) == list(range(0, 16, 2))


def test_line_3_address_rule() -> None:
    """Table [0, 5, 9]: position 37 is logical block 2, offset 5, so slot 5 of physical block 9."""
    pool, (seq,) = pool_with_tables([0, 5, 9])
    logical, offset = divmod(37, pool.block_size)
    assert (logical, offset) == (2, 5)
    assert seq.table[logical] == 9
    again = pool.open([*distinct(1, 47)[:37], 1, 2])
    assert again.num_cached == 37
    assert compute(pool, again, [1])[0] % 16 == 5


@pytest.mark.parametrize("block_size", [1, 7, 16, 64, 256])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 300])
def test_line_4_waste_is_under_a_block_per_sequence(block_size: int, length: int) -> None:
    """A sequence of T tokens takes ceil(T / B) x B slots."""
    seq = prefill(Pool(300, block_size), distinct(1, length))
    assert seq.capacity == -(-length // block_size) * block_size
    assert 0 <= seq.capacity - length < block_size


def test_line_5_bytes_come_from_kv_heads() -> None:
    """K and V of kv_heads x head_dim in every layer: a third of what nine query heads would say."""
    grouped = KVShape(layers=30, kv_heads=3, head_dim=64, bytes_per_value=4)
    assert grouped.bytes_per_block(16) == 30 * 2 * 3 * 64 * 16 * 4
    assert grouped.bytes_per_block(16) * 3 == 30 * 2 * 576 * 16 * 4


def test_line_6_three_tables_leave_58_free() -> None:
    """64 blocks (1,024 slots): tables [3, 7], [0, 5, 9], [4] leave 58 free."""
    pool, _ = pool_with_tables([3, 7], [0, 5, 9], [4])
    assert pool.num_blocks * pool.block_size == 1024
    assert pool.stats().free == 58


def test_line_7_growth_moves_nothing() -> None:
    """The 47-token request stores 10 more: a fourth block, P11, and what was stored stays put."""
    pool, (_, seq, _) = pool_with_tables([3, 7], [0, 5, 9], [4])
    pool._blocks.free[0].remove(11)
    pool._blocks.free[0].append(11)
    slots = compute(pool, seq, distinct(7, 10))
    assert seq.length == 57
    assert seq.table.tolist() == [0, 5, 9, 11]
    assert slots == [9 * 16 + 15, *range(11 * 16, 11 * 16 + 9)]


def test_line_7_twenty_more_need_five_blocks() -> None:
    """47 + 20 = 67 tokens: five blocks in all."""
    _, (_, seq, _) = pool_with_tables([3, 7], [0, 5, 9], [4])
    assert seq.reserve(20)
    assert len(seq.table) == 5


def test_line_8_admission_is_no_promise_to_grow() -> None:
    """A full pool answers NoRoom with how much is missing, and eviction of cached blocks recovers room."""
    pool = Pool(4, 16)
    a, b = prefill(pool, distinct(1, 32)), prefill(pool, distinct(2, 32))
    assert a.reserve(17) == NoRoom(short_by=2)
    b.close()
    assert pool.stats().cached == 2
    assert a.reserve(17)
    assert pool.stats().evictions == 2


def test_line_9_two_continuations_share() -> None:
    """Two continuations of one prompt hold the same blocks once, and the prefill is not repeated."""
    pool = Pool(64, 16)
    prompt = distinct(1, 48)
    a = prefill(pool, prompt)
    before = pool.stats().held
    b = pool.open([*prompt, 7])
    assert b.num_cached == 48
    assert pool.stats().held == before
    assert [pool._blocks.refs[block] for block in a.table] == [2, 2, 2]


def test_line_10_a_full_shared_block_is_never_copied() -> None:
    """An 800-token prefix is fifty blocks of 16; the next token goes to a new private block."""
    pool = Pool(64, 16)
    a = prefill(pool, distinct(1, 800))
    assert len(a.table) == 50
    b = a.fork()
    assert b.reserve(1)
    slot = b.extend(1)[0]
    assert pool.drain().copies == ()
    assert b.table[:50].tolist() == a.table.tolist()
    assert slot // 16 == b.table[50]
    assert b.table[50] not in a.table


@pytest.mark.parametrize("how", ["fork", "open"])
def test_line_11_a_partly_filled_shared_block_is(how: str) -> None:
    """A and B share P0 (16 tokens) and P1 (8); B's next token copies 8 entries to P2 first."""
    pool = Pool(8, 16)
    prompt = distinct(1, 24)
    a = prefill(pool, prompt)
    assert a.table.tolist() == [0, 1]
    b = a.fork() if how == "fork" else pool.open([*prompt, 5])
    assert b.table.tolist() == [0, 1]
    assert [pool._blocks.refs[0], pool._blocks.refs[1]] == [2, 2]
    assert b.reserve(1)
    slots = b.extend(1).tolist()
    assert b.table.tolist() == [0, 2]
    assert slots == [2 * 16 + 8]
    assert pool.drain().copies == (Copy(src=1, dst=2, num_slots=8),)
    assert [pool._blocks.refs[0], pool._blocks.refs[1], pool._blocks.refs[2]] == [2, 1, 1]
    assert a.table.tolist() == [0, 1]
    b.commit([5])
    pool.check()


def test_line_12_equal_text_is_not_enough() -> None:
    """The same tokens under another model, adapter or salt share nothing, not even when names are equal."""
    pool = Pool(64, 16)
    tokens = distinct(1, 40)
    scopes = [Scope("m"), Scope("n"), Scope("m", adapter="x"), Scope("m", salt="x")]
    for scope in scopes:
        assert pool.probe([*tokens, 1], scope).num_tokens == 0
        prefill(pool, tokens, scope).close()
    assert [pool.probe([*tokens, 1], scope).num_tokens for scope in scopes] == [40] * 4


def test_line_12_other_positions_share_nothing() -> None:
    """The second block's tokens at the start of a prompt are another prefix."""
    pool = Pool(64, 16)
    tokens = distinct(1, 48)
    prefill(pool, tokens)
    assert pool.probe(tokens[16:]).num_tokens == 0


def test_line_15_what_remains_for_kv() -> None:
    """Capacity is the budget over bytes per block: 2 GiB holds 2,912 blocks of the 135M model in float32."""
    from octavo.kv import blocks_in

    shape = KVShape(layers=30, kv_heads=3, head_dim=64, bytes_per_value=4)
    assert blocks_in(2 * 2**30, shape, 16) == 2 * 2**30 // 737_280 == 2912
