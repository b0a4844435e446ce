"""Beam search against transformers: the same sequences and scores, in any company and any pool."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from octavo import SamplingParams
from octavo.engine import RequestOutput
from octavo.engine.llm import LLM
from octavo.errors import InvalidRequest
from octavo.models import LoadedModel
from octavo.sched import NeverFits
from tests.engine.helpers import idle, llm_on, over_admit

Tiny = tuple[LoadedModel, Any]
PROMPTS = Path(__file__).resolve().parents[3] / "shared" / "data" / "prompts" / "mt_bench" / "question.jsonl"
TIE = 1e-3


class Beam(NamedTuple):
    tokens: list[int]
    score: float


@torch.no_grad()
def reference(model: Any, prompt: list[int], eos: list[int], **options: Any) -> list[Beam]:
    """transformers' beams, all num_beams of them, without padding."""
    out = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
        eos_token_id=eos or None, pad_token_id=0, num_return_sequences=options["num_beams"],
        return_dict_in_generate=True, output_scores=True, top_k=None, top_p=None, temperature=None, **options,
    )  # fmt: skip
    beams = []
    for sequence, score in zip(out.sequences.tolist(), out.sequences_scores.tolist()):
        tokens = sequence[len(prompt) :]
        end = next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))
        beams.append(Beam(tokens[:end], score))
    return beams


def assert_same(output: RequestOutput, want: list[Beam]) -> None:
    """Same scores in order; same sequences, but that beams whose scores tie may change places."""
    found = [Beam(o.token_ids, o.score) for o in output.outputs]  # type: ignore[arg-type]
    assert len(found) == len(want)
    for a, b in zip(found, want, strict=True):
        assert a.score == pytest.approx(b.score, abs=1e-3)
        assert a.tokens == b.tokens or any(
            a.tokens == other.tokens and abs(a.score - other.score) < TIE for other in want
        )


def beam_params(width: int, count: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, beam_width=width, n=width, max_tokens=count, **more)


def random_prompts(count: int, seed: int, vocab: int = 256) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(vocab) for _ in range(24)]
    return [
        [*shared[: rng.choice((0, 24))], *(rng.randrange(vocab) for _ in range(rng.randint(1, 30)))]
        for _ in range(count)
    ]


def with_ends(model: LoadedModel, ends: list[int]) -> LoadedModel:
    return LoadedModel(
        model.name, model.path, model.config, model.decoder, model.tokenizer, frozenset(ends),
        model.weights_bytes,
    )  # fmt: skip


CASES = list(itertools.product((2, 4), (0.0, 1.0, -1.0, 2.0), (False, True, "never")))
ENDS = list(range(0, 296, 9))  # so many that beams end early and often


@pytest.mark.parametrize(("width", "penalty", "early"), CASES)
def test_equal_to_transformers(tiny: Tiny, width: int, penalty: float, early: bool | str) -> None:
    """Three prompts at once, with many end tokens and with none, over odd blocks."""
    prompts = random_prompts(3, width)
    for ends in (ENDS, []):
        llm = llm_on(with_ends(tiny[0], ends), block_size=7)
        params = beam_params(width, 14, length_penalty=penalty, early_stopping=early)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            want = reference(
                tiny[1], prompt, ends, num_beams=width, max_new_tokens=14, length_penalty=penalty,
                early_stopping=early,
            )  # fmt: skip
            assert_same(output, want)
        idle(llm)


def test_penalties_and_min_tokens_as_in_transformers(tiny: Tiny) -> None:
    """Processors act on logprobs in a beam search, and the sums are of what they leave."""
    prompt = random_prompts(1, 8)[0]
    llm = llm_on(with_ends(tiny[0], ENDS))
    params = beam_params(
        4, 12, repetition_penalty=1.4, min_tokens=5, bad_words_ids=[[3], [5, 6]], logit_bias={9: 2.0}
    )
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    want = reference(
        tiny[1], prompt, ENDS, num_beams=4, max_new_tokens=12, repetition_penalty=1.4, min_new_tokens=5,
        bad_words_ids=[[3], [5, 6]], sequence_bias={(9,): 2.0},
    )  # fmt: skip
    assert_same(output, want)
    assert all(len(o.token_ids) > 5 for o in output.outputs)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("spare", [0, 1, 3, 9])
