"""The planner: its sums are the decoder's and the engine's own, from a header alone."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.cli.main import main
from octavo.engine import ConfigError, Engine, EngineConfig, SamplingParams
from octavo.engine.planning import changes, plan_memory
from octavo.kv import KV_DTYPES, LIBRARIES
from octavo.models import load_header, load_model, resolve_model, weights_bytes
from octavo.models.build import WEIGHTS
from octavo.models.errors import ModelError
from tests.engine.helpers import tiny_checkpoint

GIB, MIB = 2**30, 2**20


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Models of unlike shapes: plain, grouped with wide heads, untied weights and biases, many layers."""
    root = tmp_path_factory.mktemp("models")
    shapes: list[dict[str, Any]] = [
        {},
        {"num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 3},
        {"tie_word_embeddings": True, "attention_bias": True, "intermediate_size": 200},
        {"num_hidden_layers": 12, "max_position_embeddings": 2048},
    ]
    return [tiny_checkpoint(root / str(i), **shape)[0] for i, shape in enumerate(shapes)]


def test_the_sums_are_the_engines(folders: list[Path], tmp_path: Path) -> None:
    """Budgets x KV dtypes x models: blocks, bytes, context and weights are what the loaded engine has."""
    for folder in folders:
        model = load_model(folder)
        header = load_header(str(folder / "config.json"))
        assert header.config == model.config == load_header(str(folder)).config
        for weights in WEIGHTS:
            loaded = load_model(folder, weights=weights).weights_bytes
            assert weights_bytes(header, "float32", weights) == loaded, weights
        assert weights_bytes(header, "bfloat16", "auto") == load_model(folder, torch.bfloat16).weights_bytes
        for budget in ("8MiB", "64MiB", "256MiB"):
            for kv_dtype in KV_DTYPES:
                config = EngineConfig(str(folder), kv_memory=budget, kv_dtype=kv_dtype)
                engine = Engine(model, config)
                plan = plan_memory(config, header, 8 * GIB)
                assert plan.budget == engine.budget
                assert plan.weights == model.weights_bytes
                assert plan.activations == engine.activations.bytes
                held = sum(t.numel() * t.element_size() for c in engine.runner.caches for t in c.tensors())
                assert plan.kv_bytes == held


def test_a_draft_model_is_in_the_sums(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Weights, activations and KV of both models are what the engine has, and the table shows the draft's."""
    model, draft = load_model(folders[0]), load_model(folders[1])
    config = EngineConfig(str(folders[0]), kv_memory="8MiB", speculate=4, draft_model=str(folders[1]))
    plan = plan_memory(config, load_header(config.model), 8 * GIB, draft=load_header(str(folders[1])))
    engine = Engine(model, config)
    assert engine.draft is not None
    assert plan.budget == engine.budget
    assert (plan.weights, plan.draft_weights) == (model.weights_bytes, draft.weights_bytes)
    assert plan.activations == engine.activations.bytes
    caches = [*engine.runner.caches, *engine.draft.caches]
    assert plan.kv_bytes == sum(t.numel() * t.element_size() for c in caches for t in c.tensors())
    args = ["--draft-model", str(folders[1]), "--speculate", "4", "--memory", "16GiB"]
    assert main(["plan", str(folders[0]), *args, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["draft_weights"] == draft.weights_bytes
    assert main(["plan", str(folders[0]), *args]) == 0
    assert "draft model's weights" in capsys.readouterr().out


def test_auto_is_the_same_on_both_sides(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same memory free, planner and engine choose the same blocks, and leave the reserve."""
    model = load_model(folders[0])
    free = 400 * MIB
    monkeypatch.setattr("octavo.engine.engine.available_memory", lambda: free - model.weights_bytes)
    config = EngineConfig(str(folders[0]), kv_memory="auto")
    engine = Engine(model, config)
    assert engine.activations.measured is not None
    plan = plan_memory(config, load_header(str(folders[0])), free)
    if engine.activations.bytes == plan.activations:
        assert plan.budget == engine.budget
    else:  # more was measured than the shape says: the engine keeps to what it saw
        assert engine.budget.num_blocks < plan.budget.num_blocks
    assert plan.total + plan.reserve <= free < plan.total + plan.reserve + plan.budget.bytes_per_block
    assert plan.reserve >= 256 * MIB
    monkeypatch.setattr("octavo.engine.engine.available_memory", lambda: 300 * MIB)
    with pytest.raises(ConfigError, match=r"kv_memory auto: of 314,572,800 bytes .* 268,435,456 stay free"):
        Engine(model, config)
    monkeypatch.setattr("octavo.engine.engine.available_memory", lambda: None)
    with pytest.raises(ConfigError, match="does not say how much memory is free"):
        Engine(model, config)


GROWTH = """
import json, random, sys
import torch
from octavo.engine import Engine, EngineConfig, SamplingParams
from octavo.engine.memory import resident_memory
from octavo.engine.planning import plan_memory, program_bytes
from octavo.models import load_header, load_model
name, options = sys.argv[1], json.loads(sys.argv[2])
def highest():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) * 1024
config, header = EngineConfig(name, **options), load_header(name)
before = resident_memory()
engine = Engine(load_model(name), config)
plan = plan_memory(config, header, 16 * 2**30, program_bytes(header, before))
assert plan.budget == engine.budget
empty = resident_memory()
for cache in engine.runner.caches:
    for part in cache.stretches():
        part.view(-1).fill_(1)
kv = resident_memory() - empty
open("/proc/self/clear_refs", "w").write("5")  # the loader's height is not the server's
rng = random.Random(0)
def run(wanted):
    while wanted > 0:
        size = min(engine.max_model_len - 2, rng.choice((30, 200, 2000)))
        prompt = [rng.randrange(engine.vocab_size) for _ in range(size)]
        engine.add_request(prompt, SamplingParams(max_tokens=2, ignore_eos=True, temperature=1, top_p=0.9))
        wanted -= size
        while wanted <= 0 and engine.has_work or len(engine.scheduler.waiting) > 64:
            engine.step()
slots = engine.budget.num_blocks * engine.budget.block_size
run(min(1.2 * slots, 6_000))
hidden = torch.zeros(config.max_batched_tokens, engine.model.config.hidden_size)
engine.runner.forward = lambda plan, tables: hidden[:plan.num_tokens]  # the bookkeeping of the rest
run(1.2 * slots - 6_000)
assert engine.pool.stats().free == 0
print(json.dumps({"kv": kv, "planned_kv": plan.kv_bytes, "whole": highest(), "planned": plan.total}))
"""


def growth(name: str, **options: Any) -> dict[str, int]:
    """In a fresh process: the bytes of a cache whose every block was written, those of the process at its
    height while requests fill the pool, and what was planned for both."""
    command = [sys.executable, "-c", GROWTH, name, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_resident_memory_keeps_to_the_plan(folders: list[Path]) -> None:
    """The cache grows to its size and no further, and the process to no more than the plan and 15 %."""
    # Twelve layers, each of one huge page and a half.
    took = growth(str(folders[3]), kv_memory="36MiB", kv_dtype="float32")
    assert 0.95 * took["planned_kv"] < took["kv"] <= 1.05 * took["planned_kv"]
    assert took["whole"] <= 1.15 * took["planned"]


@pytest.mark.proof
@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2", "stories260K-hf", "tiny"])
@pytest.mark.parametrize("budget", ["8MiB", "64MiB", "256MiB"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_resident_memory_in_every_format(
    folders: list[Path], name: str, budget: str, kv_dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same for each budget, KV dtype and model; prints what came of it."""
    if name == "tiny":
        where = str(folders[1])
    elif name == "stories260K-hf":
        where = str(Path(__file__).parents[3] / "shared/models" / name)
        if not Path(where).is_dir():
            pytest.skip(f"{where} is not here")
    else:
        where = name
    took = growth(where, kv_memory=budget, kv_dtype=kv_dtype)
    with capsys.disabled():
        shares = took["kv"] / took["planned_kv"], took["whole"] / took["planned"]
        figures = " ".join(f"{key} {value / MIB:.1f}" for key, value in took.items())
        print(f"\n{name} {budget} {kv_dtype}: {figures} MiB, {shares[0]:.3f} and {shares[1]:.3f} of the plan")
    # What is smaller than a huge page comes from the heap, which may have room from before.
    assert took["kv"] <= 1.15 * took["planned_kv"]
    assert took["whole"] <= 1.15 * took["planned"]


@pytest.mark.model
@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights_of_a_quantised_file(weights: str) -> None:
    """The default model's, in each form they can be loaded in."""
    assert (
        weights_bytes(load_header("smollm2"), "float32", weights)
        == load_model("smollm2", weights=weights).weights_bytes
    )


def test_only_the_header_is_read(tmp_path: Path) -> None:
    """A GGUF file cut off after its header plans as the whole one; loading it is refused as ever."""
    whole = resolve_model("smollm2")
    cut = tmp_path / "cut.gguf"
    with whole.open("rb") as file:
        cut.write_bytes(file.read(4 * MIB))
    assert load_header(str(cut)) == load_header(str(whole)) == load_header("smollm2")
    with pytest.raises(ModelError, match="truncated"):
        load_model(cut)


def test_what_must_change_does_reach_the_target(folders: list[Path]) -> None:
    """Each change, made, gives room for the number asked for; with room there is none."""
    header = load_header(str(folders[0]))
    for kv_memory in ("1MiB", "auto"):
        memory = GIB if kv_memory == "1MiB" else 340 * MIB
        config = EngineConfig(kv_memory=kv_memory)
        plan = plan_memory(config, header, memory)
        context, wanted = 300, plan.fitting(300) * 2
        assert wanted > 0
        assert changes(plan, context, plan.fitting(context)) == []
        every = changes(plan, context, wanted)
        formats = ("--kv-dtype", "--weights")
        ways = {w.option: int(w.value.replace(",", "")) for w in every if w.option not in formats}
        assert plan.fitting(ways["--context"]) >= wanted
        assert plan.fitting(context) == ways["--concurrency"]
        if kv_memory == "auto":
            assert plan_memory(config, header, ways["--memory"]).fitting(context) >= wanted
        else:
            more = EngineConfig(kv_memory=ways["--kv-memory"])
            assert plan_memory(more, header, memory).fitting(context) == wanted
        dtypes = [way.value for way in every if way.option == "--kv-dtype"]
        for dtype in dtypes:
            smaller = EngineConfig(kv_memory=plan.kv_bytes, kv_dtype=dtype)
            assert plan_memory(smaller, header, memory).fitting(context) >= wanted
        assert "bfloat16" in dtypes
        for way in every:
            if way.option == "--weights":  # their cache is of sixteen bits
                smaller = EngineConfig(kv_memory=kv_memory, weights=way.value)
                assert plan_memory(smaller, header, memory).fitting(context) >= wanted


@pytest.fixture
def small_program(monkeypatch: pytest.MonkeyPatch) -> int:
    """What a fresh process has; the tests' own has far more."""
    monkeypatch.setattr("octavo.engine.memory.resident_memory", lambda: 240 * MIB)
    return 240 * MIB


def test_the_command(folders: list[Path], small_program: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables for people, JSON for programs, and one line for what cannot be."""
    where = str(folders[0] / "config.json")
    assert main(["plan", where, "--memory", "1GiB", "--context", "256", "--concurrency", "100000"]) == 0
    shown = capsys.readouterr().out
    assert "do not fit at once" in shown
    assert "--memory" in shown
    assert main(["plan", where, "--memory", "1GiB", "--context", "256", "--concurrency", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["changes"] == []
    plan = answer["plan"]
    assert plan["requests_context"] == plan["num_blocks"] // math.ceil(256 / plan["block_size"])
    assert answer["total"] <= 1 * GIB
    assert {v["kv_dtype"] for v in answer["variants"]} == set(KV_DTYPES)
    assert main(["plan", where, "--memory", "1KiB"]) == 2
    assert "the weights need" in capsys.readouterr().err
    assert main(["plan", str(folders[0] / "none")]) == 2
    for options, message in (
        (["--context", "100000"], "--context 100,000 is more than the model's context of"),
        (["--typical", "100000"], "--typical 100,000 is more than"),
        (["--kv-memory", "1023MiB"], "a step and libraries .* more, but only .* are available"),
    ):
        assert main(["plan", where, "--memory", "1GiB", *options]) == 2
        assert re.search(message, capsys.readouterr().err)


def test_the_program_itself_counts(
    folders: list[Path], small_program: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of --memory, what the process has before the model is gone; with it every byte has its row."""
    where = str(folders[0] / "config.json")
    answers = {}
    for size in ("900MiB", "1GiB"):
        assert main(["plan", where, "--memory", size, "--json"]) == 0
        answer = answers[size] = json.loads(capsys.readouterr().out)
        assert answer["program"] >= small_program
        parts = answer["program"] + answer["weights"] + answer["activations"] + answer["plan"]["kv_bytes"]
        assert answer["total"] == parts + LIBRARIES
        assert answer["total"] + answer["reserve"] <= answer["memory"]
    more = answers["1GiB"]["plan"]["kv_bytes"] - answers["900MiB"]["plan"]["kv_bytes"]
    assert abs(more - 124 * MIB) <= answers["1GiB"]["plan"]["bytes_per_block"]


def test_random_options_plan_as_the_engine_does(folders: list[Path], tmp_path: Path) -> None:
    """dtype, weights, formats, block sizes, tiers, guesses, lengths: one budget, one step's memory."""
    rng = random.Random(4)
    for number in range(24):
        folder = rng.choice(folders)
        dtype = rng.choice(["float32", "float32", "bfloat16"])
        size: dict[str, Any] = {"kv_memory": rng.choice(["3MiB", "20MB", 456_789])}
        if rng.random() < 0.3:
            size = {"num_blocks": rng.randint(1, 300)}
        config = EngineConfig(
            str(folder),
            dtype=dtype,
            weights=rng.choice(WEIGHTS) if dtype == "float32" else "auto",
            kv_dtype=rng.choice(["auto", *KV_DTYPES]),
            block_size=rng.choice([None, 1, 7, 16, 100]),
            host_cache=rng.choice([None, "1MiB"]),
            disk_cache=rng.choice([None, str(tmp_path / f"{number}.kv")]),
            max_num_seqs=rng.choice([1, 9, 64]),
            max_batched_tokens=rng.choice([16, 500, 2048]),
            speculate=rng.choice([0, 5]),
            **size,
        )
        plan = plan_memory(config, load_header(str(folder)), 8 * GIB)
        engine = Engine.from_config(config)
        assert plan.budget == engine.budget, config
        assert plan.weights == engine.model.weights_bytes, config
        assert plan.activations == engine.activations.bytes, config
        assert plan.host_bytes == engine.budget.host_blocks * engine.budget.bytes_per_block
        engine.close()


def test_logits_of_a_step_are_planned_for(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses and judged prompts have rows of logits too: never more at once than the plan reckons with."""
    for options, params in (
        ({"max_num_seqs": 4, "speculate": 6}, {"max_tokens": 60}),
        ({"max_num_seqs": 2}, {"max_tokens": 1, "prompt_logprobs": 1}),
    ):
        config = EngineConfig(str(folders[0]), kv_memory="2MiB", **options)
        engine = Engine.from_config(config)
        rows: list[int] = []

        def logits(hidden: Any, inner: Any = engine.runner.logits, rows: list[int] = rows) -> Any:
            rows.append(len(hidden))
            return inner(hidden)

        monkeypatch.setattr(engine.runner, "logits", logits)
        for number in range(4):
            prompt = [20 + number, 30, 31] * 60
            engine.add_request(prompt, SamplingParams(temperature=0, ignore_eos=True, **params))
        while engine.has_work:
            engine.step()
        assert config.max_num_seqs < max(rows) <= config.most_rows


def test_changes_fit_the_options_given(folders: list[Path]) -> None:
    """What cannot be combined is not proposed; fewer bits for weights are, where that is enough."""
    header = load_header(str(folders[0]))
    plan = plan_memory(EngineConfig(num_blocks=10), header, GIB)
    way = changes(plan, 300, 64)[0]
    assert way.option == "--num-blocks"
    need = int(way.value.replace(",", ""))
    assert plan_memory(EngineConfig(num_blocks=need), header, GIB).fitting(300) == 64
    assert changes(plan, 300, 64)[1:] == []  # the same blocks of fewer bits hold no more
    plan = plan_memory(EngineConfig(kv_memory="auto", weights="float32"), header, 340 * MIB)
    wanted = plan.fitting(300) + 1
    found = {way.value for way in changes(plan, 300, wanted) if way.option == "--weights"}
    for weights in WEIGHTS:
        other = plan_memory(EngineConfig(kv_memory="auto", weights=weights), header, 340 * MIB)
        assert (weights in found) == (other.fitting(300) >= wanted), weights


def test_a_context_that_is_lowered_says_what_would_help(folders: list[Path]) -> None:
    """By the option that is in the way."""
    header = load_header(str(folders[0]))
    for options, memory, hint in (
        ({"num_blocks": 3}, GIB, "raise num_blocks"),
        ({"kv_memory": 100_000}, GIB, "raise kv_memory"),
        ({"kv_memory": "auto"}, 256 * MIB + 53 * MIB, "free some memory"),
    ):
        plan = plan_memory(EngineConfig(**options), header, memory)
        assert plan.budget.max_model_len < header.config.max_position_embeddings
        assert hint in plan.budget.context_note, options
