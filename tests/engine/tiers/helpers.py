"""Blocks whose bytes follow from their uid, so that whoever finds one can tell whether it is right."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from octavo.engine.tiers import DiskStore
from octavo.kv.store import BlockLost, Bytes, Record, Store
from octavo.kv.types import DEFAULT_SCOPE, Scope

BLOCK_BYTES = 5000  # no whole number of pages
FINGERPRINT = "0123abcd"


def uid(number: int) -> bytes:
    """The uid of block `number`."""
    return struct.pack("<QQ", number, 0x0C7A_0B10)


def record(number: int, scope: Scope = DEFAULT_SCOPE, num_tokens: int = 16) -> Record:
    """A record for block `number`, whose parent is the block before it."""
    tokens = np.arange(number, number + num_tokens, dtype=np.int32).tobytes()
    return Record(uid(number), uid(number - 1) if number else b"", scope, tokens)


def content(block: bytes, num_bytes: int = BLOCK_BYTES) -> Bytes:
    """The bytes of the block with this uid."""
    number = int.from_bytes(block, "little")
    return np.frombuffer(np.random.Generator(np.random.SFC64(number)).bytes(num_bytes), np.uint8)


def put(store: Store, slot: int, number: int, num_bytes: int = BLOCK_BYTES) -> None:
    """Put block `number` with its record."""
    store.put(slot, record(number), content(uid(number), num_bytes))


def get(store: Store, slot: int, num_bytes: int = BLOCK_BYTES) -> Bytes | None:
    """What get() serves, None where it says that the block is lost."""
    out = np.full(num_bytes, 0xEE, np.uint8)
    try:
        store.get(slot, out)
    except BlockLost:
        return None
    return out


def served(store: Store, num_bytes: int = BLOCK_BYTES) -> dict[int, bytes]:
    """Slot -> uid of every recovered block that get() serves; asserts that its bytes are right."""
    found = {}
    for slot, entry in list(store.recover()):
        data = get(store, slot, num_bytes)
        if data is not None:
            assert np.array_equal(data, content(entry.uid, num_bytes)), f"slot {slot} serves wrong bytes"
            found[slot] = entry.uid
    return found


def open_disk(path: Path, num_slots: int = 8, block_bytes: int = BLOCK_BYTES, **options: Any) -> DiskStore:
    """A DiskStore with the tests' sizes and fingerprint."""
    fingerprint = options.pop("fingerprint", FINGERPRINT)
    return DiskStore(path, num_slots, block_bytes, fingerprint, **options)
