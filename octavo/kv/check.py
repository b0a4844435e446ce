"""Walks the numbered invariants of docs/kv.md over a pool. One pass over blocks and tables."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from octavo.kv.errors import InvariantViolated
from octavo.kv.eviction import LRU
from octavo.kv.types import TOKEN_BYTES, Tier

if TYPE_CHECKING:
    from octavo.kv.pool import Pool


def _require(ok: bool, number: int, message: str) -> None:
    if not ok:
        raise InvariantViolated(number, message)


def check_pool(pool: Pool) -> None:
    """Raise InvariantViolated, with its number, at the first invariant that does not hold."""
    for tier in Tier:
        _check_states(pool, tier)
    _check_counts(pool)
    _check_tree(pool)
    _check_tables(pool)
    _check_sequences(pool)
    _check_copies(pool)


def _check_states(pool: Pool, tier: Tier) -> None:
    """1: every block of a tier is exactly one of free, held, cached."""
    blocks = pool._blocks
    free, cached = set(blocks.free[tier]), set(blocks.policies[tier])
    _require(len(free) == len(blocks.free[tier]), 1, "a block is on the free list twice")
    base, size = blocks.bases[tier], blocks.sizes[tier]
    for block in range(base, base + size):
        refs, published = blocks.refs[block], blocks.tree.key[block] is not None
        if block in free:
            _require(
                refs == 0 and not published, 1, f"free block {block}: count {refs}, published {published}"
            )
            _require(block not in cached, 1, f"block {block} is free and cached")
        elif refs == 0:
            _require(published and block in cached, 1, f"block {block}: no holder, neither free nor cached")
        else:
            _require(refs > 0 and block not in cached, 1, f"held block {block}: count {refs}, cached")
    stats = blocks.tier_stats(tier)
    held = sum(refs > 0 for refs in blocks.refs[base : base + size])
    _require(
        stats.free + held + stats.cached == size == len(free | cached) + held,
        1,
        f"{tier!r}: {stats}, {held} counted",
    )


def _check_counts(pool: Pool) -> None:
    """2: a block's count is its table entries, spare holds, parked holds and copies to be made from it."""
    blocks = pool._blocks
    holders: Counter[int] = Counter()
    for seq in pool._open.values():
        holders.update(block for block in seq.table.tolist() if block >= 0)
        holders.update(entry.block for entry in seq._parked if entry.block >= 0)
        if seq._spare >= 0:
            holders[seq._spare] += 1
    holders.update(copy.src for copy in blocks.copies.values())
    for block, refs in enumerate(blocks.refs):
        _require(refs == holders[block], 2, f"block {block}: count {refs}, but {holders[block]} holders")


def _check_tree(pool: Pool) -> None:
    """3: who has a block in its table has its ancestors, so without lower tiers the next to evict is a leaf;
    not where forget() was used.
    4: links, keys and order agree; only full blocks have children; no empty scope is kept."""
    tree, blocks = pool._tree, pool._blocks
    roots = set(tree.roots().values())
    windowed = pool._windowed
    in_tables = {block for seq in pool._open.values() for block in seq.table.tolist()}
    for block, key in enumerate(tree.key):
        if key is None:
            _require(not tree.has_children(block), 4, f"unpublished block {block} has children")
            continue
        _require(
            0 < len(key) <= pool._key_bytes and len(key) % TOKEN_BYTES == 0, 4, f"block {block}: key length"
        )
        if tree.has_children(block):
            _require(len(key) == pool._key_bytes, 4, f"block {block} has children but is not full")
        parent = tree.parent(block)
        _require(tree.find(parent, key) == block, 4, f"block {block} is not among its parent's children")
        if parent < 0:
            _require(parent in roots, 4, f"block {block} hangs from unknown root {parent}")
        else:
            _require(tree.key[parent] is not None, 4, f"block {block} hangs from unpublished {parent}")
            orphan = block in in_tables and not blocks.refs[parent]
            _require(windowed or not orphan, 3, f"block {block} held, parent {parent} not")
    tree.check()
    policy = blocks.policies[Tier.DEVICE]
    if len(policy) and isinstance(policy, LRU) and not windowed and not blocks.has_lower:
        below = [child for child in tree.children(policy.victim()) if child < pool.num_blocks]
        _require(not below, 3, f"eviction would take block {policy.victim()} before {below}")
    users = Counter(seq._root for seq in pool._open.values())
    for root in roots:
        _require(
            tree.users(root) == users[root], 4, f"root {root}: {tree.users(root)} users, {users[root]} open"
        )
        _require(users[root] > 0 or tree.has_children(root), 4, f"root {root} is empty and unused")


