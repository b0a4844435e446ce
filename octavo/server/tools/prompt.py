"""How a model is told of tools: by its own chat template, or by a description that stands in for one.

template mentions tools    they are handed to it, and past calls and results with them
it does not                refused by name, unless the server was started with a form: then the
                           description goes into the system message, calls and results into text
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import InvalidRequest
from octavo.server.tools.declare import Tools

_MENTION = re.compile(r"\btools\b")


@dataclass(frozen=True)
class ToolForm:
    """How tool calls are written. form: hermes, llama, or None with the reason why there are none.

    native: the chat template itself writes tools.
    """

    form: str | None
    native: bool
    reason: str = ""

    def check(self, where: str) -> str:
        """The form. Raises InvalidRequest naming `where` when this model has none."""
        if self.form is None:
            raise InvalidRequest(f"{where}: {self.reason}", param=where)
        return self.form


def form_of(template: str | None, option: str) -> ToolForm:
    """The form for a chat template; `option` is --tool-format: auto, hermes or llama."""
    native = template is not None and _MENTION.search(template) is not None
    if option != "auto":
        return ToolForm(option, native)
    if not native:
        return ToolForm(
            None,
            False,
            "this model's chat template has no place for tools; --tool-format hermes would describe them "
            "in the system message instead",
        )
    assert template is not None
    if "<tool_call>" in template:
        return ToolForm("hermes", True)
    if "<|python_tag|>" in template or "ipython" in template:
        return ToolForm("llama", True)
    return ToolForm(
        None, True, "this model's chat template does not show how it writes calls; start with --tool-format"
    )


def render_tools(
    form: ToolForm, messages: Sequence[Mapping[str, Any]], tools: Tools | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and template variables that tell the model of the tools. Raises where it has no form."""
    if tools is not None:
        form.check("tools")
    declared = list(tools.declared) if tools is not None else []
    if form.form is not None and not form.native:
        return describe(messages, declared, form.form), {}
    return [dict(message) for message in messages], {"tools": declared} if declared else {}


def describe(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], form: str) -> list[dict[str, Any]]:
    """Messages in plain text for a template that knows no tools: the tools in the system message, past
    calls as the model would write them, results as user messages."""
    plain = [_plain(message, form) for message in messages]
    if not tools:
        return plain
    text = _PREAMBLE[form].format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain and plain[0]["role"] == "system":
        first = {**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}
        return [first, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def write_call(name: str, arguments: Any, form: str) -> str:
    """A call as a model of that form writes it."""
    if form == "llama":
        return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)
    return (
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
    )


def _plain(message: Mapping[str, Any], form: str) -> dict[str, Any]:
    if message["role"] == "tool":
        text = message["content"]
        if form == "hermes":
            text = f"<tool_response>\n{text}\n</tool_response>"
        return {"role": "user", "content": text}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    written = [write_call(call["function"]["name"], call["function"]["arguments"], form) for call in calls]
    content = [message["content"]] if message["content"] else []
    return {
        "role": message["role"],
        "content": ("; " if form == "llama" else "\n").join([*content, *written]),
    }


_PREAMBLE = {
    "hermes": "These functions can be called, each given as JSON with a schema of its arguments:\n"
    "<tools>\n{tools}\n</tools>\n"
    "To call one, answer with its name and arguments as JSON between tags, and nothing else:\n"
    '<tool_call>\n{{"name": "function name", "arguments": {{"argument": "value"}}}}\n</tool_call>\n'
    "Several calls are several such pairs of tags. When no function helps, answer in plain words.",
    "llama": "These functions can be called, each given as JSON with a schema of its arguments:\n"
    "{tools}\n"
    "To call one, answer with its name and arguments as JSON, and nothing else:\n"
    '{{"name": "function name", "parameters": {{"argument": "value"}}}}\n'
    "Several calls are separated by a semicolon. When no function helps, answer in plain words.",
}
