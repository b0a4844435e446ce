"""Single behaviours of Pool and Sequence, each a fault that a paged cache can have."""

import numpy as np
import pytest

from octavo.kv import (
    KV_DTYPES,
    InvalidArgument,
    KVShape,
    NoRoom,
    NotReserved,
    Pool,
    ProtocolError,
    SequenceClosed,
    blocks_in,
    parse_bytes,
)
from tests.kv.helpers import compute, distinct, prefill

SIZES = [1, 2, 7, 16, 64, 256]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_decode_takes_one_block_per_block_size_tokens(size: int, extra: int) -> None:
    """Prompts around a block, then 2 * block_size tokens one by one: ceil(length / size) blocks."""
    pool = Pool(12, size)
    seq = prefill(pool, distinct(1, max(1, size + extra)))
    for i in range(2 * size):
        compute(pool, seq, [i])
        assert len(seq.table) == -(-seq.length // size)


def test_slots_follow_the_table() -> None:
    """Slots of a chunk across blocks are block * size + offset, in order, as int64."""
    pool = Pool(8, 4)
    seq = pool.open(list(range(10)))
    seq.reserve(10)
    slots = seq.extend(10)
    assert slots.dtype == np.int64
    assert slots.tolist() == [seq.table[i // 4] * 4 + i % 4 for i in range(10)]


def test_tables_are_rows_of_one_padded_array() -> None:
    """Each table is a row of Pool.tables, int32, padded with -1, also after rows and columns grew."""
    pool = Pool(500, 2)
    seqs = [prefill(pool, distinct(i, 2 * (i + 1))) for i in range(20)]
    long = prefill(pool, distinct(99, 400))
    assert pool.tables.dtype == np.int32
    for seq in [*seqs, long]:
        row = pool.tables[seq.row]
        assert row[: len(seq.table)].tolist() == seq.table.tolist()
        assert (row[len(seq.table) :] == -1).all()


def test_refused_reserve_with_pinned_hits_changes_nothing() -> None:
    """All blocks cached: 3 hits + too many new is refused, and the hits are still findable."""
    pool = Pool(6, 4)
    prefill(pool, distinct(1, 12)).close()
    prefill(pool, distinct(2, 12)).close()
    seq = pool.open([*distinct(1, 12), *distinct(3, 16)])
    assert seq.num_cached == 12
    assert seq.reserve(16) == NoRoom(short_by=1)
    pool.check()
    assert pool.probe([*distinct(2, 12), 0]).num_tokens == 12
    assert seq.reserve(12)
    assert len(set(seq.table.tolist())) == 6


def test_hit_stops_at_a_hole() -> None:
    """With a prefix's second block gone, its third is not a hit."""
    pool = Pool(8, 4)
    tokens = distinct(1, 12)
    seq = prefill(pool, tokens)
    seq.close()
    filler = prefill(pool, distinct(2, 7 * 4))  # evicts the two deepest blocks
    assert filler.length == 28
    assert pool.probe([*tokens, 0]).num_tokens == 4
    pool.check()


def test_one_token_is_always_left_to_compute() -> None:
    """A prompt that is wholly cached reuses all but its last token, inside the last block too."""
    pool = Pool(8, 4)
    tokens = distinct(1, 8)
    prefill(pool, tokens).close()
    seq = pool.open(tokens)
    assert seq.num_cached == 7
    assert pool.open(tokens[:1]).num_cached == 0
    assert pool.open([]).num_cached == 0
    compute(pool, seq, tokens[7:])
    assert seq.committed == 8


def test_reuse_reaches_inside_a_block() -> None:
    """B matches A's first 11 of 16 slots in the second block: those are copied, A's tail never shows."""
    pool = Pool(8, 16)
    a = distinct(1, 32)
    prefill(pool, a).close()
    b = pool.open([*a[:27], 5, 6])
    assert b.num_cached == 27
    assert b.reserve(2)
    b.extend(2)
    (copy,) = pool.drain().copies
    assert (copy.src, copy.num_slots) == (1, 11)
    b.commit([5, 6])
    pool.check()
    assert pool.probe([*a, 0]).num_tokens == 32, "the source is intact"


def test_the_best_of_many_siblings_is_found() -> None:
    """Among 3,000 blocks after one prefix, the one that shares most tokens is reused."""
    pool = Pool(4000, 8)
    rng = np.random.default_rng(7)
    prefix = distinct(1, 8)
    rows = np.unique(rng.integers(0, 4, (3000, 8)), axis=0).tolist()
    for row in rows:
        with pool.open(prefix + row) as seq:
            compute(pool, seq, (prefix + row)[seq.num_cached :], check=False)
    pool.check()
    for _ in range(200):
        query = rng.integers(0, 5, 8).tolist()
        best = max(sum(1 for _ in _common(row, query[:7])) for row in rows)
        assert pool.probe(prefix + query).num_tokens == 8 + best


def _common(a: list[int], b: list[int]):
    for x, y in zip(a, b, strict=False):
        if x != y:
            return
        yield x


def test_equal_blocks_written_in_one_step_are_merged() -> None:
    """Eight identical cold prompts computed at once end with one copy of each full block."""
    pool = Pool(64, 4)
    tokens = distinct(1, 10)
    seqs = [pool.open(tokens) for _ in range(8)]
    for seq in seqs:
        assert seq.reserve(10)
        seq.extend(10)
    pool.drain()
    for seq in seqs:
        seq.commit(tokens)
        pool.check()
    assert len({tuple(seq.table[:2].tolist()) for seq in seqs}) == 1
    assert len({int(seq.table[2]) for seq in seqs}) == 8
    for seq in seqs:
        seq.close()
    assert pool.stats().cached == 3, "no orphan is kept"


def test_generated_tokens_are_as_reusable_as_the_prompt() -> None:
    """A second turn that quotes prompt and answer finds all of it."""
    pool = Pool(16, 4)
    prompt = distinct(1, 6)
    seq = prefill(pool, prompt)
    for token in range(5):
        compute(pool, seq, [token])
    seq.close()
    assert pool.probe([*prompt, *range(5), 99]).num_tokens == 11


def test_a_partial_leaf_is_continued_in_place_by_its_only_holder() -> None:
    """The next turn of a conversation takes the last block as it is: no copy, no new block."""
    pool = Pool(4, 16)
    prefill(pool, distinct(1, 20)).close()
    seq = pool.open([*distinct(1, 20), 1, 2])
    assert seq.reserve(2)
    seq.extend(2)
    assert pool.drain().copies == ()
    assert len(seq.table) == 2


def test_lru_evicts_the_oldest_leaf_first() -> None:
    """What was used longest ago goes first, and a prefix never before what continues it."""
    pool = Pool(6, 4)
    for i in (1, 2, 3):
        prefill(pool, distinct(i, 8)).close()
    pool.open([*distinct(1, 8), 0]).close()  # 1 is now the most recent
    prefill(pool, distinct(4, 4)).close()
    assert [pool.probe([*distinct(i, 8), 0]).num_tokens for i in (1, 2, 3)] == [8, 4, 8]


def test_a_lone_sequence_can_use_the_whole_pool() -> None:
    """A partial hit does not cost its only holder a block more than the pool has."""
    pool = Pool(4, 4)
    prefill(pool, distinct(1, 16)).close()
    tokens = [*distinct(1, 6), *distinct(2, 10)]
    seq = pool.open(tokens)
    assert seq.num_cached == 6
    compute(pool, seq, tokens[6:])
    assert seq.length == 16
    assert pool.stats().held == 4


def test_truncate_then_write_copies_what_is_published() -> None:
    """Rolling back into a published block leaves the published tokens intact."""
    pool = Pool(8, 4)
    tokens = distinct(1, 8)
    seq = prefill(pool, tokens)
    seq.truncate(6)
    compute(pool, seq, [5])
    assert pool.stats().copies == 1
    assert pool.probe([*tokens, 0]).num_tokens == 8
    assert pool.probe([*tokens[:6], 5, 0]).num_tokens == 7


def test_without_prefix_caching_nothing_is_found_and_blocks_are_free_at_once() -> None:
    """prefix_caching=False: no hits, no cached blocks; fork still shares."""
    pool = Pool(8, 4, prefix_caching=False)
    seq = prefill(pool, distinct(1, 10))
    assert pool.probe([*distinct(1, 10), 0]).num_tokens == 0
    child = seq.fork()
    compute(pool, child, [1])
    assert pool.stats().copies == 1
    seq.close()
    child.close()
    assert pool.stats().free == 8


def test_double_close_raises() -> None:
    """A double free is an error, and changes nothing."""
    pool = Pool(4, 4)
    seq = prefill(pool, distinct(1, 4))
    seq.close()
    for call in (seq.close, seq.fork, lambda: seq.reserve(1), lambda: seq.commit([1])):
        with pytest.raises(SequenceClosed):
            call()
    pool.check()


def test_with_closes_the_sequence() -> None:
    """A sequence is a context manager; closing it inside is fine."""
    pool = Pool(4, 4)
    with pool.open([1, 2]) as seq:
        seq.reserve(2)
    assert seq.closed
    with pool.open([1, 2]) as seq:
        seq.close()
    assert pool.stats().held == 0


def test_calls_out_of_order_are_refused() -> None:
    """extend without reserve, commit past length, commit before drain, fork with unwritten tokens."""
    pool = Pool(8, 4)
    seq = pool.open([1, 2, 3])
    with pytest.raises(NotReserved, match="extend"):
        seq.extend(1)
    seq.reserve(3)
    with pytest.raises(ProtocolError, match="only 0 slots"):
        seq.commit([1])
    seq.extend(3)
    with pytest.raises(ProtocolError, match="3 tokens not committed"):
        seq.fork()
    seq.commit([1, 2, 3])
    child = seq.fork()
    child.reserve(1)
    child.extend(1)
    with pytest.raises(ProtocolError, match="drain"):
        child.commit([4])
    pool.check()


def test_closing_before_drain_drops_the_copy() -> None:
    """A copy into a block that was given back is not made, and its source is unpinned."""
    pool = Pool(8, 4)
    seq = prefill(pool, distinct(1, 6))
    child = seq.fork()
    child.reserve(1)
    child.extend(1)
    child.close()
    assert pool.drain().copies == ()
    pool.check()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Pool(0, 16), "num_blocks"),
        (lambda: Pool(4, 0), "block_size"),
        (lambda: Pool(4, 257), "block_size"),
        (lambda: Pool(4, 4).open([2**31]), "int32"),
        (lambda: Pool(4, 4).open([1.5]), "int32"),
        (lambda: Pool(4, 4).open(np.array([1], np.int64)), "int32"),
        (lambda: Pool(4, 4).open([1]).reserve(0), "n >= 1"),
        (lambda: Pool(4, 4).open([1]).truncate(1), "truncate"),
        (lambda: parse_bytes("2 potatoes"), "2 potatoes"),
        (lambda: parse_bytes("-1GiB"), "-1GiB"),
        (lambda: parse_bytes(0), "positive"),
        (lambda: blocks_in(1000, KVShape(30, 3, 64, 4), 16), "737,280"),
        (lambda: KVShape.stored_as(30, 3, 64, "int4"), "kv_dtype.*'int4'"),
    ],
)
def test_bad_arguments_are_named(call, message: str) -> None:
    """Each refusal names the argument or the number."""
    with pytest.raises(InvalidArgument, match=message):
        call()


