"""From named tensors to a Decoder, the same way for every file format.

    WeightSource --checked (weights.py)--> q|k|v and gate|up stacked
                 --float32 and compiled kernels-->  kind of each matrix -> PackedProjections
                 --otherwise-->                     one dtype for all   -> TorchProjections

Owns the choice of formats, and the words that say what was chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.errors import UnsupportedModel
from octavo.models.projections import HeadNorms, LayerWeights, TorchProjections
from octavo.models.weights import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    MATRICES,
    WeightSource,
    check_names_and_shapes,
)
from octavo.ops.packing import KINDS, StoredMatrix, can_quantise, quantised, stacked

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WEIGHTS = ("auto", "float32", "int8", "int4")
_FLOATS = ("F64", "F32", "F16", "BF16")
_FOUR_BITS = ("q4_0", "q4_1")


def build_decoder(
    config: ModelConfig, source: WeightSource, dtype: torch.dtype, weights: str = "auto"
) -> Decoder:
    """Check, read and pack all weights.

    dtype: of hidden states. weights: one of WEIGHTS. "auto" keeps matrices as they are stored, floats as
    floats; "float32" takes the numbers that they stand for; "int8" and "int4" round matrices to q8_0 and
    q4_1, embedding and head to q8_0 in both, and leave what has no more bits as it is. In bfloat16 and
    float16, and without compiled kernels, torch computes in one dtype, and only "auto" (and, in float32,
    "float32") can be had. Peak memory is the decoder plus one layer's stacked matrix. Raises
    CheckpointError for missing, left-over or misshapen tensors, UnsupportedModel for a dtype or weights
    that cannot be honoured.
    """
    if dtype not in DTYPES:
        raise UnsupportedModel(f"dtype {dtype} is not supported; supported: {', '.join(map(str, DTYPES))}")
    if weights not in WEIGHTS:
        raise UnsupportedModel(f"weights {weights!r} is not one of {', '.join(WEIGHTS)}")
    check_names_and_shapes(config, source.shapes())
    if dtype != torch.float32:
        if weights != "auto":
            raise UnsupportedModel(
                f"weights {weights!r} are computed in float32, not in {dtype}: "
                "give --dtype float32, or --weights auto"
            )
        return _in_torch(config, source, dtype, f"{_name(dtype)} (--weights auto)")
    try:
        packed = import_module("octavo.models.packed")
    except ImportError as error:
        why = f"the compiled kernels are not available: {error}"
        if weights in ("int8", "int4"):
            raise UnsupportedModel(f"weights {weights!r} cannot be had: {why}") from error
        return _in_torch(config, source, dtype, f"float32 (--weights {weights}; {why})")
    return _packed(config, source, weights, packed)


def packed_matrices(
    config: ModelConfig, types: Mapping[str, str], dtype: str, weights: str
) -> list[tuple[tuple[str, ...], str, bool]] | None:
    """The packed matrices of a decoder before anything is read: the tensors stacked in each, its kind, and
    whether it is paired; None where build_decoder() would have torch compute.

    types: how tensors are stored, by name; those not named are floats.
    """
    if dtype != "float32":
        return None
    try:
        import_module("octavo.models.packed")
    except ImportError:
        return None
    found = []

    def add(names: tuple[str, ...], inputs: int, *, table: bool = False, paired: bool = False) -> None:
        stored = [types.get(name, "F32") for name in names]
        kinds = {name.lower() if name.lower() in KINDS else "float32" for name in stored}
        kind = kinds.pop() if len(kinds) == 1 else "float32" if "float32" in kinds else "q8_0"
        found.append((names, _kind(weights, kind, inputs, stored, table), paired))

    hidden, inner = config.hidden_size, config.intermediate_size
    inputs = {"qkv": hidden, "output": config.num_heads * config.head_dim, "gate_up": hidden, "down": inner}
    for index in range(config.num_layers):
        for group, names in MATRICES.items():
            whole = tuple(f"model.layers.{index}.{name}.weight" for name in names)
            add(whole, inputs[group], paired=group == "gate_up")
    for name in (EMBEDDING,) if config.tie_word_embeddings else (EMBEDDING, HEAD):
        add((name,), hidden, table=True)
    return found


def _kind(weights: str, stored: str, inputs: int, types: list[str], table: bool) -> str:
    """The kind that a matrix of `stored` kind gets under the option `weights`."""
    if weights == "float32" or not can_quantise(inputs):
        return "float32"
    if weights == "int4" and not table:
        return stored if stored in _FOUR_BITS else "q4_1"
    if weights in ("int8", "int4"):
        return "q8_0" if stored == "float32" else stored
    if stored == "float32" and not set(types) & set(_FLOATS):
        return "q8_0"  # a quantised type that is not ours: eight bits lose nothing of it that shows
    return stored


class _Reader:
    """Reads tensors as they are wanted, and counts what became of them."""

    def __init__(self, source: WeightSource, weights: str) -> None:
        self._source = source
        self._weights = weights
        self.kept: Counter[str] = Counter()
        self.converted: Counter[tuple[str, str]] = Counter()

    def vector(self, *names: str) -> np.ndarray:
        """Biases or a norm, one after the other, float32."""
        return np.concatenate([_float32(self._source, name) for name in names])

    def matrix(self, *names: str, table: bool = False) -> StoredMatrix:
        """Matrices stacked by rows, of the kind that the option asks for."""
        matrix = stacked([self._source.stored(name) for name in names])
        types = [self._source.type_name(name) for name in names]
        kind = _kind(self._weights, matrix.kind, matrix.inputs, types, table)
        if kind != matrix.kind:
            matrix = quantised(matrix.dequantised(), kind)
        for name in names:
            was = self._source.type_name(name)
            if was.lower() == kind or (was in _FLOATS and kind == "float32"):
                self.kept[kind] += 1
            else:
                self.converted[was, kind] += 1
        return matrix

    def note(self) -> str:
        """What the matrices are, for the start-up table."""
        parts = [f"{count} {kind}" for kind, count in sorted(self.kept.items())]
        parts += [f"{n} {kind} from {was}" for (was, kind), n in sorted(self.converted.items())]
        how = "as stored" if not self.converted else "matrices"
        return f"{how}: {', '.join(parts)} (--weights {self._weights})"


def _packed(config: ModelConfig, source: WeightSource, weights: str, packed: ModuleType) -> Decoder:
    reader = _Reader(source, weights)
    norms: list[HeadNorms | None] = []

    def norm(name: str) -> Tensor:
        return torch.from_numpy(reader.vector(name))

    def linear(prefix: str, names: tuple[str, ...], biased: bool, paired: bool = False) -> Any:
        matrix = reader.matrix(*(f"{prefix}{name}.weight" for name in names))
        bias = reader.vector(*(f"{prefix}{name}.bias" for name in names)) if biased else None
        return packed.PackedLinear(matrix, bias, paired=paired)

    layers = []
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        layers.append(
            packed.PackedLayer(
                attention_norm=norm(f"{prefix}input_layernorm.weight"),
                qkv=linear(prefix, MATRICES["qkv"], config.attention_bias),
                output=linear(prefix, MATRICES["output"], config.o_bias),
                mlp_norm=norm(f"{prefix}post_attention_layernorm.weight"),
                gate_up=linear(prefix, MATRICES["gate_up"], config.mlp_bias, paired=True),
                down=linear(prefix, MATRICES["down"], config.mlp_bias),
            )
        )
        norms.append(_head_norms(config, source, prefix, torch.float32))
    embedding = packed.PackedLinear(reader.matrix(EMBEDDING, table=True))
    tied = config.tie_word_embeddings
    head = embedding if tied else packed.PackedLinear(reader.matrix(HEAD, table=True))
    engine = packed.LinearEngine()
    projections = packed.PackedProjections(
        embedding, layers, norm(FINAL_NORM), head, config.rms_norm_eps, engine
    )
    return Decoder(config, projections, norms, reader.note())


def _in_torch(config: ModelConfig, source: WeightSource, dtype: torch.dtype, note: str) -> Decoder:
    shapes = source.shapes()

    def take(*names: str) -> Tensor:
        """Read tensors and stack them by rows, converting as they are copied in."""
        rows = [shapes[name][0] for name in names]
        whole = torch.empty((sum(rows), *shapes[names[0]][1:]), dtype=dtype)
        start = 0
        for name, count in zip(names, rows):
            _copy(whole[start : start + count], source.read(name))
            start += count
        return whole

    def read_layer(index: int) -> LayerWeights:
        prefix = f"model.layers.{index}."

        def weight(group: str) -> Tensor:
            return take(*(f"{prefix}{name}.weight" for name in MATRICES[group]))

        def bias(group: str, present: bool) -> Tensor | None:
            return take(*(f"{prefix}{name}.bias" for name in MATRICES[group])) if present else None

        return LayerWeights(
            attention_norm=take(f"{prefix}input_layernorm.weight"),
            qkv=weight("qkv"),
            qkv_bias=bias("qkv", config.attention_bias),
            output=weight("output"),
            output_bias=bias("output", config.o_bias),
            mlp_norm=take(f"{prefix}post_attention_layernorm.weight"),
            gate_up=weight("gate_up"),
            gate_up_bias=bias("gate_up", config.mlp_bias),
            down=weight("down"),
            down_bias=bias("down", config.mlp_bias),
        )

    embedding = take(EMBEDDING)
    projections = TorchProjections(
        embedding,
        [read_layer(index) for index in range(config.num_layers)],
        take(FINAL_NORM),
        embedding if config.tie_word_embeddings else take(HEAD),
        config.rms_norm_eps,
    )
    prefixes = (f"model.layers.{index}." for index in range(config.num_layers))
    return Decoder(config, projections, [_head_norms(config, source, p, dtype) for p in prefixes], note)


def _head_norms(
    config: ModelConfig, source: WeightSource, prefix: str, dtype: torch.dtype
) -> HeadNorms | None:
    if not config.qk_norm:
        return None
    names = (f"{prefix}self_attn.{part}_norm.weight" for part in "qk")
    return HeadNorms(*(torch.from_numpy(_float32(source, name)).to(dtype) for name in names))


def _float32(source: WeightSource, name: str) -> np.ndarray:
    return source.read(name).to(torch.float32).numpy()


def _copy(target: Tensor, tensor: Tensor) -> None:
    if target.dtype == tensor.dtype == torch.float32:
        # Hundreds of copies bound by memory gain nothing from torch's threads, and wait for them
        # when the cores are busy: numpy copies on this thread (measured 2 x faster under load).
        np.copyto(target.numpy(), tensor.numpy())
    else:
        target.copy_(tensor)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
