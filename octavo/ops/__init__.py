"""Operations of a decoder step besides attention, in C++ where it is built. See docs/ops.md."""

from __future__ import annotations

from octavo.ops.compiled import ISAS, ops_note
from octavo.ops.errors import OpsError
from octavo.ops.norm import add_rms_norm, rms_norm, swiglu
from octavo.ops.sampling import Pick, candidates, sample

__all__ = [
    "ISAS",
    "OpsError",
    "Pick",
    "add_rms_norm",
    "candidates",
    "ops_note",
    "rms_norm",
    "sample",
    "swiglu",
]
