"""A worker process seen from the harness: start, batches with a time limit, resident memory, end."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


class WorkerFailed(Exception):
    """An engine did not start, ended or took too long; the message says which."""


class TooSlow(WorkerFailed):
    """It took too long."""


class Process:
    """One engine in its environment; see worker.py for what is said."""

    def __init__(self, python: Path, peer: str, threads: int) -> None:
        self._begun = time.monotonic()
        self._child = subprocess.Popen(
            [str(python), "-m", "bench.compare.worker", peer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def start(self, setup: dict[str, Any], limit: float) -> dict[str, Any]:
        """Hand over the setup; the worker's first message, with "seconds" to it and "resident MiB"."""
        message = self._ask(setup, limit)
        message["seconds"] = time.monotonic() - self._begun
        self._pids: list[int] = message["pids"]
        message["resident MiB"] = sum(memory(pid, "VmRSS") for pid in self._pids) / 2**20
        return message

    def peak_mib(self) -> float:
        """The most that the engine has had resident, in MiB."""
        return sum(memory(pid, "VmHWM") for pid in self._pids) / 2**20

    def run(self, requests: list[dict[str, Any]], limit: float) -> dict[str, Any]:
        """One batch: {"wall", "answers"}."""
        return self._ask({"requests": requests}, limit)

    def close(self) -> None:
        """End the worker, by force if it does not by itself."""
        try:
            if self._child.stdin is not None:
                self._child.stdin.close()
            self._child.wait(timeout=30)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._child.kill()
            self._child.wait()

    def _ask(self, message: dict[str, Any], limit: float) -> dict[str, Any]:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(message) + "\n")
            self._child.stdin.flush()
            line = self._lines.get(timeout=limit)
        except queue.Empty:
            self._child.kill()
            raise TooSlow(f"no answer in {limit:g} s") from None
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerFailed(f"the process ended with status {self._child.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(answer["error"])
        return answer

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._lines.put(line)
        self._lines.put("")


def memory(pid: int, name: str) -> int:
    """A size in bytes from a process' status: VmRSS is what is resident, VmHWM the most that was."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
