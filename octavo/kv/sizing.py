"""How many blocks fit in a memory budget. Arithmetic only; the engine measures and supplies the numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from octavo.kv.errors import InvalidArgument

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


@dataclass(frozen=True, slots=True)
class KVShape:
    """What decides the bytes of a token's K and V.

    kv_heads, not attention heads: with grouped-query attention hidden_size would say too much.
    """

    layers: int
    kv_heads: int
    head_dim: int
    bytes_per_value: int

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in every layer."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.bytes_per_value

    def bytes_per_block(self, block_size: int) -> int:
        """layers x 2 x kv_heads x head_dim x block_size x bytes per value."""
        return self.bytes_per_token * block_size


def blocks_in(memory: int, shape: KVShape, block_size: int, option: str = "kv_memory") -> int:
    """Whole blocks that fit in `memory` bytes, the value of `option`.

    Raises InvalidArgument, with need, have and option, when not even one does.
    """
    per_block = shape.bytes_per_block(block_size)
    blocks = memory // per_block
    if blocks < 1:
        raise InvalidArgument(
            f"one block of {block_size} tokens needs {per_block:,} bytes of KV cache, "
            f"but the budget is {memory:,}: raise {option} or lower block_size"
        )
    return blocks


def parse_bytes(text: str | int, option: str = "kv_memory") -> int:
    """Bytes from "2GiB", "512 MiB", "1.5gb" or a plain number. Raises InvalidArgument otherwise."""
    if isinstance(text, int) and not isinstance(text, bool):
        value = text
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
        if match is None or match[2].lower() not in _UNITS:
            raise InvalidArgument(
                f"{option}: cannot read {text!r} as a size; write for example 2GiB or 512MiB"
            )
        value = int(float(match[1]) * _UNITS[match[2].lower()])
    if value <= 0:
        raise InvalidArgument(f"{option} must be positive, got {text!r}")
    return value
