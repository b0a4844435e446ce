"""The plain values that octavo.kv takes and returns."""

from __future__ import annotations

from array import array
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


class Actions(NamedTuple):
    """What the executor does before the next forward pass. No `dst` here is another copy's `src`."""

    copies: tuple[Copy, ...]


class PoolStats(NamedTuple):
    """Blocks by state (free + held + cached = num_blocks), open sequences, and counts since the start."""

    num_blocks: int
    free: int
    held: int
    cached: int
    sequences: int
    evictions: int
    copies: int
    merges: int


def token_bytes(tokens: Tokens) -> bytes:
    """Token ids as native int32 bytes: the exact key that the prefix tree compares.

    Raises InvalidArgument for an id that is not an integer within int32. Cost: one pass.
    """
    if isinstance(tokens, np.ndarray):
        if tokens.dtype != np.int32 or tokens.ndim != 1:
            raise InvalidArgument(f"tokens must be one-dimensional int32, got {tokens.dtype} {tokens.shape}")
        return tokens.tobytes()
    try:
        return array("i", tokens).tobytes()
    except (TypeError, OverflowError) as error:
        raise InvalidArgument(f"token ids must be integers within int32: {error}") from None
