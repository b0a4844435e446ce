"""What "auto" means for the KV cache: its block size and its number format, and why, for the start-up table.

Measured end to end and by kernel; the figures are in docs/engine.md ("Defaults"). Decides only.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.config import AUTO, DEFAULT_BLOCK_SIZE, EngineConfig


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How keys and values are stored: dtype by name, tokens per block, and the reasons in words."""

    dtype: str
    block_size: int
    dtype_reason: str
    block_reason: str


def choose_format(config: EngineConfig, weights_dtype: str) -> KVFormat:
    """The options of `config` where they are given, else the defaults for weights of `weights_dtype`."""
    if config.kv_dtype != AUTO:
        dtype, dtype_reason = config.kv_dtype, "--kv-dtype"
    else:
        dtype = weights_dtype
        dtype_reason = (
            "auto: as the weights, so that greedy output is exactly the model's; "
            "--kv-dtype float16 or int8 makes room for more tokens"
        )
    if config.block_size is not None:
        return KVFormat(dtype, config.block_size, dtype_reason, "--block-size")
    reason = "auto: little to gain in speed above, more tokens shared and fewer slots wasted; --block-size"
    return KVFormat(dtype, DEFAULT_BLOCK_SIZE, dtype_reason, reason)
