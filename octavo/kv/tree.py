"""The prefix tree: which published block holds which tokens after which prefix.

    scope root (-1)                      a node is a physical block id, a root a negative id
      +-- block 7  [t0 .. t15]           an edge is the block's own tokens, exact, as int32 bytes
      |     +-- block 2  [t16 .. t31]
      |     |     +-- block 9  [t32 t33] a leaf may be partly filled; only full blocks have children
      |     +-- block 5  [t16 u17 .. ]   siblings may share leading tokens: longest() finds the best
      +-- block 4  [v0 .. v15]

Because a node's parent cannot leave before it, (parent id, tokens) names the whole prefix exactly;
no hash decides anything. A node with one child stores its id alone; two or more make a `_Branch`.

Owns keys and links; knows nothing of reference counts, free lists or eviction order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from octavo.kv.errors import InvariantViolated
from octavo.kv.types import TOKEN_BYTES, Scope

_CHUNK = 512


class SortedKeys:
    """A sorted set of byte strings in chunks, so that a change never moves more than a chunk.

    add, discard and neighbours cost O(log n + chunk), whatever the size.
    """

    __slots__ = ("_chunks", "_last")

    def __init__(self) -> None:
        self._chunks: list[list[bytes]] = []
        self._last: list[bytes] = []  # the largest key of each chunk

    def add(self, key: bytes) -> None:
        if not self._chunks:
            self._chunks.append([key])
            self._last.append(key)
            return
        i = min(bisect_left(self._last, key), len(self._last) - 1)
        chunk = self._chunks[i]
        insort(chunk, key)
        if len(chunk) > 2 * _CHUNK:
            self._chunks[i : i + 1] = [chunk[:_CHUNK], chunk[_CHUNK:]]
            self._last[i : i + 1] = [chunk[_CHUNK - 1], chunk[-1]]
        else:
            self._last[i] = chunk[-1]

    def discard(self, key: bytes) -> None:
        i = bisect_left(self._last, key)
        chunk = self._chunks[i]
        del chunk[bisect_left(chunk, key)]
        if chunk:
            self._last[i] = chunk[-1]
        else:
            del self._chunks[i], self._last[i]

    def neighbours(self, key: bytes) -> tuple[bytes | None, bytes | None]:
        """The largest key below `key` and the smallest one at or above it."""
        i = bisect_left(self._last, key)
        if i == len(self._chunks):
            return (self._last[-1] if self._last else None), None
        chunk = self._chunks[i]
        j = bisect_left(chunk, key)
        if j:
            return chunk[j - 1], chunk[j]
        return (self._last[i - 1] if i else None), chunk[j]

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            yield from chunk


class _Branch:
    """The children of a node that has two or more."""

    __slots__ = ("by_key", "order")

    def __init__(self) -> None:
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
    """Published blocks by exact prefix. Every operation is O(block size + log siblings)."""

    def __init__(self, num_blocks: int) -> None:
        self.key: list[bytes | None] = [None] * num_blocks  # None: not published
        self.parent: list[int] = [0] * num_blocks  # meaningful where key is not None
        self._below: dict[int, int | _Branch] = {}
        self._roots: dict[Scope, int] = {}
        self._scopes: dict[int, Scope] = {}
        self._users: dict[int, int] = {}  # root -> open sequences
        self._next_root = -1

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

    # -- look-ups ------------------------------------------------------------------------------

    def find(self, node: int, key: bytes) -> int:
        """The child of `node` with exactly these tokens, or -1."""
        below = self._below.get(node)
        if below is None:
            return -1
        if type(below) is int:
            return below if self.key[below] == key else -1
        assert isinstance(below, _Branch)
        return below.by_key.get(key, -1)

    def longest(self, node: int, query: bytes) -> tuple[int, int]:
        """The child that shares most leading tokens with `query`, and how many; (-1, 0) if none.

        Among sorted keys the best is next to where the query would stand. On a tie the one at or
        above the query wins, so a child that ends exactly where the query ends is preferred.
        """
        below = self._below.get(node)
        if below is None:
            return -1, 0
        if type(below) is int:
            key = self.key[below]
            assert key is not None
            shared = shared_tokens(key, query)
            return (below, shared) if shared else (-1, 0)
        assert isinstance(below, _Branch)
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
        if type(below) is int:
            other = self.key[below]
            assert other is not None
            return other.startswith(key)
        assert isinstance(below, _Branch)
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
        if type(below) is int:
            return [below]
        assert isinstance(below, _Branch)
        return [below.by_key[key] for key in below.order]

    def fill(self, block: int) -> int:
        """Tokens that `block` is published with; 0 if it is not published."""
        key = self.key[block]
        return 0 if key is None else len(key) // TOKEN_BYTES

    # -- changes -------------------------------------------------------------------------------

    def publish(self, block: int, parent: int, key: bytes) -> None:
        """Add `block` under `parent`. The key must not stand there already."""
        self.key[block] = key
        self.parent[block] = parent
        below = self._below.get(parent)
        if below is None:
            self._below[parent] = block
        elif type(below) is int:
            branch = self._below[parent] = _Branch()
            first = self.key[below]
            assert first is not None
            branch.add(first, below)
            branch.add(key, block)
        else:
            assert isinstance(below, _Branch)
            below.add(key, block)

    def rekey(self, block: int, key: bytes) -> None:
        """Give a published leaf more or fewer tokens."""
        below = self._below[self.parent[block]]
        if type(below) is not int:
            assert isinstance(below, _Branch)
            old = self.key[block]
            assert old is not None
            below.discard(old)
            below.add(key, block)
        self.key[block] = key

    def unpublish(self, block: int) -> None:
        """Take a leaf out."""
        parent, key = self.parent[block], self.key[block]
        assert key is not None
        self.key[block] = None
        below = self._below[parent]
        if type(below) is int:
            del self._below[parent]
            if parent < 0:
                self._forget_if_empty(parent)
            return
        assert isinstance(below, _Branch)
        below.discard(key)
        if len(below.by_key) == 1:
            (self._below[parent],) = below.by_key.values()

    def roots(self) -> dict[Scope, int]:
        """The scopes in use and their roots (a copy)."""
        return dict(self._roots)

    def users(self, root: int) -> int:
        """Open sequences of a root's scope."""
        return self._users[root]

    def check_branches(self) -> None:
        """Raise InvariantViolated(4) unless every branch's index, order and links agree."""
        for node, below in self._below.items():
            if type(below) is int:
                ok = self.key[below] is not None and self.parent[below] == node
            else:
                assert isinstance(below, _Branch)
                keys = sorted(below.by_key)
                ok = len(keys) > 1 and keys == list(below.order)
                ok = ok and all(self.key[b] == k and self.parent[b] == node for k, b in below.by_key.items())
            if not ok:
                raise InvariantViolated(4, f"the children of node {node} are out of order")
