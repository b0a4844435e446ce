"""The compiled operations, one object per instruction set; none where the extension is not built.

ISAS   fastest first     kernels(None) -> of ISAS[0]     kernels("avx2")     kernels(None) -> None: torch
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from octavo.ops.errors import IsaUnavailable

if TYPE_CHECKING:
    from octavo.attention._cpu import Ops

try:
    from octavo.attention import _cpu
except ImportError as error:
    ISAS: tuple[str, ...] = ()
    _missing = str(error)
else:
    ISAS = tuple(_cpu.ops_isas())
    _missing = ""

CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@cache
def kernels(isa: str | None = None) -> Ops | None:
    """The operations for an instruction set, by default the fastest; None where none is built.

    Raises IsaUnavailable for an isa that is not in ISAS.
    """
    if isa is None and not ISAS:
        return None
    if isa is not None and isa not in ISAS:
        raise IsaUnavailable(
            f"instruction set {isa} is not available: this machine has {', '.join(ISAS) or 'none'}"
        )
    return _cpu.Ops(isa or ISAS[0])


def ops_note() -> str:
    """Say what runs norms, SwiGLU and sampling here and why, for a start-up table."""
    if ISAS:
        return f"cpu ({ISAS[0]})"
    return f"torch, and numpy for sampling (compiled kernels are not available: {_missing})"
