"""Carries out a pool's transfers between the device's caches and the stores of the lower tiers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from octavo.attention.interface import LayerCache
from octavo.engine.tiers.blocks import BlockBytes
from octavo.engine.tiers.errors import StoreError
from octavo.kv import BlockLost, Drop, Move, Place, Store, Tier

log = logging.getLogger(__name__)


class Mover:
    """The stores of an engine, and a buffer of one block between them.

    A transfer that fails is not an error of the step: its destination is reported, and what should
    have come there must be computed again.
    """

    def __init__(self, caches: Sequence[LayerCache], stores: Mapping[Tier, Store]) -> None:
        self.stores = dict(stores)
        self._device = BlockBytes(caches)
        self._buffer = np.empty(self._device.num_bytes, np.uint8)
        self.bytes_moved = 0
        self.failures = 0

    def apply(self, transfers: Sequence[Move | Drop]) -> list[Place]:
        """Carry out `transfers` in order; returns the places that hold no right bytes now."""
        bad: dict[Place, None] = {}
        for transfer in transfers:
            if isinstance(transfer, Drop):
                self.stores[transfer.place.tier].drop(transfer.place.slot)
                bad.pop(transfer.place, None)
                continue
            if transfer.src in bad:
                bad[transfer.dst] = None
                continue
            try:
                self._move(transfer)
            except BlockLost as error:
                # The source too: what stays findable there would be asked for, and fail, again and again.
                bad[transfer.src] = bad[transfer.dst] = None
                self._failed(error)
            except StoreError as error:
                bad[transfer.dst] = None
                self._failed(error)
            else:
                bad.pop(transfer.dst, None)
        return list(bad)

    def close(self) -> None:
        """Close every store."""
        for store in self.stores.values():
            store.close()

    def _move(self, move: Move) -> None:
        if move.src.tier is Tier.DEVICE:
            self._device.read(move.src.slot, self._buffer)
        else:
            self.stores[move.src.tier].get(move.src.slot, self._buffer)
        if move.dst.tier is Tier.DEVICE:
            self._device.write(move.dst.slot, self._buffer)
        else:
            self.stores[move.dst.tier].put(move.dst.slot, move.record, self._buffer)
        self.bytes_moved += self._device.num_bytes

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        if self.failures == 1:
            log.warning("a KV block could not be moved and will be computed again: %s", error)
