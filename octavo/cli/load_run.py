"""Sends requests to an OpenAI-compatible server and times their streams.

open loop     each request at its own time, whatever the server does: shows queues
closed loop   a fixed number under way, the next one when one ends: shows capacity
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.cli.load_source import Job

if TYPE_CHECKING:
    import httpx


@dataclass(slots=True)
class Outcome:
    """One request. Times in seconds after the start of the run; late: how long after its time it was sent.

    chunks: when each part of the answer came. Without an error, tokens are those that usage tells, or the
    chunks where the server tells none.
    """

    sent: float
    late: float = 0.0
    ended: float = 0.0
    chunks: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send: a base URL, perhaps a key and a model's name, and whether end-of-text is ignored."""

    url: str
    key: str | None = None
    model: str | None = None
    ignore_eos: bool = True
    timeout: float = 3600.0


async def run(
    jobs: Sequence[Job], target: Target, concurrency: int | None, done: Callable[[], None] = lambda: None
) -> list[Outcome]:
    """Send all jobs: at their times, or with `concurrency` under way. Outcomes in the order of the jobs."""
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    headers = {"Authorization": f"Bearer {target.key}"} if target.key else {}
    start = time.perf_counter()
    outcomes: list[Outcome | None] = [None] * len(jobs)
    async with httpx.AsyncClient(limits=limits, headers=headers, timeout=target.timeout) as client:

        async def one(index: int, due: float | None) -> None:
            if due is not None:
                await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
            outcomes[index] = await _ask(client, target, jobs[index], start, due)
            done()

        if concurrency is None:
            await asyncio.gather(*(one(index, job.at) for index, job in enumerate(jobs)))
        else:
            left = iter(range(len(jobs)))
            await asyncio.gather(*(_worker(left, one) for _ in range(min(concurrency, len(jobs)))))
    return [outcome for outcome in outcomes if outcome is not None]


async def _worker(left: Iterator[int], one: Callable[[int, float | None], Any]) -> None:
    for index in left:
        await one(index, None)


async def _ask(
    client: httpx.AsyncClient, target: Target, job: Job, start: float, due: float | None
) -> Outcome:
    import httpx

    body: dict[str, Any] = {
        "prompt": job.prompt,
        "max_tokens": job.max_tokens,
        "n": job.n,
        "temperature": job.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.model is not None:
        body["model"] = target.model
    if target.ignore_eos:
        body["ignore_eos"] = True
    now = time.perf_counter() - start
    outcome = Outcome(sent=now, late=max(0.0, now - due) if due is not None else 0.0)
    try:
        url = f"{target.url.rstrip('/')}/v1/completions"
        async with client.stream("POST", url, json=body) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode("utf-8", "replace")
                outcome.error = f"HTTP {answer.status_code}: {_message(text)}"
            else:
                async for line in answer.aiter_lines():
                    if line.startswith("data: ") and not _take(
                        outcome, line[6:], time.perf_counter() - start
                    ):
                        break
    except httpx.HTTPError as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.ended = time.perf_counter() - start
    if outcome.error is None and not outcome.chunks:
        outcome.error = "the answer was empty"
    if not outcome.output_tokens:
        outcome.output_tokens = len(outcome.chunks)
    return outcome


def _take(outcome: Outcome, data: str, now: float) -> bool:
    """One event of a stream; False at its end."""
    if data == "[DONE]":
        return False
    event = json.loads(data)
    if "error" in event:
        outcome.error = str(event["error"].get("message", event["error"]))[:200]
        return False
    if event.get("choices"):
        outcome.chunks.append(now)
    usage = event.get("usage")
    if usage:
        outcome.prompt_tokens = usage.get("prompt_tokens", 0)
        outcome.output_tokens = usage.get("completion_tokens", 0)
        outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return True


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError):
        return text[:200]
