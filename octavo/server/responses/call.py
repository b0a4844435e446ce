"""POST /v1/responses, from checked request to answer or events."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.errors import OctavoError
from octavo.server.body import read_request
from octavo.server.caller import Caller
from octavo.server.choices import Body, ChatChoice
from octavo.server.context import ServerContext
from octavo.server.conversation import Conversation
from octavo.server.errors import describe
from octavo.server.responses.input import read_input
from octavo.server.responses.items import Event, OutputItems
from octavo.server.responses.schema import ResponsesRequest
from octavo.server.stream import logger, named_event
from octavo.server.structured import read_format
from octavo.server.tools import ToolForm, Tools, form_of, read_tools

router = APIRouter()


@router.post("/v1/responses", response_model=None)
async def create_response(request: Request) -> Response:
    """Answer an input with text or tool calls. Nothing is stored."""
    context: ServerContext = request.app.state.context
    body = await read_request(request, context, ResponsesRequest)
    context.check(body.model)
    caller = Caller.of(request)
    call = await context.off_loop_for(caller.body_bytes, quick=True)(_understand, context, body, caller)
    answer: Response = await call.respond(request)
    return answer


def _understand(context: ServerContext, body: ResponsesRequest, caller: Caller) -> ResponseCall:
    form = form_of(context.engine.engine.tokenizer.chat_template, context.config.tool_format)
    messages = read_input(body.input, body.instructions, form)
    tools = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls, flat=True)
    return ResponseCall(context, body, messages, caller, tools, form)


class ResponseCall(Conversation):
    """One response. Its text and calls are read as a chat's are; only the shape differs."""

    id_prefix = "resp"
    object = chunk_object = "response"

    def __init__(
        self,
        context: ServerContext,
        request: ResponsesRequest,
        messages: list[dict[str, Any]],
        caller: Caller,
        tools: Tools | None,
        form: ToolForm,
    ) -> None:
        super().__init__(
            context,
            request,
            caller,
            messages,
            tools,
            form,
            ("text.format", read_format(request.text.get("format"), "text.format", flat=True)),
            with_logprobs=request.with_logprobs,
        )
        self._asked = request
        self._id = f"resp_{uuid.uuid4().hex}"
        self._items = OutputItems()
        self._number = 0

    async def answer(self) -> Body:
        """The whole response."""
        choice = self.new_choice(0)
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                for chunk in choice.take(piece):
                    self._items.take(chunk)
                if choice.ended:
                    break
        return self._ended(choice, [])

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Encoded events from response.created to response.completed, .incomplete or .failed.

        Nothing goes out before the first piece, so that what is wrong with a request is an HTTP error.
        """
        choice, begun = self.new_choice(0), False
        try:
            async with aclosing(self.pieces()) as pieces:
                async for piece in pieces:
                    chunks = choice.take(piece)
                    if not begun:
                        begun = True
                        for kind in ("created", "in_progress"):
                            yield self._event(self._about(kind, self._body("in_progress")))
                    for chunk in chunks:
                        for event in self._items.take(chunk):
                            yield self._event(event)
                    if choice.ended:
                        break
            last: list[Event] = []
            body = self._ended(choice, last)
            for event in last:
                yield self._event(event)
            yield self._event(self._about(body["status"], body))
        except Exception as error:
            if not begun:
                raise
            if not isinstance(error, OctavoError):
                logger.exception("a stream failed")
            yield self._event(self._about("failed", self._failed(error)))

    def _ended(self, choice: ChatChoice, events: list[Event]) -> Body:
        """The response at its end; the last items' events are added to `events`."""
        cut = choice.finish_reason == "length"
        events += self._items.finish("incomplete" if cut else "completed")
        body = self._body("incomplete" if cut else "completed")
        if cut:
            return {**body, "incomplete_details": {"reason": "max_output_tokens"}}
        return {**body, "completed_at": int(time.time())}

    def _failed(self, error: Exception) -> Body:
        message = describe(error)[1]["error"]["message"]
        return {**self._body("failed"), "error": {"code": "server_error", "message": message}}

    def _event(self, event: Event) -> bytes:
        self._number += 1
        return named_event({**event, "sequence_number": self._number - 1})

    def _about(self, kind: str, body: Body) -> Event:
        return {"type": f"response.{kind}", "response": body}

    def _body(self, status: str) -> Body:
        asked, running = self._asked, status == "in_progress"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": None,
            "metadata": dict(asked.metadata),
            "model": self._context.model_name,
            "output": [] if running else list(self._items.items),
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": None,
            "safety_identifier": asked.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": asked.text.get("format") or {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": [_shown_tool(tool) for tool in asked.tools or ()],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": asked.top_p,
            "truncation": "disabled",
            **({} if running else {"usage": self._usage()}),
            **({"user": asked.user} if asked.user is not None else {}),
        }

    def _usage(self) -> Body:
        counted = self.usage.body()
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": counted["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counted["total_tokens"],
        }


def _shown_tool(tool: Body) -> Body:
    return {"parameters": None, "strict": False, **tool}
