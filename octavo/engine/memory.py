"""How much memory this process has and may still take: what the machine has and what its cgroup allows."""

from __future__ import annotations

from pathlib import Path

from octavo.engine.cgroup import cgroup_folders

_LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}
_USAGE = {1: "memory.usage_in_bytes", 2: "memory.current"}
# Of the usage, file pages that nobody used lately: the kernel takes those back before it refuses anything.
_RECLAIMABLE = {1: "total_inactive_file", 2: "inactive_file"}


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that can still be allocated, or None where the system does not say.

    The least of MemAvailable and of what each cgroup limit above this process leaves (v1 and v2); cached
    files, such as a model that was just read, count as free in both.
    root: the file system to read, so that a test can give its own /proc and /sys.
    """
    found = [
        value
        for value in (_kilobytes(root / "proc/meminfo", "MemAvailable:"), *_cgroups(root))
        if value is not None
    ]
    return max(0, min(found)) if found else None


def resident_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process has in memory, or None where the system does not say."""
    return _kilobytes(root / "proc/self/status", "VmRSS:")


def _kilobytes(file: Path, key: str) -> int | None:
    """The bytes of a line such as "MemAvailable:  8388608 kB"."""
    try:
        for line in file.read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _cgroups(root: Path) -> list[int | None]:
    """What the limits of this process's cgroup and of every one above it leave."""
    return [_left(folder, version) for folder, version in cgroup_folders(root, "memory")]


def _left(folder: Path, version: int) -> int | None:
    """A limit less what is used; None when there is no limit ("max", or v1's huge number)."""
    try:
        limit = int((folder / _LIMIT[version]).read_text())  # "max" is no integer: no limit
        used = int((folder / _USAGE[version]).read_text())
    except (OSError, ValueError):
        return None
    return None if limit >= 2**60 else limit - max(0, used - _reclaimable(folder, version))


def _reclaimable(folder: Path, version: int) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(_RECLAIMABLE[version] + " "))
    except (OSError, ValueError, IndexError, StopIteration):
        return 0