def test_pools_too_small_for_all_beams(tiny: Tiny, caching: bool, spare: int) -> None:
    """A pool that holds little more than one beam: preemption after preemption, the same beams."""
    prompts = random_prompts(2, 5)
    longest = max(map(len, prompts))
    llm = llm_on(
        tiny[0], block_size=4, num_blocks=-(-(longest + 16) // 4) + spare, prefix_caching=caching,
        max_batched_tokens=16,
    )  # fmt: skip
    over_admit(llm)
    outputs = llm.generate(prompts, beam_params(4, 16, ignore_eos=True), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same(output, reference(tiny[1], prompt, [], num_beams=4, max_new_tokens=16))
    assert llm.engine.scheduler.stats.preemptions > 0
    idle(llm)


def test_two_searches_and_samples_share_few_places(tiny: Tiny) -> None:
    """With places for one search only, two searches and ordinary requests all end, with the same beams,
    although beams that wait for each other are preempted after every step."""
    prompts = random_prompts(6, 6)
    llm = llm_on(tiny[0], block_size=4, max_num_seqs=4, max_batched_tokens=24)
    scheduler, step, rng = llm.engine.scheduler, llm.engine.step, random.Random(2)

    def preempting() -> Any:
        deltas = step()
        for branch in list(scheduler.running):
            if rng.random() < 0.4:
                scheduler.preempt(branch)
        llm.engine.pool.check()
        return deltas

    llm.engine.step = preempting  # type: ignore[method-assign]
    search, plain = beam_params(4, 10, ignore_eos=True), SamplingParams(temperature=0, max_tokens=10, n=2)
    outputs = llm.generate(prompts, [search, plain, search, plain, search, plain], use_tqdm=False)
    for prompt, output in list(zip(prompts, outputs, strict=True))[::2]:
        assert_same(output, reference(tiny[1], prompt, [], num_beams=4, max_new_tokens=10))
    idle(llm)


def test_text_reason_and_the_n_best(tiny: Tiny) -> None:
    """n of the beams, best first, each with text without its end token, and why it ended; greedy requests
    beside it are undisturbed; an abort in the middle gives everything back."""
    llm = llm_on(with_ends(tiny[0], ENDS))
    prompt = random_prompts(1, 9)[0]
    every = llm.generate(prompt, beam_params(4, 14), use_tqdm=False)[0].outputs
    two = llm.generate(
        prompt, SamplingParams(temperature=0, beam_width=4, n=2, max_tokens=14), use_tqdm=False
    )[0].outputs
    assert [(o.index, o.token_ids, o.text) for o in two] == [
        (o.index, o.token_ids, o.text) for o in every[:2]
    ]
    assert [o.score for o in every] == sorted((o.score for o in every), reverse=True)
    for output in every:
        ended = output.token_ids[-1] in ENDS
        assert output.finish_reason == ("stop" if ended else "length")
        assert output.text == llm.engine.tokenizer.decode(output.token_ids[: len(output.token_ids) - ended])
    request = llm.engine.add_request(prompt, beam_params(4, 14))
    for _ in range(4):
        llm.engine.step()
    llm.engine.abort(request)
    idle(llm)


def test_beams_share_blocks(tiny: Tiny) -> None:
    """Four beams of a long prompt hold its blocks once."""
    llm = llm_on(tiny[0], block_size=16)
    llm.engine.add_request(list(range(160)), beam_params(4, 20, ignore_eos=True))
    peak = 0
    while llm.engine.has_work:
        llm.engine.step()
        peak = max(peak, llm.engine.pool.stats().held)
    assert 10 < peak <= 10 + 4 * 3


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"beam_width": 1}, "beam_width"), ({"beam_width": 65}, "beam_width"),
        ({"beam_width": 2, "n": 3}, "n"), ({"beam_width": 2, "temperature": 0.5}, "temperature"),
        ({"beam_width": 2, "top_k": 4}, "top_k"), ({"beam_width": 2, "top_p": 0.5}, "top_p"),
        ({"beam_width": 2, "min_p": 0.5}, "min_p"), ({"beam_width": 2, "stop": "x"}, "stop"),
        ({"beam_width": 2, "logprobs": 1}, "logprobs"), ({"beam_width": 2, "best_of": 2}, "best_of"),
        ({"beam_width": 2, "early_stopping": "sometimes"}, "early_stopping"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": 0.5}, "length_penalty"), ({"early_stopping": True}, "early_stopping"),
    ],
)  # fmt: skip
def test_what_a_search_cannot_honour_is_named(options: dict[str, Any], name: str) -> None:
    """Each refusal names the parameter."""
    with pytest.raises(InvalidRequest, match=name) as caught:
        SamplingParams(**options)
    assert caught.value.param == name


def test_more_beams_than_run_at_once_are_refused(tiny: Tiny) -> None:
    """With both numbers and the options."""
    with pytest.raises(NeverFits, match="8 sequences, but at most 4"):
        llm_on(tiny[0], max_num_seqs=4).generate([1], beam_params(8, 2), use_tqdm=False)


def smollm2_prompts(llm: LLM, count: int) -> list[list[int]]:
    texts = [json.loads(line)["turns"][0] for line in PROMPTS.read_text().splitlines()]
    return [llm.engine.tokenizer.encode(text)[:60] for text in texts[:count]]


@pytest.mark.proof
@pytest.mark.model
@pytest.mark.skipif(not PROMPTS.is_file(), reason=f"{PROMPTS} is not there")
@pytest.mark.parametrize("width", [2, 4, 8])
def test_default_model_equals_transformers(smollm2: LoadedModel, smollm2_reference: Any, width: int) -> None:
    """smollm2, 20 prompts at once in a large pool and in one that forces preemptions."""
    roomy = llm_on(smollm2, kv_memory="512MiB")
    prompts = smollm2_prompts(roomy, 20)
    params = beam_params(width, 24)
    ends = sorted(smollm2.eos_token_ids)
    tight = over_admit(llm_on(smollm2, block_size=16, num_blocks=24))
    first = roomy.generate(prompts, params, use_tqdm=False)
    second = tight.generate(prompts, params, use_tqdm=False)
    for prompt, a, b in zip(prompts, first, second, strict=True):
        want = reference(smollm2_reference, prompt, ends, num_beams=width, max_new_tokens=24)
        assert_same(a, want)
        assert_same(b, want)
    preemptions = tight.engine.scheduler.stats.preemptions
    assert preemptions > 0
    print(f"{width} beams: 20 prompts equal in both pools ({preemptions} preemptions in the small one)")
    idle(roomy)
    idle(tight)
