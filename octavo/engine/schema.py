"""Makes a JSON schema's formats exact before llguidance reads it.

llguidance refuses keywords and formats that it does not know, and enforces the rest; but four formats only
roughly: it takes 30 February, a 60th second at any hour, and over-long host names. They become patterns
here, each a subset of what RFC 3339 and RFC 1123 allow:

    {"type": "string", "format": "date"}  ->  {"type": "string", "allOf": [{"pattern": "^...$"}]}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COMMON_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = rf"(?:{_YEAR}-{_COMMON_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_LABEL = r"[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,15}"  # no two hyphens in a row: "xn--" is another alphabet
_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL}){{0,6}}$",
}
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_DATA = {"const", "enum", "default", "examples"}


def exact_formats(schema: Any) -> Any:
    """The schema with each format that llguidance enforces only roughly as a pattern. O(its size)."""
    if isinstance(schema, list):
        return [exact_formats(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _DATA:
            made[key] = value
        elif key in _NAMED and isinstance(value, Mapping):
            made[key] = {name: exact_formats(item) for name, item in value.items()}
        else:
            made[key] = exact_formats(value)
    pattern = _PATTERNS.get(schema["format"]) if isinstance(schema.get("format"), str) else None
    if pattern is not None:
        del made["format"]
        also = made.get("allOf", [])
        made["allOf"] = [*(also if isinstance(also, list) else [also]), {"pattern": pattern}]
    return made
