"""Logprobs of the model's own distribution: log_softmax in float32 of logits as the model gave them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class TokenLogprob(NamedTuple):
    """A token and the natural logarithm of its probability; finite."""

    token_id: int
    logprob: float


class TokenLogprobs(NamedTuple):
    """The token that came, its rank (1 is the likeliest), and the likeliest tokens in order.

    top: as many as were asked for; the token itself is among them only if it belongs there.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[TokenLogprob, ...]


def token_logprobs(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    """Judge `tokens[i]` by row i of logits `[S, V]`, with the `tops[i]` likeliest beside it.

    O(S V); the result's size does not depend on V. Of equal logits the one with the least id counts as
    the likelier.
    """
    if not tokens:
        return []
    scores = logits.float().log_softmax(dim=-1)
    chosen = scores.gather(1, torch.tensor(tokens).view(-1, 1))  # [S, 1]
    before = torch.arange(scores.shape[1]) < torch.tensor(tokens).view(-1, 1)
    ranks = (scores > chosen).sum(-1) + ((scores == chosen) & before).sum(-1) + 1
    most = min(max(tops), scores.shape[1])
    best = scores.topk(most)
    return [
        TokenLogprobs(token, logprob, rank, tuple(map(TokenLogprob, ids[:top], values[:top])))
        for token, logprob, rank, ids, values, top in zip(
            tokens, chosen[:, 0].tolist(), ranks.tolist(), best.indices.tolist(), best.values.tolist(), tops,
            strict=True,
        )
    ]  # fmt: skip
