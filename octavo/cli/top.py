"""`octavo top`: the memory map of a running server, in the terminal.

GET /memory/events --> Mirror --> rich, at most FRAMES_PER_SECOND times a second
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from octavo.cli.errors import CommandError
from octavo.cli.serve_options import KEY_VARIABLE

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from octavo.engine.mirror import Mirror

FRAMES_PER_SECOND = 4
STATES = {"r": "running", "w": "waiting", "s": "swapped out"}
WHY = {
    "memory": " for memory (--kv-memory)",
    "growth": " for memory (--kv-memory)",
    "headroom": " for memory (--kv-memory)",
    "places": " for a place (--max-num-seqs)",
    "budget": " for their turn (--max-batched-tokens)",
    "prefix": " for a prompt like its own",
}
# Glyphs differ as well as colours: free, cached, held, shared.
CELLS = ((" ", "on grey15"), ("▒", "steel_blue"), ("█", "deep_sky_blue1"), ("█", "orange1"))


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers."""
    parser = commands.add_parser(
        "top",
        help="watch a running server's memory and requests in the terminal",
        description="Show what `octavo serve` shows at /, in the terminal: blocks by state, sequences with "
        "their progress, and why requests wait. Ctrl-C ends it; the server does not notice.",
    )
    parser.add_argument(
        "url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"the server's key (default: the variable {KEY_VARIABLE})"
    )
    parser.add_argument("--once", action="store_true", help="print the present state and end")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Follow the server until it ends or SIGINT."""
    from rich.console import Console
    from rich.live import Live

    from octavo.engine.mirror import Mirror

    console = Console()
    frames = events(args.url, args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE))
    mirror = Mirror(next(frames))
    history: deque[tuple[float, int]] = deque([(mirror.time, mirror.counts["generated"])])
    if args.once:
        console.print(picture(mirror, None, console))
        return 0
    with Live(picture(mirror, 0.0, console), console=console, screen=True, auto_refresh=False) as live:
        shown = 0.0
        for frame in frames:
            mirror.apply(frame)
            history.append((mirror.time, mirror.counts["generated"]))
            while len(history) > 2 and mirror.time - history[1][0] > 1:
                history.popleft()
            if time.monotonic() - shown > 1 / FRAMES_PER_SECOND:
                live.update(picture(mirror, rate(history), console), refresh=True)
                shown = time.monotonic()
    return 0


def events(url: str, key: str | None) -> Iterator[dict[str, Any]]:
    """The frames of a server, until it ends. Raises CommandError when there is none to follow."""
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.stream(
            "GET", f"{url.rstrip('/')}/memory/events", headers=headers, timeout=httpx.Timeout(10, read=60)
        ) as answer:
            if answer.status_code != 200:
                raise CommandError(f"{url} answers {answer.status_code}: {_why(answer)}")
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line[6:])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise CommandError(f"cannot follow {url}: {error}") from None


def _why(answer: Any) -> str:
    answer.read()
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "no memory map there; it may be off (--no-memory-map), or this is another kind of server"


def rate(history: deque[tuple[float, int]]) -> float:
    """Tokens per second over the moments kept."""
    (start, before), (end, after) = history[0], history[-1]
    return (after - before) / (end - start) if end > start else 0.0


def picture(mirror: Mirror, tokens_per_second: float | None, console: Console) -> RenderableType:
    """One screen: numbers, the map, the sequences. No speed where it is not known, from one moment."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    counts = mirror.counts
    shared = int((mirror.refs > 1).sum())
    speed = ""
    if tokens_per_second is not None:  # and no frames come while nothing happens
        speed = f"  {tokens_per_second if counts['running'] else 0.0:.1f} tokens/s"
    reuse = f"{100 * counts['hits'] / counts['queried']:.0f} %" if counts["queried"] else "-"
    waits = WHY.get(mirror.why, "") if counts["waiting"] else ""
    line = Text.assemble(
        (mirror.model, "bold"),
        f"   {counts['running']} running  {counts['waiting']} waiting{waits}",
        f"{speed}  {reuse} of prompts reused",
        f"  {counts['preemptions']} preemptions  {counts['evictions']} evictions",
    )
    legend = Text.assemble(
        *(
            part
            for (glyph, style), name, number in zip(
                CELLS,
                ("free", "cached", "held", "shared"),
                (counts["free"], counts["cached"], counts["held"] - shared, shared),
                strict=True,
            )
            for part in ((glyph, style), f" {name} {number:,}   ")
        )
    )
    width = max(20, console.width - 4)
    rows = max(3, min(16, console.height // 3))
    title = f"{mirror.num_blocks:,} blocks of {mirror.block_size} tokens"
    return Group(
        line,
        Panel(Group(cells(mirror, width, rows), legend), title=title),
        sequences(mirror, console.height - rows - 8),
    )


def cells(mirror: Mirror, width: int, rows: int) -> RenderableType:
    """The map: a character for each block, or for the fullest kind of several."""
    import numpy as np
    from rich.text import Text

    kinds = np.where(mirror.refs > 1, 3, np.where(mirror.refs == 1, 2, np.where(mirror.parent != -1, 1, 0)))
    each = -(-mirror.num_blocks // (width * rows))
    padded = np.zeros(-(-mirror.num_blocks // each) * each, np.int64)
    padded[: mirror.num_blocks] = kinds
    text = Text(no_wrap=True)
    shown = padded.reshape(-1, each).max(axis=1).tolist()
    for at in range(0, len(shown), width):
        for kind in shown[at : at + width]:
            text.append(*CELLS[kind])
        text.append("\n")
    text.append(
        f"each character is {each} blocks; what is shared or held shows first" if each > 1 else "", "dim"
    )
    return text


def sequences(mirror: Mirror, room: int) -> RenderableType:
    """A line for each sequence that fits."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table(box=None, expand=True)
    for name in ("sequence", "state", "prompt", "cached", "generated", "blocks", "preempted", "progress"):
        table.add_column(name, justify="left" if name in ("sequence", "state", "progress") else "right")
    rows = list(mirror.rows.values())
    for row in rows[: max(1, room)]:
        made = row.tokens - row.prompt
        table.add_row(
            row.name.removesuffix(".0"),
            STATES[row.state],
            f"{row.prompt:,}",
            f"{row.cached:,}",
            f"{made:,} of {row.max_tokens:,}",
            f"{len(row.table):,}",
            str(row.preemptions or ""),
            ProgressBar(total=row.prompt + row.max_tokens, completed=row.committed, width=24),
        )
    left = mirror.counts["running"] + mirror.counts["waiting"] - min(len(rows), max(1, room))
    if left > 0:
        table.add_row(f"and {left:,} more")
    return table
