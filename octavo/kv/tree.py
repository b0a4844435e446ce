"""The prefix tree: which published block holds which tokens after which prefix.

    scope root (-2)                      a node is the id of a block in some tier, a root a negative id
      +-- block 7  [t0 .. t15]           an edge is the block's own tokens, exact, as int32 bytes
      |     +-- block 2  [t16 .. t31]
      |     |     +-- block 9  [t32 t33] a leaf may be partly filled; only full blocks have children
      |     +-- block 5  [t16 u17 .. ]   siblings may share leading tokens: longest() finds the best
      +-- block 4  [v0 .. v15]

Because a node's parent cannot leave before it, (parent, tokens) names the whole prefix exactly; no hash
decides anything. A child points to its parent's `_Below`, not to its id, so a node that moves to another
tier takes its subtree along in O(1).

Owns keys and links; knows nothing of reference counts, free lists or eviction order.
"""

from __future__ import annotations

import os
from itertools import count

from octavo.kv.errors import InvariantViolated
from octavo.kv.sorted_keys import SortedKeys
from octavo.kv.types import TOKEN_BYTES, Scope

_RUN_BITS = 64


class _Below:
    """The children of `node`: one id, or, from the second on, an index and an order of their keys."""

    __slots__ = ("by_key", "node", "only", "order", "root")

    def __init__(self, node: int, root: int) -> None:
        self.node = node
        self.root = root
        self.only = -1
        self.by_key: dict[bytes, int] | None = None
        self.order: SortedKeys | None = None


def shared_tokens(a: bytes, b: bytes) -> int:
    """How many leading tokens two keys have in common."""
    n = min(len(a), len(b))
    # The lowest set bit of the difference, read little-endian, lies in the first byte that differs.
    diff = int.from_bytes(a[:n], "little") ^ int.from_bytes(b[:n], "little")
    if diff == 0:
        return n // TOKEN_BYTES
    return ((diff & -diff).bit_length() - 1) // (8 * TOKEN_BYTES)


