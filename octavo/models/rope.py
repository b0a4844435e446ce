"""Rotary position embedding, rotate-half convention.

    inverse frequencies [D/2] --x position--> angles --> table of cos and sin, [P, D/2] each, float32

Owns the table and its growth; the attention backend rotates heads as it writes keys. Formulas: RoFormer
(Su et al. 2021); "llama3" is the smoothing that Meta published with Llama 3.1; both written to agree with
transformers' modeling_rope_utils.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.models.config import ModelConfig, RopeConfig
from octavo.models.errors import ModelError

_FIRST_TABLE = 4096


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the scaled inverse frequencies, float32 `[head_dim / 2]`.

    "dynamic" equals "default" here: below max_position_embeddings its formula leaves the base as
    it is, and ModelConfig.position_limit keeps sequences there.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(frequencies, rope)
    if rope.divisors is not None:
        frequencies = frequencies / torch.tensor(rope.divisors, dtype=torch.float32)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Divide long wavelengths by the factor, keep short ones, blend between."""
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_position / wavelengths
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


class RotaryTable:
    """cos and sin by position, grown in powers of two as longer sequences come."""

    def __init__(self, config: ModelConfig) -> None:
        self._frequencies = inverse_frequencies(config.rope, config.head_dim)
        self._limit = config.position_limit
        self._cos = self._sin = torch.empty(0)
        self._grow(min(_FIRST_TABLE, config.max_position_embeddings))

    def reaching(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin float32 `[N, D/2]`, a row per position, with N beyond all of positions `[T]`.

        Raises ModelError for a position below 0, or that dynamic scaling cannot reach.
        """
        low, high = (int(end) for end in positions.aminmax()) if positions.numel() else (0, -1)
        if low < 0:
            raise ModelError(f"position {low}: positions begin at 0")
        needed = high + 1
        if self._limit is not None and needed > self._limit:
            raise ModelError(
                f"position {needed - 1} is past max_position_embeddings {self._limit}: rope type "
                "'dynamic' would change the keys that are already cached"
            )
        if needed > self._cos.shape[0]:
            self._grow(needed)
        return self._cos, self._sin

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin `[T, 1, D/2]` in `dtype` for positions `[T]` int64. Raises as reaching()."""
        cos, sin = self.reaching(positions)
        cos = cos.index_select(0, positions).unsqueeze(1)  # one angle for all heads
        sin = sin.index_select(0, positions).unsqueeze(1)
        return cos.to(dtype), sin.to(dtype)

    def _grow(self, needed: int) -> None:
        size = 1 << max(needed - 1, 1).bit_length()
        angles = torch.arange(size, dtype=torch.float32)[:, None] * self._frequencies
        self._cos, self._sin = angles.cos(), angles.sin()
