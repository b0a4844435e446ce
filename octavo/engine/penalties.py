"""Which tokens a sequence has had, and what that does to its logits.

    ids     [ distinct prompt tokens ... | tokens first seen in the output ... ]   in order of appearance
    counts  [ 0 0 0 ...              1 0 | 3 1 1 ...                           ]   times in the output

Kept as tokens come, O(1) each, and applied to all rows of a step in one gather and one scatter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.engine.params import SamplingParams


class TokenCounts:
    """The distinct tokens of one sequence, and how often each is in its output."""

    def __init__(self, prompt: Sequence[int]) -> None:
        ids = np.array(list(dict.fromkeys(prompt)), np.int64)
        self._at = {token: at for at, token in enumerate(ids.tolist())}
        self._size = len(ids)
        self._ids = np.concatenate([ids, np.zeros(32, np.int64)])
        self._counts = np.zeros(len(self._ids), np.float32)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The distinct tokens: a view that the next add() may move."""
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """Times that each of `ids` is in the output."""
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        """Count an output token. O(1), amortised."""
        at = self._at.setdefault(token, self._size)
        if at == self._size:
            if at == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros(at, np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(at, np.float32)])
            self._ids[at] = token
            self._size += 1
        self._counts[at] += 1

    def copy(self) -> TokenCounts:
        """The same counts, to go on apart."""
        twin = TokenCounts.__new__(TokenCounts)
        twin._at, twin._size = dict(self._at), self._size
        twin._ids, twin._counts = self._ids.copy(), self._counts.copy()
        return twin


def penalise(logits: Tensor, rows: Sequence[tuple[int, SamplingParams, TokenCounts]]) -> None:
    """Change logits `[S, V]` in place: repetition_penalty, then frequency_ and presence_penalty.

    rows: the logits row, the parameters and the counts of each sequence concerned. Repetition is as in
    Hugging Face's RepetitionPenaltyLogitsProcessor, the other two as the OpenAI API defines them. A row's
    share of the cost is its number of distinct tokens.
    """
    if not rows:
        return
    sizes = [len(counts.ids) for _, _, counts in rows]

    def spread(values: Sequence[float], kind: type) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, kind), sizes))

    at = (
        spread([row for row, _, _ in rows], np.int64),
        torch.from_numpy(np.concatenate([counts.ids for _, _, counts in rows])),
    )
    times = torch.from_numpy(np.concatenate([counts.counts for _, _, counts in rows]))
    repetition = spread([params.repetition_penalty for _, params, _ in rows], np.float32)
    frequency = spread([params.frequency_penalty for _, params, _ in rows], np.float32)
    presence = spread([params.presence_penalty for _, params, _ in rows], np.float32)
    values = logits[at]
    values = torch.where(values < 0, values * repetition, values / repetition)
    logits[at] = values - frequency * times - presence * (times > 0)
