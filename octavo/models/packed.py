"""Projections on packed weights, in C++: see octavo.ops.linear, which this module needs to be built.

Hidden states and activations are float32. A row's bits depend on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.models.config import ModelConfig
from octavo.models.layers import AllLayers
from octavo.models.projections import HeadNorms
from octavo.ops.linear import SCRATCH, Chain, LinearEngine, PackedLinear, Step


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One layer's packed matrices (biases within) and norms `[E]` float32."""

    attention_norm: Tensor
    qkv: PackedLinear  # q rows, then k, then v
    output: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear  # paired
    down: PackedLinear

    @property
    def num_bytes(self) -> int:
        """Memory of the layer's weights."""
        linears = (self.qkv, self.output, self.gate_up, self.down)
        norms = (self.attention_norm, self.mlp_norm)
        return sum(linear.num_bytes for linear in linears) + 4 * sum(norm.numel() for norm in norms)


ATTENTION, HIDDEN, QKV = 0, 1, 2  # numbers of a chain's tensors


class PackedProjections:
    """Products of weights as they are stored with activations of eight bits, or all in float32."""

    dtype = torch.float32

    def __init__(
        self,
        embedding: PackedLinear,
        layers: Sequence[PackedLayer],
        final_norm: Tensor,
        head: PackedLinear,
        eps: float,
        engine: LinearEngine,
    ) -> None:
        """Take embedding `[V, E]` and head `[V, E]`, which may be the embedding."""
        self._embedding, self._head = embedding, head
        self.kernels = f"cpu ({engine.isa})"
        self._engine, self._eps = engine, eps
        matrices = [
            head,
            *(each for layer in layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down)),
        ]
        self.quantised = any(matrix.kind != "float32" for matrix in matrices)
        self._qkv_width = layers[0].qkv.outputs
        self.weights_bytes = embedding.num_bytes + 4 * final_norm.numel()
        self.weights_bytes += sum(layer.num_bytes for layer in layers)
        if head is not embedding:
            self.weights_bytes += head.num_bytes

        def begin(layer: PackedLayer) -> Step:
            return Step(layer.qkv, HIDDEN, QKV, layer.attention_norm, eps)

        self._first = Chain(engine, [begin(layers[0])])
        self._chains = []
        for number, layer in enumerate(layers):
            steps = [
                Step(layer.output, ATTENTION, HIDDEN, then="add"),
                Step(layer.gate_up, HIDDEN, SCRATCH, layer.mlp_norm, eps, "swiglu"),
                Step(layer.down, SCRATCH, HIDDEN, then="add"),
            ]
            if number + 1 < len(layers):
                steps.append(begin(layers[number + 1]))
            self._chains.append(Chain(engine, steps))
        self._final = Chain(engine, [Step(head, HIDDEN, QKV, final_norm, eps)])

    def embed(self, token_ids: Tensor) -> Tensor:
        """See Projections."""
        return self._embedding.rows(token_ids)

    def first(self, hidden: Tensor) -> Tensor:
        """See Projections."""
        qkv = torch.empty(hidden.shape[0], self._qkv_width)
        self._first.run(hidden, hidden, qkv)
        return qkv

    def proceed(self, layer: int, attention: Tensor, hidden: Tensor, qkv: Tensor) -> Tensor:
        """See Projections."""
        self._chains[layer].run(attention, hidden, qkv)
        return qkv

    def all_layers(self, config: ModelConfig, head_norms: Sequence[HeadNorms | None]) -> AllLayers:
        """See Projections."""
        return AllLayers(config, head_norms, self._engine, self._chains, self._eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """See Projections."""
        out = torch.empty(hidden.shape[0], self._head.outputs)
        self._final.run(hidden, hidden, out)
        return out
