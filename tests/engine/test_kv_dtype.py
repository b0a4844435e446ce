"""Keys and values stored in another format than the weights: sizes, tokens, tiers and precision.

The oracle computes one prompt at a time on a float32 cache of one block, and rounds keys and values through
the format before they are stored; nothing of it is paged, packed or read from a narrow type.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import SamplingParams
from octavo.attention import AttentionBackend, AttentionBatch, LayerCache, ReferenceBackend, make_backend
from octavo.attention.quant import quantize
from octavo.engine import EngineConfig, EngineThread
from octavo.engine.config import STORED, Budget
from octavo.engine.defaults import choose_format
from octavo.engine.llm import LLM
from octavo.engine.planning import plan_memory
from octavo.engine.tiers import StoreMismatch, block_bytes
from octavo.kv import KV_DTYPES
from octavo.models import WEIGHTS, Decoder, LoadedModel, load_header, load_model, quantised
from tests.engine.helpers import Reference, idle, llm_on, over_admit, ties, tiny_checkpoint

Tiny = tuple[LoadedModel, Any]
PAIRS = "cpu, pairs"
"""Kernels that round queries and weights to bfloat16 beside such a cache; see docs/attention.md."""
BACKENDS = ["reference"]
if make_backend("auto").name == "cpu":
    from octavo.attention.cpu import ISAS, CpuBackend

    BACKENDS += ["cpu"] + [PAIRS] * ("avx512bf16" in ISAS)


def backend_of(name: str) -> AttentionBackend:
    """A backend of BACKENDS."""
    if name == "reference":
        return ReferenceBackend()
    return CpuBackend(isa=next(isa for isa in ISAS if (isa == "avx512bf16") == (name == PAIRS)))


NARROW = ("bfloat16", "float16", "int8")
COUNT = 24


def params(count: int = COUNT) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


class Rounding(ReferenceBackend):
    """Stores what a cache of `dtype` would give back, in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.stored = dtype

    def write_kv(self, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        super().write_kv(self._round(key), self._round(value), cache, slots)

    def _round(self, rows: Tensor) -> Tensor:
        if self.stored != torch.int8:
            return rows.to(self.stored).float()
        values, scale = quantize(rows)
        return values * scale[..., None]


def oracle(decoder: Decoder, prompt: list[int], count: int, dtype: torch.dtype, pairs: bool) -> Reference:
    """Greedy tokens and the gaps between the two best logits, with K and V rounded through `dtype`; in pairs,
    whose kernels are compared with float64 elsewhere, by these, one prompt at a time on one block."""
    config = decoder.config
    backend: AttentionBackend = backend_of(PAIRS) if pairs else Rounding(dtype)
    stored = dtype if pairs else torch.float32
    shape = (1, len(prompt) + count, config.num_kv_heads, config.head_dim)
    caches = [LayerCache(*torch.zeros(2, *shape, dtype=stored)) for _ in range(config.num_layers)]
    tokens, gaps, new = [], [], prompt
    for _ in range(count):
        start = len(prompt) + len(tokens) - len(new)
        places = torch.arange(start, start + len(new))
        batch = AttentionBatch(
            tables=torch.zeros(1, 1, dtype=torch.int32),
            query_start=torch.tensor([0, len(new)], dtype=torch.int32),
            kv_len=torch.tensor([start + len(new)], dtype=torch.int32),
            slots=places,
        )
        hidden = decoder.forward(torch.tensor(new), places, caches, batch, backend)
        best = decoder.logits(hidden[-1:])[0].topk(2)
        tokens.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
        new = tokens[-1:]
    return Reference(tokens, gaps)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Some begin alike, so that blocks are shared and copied."""
    rng = random.Random(8)
    shared = [rng.randrange(256) for _ in range(90)]
    return [
        shared[: rng.randrange(90)] + [rng.randrange(256) for _ in range(rng.randint(1, 40))]
        for _ in range(8)
    ]


@pytest.fixture(scope="module")
def expected(tiny: Tiny, prompts: list[list[int]]) -> Callable[..., list[Reference]]:
    """The oracle's answers by format and backend, each computed once."""
    made: dict[tuple[str, bool], list[Reference]] = {}

    def find(dtype: str, name: str = "reference") -> list[Reference]:
        key = dtype, name == PAIRS and dtype == "bfloat16"
        if key not in made:
            made[key] = [oracle(tiny[0].decoder, prompt, COUNT, STORED[dtype], key[1]) for prompt in prompts]
        return made[key]

    return find


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_tokens_are_those_of_rounded_keys_and_values(
    tiny: Tiny, prompts: list[list[int]], expected: Any, dtype: str, name: str
) -> None:
    """Together, again with a warm cache, and through a pool so small that sequences are preempted."""
    for options in (
        {"block_size": 5},
        {"block_size": 32},
        {"block_size": 4, "num_blocks": 42, "max_batched_tokens": 64},
    ):
        llm = over_admit(llm_on(tiny[0], backend_of(name), kv_dtype=dtype, **options))
        for _ in range(2):
            assert ties(llm.generate(prompts, params(), use_tqdm=False), expected(dtype, name)) <= 1
        idle(llm)
    assert llm.engine.scheduler.stats.preemptions > 0


def test_a_narrow_cache_is_no_float32_cache_in_disguise(expected: Any) -> None:
    """The oracle's answers differ between formats, so equality with them means something."""
    found = {dtype: [reference.gaps for reference in expected(dtype)] for dtype in KV_DTYPES}
    assert all(found[dtype] != found["float32"] for dtype in NARROW)
    assert found["float16"] != found["bfloat16"]


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_the_budget_is_what_the_tensors_take(tiny: Tiny, dtype: str) -> None:
    """Bytes per block by arithmetic equal those of the caches, scales included; kv_memory buys that many."""
    engine = llm_on(tiny[0], kv_dtype=dtype, kv_memory="1MiB", block_size=7).engine
    cache = engine.runner.caches[0]
    assert cache.key.dtype == cache.value.dtype == STORED[dtype]
    assert engine.budget.bytes_per_block == block_bytes(engine.runner.caches)
    assert engine.budget.num_blocks == cache.num_blocks == 2**20 // engine.budget.bytes_per_block
    assert cache.block_size == engine.budget.block_size == 7
    stats, rows = EngineThread(engine).stats(), dict(engine.describe())
    assert stats["kv_dtype"] == dtype
    assert stats["bytes_per_block"] == engine.budget.bytes_per_block
    assert stats["block_size"] == 7
    assert rows["KV dtype"] == f"{dtype} (--kv-dtype)"
    assert rows["KV block"].startswith(f"7 tokens, {engine.budget.bytes_per_block:,} bytes (--block-size")


def test_what_was_chosen_says_so(tiny: Tiny) -> None:
    """Without options the rows say what was picked, why, and what overrides it."""
    engine = llm_on(tiny[0]).engine
    rows = dict(engine.describe())
    assert rows["KV dtype"].startswith("float32 (auto: ")
    assert "--kv-dtype" in rows["KV dtype"]
    assert rows["KV block"].startswith(f"{engine.budget.block_size} tokens, ")
    assert "(auto: " in rows["KV block"]
    assert rows["KV block"].endswith("--block-size)")


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("block_size", [1, 7, 16, 24, 32, 256])
def test_a_block_size_without_the_fast_layout_says_so(tiny: Tiny, block_size: int, name: str) -> None:
    """The row tells of packing exactly where the cpu backend's caches lie as rows."""
    engine = llm_on(tiny[0], backend_of(name), block_size=block_size, num_blocks=600 // block_size).engine
    packs = name != "reference" and engine.runner.caches[0].storage is None
    assert ("pack keys" in dict(engine.describe())["KV block"]) == packs


class Other(ReferenceBackend):
    """A backend that the table of block sizes does not know, and whose kernels like bfloat16."""

    name = "other"
    half = torch.bfloat16


def test_a_backend_that_nobody_measured_says_so() -> None:
    """The default holds for it too, without a claim."""
    found = choose_format(EngineConfig(), "float32", False, Other())
    assert (found.block_size, found.block_reason) == (
        16,
        "auto: not measured on other; larger ones waste more; --block-size",
    )


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "float16"])
def test_auto_is_the_weights_format(weights: str) -> None:
    backend = make_backend("auto")
    assert choose_format(EngineConfig(dtype=weights), weights, False, backend).dtype == weights
    chosen = EngineConfig(dtype=weights, kv_dtype="int8")
    assert choose_format(chosen, weights, False, backend).dtype == "int8"


