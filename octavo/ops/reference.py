"""Products in plain numpy: what the kernels must equal.

    x [M, K] --round by groups of 32--> int8 [M, K], scales [M, K / 32]
    y[m, n] = sum over groups g of
              scale[m, g] * (d[n, g] * (int8 . weights, in integers) + offset[n, g] * sum of int8)

Owns the definition of the arithmetic, slow and obvious.
"""

from __future__ import annotations

import numpy as np

from octavo.ops.packing import GROUP, GROUP_BYTES, StoredMatrix

TINY = 1e-30
"""A group whose largest magnitude is below this becomes zero."""


def round_activations(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round rows `[M, K]` to int8 `[M, K / 32, 32]` with scales float32 `[M, K / 32]`.

    127 steps each side of zero up to the group's largest magnitude, ties to even. A group with a NaN or an
    infinity has that scale and zeros.
    """
    groups = np.ascontiguousarray(x, np.float32).reshape(len(x), -1, GROUP)
    bits = (groups.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(-1)
    largest = bits.view(np.float32)
    finite = bits < 0x7F800000
    some = finite & (largest >= TINY)
    with np.errstate(all="ignore"):
        factor = np.where(some, np.float32(127) / largest, np.float32(0)).astype(np.float32)
        scale = np.where(finite, np.where(some, largest / np.float32(127), 0), largest).astype(np.float32)
        scaled = np.where(some[..., None], groups * factor[..., None], np.float32(0))
    return np.rint(scaled).astype(np.int8), scale


def product(x: np.ndarray, weights: StoredMatrix, bias: np.ndarray | None = None) -> np.ndarray:
    """Multiply rows `[M, K]` with weights `[N, K]`: float64 `[M, N]`, of exactly rounded activations."""
    if weights.kind == "float32":
        result = x.astype(np.float64) @ weights.rows.astype(np.float64).T
    else:
        rounded, scale = round_activations(x)
        values, factors, offsets = parts(weights)
        dots = np.einsum("mgk,ngk->mng", rounded.astype(np.float64), values.astype(np.float64))
        sums = rounded.astype(np.int64).sum(-1)
        with np.errstate(all="ignore"):
            grouped = dots * factors + sums[:, None] * offsets
            result = (grouped * scale[:, None].astype(np.float64)).sum(-1)
    return result if bias is None else result + bias


def parts(weights: StoredMatrix) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Integers `[N, G, 32]`, scales and offsets float64 `[N, G]` of quantised weights."""
    blocks = weights.rows.reshape(weights.outputs, -1, GROUP_BYTES[weights.kind])
    factors = blocks[..., 0:2].copy().view(np.float16)[..., 0].astype(np.float64)
    if weights.kind == "q8_0":
        return blocks[..., 2:].copy().view(np.int8), factors, np.zeros_like(factors)
    head = 4 if weights.kind == "q4_1" else 2
    nibbles = blocks[..., head:]
    values = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1).astype(np.int16)
    if weights.kind == "q4_0":
        return values - 8, factors, np.zeros_like(factors)
    return values, factors, blocks[..., 2:4].copy().view(np.float16)[..., 0].astype(np.float64)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Rows divided by their root mean square, times weight: float64."""
    wide = x.astype(np.float64)
    return np.asarray(wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * weight)


def silu_times(gate_up: np.ndarray) -> np.ndarray:
    """silu(gate) * up of `[M, 2 I]`."""
    gate, up = np.split(gate_up, 2, axis=-1)
    with np.errstate(over="ignore"):
        return np.asarray(gate / (1 + np.exp(-gate)) * up)
