"""int8 storage of K and V: one scale per token and head, symmetric, the largest size becoming 127."""

from __future__ import annotations

import torch
from torch import Tensor


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 `[..., D]` and scale `[...]` float32 with rows close to int8 * scale.

    Each element is off by at most half a scale, which is a 254th of the row's largest size; a row
    of zeros has scale 0. Ties round to even.
    """
    rows = rows.float()
    size = rows.abs().amax(dim=-1)
    most = torch.tensor(127.0)  # a tensor, so that torch divides; by a number it would multiply
    factor = torch.where(size > 0, most / size, 0.0)
    return (rows * factor[..., None]).round_().to(torch.int8), size / most
