"""A draft model changes no token, whatever it guesses; its KV is paged, reused, rolled back, given back."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo import SamplingParams
from octavo.engine import ConfigError, Engine, EngineConfig, GenerationFailed
from octavo.engine.guess import Worth
from octavo.engine.llm import LLM
from octavo.models import LoadedModel, load_model
from tests.engine.helpers import idle, llm_on, llm_with_draft, over_admit, tiny_checkpoint
from tests.engine.test_speculation import mixed_requests, texts

Tiny = tuple[LoadedModel, Any]
PROMPTS = [[7, 30, 45, 9, 100 + i, 7, 7] for i in range(3)]


def greedy(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **more)


def ids(llm: LLM, prompts: Any, params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [o.token_ids for output in outputs for o in output.outputs]


def watch(llm: LLM) -> list[int]:
    """Check both pools after every step; returns the number of tokens of each of the draft's passes."""
    engine, passes = llm.engine, []
    step, draft = engine.step, engine.draft
    assert draft is not None
    forward = draft._runner.forward

    def checked() -> Any:
        deltas = step()
        engine.pool.check()
        draft.pool.check()
        return deltas

    def counted(batch: Any, tables: Any) -> Any:
        passes.append(sum(len(entry.tokens) for entry in batch.entries))
        return forward(batch, tables)

    engine.step = checked  # type: ignore[method-assign]
    draft._runner.forward = counted  # type: ignore[method-assign]
    return passes


def idle_both(llm: LLM) -> None:
    """Nothing is held in either pool, and nothing is kept of any branch."""
    idle(llm)
    draft = llm.engine.draft
    assert draft is not None
    stats = draft.pool.stats()
    assert (stats.held, stats.sequences, len(draft._owns)) == (0, 0, 0)
    draft.pool.check()


def test_a_model_is_its_own_best_draft(tiny: Tiny) -> None:
    """Every greedy guess comes true: far fewer steps than tokens, the same tokens, and counters that say
    so."""
    llm = llm_with_draft(tiny[0], tiny[0])
    passes, steps, step = watch(llm), 0, llm.engine.step

    def counted() -> Any:
        nonlocal steps
        steps += 1
        return step()

    llm.engine.step = counted  # type: ignore[method-assign]
    (output,) = llm.generate(PROMPTS[0], greedy(60), use_tqdm=False)
    assert output.outputs[0].token_ids == ids(llm_on(tiny[0]), PROMPTS[0], greedy(60))[0]
    assert output.num_accepted == output.num_guessed == 60 - steps
    assert steps <= 1 + 60 // 3
    stats = llm.engine.scheduler.stats
    assert (stats.guessed, stats.accepted) == (output.num_guessed, output.num_accepted)
    assert len(passes) == output.num_guessed  # a pass each: none was wasted
    idle_both(llm)


def test_with_the_same_random_numbers_it_guesses_samples_too(tiny: Tiny) -> None:
    """At temperature 1 with penalties the model's own guesses come true as well."""
    params = SamplingParams(seed=3, max_tokens=40, ignore_eos=True, presence_penalty=0.5, top_p=0.9)
    llm = llm_with_draft(tiny[0], tiny[0])
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == ids(llm_on(tiny[0]), PROMPTS, params)
    assert all(o.num_accepted == o.num_guessed > 20 for o in outputs)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix_caching": False},
        {"block_size": 3, "num_blocks": 26, "max_batched_tokens": 32},
        {"block_size": 1, "num_blocks": 90, "speculate": 7},
    ],
)
def test_nothing_changes(
    tiny: Tiny, other_tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, own: bool, options: dict[str, Any]
) -> None:
    """Nine unlike requests at once - penalties, bans, n, stops, a form - greedy and sampled, with a draft
    that is mostly right and one that is hardly ever, asked at random, with preemptions too."""
    rng = random.Random(4)
    monkeypatch.setattr(Worth, "count", lambda self, company, price: rng.randint(0, self._limit))
    prompts, params = mixed_requests()
    plain = llm_on(tiny[0]).generate(prompts, params, use_tqdm=False)
    llm = llm_with_draft(tiny[0], tiny[0] if own else other_tiny, **options)
    if "num_blocks" in options:
        over_admit(llm)
    watch(llm)
    for _ in range(2):  # the second time both caches are warm
        guessed = llm.generate(prompts, params, use_tqdm=False)
        assert texts(guessed) == texts(plain)
        accepted, tried = sum(o.num_accepted for o in guessed), sum(o.num_guessed for o in guessed)
        assert tried > 40
        assert accepted > 0.5 * tried if own else accepted < 0.3 * tried, (accepted, tried)
    if "num_blocks" in options:
        assert llm.engine.scheduler.stats.preemptions > 0
    idle_both(llm)


def test_its_cache_is_reused(tiny: Tiny) -> None:
    """The draft computes a prompt once: what follows takes it from its own cache, but not across salts."""
    llm, prompt = llm_with_draft(tiny[0], tiny[0]), list(range(100))
    passes = watch(llm)
    ids(llm, prompt, greedy(8))
    first = sum(passes)
    assert first >= 100
    passes.clear()
    ids(llm, prompt, greedy(8))
    assert sum(passes) < 20
    passes.clear()
    request = llm.engine.add_request(prompt, greedy(8), salt="other")
    while llm.engine.has_work:
        llm.engine.step()
    assert request >= 0
    assert sum(passes) >= 100
    idle_both(llm)


