"""What a text must look like, as a request states it: JSON of a schema, a regex, a choice, a grammar."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import InvalidRequest

MAX_GRAMMAR_CHARS = 200_000
MAX_CHOICES = 4096


@dataclass(frozen=True)
class StructuredOutputs:
    """The form that the whole output has; give exactly one.

    json: a JSON schema, as a mapping or its text. json_object: any JSON object. regex: in the syntax of
    Rust's regex crate, matched in full. choice: one of these strings. grammar: a context-free grammar, in
    the Lark dialect of llguidance or in GBNF. Together at most 200,000 characters, 4,096 choices.
    Raises InvalidRequest, naming the field.
    """

    json: Mapping[str, Any] | str | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            raise InvalidRequest(
                "structured_outputs needs exactly one of json, json_object, regex, choice and grammar, "
                f"got {', '.join(given) or 'none'}",
                param="structured_outputs",
            )
        kind = given[0]
        if kind == "choice":
            choices = tuple(self.choice or ())
            object.__setattr__(self, "choice", choices)
            if not 1 <= len(choices) <= MAX_CHOICES or not all(isinstance(c, str) and c for c in choices):
                self._refuse(kind, f"must be 1..{MAX_CHOICES} strings, none empty")
        elif kind in ("regex", "grammar") and not isinstance(getattr(self, kind), str):
            self._refuse(kind, "must be a string")
        object.__setattr__(self, "_key", (kind, self._text(kind)))
        if len(self.key[1]) > MAX_GRAMMAR_CHARS:
            self._refuse(kind, f"has {len(self.key[1])} characters, at most {MAX_GRAMMAR_CHARS} are taken")

    @property
    def key(self) -> tuple[str, str]:
        """The kind, and the whole of it as text: equal for equal forms."""
        return self._key  # type: ignore[attr-defined, no-any-return]

    def _text(self, kind: str) -> str:
        if kind == "json_object":
            return '{"type": "object"}'
        if kind == "choice":
            return json_module.dumps(self.choice)
        if kind != "json":
            return str(getattr(self, kind))
        schema = self.json
        try:
            schema = json_module.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(schema, (Mapping, bool)):
                self._refuse(kind, f"must be a JSON schema, an object or a boolean, got {schema!r:.80}")
            return json_module.dumps(schema, allow_nan=False)  # order kept: properties come in the schema's
        except (TypeError, ValueError, RecursionError) as error:
            if isinstance(error, InvalidRequest):
                raise
            raise InvalidRequest(
                f"structured_outputs.json is not JSON: {error}", param="structured_outputs"
            ) from None

    @staticmethod
    def _refuse(kind: str, why: str) -> None:
        raise InvalidRequest(f"structured_outputs.{kind} {why}", param="structured_outputs")
