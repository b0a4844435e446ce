"""The planner: its sums are the decoder's and the engine's own, from a header alone."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.cli.main import main
from octavo.engine import ConfigError, Engine, EngineConfig
from octavo.engine.planning import changes, plan_memory
from octavo.kv import KV_DTYPES
from octavo.models import load_header, load_model, resolve_model, weights_bytes
from octavo.models.build import WEIGHTS
from octavo.models.errors import ModelError
from tests.engine.helpers import tiny_checkpoint

GIB, MIB = 2**30, 2**20


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three models of unlike shapes: plain, grouped with wide heads, and with untied weights and biases."""
    root = tmp_path_factory.mktemp("models")
    shapes: list[dict[str, Any]] = [
        {},
        {"num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 3},
        {"tie_word_embeddings": True, "attention_bias": True, "intermediate_size": 200},
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
import sys, random
from octavo.engine import Engine, EngineConfig, SamplingParams
from octavo.engine.planning import plan_memory
from octavo.kv import LIBRARIES
from octavo.models import load_header, load_model
folder, budget, kv_dtype = sys.argv[1:]
def status(key):
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(key)) * 1024
model = load_model(folder)
before = status("VmRSS")
config = EngineConfig(folder, kv_memory=budget, kv_dtype=kv_dtype, max_num_seqs=16, max_batched_tokens=1024)
engine = Engine(model, config)
rng = random.Random(0)
tokens = 0
while tokens < 1.2 * engine.budget.num_blocks * engine.budget.block_size:  # every block is written
    size = min(engine.max_model_len - 2, 2000)
    prompt = [rng.randrange(model.config.vocab_size) for _ in range(size)]
    engine.add_request(prompt, SamplingParams(max_tokens=1))
    tokens += size
while engine.has_work:
    engine.step()
assert engine.pool.stats().free == 0
plan = plan_memory(config, load_header(folder), 16 * 2**30)
print(status("VmHWM") - before, plan.kv_bytes + plan.activations + LIBRARIES)
"""


def keeps_to_the_plan(folder: Path, budget: str, kv_dtype: str) -> tuple[int, int]:
    """A process whose every block was written: the bytes it took at its height, and those planned."""
    command = [sys.executable, "-c", GROWTH, str(folder), budget, kv_dtype]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    grown, planned = map(int, done.stdout.split())
    return grown, planned


def test_resident_memory_keeps_to_the_plan(folders: list[Path]) -> None:
    """It grows by no more than the plan and 15 %."""
    grown, planned = keeps_to_the_plan(folders[0], "8MiB", "float32")
    assert grown <= 1.15 * planned


@pytest.mark.proof
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("budget", ["8MiB", "64MiB", "256MiB"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_resident_memory_in_every_format(folders: list[Path], which: int, budget: str, kv_dtype: str) -> None:
    """The same for each budget, KV dtype and model."""
    grown, planned = keeps_to_the_plan(folders[which], budget, kv_dtype)
    assert grown <= 1.15 * planned


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
        ways = {w.option: int(w.value.replace(",", "")) for w in every if w.option != "--kv-dtype"}
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


def test_the_command(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
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
