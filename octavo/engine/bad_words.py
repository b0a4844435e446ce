"""Tokens that may not come next: those that would complete a forbidden string or token sequence.

Strings are matched on bytes, so every spelling in tokens is caught:

    text so far   ... c a       forbidden  c a t       next token  t, tt, "t the" ...   banned
    text so far   ... a d o g   forbidden  c a t       next token  cat, xcaty ...       banned

A word is given up only where its last byte would appear. What the prompt said does not count towards a
string; towards a token sequence it does, as in Hugging Face's NoBadWordsLogitsProcessor.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.models import Tokenizer

Ids = npt.NDArray[np.int64]
_NONE: Ids = np.zeros(0, np.int64)


class Spellings:
    """The bytes of every token of a vocabulary, to find tokens by what they contain or begin with."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = tokenizer.special_ids
        pairs = [
            (tokenizer.token_bytes(token), token)
            for token in range(tokenizer.vocab_size)
            if token not in special  # they give no text
        ]
        pairs = sorted(pair for pair in pairs if pair[0])
        self._bytes = [text for text, _ in pairs]
        self._ids = np.array([token for _, token in pairs], np.int64)
        # No word has a byte 255, which UTF-8 never uses, so no match goes across two tokens.
        self._joined = b"\xff".join(self._bytes)
        self._starts = np.cumsum([0] + [len(text) + 1 for text in self._bytes])[:-1]
        self.of = dict(zip(self._ids.tolist(), self._bytes, strict=True))
        # Instances live as long as their tokenizer, and a bounded cache as long as they do.
        self.beginning = functools.lru_cache(4096)(self._beginning)
        self.containing = functools.lru_cache(4096)(self._containing)

    def _beginning(self, text: bytes) -> Ids:
        """Tokens whose bytes begin with `text`. O(log V)."""
        low = bisect_left(self._bytes, text)
        return self._ids[low : bisect_left(self._bytes, text + b"\xff" * 512, low)]

    def _containing(self, text: bytes) -> Ids:
        """Tokens whose bytes have `text` in them. One pass over the vocabulary's bytes."""
        hits, at = [], self._joined.find(text)
        while at >= 0:
            hits.append(at)
            at = self._joined.find(text, at + 1)
        return self._ids[np.unique(np.searchsorted(self._starts, hits, "right") - 1)] if hits else _NONE


class BadWords:
    """What one sequence may not complete. `words` are strings, `sequences` token ids."""

    def __init__(
        self,
        words: Sequence[str],
        sequences: Sequence[Sequence[int]],
        spellings: Spellings | None,
        prompt: Sequence[int],
    ) -> None:
        self._words = [word.encode() for word in words]
        self._sequences = [tuple(ids) for ids in sequences if len(ids) > 1]
        self._spellings = spellings
        self._always = np.array([ids[0] for ids in sequences if len(ids) == 1], np.int64)
        if self._words and spellings is not None:
            within = [spellings.containing(word) for word in self._words]
            self._always = np.unique(np.concatenate([self._always, *within]))
        self._keep_bytes = max((len(word) for word in self._words), default=1) - 1
        self._keep_ids = max((len(ids) for ids in self._sequences), default=1) - 1
        self._text = b""  # the last bytes of the output
        self._ids: tuple[int, ...] = ()  # and the last tokens, prompt included
        if self._keep_ids:
            self._ids = tuple(prompt[-self._keep_ids :])

    def add(self, token: int) -> None:
        """A token was sampled."""
        if self._keep_bytes and self._spellings is not None:
            self._text = (self._text + self._spellings.of.get(token, b""))[-self._keep_bytes :]
        if self._keep_ids:
            self._ids = (*self._ids, token)[-self._keep_ids :]

    def banned(self) -> Ids:
        """Ids that may not come next."""
        found = [self._always]
        for word in self._words if self._spellings is not None else ():
            for length in range(1, min(len(word) - 1, len(self._text)) + 1):
                if self._text.endswith(word[:length]):
                    found.append(self._spellings.beginning(word[length:]))  # type: ignore[union-attr]
        ends = [ids[-1] for ids in self._sequences if self._ids[-len(ids) + 1 :] == ids[:-1]]
        if ends:
            found.append(np.array(ends, np.int64))
        return found[0] if len(found) == 1 else np.concatenate(found)

    def copy(self) -> BadWords:
        """The same state, to go on apart."""
        twin = BadWords.__new__(BadWords)
        twin.__dict__.update(self.__dict__)  # every field is replaced, never changed
        return twin
