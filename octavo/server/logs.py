"""How log records of `octavo.*` are written: lines for people, or one JSON object a line.

A record may carry `extra={"fields": {...}}`; the fields are appended to the line, or are keys of the object.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import Any, TextIO

FORMATS = ("text", "json")


@contextmanager
def configured(form: str, level: int = logging.INFO, stream: TextIO | None = None) -> Iterator[None]:
    """Write what `octavo` loggers say, and warnings of uvicorn and asyncio, in the form text or json, until
    the end of the `with` block, which leaves the loggers as they were.

    To `stream`, standard error if None. Inside another one it takes that one's place.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    with ExitStack() as undo:
        for name, least in (("octavo", level), ("uvicorn", logging.WARNING), ("asyncio", logging.WARNING)):
            root = logging.getLogger(name)
            undo.callback(_put_back, root, root.handlers[:], root.filters[:], root.level, root.propagate)
            root.handlers[:] = [handler]
            root.setLevel(least)
            root.propagate = False
        # Said of each write to a client that has just left, which is no news.
        logging.getLogger("asyncio").addFilter(_no_news)
        yield


def _put_back(
    logger: logging.Logger, handlers: list[logging.Handler], filters: list[Any], level: int, propagate: bool
) -> None:
    logger.handlers[:], logger.filters[:] = handlers, filters
    logger.setLevel(level)  # not the attribute: loggers below remember what they inherit
    logger.propagate = propagate


def _no_news(record: logging.LogRecord) -> bool:
    return record.msg != "socket.send() raised exception."


class TextFormatter(logging.Formatter):
    """`12:00:01 INFO octavo.access request status=200 ...`; strings with spaces are quoted."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s", "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        # A line break in what a client sent must not start a line of its own.
        line = super().formatMessage(record).replace("\n", "\\n").replace("\r", "\\r")
        return " ".join([line, *(f"{name}={_plain(value)}" for name, value in fields.items())])


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message, the fields, and the traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _plain(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text and text else json.dumps(text)
