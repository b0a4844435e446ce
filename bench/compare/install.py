"""One virtual environment per peer, outside the project's own: ROOT/<peer>/, kept between runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

DONE = "installed.txt"  # what INSTALL said when the environment was built


class InstallFailed(Exception):
    """A peer could not be installed; the message is pip's last words."""


def python_of(peer: str, module: ModuleType, root: Path, options: dict[str, Any] | None = None) -> Path:
    """The interpreter to run a peer with; its environment is built first if missing or out of date.

    An option `venv` names an environment that is there already and is left as it is.
    """
    given = (options or {}).get("venv")
    if given is not None:
        python = Path(given).absolute() / "bin" / "python"
        if not python.exists():
            raise InstallFailed(f"there is no {python}")
        return python
    if not module.INSTALL:
        return Path(sys.executable)
    venv, wanted = root.absolute() / peer, repr(module.INSTALL)
    python, done = venv / "bin" / "python", venv / DONE
    if done.exists() and done.read_text() == wanted:
        return python
    print(f"installing {peer} in {venv}", file=sys.stderr, flush=True)
    _call([sys.executable, "-m", "venv", "--clear", str(venv)])
    for arguments in module.INSTALL:
        _call([str(python), "-m", "pip", "install", "-q", *arguments])
    done.write_text(wanted)
    return python


def _call(words: list[str]) -> None:
    ended = subprocess.run(words, capture_output=True, text=True)
    if ended.returncode:
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        raise InstallFailed(lines[-1] if lines else f"status {ended.returncode}")
