"""The speed figures of the table as a bar chart in SVG, each relative to the first engine's. Pure."""

from __future__ import annotations

from html import escape
from typing import Any

from bench.compare.report import Cell, engines, number, table
from bench.compare.works import FIGURES, HIGHER

COLOURS = ("#1f6f8b", "#d98324", "#7a9e4b", "#8e5a9b", "#b44a4a", "#6b6b6b", "#2b2b52")
LEFT, BAR, GAP, WIDTH, FULL = 150, 14, 12, 860, 420


def bars(records: list[dict[str, Any]]) -> list[tuple[str, list[tuple[float | None, Cell]]]]:
    """(line's name, (speed with the first engine's as 1, cell) per engine) for each speed figure."""
    better = {(work, figure): which for work, figure, which in FIGURES}
    lines = []
    for work, figure, cells in table(records):
        own = cells[0].value
        if not work.startswith("W") or not own:
            continue
        speeds: list[tuple[float | None, Cell]] = []
        for cell in cells:
            speed = None
            if cell.value:
                speed = cell.value / own if better[work, figure] == HIGHER else own / cell.value
            speeds.append((speed, cell))
        lines.append((f"{work} {figure}", speeds))
    return lines


def svg(records: list[dict[str, Any]], caption: str) -> str:
    """The chart. A bar that is missing says why; one with failed requests says how many."""
    columns, lines = engines(records), bars(records)
    top = 46 + 18 * len(columns)
    group = len(columns) * BAR + GAP
    height = top + group * len(lines) + 30
    longest = max((s for _, speeds in lines for s, _ in speeds if s), default=1.0)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="15">Speed relative to {escape(columns[0]) if columns else "?"}; '
        "longer is faster</text>",
    ]
    for place, name in enumerate(columns):
        y = 32 + 18 * place
        out.append(f'<rect x="{LEFT}" y="{y}" width="12" height="12" fill="{_colour(place)}"/>')
        out.append(f'<text x="{LEFT + 18}" y="{y + 10}">{escape(name)}</text>')
    for line, (name, speeds) in enumerate(lines):
        y = top + line * group
        out.append(f'<text x="{LEFT - 8}" y="{y + group / 2}" text-anchor="end">{escape(name)}</text>')
        for place, (speed, cell) in enumerate(speeds):
            width = FULL * speed / longest if speed else 0
            label = "failed" if cell.error else "not run"
            if speed and cell.value is not None:
                label = f"{speed:.2f} ({number(cell.value)})"
                label += f", {cell.failed} requests failed" if cell.failed else ""
            at = y + place * BAR
            out.append(
                f'<rect x="{LEFT}" y="{at}" width="{width:.1f}" height="{BAR - 2}" fill="{_colour(place)}"/>'
            )
            out.append(
                f'<text x="{LEFT + width + 5:.1f}" y="{at + 10}" font-size="10">{escape(label)}</text>'
            )
    out.append(f'<text x="10" y="{height - 10}" font-size="10" fill="#555">{escape(caption)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _colour(place: int) -> str:
    """Another one for each engine, however many there are."""
    return COLOURS[place] if place < len(COLOURS) else f"hsl({place * 137.5 % 360:.0f}, 35%, 35%)"
