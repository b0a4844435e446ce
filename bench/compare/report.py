"""Medians over rounds, ratios to the first engine, and the table as text. Pure.

A record is one row of the results' file: {"engine", "round", "work", "figures": {name: value},
"failed": requests that failed, "error": None or why there are no figures, "notes": [text]}.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from bench.compare.works import FIGURES, LOWER

MARKS = ("<!-- compare -->", "<!-- /compare -->")
NOT_WORK = ("start", "memory", "install")  # lines of the table that are no workload's


@dataclass(slots=True)
class Cell:
    """One engine's figure: median value, and how many times better the first engine's is."""

    value: float | None = None
    ratio: float | None = None
    failed: int = 0
    rounds: int = 0
    error: str | None = None
    notes: list[str] = field(default_factory=list)


def engines(records: list[dict[str, Any]]) -> list[str]:
    """Columns, in the order of their first record."""
    return list(dict.fromkeys(record["engine"] for record in records))


def cell(records: list[dict[str, Any]], engine: str, work: str, figure: str) -> Cell:
    """The median of an engine's rounds. An error in any round is shown, never averaged away."""
    mine = [r for r in records if r["engine"] == engine and r["work"] == work]
    values = [r["figures"][figure] for r in mine if figure in r["figures"]]
    found = Cell(rounds=len(values), failed=max((r["failed"] for r in mine), default=0))
    found.error = next((r["error"] for r in mine if r["error"]), None)
    if values and not found.error:
        found.value = statistics.median(values)
    return found


def table(records: list[dict[str, Any]]) -> list[tuple[str, str, list[Cell]]]:
    """(work, figure, a cell per engine) for every line of FIGURES that any engine has a record of."""
    columns = engines(records)
    lines = []
    for work, figure, better in FIGURES:
        if not any(r["work"] == work for r in records):
            continue
        cells = [cell(records, engine, work, figure) for engine in columns]
        own = cells[0]
        for other in cells[1:]:
            comparable = better and own.value and other.value and not own.failed and not other.failed
            if comparable and own.value and other.value:
                other.ratio = other.value / own.value if better == LOWER else own.value / other.value
        lines.append((work, figure, cells))
    return lines


def number(value: float) -> str:
    """Three significant digits, thousands separated; counts as they are."""
    return (
        f"{value:,.0f}"
        if value >= 100 or isinstance(value, int)
        else f"{value:.1f}"
        if value >= 10
        else f"{value:.2f}"
    )


def words(cell: Cell) -> str:
    """What the table shows of a cell."""
    if cell.error:
        return "failed"
    if cell.value is None:
        return "-"
    ratio = f" ({cell.ratio:.2f}x)" if cell.ratio is not None else ""
    failed = f" [{cell.failed} failed]" if cell.failed else ""
    return number(cell.value) + ratio + failed


def markdown(records: list[dict[str, Any]], machine: dict[str, Any]) -> str:
    """The table, what failed and why, what the engines said of themselves, and the machine."""
    columns = engines(records)
    out = ["| | | " + " | ".join(columns) + " |", "|---|---|" + "---|" * len(columns)]
    for work, figure, cells in table(records):
        out.append(f"| {work} | {figure} | " + " | ".join(words(c) for c in cells) + " |")
    rounds = [r["round"] for r in records if r["work"] not in NOT_WORK]
    counts = [sum(1 for r in records if r["work"] == w and r["engine"] == e) for w, e in _pairs(records)]
    most, least = max(counts, default=0), min(counts, default=0)
    spread = f"{most}" if most == least else f"{least} to {most}"
    out += ["", f"Medians of {spread} round{'s' if spread != '1' else ''}." if rounds else "Nothing was run."]
    if len(columns) > 1:
        out.append(f"In brackets: how many times better {columns[0]} is (below 1: worse).")
    out += ["; ".join(f"{name} {value}" for name, value in machine.items()) + "."]
    for engine in columns:
        mine = [r for r in records if r["engine"] == engine]
        lines = [f"{r['work']}: {r['error']}" for r in mine if r["error"]]
        lines += [f"{r['work']}: {note}" for r in mine for note in r["notes"]]
        out += [f"- {engine}: {line}" for line in dict.fromkeys(lines)]
    return "\n".join(out) + "\n"


def _pairs(records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return list(
        dict.fromkeys((r["work"], r["engine"]) for r in records if r["work"] not in NOT_WORK and r["figures"])
    )


def facts(records: list[dict[str, Any]]) -> str:
    """What each engine said of itself when it started, once."""
    out = []
    for engine in engines(records):
        said = next((r["facts"] for r in records if r["engine"] == engine and r.get("facts")), [])
        out += ["", f"{engine}:", *(f"  {line}" for line in said)]
    return "\n".join(out) + "\n"


def between(page: str, table: str) -> str:
    """The page with the table between its marks. Raises ValueError where it has none."""
    begin, end = page.find(MARKS[0]), page.find(MARKS[1])
    if begin < 0 or end < begin:
        raise ValueError(f"the page has no {MARKS[0]} and {MARKS[1]}")
    return page[: begin + len(MARKS[0])] + "\n\n" + table + "\n" + page[end:]
