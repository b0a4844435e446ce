"""What must change no bit: placement, unused slots, company, threads, chunking, sharing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("octavo.attention._cpu")

from attention_cases import Case, make_batch, make_case
from cpu_cases import DTYPES, OPTIONS, PAIRS, in_lanes, make_stored_case, options_of, run

from octavo.attention import AttentionBatch
from octavo.attention.cpu import ISAS, CpuBackend

KERNELS = [(isa, torch.float32) for isa in ISAS] + [(PAIRS, torch.bfloat16)] * (PAIRS in ISAS)
"""Instruction sets, and a dtype of the cache that each has loops of its own for."""
SHAPES = [(1, 30), (1, 33), (12, 12), (5, 40), (1, 2), (1, 1300), (50, 700)]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def equal(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    """Whether out and lse are the same bits."""
    return all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(a, b))


def rows_of(case: Case, row: int, result: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The part of out and lse that belongs to one sequence."""
    begin, end = case.batch.query_start[row : row + 2].tolist()
    return tuple(part[begin:end] for part in result)


def alone(case: Case, row: int, first: int = 0, last: int | None = None) -> Case:
    """One sequence of the case by itself, or its queries first..last-1 as a chunk of their own."""
    queries, kv_len = case.shapes[row]
    last = queries if last is None else last
    length = kv_len - (queries - last)
    begin = int(case.batch.query_start[row])
    batch = AttentionBatch(
        tables=case.batch.tables[row : row + 1],
        query_start=torch.tensor([0, last - first], dtype=torch.int32),
        kv_len=torch.tensor([length], dtype=torch.int32),
        slots=case.batch.slots[begin + first : begin + last],
    )
    return Case(case.query[begin + first : begin + last], [], [], case.cache, batch, [(last - first, length)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_shuffled_physical_ids_give_equal_bits(block_size: int, dtype: torch.dtype) -> None:
    """Where in the pool a sequence's blocks lie changes no bit of out or lse."""
    first, *others = (
        make_stored_case(SHAPES, dtype, block_size=block_size, group=3, head_dim=64, seed=5, order=order)
        for order in ("identity", "reversed", "shuffled")
    )
    for isa, option in itertools.product(ISAS, OPTIONS):
        backend, options = CpuBackend(isa=isa), options_of(option, 6)
        want = run(backend, first, **options)
        assert all(equal(run(backend, other, **options), want) for other in others), (isa, option)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 7, 16, 256])
def test_unused_slots_change_no_bit(block_size: int, dtype: torch.dtype) -> None:
    """NaN or 1e4 in every slot that no sequence owns gives the bits that zeros give, and no NaN."""
    first, *others = (
        make_stored_case(SHAPES, dtype, block_size=block_size, group=3, head_dim=72, seed=6, fill=fill)
        for fill in (0.0, math.nan, 1e4)
    )
    for isa, option in itertools.product(ISAS, OPTIONS):
        backend, options = CpuBackend(isa=isa), options_of(option, 6)
        want = run(backend, first, **options)
        assert all(torch.isfinite(part).all() for part in want)
        assert all(equal(run(backend, other, **options), want) for other in others), (isa, option)


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
def test_company_and_threads_change_no_bit(isa: str, dtype: torch.dtype) -> None:
    """A sequence alone, among 2, 8 or 32, on 1 thread or 2, has the same bits."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 1200, (32,), generator=generator).tolist()
    shapes = [(1 if n % 3 else min(n, 1 + n % 60), n) for n in lengths]
    full = make_case(shapes, block_size=16, group=3, head_dim=64, seed=2, dtype=dtype)
    if dtype == torch.bfloat16:
        full.cache = in_lanes(full.cache)  # whose rows some tasks read as they lie
    backend = CpuBackend(isa=isa)
    for option, mates in itertools.product(OPTIONS, (2, 8, 32)):
        options = options_of(option, full.query.shape[1], 300)
        torch.set_num_threads(1)
        singles = [run(backend, alone(full, row), **options) for row in range(mates)]
        end = int(full.batch.query_start[mates])
        batch = AttentionBatch(
            full.batch.tables[:mates],
            full.batch.query_start[: mates + 1],
            full.batch.kv_len[:mates],
            full.batch.slots[:end],
        )
        case = Case(full.query[:end], [], [], full.cache, batch, shapes[:mates])
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            result = run(backend, case, **options)
            for row in range(mates):
                assert equal(rows_of(case, row, result), singles[row]), (mates, threads, row)


@pytest.mark.parametrize(("isa", "dtype"), KERNELS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("chunk", [1, 7, 64, 250])
def test_chunks_give_the_bits_of_a_whole_prompt(
    chunk: int, option: str, isa: str, dtype: torch.dtype
) -> None:
    """A prompt of 700 in chunks of any size, down to one decode step each, has the bits of one call."""
    case = make_case([(700, 700)], block_size=16, group=2, head_dim=64, num_kv_heads=1, seed=8, dtype=dtype)
    case.cache = in_lanes(case.cache)
    options = options_of(option, case.query.shape[1], 300)
    backend = CpuBackend(isa=isa)
    whole = run(backend, case, **options)
    starts = range(0, 700, chunk) if chunk > 1 else (0, 1, 63, 64, 300, 511, 512, 513, 699)
    for first in starts:
        last = min(700, first + chunk)
        part = run(backend, alone(case, 0, first, last), **options)
        assert equal(tuple(x[first:last] for x in whole), part), first


@pytest.mark.skipif("avx512" not in ISAS, reason="this machine has no AVX-512")
def test_vector_width_changes_little() -> None:
    """AVX-512 and AVX2 differ only in the order in which a row's weights are summed."""
    case = make_case(SHAPES, block_size=16, group=3, head_dim=64, seed=5)
    for wide, narrow in zip(run(CpuBackend(isa="avx512"), case), run(CpuBackend(isa="avx2"), case)):
        torch.testing.assert_close(wide, narrow, rtol=0, atol=2e-6)


