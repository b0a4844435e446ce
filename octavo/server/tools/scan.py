"""The JSON of one tool call, read a character at a time.

    {"name": "f", "arguments": {...}}    name as soon as it is whole; then the value of arguments as it grows
    {"arguments": {...}, "name": "f"}    the same; the arguments wait for the name

"parameters" is read as "arguments", a string value of it as the JSON inside the string. What the value
holds is passed on as the model wrote it, whether it is good JSON or not.
"""

from __future__ import annotations

import json
from collections.abc import Container

_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")
_BEFORE_NAME = ("type", "id", *_ARGUMENTS)


class CallScanner:
    """Reads one object. `names`: the only names that make a call, or None for any.

    name: set once known. done: the object is closed. bad: this is no call, or no longer JSON.
    """

    def __init__(self, names: Container[str] | None = None) -> None:
        self._names = names
        self.name: str | None = None
        self.done = False
        self.bad = False
        self._state = self._start
        self._key = ""
        self._word: list[str] = []  # a string being read, with its quotes
        self._escaped = False
        self._depth = 0
        self._in_string = False
        self._arguments: list[str] = []  # not handed out yet

    def feed(self, text: str) -> int:
        """Read characters until the object is closed or found bad; returns how many were read."""
        for at, character in enumerate(text):
            if self.done or self.bad:
                return at
            self._state(character)
        return len(text)

    def arguments(self) -> str:
        """What came of the arguments since the last call; nothing while the name is unknown."""
        if self.name is None:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    # -- states: each takes one character --------------------------------------------------------

    def _start(self, character: str) -> None:
        if character == "{":
            self._state = self._before_key
        elif character not in _SPACE:
            self.bad = True

    def _before_key(self, character: str) -> None:
        if character == '"':
            self._begin_string(self._end_key, character)
        elif character == "}":
            self._close()
        elif character not in _SPACE:
            self.bad = True

    def _end_key(self, word: str) -> None:
        self._key = _loads(word)
        known = self._key == "name" or self._key in _BEFORE_NAME
        if self.name is None and not known:
            self.bad = True  # an object that is something else
        self._state = self._before_colon

    def _before_colon(self, character: str) -> None:
        if character == ":":
            self._state = self._before_value
        elif character not in _SPACE:
            self.bad = True

    def _before_value(self, character: str) -> None:
        if character in _SPACE:
            return
        if character == '"':
            self._begin_string(self._end_string_value, character)
        elif character in "{[":
            self._depth, self._in_string = 0, False
            self._state = self._nested
            self._nested(character)
        elif character in ",}":
            self.bad = True
        else:
            self._state = self._scalar
            self._scalar(character)

    def _nested(self, character: str) -> None:
        self._take(character)
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
            return
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._state = self._after_value

    def _scalar(self, character: str) -> None:
        if character in _SPACE or character in ",}":
            if self._key == "name":
                self.bad = True
            self._state = self._after_value
            self._after_value(character)
        else:
            self._take(character)

    def _end_string_value(self, word: str) -> None:
        value = _loads(word)
        if self._key == "name":
            if not value or (self._names is not None and value not in self._names):
                self.bad = True
            else:
                self.name = value
        else:
            self._take(value)
        self._state = self._after_value

    def _after_value(self, character: str) -> None:
        if character == ",":
            self._state = self._before_key
        elif character == "}":
            self._close()
        elif character not in _SPACE:
            self.bad = True

    def _close(self) -> None:
        if self.name is None:
            self.bad = True
        else:
            self.done = True

    # -- strings, and what is kept ---------------------------------------------------------------

    def _begin_string(self, then: object, quote: str) -> None:
        self._word, self._escaped = [quote], False

        def read(character: str) -> None:
            self._word.append(character)
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                then("".join(self._word))  # type: ignore[operator]

        self._state = read

    def _take(self, text: str) -> None:
        if self._key in _ARGUMENTS:
            self._arguments.append(text)


def _loads(word: str) -> str:
    try:
        return str(json.loads(word, strict=False))
    except ValueError:  # an escape that JSON does not know
        return word[1:-1]
