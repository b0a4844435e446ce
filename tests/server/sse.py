"""Reading server-sent events in tests."""

from __future__ import annotations

import json
from typing import Any


def events(response: Any) -> list[dict[str, Any]]:
    """The JSON of each event; checks that the stream is well formed and that DONE is last, once.

    Comments are left out, as clients do."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    blocks = [block for block in blocks if not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    assert data.count("[DONE]") == 1
    assert data.pop() == "[DONE]"
    return [json.loads(item) for item in data]


def texts(chunks: list[dict[str, Any]]) -> dict[int, str]:
    """Text by choice, put together from completion or chat chunks."""
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            new = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            found[choice["index"]] = found.get(choice["index"], "") + new
    return found
