"""Every error that attention/ raises on purpose."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.errors import InvalidRequest, OctavoError


class BatchError(OctavoError, ValueError):
    """A batch, or a copy between blocks, points where it must not; nothing was read or written.

    `row` is the sequence's row in the batch and `position` the token position in that sequence (or
    the place in the named array), where there is one.
    """

    def __init__(self, message: str, *, row: int | None = None, position: int | None = None) -> None:
        super().__init__(message)
        self.row = row
        self.position = position


class UnknownBackend(InvalidRequest):
    """No attention backend has this name; the message lists those that exist."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(
            f"unknown attention backend {name!r}; choose one of: {', '.join(known)}", param="backend"
        )
        self.name = name
        self.known = tuple(known)


class BackendUnavailable(OctavoError, RuntimeError):
    """An attention backend exists by this name, but not on this machine or in this installation."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"attention backend {name!r} is not available: {reason}")
        self.name = name
        self.reason = reason
