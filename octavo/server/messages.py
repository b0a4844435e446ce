"""The `messages` of a chat call, read into what the chat template takes.

Roles: system, developer (a newer name of system), user, assistant, tool. Content: a string, or a list of
text parts, which are joined with a line break. An assistant's tool calls and their results are passed on
where the model has a form for them. Whatever this server cannot pass on to the model - a picture, a
name - is refused by its place, never dropped.
"""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from octavo.errors import InvalidRequest
from octavo.server.tools import ToolForm

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_READ = {"assistant": ("tool_calls",), "tool": ("tool_call_id", "name")}
MAX_SHOWN = 40


def read_messages(value: Any, form: ToolForm) -> list[dict[str, Any]]:
    """The conversation for `encode_chat`. Raises InvalidRequest that says which message is at fault."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages must be a list with at least one message", param="messages")
    return [_read_message(message, f"messages[{i}]", form) for i, message in enumerate(value)]


def read_content(content: Any, where: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """A string, or text parts of one of these kinds joined by line breaks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise fault(where, "must be a string or a list of text parts")
    return "\n".join(_read_part(part, f"{where}[{i}]", kinds) for i, part in enumerate(content))


def read_arguments(text: Any, where: str) -> dict[str, Any]:
    """The arguments of a past call, which templates write as JSON again."""
    if not isinstance(text, str):
        raise fault(where, "must be a string that holds JSON")
    try:
        value = from_json(text, allow_inf_nan=False) if text.strip() else {}
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise fault(where, "must be a string that holds a JSON object")
    return value


def fault(where: str, what: str) -> InvalidRequest:
    """The refusal of one place."""
    return InvalidRequest(f"{where} {what}", param=where)


def _read_message(message: Any, where: str, form: ToolForm) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise fault(where, "must be an object with role and content")
    role = message.get("role")
    if role == "function":
        raise fault(f"{where}.role", "'function' is the old form of tools and not supported; use 'tool'")
    if not isinstance(role, str) or role not in ROLES:
        raise fault(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    for name, item in message.items():
        known = name in ("role", "content") or name in _READ.get(role, ())
        if not known and item not in (None, []):  # client libraries send back what they left empty
            raise fault(f"{where}.{name[:MAX_SHOWN]}", "is not supported by this server; leave it out")
    if role == "tool":
        return _read_result(message, where, form)
    if role == "assistant" and message.get("tool_calls") not in (None, []):
        return _read_calls(message, where, form)
    return {"role": ROLES[role], "content": read_content(message.get("content"), f"{where}.content")}


def _read_result(message: dict[str, Any], where: str, form: ToolForm) -> dict[str, Any]:
    form.check(f"{where}.role")
    call_id, name = message.get("tool_call_id"), message.get("name")
    if not isinstance(call_id, str) or not call_id:
        raise fault(f"{where}.tool_call_id", "must be the id of the call that this answers")
    if name is not None and not isinstance(name, str):
        raise fault(f"{where}.name", "must be a string")
    read = {"role": "tool", "content": read_content(message.get("content"), f"{where}.content")}
    return {**read, "tool_call_id": call_id, **({"name": name} if name else {})}


def _read_calls(message: dict[str, Any], where: str, form: ToolForm) -> dict[str, Any]:
    form.check(f"{where}.tool_calls")
    calls, content = message["tool_calls"], message.get("content")
    if not isinstance(calls, list):
        raise fault(f"{where}.tool_calls", "must be a list")
    return {
        "role": "assistant",
        "content": read_content(content, f"{where}.content") if content is not None else "",
        "tool_calls": [_read_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)],
    }


def _read_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict) or call.get("type", "function") != "function":
        raise fault(where, "must be an object of type function")
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise fault(f"{where}.function", "must be an object with name and arguments")
    # The openai package adds the last of each to what it sends back; it says nothing new.
    for place, value, names in (
        (where, call, ("id", "type", "function", "index")),
        (f"{where}.function", function, ("name", "arguments", "parsed_arguments")),
    ):
        for name, item in value.items():
            if name not in names and item is not None:
                raise fault(f"{place}.{name[:MAX_SHOWN]}", "is not supported by this server; leave it out")
    if not isinstance(call.get("id"), str):
        raise fault(f"{where}.id", "must be a string")
    arguments = read_arguments(function.get("arguments"), f"{where}.function.arguments")
    return {
        "id": call["id"],
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _read_part(part: Any, where: str, kinds: tuple[str, ...]) -> str:
    if not isinstance(part, dict):
        raise fault(where, f'must be an object such as {{"type": "{kinds[0]}", "text": "..."}}')
    kind = part.get("type")
    if kind not in kinds:
        shown = kind[:MAX_SHOWN] if isinstance(kind, str) else "without a type"
        raise fault(where, f"is a part {shown!r}; this model reads text parts only")
    for name, value in part.items():
        # What OpenAI puts into its own output parts, and clients send back.
        empty = name in ("annotations", "logprobs") and value in (None, [])
        if name not in ("type", "text") and not empty:
            raise fault(f"{where}.{name[:MAX_SHOWN]}", "is not supported by this server; leave it out")
    text = part.get("text")
    if not isinstance(text, str):
        raise fault(f"{where}.text", "must be a string")
    return text
