"""Greedy output equals transformers' in float32, token for token, in any company.

A first difference is allowed only where the reference's two best logits lie within 1e-4.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from octavo import SamplingParams
from octavo.attention import make_backend
from octavo.models import LoadedModel, load_model
from tests.engine.helpers import Reference, greedy, idle, llm_on, over_admit, ties, tiny_checkpoint

STORIES = Path(__file__).resolve().parents[3] / "shared" / "models" / "stories260K-hf"
LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 63, 64, 65, 100, 128, 150, 200, 255, 300, 450, 600)
MATRIX = list(itertools.product((1, 7, 16, 64), (True, False), (32, 4096)))


def make_prompts(vocab: int, lengths: tuple[int, ...], seed: int = 5) -> list[list[int]]:
    """Random prompts, half of which begin with the same tokens."""
    rng = random.Random(seed)
    shared = [rng.randrange(vocab) for _ in range(max(lengths))]
    return [
        shared[: length * 2 // 3] + [rng.randrange(vocab) for _ in range(length - length * 2 // 3)]
        if i % 2
        else [rng.randrange(vocab) for _ in range(length)]
        for i, length in enumerate(lengths)
    ]


def params(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny_case(tiny: tuple[LoadedModel, Any]) -> tuple[list[list[int]], list[Reference]]:
    prompts = make_prompts(256, tuple(length for length in LENGTHS if length <= 300))
    return prompts, [greedy(tiny[1], prompt, 24) for prompt in prompts]


@pytest.mark.parametrize(("block_size", "caching", "budget"), MATRIX)
def test_tiny_model_in_every_setting(
    tiny: tuple[LoadedModel, Any], tiny_case: Any, block_size: int, caching: bool, budget: int
) -> None:
    """All at once, again with a warm cache, and alone: the same tokens as transformers."""
    prompts, references = tiny_case
    llm = llm_on(tiny[0], block_size=block_size, prefix_caching=caching, max_batched_tokens=budget)
    assert ties(llm.generate(prompts, params(24), use_tqdm=False), references) <= 1
    assert ties(llm.generate(prompts, params(24), use_tqdm=False), references) <= 1
    for prompt, reference in list(zip(prompts, references, strict=True))[::4]:
        assert ties(llm.generate(prompt, params(24), use_tqdm=False), [reference]) <= 1
    idle(llm)


@pytest.mark.parametrize("block_size", [1, 7])
@pytest.mark.parametrize("caching", [True, False])
def test_tiny_model_under_preemption(
    tiny: tuple[LoadedModel, Any], tiny_case: Any, block_size: int, caching: bool
) -> None:
    """A pool that holds little more than the longest prompt forces preemptions and changes no token."""
    prompts, references = tiny_case
    blocks = -(-(300 + 24) // block_size) + 2
    llm = llm_on(
        tiny[0], block_size=block_size, num_blocks=blocks, prefix_caching=caching, max_batched_tokens=64
    )
    over_admit(llm)
    assert ties(llm.generate(prompts, params(24), use_tqdm=False), references) <= 1
    assert llm.engine.scheduler.stats.preemptions > 0
    idle(llm)


def test_preemption_at_every_step_changes_nothing(tiny: tuple[LoadedModel, Any], tiny_case: Any) -> None:
    """Every running sequence preempted after every third step still ends with the same tokens."""
    prompts, references = tiny_case
    llm = llm_on(tiny[0], block_size=7, max_batched_tokens=40)
    scheduler, steps = llm.engine.scheduler, 0
    original = llm.engine.step

    def step() -> Any:
        nonlocal steps
        steps += 1
        deltas = original()
        if steps % 3 == 0:
            for branch in list(scheduler.running):
                scheduler.preempt(branch)
        llm.engine.pool.check()
        return deltas

    llm.engine.step = step  # type: ignore[method-assign]
    assert ties(llm.generate(prompts, params(24), use_tqdm=False), references) <= 1
    assert scheduler.stats.preemptions > 50
    idle(llm)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("switch", [True, False])
def test_a_window_acts_only_while_its_switch_is_on(tmp_path: Path, switch: bool, backend: str) -> None:
    """A checkpoint that names a window of 8: off, a prompt of 40 has full attention's tokens, and on it has
    transformers' windowed ones, which are others."""
    options = {"family": "Qwen2", "max_window_layers": 0}
    _, full = tiny_checkpoint(tmp_path / "full", **options)
    path, model = tiny_checkpoint(
        tmp_path / "windowed", sliding_window=8, use_sliding_window=switch, **options
    )
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "sliding_window": 8, "layer_types": None}))
    prompts = make_prompts(256, (40, 7, 55))
    llm = llm_on(load_model(path), make_backend(backend), block_size=4)
    outputs = llm.generate(prompts, params(12), use_tqdm=False)
    assert ties(outputs, [greedy(model, prompt, 12) for prompt in prompts]) == 0
    same = [
        output.outputs[0].token_ids == greedy(full, prompt, 12).tokens
        for output, prompt in zip(outputs, prompts, strict=True)
    ]
    assert all(same) if not switch else not any(same)
    idle(llm)


