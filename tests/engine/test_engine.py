"""The step loop: sharing, stopping, errors, aborts and what is reported."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo import SamplingParams
from octavo.engine import BadLogits, ConfigError, Engine, EngineConfig, GenerationFailed
from octavo.engine.llm import LLM
from octavo.errors import InvalidRequest
from octavo.models import LoadedModel, ModelError
from octavo.sched import NeverFits
from tests.engine.helpers import idle, llm_on

Tiny = tuple[LoadedModel, Any]


def greedy_params(count: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **more)


def prompts(count: int, seed: int = 3, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def test_outputs_keep_the_order_of_the_prompts_call_after_call(tiny: Tiny) -> None:
    """Three calls on lists of mixed lengths: each output belongs to its prompt, the input is unchanged."""
    llm = llm_on(tiny[0], max_num_seqs=3)
    for seed in range(3):
        batch = prompts(7, seed)
        before = [list(prompt) for prompt in batch]
        outputs = llm.generate(batch, [greedy_params(1 + i) for i in range(7)], use_tqdm=False)
        assert batch == before
        assert [output.prompt_token_ids for output in outputs] == before
        assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, 8))
    idle(llm)


def test_cached_tokens_are_reported(tiny: Tiny) -> None:
    """The second time, all of a prompt but its last token comes from the cache; with caching off, none."""
    prompt = list(range(40))
    llm = llm_on(tiny[0])
    first, second = (llm.generate(prompt, greedy_params(4), use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 39)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    off = llm_on(tiny[0], prefix_caching=False)
    assert [off.generate(prompt, greedy_params(4), use_tqdm=False)[0].num_cached_tokens for _ in "ab"] == [
        0,
        0,
    ]


def test_n_samples_share_the_prompt_and_differ(tiny: Tiny) -> None:
    """n = 6 seeded samples: one prefill, six different texts, each as long as asked."""
    llm = llm_on(tiny[0])
    params = SamplingParams(n=6, temperature=1.0, seed=7, max_tokens=9, ignore_eos=True)
    (output,) = llm.generate(list(range(50)), params, use_tqdm=False)
    assert [o.index for o in output.outputs] == list(range(6))
    assert len({tuple(o.token_ids) for o in output.outputs}) == 6
    assert llm.engine.scheduler.stats.computed == 50 + 6 * 8
    assert llm.engine.pool.stats().copies == 5, "the prompt's last block is copied for all but one"
    idle(llm)


def test_a_seed_gives_the_same_tokens_whatever_the_load(tiny: Tiny) -> None:
    """Alone, in a crowd, under preemption and in small chunks: the same samples; unseeded runs differ."""
    prompt, params = list(range(30)), SamplingParams(n=2, temperature=0.8, seed=11, max_tokens=20)

    def tokens(llm: LLM, company: int) -> list[list[int]]:
        batch = [prompt, *prompts(company)]
        each = [params] + [SamplingParams(max_tokens=20)] * company
        return [o.token_ids for o in llm.generate(batch, each, use_tqdm=False)[0].outputs]

    alone = tokens(llm_on(tiny[0]), 0)
    assert tokens(llm_on(tiny[0]), 12) == alone
    assert tokens(llm_on(tiny[0], block_size=4, num_blocks=24, max_batched_tokens=16), 12) == alone
    unseeded = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    a, b = (llm_on(tiny[0]).generate(prompt, unseeded, use_tqdm=False)[0].outputs[0].token_ids for _ in "ab")
    assert a != b


def test_stops_at_each_end_of_text_token_and_can_ignore_them(tiny: Tiny) -> None:
    """Config's and tokenizer's end-of-text tokens both end a sequence; ignore_eos and min_tokens hold."""
    model = tiny[0]
    assert len(model.eos_token_ids) == 2
    free = llm_on(model).generate([5, 6, 7], greedy_params(30), use_tqdm=False)[0].outputs[0].token_ids
    for token in model.eos_token_ids:
        # What comes at step 3 is declared end-of-text: the engine must stop there, on either id.
        changed = LoadedModel(
            model.name, model.path, model.config, model.decoder, model.tokenizer,
            frozenset({token, free[3]}), model.weights_bytes,
        )  # fmt: skip
        first = free.index(free[3])
        engine = llm_on(changed)
        (out,) = engine.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
        assert out.outputs[0].token_ids == free[: first + 1]
        assert (out.outputs[0].finish_reason, out.outputs[0].stop_reason) == ("stop", None)
        least = SamplingParams(temperature=0, max_tokens=30, min_tokens=20)
        (out,) = engine.generate([5, 6, 7], least, use_tqdm=False)
        assert len(out.outputs[0].token_ids) > 20 or out.outputs[0].finish_reason == "length"
        assert not set(out.outputs[0].token_ids[:20]) & {token, free[3]}


def test_stop_token_ids_end_the_sequence_and_stay_out_of_the_text(tiny: Tiny) -> None:
    """The token that stopped is reported, is in the ids, and is not in the text."""
    llm = llm_on(tiny[0])
    free = llm.generate([9, 9], greedy_params(12), use_tqdm=False)[0].outputs[0]
    stop = free.token_ids[5]
    first = free.token_ids.index(stop)
    (out,) = llm.generate([9, 9], greedy_params(12, stop_token_ids=[stop]), use_tqdm=False)
    assert out.outputs[0].token_ids == free.token_ids[: first + 1]
    assert out.outputs[0].stop_reason == stop
    assert out.outputs[0].text == llm.engine.tokenizer.decode(free.token_ids[:first])


def test_stop_string_across_tokens(tiny: Tiny) -> None:
    """A stop string of several one-byte tokens ends the text before it, and no part of it is shown."""
    llm = llm_on(tiny[0])
    free = llm.generate([65, 66], greedy_params(60), use_tqdm=False)[0].outputs[0].text
    stop = free[10:13]
    (out,) = llm.generate([65, 66], greedy_params(60, stop=[stop, "never"]), use_tqdm=False)
    assert out.outputs[0].text == free[: free.index(stop)]
    assert (out.outputs[0].finish_reason, out.outputs[0].stop_reason) == ("stop", stop)


def test_text_is_that_of_all_tokens(tiny: Tiny) -> None:
    """The deltas' text adds up to the decoded ids, for 500 random bytes too."""
    llm = llm_on(tiny[0])
    params = SamplingParams(temperature=1.5, seed=1, max_tokens=300, ignore_eos=True, stop=["\x00never\x00"])
    (out,) = llm.generate([1, 2, 3], params, use_tqdm=False)
    assert out.outputs[0].text == llm.engine.tokenizer.decode(out.outputs[0].token_ids)


