"""Rotary embedding applied to heads, in torch: what kernels that rotate as they write are tested against."""

from __future__ import annotations

from torch import Tensor


def rotate_in_place(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate heads `[T, H, D]` by cos and sin `[T, 1, D/2]`; dimension i pairs with i + D/2."""
    first, second = heads.chunk(2, dim=-1)  # [T, H, D] -> views 2 x [T, H, D/2]
    turned = first * sin
    first.mul_(cos).sub_(second * sin)
    second.mul_(cos).add_(turned)
