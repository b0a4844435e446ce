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


KV_DTYPES: dict[str, tuple[int, int]] = {
    "float32": (4, 0),
    "bfloat16": (2, 0),
    "float16": (2, 0),
    "int8": (1, 4),
}
"""By name of a stored format: bytes of a value, and of the scale that each row of head_dim values has."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """What decides the bytes of a token's K and V.

    kv_heads, not attention heads: with grouped-query attention hidden_size would say too much.
    bytes_per_scale: of the scale that each token and head has, once for K and once for V; 0 where
    values are stored without.
    """

    layers: int
    kv_heads: int
    head_dim: int
    bytes_per_value: int
    bytes_per_scale: int = 0

    @staticmethod
    def stored_as(layers: int, kv_heads: int, head_dim: int, dtype: str) -> KVShape:
        """The shape with values of `dtype`. Raises InvalidArgument unless it is one of KV_DTYPES."""
        if dtype not in KV_DTYPES:
            raise InvalidArgument(f"kv_dtype must be one of {', '.join(KV_DTYPES)}, got {dtype!r}")
        return KVShape(layers, kv_heads, head_dim, *KV_DTYPES[dtype])

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token in every layer, scales included."""
        row = self.head_dim * self.bytes_per_value + self.bytes_per_scale
        return self.layers * 2 * self.kv_heads * row

    def bytes_per_block(self, block_size: int) -> int:
        """layers x 2 x kv_heads x (head_dim x bytes per value + bytes per scale) x block_size."""
        return self.bytes_per_token * block_size


def blocks_in(
    memory: int, shape: KVShape, block_size: int, option: str = "kv_memory", beside: int = 0
) -> int:
    """Whole blocks that fit in `memory` bytes, the value of `option`. beside: bytes that each block has in
    another cache, of a draft model.

    Raises InvalidArgument, with need, have and option, when not even one does.
    """
    per_block = shape.bytes_per_block(block_size) + beside
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


LIBRARIES = 48 * 2**20
"""Bytes that a process takes for its threads, libraries' buffers and bookkeeping once requests run."""
_LEAST_RESERVE = 256 * 2**20
_RESERVE_SHARE = 8


def reserve_in(memory: int) -> int:
    """Of `memory` bytes that could be taken, those to leave to everything else on the machine: an eighth,
    and at least 256 MiB."""
    return max(_LEAST_RESERVE, memory // _RESERVE_SHARE)


def automatic(memory: int, activations: int, lower_tiers: int = 0) -> int:
    """Bytes for the KV cache out of `memory` that can still be taken: what activations, libraries, lower
    tiers and the reserve leave; 0 or less where they leave nothing."""
    return memory - reserve_in(memory) - activations - LIBRARIES - lower_tiers


def requests_that_fit(num_blocks: int, block_size: int, num_tokens: int) -> int:
    """Requests of `num_tokens` tokens each that have all their blocks at once, none of them shared."""
    return num_blocks // -(-num_tokens // block_size)
