"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.engine import StructuredOutputs
from octavo.errors import InvalidRequest
from octavo.server.body import read_request
from octavo.server.call import Call
from octavo.server.caller import Caller
from octavo.server.choices import Body, ChatChoice
from octavo.server.context import ServerContext
from octavo.server.logprobs import prompt_logprobs
from octavo.server.messages import read_messages
from octavo.server.schemas import ChatRequest
from octavo.server.structured import forced_call, read_format
from octavo.server.tools import (
    NamedParser,
    ToolForm,
    ToolParser,
    Tools,
    form_of,
    make_parser,
    read_tools,
    render_tools,
)

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
        check_tools(tools, form)
        self._asked = request
        self._messages = messages
        self._tools = tools
        self._form = form
        super().__init__(context, request, 1, caller)
        if request.service_tier is not None:
            self._head["service_tier"] = "default"

    def encode(self) -> list[list[int]]:
        messages, variables = render_tools(self._form, self._messages, self._tools)
        variables |= self._asked.chat_template_kwargs
        return [self._tokenizer.encode_chat(messages, self._asked.add_generation_prompt, **variables)]

    def form_of_answer(self) -> tuple[str | None, StructuredOutputs | None]:
        return one_form(
            ("response_format", read_format(self._asked.response_format, "response_format")),
            super().form_of_answer(),
            ("tool_choice", forced_call(self._tools) if self._tools is not None else None),
        )

    def prompt_texts(self) -> list[Any]:
        return list(self._messages)

    def new_choice(self, index: int) -> ChatChoice:
        tools = self._tools
        return ChatChoice(
            self._tokenizer,
            index,
            with_logprobs=self._asked.logprobs,
            with_ids=self._asked.return_token_ids,
            parser=parser_of(tools, self._form),
            single=tools is not None and not tools.several,
        )

    def extras(self) -> Body:
        extras: Body = {}
        if self._asked.return_token_ids:
            extras["prompt_token_ids"] = self._ids[0]
        if self._asked.prompt_logprobs is not None:
            extras["prompt_logprobs"] = prompt_logprobs(self._tokenizer, self._scores[0])
        return extras


NamedForm = tuple[str | None, StructuredOutputs | None]
"""The field of a request that gives its answer a form, and the form."""


def check_tools(tools: Tools | None, form: ToolForm) -> None:
    """Refuse what of tools this model or server cannot honour."""
    if tools is None:
        return
    form.check("tools")
    for i, tool in enumerate(tools.declared):
        if tool["function"].get("strict") and not tools.forced:
            raise InvalidRequest(
                f"tools[{i}]: strict is honoured only where tool_choice forces a call; leave it out",
                param="tools",
            )


def one_form(
    *forms: tuple[str | None, StructuredOutputs | None],
) -> tuple[str | None, StructuredOutputs | None]:
    """The one field that gives the answer a form. Raises InvalidRequest where two of them do."""
    given = [(name, form) for name, form in forms if form is not None]
    if len(given) > 1:
        raise InvalidRequest(
            f"{given[0][0]} and {given[1][0]} both give the answer a form", param=given[1][0]
        )
    return given[0] if given else (None, None)


def parser_of(tools: Tools | None, form: ToolForm) -> ToolParser | None:
    """What reads calls out of the text: a forced call is the whole of it, else the model's form."""
    if tools is None:
        return None
    if tools.named is not None:
        return NamedParser(tools.named)
    return make_parser("llama" if tools.forced else form.check("tools"), tools.names)
