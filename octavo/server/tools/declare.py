"""The `tools`, `tool_choice` and `parallel_tool_calls` of a request, checked and in one object.

Responses writes the same things flatter than chat does; both come out alike, as chat has them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import InvalidRequest

MAX_TOOLS = 128
MAX_SHOWN = 40
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
_FIELDS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True)
class Tools:
    """Declared tools. declared: as chat templates take them.

    choice: "auto", or "required", or the name of the tool that must be called. several: whether an
    answer may hold more than one call.
    """

    declared: tuple[dict[str, Any], ...]
    choice: str = "auto"
    named: str | None = None
    several: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the declared tools, in order."""
        return tuple(tool["function"]["name"] for tool in self.declared)

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.choice != "auto"

    def strict(self, name: str) -> bool:
        """Whether the arguments of a tool's calls must follow its schema."""
        return bool(self.declared[self.names.index(name)]["function"].get("strict"))

    def parameters(self, name: str) -> dict[str, Any]:
        """The JSON schema of a tool's arguments."""
        function = self.declared[self.names.index(name)]["function"]
        schema: dict[str, Any] = function.get("parameters") or {"type": "object"}
        return schema


def read_tools(tools: Any, choice: Any, parallel: bool | None, *, flat: bool = False) -> Tools | None:
    """The tools of a request, None where it has none or chooses none. `flat`: as Responses writes them.

    Raises InvalidRequest that names the place at fault.
    """
    if tools is None or tools == []:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools to choose from", param="tool_choice")
        return None
    if not isinstance(tools, list):
        raise InvalidRequest("tools must be a list", param="tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} entries, at most {MAX_TOOLS} are taken", param="tools")
    declared = tuple(_read_tool(tool, f"tools[{i}]", flat) for i, tool in enumerate(tools))
    names = [tool["function"]["name"] for tool in declared]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools has two tools of the same name", param="tools")
    if choice is None or choice in ("auto", "none", "required"):
        if choice == "none":
            return None
        return Tools(declared, choice or "auto", None, parallel is not False)
    name = _chosen(choice, flat)
    if name not in names:
        raise InvalidRequest(
            f"tool_choice names {name[:MAX_SHOWN]!r}, which is not in tools", param="tool_choice"
        )
    return Tools(declared, "named", name, parallel is not False)


def _read_tool(tool: Any, where: str, flat: bool) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise _fault(where, "must be an object with type and function")
    kind = tool.get("type")
    if kind != "function":
        shown = kind[:MAX_SHOWN] if isinstance(kind, str) else "without a type"
        raise _fault(f"{where}.type", f"is {shown!r}; this server has no tools of its own, only 'function'")
    if flat:
        function: Any = {name: value for name, value in tool.items() if name != "type"}
        inner = where
    else:
        for name in tool:
            if name not in ("type", "function"):
                raise _fault(f"{where}.{name[:MAX_SHOWN]}", "is not supported by this server; leave it out")
        function, inner = tool.get("function"), f"{where}.function"
    if not isinstance(function, Mapping):
        raise _fault(inner, "must be an object with a name")
    return {"type": "function", "function": _read_function(function, inner)}


def _read_function(function: Mapping[str, Any], where: str) -> dict[str, Any]:
    for field, value in function.items():
        if field not in _FIELDS and value is not None:
            raise _fault(f"{where}.{field[:MAX_SHOWN]}", "is not supported by this server; leave it out")
    name, text = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.match(name):
        raise _fault(f"{where}.name", "must be 1 to 64 letters, digits or any of _.-")
    if text is not None and not isinstance(text, str):
        raise _fault(f"{where}.description", "must be a string")
    schema = function.get("parameters")
    if schema is not None and not isinstance(schema, Mapping):
        raise _fault(f"{where}.parameters", "must be a JSON schema, an object")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise _fault(f"{where}.strict", "must be true or false")
    # Chat templates read `description` without asking whether it is there.
    read: dict[str, Any] = {"name": name, "description": text or ""}
    read["parameters"] = dict(schema) if schema is not None else {"type": "object", "properties": {}}
    if strict:
        read["strict"] = True
    return read


def _chosen(choice: Any, flat: bool) -> str:
    """The name in {"type": "function", "function": {"name": ...}}, or {"type": "function", "name": ...}."""
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        inner: Any = choice if flat else choice.get("function")
        allowed = {"type", "name"} if flat else {"name"}
        if isinstance(inner, Mapping) and isinstance(inner.get("name"), str) and set(inner) <= allowed:
            return str(inner["name"])
    raise InvalidRequest(
        'tool_choice must be "none", "auto", "required" or an object of type function with the name of a '
        "tool; other kinds are not supported by this server",
        param="tool_choice",
    )


def _fault(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{where} {what}", param=where)
