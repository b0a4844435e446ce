"""What a load generator sends: requests with their times, from workloads, traces or made up.

    workload file   {"W2": {"requests": [{"prompt": [ids], "max_tokens": m}], "n": 1, "temperature": 0}}
    Mooncake trace  {"timestamp": ms, "input_length": n, "output_length": m, "hash_ids": [...]}    a line each
    Azure trace     TIMESTAMP,ContextTokens,GeneratedTokens                                        CSV

Prompts are token ids, so that every server gets the same work. Where a trace gives only lengths or hashes,
ids are made up from a seed within a small vocabulary that every model has; equal hashes give equal ids.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from octavo.cli.errors import CommandError

FIRST_ID, LAST_ID = 3, 250
"""Ids of made-up prompts: past the special tokens that vocabularies begin with, within any vocabulary."""
HASH_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Job:
    """One request. at: seconds after the start of the run, in open loop."""

    at: float
    prompt: list[int]
    max_tokens: int
    n: int = 1
    temperature: float = 0.0


def workload(path: Path, name: str) -> tuple[list[Job], str]:
    """The requests of a recorded workload, all at once, and a note on what server it is meant for."""
    works = _json(path)
    if name not in works or "requests" not in works[works[name].get("same_as", name)]:
        known = ", ".join(key for key, value in works.items() if isinstance(value, dict) and key != "meta")
        raise CommandError(f"{path} has no workload {name!r}; it has {known}")
    work: dict[str, Any] = {**works[works[name].get("same_as", name)], **works[name]}
    jobs = [
        Job(0.0, r["prompt"], r["max_tokens"], work.get("n", 1), work.get("temperature", 0))
        for r in work["requests"]
    ]
    tokens = work.get("kv_tokens")
    note = f"{name} is meant for a server with {tokens:,} tokens of KV cache (--num-blocks)" if tokens else ""
    return jobs, note


def trace(path: Path, limit: int | None, *, length: float, speed: float) -> list[Job]:
    """The requests of a Mooncake (.jsonl) or Azure (.csv) trace.

    length scales prompts and outputs, speed the clock: 2 is twice as fast. Raises CommandError for another
    form.
    """
    try:
        with path.open(newline="") as lines:
            first = lines.readline()
            lines.seek(0)
            rows = _mooncake(lines, length) if first.lstrip().startswith("{") else _azure(lines, length)
            jobs = [job for _, job in zip(range(limit) if limit else iter(int, 1), rows)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{path}: neither a Mooncake nor an Azure trace: {error!r}") from None
    if not jobs:
        raise CommandError(f"{path} has no requests")
    start = jobs[0].at
    return [replace(job, at=(job.at - start) / speed) for job in jobs]


def made_up(count: int, prompt: int, output: int, shared: int, seed: int) -> list[Job]:
    """`count` requests of `prompt` tokens, the first `shared` of them the same in all, all at once."""
    common = _ids(random.Random(f"{seed} shared"), min(shared, prompt))
    return [
        Job(0.0, common + _ids(random.Random(f"{seed} {i}"), prompt - len(common)), output)
        for i in range(count)
    ]


def at_rate(jobs: list[Job], rate: float, seed: int) -> list[Job]:
    """The same requests with arrivals of a Poisson process of `rate` a second."""
    rng, at, timed = random.Random(seed), 0.0, []
    for job in jobs:
        timed.append(replace(job, at=at))
        at += rng.expovariate(rate)
    return timed


def _mooncake(lines: Iterable[str], length: float) -> Iterator[Job]:
    each = max(1, round(HASH_TOKENS * length))
    for line in lines:
        row = json.loads(line)
        size = max(1, round(row["input_length"] * length))
        prompt: list[int] = []
        for number in row["hash_ids"]:
            prompt += _ids(random.Random(number), each)
        prompt += _ids(random.Random(f"rest {row['hash_ids'][-1:]}"), max(0, size - len(prompt)))
        yield Job(row["timestamp"] / 1000, prompt[:size], max(1, round(row["output_length"] * length)))


def _azure(lines: Iterable[str], length: float) -> Iterator[Job]:
    start: datetime | None = None
    for number, row in enumerate(csv.DictReader(lines)):
        at = datetime.fromisoformat(row["TIMESTAMP"][:26])
        start = start or at
        size = max(1, round(int(row["ContextTokens"]) * length))
        output = max(1, round(int(row["GeneratedTokens"]) * length))
        yield Job((at - start).total_seconds(), _ids(random.Random(number), size), output)


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(FIRST_ID, LAST_ID) for _ in range(count)]


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CommandError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise CommandError(f"{path}: not a JSON object of workloads")
    return value
