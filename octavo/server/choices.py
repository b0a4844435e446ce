"""One choice of an answer as it grows, in the shape of its route.

    piece -> take() -> bodies of a stream's next chunks
                       whole() is the choice of an answer that is not streamed

Both come from the same pieces by the same steps, so a stream says what the whole answer says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from octavo.engine.logprobs import TokenLogprobs
from octavo.models import Tokenizer
from octavo.server.generation import Piece
from octavo.server.logprobs import CompletionLogprobs, chat_logprobs
from octavo.server.tools import Arguments, CallStart, Content, ToolEvent, ToolParser

Body = dict[str, Any]


class Choice(ABC):
    """Choice number `index`. with_logprobs, with_ids: whether the answer shows them."""

    def __init__(self, tokenizer: Tokenizer, index: int, *, with_logprobs: bool, with_ids: bool) -> None:
        self.index = index
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._with_ids = with_ids
        self._entries: list[TokenLogprobs] = []
        self._ids: list[int] = []
        self._shown = 0  # entries and ids that chunks have carried
        self.finish_reason: str | None = None
        self._stop_reason: str | int | None = None
        self._opened = False

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    def take(self, piece: Piece) -> list[Body]:
        """Add a piece; returns what a stream says of it, which may be nothing yet."""
        self._entries += piece.logprobs or ()
        self._ids += piece.token_ids
        self.finish_reason, self._stop_reason = piece.finish_reason, piece.stop_reason
        return self._chunks(piece)

    @abstractmethod
    def whole(self) -> Body:
        """The finished choice."""

    @abstractmethod
    def _chunks(self, piece: Piece) -> list[Body]: ...

    def _end(self) -> Body:
        return {"finish_reason": self.finish_reason, "stop_reason": self._stop_reason}

    def _new(self) -> tuple[list[TokenLogprobs], list[int]]:
        """Entries and ids that no chunk has carried yet."""
        entries, ids = self._entries[self._shown :], self._ids[self._shown :]
        self._shown = len(self._ids)
        return entries, ids


class CompletionChoice(Choice):
    """A text. `echo`: the prompt's text in front; `scores`: its tokens' logprobs, where they are shown."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        index: int,
        *,
        with_logprobs: bool,
        with_ids: bool,
        echo: str = "",
        scores: Sequence[TokenLogprobs | int] = (),
        extras: Body | None = None,
    ) -> None:
        super().__init__(tokenizer, index, with_logprobs=with_logprobs, with_ids=with_ids)
        self._texts = [echo] if echo else []
        self._echo, self._scores = echo, list(scores)
        self._extras = extras or {}
        self._format = CompletionLogprobs(tokenizer)

    def _chunks(self, piece: Piece) -> list[Body]:
        self._texts.append(piece.text)
        first, self._opened = not self._opened, True
        text = (self._echo if first else "") + piece.text
        if not text and not self.ended and not (first and self._extras):
            return []  # a token may give no text yet (half a character): nothing to say then
        entries, ids = self._new()
        shown = [*(self._scores if first else ()), *entries]
        return [
            {
                "index": self.index,
                "text": text,
                "logprobs": self._format.body(shown) if self._with_logprobs else None,
                **self._end(),
                **({"token_ids": ids} if self._with_ids else {}),
                **(self._extras if first else {}),
            }
        ]

    def whole(self) -> Body:
        shown = [*self._scores, *self._entries]
        # A formatter of its own: offsets count from the choice's first character.
        logprobs = CompletionLogprobs(self._tokenizer).body(shown) if self._with_logprobs else None
        return {
            "index": self.index,
            "text": "".join(self._texts),
            "logprobs": logprobs,
            **self._end(),
            **({"token_ids": self._ids} if self._with_ids else {}),
            **self._extras,
        }


class ChatChoice(Choice):
    """A message: text, and calls of tools where a parser is given. `single`: one call ends it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        index: int,
        *,
        with_logprobs: bool,
        with_ids: bool,
        parser: ToolParser | None = None,
        single: bool = False,
    ) -> None:
        super().__init__(tokenizer, index, with_logprobs=with_logprobs, with_ids=with_ids)
        self._parser = parser
        self._single = single
        self.content = ""
        self.calls: list[Body] = []

    def _chunks(self, piece: Piece) -> list[Body]:
        deltas: list[Body] = []
        for event in self._events(piece):
            deltas.append(self._note(event))
        if self.calls and self.finish_reason == "stop":
            self.finish_reason = "tool_calls"
        chunks = []
        if not self._opened:
            self._opened = True
            chunks.append(self._chunk({"role": "assistant", "content": ""}, [], []))
        if self.ended and not deltas:
            deltas.append({})
        for delta in deltas:
            chunks.append(self._chunk(delta, *self._new()))
        if self.ended:
            chunks[-1].update(self._end())
        return chunks

    def _events(self, piece: Piece) -> list[ToolEvent]:
        """Content and calls in the piece; with `single` nothing after the first call."""
        if self._parser is None:
            return [Content(piece.text)] if piece.text else []
        events = list(self._parser.feed(piece.text))
        if piece.finish_reason is not None:
            events += self._parser.finish()
        if not self._single or not self._parser.num_ended:
            return events
        self.finish_reason, self._stop_reason = "stop", None
        kept: list[ToolEvent] = []
        for event in events:
            called = bool(self.calls) or any(isinstance(one, CallStart) for one in kept)
            if called and (isinstance(event, Content) or event.index > 0):
                break
            kept.append(event)
        return kept

    def _note(self, event: ToolEvent) -> Body:
        """Keep the event for whole(); the delta that tells it."""
        if isinstance(event, Content):
            self.content += event.text
            return {"content": event.text}
        if isinstance(event, CallStart):
            function = {"name": event.name, "arguments": ""}
            self.calls.append({"id": event.id, "type": "function", "function": function})
            return {"tool_calls": [{"index": event.index, **self.calls[-1], "function": dict(function)}]}
        assert isinstance(event, Arguments)
        self.calls[event.index]["function"]["arguments"] += event.text
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}

    def _chunk(self, delta: Body, entries: list[TokenLogprobs], ids: list[int]) -> Body:
        logprobs = chat_logprobs(self._tokenizer, entries) if self._with_logprobs and ids else None
        return {
            "index": self.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": None,
            "stop_reason": None,
            **({"token_ids": ids} if self._with_ids else {}),
        }

    def whole(self) -> Body:
        message: Body = {
            "role": "assistant",
            "content": self.content if self.content or not self.calls else None,
            "refusal": None,
        }
        if self.calls:
            message["tool_calls"] = self.calls
        return {
            "index": self.index,
            "message": message,
            "logprobs": chat_logprobs(self._tokenizer, self._entries) if self._with_logprobs else None,
            **self._end(),
            **({"token_ids": self._ids} if self._with_ids else {}),
        }
