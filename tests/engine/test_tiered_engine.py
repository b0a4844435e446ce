"""The engine with host and disk tiers: same tokens, less computed, and nothing wrong after any crash."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from octavo import SamplingParams
from octavo.cli.main import main
from octavo.engine import ConfigError, EngineConfig, EngineThread
from octavo.engine.llm import LLM
from octavo.engine.tiers import StoreLocked, StoreMismatch
from octavo.models import LoadedModel, load_model
from tests.engine.helpers import idle, llm_on, tiny_checkpoint

Tiny = tuple[LoadedModel, Any]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    """Random prompts; each begins with one of three shared parts."""
    rng = random.Random(seed)
    shared = [[rng.randrange(256) for _ in range(40)] for _ in range(3)]
    return [
        rng.choice(shared) + [rng.randrange(256) for _ in range(rng.randint(1, 30))] for _ in range(count)
    ]


def tokens(llm: LLM, batch: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(batch, PARAMS, use_tqdm=False)]


def small(model: LoadedModel, **options: Any) -> LLM:
    """A device cache that holds a few prompts at once and none for long."""
    return llm_on(model, block_size=8, num_blocks=24, max_num_seqs=2, **options)


@pytest.mark.parametrize(
    "tiers",
    [{"host_cache": "64KiB"}, {"host_cache": "1MiB"}, {"disk": True}, {"host_cache": "64KiB", "disk": True}],
)
def test_tiers_change_no_token_and_save_work(tiny: Tiny, tmp_path: Path, tiers: dict[str, Any]) -> None:
    """The same greedy tokens as without; more tokens cached, fewer computed."""
    batch = prompts(40)
    plain = small(tiny[0])
    want = tokens(plain, batch)
    options = {k: v for k, v in tiers.items() if k != "disk"}
    if "disk" in tiers:
        options |= {"disk_cache": str(tmp_path), "disk_cache_size": "2MiB"}
    with small(tiny[0], **options) as llm:
        assert tokens(llm, batch) == want
        assert tokens(llm, batch) == want
        stats = llm.engine.pool.stats()
        assert stats.promotions > 0
        assert stats.demotions > 0
        assert llm.engine.scheduler.stats.computed < 2 * plain.engine.scheduler.stats.computed
        idle(llm)


def test_a_restart_finds_what_was_cached(tiny: Tiny, tmp_path: Path) -> None:
    """With a disk tier, a new engine reuses all but the last token of an old prompt."""
    options: dict[str, Any] = {"disk_cache": str(tmp_path), "disk_cache_size": "4MiB"}
    batch = prompts(20)
    with small(tiny[0], **options) as llm:
        want = tokens(llm, batch)
    with small(tiny[0], **options) as llm:
        assert any(
            "found from before" in value for name, value in llm.engine.describe() if name == "disk cache"
        )
        outputs = llm.generate(batch, PARAMS, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == want
        assert all(o.num_cached_tokens == len(o.prompt_token_ids) - 1 for o in outputs)


def test_a_damaged_disk_costs_time_and_nothing_else(tiny: Tiny, tmp_path: Path) -> None:
    """Random damage to the file between two runs: the same tokens, some computed again."""
    rng = random.Random(6)
    options: dict[str, Any] = {"disk_cache": str(tmp_path / "kv"), "disk_cache_size": "4MiB"}
    batch = prompts(20)
    want = tokens(small(tiny[0]), batch)
    for _ in range(5):
        with small(tiny[0], **options) as llm:
            assert tokens(llm, batch) == want
        data = bytearray((tmp_path / "kv").read_bytes())
        for _ in range(300):
            data[rng.randrange(4096, len(data))] ^= 1 << rng.randrange(8)
        (tmp_path / "kv").write_bytes(data)
    with small(tiny[0], **options) as llm:
        assert tokens(llm, batch) == want
        assert llm.engine.mover is not None
        idle(llm)


def test_a_store_that_fails_makes_its_request_compute_again(tiny: Tiny) -> None:
    """Blocks lost on their way back: their requests start over, the others do not notice."""
    from octavo.kv import BlockLost

    batch = prompts(30)
    want = tokens(small(tiny[0]), batch)
    llm = small(tiny[0], host_cache="1MiB")
    tokens(llm, batch)
    assert llm.engine.mover is not None
    (store,) = llm.engine.mover.stores.values()
    get, calls = store.get, 0

    def failing(slot: int, out: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise BlockLost("gone")
        get(slot, out)

    store.get = failing  # type: ignore[method-assign]
    assert tokens(llm, batch) == want
    assert llm.engine.mover.failures > 5
    idle(llm)


def test_a_damaged_block_that_is_needed_in_part_is_lost_for_good(tiny: Tiny, tmp_path: Path) -> None:
    """A prompt that shares half a damaged block with an old one is computed, not tried for ever."""
    options: dict[str, Any] = {"disk_cache": str(tmp_path / "kv"), "disk_cache_size": "1MiB"}
    with small(tiny[0], **options) as llm:
        tokens(llm, [list(range(30))])
    data = bytearray((tmp_path / "kv").read_bytes())
    for at in range(len(data) // 2, len(data), 512):  # the payloads lie behind all headers
        data[at] ^= 1
    (tmp_path / "kv").write_bytes(data)
    prompt = [*range(12), 99, 99]
    want = tokens(small(tiny[0]), [prompt])
    with small(tiny[0], **options) as llm:
        steps, step = 0, llm.engine.step

        def counted() -> Any:
            nonlocal steps
            steps += 1
            assert steps < 50
            return step()

        llm.engine.step = counted  # type: ignore[method-assign]
        assert tokens(llm, [prompt]) == want
        assert llm.engine.mover is not None
        assert llm.engine.mover.failures > 0


def test_another_model_or_process_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    """A disk cache in use, or of another block size or model, is refused by name."""
    path = str(tmp_path / "kv")
    with small(tiny[0], disk_cache=path), pytest.raises(StoreLocked, match="kv"):
        small(tiny[0], disk_cache=path)
    with pytest.raises(StoreMismatch):
        llm_on(tiny[0], block_size=4, disk_cache=path)
    directory, _ = tiny_checkpoint(tmp_path / "other", seed=9)
    with pytest.raises(StoreMismatch, match="fingerprint"):
        small(load_model(directory), disk_cache=path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_cache": "lots"}, "host_cache"),
        ({"host_cache": 10}, "raise host_cache"),
        ({"disk_cache": "x", "disk_cache_size": 10}, "raise disk_cache_size"),
        ({"disk_cache_size": "1GiB"}, "without disk_cache"),
        ({"host_cache": "1GiB", "prefix_caching": False}, "prefix_caching is off"),
    ],
)
def test_bad_tier_options_are_named(tiny: Tiny, options: dict[str, Any], message: str) -> None:
    """Options of the tiers are refused like any other."""
    with pytest.raises(ConfigError, match=message):
        llm_on(tiny[0], **options)
    assert EngineConfig().host_cache is None


def test_the_command_shows_the_tiers(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """octavo generate --host-cache --disk-cache prints what each holds and leaves a file for the next."""
    for found in (False, True):
        arguments = ["generate", str(tiny[0].path), "--prompt", "hello there", "--max-tokens", "4"]
        arguments += ["--kv-memory", "1MiB", "--host-cache", "1MiB"]
        arguments += ["--disk-cache", str(tmp_path / "kv"), "--disk-cache-size", "1MiB", "--temperature", "0"]
        assert main(arguments) == 0
        text = "".join(capsys.readouterr())
        assert "host cache" in text
        assert ("found from before" in " ".join(text.split())) == found


def test_stats_say_what_each_tier_holds(tiny: Tiny, tmp_path: Path) -> None:
    """The numbers behind /health: slots, held and cached of the tiers that there are."""
    llm = small(tiny[0], host_cache="64KiB", disk_cache=str(tmp_path / "kv"), disk_cache_size="1MiB")
    tokens(llm, prompts(30))
    stats, pool = EngineThread(llm.engine).stats(), llm.engine.pool.stats()
    assert stats["host_cached"] == pool.host.cached > 0
    assert stats["disk_cached"] == pool.disk.cached > 0
    assert (stats["host_total"], stats["disk_held"]) == (pool.host.slots, 0)
    assert "host_total" not in EngineThread(small(tiny[0]).engine).stats()
    llm.close()


CHILD = """
import os, random, sys
os.environ["OMP_NUM_THREADS"] = "1"
from octavo.models import load_model
from tests.engine.test_tiered_engine import prompts, small, tokens
llm = small(load_model(sys.argv[1]), disk_cache=sys.argv[2], disk_cache_size="1MiB")
print("ready", flush=True)
while True:
    tokens(llm, prompts(10, random.randrange(4)))
