"""The reference backend and the dense oracle, against attention by loops in float64."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from attention_cases import Case, Shape, make_case, naive_attention
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.attention import BatchError, LayerCache, ReferenceBackend, dense_reference
from octavo.attention.plan import FREE_WASTE, MAX_GROUP_TOKENS, WASTE_SHARE, group_by_length

BLOCK_SIZES = (1, 2, 7, 16, 64, 256)
GROUPS = (1, 2, 3, 5, 6, 7, 8, 12, 16)
HEAD_DIMS = (16, 64, 80, 256)
OPTIONS = ("plain", "window", "softcap", "sinks", "alibi", "all")
TOLERANCE = 1e-5


def shapes_of(kind: str, block_size: int) -> list[Shape]:
    """(queries, kv_len) rows for a kind of batch; offsets are those of the chunk's first query."""
    bs = min(block_size, 64)  # keeps the loops short; a block of 256 is then partly used
    return {
        "prefill": [(9, 9), (2 * bs % 40 + 1, 2 * bs % 40 + 1)],
        "chunk at 0": [(6, 6)],
        "chunk at bs": [(5, block_size + 5)],
        "chunk at bs+3": [(5, block_size + 3 + 5)],
        "decode": [(1, 1), (1, block_size), (1, block_size + 1), (1, 2 * bs + 3)],
        "mixed": [(1, bs + 2), (4, 4), (1, 1), (3, block_size + 3), (1, 2 * bs)],
    }[kind]


KINDS = ("prefill", "chunk at 0", "chunk at bs", "chunk at bs+3", "decode", "mixed")


