"""One call for text, from checked request to answer or stream: what completions and chat share.

read_request -> Call -> events()  (stream)   -> EventStream
                     -> answer()  (one body) -> JsonResponse
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import Request
from starlette.responses import Response

from octavo.engine import StructuredOutputs
from octavo.engine.intake import slow_to_resolve
from octavo.engine.logprobs import TokenLogprobs
from octavo.engine.origin import Origin
from octavo.engine.params import SamplingParams
from octavo.errors import InvalidRequest
from octavo.models import Tokenizer
from octavo.server.caller import Caller
from octavo.server.choices import Body, Choice
from octavo.server.context import ServerContext
from octavo.server.errors import JsonResponse
from octavo.server.generation import Piece, Usage, generate
from octavo.server.prompts import check_token_ids
from octavo.server.schemas import SampledRequest
from octavo.server.stream import DONE, EventStream, event, unless_disconnected
from octavo.server.structured import named, read_structured


class Call(ABC):
    """A request that was understood. Subclasses give it the shape of their route."""

    id_prefix: str
    object: str
    chunk_object: str

    def __init__(
        self, context: ServerContext, request: SampledRequest, num_prompts: int, caller: Caller
    ) -> None:
        self._context = context
        self._request = request
        self._num_prompts = num_prompts
        self._caller = caller
        field, form = self.form_of_answer()
        self._names = request.names | ({"structured_outputs": field} if field is not None else {})
        with named(self._names):
            params = request.sampling_params()
            if form is not None:
                params = replace(params, structured_outputs=form)
            caller.check(params)
        self._params: SamplingParams = params
        check_token_ids(
            request.stop_token_ids, context.engine.engine.vocab_size, "stop_token_ids", "stop_token_ids"
        )
        self._origin = Origin(
            salt=caller.salt(request.cache_salt),
            priority=_priority(context, request.priority),
            tenant=caller.key.name if caller.key is not None else "",
            interactive=request.stream,
        )
        self._ids: list[list[int]] = []
        self._scores: dict[int, list[TokenLogprobs | None]] = {}
        self.usage = Usage()
        self._head: Body = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "object": self.object,
            "created": int(time.time()),
            "model": context.model_name,
        }

    @property
    def _tokenizer(self) -> Tokenizer:
        return self._context.engine.engine.tokenizer

    @property
    def encoded(self) -> bool:
        """Whether the prompts are token ids as they came."""
        return False

    @abstractmethod
    def encode(self) -> list[list[int]]:
        """The token ids of each prompt. Runs in a thread."""

    @abstractmethod
    def prompt_texts(self) -> list[Any]:
        """What was asked, for the log, where that is wanted."""

    @abstractmethod
    def new_choice(self, index: int) -> Choice:
        """The choice of that number, when its first piece has come."""

    def form_of_answer(self) -> tuple[str | None, StructuredOutputs | None]:
        """The field that gives the answer a form, and the form."""
        form = read_structured(self._request.structured_outputs)
        return ("structured_outputs" if form is not None else None), form

    def extras(self) -> Body:
        """Fields of the whole answer, or of a stream's first chunk, that only some ask for."""
        return {}

    async def respond(self, request: Request) -> Response:
        """The HTTP answer. Work stops when the client leaves."""
        if self._request.stream:
            return EventStream(self.events())
        return JsonResponse(await unless_disconnected(request.receive, self.answer()))

    async def answer(self) -> Body:
        """Wait for every choice to finish."""
        choices: dict[int, Choice] = {}
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                choice = self._choice(choices, piece)
                if not choice.ended:  # it may end itself earlier than the engine does
                    choice.take(piece)
                if self._all_ended(choices):
                    break
        whole = [choices[index].whole() for index in sorted(choices)]
        return {**self._head, "choices": whole, "usage": self.usage.body(), **self.extras()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Encoded events: each choice's chunks, then the usage if asked for, then DONE."""
        choices: dict[int, Choice] = {}
        extras: Body | None = None
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                choice = self._choice(choices, piece)
                if choice.ended:
                    continue  # it ended itself earlier than the engine did
                for body in choice.take(piece):
                    if extras is None:
                        extras = self.extras()
                        yield self._chunk([body], extras=extras)
                    else:
                        yield self._chunk([body])
                if self._all_ended(choices):
                    break
        if self._request.include_usage:
            yield self._chunk([], self.usage.body())
        yield DONE

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The pieces; what came of them is in the log at the end, however that comes about."""
        texts: dict[int, list[str]] = {}
        try:
            async with aclosing(self._generated()) as pieces:
                async for piece in pieces:
                    if self._context.config.log_prompts:
                        texts.setdefault(piece.choice, []).append(piece.text)
                    if piece.prompt_logprobs is not None:
                        self._scores[piece.choice // self._params.n] = piece.prompt_logprobs
                    yield piece
        finally:
            self._caller.note(self.usage)
            if self._context.config.log_prompts:
                said = ["".join(texts[index]) for index in sorted(texts)]
                self._caller.tell(self.prompt_texts(), said)

    def _choice(self, choices: dict[int, Choice], piece: Piece) -> Choice:
        # Made one by one, never sized by n: the gate in _generated refuses a huge one first.
        choice = choices.get(piece.choice)
        if choice is None:
            choice = choices[piece.choice] = self.new_choice(piece.choice)
        return choice

    def _all_ended(self, choices: dict[int, Choice]) -> bool:
        """Whether no more is to come, though the engine may not have ended: the rest is given up."""
        return len(choices) == self._num_prompts * self._params.n and all(
            choice.ended for choice in choices.values()
        )

    def _chunk(self, choices: list[Body], usage: Body | None = None, extras: Body | None = None) -> bytes:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices, **(extras or {})}
        if self._request.include_usage:
            # null on all but the last, as OpenAI has it, unless the client wants it all along
            chunk["usage"] = self.usage.body() if self._request.continuous_usage else usage
        return event(chunk)

    def _resolved(self) -> list[tuple[list[int], SamplingParams]]:
        """Encode the prompts and check all of them, so that none is refused after others have begun."""
        engine = self._context.engine.engine
        prompts = self.encode()
        keep = self._params.truncate_prompt_tokens
        if keep is not None:
            prompts = [ids[-keep:] for ids in prompts]
        params = replace(self._params, truncate_prompt_tokens=None)
        jobs = [(ids, self._caller.bounded(params, engine.max_model_len - len(ids))) for ids in prompts]
        with named(self._names):
            for ids, bounded in jobs:
                engine.resolve(ids, bounded)
        return jobs

    async def _generated(self) -> AsyncGenerator[Piece, None]:
        with self._context.gate.places(self._num_prompts * self._params.width) as places:
            slow = slow_to_resolve(self._params)
            way = self._context.off_loop_for(self._caller.body_bytes, quick=self.encoded)
            jobs = await (self._context.off_loop_slow if slow else way)(self._resolved)
            self._ids = [ids for ids, _ in jobs]
            generated = generate(self._context, jobs, self.usage, self._origin, places.give_back)
            async with aclosing(generated) as pieces:
                async for piece in pieces:
                    yield piece


def _priority(context: ServerContext, value: int) -> int:
    """The engine's priority, where higher goes first; in requests, as in vLLM's, lower does."""
    if value and context.engine.engine.config.schedule != "priority":
        raise InvalidRequest(
            f"priority is {value}, but this server does not schedule by it; leave it out, or start it with "
            "--schedule priority",
            param="priority",
        )
    return -value
