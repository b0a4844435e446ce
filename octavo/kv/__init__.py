"""Virtual memory for the KV cache: a pool of blocks, block tables, a prefix tree, copy-on-write.

Needs the standard library and numpy, and never touches a tensor: it decides and returns data, and
whoever owns the memory executes. Start with `Pool`; docs/kv.md has the drawing and the costs.
"""

from octavo.kv.errors import (
    InvalidArgument,
    InvariantViolated,
    KVError,
    NotReserved,
    ProtocolError,
    SequenceClosed,
)
from octavo.kv.eviction import LRU, EvictionPolicy
from octavo.kv.pool import Pool
from octavo.kv.sequence import Sequence
from octavo.kv.sizing import KVShape, blocks_in, parse_bytes
from octavo.kv.types import (
    DEFAULT_SCOPE,
    Actions,
    Copy,
    Fit,
    Granted,
    Hit,
    NoRoom,
    PoolStats,
    Scope,
    Tokens,
)

__all__ = [
    "DEFAULT_SCOPE",
    "LRU",
    "Actions",
    "Copy",
    "EvictionPolicy",
    "Fit",
    "Granted",
    "Hit",
    "InvalidArgument",
    "InvariantViolated",
    "KVError",
    "KVShape",
    "NoRoom",
    "NotReserved",
    "Pool",
    "PoolStats",
    "ProtocolError",
    "Scope",
    "Sequence",
    "SequenceClosed",
    "Tokens",
    "blocks_in",
    "parse_bytes",
]