def test_absent_max_tokens_is_the_room_left(tiny: Tiny) -> None:
    """A prompt three short of the context gets three tokens and "length"."""
    llm = llm_on(tiny[0], max_model_len=40)
    params = SamplingParams(temperature=0, ignore_eos=True)
    (out,) = llm.generate(list(range(37)), params, use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 3
    assert out.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt is empty"),
        ([-1], {}, "prompt token 0 is -1"),
        ([1, 10**6], {}, "prompt token 1 is 1000000"),
        ([1, 2**63], {}, "prompt token 1"),
        ([True], {}, "prompt token 0 is True"),
        ([1.5], {}, "prompt token 0 is 1.5"),
        (list(range(100)), {}, "100 tokens and the context holds 64"),
        (list(range(60)), {"max_tokens": 5}, "60 tokens and max_tokens 5 make 65.*holds 64"),
        ([1], {"min_tokens": 64}, "min_tokens is 64.*room for 63"),
        ([1], {"n": 65}, "n = 65.*64 run at once"),
    ],
)
def test_bad_prompts_are_refused_and_the_engine_goes_on(
    tiny: Tiny, prompt: list[int], params: dict[str, int], message: str
) -> None:
    """Each refusal names the value and the limit; nothing ran, and the next request is served."""
    llm = llm_on(tiny[0], max_model_len=64)
    with pytest.raises(InvalidRequest, match=message):
        llm.generate([prompt], SamplingParams(temperature=0, **params), use_tqdm=False)
    each = [greedy_params(1), SamplingParams(temperature=0, **params)]
    with pytest.raises(InvalidRequest, match=f"prompt 1: .*{message}"):
        llm.generate([[1, 2], prompt], each, use_tqdm=False)
    assert llm.engine.scheduler.stats.admitted == 0
    assert len(llm.generate([1, 2], greedy_params(3), use_tqdm=False)[0].outputs[0].token_ids) == 3


