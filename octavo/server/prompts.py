"""The `prompt` of a completions call, in its four forms.

    "text"            ["text", ...]            one prompt, or a batch
    [1, 2, 3]         [[1, 2, 3], ...]         the same as token ids

Checked by hand, because it may hold millions of items: the first fault is reported, and only that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.errors import InvalidRequest

Prompt = str | list[int]


def read_prompts(value: Any, vocab_size: int) -> list[Prompt]:
    """The prompts of one call, in order. Raises InvalidRequest for anything else than the four forms."""
    if value is None:
        raise InvalidRequest("prompt is required: a string, token ids, or a list of either", param="prompt")
    if isinstance(value, str):
        return [_text(value, "prompt")]
    if not isinstance(value, list):
        raise InvalidRequest("prompt must be a string, token ids, or a list of either", param="prompt")
    if not value:
        raise InvalidRequest("prompt is an empty list; it needs at least one token or text", param="prompt")
    first = value[0]
    if isinstance(first, str):
        return [_text(item, f"prompt[{i}]") for i, item in enumerate(value)]
    if isinstance(first, list):
        return [_ids(item, vocab_size, f"prompt[{i}]") for i, item in enumerate(value)]
    return [_ids(value, vocab_size, "prompt")]


def check_token_ids(ids: Sequence[Any], vocab_size: int, name: str, param: str) -> None:
    """Raise InvalidRequest unless every item is a whole number in 0..vocab_size-1."""
    if set(map(type, ids)) <= {int} and (not ids or (min(ids) >= 0 and max(ids) < vocab_size)):
        return
    for i, item in enumerate(ids):  # what is the first that is wrong?
        if type(item) is not int:  # bool is a subclass of int, and true is no token
            raise InvalidRequest(
                f"{name}[{i}] must be a token id, not {_kind(item)}; a list is all text or all ids",
                param=param,
            )
        if not 0 <= item < vocab_size:
            raise InvalidRequest(
                f"{name}[{i}] is {str(item)[:24]}, outside the model's token ids 0..{vocab_size - 1}",
                param=param,
            )


def _text(item: Any, name: str) -> str:
    if not isinstance(item, str):
        raise InvalidRequest(
            f"{name} must be a string, not {_kind(item)}; a list is all text or all ids", param="prompt"
        )
    if not item:
        raise InvalidRequest(f"{name} is empty; it needs at least one character", param="prompt")
    return item


def _ids(item: Any, vocab_size: int, name: str) -> list[int]:
    if not isinstance(item, list):
        raise InvalidRequest(f"{name} must be a list of token ids, not {_kind(item)}", param="prompt")
    if not item:
        raise InvalidRequest(f"{name} is empty; it needs at least one token", param="prompt")
    check_token_ids(item, vocab_size, name, "prompt")
    return item


_KINDS = {
    str: "a string",
    bool: "true or false",
    int: "a whole number",
    float: "a fraction",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), type(value).__name__)
