"""The process that an engine runs in; started in the engine's environment, standard library only.

    VENV/bin/python -m bench.compare.worker PEER        JSON in, one object a line; JSON out, one a line

In: first the setup (see peers/__init__.py), then {"requests": [...]} per batch.
Out: {"ready": facts, "installed": {"MiB", "packages"}, "pids": [...]}, then
{"wall", "answers"} per batch, or {"error": text}.
Whatever the engine prints goes to the standard error.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any


def installed(package: str) -> dict[str, float]:
    """MiB and number of the distributions that `package` needs and that are there, without extras."""
    from pip._vendor.packaging.requirements import Requirement

    seen: dict[str, int] = {}
    queue = [package]
    while queue:
        name = re.sub(r"[-_.]+", "-", queue.pop()).lower()
        if name in seen:
            continue
        try:
            dist = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a peer may be installed without what its engine does not use
        sizes = (Path(str(dist.locate_file(file))) for file in dist.files or ())
        seen[name] = sum(path.stat().st_size for path in sizes if path.is_file())
        for line in dist.requires or ():
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                queue.append(need.name)
    return {"MiB": sum(seen.values()) / 2**20, "packages": len(seen)}


def main() -> None:
    """Start the engine, then run batches until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    peer = importlib.import_module(f"bench.compare.peers.{sys.argv[1]}")
    try:
        engine = peer.Engine(json.loads(sys.stdin.readline()))
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        return
    # A peer with a process of its own is that process; this one is only its client then.
    pids = getattr(engine, "pids", None) or [os.getpid()]
    size = getattr(engine, "installed", None) or installed(peer.PACKAGE)
    say({"ready": engine.facts, "installed": size, "pids": pids})
    for line in sys.stdin:
        start = time.perf_counter()
        try:
            done = engine.run(json.loads(line)["requests"])
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})
            break
        say({"wall": time.perf_counter() - start, "answers": done})
    engine.close()


if __name__ == "__main__":
    main()
