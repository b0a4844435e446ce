"""How much memory this process may still take: what the machine has and what its cgroup allows."""

from __future__ import annotations

from pathlib import Path

from octavo.engine.cgroup import cgroup_folders

_LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}
_USAGE = {1: "memory.usage_in_bytes", 2: "memory.current"}


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that can still be allocated, or None where the system does not say.

    The least of MemAvailable and of what each cgroup limit above this process leaves (v1 and v2).
    root: the file system to read, so that a test can give its own /proc and /sys.
    """
    found = [value for value in (_meminfo(root), *_cgroups(root)) if value is not None]
    return max(0, min(found)) if found else None


def _meminfo(root: Path) -> int | None:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _cgroups(root: Path) -> list[int | None]:
    """What the limits of this process's cgroup and of every one above it leave."""
    return [
        _left(folder / _LIMIT[version], folder / _USAGE[version])
        for folder, version in cgroup_folders(root, "memory")
    ]


def _left(limit: Path, usage: Path) -> int | None:
    """A limit less what is used; None when there is no limit ("max", or v1's huge number)."""
    try:
        value = int(limit.read_text())  # "max" is no integer: no limit
        return None if value >= 2**60 else value - int(usage.read_text())
    except (OSError, ValueError):
        return None
