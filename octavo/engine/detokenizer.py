"""Token ids to text as they come: whole characters only, stop strings never shown, nothing lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_CONTEXT = 5  # prompt tokens in front, so that a word's leading space is as in the whole text
_UNKNOWN = "\ufffd"
_PATIENCE = 12  # tokens held for a character to complete before invalid bytes are let through


class Detokenizer:
    """The text of one sequence. `decode` maps ids to text, `prompt` are the ids in front.

    push() gives the text that is certain, flush() the rest. Cost: a few short decodes per token.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stop: Sequence[str] = ()
    ) -> None:
        self._decode = decode
        self._ids = list(prompt[-_CONTEXT:])
        self._start = 0  # text is decoded from here,
        self._read = len(self._ids)  # and that of the ids up to here has been taken
        self._taken = self._decode(self._ids) if self._ids else ""
        self._stop = tuple(stop)
        self._longest_stop = max((len(text) for text in self._stop), default=0)
        self._shown = 0
        self.text = ""

    def push(self, token: int, *, look_for_stop: bool = True) -> tuple[str, str | None]:
        """Add a token; returns the new text to show and the stop string that ended it, if any."""
        self._ids.append(token)
        return self._show(self._certain(), look_for_stop, last=False)

    def flush(self, *, look_for_stop: bool = True) -> tuple[str, str | None]:
        """No token follows: the text held back, incomplete characters as U+FFFD."""
        rest = self._decode(self._ids[self._start :])[len(self._taken) :]
        self._start = self._read = len(self._ids)
        self._taken = ""
        return self._show(rest, look_for_stop, last=True)

    def _certain(self) -> str:
        """The text that later tokens cannot change, as it is taken."""
        text = self._decode(self._ids[self._start :])
        if len(text) <= len(self._taken):
            return ""
        if not text.endswith(_UNKNOWN):
            return self._take(text, len(self._ids))
        if len(self._ids) - self._read > _PATIENCE:
            # A character is at most four bytes and a token at least one, so only the last three
            # tokens can still change; split where both sides decode as they do together.
            for cut in range(len(self._ids) - 3, len(self._ids) - 7, -1):
                head = self._decode(self._ids[self._start : cut])
                if head + self._decode(self._ids[cut:]) == text:
                    return self._take(head, cut)
        return ""

    def _take(self, text: str, end: int) -> str:
        new = text[len(self._taken) :]
        self._start, self._read = self._read, end
        self._taken = self._decode(self._ids[self._start : self._read])
        return new

    def _show(self, new: str, look_for_stop: bool, last: bool) -> tuple[str, str | None]:
        """Append `new`, cut at the first stop string, and return what may be shown."""
        searched = max(self._shown, len(self.text) - self._longest_stop)
        self.text += new
        found = self._find_stop(searched) if look_for_stop and self._stop else None
        if found is not None:
            self.text = self.text[: found[0]]
        end = len(self.text)
        if self._stop and found is None and not last:
            end -= self._held()
        shown, self._shown = self.text[self._shown : end], max(self._shown, end)
        return shown, found[1] if found else None

    def _find_stop(self, start: int) -> tuple[int, str] | None:
        hits = [(at, text) for text in self._stop if (at := self.text.find(text, start)) >= 0]
        return min(hits, key=lambda hit: hit[0]) if hits else None

    def _held(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = min(self._longest_stop - 1, len(self.text) - self._shown)
        for length in range(longest, 0, -1):
            tail = self.text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
