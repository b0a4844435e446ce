"""What "auto" means for the KV cache: its block size and its number format, and why, for the start-up table.

Measured end to end and by kernel; the figures are in docs/engine.md ("Defaults"). Decides only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.attention import AttentionBackend
from octavo.engine.config import AUTO, DEFAULT_BLOCK_SIZE, EngineConfig
from octavo.kv import KVShape
from octavo.models import ModelConfig

_LANES = 16  # slots that the cpu backend lays side by side, where blocks hold whole multiples of them

_BLOCK_SIZES = {
    "cpu": (16, "the smallest that the kernels read without packing keys first"),
    "reference": (16, "this backend gathers at one cost whatever the size"),
}
"""By backend: tokens per block, and what speaks against fewer; against more speak slots that lie empty."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How keys and values are stored: dtype by name, tokens per block, and the reasons in words."""

    dtype: str
    block_size: int
    dtype_reason: str
    block_reason: str


def shape_of(model: ModelConfig, dtype: str) -> KVShape:
    """What decides the bytes of a token's K and V in this model, stored as `dtype`."""
    return KVShape.stored_as(model.num_layers, model.num_kv_heads, model.head_dim, dtype)


def choose_format(
    config: EngineConfig, weights_dtype: str, quantised: bool, backend: AttentionBackend
) -> KVFormat:
    """The options of `config` where they are given, else the defaults.

    weights_dtype: of hidden states. quantised: Decoder.quantised. A backend that is not in the table gets
    DEFAULT_BLOCK_SIZE, and the reason says so.
    """
    dtype, dtype_reason = _choose_dtype(config, weights_dtype, quantised, backend)
    if config.block_size is not None:
        slow = backend.name == "cpu" and config.block_size % _LANES
        note = f"; no multiple of {_LANES}, so the kernels pack keys at each step" if slow else ""
        return KVFormat(dtype, config.block_size, dtype_reason, f"--block-size{note}")
    unknown = DEFAULT_BLOCK_SIZE, f"not measured on {backend.name}"
    block_size, why = _BLOCK_SIZES.get(backend.name, unknown)
    return KVFormat(dtype, block_size, dtype_reason, f"auto: {why}; larger ones waste more; --block-size")


def _choose_dtype(
    config: EngineConfig, weights_dtype: str, quantised: bool, backend: AttentionBackend
) -> tuple[str, str]:
    if config.kv_dtype != AUTO:
        return config.kv_dtype, "--kv-dtype"
    if not quantised:
        return weights_dtype, (
            "auto: as the weights, so that greedy output is exactly the model's; "
            "--kv-dtype float16 or int8 makes room for more tokens"
        )
    why = "which these kernels multiply" if backend.half == torch.bfloat16 else "the finer of the two halves"
    return str(backend.half).removeprefix("torch."), (
        f"auto: {why}; products with these weights round more than it does; "
        "--kv-dtype float32 stores all that is computed"
    )
