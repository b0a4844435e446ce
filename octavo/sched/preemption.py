"""Who has to give memory back, and how.

    unit         the branches of one request that run, together where they share blocks
    gain         device blocks that become available
    loss         what it costs to have them back, by the measured costs

    partial      the last blocks are given back, the branch keeps the rest and waits     lost: those tokens
    recompute    all blocks are given back; what stays in the prefix tree is found again lost: at most all
    swap         all blocks go to host slots of its own                                  cost: two moves each

Victims come from those that rank behind whoever needs the room, so the first in rank can always finish.
Among them the one that loses least and gains enough; of equals the last in rank.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Literal, NamedTuple, TypeAlias

from octavo.sched.config import PreemptionMode
from octavo.sched.costs import Costs
from octavo.sched.request import AnyPool, Branch

Mode: TypeAlias = Literal["partial", "recompute", "swap"]


class Unit(NamedTuple):
    """Branches that stop together. gain: blocks. moved: blocks to swap out. tokens: with KV, in all."""

    branches: tuple[Branch, ...]
    gain: int
    moved: int
    tokens: int


class Choice(NamedTuple):
    """A unit, how it is stopped, and what that costs."""

    unit: Unit
    mode: Mode
    loss: float


def unit_of(pool: AnyPool, branches: Seq[Branch]) -> Unit:
    """What stopping these running branches together comes to. O(blocks)."""
    kvs = [branch.kv for branch in branches if branch.kv is not None]
    moved = sum(pool.blocks_for(kv.committed) for kv in kvs)
    gain = pool.gain(kvs)  # type: ignore[arg-type]
    return Unit(tuple(branches), gain, moved, sum(kv.committed for kv in kvs))


def choose(units: Seq[Unit], need: int, pool: AnyPool, mode: PreemptionMode, costs: Costs) -> Choice | None:
    """The unit to stop for `need` blocks, from `units` in the order of rank, and how; None if no unit
    gains anything. If none gains enough, the one that gains most for its loss."""
    choices = [how_to_stop(unit, need, pool, mode, costs) for unit in units if unit.gain > 0]
    if not choices:
        return None
    choices.reverse()  # min() takes the first of equals: the last in rank
    enough = [choice for choice in choices if choice.unit.gain >= need]
    if enough:
        return min(enough, key=lambda choice: choice.loss)
    return min(choices, key=lambda choice: choice.loss / choice.unit.gain)


def how_to_stop(unit: Unit, need: int, pool: AnyPool, mode: PreemptionMode, costs: Costs) -> Choice:
    """The mode for one unit: as the option says, or the cheaper one; swap only where the host has room."""
    part = pool.gives_back_tail and len(unit.branches) == 1 and unit.gain > need
    lost = min(unit.tokens, need * pool.block_size) if part else unit.tokens
    again = costs.chunk(lost, unit.tokens - lost)
    swap = 2 * unit.moved * costs.block
    if mode != "recompute" and 0 < unit.moved <= pool.host_room and (mode == "swap" or swap < again):
        return Choice(unit, "swap", swap)
    return Choice(unit, "partial" if part else "recompute", again)


def give_back_tail(branch: Branch, blocks: int, block_size: int) -> bool:
    """Give back the last `blocks` blocks of a branch; whether it still has any KV.

    Who holds a block holds its ancestors, so the blocks that nobody else holds are the last ones.
    """
    assert branch.kv is not None
    kept = max(0, len(branch.kv.table) - blocks) * block_size
    branch.kv.truncate(min(kept, branch.kv.length))
    return branch.kv.length > 0
