"""Weight matrices as they are stored: float32, or groups of 32 inputs with a half-precision scale.

    kind      bytes a group   value of a weight
    float32   128             itself
    q8_0      34              scale * int8
    q4_0      18              scale * (nibble - 8)
    q4_1      20              scale * nibble + offset

Owns the formats outside the kernels: quantising, reading back, stacking. Layout of the bytes and rounding are
GGUF's (ggml-quants.c), as the gguf package implements them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

from octavo.ops.errors import UnsupportedWeights

GROUP = 32
KINDS = ("float32", "q8_0", "q4_0", "q4_1")
GROUP_BYTES = {"float32": 4 * GROUP, "q8_0": 34, "q4_0": 18, "q4_1": 20}


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix `[outputs, inputs]` of one of KINDS.

    rows: float32 `[outputs, inputs]`, or uint8 `[outputs, inputs / 32 * bytes of a group]`; dense by rows.
    """

    kind: str
    rows: np.ndarray

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnsupportedWeights(f"weights of kind {self.kind!r}: the kinds are {', '.join(KINDS)}")
        dtype = np.float32 if self.kind == "float32" else np.uint8
        if self.rows.ndim != 2 or self.rows.dtype != dtype:
            raise UnsupportedWeights(
                f"{self.kind} weights are {self.rows.dtype} of shape {self.rows.shape}; they must be "
                f"{np.dtype(dtype)} [outputs, bytes or inputs]"
            )
        if self.kind != "float32" and self.rows.shape[1] % GROUP_BYTES[self.kind]:
            raise UnsupportedWeights(
                f"{self.kind} rows of {self.rows.shape[1]} bytes are not whole groups of "
                f"{GROUP_BYTES[self.kind]}"
            )

    @property
    def outputs(self) -> int:
        """Rows."""
        return int(self.rows.shape[0])

    @property
    def inputs(self) -> int:
        """Weights in a row."""
        columns = int(self.rows.shape[1])
        return columns if self.kind == "float32" else columns // GROUP_BYTES[self.kind] * GROUP

    def dequantised(self) -> np.ndarray:
        """The weights as float32 `[outputs, inputs]`; the array itself when it is float32."""
        if self.kind == "float32":
            return self.rows
        return np.asarray(dequantize(self.rows, _gguf_type(self.kind)))


def quantised(weights: np.ndarray, kind: str) -> StoredMatrix:
    """Round float32 weights `[outputs, inputs]` to `kind`.

    q8_0 and q4_0 scale by the group's largest magnitude, q4_1 spans its range. Raises UnsupportedWeights
    when inputs is not a multiple of 32. Cost: a few passes over the weights.
    """
    if kind == "float32":
        return StoredMatrix(kind, np.ascontiguousarray(weights, np.float32))
    if weights.shape[1] % GROUP:
        raise UnsupportedWeights(
            f"rows of {weights.shape[1]} weights are not whole groups of {GROUP}, which {kind} needs"
        )
    return StoredMatrix(kind, np.ascontiguousarray(quantize(weights, _gguf_type(kind))))


def can_quantise(inputs: int) -> bool:
    """Whether rows of so many weights can be anything but float32."""
    return inputs % GROUP == 0


def stacked(parts: Sequence[StoredMatrix]) -> StoredMatrix:
    """One matrix with the rows of all parts, which have as many inputs.

    Parts of unlike kinds become q8_0 together, or float32 if one of them is that: eight bits lose nothing
    of what four hold that can be measured, and float32 nothing at all.
    """
    kinds = {part.kind for part in parts}
    if len(kinds) == 1:
        return StoredMatrix(parts[0].kind, np.concatenate([part.rows for part in parts]))
    weights = np.concatenate([part.dequantised() for part in parts])
    return quantised(weights, "float32" if "float32" in kinds else "q8_0")


def _gguf_type(kind: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[kind.upper()]
