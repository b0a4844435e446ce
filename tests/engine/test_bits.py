"""The whole engine gives a request the same bits in any company, with every format of weights.

Bits show in the logprobs: floats that are compared as they are, without a tolerance.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("octavo.attention._cpu")

from octavo import SamplingParams
from octavo.engine.llm import LLM
from octavo.engine.outputs import RequestOutput
from octavo.models import LoadedModel, load_model
from tests.engine.helpers import idle, llm_on, tiny_checkpoint
from tests.engine.test_greedy import make_prompts

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=3)


def bits(outputs: Sequence[RequestOutput]) -> list[object]:
    """Tokens and logprobs of every output."""
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def run(llm: LLM, prompts: Sequence[list[int]]) -> list[object]:
    """All at once."""
    return bits(llm.generate(prompts, PARAMS, use_tqdm=False))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("bits"))[0]


@pytest.mark.parametrize("weights", ["float32", "int8", "int4"])
def test_tiny_model_in_any_company(checkpoint: Path, weights: str) -> None:
    """Alone, in a batch, in chunks, after preemptions, on cache hits, on two threads: the same bits."""
    check(load_model(checkpoint, weights=weights), make_prompts(256, (1, 7, 16, 33, 100, 150)))


@pytest.mark.model
def test_default_model_in_any_company() -> None:
    """The default model as it is stored."""
    check(load_model("smollm2"), make_prompts(40_000, (5, 17, 64, 90)))


def preempt_often(llm: LLM) -> None:
    """Preempt every running sequence after every third step."""
    scheduler, original, steps = llm.engine.scheduler, llm.engine.step, itertools.count()

    def step() -> Any:
        deltas = original()
        if next(steps) % 3 == 0:
            for branch in list(scheduler.running):
                scheduler.preempt(branch)
        return deltas

    llm.engine.step = step  # type: ignore[method-assign]


def check(model: LoadedModel, prompts: list[list[int]]) -> None:
    """Every company gives what each prompt gives alone."""
    before = torch.get_num_threads()
    try:
        plain = llm_on(model, prefix_caching=False, threads=1)
        alone = [run(plain, [prompt])[0] for prompt in prompts]
        assert run(llm_on(model, prefix_caching=False, threads=2), prompts) == alone
        assert run(llm_on(model, prefix_caching=False, max_batched_tokens=13, threads=2), prompts) == alone
        preempted = llm_on(model, block_size=7, max_batched_tokens=40, threads=1)
        preempt_often(preempted)
        assert run(preempted, prompts) == alone
        assert preempted.engine.scheduler.stats.preemptions > 10
        caching = llm_on(model, threads=2)
        assert run(caching, prompts) == alone
        assert run(caching, prompts) == alone
        assert sum(output.num_cached_tokens for output in caching.generate(prompts, PARAMS)) > 0
        idle(caching)
    finally:
        torch.set_num_threads(before)
