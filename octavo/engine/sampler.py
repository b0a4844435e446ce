"""Logits to token ids. Rows are independent; randomness comes from a counter, not from a stream.

The uniform number behind token `position` of branch `index` of a request is Philox(key=(seed, index),
counter=position), made in octavo/ops: it does not depend on batch, order, chunks or preemption, so a seeded
request gives the same tokens whatever the load (as far as its logits are the same).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo import ops
from octavo.engine.params import SamplingParams
from octavo.engine.penalties import TokenCounts, penalise

NO_TOKEN = -1
"""What sample() gives where every token is ruled out, or logits are NaN."""


@dataclass(slots=True)
class Draw:
    """One token to sample: from logits row `row`, as token number `position` of branch `index`."""

    row: int
    params: SamplingParams
    seed: int
    index: int
    position: int
    banned: npt.NDArray[np.int64] | None = None  # ids that may not be sampled now
    counts: TokenCounts | None = None  # for penalties
    allowed: npt.NDArray[np.bool_] | None = None  # [V], if not every id may be sampled


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Sample one token id per draw from logits `[S, V]` float32, which is left unchanged.

    Order of the filters as in Hugging Face: logit_bias, penalties, ids ruled out, then temperature, top_k,
    top_p, min_p. NO_TOKEN where none is left, or logits are NaN. Cost: see octavo/ops/sampling.py.
    """
    picks = [_pick(i, draw.params, draw.seed, draw.index, draw.position) for i, draw in enumerate(draws)]
    return ops.sample(adjusted(logits, draws), picks)


def _pick(row: int, params: SamplingParams, seed: int = 0, index: int = 0, position: int = 0) -> ops.Pick:
    temperature = 0.0 if params.greedy else params.temperature
    top_k, top_p, min_p = max(params.top_k, 0), params.top_p, params.min_p
    return ops.Pick(row, temperature, top_k, top_p, min_p, seed % 2**64, index, position)


def adjusted(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Row i: the logits of draw i after logit_bias, penalties and what is ruled out. `[D, V]`."""
    wanted = [draw.row for draw in draws]
    rows = logits[wanted] if wanted != list(range(len(logits))) else logits
    biased = [(i, draw.params.logit_bias) for i, draw in enumerate(draws) if draw.params.logit_bias]
    penalised = [(i, draw.params, draw.counts) for i, draw in enumerate(draws) if draw.counts is not None]
    banned = [(i, draw.banned) for i, draw in enumerate(draws) if draw.banned is not None]
    formed = [(i, draw.allowed) for i, draw in enumerate(draws) if draw.allowed is not None]
    if rows is logits and (biased or penalised or banned or formed):
        rows = logits.clone()
    if biased:
        at = [i for i, bias in biased for _ in bias], [token for _, bias in biased for token in bias]
        rows[at] += torch.tensor([value for _, bias in biased for value in bias.values()])
    penalise(rows, penalised)
    if banned:
        lengths = [len(ids) for _, ids in banned]
        at_rows = torch.from_numpy(np.repeat([i for i, _ in banned], lengths))
        rows[at_rows, torch.from_numpy(np.concatenate([ids for _, ids in banned]))] = -torch.inf
    for i, allowed in formed:
        rows[i].masked_fill_(~torch.from_numpy(allowed), -torch.inf)
    return rows


def filtered_probabilities(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Probabilities float64 after temperature and filters, which add up to 1, and ids int64, ascending.

    logits `[V]` float32. Raises OpsError for a greedy temperature and for logits that leave no token.
    """
    ids, probabilities = ops.candidates(logits, _pick(0, params))
    return probabilities, ids
