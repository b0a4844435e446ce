"""Layers of different kinds, each kind with blocks and tables of its own.

    full     layers 0, 2, 4 ..   window None    [ 4 ][ 7 ][ 1 ][ 9 ]
    window   layers 1, 3, 5 ..   window 32      [ -1 ][ -1 ][ 3 ][ 0 ]    blocks behind the window go back

A group sequence is one sequence per group, kept at one length. What a prompt can reuse is what every
group still has of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.kv.errors import InvalidArgument
from octavo.kv.pool import Pool
from octavo.kv.sequence import Sequence
from octavo.kv.types import DEFAULT_SCOPE, Actions, Fit, Granted, Hit, NoRoom, Scope, Tokens


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share block tables: how many blocks they have, and their attention window in tokens
    (None: all of the context)."""

    num_blocks: int
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise InvalidArgument(f"window must be at least 1 or None, got {self.window}")


class GroupedPool:
    """One Pool per group, by name, with one block size. Raises InvalidArgument as Pool does."""

    def __init__(self, groups: Mapping[str, Group], block_size: int, *, prefix_caching: bool = True) -> None:
        if not groups:
            raise InvalidArgument("a grouped pool needs at least one group")
        self.groups = dict(groups)
        self.block_size = block_size
        self.pools = {
            name: Pool(group.num_blocks, block_size, prefix_caching=prefix_caching)
            for name, group in groups.items()
        }

    def can_ever_fit(self, num_tokens: int) -> Fit:
        """Whether every group could hold such a sequence alone, computed a block at a time; need and
        have are those of the group that is shortest of room. A window needs no more than itself, the
        block that is written, and the one before it."""
        fits = []
        for name, group in self.groups.items():
            need = self.pools[name].blocks_for(num_tokens)
            if group.window is not None:
                need = min(need, self.pools[name].blocks_for(group.window) + 2)
            fits.append(Fit(need <= group.num_blocks, need, group.num_blocks))
        return min(fits, key=lambda fit: fit.have - fit.need)

    def probe(self, tokens: Tokens, scope: Scope = DEFAULT_SCOPE) -> Hit:
        """What open() would reuse: the least that any group has. Changes nothing."""
        return min(
            (pool.probe(tokens, scope) for pool in self.pools.values()), key=lambda hit: hit.num_tokens
        )

    def open(self, tokens: Tokens, scope: Scope = DEFAULT_SCOPE) -> GroupedSequence:
        """A sequence in every group, each holding the same cached prefix. O(tokens x groups)."""
        parts = {name: pool.open(tokens, scope) for name, pool in self.pools.items()}
        shared = min(part.num_cached for part in parts.values())
        for part in parts.values():
            part.truncate(shared)
        return GroupedSequence(self, parts)

    def drain(self) -> dict[str, Actions]:
        """Per group, what to carry out before the next forward pass."""
        return {name: pool.drain() for name, pool in self.pools.items()}

    def check(self) -> None:
        """Every pool's check(). Raises InvariantViolated."""
        for pool in self.pools.values():
            pool.check()


class GroupedSequence:
    """The same tokens in every group; `parts` are the sequences by group name. As Sequence otherwise."""

    def __init__(self, pool: GroupedPool, parts: dict[str, Sequence]) -> None:
        self._pool = pool
        self.parts = parts

    @property
    def num_cached(self) -> int:
        """Tokens that every group had at open."""
        return min(part.num_cached for part in self.parts.values())

    @property
    def length(self) -> int:
        """Token slots handed out, the same in every group."""
        return next(iter(self.parts.values())).length

    def reserve(self, n: int) -> Granted | NoRoom:
        """Room for `n` tokens in every group, or NoRoom (of the group that is short of most) and no trace.

        A windowed group with less room than a whole prompt takes it in chunks, giving back between.
        """
        short = max(part.shortage(n) for part in self.parts.values())
        if short:
            return NoRoom(short)
        results = [part.reserve(n) for part in self.parts.values()]
        return Granted(sum(result.num_blocks for result in results if isinstance(result, Granted)))

    def extend(self, n: int) -> dict[str, npt.NDArray[np.int64]]:
        """Per group, the slots of the next `n` tokens."""
        return {name: part.extend(n) for name, part in self.parts.items()}

    def commit(self, tokens: Tokens) -> None:
        """Publish in every group, then give back what has left the windows."""
        for name, part in self.parts.items():
            part.commit(tokens)
            window = self._pool.groups[name].window
            if window is not None:
                # The next query sits at `committed` and sees window - 1 keys before itself.
                part.forget(max(0, part.committed - window + 1))

    def fork(self) -> GroupedSequence:
        """References only, in every group."""
        return GroupedSequence(self._pool, {name: part.fork() for name, part in self.parts.items()})

    def close(self) -> None:
        """Give every block back in every group."""
        for part in self.parts.values():
            part.close()
