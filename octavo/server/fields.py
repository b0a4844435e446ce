"""Fields of the OpenAI API that this server refuses by name, and the values of them that ask for nothing.

A client library often sends a field with its default value. Such a value is accepted, as honouring it
means doing nothing; every other value is refused, and so is every field that nobody knows. Nothing is
ignored in silence. `null` always means "not given".
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from octavo.errors import InvalidRequest

MAX_NAMES = 5
MAX_NAME_CHARS = 64

Refusals = Mapping[str, tuple[Any, ...]]
"""Field name -> the values, besides null, that are accepted because they change nothing."""

_BOTH: dict[str, tuple[Any, ...]] = {
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
}
COMPLETION_REFUSALS: Refusals = {**_BOTH, "suffix": ("",)}
CHAT_REFUSALS: Refusals = {
    **_BOTH,
    "add_special_tokens": (False,),
    "audio": (),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
    "reasoning_effort": ("none",),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
STREAM_OPTION_REFUSALS: Refusals = {"include_obfuscation": (False,)}


def screen(
    data: Mapping[str, Any], honoured: Collection[str], refusals: Refusals, prefix: str = ""
) -> dict[str, Any]:
    """The given fields that are honoured, with nulls left out.

    `prefix` names the enclosing field in messages ("stream_options."). Raises InvalidRequest with the
    field's name for a field that is unknown, or not supported and not at a value that changes nothing.
    """
    unknown = [name for name in data if name not in honoured and name not in refusals]
    if unknown:
        named = ", ".join(repr(prefix + name[:MAX_NAME_CHARS]) for name in unknown[:MAX_NAMES])
        more = f" and {len(unknown) - MAX_NAMES} more" if len(unknown) > MAX_NAMES else ""
        raise InvalidRequest(
            f"unknown field {named}{more}: this server refuses what it does not understand",
            param=(prefix + unknown[0])[:MAX_NAME_CHARS],
        )
    for name, accepted in refusals.items():
        value = data.get(name)
        if value is not None and not any(_same(value, one) for one in accepted):
            raise InvalidRequest(_refusal(prefix + name, accepted), param=prefix + name)
    return {name: value for name, value in data.items() if name in honoured and value is not None}


def _refusal(name: str, accepted: tuple[Any, ...]) -> str:
    if not accepted:
        return f"{name} is not supported by this server; leave it out"
    return f"{name} is not supported by this server; leave it out or set it to {json.dumps(accepted[0])}"


def _same(value: Any, other: Any) -> bool:
    # Without the first test 0 would pass for false, and true for 1.
    return type(value) is type(other) and value == other