def options_of(name: str, num_heads: int, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments that turn one option on, or all of them."""
    generator = torch.Generator().manual_seed(seed + 100)
    every = {
        "window": 6,
        "softcap": 1.5,
        "sinks": torch.randn(num_heads, generator=generator),
        "alibi": torch.rand(num_heads, generator=generator),
    }
    if name == "plain":
        return {}
    return every if name == "all" else {name: every[name]}


def check_against_naive(case: Case, options: dict[str, Any], backend: ReferenceBackend | None = None) -> None:
    """Fail unless out and lse agree with the loops within TOLERANCE, with lse asked for and not."""
    scale = case.query.shape[-1] ** -0.5
    want, want_lse = naive_attention(case, scale=scale, **options)
    backend = backend or ReferenceBackend()
    alone = backend.paged_attention(case.query, case.cache, case.batch, scale=scale, **options)
    out, lse = backend.paged_attention(
        case.query, case.cache, case.batch, scale=scale, return_lse=True, **options
    )
    assert isinstance(alone, torch.Tensor)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(alone.double(), want, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_block_and_group_size_agrees_with_loops(block_size: int, group: int) -> None:
    """Each kind of batch, with head size and option drawn at random, is within 1e-5 of float64 loops."""
    draw = random.Random(block_size * 100 + group)
    for kind in KINDS:
        head_dim, option = draw.choice(HEAD_DIMS), draw.choice(OPTIONS)
        case = make_case(
            shapes_of(kind, block_size),
            block_size=block_size,
            group=group,
            head_dim=head_dim,
            num_kv_heads=draw.choice((1, 3)) if group <= 8 else 1,
            seed=draw.randrange(1000),
        )
        check_against_naive(case, options_of(option, case.query.shape[1]))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_option_and_head_size_agrees_with_loops(head_dim: int, option: str) -> None:
    """Each option, in a batch of prefill, chunk and decode rows, is within 1e-5 of float64 loops."""
    shapes = [(1, 40), (20, 20), (7, 26), (1, 3), (1, 90), (2, 33)]
    case = make_case(shapes, block_size=16, group=3, head_dim=head_dim, seed=7)
    check_against_naive(case, options_of(option, case.query.shape[1]))


@pytest.mark.parametrize("window", [None, 1, 100, 5000])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_tiles_of_a_long_chunk_agree_with_loops(window: int | None, softcap: float | None) -> None:
    """A chunk of several tiles after a longer context sees what each query may see and nothing else."""
    shapes = [(300, 1000), (130, 130), (1, 700), (1, 20)]
    case = make_case(shapes, block_size=16, group=2, head_dim=16, num_kv_heads=1, seed=3)
    check_against_naive(case, {"window": window, "softcap": softcap})


def test_a_long_context_makes_small_tiles_that_agree_with_the_oracle() -> None:
    """With more keys than a full tile's scores allow, the result is still the dense oracle's."""
    case = make_case([(200, 9000)], block_size=256, group=2, head_dim=16, num_kv_heads=1, seed=4)
    want, _ = dense_reference(case.query, case.cache, case.batch, scale=0.25, compute_dtype=torch.float64)
    out = ReferenceBackend().paged_attention(case.query, case.cache, case.batch, scale=0.25)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("option", OPTIONS)
def test_the_oracle_agrees_with_loops_to_float64(option: str) -> None:
    """dense_reference in float64 is within 1e-12 of the loops, so it can stand in for them elsewhere."""
    case = make_case([(1, 18), (9, 9), (5, 24)], block_size=7, group=5, head_dim=64, seed=11)
    options = options_of(option, case.query.shape[1])
    want, want_lse = naive_attention(case, scale=0.2, **options)
    out, lse = dense_reference(
        case.query, case.cache, case.batch, scale=0.2, compute_dtype=torch.float64, **options
    )
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-12)


@pytest.mark.parametrize("option", OPTIONS)
def test_the_backend_computes_in_float64_on_request(option: str) -> None:
    """With compute_dtype float64 and a float64 query the backend is within 1e-12 of the loops."""
    case = make_case([(1, 18), (1, 40), (9, 9), (5, 24)], block_size=16, group=3, head_dim=64, seed=12)
    case.query = case.query.double()
    options = options_of(option, case.query.shape[1])
    want, _ = naive_attention(case, scale=0.2, **options)
    out = ReferenceBackend(compute_dtype=torch.float64).paged_attention(
        case.query, case.cache, case.batch, scale=0.2, **options
    )
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_shuffled_physical_ids_give_equal_bits(block_size: int, option: str) -> None:
    """Where in the pool a sequence's blocks lie changes no bit of out or lse."""
    shapes = [(1, 30), (1, 33), (12, 12), (5, 40), (1, 2)]
    results = []
    for order in ("identity", "reversed", "shuffled"):
        case = make_case(shapes, block_size=block_size, group=3, head_dim=64, seed=5, order=order)
        options = options_of(option, case.query.shape[1])
        plain = ReferenceBackend().paged_attention(case.query, case.cache, case.batch, scale=0.125, **options)
        out, lse = ReferenceBackend().paged_attention(
            case.query, case.cache, case.batch, scale=0.125, return_lse=True, **options
        )
        results.append((plain, out, lse))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("block_size", [1, 7, 16, 256])
def test_unused_slots_change_no_bit(block_size: int, option: str) -> None:
    """NaN or 1e4 in every slot that no sequence owns gives the bits that zeros give, and no NaN."""
    shapes = [(1, 30), (1, 17), (12, 12), (5, 40), (1, 2)]
    results = []
    for fill in (0.0, math.nan, 1e4):
        case = make_case(shapes, block_size=block_size, group=3, head_dim=64, seed=6, fill=fill)
        options = options_of(option, case.query.shape[1])
        results.append(
            ReferenceBackend().paged_attention(
                case.query, case.cache, case.batch, scale=0.125, return_lse=True, **options
            )
        )
    for out, lse in results:
        assert torch.isfinite(out).all()
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_storage_is_computed_in_float32(dtype: torch.dtype) -> None:
    """With K and V stored in 16 bits, a float32 query gives the loops' result on the rounded values."""
    shapes = [(1, 30), (1, 17), (12, 12), (5, 40)]
    case = make_case(shapes, block_size=16, group=3, head_dim=64, seed=8, dtype=dtype)
    for option in OPTIONS:
        check_against_naive(case, options_of(option, case.query.shape[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_output_has_the_dtype_of_the_query(dtype: torch.dtype) -> None:
    """A 16-bit query gives the float32 result rounded once to 16 bits, in decode and chunk rows."""
    case = make_case([(1, 30), (12, 12)], block_size=16, group=3, head_dim=64, seed=9, dtype=dtype)
    query = case.query.to(dtype)
    out = ReferenceBackend().paged_attention(query, case.cache, case.batch, scale=0.125)
    exact = ReferenceBackend().paged_attention(query.float(), case.cache, case.batch, scale=0.125)
    assert out.dtype == dtype
    assert torch.equal(out, exact.to(dtype))


def test_one_backend_serves_many_batches_and_layers() -> None:
    """Plans and buffers kept from one batch, layer, window or dtype never leak into the next call."""
    backend = ReferenceBackend()
    for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.float32)):
        shapes = [(1, 20 + 30 * seed), (1, 90 - 30 * seed), (8, 30), (1 + seed, 5)]
        for bs in (16, 4):
            case = make_case(shapes, block_size=bs, group=2, head_dim=16, seed=seed, dtype=dtype)
            for option in ("plain", "window", "all", "plain"):
                check_against_naive(case, options_of(option, case.query.shape[1]), backend)
            next_layer = make_case(shapes, block_size=bs, group=2, head_dim=16, seed=seed, dtype=dtype)
            next_layer.batch = case.batch  # the same object and places, other contents
            for keys, values in zip(next_layer.keys, next_layer.values):
                keys.mul_(-1)
                values.add_(1)
            next_layer.cache.key.mul_(-1)
            next_layer.cache.value.add_(1)
            check_against_naive(next_layer, {}, backend)


def test_inference_mode_and_normal_mode_share_a_backend() -> None:
    """A backend first used under inference_mode still works outside it, and the reverse."""
    backend = ReferenceBackend()
    case = make_case([(1, 9), (4, 12)], block_size=4, group=2, head_dim=16, seed=1, dtype=torch.bfloat16)
    with torch.inference_mode():
        inside = backend.paged_attention(case.query, case.cache, case.batch, scale=0.25)
    outside = backend.paged_attention(case.query, case.cache, case.batch, scale=0.25)
    assert torch.equal(inside, outside)


def test_rows_without_queries_are_skipped() -> None:
    """A sequence with no new token this step takes no output row and disturbs no other."""
    case = make_case([(1, 9), (0, 6), (4, 12), (0, 0)], block_size=4, group=2, head_dim=16, seed=1)
    check_against_naive(case, {})


def test_written_keys_and_values_are_attended_to() -> None:
    """write_kv puts each row at its slot, in the stored dtype, and touches no other slot."""
    shapes = [(1, 9), (6, 6), (3, 20)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        case = make_case(shapes, block_size=4, group=2, head_dim=16, seed=2, dtype=dtype, fill=7.0)
        want = LayerCache(case.cache.key.clone(), case.cache.value.clone())
        rows = [slice(kv_len - queries, kv_len) for queries, kv_len in shapes]
        key = torch.cat([keys[part] for keys, part in zip(case.keys, rows)]).float()
        value = torch.cat([values[part] for values, part in zip(case.values, rows)]).float()
        flat = (case.cache.key.view(-1, 2, 16), case.cache.value.view(-1, 2, 16))
        for stored in flat:
            stored[case.batch.slots] = math.nan
        ReferenceBackend().write_kv(key, value, case.cache, case.batch.slots)
        assert torch.equal(case.cache.key, want.key)
        assert torch.equal(case.cache.value, want.value)


def test_write_outside_the_cache_is_an_error() -> None:
    """A slot past the last block raises IndexError instead of writing elsewhere."""
    cache = LayerCache.allocate(2, 4, 1, 16, torch.float32)
    row = torch.zeros(1, 1, 16)
    with pytest.raises(IndexError):
        ReferenceBackend().write_kv(row, row, cache, torch.tensor([8]))


def test_impossible_heads_and_windows_are_refused() -> None:
    """Heads that do not divide, and a window that hides every key, are typed errors with the numbers."""
    case = make_case([(1, 9)], block_size=4, group=2, head_dim=16)
    backend = ReferenceBackend()
    with pytest.raises(BatchError, match=r"3 query heads .* 2 KV heads"):
        backend.paged_attention(torch.zeros(1, 3, 16), case.cache, case.batch, scale=1.0)
    with pytest.raises(BatchError, match="window 0"):
        backend.paged_attention(case.query, case.cache, case.batch, scale=1.0, window=0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 20_000), max_size=80))
def test_groups_hold_every_row_once_with_bounded_padding(lengths: list[int]) -> None:
    """Groups partition the rows, and none pads or gathers more than the documented bound."""
    groups = list(group_by_length(lengths))
    assert sorted(index for members in groups for index in members) == list(range(len(lengths)))
    for members in groups:
        real = sum(lengths[index] for index in members)
        padded = len(members) * max(lengths[index] for index in members)
        assert padded - real <= max(FREE_WASTE, padded // WASTE_SHARE)
        assert padded <= MAX_GROUP_TOKENS or len(members) == 1


def test_rows_of_like_length_share_a_group() -> None:
    """32 rows of near 200 keys make one group, so that a step makes few calls."""
    assert len(list(group_by_length([190 + row for row in range(32)]))) == 1