class PrefixTree:
    """Published blocks by exact prefix, over ids 0..num_ids-1. Every operation is O(block size + log
    siblings), whatever the number of nodes."""

    def __init__(self, num_ids: int) -> None:
        self.key: list[bytes | None] = [None] * num_ids  # None: not published
        self.serial: list[int] = [0] * num_ids  # unique to a published content for ever; see uid()
        self._above: list[_Below | None] = [None] * num_ids
        self._below: dict[int, _Below] = {}
        self._roots: dict[Scope, int] = {}
        self._scopes: dict[int, Scope] = {}
        self._users: dict[int, int] = {}  # root -> open sequences
        self._next_root = -2  # -1 is no node
        self._serials = count(int.from_bytes(os.urandom(8), "little") << _RUN_BITS)

    # -- roots ---------------------------------------------------------------------------------

    def find_root(self, scope: Scope) -> int | None:
        """The root of a scope that has blocks or open sequences, else None."""
        return self._roots.get(scope)

    def enter(self, scope: Scope) -> int:
        """The root of a scope, made if need be and kept until leave()."""
        root = self._roots.get(scope)
        if root is None:
            root = self._next_root
            self._next_root -= 1
            self._roots[scope] = root
            self._scopes[root] = scope
            self._users[root] = 0
        self._users[root] += 1
        return root

    def join(self, root: int) -> None:
        """One open sequence more in a scope that has one already."""
        self._users[root] += 1

    def leave(self, root: int) -> None:
        """One open sequence of the scope fewer; an empty scope is forgotten."""
        self._users[root] -= 1
        self._forget_if_empty(root)

    def _forget_if_empty(self, root: int) -> None:
        if self._users[root] == 0 and root not in self._below:
            del self._roots[self._scopes.pop(root)], self._users[root]

    def roots(self) -> dict[Scope, int]:
        """The scopes in use and their roots (a copy)."""
        return dict(self._roots)

    def users(self, root: int) -> int:
        """Open sequences of a root's scope."""
        return self._users[root]

    def scope(self, node: int) -> Scope:
        """The scope that a published node belongs to."""
        above = self._above[node]
        assert above is not None
        return self._scopes[above.root]

    # -- look-ups ------------------------------------------------------------------------------

    def parent(self, node: int) -> int:
        """The parent of a published node: a node or a root."""
        above = self._above[node]
        assert above is not None
        return above.node

    def uid(self, node: int) -> bytes:
        """16 bytes that name the content of a published node for ever; b"" for a root."""
        return self.serial[node].to_bytes(16, "little") if node >= 0 else b""

    def find(self, node: int, key: bytes) -> int:
        """The child of `node` with exactly these tokens, or -1."""
        below = self._below.get(node)
        if below is None:
            return -1
        if below.by_key is None:
            return below.only if self.key[below.only] == key else -1
        return below.by_key.get(key, -1)

    def longest(self, node: int, query: bytes) -> tuple[int, int]:
        """The child that shares most leading tokens with `query`, and how many; (-1, 0) if none.

        Among sorted keys the best is next to where the query would stand. On a tie the one at or
        above the query wins, so a child that ends exactly where the query ends is preferred.
        """
        below = self._below.get(node)
        if below is None:
            return -1, 0
        if below.by_key is None:
            key = self.key[below.only]
            assert key is not None
            shared = shared_tokens(key, query)
            return (below.only, shared) if shared else (-1, 0)
        assert below.order is not None
        before, after = below.order.neighbours(query)
        best, shared = -1, 0
        if after is not None:
            shared = shared_tokens(after, query)
            best = below.by_key[after]
        if before is not None and (n := shared_tokens(before, query)) > shared:
            best, shared = below.by_key[before], n
        return (best, shared) if shared else (-1, 0)

    def covers(self, node: int, key: bytes) -> bool:
        """Whether some child begins with all of `key`."""
        below = self._below.get(node)
        if below is None:
            return False
        if below.by_key is None:
            other = self.key[below.only]
            assert other is not None
            return other.startswith(key)
        assert below.order is not None
        after = below.order.neighbours(key)[1]
        return after is not None and after.startswith(key)

    def has_children(self, node: int) -> bool:
        """Whether any published block continues this one."""
        return node in self._below

    def children(self, node: int) -> list[int]:
        """All children of a node in key order. Cost: their number."""
        below = self._below.get(node)
        if below is None:
            return []
        if below.by_key is None:
            return [below.only]
        assert below.order is not None
        return [below.by_key[key] for key in below.order]

    def fill(self, block: int) -> int:
        """Tokens that `block` is published with; 0 if it is not published."""
        key = self.key[block]
        return 0 if key is None else len(key) // TOKEN_BYTES

    # -- changes -------------------------------------------------------------------------------

    def publish(self, block: int, parent: int, key: bytes, serial: int | None = None) -> None:
        """Add `block` under `parent`. The key must not stand there already."""
        below = self._below.get(parent)
        if below is None:
            above = self._above[parent] if parent >= 0 else None
            below = self._below[parent] = _Below(parent, above.root if above is not None else parent)
            below.only = block
        else:
            if below.by_key is None:
                first = self.key[below.only]
                assert first is not None
                below.by_key, below.order = {first: below.only}, SortedKeys()
                below.order.add(first)
            assert below.order is not None
            below.by_key[key] = block
            below.order.add(key)
        self._above[block] = below
        self.key[block] = key
        self.serial[block] = next(self._serials) if serial is None else serial

    def rekey(self, block: int, key: bytes) -> None:
        """Give a published leaf more tokens: another content, so another serial."""
        below = self._above[block]
        assert below is not None
        if below.by_key is not None:
            old = self.key[block]
            assert old is not None
            assert below.order is not None
            del below.by_key[old]
            below.order.discard(old)
            below.by_key[key] = block
            below.order.add(key)
        self.key[block] = key
        self.serial[block] = next(self._serials)

    def move(self, block: int, to: int) -> None:
        """A published node, with everything below it, goes on as the id `to`."""
        above, key = self._above[block], self.key[block]
        assert above is not None
        assert key is not None
        if above.by_key is None:
            above.only = to
        else:
            above.by_key[key] = to
        self._above[to], self.key[to], self.serial[to] = above, key, self.serial[block]
        self._above[block] = self.key[block] = None
        below = self._below.pop(block, None)
        if below is not None:
            below.node = to
            self._below[to] = below

    def unpublish(self, block: int) -> None:
        """Take a leaf out."""
        below, key = self._above[block], self.key[block]
        assert below is not None
        assert key is not None
        self._above[block] = self.key[block] = None
        if below.by_key is None:
            del self._below[below.node]
            if below.node < 0:
                self._forget_if_empty(below.node)
            return
        assert below.order is not None
        del below.by_key[key]
        below.order.discard(key)
        if len(below.by_key) == 1:
            (below.only,) = below.by_key.values()
            below.by_key = below.order = None

    def check(self) -> None:
        """Raise InvariantViolated(4) unless every index, order and link agree."""
        for node, below in self._below.items():
            if below.by_key is None:
                children = {below.only: self.key[below.only]}
                ok = below.only >= 0
            else:
                assert below.order is not None
                children = {block: key for key, block in below.by_key.items()}
                ok = len(children) == len(below.by_key) > 1 and sorted(below.by_key) == list(below.order)
            ok = ok and below.node == node
            ok = ok and all(k is not None and self.key[b] == k for b, k in children.items())
            ok = ok and all(self._above[block] is below for block in children)
            if not ok:
                raise InvariantViolated(4, f"the children of node {node} are out of order")
