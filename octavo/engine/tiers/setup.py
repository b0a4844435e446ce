"""Opens the tiers that the options ask for, and finds again what the disk holds from before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from octavo.attention.interface import LayerCache
from octavo.engine.config import EngineConfig
from octavo.engine.tiers.blocks import block_bytes, layout
from octavo.engine.tiers.disk import DiskStore
from octavo.engine.tiers.host import HostStore
from octavo.engine.tiers.identity import fingerprint
from octavo.engine.tiers.mover import Mover
from octavo.kv import Pool, Store, Tier
from octavo.models import LoadedModel


def open_tiers(
    config: EngineConfig, model: LoadedModel, caches: Sequence[LayerCache], pool: Pool
) -> Mover | None:
    """The mover between `caches` and the tiers below them, or None without tiers.

    What the disk holds from before becomes findable in `pool`. Raises StoreError: another process has
    the file, or it is another model's.
    """
    stats = pool.stats()
    stores: dict[Tier, Store] = {}
    if stats.host.slots:
        stores[Tier.HOST] = HostStore(stats.host.slots, block_bytes(caches))
    if config.disk_cache is not None and stats.disk.slots:
        identity = fingerprint(
            model.path,
            model.config,
            dtype=model.decoder.dtype,
            block_size=caches[0].block_size,
            kv_dtype=caches[0].key.dtype,
            layout=layout(caches),
            weights=model.decoder.weights_note,
        )
        path = Path(config.disk_cache)
        disk = DiskStore(path, stats.disk.slots, block_bytes(caches), identity)
        stores[Tier.DISK] = disk
        for slot in pool.restore(disk.recover()):
            disk.drop(slot)
    return Mover(caches, stores) if stores else None
