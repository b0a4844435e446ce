"""What chat and Responses share: the prompt is messages, and the answer may hold calls of tools.

messages, tools --render--> prompt --engine, in the form that is asked for--> text --parser--> content, calls
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.engine import StructuredOutputs
from octavo.errors import InvalidRequest
from octavo.server.call import Call
from octavo.server.caller import Caller
from octavo.server.choices import ChatChoice
from octavo.server.context import ServerContext
from octavo.server.schemas import SampledRequest
from octavo.server.structured import call_form
from octavo.server.tools import NamedParser, ToolForm, ToolParser, Tools, make_parser, render_tools

NamedForm = tuple[str | None, StructuredOutputs | None]
"""The field of a request that gives its answer a form, and the form."""


class Conversation(Call):
    """One conversation. format: what the request says of its answer's form; further: what else the chat
    template is given; generation_prompt: whether it opens the assistant's turn."""

    def __init__(
        self,
        context: ServerContext,
        request: SampledRequest,
        caller: Caller,
        messages: list[dict[str, Any]],
        tools: Tools | None,
        form: ToolForm,
        format: NamedForm,
        *,
        with_logprobs: bool,
        with_ids: bool = False,
        generation_prompt: bool = True,
        further: Mapping[str, Any] | None = None,
    ) -> None:
        if tools is not None:
            form.check("tools")
        self._messages = messages
        self._tools = tools
        self._form = form
        self._format = format
        self._with_logprobs = with_logprobs
        self._with_ids = with_ids
        self._generation_prompt = generation_prompt
        self._further = further or {}
        super().__init__(context, request, 1, caller)

    def encode(self) -> list[list[int]]:
        messages, variables = render_tools(self._form, self._messages, self._tools)
        variables |= self._further
        return [self._tokenizer.encode_chat(messages, self._generation_prompt, **variables)]

    def form_of_answer(self) -> NamedForm:
        called = call_form(self._tools, self._form) if self._tools is not None else (None, None)
        return one_form(self._format, super().form_of_answer(), called)

    def prompt_texts(self) -> list[Any]:
        return list(self._messages)

    def new_choice(self, index: int) -> ChatChoice:
        return ChatChoice(
            self._tokenizer,
            index,
            with_logprobs=self._with_logprobs,
            with_ids=self._with_ids,
            parser=parser_of(self._tools, self._form),
            single=self._tools is not None and not self._tools.several,
        )


def one_form(*forms: NamedForm) -> NamedForm:
    """The one field that gives the answer a form. Raises InvalidRequest where two of them do."""
    given = [(name, form) for name, form in forms if form is not None]
    if len(given) > 1:
        names = [f"{name} (of which one is strict)" if name == "tools" else name for name, _ in given]
        raise InvalidRequest(f"{names[0]} and {names[1]} both give the answer a form", param=given[1][0])
    return given[0] if given else (None, None)


def parser_of(tools: Tools | None, form: ToolForm) -> ToolParser | None:
    """What reads calls out of the text: a forced call is the whole of it, else the model's form."""
    if tools is None:
        return None
    if tools.named is not None:
        return NamedParser(tools.named)
    return make_parser("llama" if tools.forced else form.check("tools"), tools.names)
