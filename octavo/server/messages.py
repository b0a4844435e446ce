"""The `messages` of a chat call, read into the plain `{"role", "content"}` that the chat template takes.

Roles: system, developer (a newer name of system), user, assistant. Content: a string, or a list of text
parts, which are joined with a line break. Whatever this server cannot pass on to the model - a picture,
a tool call, a name - is refused by its place, never dropped.
"""

from __future__ import annotations

from typing import Any

from octavo.errors import InvalidRequest

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TOOL_ROLES = ("tool", "function")
# An assistant message that a client sends back carries these, empty.
EMPTY_FIELDS = ("name", "refusal", "annotations", "audio", "function_call", "tool_calls", "tool_call_id")
MAX_SHOWN = 40


def read_messages(value: Any) -> list[dict[str, str]]:
    """The conversation for `encode_chat`. Raises InvalidRequest that says which message is at fault."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages must be a list with at least one message", param="messages")
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(value)]


def _read_message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise _fault(where, "must be an object with role and content")
    for name, item in message.items():
        if name in ("role", "content") or (name in EMPTY_FIELDS and item in (None, [])):
            continue
        raise _fault(f"{where}.{name[:MAX_SHOWN]}", "is not supported by this server; leave it out")
    role = message.get("role")
    if role in TOOL_ROLES:
        raise _fault(f"{where}.role", f"{role!r} is not supported: this server does not run tools yet")
    if not isinstance(role, str) or role not in ROLES:
        raise _fault(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    return {"role": ROLES[role], "content": _read_content(message.get("content"), f"{where}.content")}


def _read_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise _fault(where, "must be a string or a list of text parts")
    return "\n".join(_read_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _read_part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise _fault(where, 'must be an object such as {"type": "text", "text": "..."}')
    kind = part.get("type")
    if kind != "text":
        shown = kind[:MAX_SHOWN] if isinstance(kind, str) else "without a type"
        raise _fault(where, f"is a part {shown!r}; this model reads text parts only")
    for name in part:
        if name not in ("type", "text"):
            raise _fault(f"{where}.{name[:MAX_SHOWN]}", "is not supported by this server; leave it out")
    text = part.get("text")
    if not isinstance(text, str):
        raise _fault(f"{where}.text", "must be a string")
    return text


def _fault(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{where} {what}", param=where)
