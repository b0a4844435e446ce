"""Random weights of every kind, and rows to multiply them with."""

from __future__ import annotations

import numpy as np

from octavo.ops.packing import GROUP_BYTES, StoredMatrix, quantised

SHAPES = ((576, 576), (70, 96), (1, 32), (33, 1536), (192, 64))


def random_weights(kind: str, outputs: int, inputs: int, seed: int) -> StoredMatrix:
    """Weights of a kind as a file may hold them: every integer, scales of either sign, zero among them."""
    rng = np.random.default_rng(seed)
    if kind == "float32":
        return StoredMatrix(kind, rng.standard_normal((outputs, inputs)).astype(np.float32))
    if seed % 2:  # rounded from floats, as converters do
        return quantised(rng.standard_normal((outputs, inputs)).astype(np.float32), kind)
    groups = inputs // 32
    blocks = rng.integers(0, 256, (outputs, groups, GROUP_BYTES[kind]), dtype=np.uint8)
    scales = rng.standard_normal((outputs, groups, 2)).astype(np.float16)
    scales[rng.random(scales.shape) < 0.05] = 0
    count = 2 if kind == "q4_1" else 1
    blocks[..., : 2 * count] = scales[..., :count].copy().view(np.uint8).reshape(outputs, groups, 2 * count)
    return StoredMatrix(kind, blocks.reshape(outputs, -1))


def random_rows(rows: int, inputs: int, seed: int) -> np.ndarray:
    """Rows whose groups differ in size by orders of magnitude; some groups are zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    sizes = 10.0 ** rng.integers(-2, 2, (rows, -(-inputs // 32)))
    sizes[rng.random(sizes.shape) < 0.1] = 0
    x *= np.repeat(sizes, 32, axis=1)[:, :inputs].astype(np.float32)
    return x