def _check_tables(pool: Pool) -> None:
    """5: rows hold ids of the pool, no block twice, then -1; no row is lost or used twice."""
    rows = set(range(len(pool._tables)))
    _require(set(pool._free_rows) | set(pool._open) == rows, 5, "a table row is lost")
    _require(len(pool._free_rows) + len(pool._open) == len(rows), 5, "a table row is free and used")
    for row in rows:
        seq = pool._open.get(row)
        first, used = (seq._forgotten, seq._num_blocks) if seq else (0, 0)
        entries = pool._tables[row].tolist()
        mine = entries[first:used]
        _require(all(0 <= b < pool.num_blocks for b in mine), 5, f"row {row}: id outside the pool")
        _require(all(b == -1 for b in entries[:first] + entries[used:]), 5, f"row {row}: not padded with -1")
        _require(len(set(mine)) == len(mine), 5, f"row {row}: a block twice")


def _check_sequences(pool: Pool) -> None:
    """6: committed <= length, which lies within table and parked blocks. 7: a table's committed full
    blocks are its path in the tree, as far as they are published. 8: a block has at most one claim, by
    the sequence whose tail it is, with nothing published past `length` and no spare held."""
    claims: set[int] = set()
    tree, size = pool._tree, pool.block_size
    for seq in pool._open.values():
        room = seq.capacity + len(seq._parked) * size
        _require(0 <= seq.committed <= seq.length <= room, 6, f"{seq}: committed {seq.committed}")
        _require(
            len(seq._tail) == seq.committed % size * TOKEN_BYTES, 6, f"{seq}: tail of {len(seq._tail)} bytes"
        )
        table = seq.table.tolist()
        if seq._claim >= 0:
            _require(seq._claim not in claims, 8, f"block {seq._claim} is claimed twice")
            offset = seq.length % size
            ours = offset > 0 and table[seq.length // size] == seq._claim and tree.fill(seq._claim) <= offset
            _require(ours and seq._spare < 0, 8, f"{seq} claims block {seq._claim}")
            claims.add(seq._claim)
        if seq._forgotten:
            continue
        parent = seq._root
        for block in table[: seq.committed // size]:
            if tree.key[block] is None:
                break  # private from here on, because an ancestor was dropped or caching is off
            on_path = tree.fill(block) == size and tree.parent(block) == parent
            _require(on_path, 7, f"{seq}: {block} is off its path")
            parent = block


def _check_copies(pool: Pool) -> None:
    """9: pending copies are independent, their blocks are held, none copies a whole block."""
    blocks = pool._blocks
    sources = Counter(copy.src for copy in blocks.copies.values())
    pins = {block: count for block, count in blocks.pins.items() if count}
    _require(pins == sources, 9, f"pins {pins} are not the copies' sources {dict(sources)}")
    for dst, copy in blocks.copies.items():
        _require(dst == copy.dst and dst not in sources, 9, f"{copy} depends on another copy")
        _require(blocks.refs[copy.src] > 0 and blocks.refs[dst] > 0, 9, f"{copy}: a block that nobody holds")
        _require(0 < copy.num_slots < pool.block_size, 9, f"{copy}: a whole block is never copied")
