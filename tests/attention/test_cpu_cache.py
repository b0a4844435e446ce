"""Writing, rotating, copying and moving blocks with the compiled backend, against plain torch."""

from __future__ import annotations

import math
import random

import pytest
import torch

pytest.importorskip("octavo.attention._cpu")

from attention_cases import make_case
from cpu_cases import DTYPES, check_against_oracle, in_lanes

from octavo.attention import BatchError, LayerCache, ReferenceBackend
from octavo.attention.cpu import ISAS, CpuBackend

HEADS = 3


def random_cache(dtype: torch.dtype, head_dim: int, blocks: int = 9, block_size: int = 5) -> LayerCache:
    """A cache with something different in every slot."""
    cache = LayerCache.allocate(blocks, block_size, HEADS, head_dim, dtype)
    for stored in cache.tensors():
        if dtype == torch.int8 and stored.dtype == torch.int8:
            stored.random_(-127, 128)
        else:
            stored.normal_()
    return cache


def clone(cache: LayerCache) -> LayerCache:
    """A copy of the cache's tensors."""
    return LayerCache(*(stored.clone() for stored in cache.tensors()))


def same(a: LayerCache, b: LayerCache) -> bool:
    """Whether every stored bit is equal."""
    pairs = zip(a.tensors(), b.tensors(), strict=True)
    return all(
        torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)) for x, y in pairs
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 20, 64, 72])
def test_writes_equal_the_reference(head_dim: int, dtype: torch.dtype, isa: str) -> None:
    """Every stored bit is the reference's: conversions round to nearest even, int8 scales agree."""
    for source in (torch.float32, torch.bfloat16, torch.float16):
        cache = random_cache(dtype, head_dim)
        want = clone(cache)
        qkv = (torch.randn(20, 4 * HEADS, head_dim) * 3).to(source)
        qkv[4] = 0
        key, value = qkv[:, HEADS : 2 * HEADS], qkv[:, 2 * HEADS : 3 * HEADS]
        slots = torch.randperm(45)[:20]
        ReferenceBackend().write_kv(key, value, want, slots)
        CpuBackend(isa=isa).write_kv(key, value, cache, slots)
        assert same(cache, want)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 20, 64])
@pytest.mark.parametrize("block_size", [16, 48])
def test_lanes_hold_what_rows_hold(block_size: int, head_dim: int, dtype: torch.dtype, isa: str) -> None:
    """Writes, copies of part of a block, and blocks that leave and return: every bit, in the other order."""
    backend, rows = CpuBackend(isa=isa), random_cache(dtype, head_dim, block_size=block_size)
    lanes = in_lanes(rows)
    assert same(lanes, rows)
    slots = torch.randperm(9 * block_size)[:50]
    key, value = torch.randn(2, 50, HEADS, head_dim)
    blocks = torch.randperm(9)[:4]
    stored = []
    for cache in (rows, lanes):
        backend.write_kv(key, value, cache, slots)
        backend.copy_blocks(cache, [(0, 1, 7), (1, 2, block_size), (2, 0, 5), (3, 3, 9), (2, 4, 0)])
        stored.append(backend.gather_blocks(cache, blocks))
        backend.scatter_blocks(cache, blocks.flip(0), stored[-1])
    assert same(*stored)
    assert same(lanes, rows)
    backend.scatter_blocks(lanes, blocks, stored[0])  # from the other order
    backend.scatter_blocks(rows, blocks, stored[1])
    assert same(lanes, rows)


def test_the_backend_chooses_lanes_for_whole_vectors_of_slots() -> None:
    """Other block sizes lie as rows; the reference backend has rows alone, and says so."""
    backend, reference = CpuBackend(), ReferenceBackend()
    for block_size in (1, 8, 15, 16, 17, 32, 240, 256):
        cache = backend.allocate(3, block_size, HEADS, 20, torch.int8)
        assert (cache.storage is not None) == (block_size % 16 == 0)
        assert cache.key.shape == cache.value.shape == (3, block_size, HEADS, 20)
        assert cache.key_scale is not None
        assert cache.key_scale.shape == (3, block_size, HEADS)
    rows = torch.randn(1, HEADS, 20)
    lanes = backend.allocate(3, 16, HEADS, 20, torch.float32)
    with pytest.raises(BatchError, match="as rows"):
        reference.write_kv(rows, rows, lanes, torch.tensor([0]))
    with pytest.raises(BatchError, match="as rows"):
        reference.copy_blocks(lanes, [(0, 1, 2)])


