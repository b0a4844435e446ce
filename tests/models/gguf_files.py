"""Small GGUF files, written with the gguf package's writer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from torch import Tensor

from octavo.models import Decoder
from octavo.models.build import build_decoder
from octavo.models.gguf_config import config_from_gguf
from octavo.models.gguf_file import GgufFile
from octavo.models.gguf_loader import GgufWeights

QuantType = gguf.GGMLQuantizationType

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    """Translate transformers' name of a tensor."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{LAYER_NAMES[module]}.{kind}"


def permute(array: np.ndarray, heads: int) -> np.ndarray:
    """Order q or k rows as llama.cpp's converter does (convert_hf_to_gguf.py, LlamaModel.permute)."""
    return (
        array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
        .swapaxes(1, 2)
        .reshape(array.shape)
    )


def metadata_of(config: Any, architecture: str) -> dict[str, Any]:
    """GGUF metadata of a transformers config."""
    values = {
        "vocab_size": config.vocab_size,
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        values["attention.key_length"] = values["attention.value_length"] = head_dim
    return {f"{architecture}.{key}": value for key, value in values.items()}


def write_gguf(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, Any]
) -> Path:
    """Write a file; a tensor is an array, or (packed bytes, quantisation type)."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, list(value))
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=value[1])
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors_of(model: Any, architecture: str, types: Mapping[str, QuantType] | None = None) -> dict[str, Any]:
    """GGUF tensors of a transformers model; `types` maps parts of GGUF names to quantisation types.

    The model's own parameters are replaced by what the quantised ones stand for, so that the two
    are twins.
    """
    config = model.config
    out: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        target = gguf_name(name)
        array = parameter.detach().numpy().copy()
        wanted = next((kind for part, kind in (types or {}).items() if part in target), None)
        packed = array if wanted is None else quantize(array, wanted)
        if wanted is not None:
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(dequantize(packed, wanted)))
        if architecture == "llama" and (".attn_q." in target or ".attn_k." in target):
            is_query = ".attn_q." in target
            packed = permute(packed, config.num_attention_heads if is_query else config.num_key_value_heads)
        out[target] = packed if wanted is None else (packed, wanted)
    return out


def decoder_from_gguf(path: Path, weights: str = "float32") -> Decoder:
    """Load the weights, by default as the numbers that they stand for, without a tokenizer."""
    file = GgufFile(path)
    config = config_from_gguf(file)
    return build_decoder(config, GgufWeights(file, config), torch.float32, weights)


def as_float32(array: np.ndarray) -> Tensor:
    """A tensor of the array's values."""
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
