"""Which tensors a checkpoint must have.

    WeightSource (names as transformers writes them)
        --> every expected tensor there, none left over, every shape right

Owns the list of tensors that a config implies. A tensor that nobody reads is an error: a bias or
norm dropped in silence gives fluent nonsense.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from octavo.models.config import ModelConfig
from octavo.models.errors import CheckpointError
from octavo.ops.packing import StoredMatrix

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
# Parts of a layer whose rows are stacked into one matrix.
MATRICES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}

# Tables that older exporters stored and that follow from the config.
_IGNORABLE = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_NAMES_SHOWN = 8


class WeightSource(Protocol):
    """A checkpoint's tensors under transformers' names for the Llama family."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, without reading any."""

    def read(self, name: str) -> Tensor:
        """Read one tensor, in a floating dtype and shape `shapes()[name]`."""

    def type_name(self, name: str) -> str:
        """How the file stores it, as GGUF names types: F32, BF16, Q4_1, ..."""

    def stored(self, name: str) -> StoredMatrix:
        """Read a matrix as it is stored where that is a kind of ours, else as float32."""


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


def _listing(names: set[str]) -> str:
    shown = sorted(names)[:_NAMES_SHOWN]
    rest = len(names) - len(shown)
    noun = "tensor" if len(names) == 1 else "tensors"
    return f"{len(names)} {noun}: {', '.join(shown)}" + (f" and {rest} more" if rest else "")
