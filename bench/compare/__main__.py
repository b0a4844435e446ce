"""Installs the peers, runs the workloads on each engine in turn, prints the table.

    python -m bench.compare WORKLOADS.json [W1 W2 ...] [--engine PEER[:option=value,...] ...] [--rounds 3]

Peers: octavo, openvino, llama_cpp (bench/compare/peers/). Ratios are to the first engine. Every round starts
each engine anew, once for every size of KV cache that its workloads need, and computes one short request
first. --results FILE collects records over several calls, so that a long comparison can be run in pieces;
--show only prints what it holds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.compare.install import InstallFailed, python_of
from bench.compare.plot import svg
from bench.compare.process import Process, WorkerFailed
from bench.compare.report import markdown
from bench.compare.works import Work, agreement, faults, figures, load

NAMES = ("W1", "W2", "W3", "W4", "W5", "W6")
ENGINES = ("octavo:weights=auto", "octavo:weights=float32", "openvino", "llama_cpp")
WARM_UP = {"prompt": list(range(500, 516)), "max_tokens": 8, "n": 1, "temperature": 0}


def parse_engine(text: str) -> tuple[str, dict[str, Any]]:
    """PEER[:option=value,...]; values are integers, true, false or text."""
    peer, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for part in rest.split(",") if rest else []:
        name, equals, value = part.partition("=")
        if not equals or not name:
            raise ValueError(f"{part!r} in {text!r} is not option=value")
        known = {"true": True, "false": False}
        options[name] = known.get(value, int(value) if value.isdecimal() else value)
    return peer, options


def machine(threads: int) -> dict[str, str]:
    """What the figures were taken on."""
    cpu = platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        isa = next((n for n in ("avx512f", "avx2") if n in model.get("flags", "").split()), "")
        family = f"family {model.get('cpu family', '?')}"
        cpu = f"{model.get('model name', cpu)} {family} {isa}".strip()
    return {
        "Machine:": f"{os.cpu_count()} x {cpu}",
        "threads": str(threads),
        "load at start": f"{os.getloadavg()[0]:.1f}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def record(engine: str, turn: int, work: str, **more: Any) -> dict[str, Any]:
    """A row of the results' file; see report.py."""
    empty = {"figures": {}, "failed": 0, "error": None, "notes": []}
    return {"engine": engine, "round": turn, "work": work, **empty, **more}


def measure(engine: str, turn: int, work: Work, results: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of one workload; without figures where a request that they rest on was not done in full."""
    wrong = faults(work, results)
    row = record(engine, turn, work.name, failed=len(wrong), notes=wrong[:2])
    total = sum(len(batch) for batch in work.batches)
    if wrong and (work.name in ("W1", "W6") or len(wrong) == total):
        row["error"] = f"{len(wrong)} of {total} requests failed: {wrong[0]}"
    else:
        row["figures"] = figures(work, results)
    if work.name == "W1" and not wrong:
        row["tokens"] = results[0]["answers"][0]["tokens"][0]
    return row


def run_group(
    name: str, turn: int, works: list[Work], python: Path, peer: str, setup: dict[str, Any], limit: float
) -> list[dict[str, Any]]:
    """Start the engine with one size of KV cache, run these workloads; a record each, whatever happens."""
    rows: list[dict[str, Any]] = []
    process = Process(python, peer, setup["threads"])
    try:
        ready = process.start(setup, limit)
        facts = [f"{k}: {v}" for k, v in ready["ready"].items()]
        start = {"ready s": ready["seconds"], "resident MiB": ready["resident MiB"]}
        rows.append(record(name, turn, "start", figures=start, facts=facts))
        rows.append(record(name, turn, "install", figures=ready["installed"]))
        process.run([WARM_UP], limit)
        for work in works:
            results = [process.run(list(batch), limit) for batch in work.batches]
            rows.append(measure(name, turn, work, results))
            print(
                json.dumps({k: v for k, v in rows[-1].items() if k != "tokens"}), file=sys.stderr, flush=True
            )
    except WorkerFailed as error:
        done = {row["work"] for row in rows}
        rows += [record(name, turn, w.name, error=str(error)) for w in works if w.name not in done]
        print(f"{name}: {error}", file=sys.stderr, flush=True)
    finally:
        process.close()
    return rows


def run_engine(text: str, turn: int, works: list[Work], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One engine's turn in a round."""
    peer, options = parse_engine(text)
    module = importlib.import_module(f"bench.compare.peers.{peer}")
    name = module.label(options)
    try:
        python = python_of(peer, module, args.venvs)
    except InstallFailed as error:
        print(f"{name}: not installed: {error}", file=sys.stderr)
        return [record(name, turn, w.name, error=f"not installed: {error}") for w in works]
    rows: list[dict[str, Any]] = []
    for kv_tokens, group in groupby(sorted(works, key=lambda w: -w.kv_tokens), key=lambda w: w.kv_tokens):
        some = list(group)
        setup = {"model": str(args.model), "threads": args.threads, "kv_tokens": kv_tokens}
        setup |= {"max_len": max(w.max_len for w in some), "slots": args.slots, "options": options}
        rows += run_group(name, turn, some, python, peer, setup, args.limit)
    return rows


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


def main() -> None:
    """Parse the command line, run what it asks for, write and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="the workloads' JSON file")
    parser.add_argument("names", nargs="*", metavar="WORK", help="which to run (W1 to W6)")
    parser.add_argument("--engine", action="append", help=f"repeat; default {' '.join(ENGINES)}")
    parser.add_argument("--rounds", type=int, default=3, help="medians of so many (3)")
    parser.add_argument("--scale", type=float, default=1.0, help="lengths times this, to try the harness (1)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of every engine")
    parser.add_argument("--slots", type=int, default=16, help="llama.cpp's parallel slots (16)")
    parser.add_argument("--model", type=Path, help="a GGUF file (the default model's)")
    parser.add_argument("--limit", type=float, default=900, help="seconds that a batch may take (900)")
    parser.add_argument("--venvs", type=Path, default=Path("build/compare"), help="the peers' environments")
    parser.add_argument("--results", type=Path, help="JSON file to add the records to")
    parser.add_argument("--show", action="store_true", help="run nothing, print what --results holds")
    parser.add_argument("--plot", type=Path, help="SVG file to write, for example docs/compare.svg")
    args = parser.parse_args()
    if args.model is None:
        from octavo.models import resolve_model

        args.model = resolve_model("smollm2")
    kept: dict[str, Any] = {"machine": machine(args.threads), "scale": args.scale, "records": []}
    if args.results and args.results.exists():
        kept = json.loads(args.results.read_text())
        if kept["scale"] != args.scale:
            parser.error(f"{args.results} was made with --scale {kept['scale']}, not {args.scale}")
    works = [load(json.loads(args.file.read_text()), name, args.scale) for name in args.names or NAMES]
    first = 1 + max((r["round"] for r in kept["records"]), default=0)
    for turn in range(first, first + (0 if args.show else args.rounds)):
        for text in args.engine or ENGINES:
            kept["records"] += run_engine(text, turn, works, args)
            if args.results:
                args.results.write_text(json.dumps(kept, indent=1) + "\n")
    note_agreement(kept["records"])
    shown = dict(kept["machine"])
    if kept["scale"] != 1:
        shown["lengths scaled by"] = str(kept["scale"])
    print(markdown(kept["records"], shown))
    if args.plot:
        args.plot.write_text(svg(kept["records"], "; ".join(f"{k} {v}" for k, v in shown.items())))


if __name__ == "__main__":
    main()
