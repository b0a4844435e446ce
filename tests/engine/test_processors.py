"""Bias, penalties and bad words against transformers' processors and against hand-made answers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    MinLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from octavo import SamplingParams
from octavo.engine.bad_words import BadWords, Spellings
from octavo.engine.penalties import TokenCounts
from octavo.engine.sampler import Draw, adjusted, filtered_probabilities
from octavo.errors import InvalidRequest
from octavo.models import LoadedModel
from tests.engine.helpers import idle, llm_on, over_admit

VOCAB = 60
Tiny = tuple[LoadedModel, Any]


def counts_of(prompt: list[int], output: list[int]) -> TokenCounts:
    counts = TokenCounts(prompt)
    for token in output:
        counts.add(token)
    return counts


def random_case(rng: random.Random) -> tuple[list[int], list[int], SamplingParams, int]:
    """A prompt, an output, parameters and an end-of-text id."""
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
    output = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 60))]
    context = prompt + output
    bad = [[rng.randrange(VOCAB)] for _ in range(rng.randint(0, 3))]
    if rng.random() < 0.6:  # sequences of which some are about to be completed
        bad += [[*context[-length:], rng.randrange(VOCAB)] for length in (1, 2) if length <= len(context)]
        bad += [[rng.randrange(VOCAB) for _ in range(3)]]
    params = SamplingParams(
        temperature=rng.choice((0.3, 0.7, 1.0, 1.9)),
        top_k=rng.choice((0, 1, 5, 40, 10**6)),
        top_p=rng.choice((1.0, 0.95, 0.5, 0.01)),
        min_p=rng.choice((0.0, 0.0, 0.05, 0.5)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.3, 0.7)),
        logit_bias={rng.randrange(VOCAB): rng.uniform(-100, 100) for _ in range(rng.randint(0, 4))},
        bad_words_ids=bad,
        min_tokens=rng.choice((0, 20)),
    )
    return prompt, output, params, rng.randrange(VOCAB)


def transformers_scores(
    logits: torch.Tensor, prompt: list[int], output: list[int], params: SamplingParams, eos: int
) -> torch.Tensor:
    """The same parameters through transformers' processors, in the order of its generate()."""
    ids, scores = torch.tensor([prompt + output]), logits[None].clone()
    if params.logit_bias:
        scores = SequenceBiasLogitsProcessor({(t,): b for t, b in params.logit_bias.items()})(ids, scores)
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    if params.bad_words_ids:
        scores = NoBadWordsLogitsProcessor([list(b) for b in params.bad_words_ids])(ids, scores)
    if params.min_tokens:
        scores = MinLengthLogitsProcessor(len(prompt) + params.min_tokens, eos)(ids, scores)
    scores = TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return scores[0]


def test_a_thousand_random_rows_equal_transformers() -> None:
    """Bias, repetition penalty, bad words, min_tokens, temperature, top-k, top-p and min-p together: the
    distribution that is sampled from is transformers', row by row, all rows adjusted in one call."""
    rng = random.Random(4)
    generator = torch.Generator().manual_seed(4)
    cases = [random_case(rng) for _ in range(1000)]
    logits = torch.randn(1000, VOCAB, generator=generator) * 4
    before, draws = logits.clone(), []
    for row, (prompt, output, params, eos) in enumerate(cases):
        bad = BadWords((), params.bad_words_ids, None, prompt)
        for token in output:
            bad.add(token)
        banned = [bad.banned()] + ([np.array([eos])] if len(output) < params.min_tokens else [])
        draws.append(Draw(row, params, 1, 0, len(output), np.concatenate(banned), counts_of(prompt, output)))
    rows = adjusted(logits, draws)
    assert torch.equal(logits, before)
    for row, (prompt, output, params, eos) in enumerate(cases):
        want = transformers_scores(logits[row], prompt, output, params, eos).double().softmax(-1)
        probs, order = filtered_probabilities(rows[row], params)
        got = torch.zeros(VOCAB, dtype=torch.float64)
        got[order if order is not None else torch.arange(VOCAB)] = probs / probs.sum()
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


