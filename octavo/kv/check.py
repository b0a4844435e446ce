"""Walks the numbered invariants of docs/kv.md over a pool. One pass over blocks and tables."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from octavo.kv.errors import InvariantViolated
from octavo.kv.types import TOKEN_BYTES

if TYPE_CHECKING:
    from octavo.kv.pool import Pool


def _require(ok: bool, number: int, message: str) -> None:
    if not ok:
        raise InvariantViolated(number, message)


def check_pool(pool: Pool) -> None:
    """Raise InvariantViolated, with its number, at the first invariant that does not hold."""
    _check_states(pool)
    _check_counts(pool)
    _check_tree(pool)
    _check_tables(pool)
    _check_sequences(pool)
    _check_copies(pool)


def _check_states(pool: Pool) -> None:
    """1: every block is exactly one of free, held, cached."""
    free, cached = set(pool._free), set(pool._policy)
    _require(len(free) == len(pool._free), 1, "a block is on the free list twice")
    for block, refs in enumerate(pool._refs):
        published = pool._tree.key[block] is not None
        if block in free:
            _require(
                refs == 0 and not published, 1, f"free block {block}: count {refs}, published {published}"
            )
            _require(block not in cached, 1, f"block {block} is free and cached")
        elif refs == 0:
            _require(
                published and block in cached,
                1,
                f"block {block} has no holder and is neither free nor cached",
            )
        else:
            _require(refs > 0 and block not in cached, 1, f"held block {block}: count {refs}, cached")
    stats = pool.stats()
    _require(stats.free + stats.held + stats.cached == pool.num_blocks, 1, f"states do not add up: {stats}")


def _check_counts(pool: Pool) -> None:
    """2: a block's count is the number of its table entries, spare holds and copies to be made from it."""
    holders: Counter[int] = Counter()
    for seq in pool._open.values():
        holders.update(seq.table.tolist())
        if seq._spare >= 0:
            holders[seq._spare] += 1
    holders.update(copy.src for copy in pool._copies.values())
    for block, refs in enumerate(pool._refs):
        _require(refs == holders[block], 2, f"block {block}: count {refs}, but {holders[block]} holders")


def _check_tree(pool: Pool) -> None:
    """3: holders hold ancestors. 4: links, keys and order agree; only full blocks have children."""
    tree = pool._tree
    roots = set(tree.roots().values())
    for block in range(pool.num_blocks):
        key = tree.key[block]
        if key is None:
            _require(not tree.has_children(block), 4, f"unpublished block {block} has children")
            continue
        _require(
            0 < len(key) <= pool._key_bytes and len(key) % TOKEN_BYTES == 0, 4, f"block {block}: key length"
        )
        if tree.has_children(block):
            _require(len(key) == pool._key_bytes, 4, f"block {block} has children but is not full")
        parent = tree.parent[block]
        _require(tree.find(parent, key) == block, 4, f"block {block} is not among its parent's children")
        if parent < 0:
            _require(parent in roots, 4, f"block {block} hangs from unknown root {parent}")
        else:
            _require(tree.key[parent] is not None, 4, f"block {block} hangs from unpublished {parent}")
            _require(
                pool._refs[parent] >= 1 or pool._refs[block] == 0,
                3,
                f"block {block} held, parent {parent} not",
            )
    tree.check_branches()
    if len(pool._policy):
        victim = pool._policy.victim()
        _require(not tree.has_children(victim), 3, f"eviction would take block {victim} before its children")
    users = Counter(seq._root for seq in pool._open.values())
    for root in roots:
        _require(
            tree.users(root) == users[root], 4, f"root {root}: {tree.users(root)} users, {users[root]} open"
        )
        _require(users[root] > 0 or tree.has_children(root), 4, f"root {root} is empty and unused")


def _check_tables(pool: Pool) -> None:
    """5: rows hold ids of the pool, then -1; rows of no sequence are empty; no row is used twice."""
    rows = set(range(len(pool._tables)))
    _require(set(pool._free_rows) | set(pool._open) == rows, 5, "a table row is lost")
    _require(len(pool._free_rows) + len(pool._open) == len(rows), 5, "a table row is free and used")
    for row in rows:
        seq = pool._open.get(row)
        used = seq._num_blocks if seq else 0
        entries = pool._tables[row].tolist()
        _require(all(0 <= b < pool.num_blocks for b in entries[:used]), 5, f"row {row}: id outside the pool")
        _require(all(b == -1 for b in entries[used:]), 5, f"row {row}: not padded with -1")
        _require(len(set(entries[:used])) == used, 5, f"row {row}: a block twice")


def _check_sequences(pool: Pool) -> None:
    """6: committed <= length <= capacity. 7: a table's committed full blocks are its path in the tree.
    8: a block has at most one claim, by a sequence that holds it."""
    claims: set[int] = set()
    tree, size = pool._tree, pool.block_size
    for seq in pool._open.values():
        _require(0 <= seq.committed <= seq.length <= seq.capacity, 6, f"{seq}: committed {seq.committed}")
        _require(
            len(seq._tail) == seq.committed % size * TOKEN_BYTES, 6, f"{seq}: tail of {len(seq._tail)} bytes"
        )
        if seq._claim >= 0:
            _require(seq._claim not in claims, 8, f"block {seq._claim} is claimed twice")
            _require(seq._claim in seq.table.tolist(), 8, f"{seq} claims a block it does not hold")
            claims.add(seq._claim)
        if not pool.prefix_caching:
            continue
        parent = seq._root
        for block in seq.table[: seq.committed // size].tolist():
            _require(
                tree.fill(block) == size and tree.parent[block] == parent, 7, f"{seq}: {block} off its path"
            )
            parent = block


def _check_copies(pool: Pool) -> None:
    """9: pending copies are independent: every src and dst is held, and no dst is another's src."""
    sources = Counter(copy.src for copy in pool._copies.values())
    pins = {block: count for block, count in pool._pins.items() if count}
    _require(pins == sources, 9, f"pins {pins} are not the copies' sources {dict(sources)}")
    for dst, copy in pool._copies.items():
        _require(dst == copy.dst and dst not in sources, 9, f"{copy} depends on another copy")
        _require(pool._refs[copy.src] > 0 and pool._refs[dst] > 0, 9, f"{copy}: a block that nobody holds")
        _require(0 < copy.num_slots < pool.block_size, 9, f"{copy}: a whole block is never copied")
