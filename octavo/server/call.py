"""One call for text, from checked request to answer or stream: what completions and chat share.

read_request -> Call -> events()  (stream)   -> EventStream
                     -> answer()  (one body) -> JsonResponse
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Request
from starlette.responses import Response

from octavo.server.caller import Caller
from octavo.server.context import ServerContext
from octavo.server.errors import JsonResponse
from octavo.server.generation import Piece, Usage, generate
from octavo.server.prompts import check_token_ids
from octavo.server.schemas import GenerationRequest
from octavo.server.stream import DONE, EventStream, event, unless_disconnected

Body = dict[str, Any]


class Call(ABC):
    """A request that was understood. Subclasses give it the shape of their route."""

    id_prefix: str
    object: str
    chunk_object: str

    def __init__(
        self, context: ServerContext, request: GenerationRequest, num_prompts: int, caller: Caller
    ) -> None:
        self._context = context
        self._request = request
        self._num_prompts = num_prompts
        self._caller = caller
        self._params = caller.bounded(request.sampling_params())
        check_token_ids(
            request.stop_token_ids, context.engine.engine.vocab_size, "stop_token_ids", "stop_token_ids"
        )
        self._head: Body = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "object": self.object,
            "created": int(time.time()),
            "model": context.model_name,
        }

    @abstractmethod
    def encode(self) -> list[list[int]]:
        """The token ids of each prompt. Runs in a thread."""

    @abstractmethod
    def prompt_texts(self) -> list[Any]:
        """What was asked, for the log, where that is wanted."""

    @abstractmethod
    def whole_choice(self, index: int, text: str) -> Body:
        """A choice of an answer that is not streamed."""

    @abstractmethod
    def opening(self, index: int) -> Body | None:
        """What a stream says of a choice before its first text, if anything."""

    @abstractmethod
    def chunk_choice(self, index: int, text: str) -> Body:
        """A choice that carries a stream's next text."""

    async def respond(self, request: Request) -> Response:
        """The HTTP answer. Work stops when the client leaves."""
        if self._request.stream:
            return EventStream(self.events())
        return JsonResponse(await unless_disconnected(request.receive, self.answer()))

    async def answer(self) -> Body:
        """Wait for every choice to finish."""
        usage = Usage()
        # Nothing here is sized by n: the gate inside _pieces refuses a huge one.
        texts: defaultdict[int, list[str]] = defaultdict(list)
        ends: dict[int, Body] = {}
        async with aclosing(self._noted(usage)) as pieces:
            async for piece in pieces:
                texts[piece.choice].append(piece.text)
                if piece.finish_reason is not None:
                    ends[piece.choice] = _end(piece)
        choices = [
            {"index": i, **self.whole_choice(i, "".join(texts[i])), "logprobs": None, **ends[i]}
            for i in sorted(texts)
        ]
        return {**self._head, "choices": choices, "usage": usage.body()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Encoded events: per choice an opening and its text, then the usage if asked for, then DONE."""
        usage = Usage()
        opened: set[int] = set()
        async with aclosing(self._noted(usage)) as pieces:
            async for piece in pieces:
                if piece.choice not in opened:
                    opened.add(piece.choice)
                    opening = self.opening(piece.choice)
                    if opening is not None:
                        yield self._chunk([{"index": piece.choice, **opening, "logprobs": None, **_NO_END}])
                # A token may give no text yet (half a character): nothing to say then.
                if piece.text or piece.finish_reason is not None:
                    choice = self.chunk_choice(piece.choice, piece.text)
                    yield self._chunk([{"index": piece.choice, **choice, "logprobs": None, **_end(piece)}])
        if self._request.include_usage:
            yield self._chunk([], usage.body())
        yield DONE

    def _chunk(self, choices: list[Body], usage: Body | None = None) -> bytes:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices}
        if self._request.include_usage:
            chunk["usage"] = usage  # null on all but the last, as OpenAI has it
        return event(chunk)

    def _resolved(self) -> list[list[int]]:
        """Encode the prompts and check all of them, so that none is refused after others have begun."""
        prompts = self.encode()
        for ids in prompts:
            self._context.engine.engine.resolve(ids, self._params)
        return prompts

    async def _noted(self, usage: Usage) -> AsyncGenerator[Piece, None]:
        """The pieces; what came of them is in the log at the end, however that comes about."""
        texts: defaultdict[int, list[str]] = defaultdict(list)
        try:
            async with aclosing(self._pieces(usage)) as pieces:
                async for piece in pieces:
                    if self._context.config.log_prompts:
                        texts[piece.choice].append(piece.text)
                    yield piece
        finally:
            self._caller.note(usage)
            if self._context.config.log_prompts:
                said = ["".join(texts[index]) for index in sorted(texts)]
                self._caller.tell(self.prompt_texts(), said)

    async def _pieces(self, usage: Usage) -> AsyncGenerator[Piece, None]:
        with self._context.gate.places(self._num_prompts * self._params.n):
            prompts = await self._context.off_loop(self._resolved)
            async with aclosing(generate(self._context, prompts, self._params, usage)) as pieces:
                async for piece in pieces:
                    yield piece


_NO_END: Body = {"finish_reason": None, "stop_reason": None}


def _end(piece: Piece) -> Body:
    return {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
