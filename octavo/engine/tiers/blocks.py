"""One device block as one flat buffer, and back.

    layer 0                                layer 1
    [ K | V | K scales | V scales ]        [ K | V | ... ]      ...

    K, V      [block_size, Hkv, D] in the stored dtype, C order, the machine's byte order
    scales    [block_size, Hkv] float32, only where the cache has them

Nothing between the parts. The order is `LayerCache.stretches()` of each layer in turn; a cache in lanes has
other orders inside the parts. layout() names all this in the fingerprint of stored KV.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from octavo.attention.interface import LayerCache
from octavo.engine.tiers.checks import check_buffer, check_slot
from octavo.kv.errors import InvalidArgument
from octavo.kv.store import Bytes

_ROWS = "layers(key,value,key_scale,value_scale)[block_size,kv_heads,head_dim]/1"
_LANES = "layers(key[kv_heads,head_dim,block_size],value,key_scale,value_scale[kv_heads,block_size])/1"


def layout(caches: Sequence[LayerCache]) -> str:
    """The order of a block's bytes, by name; another name whenever another order."""
    return _ROWS if caches[0].storage is None else _LANES


class BlockBytes:
    """The blocks of `caches` (one LayerCache per layer) as flat buffers of `num_bytes` bytes.

    Holds views of the caches' memory, so build it once and keep it as long as they live.
    """

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        """Raises InvalidArgument for no layers, unequal block counts, or tensors that have no flat view."""
        tensors = [tensor for cache in caches for tensor in cache.stretches()]
        if not tensors:
            raise InvalidArgument("a block needs at least one layer's cache")
        counts = {tensor.shape[0] for tensor in tensors}
        if len(counts) != 1:
            raise InvalidArgument(f"the caches of all layers have one number of blocks, got {sorted(counts)}")
        for tensor in tensors:
            if tensor.device.type != "cpu" or not tensor.is_contiguous():
                raise InvalidArgument(
                    f"blocks are read from contiguous tensors in host memory, got one on {tensor.device} "
                    f"with strides {tensor.stride()}"
                )
        (self.num_blocks,) = counts
        # numpy, for it costs a third of the same slices in torch; as bytes, for it knows no bfloat16.
        # Each [num_blocks, bytes of one block].
        self._rows: list[Bytes] = [
            tensor.detach().view(torch.uint8).numpy().reshape(self.num_blocks, -1) for tensor in tensors
        ]
        self.num_bytes: int = sum(rows.shape[1] for rows in self._rows)

    def read(self, block: int, out: Bytes) -> None:
        """Gather `block` from all layers into `out` (num_bytes uint8).

        Raises InvalidArgument. Cost: one copy of the block.
        """
        check_slot(block, self.num_blocks)
        check_buffer(out, self.num_bytes, writeable=True)
        np.concatenate([rows[block] for rows in self._rows], out=out)

    def write(self, block: int, data: Bytes) -> None:
        """Scatter `data` (num_bytes uint8) over `block` of all layers; the reverse of read.

        Raises InvalidArgument. Cost: one copy of the block.
        """
        check_slot(block, self.num_blocks)
        check_buffer(data, self.num_bytes)
        start = 0
        for rows in self._rows:
            end = start + rows.shape[1]
            rows[block] = data[start:end]
            start = end


def block_bytes(caches: Sequence[LayerCache]) -> int:
    """Bytes of one block over all layers. Raises InvalidArgument as BlockBytes does."""
    return BlockBytes(caches).num_bytes


def read_block(caches: Sequence[LayerCache], block: int, out: Bytes) -> None:
    """BlockBytes(caches).read(block, out); for more than a few blocks keep the BlockBytes."""
    BlockBytes(caches).read(block, out)


def write_block(caches: Sequence[LayerCache], block: int, data: Bytes) -> None:
    """BlockBytes(caches).write(block, data); for more than a few blocks keep the BlockBytes."""
    BlockBytes(caches).write(block, data)
