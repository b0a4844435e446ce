"""A sorted set of byte strings that stays cheap at any size."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

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
