"""Typed errors of octavo.engine.tiers. Bytes that are gone are `octavo.kv.store.BlockLost`."""

from __future__ import annotations

from octavo.engine.errors import EngineError


class StoreError(EngineError):
    """A store could not do what it was asked; where the system said why, `__cause__` is its error."""


class StoreClosed(StoreError):
    """The store was used after close()."""


class StoreFull(StoreError):
    """No room for the block on the disk or in memory. The slot is empty, the store stays usable."""


class StoreLocked(StoreError):
    """Another process, or another store in this one, has the file open."""


class StoreMismatch(StoreError):
    """The file holds KV that this store must not serve; the file was left as it was.

    `what` names the property, `found` is the file's value, `wanted` is this store's.
    """

    def __init__(self, message: str, *, what: str, found: str, wanted: str) -> None:
        super().__init__(message)
        self.what = what
        self.found = found
        self.wanted = wanted