def test_auto_is_sixteen_bits_beside_quantised_weights(tmp_path: Path) -> None:
    """int8 weights round more than a half does, so a cache of halves is the default; the backend says which.

    Not where the weights are float32, by option or because no matrix can be quantised.
    """
    other, reference = Other(), ReferenceBackend()
    assert choose_format(EngineConfig(), "float32", True, other).dtype == "bfloat16"
    assert choose_format(EngineConfig(), "float32", True, reference).dtype == "float16"
    assert choose_format(EngineConfig(kv_dtype="float32"), "float32", True, other).dtype == "float32"
    path, _ = tiny_checkpoint(tmp_path)
    header = load_header(str(path))
    for weights in WEIGHTS if len(BACKENDS) > 1 else ("auto", "float32"):
        model = load_model(path, weights=weights)
        assert model.decoder.quantised is (weights in ("int8", "int4"))
        assert quantised(header, "float32", weights) is model.decoder.quantised
        backend = make_backend("auto")
        engine = llm_on(model, backend, weights=weights).engine
        expected = backend.half if model.decoder.quantised else torch.float32
        assert engine.runner.caches[0].key.dtype == expected
        rows = dict(engine.describe())
        assert rows["KV dtype"].startswith(str(expected).removeprefix("torch.") + " (auto: ")
        memory = 2**30
        plan = plan_memory(EngineConfig(model=str(path), weights=weights, num_blocks=10), header, memory)
        assert STORED[plan.kv_dtype] == expected


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("weights", ["bfloat16", "float16"])
def test_half_precision_weights_over_any_cache(tiny: Tiny, weights: str, name: str) -> None:
    """Every pair of formats runs on both backends, and float32 keys give what the narrow ones give."""
    model = load_model(tiny[0].path, STORED[weights])
    prompt = list(range(40))
    answers = {}
    for dtype in KV_DTYPES:
        llm = llm_on(model, backend_of(name), kv_dtype=dtype)
        (output,) = llm.generate(prompt, params(4), use_tqdm=False)
        answers[dtype] = output.outputs[0].token_ids
        idle(llm)
    # Keys and values leave the model in the weights' format, so storing them in it or wider is exact.
    assert answers["float32"] == answers[weights]


