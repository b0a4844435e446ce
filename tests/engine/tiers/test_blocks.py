"""Device blocks as flat buffers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.attention.interface import LayerCache
from octavo.engine.tiers import BlockBytes, block_bytes, layout, read_block, write_block
from octavo.kv.errors import InvalidArgument

NUM_BLOCKS, NUM_LAYERS = 6, 3


def caches(
    dtype: torch.dtype, block_size: int = 4, heads: int = 3, dim: int = 5, *, lanes: bool = False
) -> list[LayerCache]:
    """Caches in which every bit is random, NaNs and all."""
    made = [
        LayerCache.allocate(NUM_BLOCKS, block_size, heads, dim, dtype, lanes=lanes) for _ in range(NUM_LAYERS)
    ]
    for cache in made:
        for tensor in cache.stretches():
            flat = tensor.view(torch.uint8)
            flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8))
    return made


def snapshot(layers: list[LayerCache]) -> list[torch.Tensor]:
    return [tensor.contiguous().view(torch.uint8).clone() for cache in layers for tensor in cache.tensors()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize(
    ("block_size", "heads", "dim", "lanes"),
    [(4, 3, 5, False), (1, 1, 3, False), (16, 2, 8, False), (16, 2, 8, True), (32, 1, 5, True)],
)
def test_a_block_goes_out_and_comes_back_in_another_place(
    dtype: torch.dtype, block_size: int, heads: int, dim: int, lanes: bool
) -> None:
    """Bit for bit, in all layers, scales included, and no other block changes; as rows and in lanes."""
    layers = caches(dtype, block_size, heads, dim, lanes=lanes)
    before = snapshot(layers)
    buffer = np.zeros(block_bytes(layers), np.uint8)
    read_block(layers, 2, buffer)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(layers)))
    write_block(layers, 5, buffer)
    for old, new in zip(before, snapshot(layers)):
        assert torch.equal(new[5], old[2])
        assert torch.equal(new[:5], old[:5])


def test_the_order_of_the_bytes_is_as_documented() -> None:
    layers = caches(torch.int8)
    buffer = np.zeros(block_bytes(layers), np.uint8)
    read_block(layers, 1, buffer)
    parts = [tensor[1] for cache in layers for tensor in cache.tensors()]
    assert len(parts) == 4 * NUM_LAYERS
    assert buffer.tobytes() == b"".join(part.numpy().tobytes() for part in parts)


def test_orders_have_names_of_their_own() -> None:
    """Else a file written with one would be served with the other."""
    rows, lanes = caches(torch.float32, 16), caches(torch.float32, 16, lanes=True)
    assert layout(rows) != layout(lanes)
    assert block_bytes(rows) == block_bytes(lanes)


def test_the_size_is_that_of_all_layers() -> None:
    assert block_bytes(caches(torch.bfloat16)) == NUM_LAYERS * 2 * 4 * 3 * 5 * 2
    assert block_bytes(caches(torch.int8)) == NUM_LAYERS * 2 * 4 * 3 * (5 + 4)


def test_what_cannot_be_done_is_refused() -> None:
    blocks = BlockBytes(caches(torch.float32))
    buffer = np.zeros(blocks.num_bytes, np.uint8)
    for block in (-1, NUM_BLOCKS):
        with pytest.raises(InvalidArgument):
            blocks.read(block, buffer)
        with pytest.raises(InvalidArgument):
            blocks.write(block, buffer)
    for wrong in (buffer[:-1], buffer.view(np.int8), np.zeros((2, 2), np.uint8)):
        with pytest.raises(InvalidArgument):
            blocks.read(0, wrong)
        with pytest.raises(InvalidArgument):
            blocks.write(0, wrong)
    with pytest.raises(InvalidArgument, match="at least one"):
        BlockBytes([])
    turned = torch.zeros(NUM_BLOCKS, 3, 4, 5).transpose(1, 2)
    with pytest.raises(InvalidArgument, match="contiguous"):
        BlockBytes([LayerCache(turned, turned)])
    with pytest.raises(InvalidArgument, match="one number of blocks"):
        BlockBytes([LayerCache(torch.zeros(2, 1, 1, 1), torch.zeros(3, 1, 1, 1))])