def test_scales_count() -> None:
    """A block of int8 is a quarter of float32's and four bytes more per token, head, layer and side."""
    sizes = {dtype: KVShape.stored_as(30, 3, 64, dtype).bytes_per_block(16) for dtype in KV_DTYPES}
    assert sizes == {
        "float32": 737_280,
        "bfloat16": 368_640,
        "float16": 368_640,
        "int8": 184_320 + 16 * 3 * 30 * 2 * 4,
    }


def test_sizes_are_read() -> None:
    """Decimal and binary units, with and without a space."""
    assert parse_bytes("2GiB") == 2**31
    assert parse_bytes("1.5 kb") == 1500
    assert parse_bytes(4096) == 4096


def test_can_ever_fit_gives_both_numbers() -> None:
    """65 tokens need 5 blocks of 16; a pool of 4 says so."""
    pool = Pool(4, 16)
    assert pool.can_ever_fit(64)
    fit = pool.can_ever_fit(65)
    assert not fit
    assert (fit.need, fit.have) == (5, 4)


def test_scopes_do_not_pile_up() -> None:
    """A scope without blocks and open sequences is forgotten."""
    from octavo.kv import Scope

    pool = Pool(4, 4)
    for i in range(100):
        prefill(pool, distinct(i, 8), Scope(salt=str(i))).close()
    assert len(pool._tree.roots()) <= 2
    pool.check()


def test_n_forks_that_grow_in_one_step_make_n_copies() -> None:
    """Of a sequence and five forks that all reserve before any extends, the last writes in place."""
    pool = Pool(16, 4)
    seqs = [prefill(pool, distinct(1, 6))]
    seqs += [seqs[0].fork() for _ in range(5)]
    for seq in seqs:
        assert seq.reserve(1)
    for seq in seqs:
        seq.extend(1)
    assert len(pool.drain().copies) == 5
    for i, seq in enumerate(seqs):
        seq.commit([i])
    pool.check()
    assert pool.stats().held == 7


def test_commit_takes_a_number_of_the_tokens_given_to_open() -> None:
    """The same blocks become findable as by their ids; more than were given is refused."""
    pool = Pool(8, 4)
    tokens = distinct(1, 11)
    seq = pool.open(tokens)
    seq.reserve(12)
    seq.extend(12)
    seq.commit(5)
    seq.commit(6)
    pool.check()
    assert pool.probe([*tokens, 0]).num_tokens == 11
    with pytest.raises(InvalidArgument, match="was given 11"):
        seq.commit(1)
    seq.commit([7])
    assert pool.probe([*tokens, 7, 0]).num_tokens == 12