def shared_case(block_size: int, dtype: torch.dtype, prefix: int, tails: list[tuple[int, int]]) -> Case:
    """Sequences (queries, tokens after the prefix) whose tables begin with the same blocks."""
    shapes = [(queries, prefix + tail) for queries, tail in tails]
    case = make_stored_case(shapes, dtype, block_size=block_size, group=3, head_dim=64, seed=3)
    whole = prefix // block_size
    case.batch.tables[:, :whole] = case.batch.tables[0, :whole]
    return case


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 7, 16, 256])
def test_shared_blocks_read_once_give_equal_bits(block_size: int, dtype: torch.dtype) -> None:
    """With sharing on and off, and each sequence alone, out and lse are the same bits."""
    tails = [(1, 30), (1, 1), (3, 600), (1, 90), (10, 20), (60, 60)]
    if (block_size, dtype) == (16, torch.float32):
        tails += [(1, 40)] * 45  # more than one task may hold
    case = shared_case(block_size, dtype, 1100, tails)
    for isa, option in itertools.product(ISAS, ("plain", "all")):
        options = options_of(option, case.query.shape[1], 1000)
        on, off = CpuBackend(isa=isa), CpuBackend(isa=isa, share=False)
        shared = run(on, case, **options)
        assert equal(shared, run(off, case, **options))
        for row in range(6):
            assert equal(rows_of(case, row, shared), run(on, alone(case, row), **options))


def test_sharing_is_found_from_the_tables() -> None:
    """Two full splits of 512 positions in common make shared tasks; none in common, or off, makes none."""
    backend, apart = CpuBackend(), make_case([(1, 1100)] * 4, block_size=16, group=3, head_dim=64)
    together = shared_case(16, torch.float32, 1040, [(1, 60)] * 4)
    for case, share, expect in ((together, True, True), (apart, True, False), (together, False, False)):
        backend = CpuBackend(share=share)
        run(backend, case)
        assert (backend.last_plan(case.batch).shared_tasks > 0) is expect


def test_two_prefixes_in_one_step_do_not_mix() -> None:
    """Two groups of sequences, each with a prefix of its own that shares its first block's id hash."""
    shapes = [(1, 1100)] * 6
    case = make_case(shapes, block_size=16, group=3, head_dim=64, seed=3)
    case.batch.tables[1:3, :64] = case.batch.tables[0, :64]
    case.batch.tables[4:6, :40] = case.batch.tables[3, :40]
    case.batch.tables[5, 0] = case.batch.tables[0, 0]
    assert equal(run(CpuBackend(), case), run(CpuBackend(share=False), case))


def test_the_same_batch_serves_layers_of_other_windows() -> None:
    """Plans are kept per window and shape: alternating windows gives what fresh batches give."""
    case = make_case(SHAPES, block_size=16, group=3, head_dim=64, seed=5)
    for window in (None, 20, None, 600, 20):
        fresh = make_batch(SHAPES, 16, case.batch.tables[case.batch.tables >= 0].tolist())
        again = Case(case.query, [], [], case.cache, fresh, SHAPES)
        assert equal(run(CpuBackend(), case, window=window), run(CpuBackend(), again, window=window))
