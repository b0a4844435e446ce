"""Weights from a GGUF file, under transformers' names.

    blk.3.attn_q.weight  --rename-->  model.layers.3.self_attn.q_proj.weight
                         --as bytes, or dequantised--> float32
                         --un-permute (llama only)--> rows in rotate-half order

Owns the renaming and the row order. Parsing is in gguf_file.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from octavo.models.config import ModelConfig
from octavo.models.gguf_config import ROPE_DIVISORS
from octavo.models.gguf_file import GgufFile
from octavo.ops.packing import KINDS, StoredMatrix

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_PERMUTED = re.compile(r"\.self_attn\.([qk])_proj\.(weight|bias)$")


class GgufWeights:
    """WeightSource over a GGUF file. A name that it cannot translate is kept, and so reported."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        # rope_freqs is read with the configuration, which it belongs to.
        stored = [name for name in file.tensors if name != ROPE_DIVISORS]
        self._stored_names = {_translate(name): name for name in stored}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, rows first."""
        return {name: self._file.tensors[stored].shape for name, stored in self._stored_names.items()}

    def read(self, name: str) -> Tensor:
        """Read one tensor as float32. Raises UnsupportedModel for a type without dequantiser."""
        tensor = self._file.read(self._stored_names[name])
        heads = self._permuted_heads(name)
        return tensor if heads is None else torch.from_numpy(unpermute(tensor.numpy(), heads))

    def type_name(self, name: str) -> str:
        """GGUF's name of the tensor's type."""
        return self._file.tensors[self._stored_names[name]].type_name

    def stored(self, name: str) -> StoredMatrix:
        """Read a matrix of one of KINDS as its bytes, of another type as float32. Raises as read() does."""
        kind = self.type_name(name).lower()
        if kind not in KINDS:
            return StoredMatrix("float32", self.read(name).numpy())
        rows = self._file.raw_rows(self._stored_names[name])
        heads = self._permuted_heads(name)
        return StoredMatrix(kind, rows if heads is None else unpermute(rows, heads))

    def _permuted_heads(self, name: str) -> int | None:
        """Heads in the rows of a tensor that llama.cpp's converter permuted."""
        match = _PERMUTED.search(name)
        if match is None or self._config.family != "llama":
            return None
        return self._config.num_heads if match[1] == "q" else self._config.num_kv_heads


def unpermute(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Undo the row order that llama.cpp's converter gives q and k of the llama architecture.

    ggml rotates neighbouring dimensions there, so rows come as (0, D/2, 1, D/2 + 1, ...); this puts
    them back to (0, 1, ...), where dimension i pairs with i + D/2.
    """
    rows, *rest = tensor.shape
    # [H D, ...] -> [H, D/2, 2, ...] -> [H, 2, D/2, ...] -> [H D, ...]
    return tensor.reshape(heads, rows // heads // 2, 2, *rest).swapaxes(1, 2).reshape(rows, *rest)


def _translate(name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        return name
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
