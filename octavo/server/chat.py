"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.server.body import read_request
from octavo.server.caller import Caller
from octavo.server.choices import Body
from octavo.server.context import ServerContext
from octavo.server.conversation import Conversation
from octavo.server.logprobs import prompt_logprobs
from octavo.server.messages import read_messages
from octavo.server.schemas import ChatRequest
from octavo.server.structured import read_format
from octavo.server.tools import ToolForm, Tools, form_of, read_tools

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None)
async def create_chat_completion(request: Request) -> Response:
    """Continue a conversation with the assistant's next message."""
    context: ServerContext = request.app.state.context
    body = await read_request(request, context, ChatRequest)
    context.check(body.model)
    # Messages, tools and schemas may be megabytes to look at.
    caller = Caller.of(request)
    call = await context.off_loop_for(caller.body_bytes, quick=True)(_understand, context, body, caller)
    answer: Response = await call.respond(request)
    return answer


def _understand(context: ServerContext, body: ChatRequest, caller: Caller) -> ChatCall:
    form = form_of(context.engine.engine.tokenizer.chat_template, context.config.tool_format)
    messages = read_messages(body.messages, form)
    tools = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    return ChatCall(context, body, messages, caller, tools, form)


class ChatCall(Conversation):
    """One conversation; its `n` choices are n messages."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        context: ServerContext,
        request: ChatRequest,
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
            ("response_format", read_format(request.response_format, "response_format")),
            with_logprobs=request.logprobs,
            with_ids=request.return_token_ids,
            generation_prompt=request.add_generation_prompt,
            further=request.chat_template_kwargs,
        )
        self._asked = request
        if request.service_tier is not None:
            self._head["service_tier"] = "default"

    def extras(self) -> Body:
        extras: Body = {}
        if self._asked.return_token_ids:
            extras["prompt_token_ids"] = self._ids[0]
        if self._asked.prompt_logprobs is not None:
            extras["prompt_logprobs"] = prompt_logprobs(self._tokenizer, self._scores[0])
        return extras
