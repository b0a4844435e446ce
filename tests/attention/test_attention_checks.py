"""What check_batch lets pass and what it refuses; and the choice of a backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import make_batch

from octavo.attention import (
    BatchError,
    ReferenceBackend,
    UnknownBackend,
    backend_note,
    check_batch,
    make_backend,
)
from octavo.errors import InvalidRequest, OctavoError

BLOCK_SIZE, NUM_BLOCKS, NUM_TOKENS = 4, 20, 9
SHAPES = [(1, 9), (6, 6), (2, 11)]  # rows at queries 0:1, 1:7, 7:9; blocks 3 + 2 + 3


def good_batch():
    """A valid batch on blocks 19, 18, ..., 12."""
    return make_batch(SHAPES, BLOCK_SIZE, list(range(19, -1, -1)))


def with_entry(name: str, index: tuple[int, ...] | int, value: int):
    """The valid batch with one number changed."""
    batch = good_batch()
    tensor = getattr(batch, name).clone()
    tensor[index] = value
    return replace(batch, **{name: tensor})


@pytest.mark.parametrize("block_size", [1, 2, 7, 16, 64, 256])
def test_valid_batches_pass(block_size: int) -> None:
    """Batches of decode, prefill, chunk and idle rows pass at any block size, with -1 past kv_len."""
    shapes = [(1, 1), (1, 40), (0, 12), (9, 9), (5, 70), (0, 0)]
    blocks = sum(-(-kv_len // block_size) for _, kv_len in shapes)
    batch = make_batch(shapes, block_size, list(range(blocks)))
    check_batch(batch, blocks, block_size, 16)
    assert int(batch.tables.min()) == -1


@pytest.mark.parametrize("block", [-1, -7, NUM_BLOCKS, 2**31 - 1])
@pytest.mark.parametrize(("row", "logical"), [(0, 0), (0, 2), (1, 1), (2, 2)])
def test_a_block_outside_the_pool_is_named(row: int, logical: int, block: int) -> None:
    """Any block id that covers kv_len must be in 0..N-1; the error has the row, position and id."""
    with pytest.raises(BatchError, match=rf"row {row}: .*block {block};.*0\.\.19") as caught:
        check_batch(with_entry("tables", (row, logical), block), NUM_BLOCKS, BLOCK_SIZE, NUM_TOKENS)
    assert (caught.value.row, caught.value.position) == (row, logical * BLOCK_SIZE)


def test_blocks_past_kv_len_do_not_matter() -> None:
    """Row 1 uses two blocks, so its third entry may be anything."""
    check_batch(with_entry("tables", (1, 2), 10**6), NUM_BLOCKS, BLOCK_SIZE, NUM_TOKENS)


def test_kv_len_past_the_table_is_refused() -> None:
    """A kv_len for which the table has too few columns names the row and the room."""
    with pytest.raises(BatchError, match="row 2: kv_len is 17; its table has room for 16") as caught:
        check_batch(with_entry("kv_len", 2, 17), NUM_BLOCKS, BLOCK_SIZE, NUM_TOKENS)
    assert (caught.value.row, caught.value.position) == (2, 16)


@pytest.mark.parametrize("kv_len", [5, 0, -1])
def test_more_queries_than_kv_len_are_refused(kv_len: int) -> None:
    """kv_len counts this step's tokens too, so 6 queries need a kv_len of 6 or more."""
    with pytest.raises(BatchError, match=f"row 1: 6 queries, .* is {kv_len}") as caught:
        check_batch(with_entry("kv_len", 1, kv_len), NUM_BLOCKS, BLOCK_SIZE, NUM_TOKENS)
    assert caught.value.row == 1


def test_query_start_must_rise() -> None:
    """A row that ends before it begins is refused, by row."""
    with pytest.raises(BatchError, match="row 2: query_start falls from 10 to 9") as caught:
        check_batch(with_entry("query_start", 2, 10), NUM_BLOCKS, BLOCK_SIZE, NUM_TOKENS)
    assert caught.value.row == 2


