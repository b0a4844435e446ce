"""The engine of a command: loaded, shown in a table, and shut down at the end."""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from octavo.cli.options import engine_config

if TYPE_CHECKING:
    from rich.console import Console

    from octavo.engine.config import EngineConfig
    from octavo.engine.engine import Engine
    from octavo.engine.outputs import RequestDelta
    from octavo.engine.params import SamplingParams
    from octavo.engine.thread import EngineThread

SHUTDOWN_SECONDS = 10.0
Rows = Sequence[tuple[str, str]]


@contextmanager
def running_engine(args: argparse.Namespace, console: Console, more: Rows = ()) -> Iterator[EngineThread]:
    """Load the model, print the start-up table with the rows `more` added, and run the engine's thread."""
    config = engine_config(args)  # refuses wrong options before the slow part
    console.print(f"loading {args.model} ...", markup=False, highlight=False)
    engine = load_engine(config)
    show_table(console, [*engine.describe(), *more])
    thread = start_thread(engine)
    try:
        yield thread
    finally:
        thread.shutdown(timeout=SHUTDOWN_SECONDS)


def load_engine(config: EngineConfig) -> Engine:
    """The engine of an EngineConfig. Imports torch."""
    from octavo.engine.engine import Engine

    return Engine.from_config(config)


def start_thread(engine: Engine) -> EngineThread:
    """A started engine thread."""
    from octavo.engine.thread import EngineThread

    thread = EngineThread(engine)
    thread.start()
    return thread


def deltas_of(
    thread: EngineThread, ids: list[int], params: SamplingParams
) -> AsyncGenerator[RequestDelta, None]:
    """The deltas of one request, to be closed by the caller: closing early aborts the request."""
    return thread.stream(ids, params)


def show_table(console: Console, rows: Rows) -> None:
    """Two columns: what, and its value."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Octavo", show_header=False, title_justify="left")
    table.add_column()
    table.add_column(overflow="fold")  # a long path is shown whole
    for name, value in rows:
        table.add_row(Text(name, style="bold"), Text(str(value)))  # Text: brackets in a path are no markup
    console.print(table)
