"""`input` and `instructions` of a response, read into the messages of a chat.

    "text"                        a user's message
    message                       a message; its parts input_text or output_text
    function_call                 a tool call of the assistant's message before it, or of a new one
    function_call_output          a tool's message

Items that refer to what a server has stored, and those of tools that it would run, are refused by place.
"""

from __future__ import annotations

from typing import Any

from octavo.errors import InvalidRequest
from octavo.server.messages import MAX_SHOWN, ROLES, fault, read_arguments, read_content
from octavo.server.tools import ToolForm

_MESSAGE = ("type", "role", "content", "id", "status")
_CALL = ("type", "call_id", "name", "arguments", "id", "status")
_OUTPUT = ("type", "call_id", "output", "id", "status")
_PARTS = ("input_text", "output_text", "text")


def read_input(value: Any, instructions: str | None, form: ToolForm) -> list[dict[str, Any]]:
    """The conversation for `encode_chat`. Raises InvalidRequest that says which item is at fault."""
    messages = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(value, str) and value:
        return [*messages, {"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise InvalidRequest("input must be a text or a list of items, and not empty", param="input")
    for i, item in enumerate(value):
        _read_item(item, f"input[{i}]", form, messages)
    return messages


def _read_item(item: Any, where: str, form: ToolForm, messages: list[dict[str, Any]]) -> None:
    if not isinstance(item, dict):
        raise fault(where, "must be an object with a type")
    kind = item.get("type", "message")
    if kind == "message":
        messages.append(_read_message(item, where))
    elif kind == "function_call":
        form.check(f"{where}.type")
        call = _read_call(item, where)
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        form.check(f"{where}.type")
        _only(item, where, _OUTPUT)
        content = read_content(item.get("output"), f"{where}.output", _PARTS)
        messages.append({"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": content})
    else:
        shown = kind[:MAX_SHOWN] if isinstance(kind, str) else "no string"
        raise fault(f"{where}.type", f"is {shown!r}, which is not supported by this server")


def _read_message(item: dict[str, Any], where: str) -> dict[str, Any]:
    _only(item, where, _MESSAGE)
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES or role == "tool":
        raise fault(f"{where}.role", "must be one of system, developer, user, assistant")
    return {"role": ROLES[role], "content": read_content(item.get("content"), f"{where}.content", _PARTS)}


def _read_call(item: dict[str, Any], where: str) -> dict[str, Any]:
    _only(item, where, _CALL)
    function = {
        "name": _string(item, "name", where),
        "arguments": read_arguments(item.get("arguments"), f"{where}.arguments"),
    }
    return {"id": _string(item, "call_id", where), "type": "function", "function": function}


def _string(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise fault(f"{where}.{name}", "must be a string that is not empty")
    return value


def _only(item: dict[str, Any], where: str, names: tuple[str, ...]) -> None:
    for name, value in item.items():
        if name not in names and value not in (None, []):
            raise fault(f"{where}.{name[:MAX_SHOWN]}", "is not supported by this server; leave it out")
