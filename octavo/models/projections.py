"""Everything of a decoder step but attention: embedding, norms, matrix products, MLP, head.

    TorchProjections     torch's products, in any floating dtype
    PackedProjections    octavo.ops: weights as they are stored, one call from one attention to the next

      attention [T, Hq D] --output--> + hidden --norm, gate|up, silu(gate) * up, down--> + hidden
                                               --norm, next layer's q|k|v--> qkv [T, (Hq + 2 Hkv) D]

Owns the weights. Which of the two a model gets is decided in build.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.attention import AttentionBackend, AttentionBatch, LayerCache
from octavo.models.config import ModelConfig
from octavo.ops import add_rms_norm, rms_norm, swiglu


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms `[D]` of query and key heads, in models that have them."""

    query: Tensor
    key: Tensor


class Layers(Protocol):
    """All layers of a step in one call; see layers.py."""

    def fits(self, backend: AttentionBackend) -> bool:
        """Whether run() can be called with this backend."""

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
        """Take hidden `[T, E]` through all layers, in place; qkv is what first() returned; cos and sin
        `[N, D / 2]` are rows by position."""


class Projections(Protocol):
    """The part of a decoder that has weights. Tensors are rows of tokens; hidden is changed in place."""

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states and of what attention gets."""

    @property
    def weights_bytes(self) -> int:
        """Memory of all weights, a shared embedding counted once."""

    @property
    def kernels(self) -> str:
        """What computes the products, for the start-up table."""

    @property
    def quantised(self) -> bool:
        """Whether products round hidden states to eight bits, as with weights of four and eight bits."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Hidden `[T, E]` of token ids `[T]` int64, the caller's to change."""

    def first(self, hidden: Tensor) -> Tensor:
        """q, k and v of the first layer, `[T, (Hq + 2 Hkv) D]`, from hidden `[T, E]`."""

    def proceed(self, layer: int, attention: Tensor, hidden: Tensor, qkv: Tensor) -> Tensor:
        """Finish a layer after its attention `[T, Hq D]`; return q, k and v of the next one.

        qkv: what the last call returned, whose memory may be used again. After the last layer it is
        returned as it is.
        """

    def all_layers(self, config: ModelConfig, head_norms: Sequence[HeadNorms | None]) -> Layers | None:
        """All layers as one call that equals the decoder's loop, or None."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head of rows `[S, E]`: float32 `[S, V]`."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's weights for torch, projections as `[out, in]`; a bias that the model lacks is None."""

    attention_norm: Tensor  # [E]
    qkv: Tensor  # [(Hq + 2 Hkv) D, E]: q rows, then k, then v
    qkv_bias: Tensor | None
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


class TorchProjections:
    """Products by torch, in the dtype of the weights.

    Bits of a row may depend on the other rows: torch chooses its order of additions by shape.
    """

    kernels = "torch"
    quantised = False

    def __init__(
        self, embedding: Tensor, layers: Sequence[LayerWeights], final_norm: Tensor, head: Tensor, eps: float
    ) -> None:
        """Take embedding `[V, E]`, final_norm `[E]` and head `[V, E]`, which may be the embedding."""
        self._embedding, self._layers, self._final_norm = embedding, tuple(layers), final_norm
        self._head, self._eps = head, eps

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and the hidden states."""
        return self._embedding.dtype

    @property
    def weights_bytes(self) -> int:
        """Memory of all weights."""
        tensors = [self._embedding, self._final_norm]
        if self._head is not self._embedding:
            tensors.append(self._head)
        for layer in self._layers:
            tensors.extend(layer.tensors())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def embed(self, token_ids: Tensor) -> Tensor:
        """See Projections."""
        return F.embedding(token_ids, self._embedding)

    def first(self, hidden: Tensor) -> Tensor:
        """See Projections."""
        first = self._layers[0]
        return F.linear(rms_norm(hidden, first.attention_norm, self._eps), first.qkv, first.qkv_bias)

    def proceed(self, layer: int, attention: Tensor, hidden: Tensor, qkv: Tensor) -> Tensor:
        """See Projections."""
        weights = self._layers[layer]
        delta = F.linear(attention, weights.output, weights.output_bias)
        normed = add_rms_norm(hidden, delta, weights.mlp_norm, self._eps)
        gate_up = F.linear(normed, weights.gate_up, weights.gate_up_bias)  # [T, 2 I]
        delta = F.linear(swiglu(gate_up), weights.down, weights.down_bias)
        if layer + 1 == len(self._layers):
            hidden += delta
            return qkv
        following = self._layers[layer + 1]
        normed = add_rms_norm(hidden, delta, following.attention_norm, self._eps)
        return F.linear(normed, following.qkv, following.qkv_bias)

    def all_layers(self, config: ModelConfig, head_norms: Sequence[HeadNorms | None]) -> None:
        """See Projections: torch has no such call."""

    def logits(self, hidden: Tensor) -> Tensor:
        """See Projections."""
        return F.linear(rms_norm(hidden, self._final_norm, self._eps), self._head).float()
