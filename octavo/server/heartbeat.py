"""A line in the log every few seconds while the engine works: what runs, what waits, tokens a second."""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.datastructures import State

logger = logging.getLogger("octavo.engine")

SECONDS = 10.0


async def beat(state: State) -> None:
    """Log until cancelled. An idle engine is silent; the line after its last work says that it rests.

    `state` is the application's; while the model is loading it has no metrics yet.
    """
    then, counts, busy = time.monotonic(), (0, 0), False
    while True:
        await asyncio.sleep(SECONDS)
        if not hasattr(state, "metrics"):
            continue
        times = state.metrics.times
        now, found = time.monotonic(), (times.prompt_tokens, times.generation_tokens)
        stats = state.context.engine.stats()
        works = bool(stats["num_running"] or stats["num_waiting"]) or found != counts
        if works or busy:
            rates = [round((new - old) / (now - then), 1) for new, old in zip(found, counts, strict=True)]
            fields = {**stats, "prompt_tokens_per_second": rates[0], "tokens_per_second": rates[1]}
            logger.info("working" if works else "idle", extra={"fields": fields})
        then, counts, busy = now, found, works
