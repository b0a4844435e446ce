"""One decoder for the Llama family, on flat ragged tokens and a paged cache.

    token_ids [T] -> embedding [T, E]
      per layer:  norm -> qkv [T, (Hq + 2 Hkv) D] -> (q/k norm) -> rotary and write_kv
                  -> paged_attention [T, Hq, D] -> output projection -> + residual
                  norm -> gate|up [T, 2 I] -> silu(gate) * up -> down -> + residual
                  (from one attention to the next is one call, or few; or all layers are one: layers.py)
    hidden [T, E]   --rows to sample-->   final norm -> head -> logits [S, V] float32

Owns the order of things; what has weights is in projections.py. The final norm belongs to `logits`, so that
rows which are not sampled skip it. Which tokens run, and where their K and V live, is in the AttentionBatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from octavo.attention.interface import AttentionBackend, AttentionBatch, LayerCache
from octavo.models.config import ModelConfig
from octavo.models.errors import ModelError
from octavo.models.projections import HeadNorms, Projections
from octavo.models.rope import RotaryTable
from octavo.ops import rms_norm


class Decoder:
    """The forward pass. Holds no sequence state, so calls may come in any order."""

    def __init__(
        self,
        config: ModelConfig,
        projections: Projections,
        head_norms: Sequence[HeadNorms | None],
        weights_note: str = "",
    ) -> None:
        """Take the weights, a HeadNorms or None per layer, and a word on the weights' formats."""
        self.config = config
        self.weights_note = weights_note
        self._projections = projections
        self._head_norms = tuple(head_norms)
        self._rotary = RotaryTable(config)
        self._scale = config.head_dim**-0.5
        self._layers = projections.all_layers(config, self._head_norms)

    @property
    def dtype(self) -> torch.dtype:
        """Of the hidden states; weights and a cache may have another."""
        return self._projections.dtype

    @property
    def weights_bytes(self) -> int:
        """Memory of all weights, a shared embedding counted once."""
        norms = (norm for norms in self._head_norms if norms is not None for norm in (norms.query, norms.key))
        return self._projections.weights_bytes + sum(norm.numel() * norm.element_size() for norm in norms)

    @property
    def kernels(self) -> str:
        """What computes the products of matrices."""
        return self._projections.kernels

    @property
    def quantised(self) -> bool:
        """Whether products round hidden states to eight bits, as with weights of four and eight bits."""
        return self._projections.quantised

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[LayerCache],
        batch: AttentionBatch,
        backend: AttentionBackend,
    ) -> Tensor:
        """Run T new tokens through every layer; return hidden `[T, E]` before the final norm.

        token_ids and positions `[T]` int64, ids below vocab_size. Writes the tokens' K and V into
        `caches`, one per layer, at batch.slots. Raises ModelError when the number of caches is not
        the number of layers, or for a position past ModelConfig.position_limit. Like all that is made
        under torch.inference_mode, the result can be changed in place only under it.
        """
        if len(caches) != len(self._head_norms):
            raise ModelError(f"{len(caches)} caches were given for {len(self._head_norms)} layers")
        projections = self._projections
        hidden = projections.embed(token_ids)  # [T, E], ours to update in place
        qkv = projections.first(hidden)
        if self._layers is not None and self._layers.fits(backend):
            cos, sin = self._rotary.reaching(positions)
            self._layers.run(hidden, qkv, cos, sin, positions, caches, batch, backend)
            return hidden
        cos, sin = self._rotary(positions, self.dtype)
        query, key, value = self._heads(qkv)
        for layer, (cache, window) in enumerate(zip(caches, self.config.layer_windows, strict=True)):
            norms = self._head_norms[layer]
            if norms is not None:
                rms_norm(query, norms.query, self.config.rms_norm_eps, out=query)
                rms_norm(key, norms.key, self.config.rms_norm_eps, out=key)
            backend.rotate_and_write_kv(query, key, value, cos, sin, cache, batch.slots)
            # One tensor, since return_lse is not asked for.
            out = cast(Tensor, backend.paged_attention(query, cache, batch, scale=self._scale, window=window))
            # [T, Hq, D] -> [T, Hq D]
            following = projections.proceed(layer, out.reshape(len(out), -1), hidden, qkv)
            if following is not qkv:
                qkv = following
                query, key, value = self._heads(qkv)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the final norm and the head to rows `[S, E]` of hidden: float32 `[S, V]`."""
        return self._projections.logits(hidden)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of query `[T, Hq, D]`, key and value `[T, Hkv, D]`."""
        config = self.config
        q_heads, kv_heads = config.num_heads, config.num_kv_heads
        heads = qkv.view(-1, q_heads + 2 * kv_heads, config.head_dim)
        query, key, value = heads.tensor_split((q_heads, q_heads + kv_heads), dim=1)
        return query, key, value
