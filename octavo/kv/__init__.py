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
from octavo.kv.eviction import LFU, LRU, EvictionPolicy, Expiring, Priority
from octavo.kv.groups import Group, GroupedPool, GroupedSequence
from octavo.kv.pool import Pool
from octavo.kv.sequence import Sequence
from octavo.kv.sizing import (
    KV_DTYPES,
    LIBRARIES,
    KVShape,
    automatic,
    blocks_in,
    parse_bytes,
    requests_that_fit,
    reserve_in,
)
from octavo.kv.store import BlockLost, Store
from octavo.kv.types import (
    DEFAULT_SCOPE,
    Actions,
    Copy,
    Drop,
    Event,
    Fit,
    Granted,
    Hit,
    Move,
    NoRoom,
    Place,
    PoolStats,
    Record,
    Scope,
    Tier,
    TierStats,
    Tokens,
)

__all__ = [
    "DEFAULT_SCOPE",
    "KV_DTYPES",
    "LFU",
    "LIBRARIES",
    "LRU",
    "Actions",
    "BlockLost",
    "Copy",
    "Drop",
    "Event",
    "EvictionPolicy",
    "Expiring",
    "Fit",
    "Granted",
    "Group",
    "GroupedPool",
    "GroupedSequence",
    "Hit",
    "InvalidArgument",
    "InvariantViolated",
    "KVError",
    "KVShape",
    "Move",
    "NoRoom",
    "NotReserved",
    "Place",
    "Pool",
    "PoolStats",
    "Priority",
    "ProtocolError",
    "Record",
    "Scope",
    "Sequence",
    "SequenceClosed",
    "Store",
    "Tier",
    "TierStats",
    "Tokens",
    "automatic",
    "blocks_in",
    "parse_bytes",
    "requests_that_fit",
    "reserve_in",
]