def test_a_large_cache_takes_the_bytes_it_should() -> None:
    """Memory in huge pages is exactly as large as asked for, and each slot is its own."""
    for lanes in (False, True):
        cache = LayerCache.allocate(400, 16, HEADS, 64, torch.float32, lanes=lanes)
        assert sum(part.numel() * part.element_size() for part in cache.stretches()) == 400 * 16 * HEADS * 512
        key, value = torch.randn(2, 6400, HEADS, 64)
        CpuBackend().write_kv(key, value, cache, torch.arange(6400))
        assert torch.equal(cache.key.reshape(6400, HEADS, 64), key)
        assert torch.equal(cache.value.reshape(6400, HEADS, 64), value)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_special_values_convert_as_in_torch(dtype: torch.dtype, isa: str) -> None:
    """Infinities, NaN, subnormals, ties and overflow become what torch makes of them."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (400, HEADS, 64), generator=generator).to(torch.int32)
    special = [math.inf, -math.inf, math.nan, 65504, 65519.9, 65520, 1e-8, -6e-8, 5.96e-8, 2**-24, -0.0, 0]
    rows = bits.view(torch.float32).clone()
    rows[0, 0, : len(special)] = torch.tensor(special)
    rows[1] = torch.arange(HEADS * 64).view(HEADS, 64) * 2**-25
    cache = LayerCache.allocate(10, 40, HEADS, 64, dtype)
    CpuBackend(isa=isa).write_kv(rows, rows, cache, torch.arange(400))
    got, want = cache.key.view(400, HEADS, 64), rows.to(dtype)
    number = ~want.isnan()
    assert torch.equal(got.isnan(), ~number)
    assert torch.equal(got.view(torch.int16)[number], want.view(torch.int16)[number])


def test_a_large_write_on_many_threads_equals_the_reference() -> None:
    """Enough tokens for several threads, each slot once."""
    cache = LayerCache.allocate(300, 16, HEADS, 64, torch.float32)
    key, value = torch.randn(2, 4000, HEADS, 64)
    slots = torch.randperm(4800)[:4000]
    CpuBackend().write_kv(key, value, cache, slots)
    assert torch.equal(cache.key.view(-1, HEADS, 64)[slots], key)
    assert torch.equal(cache.value.view(-1, HEADS, 64)[slots], value)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("head_dim", [6, 64, 80])
def test_rotation_has_the_bits_of_torch(head_dim: int, isa: str) -> None:
    """Query and key are rotated in place as by separate products, and the rotated key is stored."""
    qkv = torch.randn(20, 4 * HEADS, head_dim)
    query, key, value = qkv.clone().tensor_split((2 * HEADS, 3 * HEADS), dim=1)
    angles = torch.randn(20, 1, head_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    cache, slots = random_cache(torch.float32, head_dim), torch.randperm(45)[:20]
    CpuBackend(isa=isa).rotate_and_write_kv(query, key, value, cos, sin, cache, slots)
    first, second = qkv[:, : 3 * HEADS].chunk(2, dim=-1)
    want = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    assert torch.equal(torch.cat((query, key), dim=1), want)
    assert torch.equal(cache.key.view(-1, HEADS, head_dim)[slots], key)
    assert torch.equal(cache.value.view(-1, HEADS, head_dim)[slots], qkv[:, 3 * HEADS :])


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotating_and_writing_is_both_in_turn(dtype: torch.dtype, source: torch.dtype) -> None:
    """In every pair of formats, what is left in query, key and cache is what two plain steps leave."""
    qkv = torch.randn(300, 5 * HEADS, 24).to(source)
    cos, sin = torch.randn(2, 300, 1, 12).to(source)
    slots = torch.randperm(400)[:300]
    left = []
    for backend in (CpuBackend(), ReferenceBackend()):
        torch.manual_seed(1)
        cache = random_cache(dtype, 24, blocks=80)
        query, key, value = qkv.clone().tensor_split((3 * HEADS, 4 * HEADS), dim=1)
        backend.rotate_and_write_kv(query, key, value, cos, sin, cache, slots)
        left.append((query, key, value, cache))
    one, two = left
    assert all(torch.equal(a, b) for a, b in zip(one[:3], two[:3], strict=True))
    assert not torch.equal(one[0], qkv[:, : 3 * HEADS])
    assert same(one[3], two[3])


@pytest.mark.parametrize("wrong", ["cos in bfloat16", "short sin", "odd", "key in float16", "slot"])
def test_a_bad_rotation_changes_nothing(wrong: str) -> None:
    """It raises before a row is rotated or a slot written."""
    dim = 15 if wrong == "odd" else 16
    query, key, value = torch.randn(4, 6, dim), torch.randn(4, HEADS, dim), torch.randn(4, HEADS, dim)
    cos, sin = torch.randn(2, 4, 1, dim // 2)
    slots = torch.tensor([0, 1, 2, 45 if wrong == "slot" else 3])
    if wrong == "cos in bfloat16":
        cos = cos.bfloat16()
    elif wrong == "short sin":
        sin = sin[:3]
    elif wrong == "key in float16":
        key = key.half()
    before, cache = (query.clone(), key.clone()), random_cache(torch.float32, dim)
    want = clone(cache)
    with pytest.raises(BatchError):
        CpuBackend().rotate_and_write_kv(query, key, value, cos, sin, cache, slots)
    assert torch.equal(query, before[0])
    assert torch.equal(key, before[1])
    assert same(cache, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_copies_apply_in_order(dtype: torch.dtype) -> None:
    """Lists of copies, chains and repeats among them, leave what the reference leaves; scales too."""
    draw = random.Random(17)
    for _ in range(60):
        cache = random_cache(dtype, 20)
        want = clone(cache)
        copies = [(draw.randrange(9), draw.randrange(9), draw.randrange(6)) for _ in range(draw.randrange(7))]
        for copy in copies:
            ReferenceBackend().copy_blocks(want, [copy])
        CpuBackend().copy_blocks(cache, copies)
        assert same(cache, want)


@pytest.mark.parametrize("bad", [(9, 0, 1), (0, 9, 1), (-1, 0, 1), (0, 1, 6), (0, 1, -1)])
def test_a_bad_copy_changes_nothing(bad: tuple[int, int, int]) -> None:
    """A block or length outside the cache raises, names the copy, and leaves the cache unchanged."""
    cache = random_cache(torch.float32, 16)
    want = clone(cache)
    with pytest.raises(BatchError, match="copy 1") as caught:
        CpuBackend().copy_blocks(cache, [(1, 2, 5), bad])
    assert caught.value.position == 1
    assert same(cache, want)


@pytest.mark.parametrize("backend", [CpuBackend(), ReferenceBackend()], ids=["cpu", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_leave_and_return_unchanged(dtype: torch.dtype, backend: CpuBackend) -> None:
    """Gathered blocks are dense copies in the order asked for; scattered back, they are where they say."""
    cache = random_cache(dtype, 20, blocks=40)
    blocks = torch.randperm(40)[:25]
    stored = backend.gather_blocks(cache, blocks)
    for dense, whole in zip(stored.tensors(), cache.tensors(), strict=True):
        assert torch.equal(dense, whole[blocks])
    into, to = random_cache(dtype, 20, blocks=40), torch.randperm(40)[:25]
    want = clone(into)
    for part, dense in zip(want.tensors(), stored.tensors(), strict=True):
        part[to] = dense
    backend.scatter_blocks(into, to, stored)
    assert same(into, want)


def test_a_block_outside_the_cache_is_not_moved() -> None:
    """The error names the block and its place; nothing is copied."""
    cache = random_cache(torch.float32, 16)
    for bad in (-1, 9):
        with pytest.raises(BatchError, match=f"block {bad} is outside") as caught:
            CpuBackend().gather_blocks(cache, torch.tensor([1, bad]))
        assert caught.value.position == 1


def test_another_layout_needs_no_copy() -> None:
    """A cache whose memory is [blocks, heads, slots, dim] is read, written and copied through its strides."""
    case = make_case([(1, 40), (7, 26), (1, 600)], block_size=16, group=3, head_dim=64, seed=7)
    other = LayerCache(*(s.transpose(1, 2).contiguous().transpose(1, 2) for s in case.cache.tensors()))
    want = clone(case.cache)
    case.cache = other
    check_against_oracle(case, {})
    backend, slots = CpuBackend(), torch.tensor([5, 40, 99])
    key, value = torch.randn(2, 3, 2, 64)
    for cache in (other, want):
        backend.write_kv(key, value, cache, slots)
        backend.copy_blocks(cache, [(0, 1, 16), (2, 3, 9)])
    for got, expected in zip(other.tensors(), want.tensors()):
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())
