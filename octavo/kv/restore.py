"""A disk tier across restarts: what goes there before a shutdown, and how it is found again."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.kv.blocks import Blocks
from octavo.kv.errors import InvalidArgument, ProtocolError
from octavo.kv.types import TOKEN_BYTES, Record, Tier


def persist(blocks: Blocks) -> None:
    """Move every cached block of device and host to disk, those used longest ago first, so that when
    the disk is too small it is the oldest that are pushed out."""
    if not blocks.sizes[Tier.DISK]:
        return
    for tier in (Tier.HOST, Tier.DEVICE):
        for block in list(blocks.policies[tier]):
            if blocks.tree.key[block] is None or blocks.refs[block] or not blocks.room(Tier.DISK):
                continue  # pushed out along with an ancestor, or no room at all
            slot = blocks.take_slot(Tier.DISK)
            if blocks.tree.key[block] is None:
                blocks.free[Tier.DISK].append(slot)
                continue
            blocks.policies[tier].remove(block)
            blocks.demotions += 1
            blocks.relocate(block, slot)
            blocks.cache(slot)
            blocks.free[tier].append(block)


def restore(blocks: Blocks, records: Iterable[tuple[int, Record]], key_bytes: int) -> list[int]:
    """Publish the records of a disk tier, parents first; returns the slots that lead nowhere.

    Raises ProtocolError unless nothing is published yet, InvalidArgument for a slot outside the tier.
    """
    if blocks.tree.roots():
        raise ProtocolError("restore() into a pool that is in use")
    tree, base, size = blocks.tree, blocks.bases[Tier.DISK], blocks.sizes[Tier.DISK]
    by_parent: dict[bytes, list[tuple[int, Record]]] = {}
    for slot, record in records:
        if not 0 <= slot < size:
            raise InvalidArgument(f"slot {slot} of a disk tier with {size} slots")
        by_parent.setdefault(record.parent, []).append((slot, record))
    left = {slot for entries in by_parent.values() for slot, _ in entries}
    taken: list[int] = []
    todo = [(record, slot, -1) for slot, record in by_parent.pop(b"", [])]
    while todo:
        record, slot, parent = todo.pop()
        tokens = record.tokens
        if not tokens or len(tokens) > key_bytes or len(tokens) % TOKEN_BYTES:
            continue
        node = parent if parent >= 0 else tree.enter(record.scope)
        block = tree.find(node, tokens)
        if (parent < 0 or tree.scope(parent) == record.scope) and not tree.covers(node, tokens):
            block = base + slot
            tree.publish(block, node, tokens, int.from_bytes(record.uid, "little"))
            blocks.announce("stored", block)
            taken.append(block)
            left.discard(slot)
        if block >= 0 and len(tokens) == key_bytes:  # what follows an equal twin follows this one as well
            todo += [(child, at, block) for at, child in by_parent.pop(record.uid, [])]
        if parent < 0:
            tree.leave(node)
    held = set(taken)
    blocks.free[Tier.DISK][:] = [block for block in blocks.free[Tier.DISK] if block not in held]
    for block in reversed(taken):  # children come after their parents: the deepest are the oldest
        blocks.uses[block] = 1
        blocks.cache(block)
    return sorted(left)
