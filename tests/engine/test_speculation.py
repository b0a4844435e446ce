"""Guessing changes no token and no distribution, whatever else goes on, and stops where it does not pay."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from octavo import SamplingParams
from octavo.engine import ConfigError, RequestOutput, StructuredOutputs
from octavo.engine.guess import NgramGuesser
from octavo.models import LoadedModel
from tests.engine.helpers import idle, llm_on, llm_with_draft
from tests.models.helpers import expected_logits

Tiny = tuple[LoadedModel, Any]


class Oracle:
    """Guesses what the plain run said, spoilt at random: any mixture of right and wrong ones."""

    truths: dict[tuple[int, ...], list[list[int]]]  # of each prompt, the outputs of the plain run
    spoil: float

    def __init__(self, prompt: list[int], limit: int) -> None:
        self._truths = self.truths.get(tuple(prompt), [])
        self._rng = random.Random(len(prompt))
        self._output: list[int] = []

    def add(self, token: int) -> None:
        self._output.append(token)

    def check(self, guessed: int, accepted: int) -> None:
        assert 0 <= accepted <= guessed

    def guess(self, most: int, company: int) -> list[int]:
        done = len(self._output)
        truth = next((t[done:] for t in self._truths if t[:done] == self._output), [])
        guesses = [*truth, *(self._rng.randrange(250) for _ in range(6))]
        guesses = guesses[: min(most, self._rng.randint(0, 6))]
        return [(g + 1) % 250 if self._rng.random() < self.spoil else g for g in guesses]


def texts(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (o.token_ids, o.text, o.finish_reason, o.stop_reason, len(o.logprobs or []))
        for output in outputs
        for o in output.outputs
    ]


def mixed_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Every feature that looks at what came before, greedy and sampled."""
    rng = random.Random(8)
    shared = [rng.randrange(250) for _ in range(20)]
    prompts = [
        [*shared[: rng.choice((0, 20))], *(rng.randrange(250) for _ in range(9 + i))] for i in range(9)
    ]
    json = StructuredOutputs(json={"type": "array", "items": {"enum": ["ab", "cd", 12]}, "maxItems": 9})
    options: list[dict[str, Any]] = [
        {"temperature": 0}, {"seed": 1, "n": 3}, {"temperature": 0, "frequency_penalty": 1.0},
        {"seed": 2, "repetition_penalty": 1.5, "top_k": 20}, {"temperature": 0, "min_tokens": 9},
        {"seed": 3, "logprobs": 2}, {"seed": 4, "bad_words": ["a", "e\u00e9"], "bad_words_ids": [[5, 6]]},
        {"seed": 5, "stop": ["a", "b", "\u00e9"]}, {"seed": 6, "structured_outputs": json},
    ]  # fmt: skip
    return prompts, [SamplingParams(max_tokens=24, **chosen) for chosen in options]


@pytest.mark.parametrize("spoil", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("pool", [{}, {"block_size": 3, "num_blocks": 26, "max_batched_tokens": 32}])
def test_guesses_change_nothing(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, spoil: float, pool: dict[str, int]
) -> None:
    """Tokens, texts, reasons and logprobs of nine different requests at once are those of a run without
    guesses, whether guesses are right or wrong, with preemptions too; every invariant holds on the way."""
    prompts, params = mixed_requests()
    plain = llm_on(tiny[0]).generate(prompts, params, use_tqdm=False)
    Oracle.truths = {tuple(o.prompt_token_ids): [s.token_ids for s in o.outputs] for o in plain}
    Oracle.spoil = spoil
    monkeypatch.setattr("octavo.engine.live.NgramGuesser", Oracle)
    llm = llm_on(tiny[0], speculate=6, **pool)
    step = llm.engine.step

    def checked() -> Any:
        deltas = step()
        llm.engine.pool.check()
        return deltas

    llm.engine.step = checked  # type: ignore[method-assign]
    guessed = llm.generate(prompts, params, use_tqdm=False)
    assert texts(guessed) == texts(plain)
    accepted, tried = sum(o.num_accepted for o in guessed), sum(o.num_guessed for o in guessed)
    assert tried > 100
    assert accepted == 0 if spoil == 1 else accepted > tried * (0.5 if spoil == 0 else 0.1)
    if pool:
        assert llm.engine.scheduler.stats.preemptions > 0
    idle(llm)


def test_text_that_repeats_takes_fewer_steps(tiny: Tiny) -> None:
    """An answer that falls into a loop (a negative penalty sees to it) is that of a run without guesses, in
    fewer steps than tokens; the counters of request and scheduler agree."""
    prompt = [17, 3, 99] * 5
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, frequency_penalty=-2)
    llm = llm_on(tiny[0], speculate=8)
    steps, step = 0, llm.engine.step

    def counted() -> Any:
        nonlocal steps
        steps += 1
        return step()

    llm.engine.step = counted  # type: ignore[method-assign]
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    assert output.num_accepted == 120 - steps
    assert output.num_accepted > 20
    stats = llm.engine.scheduler.stats
    assert (stats.guessed, stats.accepted) == (output.num_guessed, output.num_accepted)
    (off,) = llm_on(tiny[0]).generate(prompt, params, use_tqdm=False)
    assert off.outputs[0].token_ids == output.outputs[0].token_ids
    assert (off.num_guessed, off.num_accepted) == (0, 0)


