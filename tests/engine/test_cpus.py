"""How many threads: from the affinity mask, the quota of the control groups, and the option."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import SamplingParams
from octavo.engine import cpus
from octavo.engine.cpus import Cpus, choose_threads, usable_cpus
from octavo.models import LoadedModel
from tests.engine.helpers import llm_on

ALLOWED = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
needs_taskset = pytest.mark.skipif(
    not ALLOWED or shutil.which("taskset") is None, reason="needs Linux and taskset"
)


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/cpu"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n"}, None),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "250000 100000\n"}, 2.5),
        ({"proc/self/cgroup": "0::/a/b\n", f"{V2}/cpu.max": "max 1", f"{V2}/a/cpu.max": "50000 100000"}, 0.5),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                f"{V2}/a/cpu.max": "300000 100000",
                f"{V2}/a/b/cpu.max": "600000 100000",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "3:cpuacct,cpu:/x\n4:memory:/x\n",
                f"{V1}/x/cpu.cfs_quota_us": "150000\n",
                f"{V1}/x/cpu.cfs_period_us": "50000\n",
                f"{V1}/cpu.cfs_quota_us": "-1\n",
                f"{V1}/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        # In a container the path is the host's, and only the tree's own root can be seen.
        ({"proc/self/cgroup": "0::/kubepods/pod7/c1\n", f"{V2}/cpu.max": "100000 100000"}, 1.0),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "garbage"}, None),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/cpu.max": "100000 0"}, None),
    ],
)
def test_the_least_quota_of_all_groups_counts(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    """cgroup v1 and v2, limits at any level, no limit, and what cannot be read."""
    found = usable_cpus(system(tmp_path, files))
    assert found.quota == quota
    assert found.allowed == len(ALLOWED or [0] * (os.cpu_count() or 1))


@pytest.mark.parametrize(
    ("option", "own", "found", "number", "words"),
    [
        (None, 8, Cpus(8, None), 8, "auto: 8 CPUs allowed to this process; --threads"),
        (None, 64, Cpus(4, None), 4, "auto: 4 CPUs allowed"),
        (None, 64, Cpus(1, None), 1, "auto: 1 CPU allowed"),
        (None, 64, Cpus(64, 2.9), 2, "a quota of 2.9"),
        (None, 64, Cpus(64, 0.4), 1, "a quota of 0.4"),
        (None, 64, Cpus(2, 16.0), 2, "auto: 2 CPUs allowed to this process, a quota of 16; --threads"),
        (None, 4, Cpus(8, None), 4, "OMP_NUM_THREADS"),
        (3, 64, Cpus(8, 2.0), 3, "--threads, which is more than it may use: 8 CPUs.*quota of 2$"),
        (2, 1, Cpus(8, None), 2, "--threads$"),
    ],
)
def test_the_number_and_its_reason(
    option: int | None, own: int, found: Cpus, number: int, words: str
) -> None:
    """Never more than may be used, quotas rounded down to at least 1; an option is honoured as it is."""
    chosen = choose_threads(option, own, found)
    assert chosen.number == number
    assert re.search(words, chosen.reason), chosen.reason


def test_the_engine_shows_where_the_number_comes_from(
    tiny: tuple[LoadedModel, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine of many CPUs with a quota of 1.5 computes with one thread, and the table says why."""
    monkeypatch.setattr(cpus, "usable_cpus", lambda: Cpus(64, 1.5))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(6)
        rows = dict(llm_on(tiny[0]).engine.describe())
        assert torch.get_num_threads() == 1
        assert rows["threads"] == "1 (auto: 64 CPUs allowed to this process, a quota of 1.5; --threads)"
        rows = dict(llm_on(tiny[0], threads=3).engine.describe())
        assert torch.get_num_threads() == 3
        assert rows["threads"].startswith("3 (--threads, which is more")
    finally:
        torch.set_num_threads(before)


RUN = """
import asyncio, json, os, sys, threading
import torch
from octavo import LLM, SamplingParams
from octavo.engine import EngineThread
path, prompt, threads = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
found = []
for number in threads:
    llm = LLM(path, num_blocks=64, threads=number)
    tokens = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
    seen = []
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    other.start(); other.join()
    found.append([tokens, torch.get_num_threads(), seen[0], sorted(os.sched_getaffinity(0))])
print(json.dumps(found))
"""


def run_on(cpu: int, path: Path, prompt: list[int], threads: list[int | None]) -> list[Any]:
    """For each number: tokens, torch's threads here and in a new thread, and the CPU mask after."""
    environment = {**os.environ, "OMP_NUM_THREADS": "16", "OMP_WAIT_POLICY": "passive"}
    command = ["taskset", "-c", str(cpu), sys.executable, "-c", RUN]
    command += [str(path), json.dumps(prompt), json.dumps(threads)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@needs_taskset
def test_any_number_of_threads_on_one_cpu(tiny: tuple[LoadedModel, Any]) -> None:
    """Under a mask of the last CPU alone: one thread by default, though 16 were asked of OpenMP; 1 to 17
    by option; the same tokens each time; and nothing is pinned elsewhere."""
    prompt = list(range(60))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    want = llm_on(tiny[0]).generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
    threads: list[int | None] = [None, 1, 2, 3, 7, 8, 16, 17]
    for number, (tokens, own, elsewhere, mask) in zip(
        threads, run_on(ALLOWED[-1], tiny[0].path, prompt, threads), strict=True
    ):
        assert tokens == want, f"{number} threads"
        assert own == elsewhere == (number or 1)
        assert mask == [ALLOWED[-1]]


@needs_taskset
def test_the_command_logs_the_threads_it_may_use(tiny: tuple[LoadedModel, Any]) -> None:
    """octavo under a mask of one CPU shows one thread and the reason in its table."""
    code = "import sys; from octavo.cli.main import main; sys.exit(main())"
    command = ["taskset", "-c", str(ALLOWED[0]), sys.executable, "-c", code, "generate", str(tiny[0].path)]
    command += ["--prompt", "a", "--max-tokens", "2", "--num-blocks", "8", "--temperature", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "16", "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "1 (auto: 1 CPU allowed to this process" in done.stderr
