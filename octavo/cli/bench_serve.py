"""`octavo bench serve` and `octavo bench workload`: load for any OpenAI-compatible server, and what it took.

load_source.py  what is sent and when   load_run.py  sending and timing   load_report.py  table, JSON, plot
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.cli import load_source
from octavo.cli.errors import CommandError
from octavo.cli.options import number, whole_number
from octavo.cli.serve_options import KEY_VARIABLE

BIG = 2**31 - 1


def add_parsers(subjects: Any) -> None:
    """Add both to the subparsers of `octavo bench`."""
    _add_serve(subjects)
    _add_workload(subjects)


def _add_serve(subjects: Any) -> None:
    serve = subjects.add_parser(
        "serve",
        help="load a server from a trace or with made-up requests",
        description="Send requests to an OpenAI-compatible server and print throughput and latencies. With "
        "--rate, or a trace's own times, requests come whatever the server does (open loop); with "
        "--concurrency that many are under way (closed loop).",
    )
    serve.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="a Mooncake (.jsonl) or Azure (.csv) trace; without one, requests are made up",
    )
    serve.add_argument(
        "--length",
        type=number(0, above=True),
        default=1.0,
        metavar="X",
        help="scale a trace's prompts and outputs (default: 1)",
    )
    serve.add_argument(
        "--speed",
        type=number(0, above=True),
        default=1.0,
        metavar="X",
        help="run a trace's clock this much faster (default: 1)",
    )
    serve.add_argument(
        "--requests",
        type=whole_number(1, BIG),
        metavar="N",
        help="how many (default: all of the trace, or 100)",
    )
    serve.add_argument(
        "--prompt-tokens",
        type=whole_number(1, BIG),
        default=256,
        metavar="N",
        help="of made-up prompts (default: %(default)s)",
    )
    serve.add_argument(
        "--output-tokens",
        type=whole_number(1, BIG),
        default=128,
        metavar="N",
        help="of their answers (default: %(default)s)",
    )
    serve.add_argument(
        "--shared-tokens",
        type=whole_number(0, BIG),
        default=0,
        metavar="N",
        help="that all made-up prompts begin with (default: %(default)s)",
    )
    serve.add_argument(
        "--seed",
        type=whole_number(0, BIG),
        default=0,
        help="of made-up prompts and arrivals (default: %(default)s)",
    )
    serve.add_argument(
        "--rate",
        type=number(0, above=True),
        metavar="R",
        help="requests a second, as a Poisson process; replaces a trace's times",
    )
    _add_common(serve)
    serve.set_defaults(run=run_serve)


def _add_workload(subjects: Any) -> None:
    workload = subjects.add_parser(
        "workload",
        help="send a recorded workload to a server",
        description="Send the requests of a workload file to an OpenAI-compatible server, all at once unless "
        "--concurrency says otherwise, and print throughput and latencies.",
    )
    workload.add_argument("name", metavar="NAME", help="which workload of the file, such as W2")
    workload.add_argument("--file", type=Path, required=True, metavar="FILE", help="the workloads, as JSON")
    _add_common(workload)
    workload.set_defaults(run=run_workload)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the server, without /v1 (default: %(default)s)"
    )
    parser.add_argument("--api-key", metavar="KEY", help=f"its key (default: the variable {KEY_VARIABLE})")
    parser.add_argument("--model", help="the model's name, where the server wants one")
    parser.add_argument(
        "--concurrency",
        type=whole_number(1, 65536),
        metavar="N",
        help="requests under way at once (closed loop)",
    )
    parser.add_argument(
        "--stop-at-end",
        action="store_true",
        help="let answers end at end-of-text, for servers without ignore_eos",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a plot there as SVG")


def run_serve(args: argparse.Namespace) -> int:
    """`octavo bench serve`."""
    if args.rate is not None and args.concurrency is not None:
        raise CommandError("--rate is an open loop and --concurrency a closed one: give one of them")
    if args.trace is not None:
        jobs = load_source.trace(args.trace, args.requests, length=args.length, speed=args.speed)
        title = f"{args.trace.name}, {len(jobs)} requests"
    else:
        count = args.requests or 100
        jobs = load_source.made_up(
            count, args.prompt_tokens, args.output_tokens, args.shared_tokens, args.seed
        )
        title = f"{count} requests of {args.prompt_tokens} + {args.output_tokens} tokens"
        if args.rate is None and args.concurrency is None:
            args.concurrency = 16
    if args.rate is not None:
        jobs = load_source.at_rate(jobs, args.rate, args.seed)
    loop = f"{args.concurrency} under way" if args.concurrency else "open loop"
    return _measure(args, jobs, f"{title}, {loop}")


def run_workload(args: argparse.Namespace) -> int:
    """`octavo bench workload`."""
    jobs, note = load_source.workload(args.file, args.name)
    if note:
        print(note)
    return _measure(args, jobs, f"{args.name}, {len(jobs)} requests")


def _measure(args: argparse.Namespace, jobs: list[load_source.Job], title: str) -> int:
    """Send, time, report. Exit code 0 when every request succeeded, else 1."""
    from rich.console import Console
    from tqdm import tqdm

    from octavo.cli import load_report, load_run

    key = args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE)
    target = load_run.Target(args.url, key, args.model, ignore_eos=not args.stop_at_end)
    with tqdm(total=len(jobs), unit="request", desc=title) as bar:
        done: Callable[[], Any] = bar.update
        outcomes = asyncio.run(load_run.run(jobs, target, args.concurrency, done))
    figures = {"what": title, "url": args.url, **load_report.summary(outcomes)}
    load_report.show(Console(), figures)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    if args.plot is not None:
        args.plot.write_text(load_report.plot(outcomes, f"{title} · {args.url}"))
    return 1 if figures["failed"] else 0
