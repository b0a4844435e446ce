"""Tokenizer parts from a checkpoint directory.

tokenizer.json           vocabulary, splits, added tokens, what goes around a text
tokenizer_config.json    names of special tokens, add_bos_token / add_eos_token, chat_template
special_tokens_map.json  names of special tokens, in older checkpoints
chat_template.jinja      wins over the template in tokenizer_config.json
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from octavo.models.errors import TokenizerError
from octavo.models.tokenizer_parts import TokenizerParts, added_token, surround

_TEMPLATE_FILE = "chat_template.jinja"
_DIGITS = 12  # more than an id has: zero-filled keys sort like numbers


def parts_from_directory(directory: Path) -> TokenizerParts:
    """Read a directory's tokenizer. Raises TokenizerError when it is missing or malformed."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        other = directory / "tokenizer.model"
        hint = "; tokenizer.model alone is not read" if other.exists() else ""
        raise TokenizerError(f"{directory}: no tokenizer.json in this directory{hint}")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{path}: cannot be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    config = _json_object(directory / "tokenizer_config.json")
    named = _named_tokens({**_json_object(directory / "special_tokens_map.json"), **config})
    _add_missing_tokens(backend, config, named)
    # Like transformers 5: what tokenizer.json puts around a text wins over the flags.
    if backend.post_processor is None:
        surround(
            backend,
            bos=named.get("bos_token") if config.get("add_bos_token") else None,
            eos=named.get("eos_token") if config.get("add_eos_token") else None,
        )
    return TokenizerParts(backend, named, _chat_template(directory, config))


def _json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: not a JSON object")
    return value


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Collect bos_token and the like; each is a string or an object with a `content`."""
    named = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            value = value.get("content")
        if key.endswith("_token") and isinstance(value, str):
            named[key] = value
    return named


def _add_missing_tokens(backend: Backend, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Declare added tokens that only tokenizer_config.json knows, by id, and named ones as special."""
    listed = config.get("added_tokens_decoder")
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    if isinstance(listed, Mapping):
        for _, entry in sorted(listed.items(), key=lambda item: item[0].zfill(_DIGITS)):
            content = entry.get("content") if isinstance(entry, Mapping) else None
            if isinstance(content, str) and content not in known:
                token = added_token(content, special=bool(entry.get("special")))
                backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for content in named.values():
        # A name for a token that the vocabulary lacks gives no id: the model has no row for it.
        if content not in special and backend.token_to_id(content) is not None:
            backend.add_special_tokens([added_token(content, special=True)])


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / _TEMPLATE_FILE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{path}: cannot be read: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None
