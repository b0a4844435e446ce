"""The prefix tree: which published block holds which tokens after which prefix.

    scope root (-2)                      a node is the id of a block in some tier, a root a negative id
      +-- block 7  [t0 .. t15]           an edge is the block's own tokens, exact, as int32 bytes
      |     +-- block 2  [t16 .. t31]
      |     |     +-- block 9  [t32 t33] a leaf may be partly filled; only full blocks have children
      |     +-- block 5  [t16 u17 .. ]   siblings may share leading tokens: longest() finds the best
      +-- block 4  [v0 .. v15]

Because a node's parent cannot leave before it, (parent, tokens) names the whole prefix exactly; no hash
decides anything. An only child and its parent name each other; the children of a node with more point to
its `_Branch`, so that a node that moves to another tier takes its subtree along in O(1).

Owns keys and links; knows nothing of reference counts, free lists or eviction order.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import count

from octavo.kv.errors import InvariantViolated
from octavo.kv.sorted_keys import SortedKeys
from octavo.kv.types import TOKEN_BYTES, Scope

_RUN_BITS = 64


class _Branch:
    """The two or more children of `node`."""

    __slots__ = ("by_key", "node", "order")

    def __init__(self, node: int) -> None:
        self.node = node
        self.by_key: dict[bytes, int] = {}
        self.order = SortedKeys()

    def add(self, key: bytes, block: int) -> None:
        self.by_key[key] = block
        self.order.add(key)

    def discard(self, key: bytes) -> None:
        del self.by_key[key]
        self.order.discard(key)


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
        self._serial: list[int] = [0] * num_ids  # 0: not asked for yet; see uid()
        self._above: list[int | _Branch] = [0] * num_ids  # meaningful where key is not None
        self._below: dict[int, int | _Branch] = {}
        self._roots: dict[Scope, int] = {}
        self._scopes: dict[int, Scope] = {}
        self._users: dict[int, int] = {}  # root -> open sequences
        self._next_root = -2  # -1 is no node
        self._serials = count((int.from_bytes(os.urandom(8), "little") << _RUN_BITS) + 1)

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
        """The scope that a published node belongs to. O(depth)."""
        while node >= 0:
            node = self.parent(node)
        return self._scopes[node]

    # -- look-ups ------------------------------------------------------------------------------

    def parent(self, node: int) -> int:
        """The parent of a published node: a node or a root."""
        above = self._above[node]
        return above.node if isinstance(above, _Branch) else above

    def uid(self, node: int) -> bytes:
        """16 bytes that name the content of a published node for ever; b"" for a root."""
        if node < 0:
            return b""
        if not self._serial[node]:
            self._serial[node] = next(self._serials)
        return self._serial[node].to_bytes(16, "little")

    def find(self, node: int, key: bytes) -> int:
        """The child of `node` with exactly these tokens, or -1."""
        below = self._below.get(node)
        if below is None:
            return -1
        if isinstance(below, _Branch):
            return below.by_key.get(key, -1)
        return below if self.key[below] == key else -1

    def longest(self, node: int, query: bytes) -> tuple[int, int]:
        """The child that shares most leading tokens with `query`, and how many; (-1, 0) if none.

        Among sorted keys the best is next to where the query would stand. On a tie the one at or
        above the query wins, so a child that ends exactly where the query ends is preferred.
        """
        below = self._below.get(node)
        if below is None:
            return -1, 0
        if not isinstance(below, _Branch):
            shared = shared_tokens(self._key(below), query)
            return (below, shared) if shared else (-1, 0)
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
        if not isinstance(below, _Branch):
            return self._key(below).startswith(key)
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
        if isinstance(below, _Branch):
            return [below.by_key[key] for key in below.order]
        return [below]

    def fill(self, block: int) -> int:
        """Tokens that `block` is published with; 0 if it is not published."""
        key = self.key[block]
        return 0 if key is None else len(key) // TOKEN_BYTES

    # -- changes -------------------------------------------------------------------------------

    def publish(self, block: int, parent: int, key: bytes, serial: int = 0) -> None:
        """Add `block` under `parent`. The key must not stand there already."""
        below = self._below.get(parent)
        self.key[block], self._serial[block] = key, serial
        if below is None:
            self._below[parent] = block
            self._above[block] = parent
            return
        if not isinstance(below, _Branch):
            branch = _Branch(parent)
            branch.add(self._key(below), below)
            self._above[below] = self._below[parent] = branch
            below = branch
        below.add(key, block)
        self._above[block] = below

    def publish_chain(self, blocks: Sequence[int], parent: int, keys: Sequence[bytes]) -> None:
        """Add unpublished `blocks` each under the one before, the first under `parent`, which has no
        children. The same as publish() for each, at a third of the cost."""
        key, above, below, serial = self.key, self._above, self._below, self._serial
        for block, tokens in zip(blocks, keys, strict=True):
            key[block] = tokens
            serial[block] = 0
            above[block] = parent
            below[parent] = block
            parent = block

    def rekey(self, block: int, key: bytes) -> None:
        """Give a published leaf more tokens: another content, so another uid."""
        above = self._above[block]
        if isinstance(above, _Branch):
            above.discard(self._key(block))
            above.add(key, block)
        self.key[block] = key
        self._serial[block] = 0

    def move(self, block: int, to: int) -> None:
        """A published node, with everything below it, goes on as the id `to`."""
        above, key = self._above[block], self._key(block)
        if isinstance(above, _Branch):
            above.by_key[key] = to
        else:
            self._below[above] = to
        self._above[to], self.key[to], self._serial[to] = above, key, self._serial[block]
        self.key[block] = None
        below = self._below.pop(block, None)
        if below is None:
            return
        self._below[to] = below
        if isinstance(below, _Branch):
            below.node = to
        else:
            self._above[below] = to

    def unpublish(self, block: int) -> None:
        """Take a leaf out."""
        above, key = self._above[block], self._key(block)
        self.key[block] = None
        if not isinstance(above, _Branch):
            del self._below[above]
            if above < 0:
                self._forget_if_empty(above)
            return
        above.discard(key)
        if len(above.by_key) == 1:
            (only,) = above.by_key.values()
            self._below[above.node] = only
            self._above[only] = above.node

    def _key(self, block: int) -> bytes:
        key = self.key[block]
        assert key is not None
        return key

    def check(self) -> None:
        """Raise InvariantViolated(4) unless every index, order and link agree."""
        for node, below in self._below.items():
            if isinstance(below, _Branch):
                keys = sorted(below.by_key)
                ok = len(keys) > 1 and keys == list(below.order) and below.node == node
                ok = ok and all(self.key[b] == k and self._above[b] is below for k, b in below.by_key.items())
            else:
                ok = self.key[below] is not None and self._above[below] == node
            if not ok:
                raise InvariantViolated(4, f"the children of node {node} are out of order")
