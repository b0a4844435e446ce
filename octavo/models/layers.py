"""All layers of a step in one call into the kernels (csrc/layers.h), without Python between them.

    qkv --(norms of heads), rotate, write--> cache --attend--> attended --chain--> hidden, next qkv

Owns what the call is given. It does what Decoder.forward does in a loop, and gives the same bits. Needs the
compiled extension, and its backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from octavo.attention import AttentionBackend, AttentionBatch, BatchError, LayerCache, _cpu
from octavo.attention.cpu import CpuBackend
from octavo.models.config import ModelConfig
from octavo.models.projections import HeadNorms
from octavo.ops.compiled import kernels
from octavo.ops.linear import Chain, LinearEngine


class AllLayers:
    """A model's layers on packed weights."""

    def __init__(
        self,
        config: ModelConfig,
        head_norms: Sequence[HeadNorms | None],
        engine: LinearEngine,
        chains: Sequence[Chain],
        eps: float,
    ) -> None:
        """chains: by layer, from attention to the next layer's q, k and v."""
        self._windows = config.layer_windows
        self._heads, self._kv_heads, self._dim = config.num_heads, config.num_kv_heads, config.head_dim
        # The kernels hold addresses of these.
        self._norms = [
            (norms.query.contiguous(), norms.key.contiguous()) for norms in head_norms if norms is not None
        ]
        self._layers = _cpu.Layers(
            engine.native,
            cast("_cpu.Ops", kernels()),  # there, as the extension is
            [chain.native for chain in chains],
            [(query.data_ptr(), key.data_ptr()) for query, key in self._norms],
            (self._heads, self._kv_heads, self._dim, config.hidden_size),
            self._dim**-0.5,
            eps,
        )

    def fits(self, backend: AttentionBackend) -> bool:
        """Whether the backend is the compiled one itself: one that changes a method of it is to be called."""
        return type(backend) is CpuBackend

    def run(
        self,
        hidden: Tensor,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        caches: Sequence[LayerCache],
        batch: AttentionBatch,
        backend: AttentionBackend,
    ) -> None:
        """Take hidden `[T, E]` through all layers, in place; qkv `[T, (Hq + 2 Hkv) D]` is the first one's.

        cos and sin `[N, D / 2]`: rows by position, for positions `[T]` int64 in 0..N-1. All but these are
        float32, and all are dense. backend: one that fits(). Raises BatchError as its methods do, before
        anything is written.
        """
        assert isinstance(backend, CpuBackend)
        tokens = len(hidden)
        if positions.shape != (tokens,) or positions.dtype != torch.int64 or not positions.is_contiguous():
            raise BatchError(
                f"positions is {positions.dtype} of shape {tuple(positions.shape)}; it must be int64 of "
                f"shape ({tokens},), dense"
            )
        views, plans = backend.layers(tokens, self._heads, caches, self._windows, batch)
        attended = torch.empty(tokens, self._heads * self._dim)
        outside = self._layers.run(
            backend.engine,
            views,
            plans,
            (hidden.data_ptr(), qkv.data_ptr(), attended.data_ptr()),
            (cos.data_ptr(), sin.data_ptr(), positions.data_ptr(), batch.slots.data_ptr()),
            tokens,
            torch.get_num_threads(),
        )
        if outside >= 0:
            slots = caches[0].num_blocks * caches[0].block_size
            raise BatchError(
                f"token {outside}: slot {int(batch.slots[outside])} is outside the pool's 0..{slots - 1}",
                position=outside,
            )
