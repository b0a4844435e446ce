"""Stored matrices: rounding, reading back, stacking."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.ops import reference
from octavo.ops.errors import UnsupportedWeights
from octavo.ops.packing import KINDS, StoredMatrix, can_quantise, quantised, stacked
from tests.ops.cases import random_rows, random_weights


@pytest.mark.parametrize(("kind", "steps"), [("q8_0", 127), ("q4_0", 8), ("q4_1", 15)])
def test_rounding_stays_within_half_a_step(kind: str, steps: int) -> None:
    """Every weight comes back within half a step of its group, and a little for the half-precision scale."""
    weights = np.random.default_rng(0).standard_normal((40, 128)).astype(np.float32)
    groups = weights.reshape(40, 4, 32)
    span = np.abs(groups).max(-1) if kind != "q4_1" else np.ptp(groups, axis=-1)
    found = quantised(weights, kind).dequantised().reshape(40, 4, 32)
    error = np.abs(found - groups).max(-1)
    # q4_0 has a step less on one side, so the far end may be a whole step off.
    allowed = span / steps * (1.0 if kind == "q4_0" else 0.5) + 2e-3 * np.abs(groups).max(-1)
    assert (error <= allowed).all()
    assert (error > 0.1 * span / steps).any(), "an error of nothing would mean that nothing was rounded"


@pytest.mark.parametrize("kind", KINDS)
def test_parts_make_up_the_weights(kind: str) -> None:
    """The integers, scales and offsets of the reference give what the gguf package dequantises."""
    if kind == "float32":
        return
    for seed in (2, 3):
        weights = random_weights(kind, 9, 96, seed)
        values, scales, offsets = reference.parts(weights)
        found = values * scales[..., None] + offsets[..., None]
        wanted = weights.dequantised().reshape(found.shape)
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


def test_stacking_keeps_one_kind_and_widens_several() -> None:
    """Parts of one kind keep their bytes; unlike ones become eight bits, or float32 beside float32."""
    four, other = random_weights("q4_1", 5, 64, 1), random_weights("q4_1", 7, 64, 3)
    assert np.array_equal(stacked([four, other]).rows, np.concatenate([four.rows, other.rows]))
    mixed = stacked([four, random_weights("q4_0", 3, 64, 5)])
    assert (mixed.kind, mixed.outputs, mixed.inputs) == ("q8_0", 8, 64)
    error = np.abs(mixed.dequantised()[:5] - four.dequantised()).max()
    assert error < np.abs(four.dequantised()).max() / 200
    exact = stacked([four, random_weights("float32", 3, 64, 1)])
    assert exact.kind == "float32"
    assert np.array_equal(exact.rows[:5], four.dequantised())


def test_what_cannot_be_is_refused() -> None:
    """Odd row lengths, unknown kinds and wrong dtypes are named."""
    assert not can_quantise(48)
    with pytest.raises(UnsupportedWeights, match=r"rows of 48 weights.*groups of 32.*q8_0"):
        quantised(np.zeros((2, 48), np.float32), "q8_0")
    with pytest.raises(UnsupportedWeights, match=r"'q3'.*float32, q8_0"):
        StoredMatrix("q3", np.zeros((2, 34), np.uint8))
    with pytest.raises(UnsupportedWeights, match="float64"):
        StoredMatrix("float32", np.zeros((2, 34)))
    with pytest.raises(UnsupportedWeights, match="rows of 33 bytes"):
        StoredMatrix("q8_0", np.zeros((2, 33), np.uint8))


def test_activations_round_to_the_nearest_step() -> None:
    """Rounding reaches 127 on the largest, keeps zero groups zero, and marks a group with NaN or infinity."""
    x = random_rows(50, 96, 4)
    values, scale = reference.round_activations(x)
    back = values * scale[..., None]
    groups = x.reshape(50, 3, 32)
    assert (np.abs(back - groups).max(-1) <= scale * 0.5001).all()
    assert (np.abs(values).max(-1)[scale > 0] == 127).all()
    assert (scale[np.abs(groups).max(-1) == 0] == 0).all()
    for bad in (np.nan, np.inf, -np.inf):
        x[7, 40] = bad
        values, scale = reference.round_activations(x)
        assert not np.isfinite(scale[7, 1])
        assert np.isfinite(np.delete(scale.reshape(-1), 7 * 3 + 1)).all()
        assert not values[7, 1].any()
