"""Validation against OpenAI's published schemas, which lie beside with their source and licence.

The document writes `nullable: true` as OpenAPI 3.0 did; as_json_schema() turns that into what a JSON Schema
validator knows. Where OpenAI's own servers send what the document does not allow, LENIENT says so:
chunks of completions have a null finish_reason and usage until the last, and the first token of an echo
has null logprobs.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

_FILE = Path(__file__).parent / "schemas.json"
_NULL = {"type": "null"}

LENIENT = {
    "CreateCompletionResponse": {
        "finish_reason": lambda schema: {"anyOf": [schema, _NULL]},
        "usage": lambda schema: {"anyOf": [schema, _NULL]},
        "token_logprobs": lambda schema: {"type": "array", "items": {"type": ["number", "null"]}},
        "top_logprobs": lambda schema: {"type": "array", "items": {"anyOf": [schema["items"], _NULL]}},
    },
}


def check(name: str, value: Any) -> None:
    """Raise jsonschema's ValidationError unless `value` is a valid `name`."""
    _validator(name).validate(value)


def request_fields(name: str) -> list[str]:
    """The names of all fields of a request."""
    return list(_document()["request_fields"][name])


@functools.cache
def _document() -> dict[str, Any]:
    return json.loads(_FILE.read_text())


@functools.cache
def _validator(name: str) -> Draft202012Validator:
    schemas = {key: as_json_schema(value) for key, value in _document()["schemas"].items()}
    for key, changes in LENIENT.items():
        schemas[key] = _changed(schemas[key], changes)
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}})


def as_json_schema(value: Any) -> Any:
    """`nullable` as a union with null; everything else as it is."""
    if isinstance(value, list):
        return [as_json_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    plain = {
        key: as_json_schema(item) for key, item in value.items() if key not in ("nullable", "discriminator")
    }
    return {"anyOf": [plain, _NULL]} if value.get("nullable") is True else plain


def _changed(value: Any, changes: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_changed(item, changes) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: changes[key](item) if key in changes and isinstance(item, dict) else _changed(item, changes)
        for key, item in value.items()
    }
