"""Several prompts through the engine as one stream of pieces, with the usage counted on the way.

    prompt 0 -> engine.stream -> pump -+
    prompt 1 -> engine.stream -> pump -+-> queue -> generate() -> Piece(choice = prompt * n + branch)
    ...                                |
Closing or cancelling `generate` cancels the pumps; each closes its engine stream, and that aborts the
request and frees its blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.engine.logprobs import TokenLogprobs
from octavo.engine.origin import Origin
from octavo.engine.outputs import RequestDelta
from octavo.engine.params import SamplingParams
from octavo.server.context import ServerContext
from octavo.server.errors import EngineFailure, EngineUnavailable, RequestTimeout

if TYPE_CHECKING:
    from octavo.engine.thread import EngineThread

LIVENESS_SECONDS = 1.0
"""How often a silent engine is asked whether it still lives."""

Queue = asyncio.Queue[tuple[int, RequestDelta | Exception]]


@dataclass(frozen=True)
class Piece:
    """What one choice gained; `finish_reason` is set on its last piece.

    prompt_logprobs: its prompt's, on the first piece of that prompt, where they were asked for.
    """

    choice: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass
class Usage:
    """Token counts of one call. A prompt counts once, however many sequences continue it."""

    prompt: dict[int, int] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    completion: int = 0

    def note(self, prompt_index: int, delta: RequestDelta) -> None:
        """Count what `delta` brings for the prompt of that index."""
        self.prompt[prompt_index] = delta.num_prompt_tokens
        self.cached[prompt_index] = delta.num_cached_tokens
        self.completion += sum(len(sequence.token_ids) for sequence in delta.deltas)

    def body(self) -> dict[str, Any]:
        """The OpenAI usage object; `cached_tokens` is there even when it is 0."""
        prompt = sum(self.prompt.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion,
            "total_tokens": prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


async def generate(
    context: ServerContext,
    prompts: Sequence[tuple[list[int], SamplingParams]],
    usage: Usage,
    origin: Origin,
    computed: Callable[[int], None],
) -> AsyncGenerator[Piece, None]:
    """Run all `prompts` at once and yield their pieces as they come, adding to `usage`.

    `computed` is told of each prompt that the engine is done with how many sequences that were, which may
    be long before a slow client has read them.

    Raises what the engine raised for any of them, EngineUnavailable when it died without a word, and
    RequestTimeout when all of it takes longer than a request may.
    """
    engine, n, width = context.engine, prompts[0][1].n, prompts[0][1].width
    end = time.monotonic() + context.config.request_seconds
    queue: Queue = asyncio.Queue()
    pumps = [
        asyncio.create_task(_pump(engine, index, ids, params, origin, queue))
        for index, (ids, params) in enumerate(prompts)
    ]
    for pump in pumps:
        pump.add_done_callback(lambda _: computed(width))
    unfinished = len(pumps)
    try:
        while unfinished:
            index, item = await _next(queue, context, end)
            if isinstance(item, Exception):
                raise item
            if item.error is not None:
                raise item.error
            usage.note(index, item)
            unfinished -= item.finished
            for sequence in item.deltas:
                if sequence.finish_reason == "abort":
                    raise EngineUnavailable("the request was stopped before it was finished")
                scores, item.prompt_logprobs = item.prompt_logprobs, None
                yield Piece(
                    index * n + sequence.index,
                    sequence.text,
                    sequence.token_ids,
                    sequence.finish_reason,
                    sequence.stop_reason,
                    sequence.logprobs,
                    scores,
                )
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    engine: EngineThread,
    index: int,
    ids: list[int],
    params: SamplingParams,
    origin: Origin,
    queue: Queue,
) -> None:
    """Move one engine stream into the queue; whatever goes wrong travels the same way."""
    try:
        async with aclosing(engine.stream(ids, params, origin)) as deltas:
            async for delta in deltas:
                queue.put_nowait((index, delta))
                if delta.finished or delta.error is not None:
                    return
        queue.put_nowait((index, EngineFailure("the engine ended the request before it was finished")))
    except Exception as error:
        queue.put_nowait((index, error))


async def _next(queue: Queue, context: ServerContext, end: float) -> tuple[int, RequestDelta | Exception]:
    while True:
        left = end - time.monotonic()
        if left <= 0:
            raise RequestTimeout(
                f"the request took longer than the {context.config.request_seconds:g} s that one may take "
                "(--request-timeout)"
            )
        if not queue.empty():
            return queue.get_nowait()
        try:
            async with asyncio.timeout(min(left, LIVENESS_SECONDS)):
                return await queue.get()
        except TimeoutError:
            # A thread that died or hangs cannot tell us, so we ask.
            if not context.running:
                raise EngineUnavailable("the engine stopped while the request was running") from None
