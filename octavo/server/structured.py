"""What a request says of the form of its answer, as the engine's StructuredOutputs.

response_format    {"type": "text" | "json_object" | "json_schema", "json_schema": {"schema": ...}}
text.format        the same in Responses, flatter
structured_outputs one of json, json_object, regex, choice, grammar - an extension, as vLLM has it
tool_choice        a call that must be made: its arguments, or name and arguments, by the tools' schemas
tools              where one is strict and the model may choose: plain text, or calls by the tools' schemas
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from octavo.engine import StructuredOutputs
from octavo.errors import InvalidRequest
from octavo.server.tools import ToolForm, Tools, write_grammar

_FORMAT = ("name", "description", "schema", "strict")
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_MAX_SHOWN = 40


def read_format(value: Any, where: str, *, flat: bool = False) -> StructuredOutputs | None:
    """The form of a response_format or text.format; None for plain text. Raises InvalidRequest."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{where} must be an object with a type", param=where)
    kind = value.get("type")
    if kind in ("text", "json_object"):
        _only(value, ("type",), where)
        return StructuredOutputs(json_object=True) if kind == "json_object" else None
    if kind != "json_schema":
        shown = kind[:_MAX_SHOWN] if isinstance(kind, str) else "none"
        raise InvalidRequest(
            f"{where}.type must be text, json_object or json_schema, not {shown!r}", param=where
        )
    if flat:
        return _of_schema({name: item for name, item in value.items() if name != "type"}, where)
    _only(value, ("type", "json_schema"), where)
    return _of_schema(value.get("json_schema"), f"{where}.json_schema")


def read_structured(value: Mapping[str, Any] | None) -> StructuredOutputs | None:
    """The form that the extension names."""
    if value is None:
        return None
    _only(value, _KINDS, "structured_outputs")
    given = {name: item for name, item in value.items() if item is not None}
    for name, kind, what in (("json_object", bool, "true or false"), ("choice", list, "a list of strings")):
        if name in given and not isinstance(given[name], kind):
            raise InvalidRequest(
                f"structured_outputs.{name} must be {what}, got {given[name]!r:.{_MAX_SHOWN}}",
                param="structured_outputs",
            )
    return StructuredOutputs(**given)


def forced_call(tools: Tools) -> StructuredOutputs | None:
    """The form of a call that must be made; None where the model may choose."""
    if tools.named is not None:
        return StructuredOutputs(json=tools.parameters(tools.named))
    if tools.choice != "required":
        return None
    shared: dict[str, Any] = {}
    calls = []
    for number, name in enumerate(tools.names):
        schema = tools.parameters(name)
        for kind in ("$defs", "definitions"):
            defined = schema.get(kind, {})
            shared |= {f"{number}.{key}": _moved(item, number) for key, item in defined.items()}
        bare = {key: item for key, item in schema.items() if key not in ("$defs", "definitions")}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": _moved(bare, number)},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return StructuredOutputs(json={"anyOf": calls, "$defs": shared})


def call_form(tools: Tools, form: ToolForm) -> tuple[str | None, StructuredOutputs | None]:
    """The field that gives calls a form, and the form; none where the model may write what it likes."""
    if tools.forced:
        return "tool_choice", forced_call(tools)
    if not any(tool["function"].get("strict") for tool in tools.declared):
        return None, None
    with named({"structured_outputs": "tools"}):
        return "tools", StructuredOutputs(grammar=write_grammar(tools, form.check("tools")))


@contextmanager
def named(fields: Mapping[str, str]) -> Iterator[None]:
    """Name the request's own field where the engine names its parameter: {"structured_outputs": "tools"}."""
    try:
        yield
    except InvalidRequest as error:
        field = fields.get(error.param or "")
        if field is None:
            raise
        raise InvalidRequest(f"{field}: {error}", param=field, code=error.code) from error


def _of_schema(value: Any, where: str) -> StructuredOutputs:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{where} must be an object with a schema", param=where)
    _only(value, _FORMAT, where)
    schema = value.get("schema")
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"{where}.schema must be a JSON schema, an object", param=where)
    with named({"structured_outputs": where}):
        return StructuredOutputs(json=schema)


def _only(value: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    for name in value:
        if name not in names:
            raise InvalidRequest(
                f"{where}.{name[:_MAX_SHOWN]} is not supported by this server; leave it out", param=where
            )


def _moved(value: Any, number: int) -> Any:
    """A schema that is now part of a larger one: references to its definitions point to where they went."""
    if isinstance(value, list):
        return [_moved(item, number) for item in value]
    if not isinstance(value, Mapping):
        return value
    made = {key: _moved(item, number) for key, item in value.items()}
    target = value.get("$ref")
    if isinstance(target, str):
        for kind in ("#/$defs/", "#/definitions/"):
            if target.startswith(kind):
                made["$ref"] = f"#/$defs/{number}.{target.removeprefix(kind)}"
    return made