def test_a_long_prompt_takes_it_several_steps(tiny: Tiny) -> None:
    """No pass has more tokens than the draft may catch up with at once; it guesses all the same."""
    llm = llm_with_draft(tiny[0], tiny[0])
    assert llm.engine.draft is not None
    llm.engine.draft._budget = 32
    passes = watch(llm)
    prompts = [[i, *range(3, 90)] for i in range(3)]
    outputs = llm.generate(prompts, greedy(30), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == ids(llm_on(tiny[0]), prompts, greedy(30))
    assert max(passes) <= 32
    assert all(o.num_accepted > 5 for o in outputs)
    idle_both(llm)


def test_samples_of_a_request_share_its_prompt(tiny: Tiny) -> None:
    """Four samples of a prompt: the draft holds its blocks once."""
    llm = llm_with_draft(tiny[0], tiny[0], block_size=16, max_batched_tokens=64)
    assert llm.engine.draft is not None
    llm.engine.add_request(list(range(160)), SamplingParams(n=4, seed=1, max_tokens=20, ignore_eos=True))
    peak, computed = 0, watch(llm)
    while llm.engine.has_work:
        llm.engine.step()
        peak = max(peak, llm.engine.draft.pool.stats().held)
    assert 10 < peak <= 10 + 4 * 3
    assert sum(computed) < 2 * 160
    idle_both(llm)


def test_abort_gives_its_blocks_back(tiny: Tiny) -> None:
    """Of one request of two, in the middle."""
    llm = llm_with_draft(tiny[0], tiny[0])
    first, second = (llm.engine.add_request(prompt, greedy(40)) for prompt in PROMPTS[:2])
    for _ in range(4):
        llm.engine.step()
    draft = llm.engine.draft
    assert draft is not None
    assert draft.pool.stats().sequences == 2
    llm.engine.abort(first)
    assert draft.pool.stats().sequences == 1
    llm.engine.abort(second)
    idle_both(llm)


def test_a_pass_that_raises_ends_what_runs(tiny: Tiny) -> None:
    """The requests get the error; nothing is held or found of what was half written; the next is served."""
    llm = llm_with_draft(tiny[0], tiny[0])
    draft = llm.engine.draft
    assert draft is not None
    forward, calls = draft._runner.forward, 0

    def failing(batch: Any, tables: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("boom")
        return forward(batch, tables)

    draft._runner.forward = failing  # type: ignore[method-assign]
    with pytest.raises(GenerationFailed, match="boom"):
        llm.generate(PROMPTS[0], greedy(30), use_tqdm=False)
    idle_both(llm)
    assert draft.pool.stats().cached == 0
    assert ids(llm, PROMPTS[0], greedy(30)) == ids(llm_on(tiny[0]), PROMPTS[0], greedy(30))


def test_a_draft_that_cannot_pay_is_not_run(tiny: Tiny) -> None:
    """One as large as the model never; one that is hardly ever right, in few of many steps."""
    llm = llm_with_draft(tiny[0], tiny[0], price=1.0)
    passes = watch(llm)
    (output,) = llm.generate(PROMPTS[0], greedy(100), use_tqdm=False)
    assert output.num_guessed <= 100 // 8
    assert len(passes) <= 100 // 8


def test_where_the_draft_knows_no_more_positions(tiny: Tiny, tmp_path: Path) -> None:
    """A draft of a shorter context guesses as far as that goes, and the output goes on without it."""
    draft = load_model(tiny_checkpoint(tmp_path, max_position_embeddings=40)[0])
    llm = llm_with_draft(tiny[0], draft)
    (output,) = llm.generate(PROMPTS[0], greedy(100), use_tqdm=False)
    assert [output.outputs[0].token_ids] == ids(llm_on(tiny[0]), PROMPTS[0], greedy(100))
    assert 10 < output.num_accepted < 40 - len(PROMPTS[0])
    idle_both(llm)


def test_memory_covers_both_caches(tiny: Tiny, other_tiny: LoadedModel) -> None:
    """kv_memory is what both caches take together; the start-up table names the draft and its bytes."""
    llm = llm_with_draft(tiny[0], other_tiny, kv_memory="1MiB")
    engine = llm.engine
    assert engine.draft is not None
    caches = [*engine.runner.caches, *engine.draft.caches]
    size = sum(t.numel() * t.element_size() for cache in caches for t in cache.tensors())
    each = engine.budget.bytes_per_block + engine.budget.draft_bytes_per_block
    assert size == engine.budget.num_blocks * each
    assert 2**20 - each < size <= 2**20
    row = dict(engine.describe())["speculation"]
    assert other_tiny.name in row
    assert f"{other_tiny.weights_bytes:,}" in row
    assert engine.draft.price == 0.0  # set by the test; by itself it is
    fresh = Engine(tiny[0], EngineConfig(speculate=2, draft_model="x", num_blocks=8), draft=other_tiny)
    assert fresh.draft is not None
    assert fresh.draft.price == other_tiny.weights_bytes / tiny[0].weights_bytes


def test_another_vocabulary_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    """Another size, with both numbers; the same size with other tokens, with the first that differs."""
    folder, _ = tiny_checkpoint(tmp_path / "same")
    draft = load_model(folder)
    size = draft.config.vocab_size
    larger = replace(draft, config=replace(draft.config, vocab_size=size + 8))
    with pytest.raises(ConfigError, match=rf"{size + 8:,} tokens.*{size:,}") as caught:
        llm_with_draft(tiny[0], larger)
    assert caught.value.param == "draft_model"
    path = folder / "tokenizer.json"
    text = path.read_text()
    swapped = text.replace('"B":', '"@@":').replace('"C":', '"B":').replace('"@@":', '"C":')
    assert swapped != text
    path.write_text(swapped)
    with pytest.raises(ConfigError, match="draft_model"):
        llm_with_draft(tiny[0], load_model(folder))


def test_a_draft_without_guesses_is_refused() -> None:
    """draft_model with speculate 0, by name."""
    with pytest.raises(ConfigError, match="speculate is 0"):
        EngineConfig(draft_model="x")