def test_penalties_by_hand() -> None:
    """Repetition covers prompt and output; presence and frequency the output only; each row its own."""
    logits = torch.tensor([[2.0, -2.0, 1.0, 3.0, 0.5], [2.0, -2.0, 1.0, 3.0, 0.5]])
    both = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    draws = [
        Draw(0, both, 0, 0, 0, counts=counts_of([0, 1, 0], [1, 2, 2])),
        Draw(1, SamplingParams(presence_penalty=-1), 0, 0, 0, counts=counts_of([0, 1], [3])),
    ]
    got = adjusted(logits, draws)
    torch.testing.assert_close(got[0], torch.tensor([1.0, -4.75, -0.5, 3.0, 0.5]))
    torch.testing.assert_close(got[1], torch.tensor([2.0, -2.0, 1.0, 4.0, 0.5]))


def test_counts_grow_and_part() -> None:
    """Counts equal a plain count over thousands of tokens, and a copy goes on by itself."""
    rng = random.Random(1)
    prompt, output = [rng.randrange(500) for _ in range(100)], [rng.randrange(900) for _ in range(3000)]
    counts = counts_of(prompt, output)
    twin = counts.copy()
    twin.add(950)
    assert set(counts.ids.tolist()) == set(prompt) | set(output)
    found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert found == {token: output.count(token) for token in found}
    assert 950 in twin.ids
    assert 950 not in counts.ids


def test_penalties_follow_the_branch_through_forks_and_preemption(tiny: Tiny) -> None:
    """With a strong frequency penalty, the tokens are those of a run recomputed from scratch each time,
    for each of n branches, in a pool that forces preemptions."""
    prompt = list(range(40))
    params = SamplingParams(
        n=3, temperature=0.7, seed=3, max_tokens=24, frequency_penalty=1.5, repetition_penalty=1.4,
        ignore_eos=True,
    )  # fmt: skip
    roomy = llm_on(tiny[0])
    want = [o.token_ids for o in roomy.generate(prompt, params, use_tqdm=False)[0].outputs]
    tight = over_admit(llm_on(tiny[0], block_size=4, num_blocks=24, max_batched_tokens=16))
    batch = [prompt, [7] * 30, [9] * 30]
    got = tight.generate(batch, [params, params, params], use_tqdm=False)[0]
    assert tight.engine.scheduler.stats.preemptions > 0
    assert [o.token_ids for o in got.outputs] == want
    plain = SamplingParams(n=3, temperature=0.7, seed=3, max_tokens=24, ignore_eos=True)
    assert [o.token_ids for o in roomy.generate(prompt, plain, use_tqdm=False)[0].outputs] != want
    idle(tight)


def test_bias_decides_and_padded_ids_give_no_text(tiny: Tiny) -> None:
    """A bias of 100 makes a token the answer, -100 removes the answer; an id that the tokenizer does not
    know gives empty text and no error."""
    llm = llm_on(tiny[0])
    free = llm.generate([5, 6], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0].outputs[0]
    away = SamplingParams(temperature=0, max_tokens=4, logit_bias={free.token_ids[0]: -100})
    assert llm.generate([5, 6], away, use_tqdm=False)[0].outputs[0].token_ids[0] != free.token_ids[0]
    padded = llm.engine.vocab_size - 1
    assert padded >= llm.engine.tokenizer.vocab_size
    (out,) = llm.generate(
        [5, 6], SamplingParams(temperature=0, max_tokens=4, logit_bias={padded: 100}), use_tqdm=False
    )
    assert out.outputs[0].token_ids == [padded] * 4
    assert out.outputs[0].text == ""


