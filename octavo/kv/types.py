"""The plain values that octavo.kv takes and returns."""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from octavo.kv.errors import InvalidArgument

Tokens: TypeAlias = "Seq[int] | npt.NDArray[np.int32]"
TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Scope:
    """What besides tokens must match before KV is reused.

    Each field is compared with its own kind only, so an adapter named like a tenant's salt never
    meets that tenant's blocks.
    """

    model: str = ""
    adapter: str | None = None
    salt: str | None = None


DEFAULT_SCOPE = Scope()


class Fit(NamedTuple):
    """Whether a number of tokens could fit in an empty pool, in blocks. Truthy when it could."""

    ok: bool
    need: int
    have: int

    def __bool__(self) -> bool:
        return self.ok


class Hit(NamedTuple):
    """What open() would reuse: tokens in all, and how many of them lie in whole blocks."""

    num_tokens: int
    num_full_blocks: int


class Granted(NamedTuple):
    """reserve() succeeded and took this many new blocks."""

    num_blocks: int

    def __bool__(self) -> bool:
        return True


class NoRoom(NamedTuple):
    """reserve() was refused and changed nothing; this many more blocks would have been needed."""

    short_by: int

    def __bool__(self) -> bool:
        return False


class Copy(NamedTuple):
    """Copy the first `num_slots` slots of block `src` to block `dst`, in every layer, K and V."""

    src: int
    dst: int
    num_slots: int


class Tier(enum.IntEnum):
    """Where a block's bytes lie."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class Place(NamedTuple):
    """A slot of a tier: on the device, a physical block id."""

    tier: Tier
    slot: int


class Move(NamedTuple):
    """Bring the bytes of a block from one place to another. What `src` held may be overwritten after.

    record: which KV it is, where the destination outlives the process and the block can be found.
    """

    src: Place
    dst: Place
    record: Record | None = None


class Drop(NamedTuple):
    """The store of a lower tier may forget a slot."""

    place: Place


class Actions(NamedTuple):
    """What the executor does before the next forward pass: the transfers, in order, then the copies.

    No copy's `dst` is another copy's `src`.
    """

    copies: tuple[Copy, ...]
    transfers: tuple[Move | Drop, ...] = ()


class Record(NamedTuple):
    """Which KV a block holds, exactly: `tokens` (int32 bytes) after the block `parent`, under `scope`.

    uid: 16 bytes, unique to this block for ever. parent: the uid of the block before it, b"" at the
    start of a prompt. A block is found again after a restart only if all its ancestors are.
    """

    uid: bytes
    parent: bytes
    scope: Scope
    tokens: bytes


class Event(NamedTuple):
    """A change of what can be found, for routers outside: "stored" in a tier, or "removed" from it.

    block and parent are `Record` uids, parent b"" at the start of a prompt; tokens are empty in
    "removed". "cleared" says that nothing can be found any more.
    """

    kind: str
    tier: Tier = Tier.DEVICE
    block: bytes = b""
    parent: bytes = b""
    scope: Scope = DEFAULT_SCOPE
    tokens: bytes = b""


class TierStats(NamedTuple):
    """Slots of a lower tier by state: free + held + cached = slots. held: by suspended sequences."""

    slots: int
    free: int
    held: int
    cached: int


class PoolStats(NamedTuple):
    """Device blocks by state (free + held + cached = num_blocks), open sequences, lower tiers, and counts
    since the start.

    evictions: blocks that left the device. demotions: moves to a lower tier. promotions: blocks brought
    back. queried and hit tokens: asked of open(), and found.
    """

    num_blocks: int
    free: int
    held: int
    cached: int
    sequences: int
    evictions: int = 0
    copies: int = 0
    merges: int = 0
    host: TierStats = TierStats(0, 0, 0, 0)
    disk: TierStats = TierStats(0, 0, 0, 0)
    demotions: int = 0
    promotions: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0


def token_bytes(tokens: Tokens) -> bytes:
    """Token ids as native int32 bytes: the exact key that the prefix tree compares.

    Raises InvalidArgument for an id that is not an integer within int32. Cost: one pass.
    """
    if isinstance(tokens, np.ndarray):
        if tokens.dtype != np.int32 or tokens.ndim != 1:
            raise InvalidArgument(f"tokens must be one-dimensional int32, got {tokens.dtype} {tokens.shape}")
        return tokens.tobytes()
    try:
        return struct.pack(f"{len(tokens)}i", *tokens)  # half the time of array or numpy
    except (TypeError, struct.error) as error:
        raise InvalidArgument(f"token ids must be integers within int32: {error}") from None
