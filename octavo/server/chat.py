"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.errors import InvalidRequest
from octavo.server.body import read_request
from octavo.server.call import Call
from octavo.server.caller import Caller
from octavo.server.choices import Body, ChatChoice
from octavo.server.context import ServerContext
from octavo.server.logprobs import prompt_logprobs
from octavo.server.messages import read_messages
from octavo.server.schemas import ChatRequest
from octavo.server.tools import ToolForm, Tools, form_of, make_parser, read_tools, render_tools

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None)
async def create_chat_completion(request: Request) -> Response:
    """Continue a conversation with the assistant's next message."""
    context: ServerContext = request.app.state.context
    body = await read_request(request, context, ChatRequest)
    context.check(body.model)
    form = form_of(context.engine.engine.tokenizer.chat_template, context.config.tool_format)
    messages = await context.off_loop(read_messages, body.messages, form)
    tools = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    return await ChatCall(context, body, messages, Caller.of(request), tools, form).respond(request)


class ChatCall(Call):
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
        super().__init__(context, request, 1, caller)
        check_tools(tools, form)
        self._asked = request
        self._messages = messages
        self._tools = tools
        self._form = form
        if request.service_tier is not None:
            self._head["service_tier"] = "default"

    def encode(self) -> list[list[int]]:
        messages, variables = render_tools(self._form, self._messages, self._tools)
        variables |= self._asked.chat_template_kwargs
        return [self._tokenizer.encode_chat(messages, self._asked.add_generation_prompt, **variables)]

    def prompt_texts(self) -> list[Any]:
        return list(self._messages)

    def new_choice(self, index: int) -> ChatChoice:
        tools = self._tools
        parser = None if tools is None else make_parser(self._form.check("tools"), tools.names)
        return ChatChoice(
            self._tokenizer,
            index,
            with_logprobs=self._asked.logprobs,
            with_ids=self._asked.return_token_ids,
            parser=parser,
            single=tools is not None and not tools.several,
        )

    def extras(self) -> Body:
        extras: Body = {}
        if self._asked.return_token_ids:
            extras["prompt_token_ids"] = self._ids[0]
        if self._asked.prompt_logprobs is not None:
            extras["prompt_logprobs"] = prompt_logprobs(self._tokenizer, self._scores[0])
        return extras


def check_tools(tools: Tools | None, form: ToolForm) -> None:
    """Refuse what of tools this model or server cannot honour."""
    if tools is None:
        return
    form.check("tools")
    if tools.forced:
        raise InvalidRequest(
            'tool_choice that forces a call is not supported by this server; use "auto"', param="tool_choice"
        )
    for i, tool in enumerate(tools.declared):
        if tool["function"].get("strict"):
            raise InvalidRequest(
                f"tools[{i}]: strict is not supported by this server; leave it out", param="tools"
            )
