"""Logprobs of output and prompt against transformers, in every setting that could disturb them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from octavo import SamplingParams
from octavo.engine.logprobs import TokenLogprobs, token_logprobs
from octavo.models import LoadedModel
from tests.engine.helpers import idle, llm_on
from tests.models.helpers import expected_logits

Tiny = tuple[LoadedModel, Any]
PROMPT = [(i * 37 + i // 5) % 250 for i in range(70)]


def assert_judged(model: Any, tokens: Sequence[int], first: int, found: Sequence[TokenLogprobs], top: int):
    """`found` are the logprobs of tokens[first:], each by the logits of what precedes it."""
    scores = expected_logits(model, tokens).log_softmax(-1)
    assert len(found) == len(tokens) - first
    for position, judged in enumerate(found, first):
        row = scores[position - 1]
        assert judged.token_id == tokens[position]
        assert math.isclose(judged.logprob, row[tokens[position]], abs_tol=1e-4)
        assert abs(judged.rank - int((row > row[tokens[position]]).sum()) - 1) <= 1  # a near tie
        assert len(judged.top) == top
        best = row.topk(top).values.tolist()
        assert all(math.isclose(a, b.logprob, abs_tol=1e-4) for a, b in zip(best, judged.top, strict=True))
        assert all(math.isclose(row[b.token_id], b.logprob, abs_tol=1e-4) for b in judged.top)


def test_ranks_and_ties() -> None:
    """Rank 1 is the argmax; equal logits rank by id; top 0 gives none; top above V gives V."""
    logits = torch.tensor([[1.0, 3.0, 3.0, -50.0]] * 4)
    found = token_logprobs(logits, [1, 2, 0, 3], [0, 2, 4, 9])
    assert [f.rank for f in found] == [1, 2, 3, 4]
    assert [len(f.top) for f in found] == [0, 2, 4, 4]
    assert all(math.isfinite(f.logprob) for f in found)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5, "top_p": 0.1}, {"top_k": 1}])
def test_logprobs_are_of_the_raw_distribution(tiny: Tiny, options: dict[str, Any]) -> None:
    """Temperature, filters, a bias of -100 and bad words change the tokens, not what is reported."""
    llm = llm_on(tiny[0])
    params = SamplingParams(
        seed=2, max_tokens=12, logprobs=5, ignore_eos=True, logit_bias={7: -100, 9: 4.0},
        bad_words=["a"], repetition_penalty=1.2, **options,
    )  # fmt: skip
    out = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
    assert out.logprobs is not None
    assert_judged(tiny[1], PROMPT + out.token_ids, len(PROMPT), out.logprobs, 5)
    assert math.isclose(out.cumulative_logprob or 0, sum(judged.logprob for judged in out.logprobs))


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("chunk", [8, 2048])
def test_prompt_logprobs_in_chunks_and_on_a_warm_cache(tiny: Tiny, caching: bool, chunk: int) -> None:
    """Every position of the prompt, once, though the cache had the whole of it; and the output is that of
    a request that used the cache."""
    llm = llm_on(tiny[0], block_size=16, prefix_caching=caching, max_batched_tokens=chunk)
    plain = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    want = llm.generate(PROMPT, plain, use_tqdm=False)[0].outputs[0].token_ids
    scored = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, prompt_logprobs=3, n=2)
    for _ in range(2):
        (out,) = llm.generate(PROMPT, scored, use_tqdm=False)
        assert out.num_cached_tokens == 0
        assert out.prompt_logprobs is not None
        assert out.prompt_logprobs[0] is None
        assert_judged(tiny[1], PROMPT, 1, out.prompt_logprobs[1:], 3)  # type: ignore[arg-type]
        assert [o.token_ids for o in out.outputs] == [want, want]
    assert llm.generate(PROMPT, plain, use_tqdm=False)[0].num_cached_tokens == (69 if caching else 0)
    idle(llm)


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_in_the_middle_of_a_prompt_loses_no_position(tiny: Tiny, caching: bool) -> None:
    """Preempted again and again while the prompt is computed, in chunks of 8: all positions as undisturbed,
    and with the cache none is computed twice."""
    llm = llm_on(tiny[0], block_size=4, max_batched_tokens=8, prefix_caching=caching)
    scheduler, step, steps = llm.engine.scheduler, llm.engine.step, 0

    def preempting() -> Any:
        nonlocal steps
        deltas = step()
        steps += 1
        if steps in ((3, 5, 8, 13) if caching else (3,)):
            for branch in list(scheduler.running):
                scheduler.preempt(branch)
        return deltas

    llm.engine.step = preempting  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, prompt_logprobs=2, logprobs=2)
    out = llm.generate(PROMPT, params, use_tqdm=False)[0]
    assert scheduler.stats.preemptions >= 1
    assert out.prompt_logprobs is not None
    assert out.outputs[0].logprobs is not None
    assert_judged(tiny[1], PROMPT, 1, out.prompt_logprobs[1:], 2)  # type: ignore[arg-type]
    assert_judged(tiny[1], PROMPT + out.outputs[0].token_ids, len(PROMPT), out.outputs[0].logprobs, 2)
    if caching:
        assert scheduler.stats.recomputed <= 4
    idle(llm)


def test_only_the_prompt_is_judged(tiny: Tiny) -> None:
    """max_tokens 0 with prompt_logprobs gives the prompt's and no token; without, it is refused."""
    llm = llm_on(tiny[0])
    (out,) = llm.generate(PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)
    assert (out.outputs[0].token_ids, out.outputs[0].finish_reason) == ([], "length")
    assert_judged(tiny[1], PROMPT, 1, out.prompt_logprobs[1:], 0)  # type: ignore[index]
    one = llm.generate([3], SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)[0]
    assert one.prompt_logprobs == [None]
    with pytest.raises(ValueError, match="max_tokens must be an integer from 1"):
        SamplingParams(max_tokens=0)


def test_best_of_gives_the_likeliest(tiny: Tiny) -> None:
    """Of eight seeded samples the three with the greatest cumulative logprob, likeliest first, numbered
    from 0, each with its own text and reason; best_of = n streams as n does."""
    llm = llm_on(tiny[0])
    options: dict[str, Any] = {"temperature": 1.0, "seed": 6, "max_tokens": 12, "logprobs": 0}
    every = llm.generate(PROMPT, SamplingParams(n=8, **options), use_tqdm=False)[0].outputs
    best = llm.generate(PROMPT, SamplingParams(n=3, best_of=8, **options), use_tqdm=False)[0].outputs
    want = sorted(every, key=lambda o: -(o.cumulative_logprob or 0))[:3]
    assert [o.index for o in best] == [0, 1, 2]
    assert [(o.token_ids, o.text, o.finish_reason) for o in best] == [
        (o.token_ids, o.text, o.finish_reason) for o in want
    ]
    assert len({tuple(o.token_ids) for o in every}) == 8
    same = llm.generate(PROMPT, SamplingParams(n=8, best_of=8, **options), use_tqdm=False)[0].outputs
    assert [o.token_ids for o in same] == [o.token_ids for o in every]
    idle(llm)
