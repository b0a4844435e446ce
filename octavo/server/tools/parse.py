"""A model's text as it comes, split into content for the reader and calls of tools.

    hermes   ... <tool_call>{"name": "f", "arguments": {...}}</tool_call> ...     any number; or one list
    llama    {"name": "f", "parameters": {...}}; {...}                             the text is nothing else

The same parser serves streams and whole answers, so both say the same. Text that might become a call
is held back; text that looked like one and is none comes out as content, whole.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from octavo.server.tools.scan import CallScanner

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_SPACE = " \t\r\n"


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins: number `index` of the answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the arguments of call `index`, as the model wrote them."""

    index: int
    text: str


ToolEvent = Content | CallStart | Arguments


class ToolParser(ABC):
    """feed() with each new text, finish() after the last. `num_calls` counts the calls begun."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_ended = 0
        self._text = ""  # not dealt with yet

    def feed(self, text: str) -> Iterator[ToolEvent]:
        """What `text` makes certain."""
        self._text += text
        yield from self._read()

    def finish(self) -> Iterator[ToolEvent]:
        """No text follows: what was held back."""
        yield from self._rest()

    @abstractmethod
    def _read(self) -> Iterator[ToolEvent]: ...

    @abstractmethod
    def _rest(self) -> Iterator[ToolEvent]: ...

    def _begin(self, name: str) -> CallStart:
        self.num_calls += 1
        return CallStart(self.num_calls - 1, f"call_{uuid.uuid4().hex[:24]}", name)

    def _scan(self, scanner: CallScanner) -> Iterator[ToolEvent]:
        """Move text into the scanner, and out of it what it makes certain."""
        known = scanner.name is not None
        used = scanner.feed(self._text)
        self._held += self._text[:used]
        self._text = self._text[used:]
        if scanner.name is not None:
            if not known:
                yield self._begin(scanner.name)
            if arguments := scanner.arguments():
                yield Arguments(self.num_calls - 1, arguments)

    _held = ""  # what the scanner was given, in case it is no call


class HermesParser(ToolParser):
    """Calls between tags, content around them."""

    def __init__(self) -> None:
        super().__init__()
        self._scanner: CallScanner | None = None
        self._inside = False
        self._listed = False
        self._any = False  # this pair of tags has had a call
        self._noise = False  # what stands here is dropped, up to the closing tag
        self._after = False  # white space behind a call is not content

    def _read(self) -> Iterator[ToolEvent]:
        while self._text:
            before = (self._text, self._inside, self._scanner)
            yield from self._read_call() if self._inside else self._read_content()
            if (self._text, self._inside, self._scanner) == before:
                return

    def _read_content(self) -> Iterator[ToolEvent]:
        if self._after:
            self._text = self._text.lstrip(_SPACE)
            self._after = not self._text
        at = self._text.find(_OPEN)
        if at >= 0:
            content, self._text = self._text[:at], self._text[at + len(_OPEN) :]
            # White space in front of a call belongs to the tag.
            bare = content.rstrip(_SPACE)
            self._inside, self._listed, self._any = True, False, False
            self._held, content = content[len(bare) :] + _OPEN, bare
        else:
            keep = _overlap(self._text, _OPEN)
            end = len(self._text) - keep
            end = len(self._text[:end].rstrip(_SPACE))
            content, self._text = self._text[:end], self._text[end:]
        if content:
            yield Content(content)

    def _read_call(self) -> Iterator[ToolEvent]:
        if self._scanner is None:
            if not self._noise:
                self._skip_between()
            if not self._text:
                return
            if self._text.startswith(_CLOSE) and self._any:
                self._text = self._text[len(_CLOSE) :]
                self._inside, self._noise, self._after = False, False, True
                return
            if self._any and _CLOSE.startswith(self._text):
                return  # part of the closing tag
            if self._noise or (self._any and self._text[0] != "{"):
                self._noise = True
                yield from self._drop_to_close()
                return
            self._scanner = CallScanner()
        scanner = self._scanner
        yield from self._scan(scanner)
        if scanner.done or (scanner.bad and scanner.name is not None):
            self.num_ended += 1
            self._scanner, self._any, self._held = None, True, ""
        elif scanner.bad:
            # No call after all: tag and all is content.
            yield Content(self._held)
            self._scanner, self._inside, self._held = None, False, ""

    def _skip_between(self) -> None:
        skip = _SPACE + ("," if self._listed and self._any else "") + ("]" if self._listed else "")
        stripped = self._text.lstrip(skip)
        if not self._listed and not self._any and stripped.startswith("["):
            self._listed, stripped = True, stripped[1:].lstrip(_SPACE)
        self._held += self._text[: len(self._text) - len(stripped)]
        self._text = stripped

    def _drop_to_close(self) -> Iterator[ToolEvent]:
        """What stands between a call and its closing tag is noise, such as one brace too many."""
        at = self._text.find(_CLOSE)
        self._text = (
            self._text[at:] if at >= 0 else self._text[len(self._text) - _overlap(self._text, _CLOSE) :]
        )
        yield from ()

    def _rest(self) -> Iterator[ToolEvent]:
        if not self._inside:
            # Trailing space counts as content only where no call came.
            if self._text and not (self.num_calls and not self._text.strip(_SPACE)):
                yield Content(self._text)
        elif self._scanner is not None and self._scanner.name is not None:
            self.num_ended += 1  # cut off in the middle of its arguments
        elif not self._any:
            yield Content(self._held + self._text)
        self._text = ""


class LlamaParser(ToolParser):
    """The whole text is calls of declared tools, or it is content."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._scanner: CallScanner | None = None
        self._plain = False  # content from here on

    def _read(self) -> Iterator[ToolEvent]:
        while self._text:
            if self._plain:
                yield Content(self._text)
                self._text = ""
                return
            if self._scanner is None:
                gap = self._text.lstrip(_SPACE + (";" if self.num_calls else ""))
                if not gap:
                    return
                if gap[0] != "{":
                    self._plain = True
                    self._text = gap if self.num_calls else self._text
                    continue
                self._held = "" if self.num_calls else self._text[: len(self._text) - len(gap)]
                self._text, self._scanner = gap, CallScanner(self._names)
            scanner = self._scanner
            yield from self._scan(scanner)
            if scanner.done or (scanner.bad and scanner.name is not None):
                self.num_ended += 1
                self._scanner, self._held = None, ""
            elif scanner.bad:
                self._scanner, self._plain = None, True
                self._text, self._held = self._held + self._text, ""

    def _rest(self) -> Iterator[ToolEvent]:
        if self._scanner is not None and self._scanner.name is not None:
            self.num_ended += 1
        elif (rest := self._held + self._text) and (not self.num_calls or rest.strip(_SPACE + ";")):
            yield Content(rest)
        self._text = self._held = ""


class NamedParser(ToolParser):
    """The whole text is the arguments of one tool, which the request named."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def _read(self) -> Iterator[ToolEvent]:
        if not self._text:
            return
        if not self.num_calls:
            yield self._begin(self._name)
        yield Arguments(0, self._text)
        self._text = ""

    def _rest(self) -> Iterator[ToolEvent]:
        self.num_ended = self.num_calls
        yield from ()


def make_parser(form: str, names: Collection[str]) -> ToolParser:
    """The parser of a form: hermes or llama. `names` are the declared tools."""
    return HermesParser() if form == "hermes" else LlamaParser(names)


def _overlap(text: str, tag: str) -> int:
    """Characters at the end of `text` that may be the beginning of `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0