def test_a_prompt_longer_than_the_pool_is_refused(tiny: Tiny) -> None:
    """The context is lowered to what the pool holds, the start-up table says so, and longer is refused."""
    llm = llm_on(tiny[0], num_blocks=4)
    assert llm.engine.max_model_len == 64
    assert any("lowered from the model's 512" in value for _, value in llm.engine.describe())
    with pytest.raises(InvalidRequest, match="65 tokens and the context holds 64"):
        llm.generate(list(range(65)), greedy_params(1), use_tqdm=False)
    with pytest.raises(NeverFits, match="make 65"):
        llm.generate(list(range(60)), greedy_params(5), use_tqdm=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0), ("n", True), ("max_tokens", 0), ("max_tokens", -5), ("min_tokens", -1),
        ("temperature", -1), ("temperature", float("nan")), ("temperature", "hot"), ("top_k", -2),
        ("top_p", 0.0), ("top_p", 1.5), ("min_p", -0.1), ("min_p", 2), ("seed", 1.5), ("seed", 2**64),
        ("stop", [""]), ("stop", ["x"] * 65), ("stop", [3]), ("stop_token_ids", [-1]),
    ],
)  # fmt: skip
def test_bad_sampling_parameters_are_named(name: str, value: Any) -> None:
    """Every parameter out of range is refused by its name."""
    with pytest.raises(InvalidRequest, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int3"}, "dtype must be one of"),
        ({"kv_dtype": "int4"}, "kv_dtype must be one of auto, float32, bfloat16, float16, int8, got 'int4'"),
        ({"threads": 0}, "threads must be an integer from 1 to 1024, got 0"),
        ({"threads": 1025}, "threads"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 257}, "block_size"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_blocks": 4, "kv_memory": "1GiB"}, "not both"),
        ({"kv_memory": "lots"}, "lots"),
        ({"kv_memory": 100}, "budget is 100"),
        ({"max_num_seqs": -1}, "max_num_seqs"),
        ({"max_batched_tokens": 0}, "max_batched_tokens"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_model_len": 10**6}, "model's context of 512"),
        ({"max_model_len": 200, "num_blocks": 2}, "needs 13 blocks.*has 2"),
    ],
)
def test_bad_options_are_named(tiny: Tiny, options: dict[str, Any], message: str) -> None:
    """An engine option that cannot be honoured is refused with its name and both numbers."""
    with pytest.raises(ConfigError, match=message):
        Engine(tiny[0], EngineConfig(**options))


def test_a_model_that_cannot_be_loaded_is_refused(tmp_path: Any) -> None:
    """A directory without config.json and a truncated GGUF are model errors that name the path."""
    with pytest.raises(ModelError, match=r"config\.json"):
        LLM(str(tmp_path))
    from octavo.models import resolve_model

    cut = tmp_path / "cut.gguf"
    cut.write_bytes(resolve_model("smollm2").read_bytes()[:200_000])
    with pytest.raises(ModelError, match="cut"):
        LLM(str(cut))


