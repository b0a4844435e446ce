"""Sampling with a full sort: what the kernels must equal token for token, and what runs where none is built.

numpy rounds float32 operations one by one, as csrc/weigh.h does, and weights are whole numbers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from octavo.ops.sampling import Pick

UNIT = 2**40  # the weight of the likeliest token
DEEPEST = 28.0  # exponents under -28 weigh less than half a unit and count as nothing

Array = NDArray[np.int64]


def weights_of(logits: NDArray[np.float32], temperature: float) -> Array:
    """e^((logit - max) / temperature) in units of 2^-40, to nearest. The polynomial is Cephes' (Moshier)."""
    f = np.float32
    with np.errstate(all="ignore"):  # -infinity makes NaN on the way, and is dropped at the end
        x = (logits - logits.max()) / f(temperature)
        n = np.rint(x * f(1.44269504088896341))
        r = (x - n * f(0.693359375)) + n * f(2.12194440e-4)
        p = np.full_like(x, 1.9875691500e-4)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = p * r + f(c)
        p = (p * (r * r) + r) + f(1)
        keep = x > f(-DEEPEST)
        size = np.where(keep, np.ldexp(p, np.where(keep, n, 0).astype(np.int32) + 20), f(0))
        high = np.rint(size)
        low = np.rint((size - high) * f(2**20))
    return high.astype(np.int64) * 2**20 + low.astype(np.int64)


def candidates_by_sorting(logits: NDArray[np.float32], pick: Pick) -> tuple[Array, Array] | None:
    """Ids, ascending, and weights that temperature, top_k, top_p and min_p leave; None for a bad row."""
    if _bad(logits):
        return None
    order = np.argsort(-logits, kind="stable")  # among equals, lower ids first
    weights = weights_of(logits, pick.temperature)[order]
    if 0 < pick.top_k < len(order):
        order, weights = order[: pick.top_k], weights[: pick.top_k]
    if pick.top_p < 1:
        target = _share(int(weights.sum()), pick.top_p)
        before = np.cumsum(weights) - weights
        order, weights = order[before < target], weights[before < target]
    least = _share(UNIT, pick.min_p) if pick.min_p > 0 else 1
    order, weights = order[weights >= least], weights[weights >= least]
    by_id = np.argsort(order)
    return order[by_id].astype(np.int64), weights[by_id]


def pick_by_sorting(logits: NDArray[np.float32], pick: Pick) -> int:
    """The token of a pick from its row; -1 for a bad row."""
    from octavo.ops.sampling import uniform

    if _bad(logits):
        return -1
    if not pick.temperature > 0:
        return int(logits.argmax())
    found = candidates_by_sorting(logits, pick)
    assert found is not None
    ids, weights = found
    total = int(weights.sum())
    target = min(int(uniform(pick.seed, pick.branch, pick.position) * float(total)), total - 1)
    return int(ids[np.searchsorted(np.cumsum(weights), target, side="right")])


def _bad(logits: NDArray[np.float32]) -> bool:
    return bool(np.isnan(logits).any()) or not math.isfinite(float(logits.max()))


def _share(total: int, share: float) -> int:
    """The smallest whole number that is not under share * total; at least 1."""
    return max(1, math.ceil(share * float(total)))
