"""One decoder for the Llama family, on flat ragged tokens and a paged cache.

    token_ids [T] -> embedding [T, E]
      per layer:  norm -> qkv [T, (Hq + 2 Hkv) D] -> (q/k norm) -> rotary and write_kv
                  -> paged_attention [T, Hq, D] -> output projection -> + residual
                  norm -> gate|up [T, 2 I] -> silu(gate) * up -> down -> + residual
                  (each + residual and the norm after it are one pass)
    hidden [T, E]   --rows to sample-->   final norm -> head -> logits [S, V] float32

Owns the arithmetic. The final norm belongs to `logits`, so that rows which are not sampled skip it.
Which tokens run, and where their K and V live, is in the AttentionBatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.attention.interface import AttentionBackend, AttentionBatch, LayerCache
from octavo.models.config import ModelConfig
from octavo.models.errors import ModelError
from octavo.models.rope import RotaryTable
from octavo.ops import add_rms_norm, rms_norm, swiglu


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's weights, projections as `[out, in]`; a bias or norm the model lacks is None."""

    attention_norm: Tensor  # [E]
    qkv: Tensor  # [(Hq + 2 Hkv) D, E]: q rows, then k, then v
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    output: Tensor  # [E, Hq D]
    output_bias: Tensor | None
    mlp_norm: Tensor  # [E]
    gate_up: Tensor  # [2 I, E]: gate rows, then up
    gate_up_bias: Tensor | None
    down: Tensor  # [E, I]
    down_bias: Tensor | None

    def tensors(self) -> list[Tensor]:
        """Every tensor that is there."""
        fields = (getattr(self, name) for name in self.__dataclass_fields__)
        return [tensor for tensor in fields if tensor is not None]


class Decoder:
    """Weights and forward pass. Holds no sequence state, so calls may come in any order."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor,
        layers: Sequence[LayerWeights],
        final_norm: Tensor,
        head: Tensor,
    ) -> None:
        """Take embedding `[V, E]`, final_norm `[E]` and head `[V, E]`, which may be the embedding."""
        self.config = config
        self._embedding = embedding
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._head = head
        self._rotary = RotaryTable(config)
        self._scale = config.head_dim**-0.5

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and of the hidden states; a cache may have another."""
        return self._embedding.dtype

    @property
    def weights_bytes(self) -> int:
        """Bytes that all weights take, a shared embedding counted once."""
        tensors = [self._embedding, self._final_norm]
        if self._head is not self._embedding:
            tensors.append(self._head)
        for layer in self._layers:
            tensors.extend(layer.tensors())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

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
        if len(caches) != len(self._layers):
            raise ModelError(f"{len(caches)} caches were given for {len(self._layers)} layers")
        hidden = F.embedding(token_ids, self._embedding)  # [T, E], ours to update in place
        cos, sin = self._rotary(positions, self.dtype)
        eps = self.config.rms_norm_eps
        delta: Tensor | None = None  # what the layer before adds to hidden
        for layer, cache, window in zip(self._layers, caches, self.config.layer_windows, strict=True):
            if delta is None:
                normed = rms_norm(hidden, layer.attention_norm, eps)
            else:
                normed = add_rms_norm(hidden, delta, layer.attention_norm, eps)
            attended = self._attention(layer, normed, cos, sin, cache, window, batch, backend)
            normed = add_rms_norm(hidden, attended, layer.mlp_norm, eps)
            delta = self._mlp(layer, normed)
        return hidden if delta is None else hidden.add_(delta)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the final norm and the head to rows `[S, E]` of hidden: float32 `[S, V]`."""
        normed = rms_norm(hidden, self._final_norm, self.config.rms_norm_eps)
        return F.linear(normed, self._head).float()

    def _attention(
        self,
        layer: LayerWeights,
        normed: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache,
        window: int | None,
        batch: AttentionBatch,
        backend: AttentionBackend,
    ) -> Tensor:
        config = self.config
        q_heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias)
        qkv = qkv.view(-1, q_heads + 2 * kv_heads, dim)  # [T, (Hq + 2 Hkv) D] -> [T, Hq + 2 Hkv, D]
        query, key, value = qkv.tensor_split((q_heads, q_heads + kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            rms_norm(query, layer.q_norm, config.rms_norm_eps, out=query)
            rms_norm(key, layer.k_norm, config.rms_norm_eps, out=key)
        backend.rotate_and_write_kv(query, key, value, cos, sin, cache, batch.slots)
        # One tensor, since return_lse is not asked for.
        out = cast(Tensor, backend.paged_attention(query, cache, batch, scale=self._scale, window=window))
        # [T, Hq, D] -> [T, Hq D]
        return F.linear(out.reshape(-1, q_heads * dim), layer.output, layer.output_bias)

    def _mlp(self, layer: LayerWeights, normed: Tensor) -> Tensor:
        gate_up = F.linear(normed, layer.gate_up, layer.gate_up_bias)  # [T, 2 I]
        return F.linear(swiglu(gate_up), layer.down, layer.down_bias)
