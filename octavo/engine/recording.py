"""A file of what the memory map shows: one JSON object a line, a snapshot and then frames.

A name that ends in .gz is compressed. Lines are flushed once a second, so a process that is killed loses
at most the last second, and read() takes a last line that is cut short for the end.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from octavo.engine.errors import EngineError
from octavo.engine.feed import Feed

FLUSH_SECONDS = 1.0


class BadRecording(EngineError):
    """A file that is no recording."""


@contextmanager
def recording(feed: Feed, path: Path) -> Iterator[None]:
    """Write the feed's frames to `path`, replacing it, inside the `with` block. Raises EngineError where
    the file cannot be written."""
    try:
        file = _open(path, "wb")
    except OSError as error:
        raise EngineError(f"--record {path}: {error.strerror or error}") from None
    flushed = time.monotonic()

    def write(data: bytes | None) -> None:
        nonlocal flushed
        if data is None:
            return
        file.write(data + b"\n")
        if time.monotonic() - flushed > FLUSH_SECONDS:
            file.flush()
            flushed = time.monotonic()

    feed.subscribe(write)
    try:
        yield
    finally:
        feed.unsubscribe(write)
        file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The snapshot and the frames of a recording. Raises BadRecording."""
    frames: list[dict[str, Any]] = []
    try:
        with _open(path, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    frames.append(json.loads(line))
    except EOFError:
        pass  # the process that wrote it was killed
    except (OSError, ValueError) as error:
        raise BadRecording(f"{path}: {error}") from None
    first = frames[0] if frames else {}
    if not isinstance(first, dict) or first.get("kind") != "snapshot":
        raise BadRecording(f"{path}: no recording of a memory map: `octavo serve --record FILE` writes one")
    return frames


def _open(path: Path, mode: str) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.open(path, mode)  # type: ignore[return-value]
    return open(path, mode)
