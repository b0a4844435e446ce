"""Where the slots of a pool go: tokens, room that will be used, room that will not, holes.

    pool      |############|======|......|      |xxxxxx|                  |
               used         reser- inter- free   exter- free
                            vation nal           nal
              |<----- reserved ---------->|

The parts are those of figure 2 in "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (Kwon et al., 2023): token states, reservation, internal and external fragmentation.
The same walk over block tables serves a paged Pool and a ContiguousPool; a shared block counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from octavo.kv.contiguous import ContiguousPool
from octavo.kv.contiguous_sequence import ContiguousSequence
from octavo.kv.pool import Pool
from octavo.kv.sequence import Sequence

AnyPool: TypeAlias = Pool | ContiguousPool
AnySequence: TypeAlias = Sequence | ContiguousSequence
FinalLengthOf: TypeAlias = Callable[[AnySequence], int]


class Waste(NamedTuple):
    """Token slots of a pool at one moment; used + reservation + internal + external + free is all of them.

    reserved: in blocks that somebody holds. used: of those, handed out to a token. reservation: will be,
    before the sequence ends (0 unless final lengths are known). internal: the rest of `reserved`.
    external: free, but in regions too small for the request at the head of the queue; 0 under paging.
    free: usable now, cached blocks included.
    """

    reserved: int
    used: int
    reservation: int
    internal: int
    external: int
    free: int

    @property
    def total(self) -> int:
        """Slots of the pool."""
        return self.reserved + self.external + self.free


class WasteShares(NamedTuple):
    """The parts of Waste as fractions of one whole."""

    used: float
    reservation: float
    internal: float
    external: float
    free: float


class WasteSummary(NamedTuple):
    """Means over the samples of a WasteLog.

    slots: the mean of each part, in slots. of_pool: of the whole pool. of_taken: the same without what
    is free, as in the paper's figure, where the pool is full.
    """

    samples: int
    slots: WasteShares
    of_pool: WasteShares
    of_taken: WasteShares


def measure(
    pool: AnyPool,
    sequences: Iterable[AnySequence],
    *,
    head: int = 0,
    final_len: FinalLengthOf | None = None,
) -> Waste:
    """Account for every slot of `pool`, whose open sequences are `sequences`. O(blocks held).

    head: tokens of the request at the head of the queue, 0 if none waits. final_len: the slots that a
    sequence will have filled when it ends, where that is known; without it, reserved room that holds no
    token counts as internal. Held blocks in no table (spare, or about to be copied from) are internal.
    """
    size, stats = pool.block_size, pool.stats()
    blocks, fills, finals = [], [], []
    for seq in sequences:
        table = seq.table
        starts = np.arange(len(table), dtype=np.int64) * size
        final = max(seq.length, final_len(seq)) if final_len is not None else seq.length
        blocks.append(table.astype(np.int64))
        fills.append(np.clip(seq.length - starts, 0, size))
        finals.append(np.clip(final - starts, 0, size))
    used, will_be = _most_per_block(blocks, fills), _most_per_block(blocks, finals)
    reserved = stats.held * size
    external = pool.unusable(head) if isinstance(pool, ContiguousPool) and head else 0
    return Waste(
        reserved=reserved,
        used=used,
        reservation=will_be - used,
        internal=reserved - will_be,
        external=external,
        free=stats.num_blocks * size - reserved - external,
    )


def _most_per_block(blocks: list[npt.NDArray[np.int64]], values: list[npt.NDArray[np.int64]]) -> int:
    """The sum over distinct blocks of the largest value that any table gives it."""
    ids = np.concatenate(blocks) if blocks else np.empty(0, np.int64)
    if not len(ids):
        return 0
    order = np.argsort(ids, kind="stable")
    ids, flat = ids[order], np.concatenate(values)[order]
    first = np.flatnonzero(np.r_[True, ids[1:] != ids[:-1]])
    return int(np.maximum.reduceat(flat, first).sum())


@dataclass
class WasteLog:
    """Samples of a pool's waste over the steps of a run. final_len: see measure()."""

    pool: AnyPool
    final_len: FinalLengthOf | None = None
    samples: list[tuple[int, Waste]] = field(default_factory=list)

    def sample(self, step: int, sequences: Iterable[AnySequence], head: int = 0) -> Waste:
        """Measure now and keep the result under `step`."""
        waste = measure(self.pool, sequences, head=head, final_len=self.final_len)
        self.samples.append((step, waste))
        return waste

    def summary(self) -> WasteSummary:
        """The means over all samples, each counting alike; all 0 where there is nothing to divide by."""
        rows = [(w.used, w.reservation, w.internal, w.external, w.free) for _, w in self.samples] or [
            (0, 0, 0, 0, 0)
        ]
        used, reservation, internal, external, free = np.mean(np.array(rows, np.float64), axis=0).tolist()
        slots = WasteShares(used, reservation, internal, external, free)
        return WasteSummary(
            samples=len(self.samples),
            slots=slots,
            of_pool=_shares(slots),
            of_taken=_shares(slots._replace(free=0.0)),
        )


def _shares(slots: WasteShares) -> WasteShares:
    whole = sum(slots) or 1.0
    return WasteShares(*(part / whole for part in slots))