"""


def kill_and_check(model: LoadedModel, path: Path, rounds: int) -> int:
    """Kill a process that keeps demoting to disk, `rounds` times; after each, greedy output from what
    it left equals the cold run. Returns the tokens that were served from disk."""
    rng = random.Random(rounds)
    want = {seed: tokens(small(model), prompts(10, seed)) for seed in range(4)}
    served = 0
    for _ in range(rounds):
        command = [sys.executable, "-c", CHILD, str(model.path), str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0.05, 0.6))
            os.kill(child.pid, signal.SIGKILL)
        seed = rng.randrange(4)
        with small(model, disk_cache=str(path), disk_cache_size="1MiB") as llm:
            outputs = llm.generate(prompts(10, seed), PARAMS, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == want[seed]
            assert llm.engine.mover is not None
            served += llm.engine.pool.stats().promotions
            idle(llm)
    return served


def test_kill_9_while_writing_twice(tiny: Tiny, tmp_path: Path) -> None:
    """After kill -9 the next start serves only right blocks."""
    kill_and_check(tiny[0], tmp_path / "kv", 2)


@pytest.mark.proof
def test_kill_9_while_writing_50_times(tiny: Tiny, tmp_path: Path) -> None:
    """Fifty times over, and blocks from disk were served among them."""
    assert kill_and_check(tiny[0], tmp_path / "kv", 50) > 0