def test_a_block_size_that_is_left_open_counts_in_every_number() -> None:
    """The default reaches blocks, context and tiers alike."""
    from octavo.kv import KVShape

    shape = KVShape.stored_as(2, 1, 8, "int8")
    config = EngineConfig(kv_memory=shape.bytes_per_block(32) * 5, host_cache=shape.bytes_per_block(32) * 3)
    budget = Budget.plan(config, shape, 10_000, default_block_size=32)
    assert (budget.block_size, budget.num_blocks, budget.host_blocks, budget.max_model_len) == (32, 5, 3, 160)


# -- tiers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_blocks_come_back_from_lower_tiers_with_their_scales(
    tiny: Tiny,
    prompts: list[list[int]],
    expected: Any,
    tmp_path: Path,
    dtype: str,
    block_size: int,
    name: str,
) -> None:
    """A device that holds little, a small host tier, a disk, and a restart: the oracle's tokens."""
    options: dict[str, Any] = {
        "kv_dtype": dtype,
        "block_size": block_size,
        "num_blocks": 192 // block_size,
        "max_num_seqs": 2,
        "disk_cache": str(tmp_path),
        "disk_cache_size": "2MiB",
    }
    with llm_on(tiny[0], backend_of(name), host_cache="48KiB", **options) as llm:
        for _ in range(2):
            assert ties(llm.generate(prompts, params(), use_tqdm=False), expected(dtype, name)) <= 1
        assert llm.engine.pool.stats().promotions > 0
        idle(llm)
    with llm_on(tiny[0], backend_of(name), **options) as llm:
        outputs = llm.generate(prompts, params(), use_tqdm=False)
        assert ties(outputs, expected(dtype, name)) <= 1
        assert all(o.num_cached_tokens == len(o.prompt_token_ids) - 1 for o in outputs)