def test_a_step_that_raises_fails_its_requests_not_the_engine(tiny: Tiny) -> None:
    """With one running at a time, the request whose step raises fails; the others come out whole."""
    llm = llm_on(tiny[0], max_num_seqs=1)
    want = llm.generate([[7, 8]], greedy_params(4), use_tqdm=False)[0].outputs[0].token_ids
    forward, poison = llm.engine.runner.forward, 200

    def failing(plan: Any, tables: Any) -> Any:
        if any(poison in entry.tokens for entry in plan.entries):
            raise RuntimeError("boom")
        return forward(plan, tables)

    llm.engine.runner.forward = failing  # type: ignore[method-assign]
    with pytest.raises(GenerationFailed, match=r"1 of 3.*prompt 1.*boom") as caught:
        llm.generate([[7, 8], [1, poison, 3], [7, 8]], greedy_params(4), use_tqdm=False)
    outputs = caught.value.outputs
    assert outputs[1] is None
    assert [outputs[i].outputs[0].token_ids for i in (0, 2)] == [want, want]
    idle(llm)


def test_a_request_without_a_token_to_sample_fails_alone(tiny: Tiny) -> None:
    """NaN logits of one request, and all tokens ruled out in another: both fail, and their mate goes on."""
    llm = llm_on(tiny[0])
    params = SamplingParams(max_tokens=6, seed=3, ignore_eos=True)
    want = llm.generate([[7, 8]], params, use_tqdm=False)[0].outputs[0].token_ids
    vocab = llm.engine.vocab_size
    silent = SamplingParams(max_tokens=6, min_tokens=4, stop_token_ids=range(vocab))
    logits, calls = llm.engine.model.decoder.logits, []

    def poisoned(hidden: Any) -> Any:
        out = logits(hidden).clone()
        calls.append(len(out))
        if len(calls) == 1:
            out[1] = float("nan")
        return out

    try:
        llm.engine.model.decoder.logits = poisoned  # type: ignore[method-assign]
        with pytest.raises(GenerationFailed, match=r"2 of 3") as caught:
            llm.generate([[7, 8], [9, 10, 11], [12, 13]], [params, params, silent], use_tqdm=False)
    finally:
        llm.engine.model.decoder.logits = logits  # type: ignore[method-assign]
    assert calls[:2] == [3, 1]
    first, *others = caught.value.outputs
    assert others == [None, None]
    assert first.outputs[0].token_ids == want
    idle(llm)


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("budget", "when"), [(2048, 1), (2048, 3), (32, 1)])
def test_bad_logits_end_their_request_and_its_kv_is_served_to_nobody(
    tiny: Tiny, budget: int, when: int, value: float, search: bool
) -> None:
    """At the first token, a later one, or after chunks already published: that request alone fails, of
    beams as of samples, its mates' results are as alone, and its prompt is computed again from nothing."""
    bad, good = list(range(70)), [7, 8, 9]
    mates = [greedy_params(6), SamplingParams(temperature=0, beam_width=3, n=3, max_tokens=6)]
    params = mates[1] if search else greedy_params(6)
    llm = llm_on(tiny[0], max_batched_tokens=budget)
    runner, rows, count = llm.engine.runner, [], 0
    compute, forward = runner.logits, runner.forward

    def watching(plan: Any, tables: Any) -> Any:
        sampling = [entry for entry in plan.entries if entry.num_samples]
        rows[:] = [i for i, entry in enumerate(sampling) if entry.branch.request.prompt == bad]
        return forward(plan, tables)

    def poisoned(hidden: Any) -> Any:
        nonlocal count
        logits = compute(hidden).clone()
        count += bool(rows)
        if rows and count == when:
            logits[rows[0], 5] = value
        return logits

    runner.forward, runner.logits = watching, poisoned  # type: ignore[method-assign]
    with pytest.raises(GenerationFailed, match=r"1 of 3.*prompt 1.*NaN or infinite") as caught:
        llm.generate([good, bad, good], [mates[0], params, mates[1]], use_tqdm=False)
    assert isinstance(caught.value.__cause__, BadLogits)
    for i, mate in ((0, mates[0]), (2, mates[1])):
        (alone,) = llm_on(tiny[0]).generate(good, mate, use_tqdm=False)
        assert [o.token_ids for o in caught.value.outputs[i].outputs] == [o.token_ids for o in alone.outputs]
    idle(llm)
    (out,) = llm.generate(bad, params, use_tqdm=False)
    assert out.num_cached_tokens == 0
    (cold,) = llm_on(tiny[0]).generate(bad, params, use_tqdm=False)
    assert [o.token_ids for o in out.outputs] == [o.token_ids for o in cold.outputs]