def test_query_start_must_begin_at_0() -> None:
    """The first row owns the first query."""
    with pytest.raises(BatchError, match=r"query_start\[0\] is 1"):
        check_batch(with_entry("query_start", 0, 1), NUM_BLOCKS, BLOCK_SIZE, NUM_TOKENS)


@pytest.mark.parametrize("end", [8, 10])
def test_query_start_must_end_at_the_tokens(end: int) -> None:
    """Too few and too many queries for the step's tokens are both refused."""
    with pytest.raises(BatchError, match=f"ends at {end}; there are 9 tokens") as caught:
        check_batch(with_entry("query_start", 3, end), NUM_BLOCKS, BLOCK_SIZE, NUM_TOKENS)
    assert caught.value.row == 2


@pytest.mark.parametrize("slot", [-1, NUM_BLOCKS * BLOCK_SIZE])
def test_a_slot_outside_the_pool_is_named(slot: int) -> None:
    """Token 8 is row 2's second query, at position 10."""
    with pytest.raises(BatchError, match=f"row 2, position 10: slot {slot} is outside") as caught:
        check_batch(with_entry("slots", 8, slot), NUM_BLOCKS, BLOCK_SIZE, NUM_TOKENS)
    assert (caught.value.row, caught.value.position) == (2, 10)


def test_two_tokens_for_one_slot_are_refused() -> None:
    """Two sequences that write one shared block name the second writer and the first."""
    batch = make_batch([(1, 2), (1, 2)], BLOCK_SIZE, [5, 5])
    with pytest.raises(
        BatchError, match="row 1, position 1: slot 21 is also written by row 0, position 1"
    ) as caught:
        check_batch(batch, NUM_BLOCKS, BLOCK_SIZE, 2)
    assert (caught.value.row, caught.value.position) == (1, 1)


def test_a_slot_that_the_table_does_not_give_is_refused() -> None:
    """A token written elsewhere than where attention will look for it names both slots."""
    batch = good_batch()
    right = int(batch.slots[3])  # row 1, position 2
    with pytest.raises(BatchError, match=f"row 1, position 2: slot 0 .*table gives, {right}") as caught:
        check_batch(with_entry("slots", 3, 0), NUM_BLOCKS, BLOCK_SIZE, NUM_TOKENS)
    assert (caught.value.row, caught.value.position) == (1, 2)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("tables", torch.int64),
        ("query_start", torch.int64),
        ("kv_len", torch.int64),
        ("slots", torch.int32),
    ],
)
def test_a_wrong_dtype_is_refused(name: str, dtype: torch.dtype) -> None:
    """Kernels read the arrays as they are, so each has one dtype."""
    batch = good_batch()
    with pytest.raises(BatchError, match=f"{name} is {dtype}"):
        check_batch(
            replace(batch, **{name: getattr(batch, name).to(dtype)}), NUM_BLOCKS, BLOCK_SIZE, NUM_TOKENS
        )


@pytest.mark.parametrize("name", ["query_start", "kv_len", "slots"])
def test_a_wrong_length_is_refused(name: str) -> None:
    """An array that is one short for the batch's rows or tokens is refused by name."""
    batch = good_batch()
    with pytest.raises(BatchError, match=f"{name} has shape"):
        check_batch(replace(batch, **{name: getattr(batch, name)[:-1]}), NUM_BLOCKS, BLOCK_SIZE, NUM_TOKENS)


def test_backends_are_made_by_name() -> None:
    """ "reference" gives the reference backend; "auto" gives the one that the note names."""
    assert isinstance(make_backend("reference"), ReferenceBackend)
    assert make_backend().name == backend_note().split()[0]


def test_an_unknown_backend_lists_those_that_exist() -> None:
    """The error is the caller's to fix: typed, with the name given and the names known."""
    with pytest.raises(UnknownBackend, match=r"'cuda'.*auto, cpu, reference") as caught:
        make_backend("cuda")
    assert isinstance(caught.value, InvalidRequest)
    assert isinstance(caught.value, OctavoError)
    assert caught.value.param == "backend"