def test_a_disk_of_another_format_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    """float16 and bfloat16 blocks have one size, so only the fingerprint can tell them apart."""
    options: dict[str, Any] = {"disk_cache": str(tmp_path / "kv"), "disk_cache_size": "1MiB"}
    with llm_on(tiny[0], kv_dtype="float16", **options) as llm:
        llm.generate(list(range(40)), params(2), use_tqdm=False)
    for dtype in ("auto", "bfloat16", "int8"):
        with pytest.raises(StoreMismatch):
            llm_on(tiny[0], kv_dtype=dtype, **options)
    with llm_on(tiny[0], kv_dtype="float16", **options) as llm:
        assert llm.generate(list(range(40)), params(2), use_tqdm=False)[0].num_cached_tokens == 39


# -- precision -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outliers(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A model in which some channels of every key are thirty times the others: a large bias on K."""
    directory, model = tiny_checkpoint(tmp_path_factory.mktemp("outliers"), family="Qwen2")
    with torch.no_grad():
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias
            bias[::8] = 30 * bias.abs().mean() * torch.where(torch.arange(len(bias[::8])) % 2 == 0, 1, -1)
    model.save_pretrained(directory)
    return load_model(directory)


def conversation(llm: LLM, forced: list[list[int]] | None = None) -> tuple[list[list[int]], list[Tensor]]:
    """Three turns of 100 tokens each, greedy or `forced`; the answers and the log probabilities [100, V].

    Each turn's prompt is the history and three new tokens, so most of it comes from the cache.
    """
    runner, answers, logprobs = llm.engine.runner, [], []
    history: list[int] = []
    compute = runner.logits
    rows: list[Tensor] = []
    wanted: list[int] = []

    def recording(hidden: Tensor) -> Tensor:
        logits = compute(hidden)
        rows.append(logits.clone())
        if wanted:
            logits = torch.zeros_like(logits)
            logits[:, wanted[len(rows) - 1]] = 1.0
        return logits

    runner.logits = recording  # type: ignore[method-assign]
    for turn in range(3):
        history += [turn + 1, turn + 2, turn + 3]
        rows.clear()
        if forced is not None:
            wanted[:] = forced[turn]
        (output,) = llm.generate(history, params(100), use_tqdm=False)
        if turn:
            assert output.num_cached_tokens > 100 * turn
        answers.append(output.outputs[0].token_ids)
        logprobs.append(torch.cat(rows).log_softmax(-1))
        history = [*history, *answers[-1]]
    return answers, logprobs


@pytest.mark.parametrize("name", BACKENDS)
def test_outlying_channels_survive_many_turns(outliers: LoadedModel, name: str) -> None:
    """300 tokens over three turns: the mean KL divergence from a float32 cache stays under the bound."""
    options = {"block_size": 16}
    answers, exact = conversation(llm_on(outliers, backend_of(name), **options))
    for dtype, bound in (("float16", 1e-5), ("bfloat16", 5e-4), ("int8", 5e-3)):
        llm = llm_on(outliers, backend_of(name), kv_dtype=dtype, **options)
        again, found = conversation(llm, answers)
        assert again == answers
        divergence = [float((a.exp() * (a - b)).sum(-1).mean()) for a, b in zip(exact, found, strict=True)]
        assert all(0 < each < bound for each in divergence), f"{dtype}: {divergence}"
