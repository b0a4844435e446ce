"""The figures of a load run: a table, JSON, and a plot as SVG."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from octavo.cli.load_run import Outcome

if TYPE_CHECKING:
    from rich.console import Console

SHARES = (50, 90, 99)
LATENCIES = (
    ("ttft", "time to first token"),
    ("itl", "between tokens"),
    ("tpot", "per output token"),
    ("e2e", "whole request"),
)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` percent lie, interpolated; of sorted values, at least one."""
    at = (len(values) - 1) * share / 100
    low = int(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)


def series(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Sorted seconds by kind, of the requests that succeeded.

    ttft: from sending to the first part of the answer. itl: between two parts, over all requests. tpot: from
    the first to the last part, per token after the first. e2e: from sending to the end.
    """
    good = [outcome for outcome in outcomes if outcome.error is None]
    found: dict[str, list[float]] = {
        "ttft": [o.chunks[0] - o.sent for o in good],
        "itl": [b - a for o in good for a, b in pairwise(o.chunks)],
        "tpot": [(o.chunks[-1] - o.chunks[0]) / (o.output_tokens - 1) for o in good if o.output_tokens > 1],
        "e2e": [o.ended - o.sent for o in good],
    }
    return {key: sorted(values) for key, values in found.items()}


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts, throughput and latencies; rates are over the time from the first request to the last answer."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    wall = max((o.ended for o in outcomes), default=0.0) - min((o.sent for o in outcomes), default=0.0)
    prompt, output = sum(o.prompt_tokens for o in good), sum(o.output_tokens for o in good)
    latencies = {
        key: {
            "mean": sum(values) / len(values),
            **{f"p{share}": percentile(values, share) for share in SHARES},
            "max": values[-1],
        }
        for key, values in series(outcomes).items()
        if values
    }
    return {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(good),
        "errors": dict(Counter(o.error for o in outcomes if o.error is not None).most_common(5)),
        "wall_s": wall,
        "prompt_tokens": prompt,
        "cached_tokens": sum(o.cached_tokens for o in good),
        "output_tokens": output,
        "requests_per_s": len(good) / wall if wall else 0.0,
        "output_tokens_per_s": output / wall if wall else 0.0,
        "total_tokens_per_s": (prompt + output) / wall if wall else 0.0,
        "latest_send_s": max((o.late for o in outcomes), default=0.0),
        "latency_s": latencies,
    }


def show(console: Console, figures: dict[str, Any]) -> None:
    """The tables."""
    from rich.table import Table

    console.print(
        f"{figures['requests']:,} requests in {figures['wall_s']:.2f} s, {figures['failed']:,} failed: "
        f"{figures['requests_per_s']:.2f} requests/s, {figures['output_tokens_per_s']:.1f} output tokens/s, "
        f"{figures['total_tokens_per_s']:.1f} tokens/s with prompts"
    )
    console.print(
        f"{figures['prompt_tokens']:,} prompt tokens, {figures['cached_tokens']:,} of them cached; "
        f"{figures['output_tokens']:,} output tokens"
    )
    table = Table()
    for name in ("milliseconds", "mean", *(f"p{share}" for share in SHARES), "max"):
        table.add_column(name, justify="left" if name == "milliseconds" else "right")
    for key, label in LATENCIES:
        if key in figures["latency_s"]:
            table.add_row(label, *(f"{1000 * value:,.1f}" for value in figures["latency_s"][key].values()))
    console.print(table)
    if figures["latest_send_s"] > 0.1:
        console.print(
            f"some requests were sent up to {figures['latest_send_s']:.2f} s late: this machine was too busy "
            "to keep the schedule"
        )
    for error, count in figures["errors"].items():
        console.print(f"{count:,} failed: {error}", markup=False)


WIDTH, HEIGHT, LEFT, TOP = 900, 300, 64, 40
INKS = {"ttft": "#0072b2", "itl": "#009e73", "tpot": "#cc79a7", "e2e": "#d55e00"}


def plot(outcomes: Sequence[Outcome], title: str) -> str:
    """Two charts as SVG: the share of requests below each latency (log scale), and output parts a second."""
    body = [f'<text x="{LEFT}" y="24" font-size="16" font-weight="600">{escape(title)}</text>']
    body += _distributions(series(outcomes))
    body += _throughput(outcomes, HEIGHT + 20)
    height = 2 * HEIGHT + 40
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="12" fill="#1b2530">'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>{"".join(body)}</svg>\n'
    )


def _distributions(kinds: dict[str, list[float]]) -> list[str]:
    values = [value for each in kinds.values() for value in each if value > 0]
    low, high = (min(values), max(values)) if values else (0.001, 1.0)
    first = next(power for power in range(9, -10, -1) if 10.0**power <= low)
    last = next(power for power in range(-9, 10) if 10.0**power >= high)
    last = max(last, first + 1)
    bottom, right = HEIGHT - 30, WIDTH - 150
    span = right - LEFT

    def x(value: float) -> float:
        from math import log10

        return LEFT + (log10(max(value, 10.0**first)) - first) / (last - first) * span

    def y(share: float) -> float:
        return bottom - share * (bottom - TOP)

    parts = []
    for power in range(first, last + 1):
        at, label = x(10.0**power), f"{10.0**power:g} s"
        parts.append(f'<path d="M{at:.1f} {TOP}V{bottom}" stroke="#dde3ea"/>')
        parts.append(
            f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle" fill="#566474">{label}</text>'
        )
    for share in (0, 0.5, 0.9, 1):
        parts.append(f'<path d="M{LEFT} {y(share):.1f}H{right}" stroke="#dde3ea"/>')
        text = (
            f'<text x="{LEFT - 8}" y="{y(share) + 4:.1f}" text-anchor="end" fill="#566474">{share:.0%}</text>'
        )
        parts.append(text)
    for row, (key, label) in enumerate(LATENCIES):
        each = kinds.get(key, [])
        if not each:
            continue
        step = max(1, len(each) // 400)
        points = [*range(0, len(each), step), len(each) - 1]
        line = " ".join(f"{x(each[i]):.1f},{y((i + 1) / len(each)):.1f}" for i in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{INKS[key]}" stroke-width="2"/>')
        parts.append(
            f'<path d="M{right + 14} {TOP + 10 + 20 * row}h18" stroke="{INKS[key]}" stroke-width="2"/>'
        )
        parts.append(f'<text x="{right + 38}" y="{TOP + 14 + 20 * row}">{label}</text>')
    return parts


def _throughput(outcomes: Sequence[Outcome], top: int) -> list[str]:
    times = [at for outcome in outcomes for at in outcome.chunks]
    end = max([outcome.ended for outcome in outcomes] or [1.0]) or 1.0
    count = 120
    bins = [0] * count
    for at in times:
        bins[min(count - 1, int(at / end * count))] += 1
    rates = [each / (end / count) for each in bins]
    most = max([*rates, 1.0])
    bottom, right = top + HEIGHT - 30, WIDTH - 150
    ceiling = top + 30
    width = (right - LEFT) / count
    bars = "".join(
        f'<rect x="{LEFT + i * width:.1f}" y="{bottom - rate / most * (bottom - ceiling):.1f}" '
        f'width="{width - 0.6:.1f}" height="{rate / most * (bottom - ceiling):.1f}" fill="#56b4e9"/>'
        for i, rate in enumerate(rates)
        if rate
    )
    return [
        f'<text x="{LEFT}" y="{top + 16}" fill="#566474">parts of answers a second, top {most:.0f}</text>',
        f'<path d="M{LEFT} {bottom}H{right}" stroke="#8b98a5"/>',
        bars,
        f'<text x="{LEFT}" y="{bottom + 16}" fill="#566474">0 s</text>',
        f'<text x="{right}" y="{bottom + 16}" fill="#566474" text-anchor="end">{end:.1f} s</text>',
    ]