def test_bad_words_are_never_in_the_text(tiny: Tiny) -> None:
    """Strings that a free run says are avoided in text, whatever tokens spell them, also two that overlap."""
    llm = llm_on(tiny[0])
    params = {"temperature": 1.3, "seed": 5, "max_tokens": 200, "ignore_eos": True}
    free = llm.generate([65, 66], SamplingParams(**params), use_tqdm=False)[0].outputs[0].text
    words = sorted({free[i : i + length] for i in range(0, 150, 7) for length in (1, 2, 3)})
    words = [word for word in words if "\ufffd" not in word]
    assert len(words) > 20
    (out,) = llm.generate([65, 66], SamplingParams(**params, bad_words=words), use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 200
    assert not [word for word in words if word in out.outputs[0].text]


class _Wordy:
    """A tokenizer of whole and partial words."""

    vocab = (b"c", b"a", b"t", b"ca", b"at", b"cat", b"dog", b" cats", b"tt", b"\xc3", b"\xa9", b"<s>")
    vocab_size, special_ids = 12, frozenset({11})

    def token_bytes(self, token: int) -> bytes:
        return self.vocab[token]


def test_every_spelling_of_a_bad_word_is_banned() -> None:
    """Inside a token, across two or three, and split in the middle of a character."""
    spellings = Spellings(_Wordy())  # type: ignore[arg-type]

    def banned(output: list[int], *words: str) -> set[int]:
        bad = BadWords(words, (), spellings, [])
        for token in output:
            bad.add(token)
        return set(bad.banned().tolist())

    assert banned([], "cat") == {5, 7}
    assert banned([0], "cat") == {4, 5, 7}
    assert banned([6, 0, 1], "cat") == {2, 5, 7, 8}
    assert banned([3], "cat", "aa") == {1, 2, 4, 5, 7, 8}
    assert banned([3, 6], "cat") == {5, 7}
    assert banned([9], "\u00e9") == {10}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 2.1), ("frequency_penalty", -3), ("frequency_penalty", float("inf")),
        ("repetition_penalty", 0), ("repetition_penalty", -1.0), ("repetition_penalty", 1e9),
        ("logit_bias", {-1: 1.0}), ("logit_bias", {"x": 1.0}), ("logit_bias", {1: 1e9}),
        ("logit_bias", {1: float("nan")}), ("logit_bias", dict.fromkeys(range(1025), 0.0)),
        ("bad_words", [""]), ("bad_words", ["\ud83d"]), ("bad_words", [1]), ("bad_words", ["x"] * 257),
        ("bad_words_ids", [[]]), ("bad_words_ids", [[-1]]), ("bad_words_ids", [[1] * 65]),
        ("logprobs", -1), ("logprobs", 10**6), ("logprobs", True), ("logprobs", 21),
        ("prompt_logprobs", -1), ("prompt_logprobs", 10**6), ("best_of", 0), ("best_of", 1000),
        ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -1), ("stop", ["\udc00"]),
    ],
)  # fmt: skip
def test_values_out_of_range_are_named(name: str, value: Any) -> None:
    """Each is refused by its name."""
    with pytest.raises(InvalidRequest, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_ids_that_the_model_does_not_have_are_named(tiny: Tiny) -> None:
    """A bias or a bad sequence on an id past the vocabulary is refused with the range; nothing ran."""
    llm = llm_on(tiny[0])
    size = llm.engine.vocab_size
    for params in (SamplingParams(logit_bias={size: 1.0}), SamplingParams(bad_words_ids=[[1, size]])):
        with pytest.raises(InvalidRequest, match=rf"token {size}; ids .* 0 to {size - 1}"):
            llm.generate([1], params, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="best_of 2 is less than n 3"):
        SamplingParams(n=3, best_of=2)
    assert llm.engine.scheduler.stats.admitted == 0


def test_truncation_keeps_the_end_of_the_prompt(tiny: Tiny) -> None:
    """truncate_prompt_tokens serves a prompt longer than the context by its last tokens, and says which."""
    llm = llm_on(tiny[0], max_model_len=64)
    prompt = [i % 200 for i in range(500)]
    params = SamplingParams(temperature=0, max_tokens=4, truncate_prompt_tokens=50, ignore_eos=True)
    (cut,) = llm.generate(prompt, params, use_tqdm=False)
    (want,) = llm.generate(
        prompt[-50:], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False
    )
    assert cut.prompt_token_ids == prompt[-50:]
    assert cut.outputs[0].token_ids == want.outputs[0].token_ids
    with pytest.raises(InvalidRequest, match="prompt token 0"):
        llm.generate([-1, *prompt], params, use_tqdm=False)
