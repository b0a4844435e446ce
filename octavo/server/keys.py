"""API keys: who may ask, under which name, and how much at once.

    keys.toml                              one table a key
        [[key]]
        name = "team-a"                    in logs and metrics; the key itself is never shown
        key = "..."                        or key_sha256 = "64 hex digits", so that the file holds no secret
        weight = 2.0                       share against other keys when the machine is busy (1.0)
        salt = "..."                       requests of equal salt share cached prompts (the key's name)
        max_concurrent = 8                 requests at once, more get a 429 (no limit)
        max_tokens = 4096                  most tokens a sequence may be asked to generate (no limit)

Only digests are kept. A given key is compared with every digest in constant time, so that neither the
place of a key nor how much of it was right can be told from the time an answer takes.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import InvalidRequest

_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}\Z")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}\Z")
_FIELDS = ("name", "key", "key_sha256", "weight", "salt", "max_concurrent", "max_tokens")
_MAX_LIMIT = 2**31 - 1


class KeyFileError(InvalidRequest):
    """The file of keys cannot be used; the message says which key and field."""


@dataclass(frozen=True)
class ApiKey:
    """One key by its digest, with what its holder may do. `salt` None shares no cached prompt."""

    name: str
    digest: bytes
    weight: float = 1.0
    salt: str | None = None
    max_concurrent: int | None = None
    max_tokens: int | None = None

    @classmethod
    def from_secret(cls, secret: str, name: str = "default", **limits: Any) -> ApiKey:
        """A key given in clear. Raises KeyFileError for one that nobody could send."""
        if not secret or secret != secret.strip():
            raise KeyFileError(f"key {name!r} must not be empty or have space around it")
        return cls(name, _digest(secret.encode()), **limits)


class Keyring:
    """All keys of a server."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = tuple(keys)

    def find(self, secret: bytes) -> ApiKey | None:
        """The key that was sent, or None. The time taken depends on the number of keys alone."""
        digest, found = _digest(secret), None
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a file. Raises KeyFileError when it cannot be read, or says nothing that makes sense."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:  # of TOML, and of UTF-8
        raise KeyFileError(f"{path}: not TOML: {error}") from None
    tables = data.pop("key", None)
    if data:
        raise KeyFileError(f"{path}: unknown {next(iter(data))!r}; the file has [[key]] tables only")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise KeyFileError(f"{path}: no [[key]] table")
    keys = tuple(_read_key(table, f"{path}: key {number}") for number, table in enumerate(tables, 1))
    for what in ("name", "digest"):
        seen = [getattr(key, what) for key in keys]
        if len(set(seen)) < len(seen):
            raise KeyFileError(f"{path}: two keys have the same {'name' if what == 'name' else 'secret'}")
    return keys


def _read_key(table: Mapping[str, Any], where: str) -> ApiKey:
    for field in table:
        if field not in _FIELDS:
            raise KeyFileError(f"{where}: unknown field {field!r}; known are {', '.join(_FIELDS)}")
    name = table.get("name")
    if not isinstance(name, str) or not _NAME.match(name):
        raise KeyFileError(f"{where}: name must be 1 to 64 letters, digits or any of _.@-")
    salt = table.get("salt", name)
    if not isinstance(salt, str) or not salt:
        raise KeyFileError(f"{where}: salt must be a string that is not empty")
    limits = {field: _limit(table, field, where) for field in ("max_concurrent", "max_tokens")}
    return ApiKey(name, _secret(table, where), _weight(table, where), salt, **limits)


def _secret(table: Mapping[str, Any], where: str) -> bytes:
    secret, digest = table.get("key"), table.get("key_sha256")
    if (secret is None) == (digest is None):
        raise KeyFileError(f"{where}: give key or key_sha256, one of them")
    if digest is not None:
        if not isinstance(digest, str) or not _DIGEST.match(digest):
            raise KeyFileError(f"{where}: key_sha256 must be 64 hex digits")
        return bytes.fromhex(digest)
    if not isinstance(secret, str) or not secret or secret != secret.strip():
        raise KeyFileError(f"{where}: key must be a string, not empty and without space around it")
    return _digest(secret.encode())


def _weight(table: Mapping[str, Any], where: str) -> float:
    weight = table.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise KeyFileError(f"{where}: weight must be a number")
    if not math.isfinite(weight) or weight <= 0:
        raise KeyFileError(f"{where}: weight must be above 0, not {weight}")
    return float(weight)


def _limit(table: Mapping[str, Any], field: str, where: str) -> int | None:
    value = table.get(field)
    if value is None:
        return None
    if type(value) is not int or not 1 <= value <= _MAX_LIMIT:
        raise KeyFileError(f"{where}: {field} must be a whole number from 1 to {_MAX_LIMIT}")
    return value


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