def test_what_a_failed_step_computed_is_not_reused(tiny: Tiny) -> None:
    """KV of a step that raised is never published: the prompt is computed again, rightly."""
    llm = llm_on(tiny[0])
    prompt = list(range(64))
    want = llm_on(tiny[0]).generate(prompt, greedy_params(4), use_tqdm=False)[0].outputs[0].token_ids
    logits = llm.engine.model.decoder.logits
    try:
        llm.engine.model.decoder.logits = lambda hidden: 1 / 0
        with pytest.raises(GenerationFailed):
            llm.generate(prompt, greedy_params(4), use_tqdm=False)
    finally:
        llm.engine.model.decoder.logits = logits
    (out,) = llm.generate(prompt, greedy_params(4), use_tqdm=False)
    assert out.num_cached_tokens == 0
    assert out.outputs[0].token_ids == want


def test_500_requests_100_aborted_leave_nothing(tiny: Tiny) -> None:
    """500 requests, 100 of them aborted at random moments: free + cached = N and nothing is held."""
    rng = random.Random(17)
    engine = llm_on(tiny[0], num_blocks=60, block_size=4, max_batched_tokens=64, max_num_seqs=16).engine
    shared = prompts(5, 1, 60)
    doomed = set(rng.sample(range(500), 100))
    open_ids: set[int] = set()
    added = finished = aborted = 0
    while added < 500 or engine.has_work:
        for _ in range(rng.randint(0, 4)):
            if added < 500:
                prompt = [*rng.choice(shared)[: rng.randint(1, 60)], rng.randrange(256)]
                params = SamplingParams(n=rng.choice((1, 1, 2, 4)), max_tokens=rng.randint(1, 30))
                open_ids.add(engine.add_request(prompt, params))
                added += 1
        for request_id in [i for i in open_ids if i in doomed and rng.random() < 0.1]:
            engine.abort(request_id)
            open_ids.remove(request_id)
            aborted += 1
        for delta in engine.step():
            assert delta.error is None
            if delta.finished:
                open_ids.remove(delta.request_id)
                finished += 1
        engine.pool.check()
    assert finished + aborted == 500
    assert aborted > 50
    assert not open_ids
    stats = engine.pool.stats()
    assert (stats.held, stats.free + stats.cached) == (0, 60)
    assert not engine._live


def test_interrupted_generation_gives_everything_back_and_stays_reusable(tiny: Tiny) -> None:
    """An exception out of the loop (a Ctrl-C, say) holds nothing, and what was computed is found again."""
    llm = llm_on(tiny[0])
    step, prompt = llm.engine.step, list(range(48))
    calls = 0

    def interrupted() -> Any:
        nonlocal calls
        calls += 1
        if calls > 10:
            raise KeyboardInterrupt
        return step()

    llm.engine.step = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompt, greedy_params(40), use_tqdm=False)
    idle(llm)
    llm.engine.step = step  # type: ignore[method-assign]
    (out,) = llm.generate(prompt, greedy_params(40), use_tqdm=False)
    assert out.num_cached_tokens == 47


def test_chat_renders_the_template(tiny: Tiny) -> None:
    """LLM.chat takes one conversation or several, and encodes them with the model's template."""
    llm = llm_on(tiny[0])
    one = [{"role": "user", "content": "hi"}]
    (single,) = llm.chat(one, greedy_params(3), use_tqdm=False)
    several = llm.chat([one, one], greedy_params(3), use_tqdm=False)
    assert single.prompt_token_ids == llm.engine.tokenizer.encode_chat(one)
    assert [o.outputs[0].token_ids for o in several] == [single.outputs[0].token_ids] * 2
