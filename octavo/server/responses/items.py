"""A response's output items as they grow, and the events that tell of it.

message         output_item.added, content_part.added, output_text.delta ..., output_text.done,
                content_part.done, output_item.done
function_call   output_item.added, function_call_arguments.delta ..., .done, output_item.done
"""

from __future__ import annotations

import uuid
from typing import Any

Body = dict[str, Any]
Event = dict[str, Any]


class OutputItems:
    """Takes the deltas of a chat choice; `items` is the output, `status` of each item set as it closes."""

    def __init__(self) -> None:
        self.items: list[Body] = []
        self._open = False

    def take(self, chunk: Body) -> list[Event]:
        """The events of one chat chunk: its text, calls and logprobs."""
        delta, events = chunk["delta"], []
        content = (chunk["logprobs"] or {}).get("content") or []
        calls = delta.get("tool_calls", ())
        # Tokens at the end may have given no text, as half a character; the message has them all the same.
        silent = content and not calls and (self._is_open("message") or not self.items)
        if delta.get("content") or silent:
            events += self._text(delta.get("content") or "", content)
        for call in calls:
            events += self._call(call)
        return events

    def finish(self, status: str) -> list[Event]:
        """Close what is open: completed, or incomplete where it was cut."""
        events = self._close(status)
        if not self.items:  # an answer without a word is still a message
            events = [*self._open_message(), *self._close(status)]
        return events

    def _text(self, text: str, logprobs: list[Body]) -> list[Event]:
        events = [] if self._is_open("message") else [*self._close("completed"), *self._open_message()]
        part = self.items[-1]["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        place = {**self._place(), "content_index": 0}
        shown = [{name: entry[name] for name in ("token", "logprob", "top_logprobs")} for entry in logprobs]
        return [*events, {"type": "response.output_text.delta", **place, "delta": text, "logprobs": shown}]

    def _call(self, call: Body) -> list[Event]:
        events: list[Event] = []
        if "id" in call:
            events += self._close("completed")
            item: Body = {
                "id": f"fc_{uuid.uuid4().hex}",
                "type": "function_call",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": "",
                "status": "in_progress",
            }
            events += self._add(item)
        text = call["function"].get("arguments", "")
        if text:
            self.items[-1]["arguments"] += text
            events.append({"type": "response.function_call_arguments.delta", **self._place(), "delta": text})
        return events

    def _open_message(self) -> list[Event]:
        item: Body = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "content": [],
            "status": "in_progress",
        }
        events = self._add(item)
        part: Body = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"] = [part]
        place = {**self._place(), "content_index": 0}
        return [*events, {"type": "response.content_part.added", **place, "part": _copy(part)}]

    def _add(self, item: Body) -> list[Event]:
        self.items.append(item)
        self._open = True
        at = len(self.items) - 1
        return [{"type": "response.output_item.added", "output_index": at, "item": _copy(item)}]

    def _close(self, status: str) -> list[Event]:
        if not self._open:
            return []
        self._open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "message":
            events = self._text_done(item["content"][0])
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            events = [{"type": "response.function_call_arguments.done", **self._place(), **done}]
        at = len(self.items) - 1
        return [*events, {"type": "response.output_item.done", "output_index": at, "item": _copy(item)}]

    def _text_done(self, part: Body) -> list[Event]:
        place = {**self._place(), "content_index": 0}
        shown = [
            {name: one[name] for name in ("token", "logprob", "top_logprobs")} for one in part["logprobs"]
        ]
        return [
            {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": shown},
            {"type": "response.content_part.done", **place, "part": _copy(part)},
        ]

    def _is_open(self, kind: str) -> bool:
        return self._open and self.items[-1]["type"] == kind

    def _place(self) -> Body:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def _copy(value: Body) -> Body:
    """As it is now: events are encoded later than they are made."""
    return {
        name: [dict(part) for part in item] if isinstance(item, list) else item
        for name, item in value.items()
    }
