"""`octavo bench`: measurements of this machine, as tables and as JSON.

octavo bench attention [PART ...]      one subparser per subject
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli import bench_serve
from octavo.cli.errors import CommandError
from octavo.cli.options import INT32_MAX, number, whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from octavo.attention.cpu import CpuBackend

PARTS = ("decode", "blocks", "prefill", "prefix", "write", "calls", "error")
KV_DTYPES = ("float32", "bfloat16", "float16", "int8")
MAX_CONTEXT = 2**20
WIDTH = 120  # of tables that go to a file

# Key of a row, head of its column, format.
Columns = tuple[tuple[str, str, str], ...]
_DECODE: Columns = (
    ("block_size", "block", "d"),
    ("dtype", "dtype", "s"),
    ("context", "context", ",d"),
    ("batch", "batch", "d"),
    ("group", "group", "d"),
    ("ms", "ms", ".3f"),
    ("megabytes", "MB", ".1f"),
    ("gigabytes_per_second", "GB/s", ".1f"),
    ("read_gigabytes_per_second", "read GB/s", ".1f"),
    ("share_of_read", "share", ".0%"),
    ("paged_over_flat", "paged / flat", ".2f"),
    ("paged_over_one", "paged / one", ".2f"),
    ("torch_over_paged", "torch / paged", ".1f"),
)
COLUMNS: dict[str, Columns] = {
    "decode": _DECODE,
    "blocks": _DECODE,
    "grid": _DECODE,
    "prefill": (
        ("dtype", "dtype", "s"),
        ("tokens", "tokens", ",d"),
        ("ms", "ms", ".3f"),
        ("gigaflops", "GFLOP/s", ".0f"),
        ("reference_over_paged", "reference / paged", ".2f"),
        ("torch_grouped_over_paged", "torch, grouped / paged", ".2f"),
        ("torch_repeated_over_paged", "torch, repeated / paged", ".2f"),
    ),
    "prefix": (
        ("prefix", "prefix", ",d"),
        ("dtype", "dtype", "s"),
        ("kv_heads", "KV heads", "d"),
        ("group", "group", "d"),
        ("prefix_megabytes", "MB", ".1f"),
        ("once_ms", "once ms", ".3f"),
        ("each_ms", "each ms", ".3f"),
        ("gain", "gain", ".2f"),
    ),
    "write": (
        ("tokens", "tokens", ",d"),
        ("dtype", "dtype", "s"),
        ("one_pass_us", "one pass, us", ".1f"),
        ("two_steps_us", "two steps, us", ".1f"),
        ("gain", "gain", ".2f"),
    ),
    "calls": (("call", "call", "s"), ("microseconds", "microseconds", ".1f")),
    "error": (
        ("dtype", "dtype", "s"),
        ("context", "context", ",d"),
        ("largest_error", "largest error", ".1e"),
        ("relative_error", "relative error", ".1e"),
    ),
}


def add_parser(commands: Any) -> None:
    """Add the command, with a subparser per subject, to the subparsers."""
    parser = commands.add_parser(
        "bench",
        help="measure this machine, or a server",
        description="Measure parts of Octavo on this machine beside what the machine can do, or put load on "
        "a server.",
    )
    subjects = parser.add_subparsers(metavar="SUBJECT", required=True)
    _add_attention(subjects)
    bench_serve.add_parsers(subjects)


def _add_attention(subjects: Any) -> None:
    parser = subjects.add_parser(
        "attention",
        help="attention kernels beside a plain read of the same bytes, contiguous sequences and torch",
        description="Time the attention kernels. What is compared runs in turn, and the fastest run of each "
        "counts. Share is of the bandwidth that a plain read of the same bytes reaches in the same seconds.",
        epilog="With any of --block-size, --kv-dtype, --context, --batch and --group, decode is measured for "
        "every combination of the values given, and nothing else unless a part is named.",
    )
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=f"what to measure, of {', '.join(PARTS)} (default: all)",
    )
    group = parser.add_argument_group("a grid of decode steps")
    for option, kind, text in (
        ("--block-size", whole_number(1, 256), "tokens in a block"),
        ("--context", whole_number(1, MAX_CONTEXT), "tokens of each sequence"),
        ("--batch", whole_number(1, 65536), "sequences"),
        ("--group", whole_number(1, 64), "query heads per KV head"),
    ):
        group.add_argument(option, nargs="+", type=kind, metavar="N", help=text)
    group.add_argument("--kv-dtype", nargs="+", choices=KV_DTYPES, help="how keys and values are stored")
    group = parser.add_argument_group("how to measure")
    group.add_argument(
        "--seconds",
        type=number(0, 3600, above=True),
        default=1.5,
        metavar="X",
        help="how long to measure each row (default: %(default)s)",
    )
    group.add_argument(
        "--threads", type=whole_number(1, INT32_MAX), metavar="N", help="threads to compute with"
    )
    group.add_argument("--isa", metavar="NAME", help="instruction set (default: the machine's fastest)")
    group.add_argument("--json", metavar="FILE", help="also write all rows to this file")
    parser.set_defaults(run=run_attention)


def run_attention(args: argparse.Namespace) -> int:
    """Measure, print a table per part, and write the rows where asked."""
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        raise CommandError(f"no part is called {unknown[0]!r}; choose of {', '.join(PARTS)}")
    target = None if args.json is None else _writable(args.json)
    from rich.console import Console

    backend, threads = _backend(args)
    from octavo.bench import attention

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    about = {
        "isa": backend.isa,
        "threads": threads,
        "machine": platform.machine(),
        "seconds_per_row": args.seconds,
        "kv_heads": attention.KV_HEADS,
        "head_dim": attention.HEAD_DIM,
    }
    shape = f"{attention.KV_HEADS} KV heads of {attention.HEAD_DIM}"
    console.print(f"{backend.isa}, {threads} threads, {shape}", highlight=False)
    results: dict[str, list[Mapping[str, object]]] = {}
    for name, rows in _measurements(args, backend):
        results[name] = _show(console, name, rows)
    if target is not None:
        target.write_text(json.dumps({"about": about, **results}, indent=1) + "\n", encoding="utf-8")
    return 0


def _writable(name: str) -> Path:
    """The path, proved writable before minutes are spent. Raises CommandError."""
    path = Path(name)
    try:
        path.touch()
    except OSError as error:
        raise CommandError(f"cannot write --json {name}: {error.strerror}") from None
    return path


def _backend(args: argparse.Namespace) -> tuple[CpuBackend, int]:
    """The compiled backend and the number of threads. Raises BackendUnavailable where it is not built."""
    import torch

    from octavo.attention import BackendUnavailable
    from octavo.engine.cpus import set_threads

    threads = set_threads(args.threads).number
    torch.manual_seed(0)
    try:
        from octavo.attention.cpu import CpuBackend
    except ImportError as error:
        raise BackendUnavailable("cpu", str(error)) from error
    return CpuBackend(isa=args.isa), threads


def _measurements(
    args: argparse.Namespace, backend: CpuBackend
) -> Iterable[tuple[str, Iterable[Mapping[str, object]]]]:
    import torch

    from octavo.bench import attention

    given = (args.block_size, args.kv_dtype, args.context, args.batch, args.group)
    if any(given):
        yield (
            "grid",
            attention.grid(
                backend,
                args.seconds,
                block_sizes=args.block_size or (16,),
                dtypes=[getattr(torch, name) for name in args.kv_dtype or ("float32",)],
                contexts=args.context or (4096,),
                batches=args.batch or (8,),
                groups=args.group or (attention.GROUP,),
            ),
        )
    for name in dict.fromkeys(args.parts or (() if any(given) else PARTS)):
        yield name, attention.PARTS[name](backend, args.seconds)


def _show(console: Console, name: str, rows: Iterable[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Measure the rows under a spinner and print them as a table."""
    from rich import box
    from rich.table import Table

    table = Table(title=name, title_justify="left", box=box.SIMPLE)
    columns = COLUMNS[name]
    for _, head, kind in columns:
        table.add_column(head, justify="left" if kind == "s" else "right", no_wrap=kind == "s")
    measured = []
    with console.status(name) as status:
        for row in rows:
            measured.append(row)
            table.add_row(*(format(row[key], kind) for key, _, kind in columns))
            status.update(f"{name}: {len(measured)} rows")
    console.print(table)
    return measured
