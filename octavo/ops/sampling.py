"""Which token each draw takes, for all rows of a step in one call.

    logits [S, V] --temperature--top_k--top_p--min_p--> candidates, ascending ids, with whole-number weights
                                                         |  u = Philox(key=(seed, branch), counter=position)
                                                         v
                                      the first id whose running sum of weights exceeds u * their sum

A token's weight is e^((logit - max) / temperature) in units of 2^-40; a token under half a unit has none and
is never drawn. Sums of whole numbers have one value in any order, so a row's token depends neither on other
rows, nor on threads, nor on the instruction set. sorting.py is the plain version, with a full sort; it
serves where the kernels are not built.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.ops.compiled import kernels
from octavo.ops.errors import OpsError
from octavo.ops.sorting import candidates_by_sorting, pick_by_sorting

MAX_VOCAB = 2**22  # the sum of all weights stays under 2^63


class Pick(NamedTuple):
    """One token to take from logits row `row`.

    temperature 0 takes the likeliest. top_k 0 and top_p 1 and min_p 0 keep all. seed, branch and position
    key the random number.
    """

    row: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    branch: int = 0
    position: int = 0


def sample(logits: Tensor, picks: Sequence[Pick], *, isa: str | None = None) -> list[int]:
    """One token id per pick from logits `[S, V]` float32, which are only read. Equal logits: lower ids first.

    -1 for a row with NaN, +infinity or nothing above -infinity: callers must look. Cost: one look at a row,
    and a second one with weights where neither top_k nor min_p spares it. Raises OpsError for a row outside
    the logits.
    """
    _check(logits)
    count = len(logits)
    for pick in picks:
        if not 0 <= pick.row < count:
            raise OpsError(f"row {pick.row} is outside the logits' 0..{count - 1}")
    ops = kernels(isa) if logits.device.type == "cpu" and logits.stride(1) == 1 else None
    if ops is None:
        rows = logits.cpu().numpy()
        return [pick_by_sorting(rows[pick.row], pick) for pick in picks]
    return ops.sample(logits.data_ptr(), logits.stride(0), logits.shape[1], picks, torch.get_num_threads())


def candidates(logits: Tensor, pick: Pick, *, isa: str | None = None) -> tuple[Tensor, Tensor]:
    """The tokens that a pick chooses among: ids `[n]` int64, ascending, and probabilities `[n]` float64.

    logits `[V]` float32; the pick's row and key are not used, and its temperature must be above 0. The
    probabilities add up to 1. Raises OpsError for logits of which `sample` gives -1.
    """
    _check(logits[None])
    if not pick.temperature > 0:
        raise OpsError(
            f"temperature {pick.temperature} has no candidates but the likeliest; give one above 0"
        )
    ops = kernels(isa) if logits.device.type == "cpu" and logits.stride(0) == 1 else None
    if ops is None:
        found = candidates_by_sorting(logits.cpu().numpy(), pick)
        if found is None:
            raise _bad_row()
        ids, weights = (torch.from_numpy(each) for each in found)
    else:
        ids, weights = torch.empty(2, len(logits), dtype=torch.int64)
        count = ops.candidates(logits.data_ptr(), len(logits), pick, ids.data_ptr(), weights.data_ptr())
        if count < 0:
            raise _bad_row()
        ids, weights = ids[:count].clone(), weights[:count]
    return ids, weights.double() / float(weights.sum())


def uniform(seed: int, branch: int, position: int) -> float:
    """The number in [0, 1) behind a pick; seed is taken modulo 2^64."""
    key = np.array([seed % 2**64, branch], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=[0, position, 0, 0])).random())


def _check(logits: Tensor) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32 or not 0 < logits.shape[1] <= MAX_VOCAB:
        raise OpsError(
            f"logits are {logits.dtype} of shape {tuple(logits.shape)}; they must be float32 of shape "
            f"[rows, vocabulary], and the vocabulary 1 to {MAX_VOCAB}"
        )


def _bad_row() -> OpsError:
    return OpsError("the logits have NaN or +infinity, or no token above -infinity")