@pytest.mark.parametrize("how", ["off", "text", "own draft", "other draft"])
def test_the_joint_distribution_of_two_tokens(
    tiny: Tiny, other_tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """6,400 pairs of tokens under temperature, top-k and top-p against the exact probabilities from
    transformers, without guesses, with guesses by lot, and with those of a draft that is always right and
    of one that seldom is: chi-square below its 1e-5 quantile. n draws independently."""
    prompt, rng = [8, 200, 45, 45, 6], random.Random(1)

    def shares(ids: list[int]) -> dict[int, float]:
        scores = expected_logits(tiny[1], ids)[-1] / 3.0
        best = scores.topk(5)
        probs = best.values.double().softmax(-1)
        keep = probs.cumsum(-1) - probs < 0.9
        probs = torch.where(keep, probs, 0) / probs[keep].sum()
        return {t: p for t, p in zip(best.indices.tolist(), probs.tolist(), strict=True) if p > 0}

    first = shares(prompt)
    want = {(a, b): p * q for a, p in first.items() for b, q in shares([*prompt, a]).items()}
    likely = [b for _, b in want]

    class Random(Oracle):
        def guess(self, most: int, company: int) -> list[int]:
            return [rng.choice(likely) for _ in range(min(most, 3))]

    Oracle.truths = {}
    monkeypatch.setattr("octavo.engine.live.NgramGuesser", Random)
    llm = llm_on(tiny[0], speculate=4 if how == "text" else 0)
    if "draft" in how:
        monkeypatch.setattr("octavo.engine.guess.Worth.count", lambda *_: 2)
        llm = llm_with_draft(tiny[0], tiny[0] if how == "own draft" else other_tiny)
    params = [
        SamplingParams(n=64, temperature=3.0, top_k=5, top_p=0.9, seed=seed, max_tokens=3, ignore_eos=True)
        for seed in range(100)
    ]
    outputs = llm.generate([prompt] * 100, params, use_tqdm=False)
    counts = dict.fromkeys(want, 0)
    for output in outputs:
        for sequence in output.outputs:
            counts[sequence.token_ids[0], sequence.token_ids[1]] += 1
    total = sum(counts.values())
    assert total == 6400
    accepted = sum(output.num_accepted for output in outputs)
    assert accepted >= {"off": 0, "text": 500, "own draft": 2000, "other draft": 0}[how]
    assert (sum(output.num_guessed for output in outputs) > 2000) == (how != "off")
    rare = [pair for pair in want if want[pair] * total < 5]
    bins = [(counts[p], want[p] * total) for p in want if p not in rare]
    if rare:
        bins.append((sum(counts[p] for p in rare), sum(want[p] for p in rare) * total))
    freedom = len(bins) - 1
    assert freedom >= 6
    statistic = sum((count - mean) ** 2 / mean for count, mean in bins)
    assert statistic < freedom + 4.5 * (2 * freedom) ** 0.5 + 12


def test_a_cached_prompt_is_forked_before_anyone_guesses(tiny: Tiny) -> None:
    """n=3 of a prompt that repeats itself, all but its last token cached, gives what it gives uncached."""
    prompt, params = [7, 8, 9] * 6, SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True)
    llm = llm_on(tiny[0], speculate=4)
    first, second = (llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(2))
    assert second.num_cached_tokens == len(prompt) - 1
    assert [o.token_ids for o in second.outputs] == [o.token_ids for o in first.outputs]
    idle(llm)


def test_a_prompt_with_one_token_to_go_is_forked_before_anyone_guesses(tiny: Tiny) -> None:
    """n=3 of a prompt whose chunks leave its last token for a step of its own gives what it gives in one."""
    prompt, params = [7, 8, 9] * 5 + [7, 8], SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True)
    want = llm_on(tiny[0]).generate(prompt, params, use_tqdm=False)[0]
    llm = llm_on(tiny[0], speculate=4, max_batched_tokens=16)
    found = llm.generate(prompt, params, use_tqdm=False)[0]
    assert [o.token_ids for o in found.outputs] == [o.token_ids for o in want.outputs]
    idle(llm)


def test_guesser_finds_what_followed() -> None:
    """The longest match wins, the latest occurrence counts, and a loop goes on past its end."""
    guesser = NgramGuesser([1, 2, 3, 4, 5, 9, 2, 3, 7, 8, 1, 2, 3], 4)
    assert guesser.guess(2, 1) == [4, 5]
    guesser = NgramGuesser([9, 2, 3, 7, 8, 6, 2, 3], 8)
    assert guesser.guess(3, 1) == [7, 8, 6]
    guesser = NgramGuesser([5, 6, 5, 6, 5, 6, 5], 8)
    assert guesser.guess(3, 1) == [6, 5, 6]
    assert NgramGuesser([1, 2, 3, 4], 8).guess(3, 1) == []
    assert NgramGuesser([1], 8).guess(3, 1) == []


def test_guessing_stops_where_it_does_not_pay_and_comes_back() -> None:
    """Never right: under 3 % of 2,000 steps guess. Then always right: long guesses again. A large company
    wants better guesses than a small one."""
    guesser = NgramGuesser([1, 2, 3] * 4, 8)
    tries = 0
    for _ in range(2000):
        guesses = guesser.guess(8, 4)
        tries += bool(guesses)
        if guesses:
            guesser.check(len(guesses), 0)
    assert 0 < tries < 60
    longest = 0
    for _ in range(2000):
        guesses = guesser.guess(8, 4)
        longest = max(longest, len(guesses))
        if guesses:
            guesser.check(len(guesses), len(guesses))
    assert longest == 8
    fresh = NgramGuesser([1, 2, 3] * 4, 8)
    assert len(fresh.guess(8, 1)) > len(fresh.guess(8, 8)) > 0
    assert fresh.guess(8, 40) == []


@pytest.mark.parametrize("value", [-1, 17, True, 1.5])
def test_bad_limits_are_named(tiny: Tiny, value: Any) -> None:
    """speculate out of range is refused by name."""
    with pytest.raises(ConfigError, match="speculate"):
        llm_on(tiny[0], speculate=value)
