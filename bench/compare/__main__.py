"""Installs the peers, runs the workloads on each engine in turn, prints the table.

    python -m bench.compare WORKLOADS.json [W1 W2 ...] [--engine PEER[:option=value,...] ...] [--rounds 3]

Peers: octavo, octavo_library, openvino, llama_cpp, vllm (bench/compare/peers/). Ratios are to the first one.
Engines take turns within a round. Each turn starts the engine anew, once for every size of KV cache that its
workloads need, and computes one short request first. A workload that fails or takes longer than --limit is a
record like any other, and the engine is started again for the next. --results FILE gets every record as it is
made, and a call that finds some there goes on after them; --show only prints what it holds. --into FILE puts
the table between the marks that docs/compare.md and README.md have for it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.compare.install import InstallFailed
from bench.compare.plot import svg
from bench.compare.report import between, facts, markdown
from bench.compare.rounds import Kept, Turn
from bench.compare.works import agreement, load

NAMES = ("W1", "W2", "W3", "W4", "W5", "W6")
ENGINES = (
    "octavo",
    "openvino",
    "openvino:weights=gguf",
    "llama_cpp:weights=bf16",
    "llama_cpp:works=W1+W2+W4",  # slow at many rows: its other workloads would take longer than all the rest
    "llama_cpp:weights=f32,works=W1",
)


def machine(threads: int) -> dict[str, str]:
    """What the figures were taken on."""
    cpu = platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        flags = model.get("flags", "").split()
        isa = [n for n in ("avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "avx2") if n in flags]
        family = f"family {model.get('cpu family', '?')}"
        cpu = f"{model.get('model name', cpu)} {family} ({', '.join(isa)})"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "Machine:": f"{os.cpu_count()} x {cpu}",
        "memory": f"{memory:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "threads": str(threads),
        "load at start": f"{os.getloadavg()[0]:.1f}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def note_agreement(records: list[dict[str, Any]]) -> None:
    """Say, of every other engine's W1, how far its greedy tokens are those of the first engine."""
    own = next((r["tokens"] for r in records if r.get("tokens")), None)
    for row in records:
        if own is None or not row.get("tokens") or row["tokens"] is own:
            continue
        same = agreement(own, row["tokens"])
        note = f"its greedy tokens are the first engine's for {same} of {len(row['tokens'])}"
        if note not in row["notes"]:
            row["notes"].append(note)


def arguments() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The command line, understood."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="the workloads' JSON file")
    parser.add_argument("names", nargs="*", metavar="WORK", help="which to run (W1 to W6)")
    parser.add_argument("--engine", action="append", help=f"repeat; default: {' '.join(ENGINES)}")
    parser.add_argument("--rounds", type=int, default=3, help="medians of so many (3)")
    parser.add_argument("--scale", type=float, default=1.0, help="lengths times this, to try the harness (1)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of every engine")
    parser.add_argument("--slots", type=int, default=16, help="llama.cpp's parallel slots (16)")
    parser.add_argument("--model", type=Path, help="a GGUF file (the default model's)")
    parser.add_argument("--limit", type=float, default=300, help="seconds that a workload may take (300)")
    parser.add_argument("--venvs", type=Path, default=Path("build/compare"), help="the peers' environments")
    parser.add_argument("--results", type=Path, help="JSON file of the records; goes on where it ends")
    parser.add_argument("--again", action="store_true", help="run what failed in --results once more")
    parser.add_argument("--install", action="store_true", help="only install and build what the engines need")
    parser.add_argument("--show", action="store_true", help="run nothing, print what --results holds")
    parser.add_argument("--facts", action="store_true", help="also print what each engine said of itself")
    parser.add_argument(
        "--into", type=Path, action="append", default=[], help="put the table into this Markdown file; repeat"
    )
    parser.add_argument("--plot", type=Path, help="SVG file to write, for example docs/compare.svg")
    return parser, parser.parse_args()


def kept_records(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Kept:
    """What --results holds, or a new one."""
    content: dict[str, Any] = {"machine": machine(args.threads), "scale": args.scale, "records": []}
    if args.results and args.results.exists():
        content = json.loads(args.results.read_text())
        if content["scale"] != args.scale and not args.show:
            parser.error(f"{args.results} was made with --scale {content['scale']}, not {args.scale}")
    if args.again:
        content["records"] = [r for r in content["records"] if not r["error"]]
    return Kept(content, args.results)


def chosen(args: argparse.Namespace) -> list[str]:
    """The engines to run, in order; `default` stands for all that run without --engine."""
    found: list[str] = []
    for text in args.engine or ["default"]:
        found += ENGINES if text == "default" else (text,)
    return found


def install(args: argparse.Namespace, kept: Kept) -> None:
    """Have everything in place."""
    for text in chosen(args):
        try:
            turn = Turn(text, 0, args, kept)
            turn.install()
            print(f"{turn.name}: installed", file=sys.stderr)
        except (InstallFailed, ValueError) as error:
            print(f"{text}: not installed: {error}", file=sys.stderr)


def main() -> None:
    """Parse the command line, run what it asks for, write and print the table."""
    parser, args = arguments()
    if args.model is None:
        from octavo.models import resolve_model

        args.model = Path(resolve_model("smollm2"))
    for path in args.into:  # now, not after half an hour
        try:
            between(path.read_text(), "")
        except (OSError, ValueError) as error:
            parser.error(f"--into {path}: {error}")
    kept = kept_records(parser, args)
    if args.install:
        install(args, kept)
        return
    works = [load(json.loads(args.file.read_text()), name, args.scale) for name in args.names or NAMES]
    for number in range(1, 1 + (0 if args.show else args.rounds)):
        for text in chosen(args):
            Turn(text, number, args, kept).run(works)
    note_agreement(kept.records)
    if not args.show:
        kept.write()
    shown = dict(kept.content["machine"])
    if kept.content["scale"] != 1:
        shown["lengths scaled by"] = str(kept.content["scale"])
    text = markdown(kept.records, shown)
    print(text + (facts(kept.records) if args.facts else ""))
    for path in args.into:
        path.write_text(between(path.read_text(), text))
    if args.plot:
        args.plot.write_text(svg(kept.records, "; ".join(f"{k} {v}" for k, v in shown.items())))


if __name__ == "__main__":
    main()
