"""Copies between blocks, against slice assignment one after the other."""

from __future__ import annotations

import random

import pytest
import torch

from octavo.attention import BatchError, LayerCache, ReferenceBackend

NUM_BLOCKS, BLOCK_SIZE = 8, 5


def make_cache(dtype: torch.dtype = torch.float32) -> LayerCache:
    """A cache in which no two slots are equal, nor K equal to V."""
    count = NUM_BLOCKS * BLOCK_SIZE * 2 * 3
    key = torch.arange(count).to(dtype).view(NUM_BLOCKS, BLOCK_SIZE, 2, 3)
    return LayerCache(key, -key - 1)


def expected(cache: LayerCache, copies: list[tuple[int, int, int]]) -> tuple[list, list]:
    """K and V after the copies, in order, on nested lists."""
    key, value = cache.key.tolist(), cache.value.tolist()
    for src, dst, count in copies:
        for slot in range(count):
            key[dst][slot], value[dst][slot] = key[src][slot], value[src][slot]
    return key, value


def check(copies: list[tuple[int, int, int]], dtype: torch.dtype = torch.float32) -> None:
    """Fail unless the backend leaves K and V as in-order copies would."""
    cache = make_cache(dtype)
    key, value = expected(cache, copies)
    ReferenceBackend().copy_blocks(cache, copies)
    assert cache.key.tolist() == key
    assert cache.value.tolist() == value


@pytest.mark.parametrize(
    "copies",
    [
        [],
        [(1, 2, 3)],
        [(1, 2, 5), (3, 4, 2), (1, 5, 1)],
        [(1, 2, 0), (3, 4, 5)],
        [(0, 1, 5), (1, 2, 5), (2, 3, 5)],
        [(2, 3, 5), (1, 2, 4), (0, 1, 3)],
        [(0, 2, 5), (1, 2, 3)],
        [(0, 1, 5), (1, 0, 5)],
        [(4, 4, 5)],
    ],
    ids=["none", "one", "apart", "empty", "chain", "backward chain", "same dst", "swap", "itself"],
)
def test_copies_apply_in_order(copies: list[tuple[int, int, int]]) -> None:
    """Chains, a destination written twice and a block copied to itself give the in-order result."""
    check(copies)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_copies_apply_in_order(dtype: torch.dtype) -> None:
    """300 random lists of copies give the in-order result in every stored dtype."""
    draw = random.Random(17)
    for _ in range(100):
        copies = [
            (draw.randrange(NUM_BLOCKS), draw.randrange(NUM_BLOCKS), draw.randrange(BLOCK_SIZE + 1))
            for _ in range(draw.randrange(6))
        ]
        check(copies, dtype)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ((8, 0, 1), "block 8 to 0"),
        ((0, 8, 1), "block 0 to 8"),
        ((-1, 0, 1), "block -1 to 0"),
        ((0, -1, 1), "block 0 to -1"),
        ((0, 1, 6), "6 slots"),
        ((0, 1, -1), "-1 slots"),
    ],
)
def test_bad_copies_are_refused_before_anything_is_copied(bad: tuple[int, int, int], words: str) -> None:
    """A block or length outside the cache raises, names the copy, and leaves the cache unchanged."""
    cache, untouched = make_cache(), make_cache()
    with pytest.raises(BatchError, match=words) as caught:
        ReferenceBackend().copy_blocks(cache, [(1, 2, 5), bad])
    assert caught.value.position == 1
    assert torch.equal(cache.key, untouched.key)
    assert torch.equal(cache.value, untouched.value)
