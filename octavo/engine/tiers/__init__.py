"""The tiers below the device: what keeps the bytes of KV blocks in host memory and on disk.

    BlockBytes      a device block, all layers  <->  one flat buffer
    HostStore       flat buffers by slot, in memory
    DiskStore       flat buffers by slot, in a file that outlives the process
    fingerprint     whose KV the file holds

The stores keep octavo.kv.store.Store; which block goes where is the pool's decision.
"""

from octavo.engine.tiers.blocks import BlockBytes, block_bytes, layout, read_block, write_block
from octavo.engine.tiers.disk import DiskStore
from octavo.engine.tiers.errors import StoreClosed, StoreError, StoreFull, StoreLocked, StoreMismatch
from octavo.engine.tiers.host import HostStore
from octavo.engine.tiers.identity import fingerprint

__all__ = [
    "BlockBytes",
    "DiskStore",
    "HostStore",
    "StoreClosed",
    "StoreError",
    "StoreFull",
    "StoreLocked",
    "StoreMismatch",
    "block_bytes",
    "fingerprint",
    "layout",
    "read_block",
    "write_block",
]
