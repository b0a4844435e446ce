"""From named tensors to a Decoder, the same way for every file format.

    WeightSource (names as transformers writes them)
        --> every expected tensor there, none left over, every shape right
        --> q|k|v and gate|up packed into one matrix each, in the wanted dtype
        --> Decoder

Owns the list of tensors that a config implies. A tensor that nobody reads is an error: a bias or
norm dropped in silence gives fluent nonsense.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder, LayerWeights
from octavo.models.errors import CheckpointError, UnsupportedModel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

# Tables that older exporters stored and that follow from the config.
_IGNORABLE = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_NAMES_SHOWN = 8


class WeightSource(Protocol):
    """A checkpoint's tensors under transformers' names for the Llama family."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, without reading any."""

    def read(self, name: str) -> Tensor:
        """Read one tensor, in a floating dtype and shape `shapes()[name]`."""


def layer_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one layer's tensors."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * dim, config.num_kv_heads * dim
    prefix = f"model.layers.{layer}."
    matrices = {
        "self_attn.q_proj": ((q_rows, hidden), config.attention_bias),
        "self_attn.k_proj": ((kv_rows, hidden), config.attention_bias),
        "self_attn.v_proj": ((kv_rows, hidden), config.attention_bias),
        "self_attn.o_proj": ((hidden, q_rows), config.o_bias),
        "mlp.gate_proj": ((inner, hidden), config.mlp_bias),
        "mlp.up_proj": ((inner, hidden), config.mlp_bias),
        "mlp.down_proj": ((hidden, inner), config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}input_layernorm.weight": (hidden,),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
    }
    for name, (shape, has_bias) in matrices.items():
        shapes[f"{prefix}{name}.weight"] = shape
        if has_bias:
            shapes[f"{prefix}{name}.bias"] = shape[:1]
    if config.qk_norm:
        shapes[f"{prefix}self_attn.q_norm.weight"] = (dim,)
        shapes[f"{prefix}self_attn.k_norm.weight"] = (dim,)
    return shapes


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors that a checkpoint of this config must have."""
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: table, FINAL_NORM: (config.hidden_size,)}
    if not config.tie_word_embeddings:
        shapes[HEAD] = table
    for layer in range(config.num_layers):
        shapes.update(layer_shapes(config, layer))
    return shapes


def check_names_and_shapes(config: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless `found` is what the config implies."""
    expected = expected_shapes(config)
    missing = expected.keys() - found.keys()
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_listing(missing)}")
    allowed = {HEAD} if config.tie_word_embeddings else set()  # a tied head is a second copy
    unread = {name for name in found if name not in expected and name not in allowed}
    unread = {name for name in unread if not _IGNORABLE.search(name)}
    if unread:
        raise CheckpointError(
            f"the checkpoint holds {_listing(unread)} that a {config.architecture} with this "
            "configuration does not use"
        )
    for name, wanted in expected.items():
        if tuple(found[name]) != wanted:
            raise CheckpointError(
                f"tensor {name!r} has shape {list(found[name])}, the configuration wants {list(wanted)}"
            )


def build_decoder(config: ModelConfig, source: WeightSource, dtype: torch.dtype) -> Decoder:
    """Check, read and pack all weights in `dtype`.

    Peak memory is the decoder plus one tensor. Raises CheckpointError for missing, left-over or
    misshapen tensors, UnsupportedModel for a dtype other than DTYPES.
    """
    if dtype not in DTYPES:
        raise UnsupportedModel(f"dtype {dtype} is not supported; supported: {', '.join(map(str, DTYPES))}")
    shapes = source.shapes()
    check_names_and_shapes(config, shapes)

    def take(*names: str) -> Tensor:
        """Read tensors and stack them by rows, converting as they are copied in."""
        rows = [shapes[name][0] for name in names]
        packed = torch.empty((sum(rows), *shapes[names[0]][1:]), dtype=dtype)
        start = 0
        for name, count in zip(names, rows):
            _copy(packed[start : start + count], source.read(name))
            start += count
        return packed

    def read_layer(index: int) -> LayerWeights:
        prefix = f"model.layers.{index}."
        attn, mlp = f"{prefix}self_attn.", f"{prefix}mlp."

        def bias(present: bool, *names: str) -> Tensor | None:
            return take(*(f"{name}.bias" for name in names)) if present else None

        qkv = (f"{attn}q_proj", f"{attn}k_proj", f"{attn}v_proj")
        gate_up = (f"{mlp}gate_proj", f"{mlp}up_proj")
        return LayerWeights(
            attention_norm=take(f"{prefix}input_layernorm.weight"),
            qkv=take(*(f"{name}.weight" for name in qkv)),
            qkv_bias=bias(config.attention_bias, *qkv),
            q_norm=take(f"{attn}q_norm.weight") if config.qk_norm else None,
            k_norm=take(f"{attn}k_norm.weight") if config.qk_norm else None,
            output=take(f"{attn}o_proj.weight"),
            output_bias=bias(config.o_bias, f"{attn}o_proj"),
            mlp_norm=take(f"{prefix}post_attention_layernorm.weight"),
            gate_up=take(*(f"{name}.weight" for name in gate_up)),
            gate_up_bias=bias(config.mlp_bias, *gate_up),
            down=take(f"{mlp}down_proj.weight"),
            down_bias=bias(config.mlp_bias, f"{mlp}down_proj"),
        )

    embedding = take(EMBEDDING)
    return Decoder(
        config,
        embedding=embedding,
        layers=[read_layer(index) for index in range(config.num_layers)],
        final_norm=take(FINAL_NORM),
        head=embedding if config.tie_word_embeddings else take(HEAD),
    )


def _copy(target: Tensor, tensor: Tensor) -> None:
    if target.dtype == tensor.dtype == torch.float32:
        # Hundreds of copies bound by memory gain nothing from torch's threads, and wait for them
        # when the cores are busy: numpy copies on this thread (measured 2 x faster under load).
        np.copyto(target.numpy(), tensor.numpy())
    else:
        target.copy_(tensor)


def _listing(names: set[str]) -> str:
    shown = sorted(names)[:_NAMES_SHOWN]
    rest = len(names) - len(shown)
    noun = "tensor" if len(names) == 1 else "tensors"
    return f"{len(names)} {noun}: {', '.join(shown)}" + (f" and {rest} more" if rest else "")
