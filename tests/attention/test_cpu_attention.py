"""The compiled backend against dense attention in float64, for every instruction set of the machine."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

pytest.importorskip("octavo.attention._cpu")

from attention_cases import make_case, naive_attention
from cpu_cases import (
    BLOCK_SIZES,
    DTYPES,
    GROUPS,
    HEAD_DIMS,
    KINDS,
    OPTIONS,
    check_against_oracle,
    make_stored_case,
    options_of,
    run,
    shapes_of,
)

from octavo.attention.cpu import ISAS, CpuBackend


def check_one(block_size: int, group: int, kind: str, draw: random.Random) -> None:
    """One cell of the grid, with head size, heads, dtype and option drawn at random."""
    case = make_stored_case(
        shapes_of(kind, block_size),
        draw.choice(DTYPES),
        block_size=block_size,
        group=group,
        head_dim=draw.choice(HEAD_DIMS),
        num_kv_heads=draw.choice((1, 2, 3)) if group <= 8 else 1,
        seed=draw.randrange(1000),
    )
    options = options_of(draw.choice(OPTIONS), case.query.shape[1], draw.choice((1, 6, 100, 600)))
    check_against_oracle(case, options)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_block_and_group_size_agrees_with_the_oracle(block_size: int, group: int) -> None:
    """Two kinds of batch per cell, everything else drawn at random, are within 1e-5 of float64."""
    draw = random.Random(block_size * 100 + group)
    for kind in draw.sample(KINDS, 2):
        check_one(block_size, group, kind, draw)


@pytest.mark.proof
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_the_full_grid_agrees_with_the_oracle(block_size: int, group: int) -> None:
    """Every kind of batch, stored dtype, option and head size is within 1e-5 of float64."""
    cells = itertools.product(KINDS, DTYPES, OPTIONS, HEAD_DIMS)
    for place, (kind, dtype, option, head_dim) in enumerate(cells):
        case = make_stored_case(
            shapes_of(kind, block_size),
            dtype,
            block_size=block_size,
            group=group,
            head_dim=head_dim,
            num_kv_heads=1 + place % 2,
            seed=place,
        )
        options = options_of(option, case.query.shape[1], (1, 6, 100, 600)[place % 4])
        check_against_oracle(case, options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_and_dtype_agrees_with_the_oracle(option: str, dtype: torch.dtype) -> None:
    """Rows of prefill, chunks and decode, some over several splits, with each option and stored dtype."""
    shapes = [(1, 40), (20, 20), (7, 26), (1, 3), (1, 1100), (2, 560), (130, 600)]
    case = make_stored_case(shapes, dtype, block_size=16, group=3, head_dim=64, seed=7)
    check_against_oracle(case, options_of(option, case.query.shape[1], 530))


@pytest.mark.parametrize("head_dim", [*range(1, 34), 40, 96, 112, 129, 255])
def test_any_head_size_agrees_with_the_oracle(head_dim: int) -> None:
    """Head sizes that fill no whole vector are right too, in every stored dtype."""
    for dtype in DTYPES:
        case = make_stored_case([(1, 70), (9, 20)], dtype, block_size=7, group=2, head_dim=head_dim, seed=3)
        check_against_oracle(case, {})


@pytest.mark.parametrize("isa", ISAS)
def test_loops_over_queries_and_heads_agree(isa: str) -> None:
    """The oracle shares code with the package; loops that share none give the same, all options on."""
    case = make_case([(1, 30), (9, 9), (5, 40)], block_size=7, group=5, head_dim=64, seed=11)
    options = options_of("all", case.query.shape[1])
    want, want_lse = naive_attention(case, scale=64**-0.5, **options)
    out, lse = run(CpuBackend(isa=isa), case, **options)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
def test_large_scores_neither_overflow_nor_vanish(isa: str) -> None:
    """Scores of several hundreds, where a softmax without its maximum would be infinite or 0 / 0."""
    case = make_case([(1, 700), (70, 70)], block_size=16, group=2, head_dim=64, seed=5)
    case.query *= 100
    options = {"alibi": torch.full((4,), 3.0)}
    for chosen in ({}, options):
        out, lse = run(CpuBackend(isa=isa), case, **chosen)
        want, want_lse = naive_attention(case, scale=0.125, **chosen)
        torch.testing.assert_close(out.double(), want, rtol=0, atol=2e-4)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_output_has_the_dtype_of_the_query(dtype: torch.dtype) -> None:
    """A 16-bit query gives the float32 result rounded once."""
    case = make_case([(1, 30), (12, 12)], block_size=16, group=3, head_dim=72, seed=9, dtype=dtype)
    query = case.query.to(dtype)
    for isa in ISAS:
        backend = CpuBackend(isa=isa)
        out = backend.paged_attention(query, case.cache, case.batch, scale=0.125)
        exact = backend.paged_attention(query.float(), case.cache, case.batch, scale=0.125)
        assert out.dtype == dtype
        assert torch.equal(out, exact.to(dtype))


def test_a_query_may_be_part_of_a_larger_tensor() -> None:
    """Query heads cut out of a qkv tensor, as the decoder does, give the bits of a dense query."""
    case = make_case([(1, 30), (12, 12)], block_size=16, group=3, head_dim=64, seed=9)
    wide = torch.cat((torch.randn(13, 2, 64), case.query, torch.randn(13, 4, 64)), dim=1)
    backend = CpuBackend()
    dense = backend.paged_attention(case.query, case.cache, case.batch, scale=0.125)
    assert torch.equal(backend.paged_attention(wide[:, 2:8], case.cache, case.batch, scale=0.125), dense)


def test_a_batch_without_tokens_or_rows_gives_nothing() -> None:
    """Idle rows alone, and no row at all, give an empty output."""
    case = make_case([(0, 9), (0, 0)], block_size=4, group=2, head_dim=16)
    assert run(CpuBackend(), case)[0].shape == (0, 4, 16)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3), (torch.int8, 2e-2)]
)
def test_storage_loses_no_more_than_its_bound(dtype: torch.dtype, bound: float) -> None:
    """K and V written in a smaller dtype change outputs of size 1 by no more than the dtype's step."""
    case = make_case([(1, 900), (30, 300)], block_size=16, group=3, head_dim=64, seed=4)
    want, _ = naive_attention(case, scale=0.125)
    stored = make_stored_case([(1, 900), (30, 300)], dtype, block_size=16, group=3, head_dim=64, seed=4)
    stored.query = case.query
    out, _ = run(CpuBackend(), stored)
    assert (out - want).abs().max() < bound
