"""Logits to token ids. Rows are independent; randomness comes from a counter, not from a stream.

The uniform number behind token `position` of branch `index` of a request is Philox(key=(seed, index),
counter=position): it does not depend on batch, order, chunks or preemption, so a seeded request gives
the same tokens whatever the load (as far as its logits are the same).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.engine.params import SamplingParams
from octavo.engine.penalties import TokenCounts, penalise


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to sample: from logits row `row`, as token number `position` of branch `index`."""

    row: int
    params: SamplingParams
    seed: int
    index: int
    position: int
    banned: npt.NDArray[np.int64] | None = None  # ids that may not be sampled now
    counts: TokenCounts | None = None  # for penalties


def uniform(seed: int, index: int, position: int) -> float:
    """The number in [0, 1) that decides this token."""
    key = np.array([seed % 2**64, index], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=[0, position, 0, 0])).random())


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Sample one token id per draw from logits `[S, V]` float32, which is left unchanged.

    Order of the filters as in Hugging Face: logit_bias, penalties, banned ids, then temperature, top_k,
    top_p, min_p. Cost: a pass over each row; a sort of those with top_k or top_p.
    """
    rows = adjusted(logits, draws)
    result = [0] * len(draws)
    greedy = [i for i, draw in enumerate(draws) if draw.params.greedy]
    if greedy:
        for i, token in zip(greedy, rows[greedy].argmax(dim=-1).tolist(), strict=True):
            result[i] = token
    for i, draw in enumerate(draws):
        if not draw.params.greedy:
            result[i] = _sample_row(rows[i], draw)
    return result


def adjusted(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Row i: the logits of draw i after logit_bias, penalties and banned ids. `[D, V]`, logits unchanged."""
    wanted = [draw.row for draw in draws]
    rows = logits[wanted] if wanted != list(range(len(logits))) else logits
    biased = [(i, draw.params.logit_bias) for i, draw in enumerate(draws) if draw.params.logit_bias]
    penalised = [(i, draw.params, draw.counts) for i, draw in enumerate(draws) if draw.counts is not None]
    banned = [(i, draw.banned) for i, draw in enumerate(draws) if draw.banned is not None]
    if rows is logits and (biased or penalised or banned):
        rows = logits.clone()
    if biased:
        at = [i for i, bias in biased for _ in bias], [token for _, bias in biased for token in bias]
        rows[at] += torch.tensor([value for _, bias in biased for value in bias.values()])
    penalise(rows, penalised)
    if banned:
        lengths = [len(ids) for _, ids in banned]
        at_rows = torch.from_numpy(np.repeat([i for i, _ in banned], lengths))
        rows[at_rows, torch.from_numpy(np.concatenate([ids for _, ids in banned]))] = -torch.inf
    return rows


def filtered_probabilities(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor | None]:
    """Probabilities after temperature and filters, not renormalised, and their token ids.

    logits `[V]`. Sorted descending with ids where top_k or top_p needed a sort; else in order, None.
    """
    scaled = (logits - logits.max()) / params.temperature
    order: Tensor | None = None
    size = len(logits)
    if 0 < params.top_k < size:
        scaled, order = scaled.topk(params.top_k)
    elif params.top_p < 1:
        scaled, order = scaled.sort(descending=True, stable=True)
    probs = scaled.softmax(dim=-1, dtype=torch.float64)
    if params.top_p < 1:
        before = probs.cumsum(dim=-1) - probs
        probs = torch.where(before < params.top_p, probs, 0.0)
        probs[0] = max(float(probs[0]), torch.finfo(torch.float64).tiny)
    if params.min_p > 0:
        probs = torch.where(probs >= params.min_p * probs.max(), probs, 0.0)
    return probs, order


def _sample_row(logits: Tensor, draw: Draw) -> int:
    probs, order = filtered_probabilities(logits, draw.params)
    cumulative = probs.cumsum(dim=-1)
    target = uniform(draw.seed, draw.index, draw.position) * cumulative[-1]
    # The first entry whose cumulative sum exceeds the target; entries of probability 0 never do first.
    at = int(torch.searchsorted(cumulative, target, right=True))
    if at >= len(probs):  # rounding put the target at the very end
        at = int(probs.nonzero()[-1])
    return int(order[at]) if order is not None else at
