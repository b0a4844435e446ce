"""Typed errors of octavo.kv. All derive from `KVError`; running out of room is not an error but a value."""

from __future__ import annotations

from octavo.errors import OctavoError


class KVError(OctavoError):
    """Any error of the KV-cache manager."""


class InvalidArgument(KVError, ValueError):
    """An argument outside its range; nothing was changed."""


class SequenceClosed(KVError):
    """A closed sequence was used again (a double free, for one)."""


class NotReserved(KVError):
    """extend() was asked for more slots than reserve() granted."""


class ProtocolError(KVError):
    """Calls in an order that would publish or copy KV that nobody computed."""


class InvariantViolated(KVError):
    """check() found the structure broken; `number` is the invariant's number in docs/kv.md."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"invariant {number}: {message}")
        self.number = number