@pytest.mark.skipif(not STORIES.is_dir(), reason=f"{STORIES} is not there")
def test_trained_tiny_model_tells_its_story() -> None:
    """stories260K from prompt ids [1], greedy, gives exactly the golden ids and text."""
    golden = json.loads((STORIES / "golden.json").read_text())
    llm = llm_on(load_model(STORIES))
    count = len(golden["greedy_ids"])
    (output,) = llm.generate(golden["prompt_ids"], params(count), use_tqdm=False)
    assert output.outputs[0].token_ids == golden["greedy_ids"]


@pytest.mark.model
def test_default_model_in_two_settings(smollm2: LoadedModel, smollm2_reference: Any) -> None:
    """smollm2, eight prompts at once: small chunks over odd blocks with preemptions, and the default."""
    prompts = make_prompts(smollm2.config.vocab_size, (1, 5, 16, 17, 33, 64, 90, 150))
    references = [greedy(smollm2_reference, prompt, 24) for prompt in prompts]
    small = over_admit(llm_on(smollm2, block_size=7, num_blocks=25, max_batched_tokens=32))
    assert ties(small.generate(prompts, params(24), use_tqdm=False), references) <= 1
    assert small.engine.scheduler.stats.preemptions > 0
    idle(small)
    usual = llm_on(smollm2, kv_memory="256MiB")
    assert ties(usual.generate(prompts, params(24), use_tqdm=False), references) <= 1
    idle(usual)


@pytest.mark.proof
@pytest.mark.model
def test_default_model_in_every_setting(smollm2: LoadedModel, smollm2_reference: Any) -> None:
    """smollm2, 20 prompts of 1..600 tokens: alone and all at once, every block size, cache on and off,
    chunk budgets 32 and 4096, and pools so small that preemptions happen."""
    prompts = make_prompts(smollm2.config.vocab_size, LENGTHS)
    long = [greedy(smollm2_reference, prompt, 160) for prompt in prompts]
    short = [Reference(reference.tokens[:32], reference.gaps[:32]) for reference in long]
    total = 0
    for block_size, caching, budget in MATRIX:
        options = {"block_size": block_size, "prefix_caching": caching, "max_batched_tokens": budget}
        llm = llm_on(smollm2, kv_memory="512MiB", **options)
        together = ties(llm.generate(prompts, params(32), use_tqdm=False), short)
        alone = sum(
            ties(llm.generate(prompt, params(32), use_tqdm=False), [reference])
            for prompt, reference in zip(prompts, short, strict=True)
        )
        idle(llm)
        tight = over_admit(llm_on(smollm2, num_blocks=-(-768 // block_size), **options))
        squeezed = ties(tight.generate(prompts, params(160), use_tqdm=False), long)
        preemptions = tight.engine.scheduler.stats.preemptions
        idle(tight)
        total += together + alone + squeezed
        print(
            f"block {block_size:2} cache {caching!s:5} budget {budget:4}: differences at ties: together "
            f"{together}, alone {alone}, small pool {squeezed} ({preemptions} preemptions)",
            flush=True,
        )
        assert preemptions > 0
    print(f"differences at ties in all: {total} of {len(MATRIX) * 3 * len(prompts)} outputs")
