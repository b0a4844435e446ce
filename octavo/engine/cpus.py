"""How many threads a step computes with: what the process may use, not what the machine has.

    allowed   the CPUs of its affinity mask (taskset, cpusets, a container's --cpuset-cpus)
    quota     CPU time per second of wall time that its control groups grant (a container's --cpus)
    torch     torch's own number at the time: OMP_NUM_THREADS, torch.set_num_threads or physical cores

More threads than CPUs is what makes a server slow without an error: a parallel region ends when its last
thread has had its turn, and a quota stops all of them together. Threads are never pinned: the affinity
mask stays as it was given, so two servers on two sets of CPUs stay apart.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from octavo.engine.cgroup import cgroup_folders


@dataclass(frozen=True, slots=True)
class Cpus:
    """What a process may use: CPUs in its affinity mask, and CPUs' worth of time, None without a limit."""

    allowed: int
    quota: float | None


@dataclass(frozen=True, slots=True)
class Threads:
    """A number of threads, and where it comes from in words for the start-up table."""

    number: int
    reason: str


def usable_cpus(root: Path = Path("/")) -> Cpus:
    """Read the affinity mask and the CPU quotas of this process's control groups (v1 and v2, all levels).

    root: the file system to read, so that a test can give its own /proc and /sys.
    """
    quotas = [value for value in _quotas(root) if value is not None]
    return Cpus(_affinity(), min(quotas) if quotas else None)


def choose_threads(option: int | None, own: int, cpus: Cpus) -> Threads:
    """Settle the number: `option` where it is given, else the least of `own` (torch's), CPUs and quota.

    A quota is rounded down, to at least 1. An option above what may be used is honoured, and the
    reason says so.
    """
    limit = f"{_count(cpus.allowed)} allowed to this process"
    most = cpus.allowed
    if cpus.quota is not None:
        limit += f", a quota of {cpus.quota:g}"
        most = max(1, min(most, int(cpus.quota)))
    if option is not None:
        more = f", which is more than it may use: {limit}" if option > most else ""
        return Threads(option, f"--threads{more}")
    if own < most:
        return Threads(own, f"auto: torch's own number, as OMP_NUM_THREADS sets it, of {limit}; --threads")
    return Threads(most, f"auto: {limit}; --threads")


def set_threads(option: int | None) -> Threads:
    """Choose the number and give it to torch, for all of this process; the kernels follow torch's."""
    threads = choose_threads(option, torch.get_num_threads(), usable_cpus())
    if torch.get_num_threads() != threads.number:
        torch.set_num_threads(threads.number)
    return threads


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def _quotas(root: Path) -> list[float | None]:
    return [
        _quota_v1(folder) if version == 1 else _quota_v2(folder)
        for folder, version in cgroup_folders(root, "cpu")
    ]


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())  # -1: no limit
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 and period > 0 else None


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (int(word) for word in (folder / "cpu.max").read_text().split())
    except (OSError, ValueError):  # "max 100000": no limit
        return None
    return quota / period if quota > 0 and period > 0 else None


def _count(cpus: int) -> str:
    return "1 CPU" if cpus == 1 else f"{cpus} CPUs"
