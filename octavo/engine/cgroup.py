"""Where the limits of this process's control groups lie.

    /proc/self/cgroup    4:memory:/a/b        v1: one tree per controller, under sys/fs/cgroup/memory
                         0::/a/b              v2: one tree for all, under sys/fs/cgroup
    folders              <tree>, <tree>/a, <tree>/a/b      a limit at any level holds for what is below

Owns the walk; what a file in a folder means is memory.py's and cpus.py's.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Folder(NamedTuple):
    """A control group's folder; version 1 and 2 name their files differently."""

    path: Path
    version: int


def cgroup_folders(root: Path, controller: str) -> list[Folder]:
    """The folders that may limit `controller` ("memory", "cpu") for this process, outermost first.

    root: the file system to read, so that a test can give its own /proc and /sys. Empty where the
    system has no control groups. A folder named here need not exist: in a container only part is seen.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Folder] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, version = root / "sys/fs/cgroup", 2
        elif controller in controllers.split(","):
            base, version = root / "sys/fs/cgroup" / controller, 1
        else:
            continue
        parts = [part for part in path.split("/") if part]
        found += [Folder(base.joinpath(*parts[:depth]), version) for depth in range(len(parts) + 1)]
    return found
