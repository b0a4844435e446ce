"""Runs the engines in turn and keeps a record of everything that was measured or went wrong.

    round 1: engine A (start, its workloads, end), engine B, ...   round 2: the same   ...

A record is {"engine", "round", "work", "figures", "failed", "error", "notes"}; see report.py. Kept.add()
writes the file after each, and Kept.has() is why a second call goes on where the first one ended.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.compare.install import InstallFailed, python_of
from bench.compare.process import Process, TooSlow, WorkerFailed
from bench.compare.works import Work, faults, figures

WARM_UP = {"prompt": list(range(500, 516)), "max_tokens": 8, "n": 1, "temperature": 0}


@dataclass
class Kept:
    """The records, in memory and in a file."""

    content: dict[str, Any]
    path: Path | None = None

    @property
    def records(self) -> list[dict[str, Any]]:
        """All of them."""
        found: list[dict[str, Any]] = self.content["records"]
        return found

    def add(self, row: dict[str, Any]) -> None:
        """Keep a record, on disk too."""
        self.records.append(row)
        self.write()
        shown = {k: v for k, v in row.items() if k not in ("tokens", "facts") and v not in (None, [], 0, {})}
        print(json.dumps(shown), file=sys.stderr, flush=True)

    def write(self) -> None:
        """The file anew, so that one cut short never takes its place."""
        if self.path is not None:
            new = self.path.with_suffix(".new")
            new.write_text(json.dumps(self.content, indent=1) + "\n")
            new.replace(self.path)

    def has(self, engine: str, turn: int, work: str) -> bool:
        """Whether that was run."""
        return any((r["engine"], r["round"], r["work"]) == (engine, turn, work) for r in self.records)

    def too_slow(self, engine: str, work: str) -> str | None:
        """The error of an earlier round in which the workload took too long."""
        mine = (r for r in self.records if (r["engine"], r["work"]) == (engine, work))
        return next((r["error"] for r in mine if r.get("too_slow")), None)


def parse_engine(text: str) -> tuple[str, dict[str, Any]]:
    """PEER[:option=value,...]; values are integers, true, false or text."""
    peer, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for part in rest.split(",") if rest else []:
        name, equals, value = part.partition("=")
        if not equals or not name:
            raise ValueError(f"{part!r} in {text!r} is not option=value")
        known = {"true": True, "false": False}
        options[name] = known.get(value, int(value) if value.isdecimal() else value)
    return peer, options


def record(engine: str, turn: int, work: str, **more: Any) -> dict[str, Any]:
    """A row of the results' file."""
    empty = {"figures": {}, "failed": 0, "error": None, "notes": []}
    return {"engine": engine, "round": turn, "work": work, **empty, **more}


def measure(engine: str, turn: int, work: Work, results: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of one workload; without figures where a request that they rest on was not done in full."""
    wrong = faults(work, results)
    row = record(engine, turn, work.name, failed=len(wrong), notes=wrong[:2])
    total = sum(len(batch) for batch in work.batches)
    if wrong and (work.name in ("W1", "W6") or len(wrong) == total):
        row["error"] = f"{len(wrong)} of {total} requests failed: {wrong[0]}"
    else:
        row["figures"] = figures(work, results)
    if work.name == "W1" and not wrong:
        row["tokens"] = results[0]["answers"][0]["tokens"][0]
    return row


@dataclass
class Turn:
    """One engine in one round. run() never raises for what the engine does."""

    text: str
    number: int
    args: argparse.Namespace
    kept: Kept
    name: str = field(init=False)
    _peer: str = field(init=False)
    _module: ModuleType = field(init=False)
    _options: dict[str, Any] = field(init=False)
    _python: Path = field(init=False)
    _notes: list[str] = field(init=False, default_factory=list)
    _only: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self._peer, self._options = parse_engine(self.text)
        self._only = str(self._options.pop("works", "")).split("+")
        self._module = importlib.import_module(f"bench.compare.peers.{self._peer}")
        self.name = self._module.label(self._options)

    def run(self, works: list[Work]) -> None:
        """Whatever of `works` has no record yet; with an option works=W1+W2 only of those."""
        if self._only != [""]:
            works = [work for work in works if work.name in self._only]
        try:
            self.install()
        except (InstallFailed, ValueError) as error:
            for work in works:
                if not self.kept.has(self.name, self.number, work.name):
                    self._add(work.name, error=f"not installed: {error}")
            return
        left = [work for work in works if not self.kept.has(self.name, self.number, work.name)]
        for work in list(left):
            slow = self.kept.too_slow(self.name, work.name)
            if slow is not None:
                left.remove(work)
                self._add(work.name, error=f"not tried again: {slow}")
        for _, group in groupby(sorted(left, key=lambda w: -w.kv_tokens), key=lambda w: w.kv_tokens):
            some = list(group)
            while some:  # again where the engine was lost on the way, for those that are left
                some = self._started(some)

    def install(self) -> None:
        """Its environment and whatever else it needs. Raises InstallFailed."""
        self._python = python_of(self._peer, self._module, self.args.venvs, self._options)
        prepare = getattr(self._module, "prepare", None)
        if prepare is not None:
            self._options, self._notes = prepare(self._options, self.args.model, self.args.venvs)
            self.name = self._module.label(self._options)

    def _started(self, works: list[Work]) -> list[Work]:
        """Start the engine and run the workloads until all are done or it is lost; those not tried."""
        process = Process(self._python, self._peer, self.args.threads)
        limited = works[0].kv_limited
        try:
            self._start(process, works)
            for number, work in enumerate(works):
                if (error := self._run(process, work)) is not None:
                    self._add(work.name, error=str(error), too_slow=isinstance(error, TooSlow))
                    return works[number + 1 :]
            if not limited:
                self._add("memory", figures={"peak MiB": process.peak_mib()})
        except WorkerFailed as error:  # it did not start: another try would fail the same way
            for work in works:
                self._add(work.name, error=str(error))
        finally:
            process.close()
        return []

    def _start(self, process: Process, works: list[Work]) -> None:
        setup = {
            "model": str(self.args.model),
            "threads": self.args.threads,
            "kv_tokens": works[0].kv_tokens,
            "kv_limited": works[0].kv_limited,
            "max_len": max(work.max_len for work in works),
            "slots": self.args.slots,
            "options": self._options,
        }
        ready = process.start(setup, self.args.limit)
        if not works[0].kv_limited and not self.kept.has(self.name, self.number, "start"):
            facts = [f"{name}: {value}" for name, value in ready["ready"].items()]
            start = {"ready s": ready["seconds"], "resident MiB": ready["resident MiB"]}
            self._add("start", figures=start, facts=facts)
            self._add("install", figures=ready["installed"])
        process.run([WARM_UP], self.args.limit)

    def _run(self, process: Process, work: Work) -> WorkerFailed | None:
        """Run a workload within its time and keep its record; or what the engine was lost to."""
        end = time.monotonic() + self.args.limit
        results = []
        try:
            for batch in work.batches:
                results.append(process.run(list(batch), max(1.0, end - time.monotonic())))
        except TooSlow:
            return TooSlow(f"not done in {self.args.limit:g} s")
        except WorkerFailed as error:
            return error
        self.kept.add(self._noted(measure(self.name, self.number, work, results)))
        return None

    def _add(self, work: str, **more: Any) -> None:
        self.kept.add(self._noted(record(self.name, self.number, work, **more)))

    def _noted(self, row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "notes": [*self._notes, *row["notes"]]}
