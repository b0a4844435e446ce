"""Filters against transformers' processors, edge values, and the distribution that comes out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from octavo.engine.params import SamplingParams
from octavo.engine.sampler import Draw, filtered_probabilities, sample
from octavo.ops.sampling import uniform


def draw(params: SamplingParams, row: int = 0, position: int = 0, **more: object) -> Draw:
    return Draw(row, params, seed=5, index=0, position=position, **more)


@pytest.mark.parametrize("top_k", [0, 1, 5, 40])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.1, 1.0])
def test_filters_equal_transformers(top_k: int, top_p: float, min_p: float) -> None:
    """The tokens that remain, and their shares, are those of temperature, top_k, top_p, min_p in turn."""
    generator = torch.Generator().manual_seed(top_k)
    for _ in range(20):
        logits = torch.randn(100, generator=generator) * 3
        scores = TemperatureLogitsWarper(0.7)(None, logits[None].clone())
        if top_k:
            scores = TopKLogitsWarper(top_k)(None, scores)
        if top_p < 1:
            scores = TopPLogitsWarper(top_p)(None, scores)
        if min_p:
            scores = MinPLogitsWarper(min_p)(None, scores)
        want = scores[0].double().softmax(-1)
        probs, order = filtered_probabilities(
            logits, SamplingParams(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p)
        )
        got = torch.zeros(100, dtype=torch.float64)
        got[order if order is not None else torch.arange(100)] = probs / probs.sum()
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-10, 1e-6, 1e-3, 1e-2])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    """No overflow, no NaN: the likeliest token."""
    logits = torch.randn(50, 1000, generator=torch.Generator().manual_seed(1)) * 10
    params = SamplingParams(temperature=temperature)
    got = sample(logits, [draw(params, row) for row in range(50)])
    gaps = logits.topk(2).values
    for row, token in enumerate(got):
        if temperature < 1e-2 or gaps[row, 0] - gaps[row, 1] > 1:
            assert token == int(logits[row].argmax())


def test_mixed_rows_and_large_top_k() -> None:
    """Greedy and sampled rows in one call, top_k above the vocabulary: each as if alone."""
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(2))
    params = [
        SamplingParams(temperature=0, top_k=3),
        SamplingParams(top_k=10**7),
        SamplingParams(top_p=0.5),
        SamplingParams(),
    ]
    draws = [draw(p, row, row) for row, p in enumerate(params)]
    before = logits.clone()
    together = sample(logits, draws)
    assert together == [sample(logits, [d])[0] for d in draws]
    assert together[0] == int(logits[0].argmax())
    assert torch.equal(logits, before)


def test_banned_ids_are_never_sampled() -> None:
    """Neither greedily nor by chance."""
    logits = torch.zeros(1, 4)
    logits[0, 2] = 50
    for params in (SamplingParams(temperature=0), SamplingParams()):
        draws = [draw(params, 0, i, banned=np.array([2])) for i in range(50)]
        assert 2 not in sample(logits, draws)


def test_the_distribution_is_the_softmax() -> None:
    """20,000 draws over 6 tokens, one of which top_k cuts: chi-square far below its 1e-6 quantile."""
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -30.0]])
    params = SamplingParams(temperature=0.8, top_k=5)
    tokens = sample(logits, [draw(params, 0, position) for position in range(20_000)])
    counts = torch.bincount(torch.tensor(tokens), minlength=6).double()
    want = (logits[0, :5] / 0.8).double().softmax(-1) * 20_000
    assert counts[5] == 0
    assert ((counts[:5] - want) ** 2 / want).sum() < 33.4  # 4 degrees of freedom


def test_uniform_depends_on_all_three_and_on_nothing_else() -> None:
    """Equal keys give equal numbers; any change gives another; all lie in [0, 1)."""
    numbers = [uniform(s, i, p) for s in (-1, 0, 2**64 - 2) for i in (0, 1) for p in (0, 1, 2)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    assert uniform(3, 1, 2) == uniform(3, 1, 2)
