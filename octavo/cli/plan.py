"""`octavo plan`: how many requests fit in how much memory, from a model's header alone."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from octavo.cli.errors import CommandError
from octavo.cli.options import add_engine_options, add_model, engine_config, whole_number

if TYPE_CHECKING:
    from rich.console import Console

    from octavo.engine.planning import MemoryPlan

BLOCK_SIZES = (16, 32, 64)


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers."""
    parser = commands.add_parser(
        "plan",
        help="how many requests fit in how much memory",
        description="Say what a model needs and how many requests fit, from its config.json or the header of "
        "its GGUF file; no weight is read. The sums are those that `octavo serve` does at its start, with "
        "the same options.",
    )
    add_model(parser)
    group = parser.add_argument_group("plan options")
    group.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory that the server may take in all, such as 16GiB (default: what is free here now, "
        "limits of containers included)",
    )
    group.add_argument(
        "--context",
        type=whole_number(1, 2**31 - 1),
        metavar="TOKENS",
        help="longest request, prompt and answer together (default: the model's context)",
    )
    group.add_argument(
        "--typical",
        type=whole_number(1, 2**31 - 1),
        metavar="TOKENS",
        help="what a usual request comes to in the end (default: a quarter of --context)",
    )
    group.add_argument(
        "--concurrency",
        type=whole_number(1, 2**20),
        metavar="N",
        help="requests that should run at once; says what would have to change if they do not fit",
    )
    group.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    add_engine_options(parser)
    parser.set_defaults(run=run, kv_memory="auto")


def run(args: argparse.Namespace) -> int:
    """Print the plan; exit code 0 also where the target is not reached, since that is an answer."""
    from rich.console import Console

    from octavo.engine.memory import available_memory, resident_memory
    from octavo.engine.planning import changes, plan_memory, program_bytes, variants
    from octavo.kv import parse_bytes
    from octavo.models import load_header

    if args.num_blocks is not None:
        args.kv_memory = None
    header = load_header(args.model)
    resident = resident_memory() or 0  # this process has loaded what the server loads
    if args.memory is not None:
        memory = parse_bytes(args.memory, "--memory")
    else:
        free = available_memory()
        if free is None:
            raise CommandError("this system does not say how much memory is free: give --memory")
        memory = free + resident
    draft = load_header(args.draft_model) if args.draft_model is not None else None
    plan = plan_memory(engine_config(args), header, memory, program_bytes(header, resident), draft)
    longest = header.config.position_limit or header.config.max_position_embeddings
    for option, value in (("--context", args.context), ("--typical", args.typical)):
        if value is not None and value > longest:
            raise CommandError(
                f"{option} {value:,} is more than the model's context of {longest:,}: no such request runs"
            )
    context = args.context or plan.budget.max_model_len
    typical = min(context, args.typical or max(1, context // 4))
    each = variants(plan, BLOCK_SIZES)
    ways = changes(plan, context, args.concurrency) if args.concurrency else []
    if args.json:
        print(json.dumps(_as_json(plan, each, context, typical, args.concurrency, [asdict(w) for w in ways])))
        return 0
    console = Console()
    _show_memory(console, args.model, plan)
    _show_variants(console, plan, each, context, typical)
    if args.concurrency:
        _show_target(console, plan, context, args.concurrency, ways)
    return 0


def _rows(plan: MemoryPlan) -> list[tuple[str, int, str]]:
    from octavo.kv import LIBRARIES

    config, budget = plan.config, plan.budget
    rows = [
        ("program and tokenizer", plan.program, "before the weights"),
        ("weights", plan.weights, f"--dtype {config.dtype} --weights {config.weights}"),
        ("a step, at most", plan.activations, f"--max-batched-tokens {config.max_batched_tokens}"),
        ("threads, bookkeeping", LIBRARIES, "about"),
        ("KV cache", plan.kv_bytes, f"{budget.num_blocks:,} blocks of {_short(plan.block_bytes)}"),
    ]
    if plan.draft is not None:
        rows.insert(2, ("draft model's weights", plan.draft_weights, f"--draft-model {config.draft_model}"))
    if plan.host_bytes:
        rows.append(("host cache", plan.host_bytes, f"--host-cache, {budget.host_blocks:,} blocks"))
    if plan.reserve:
        rows.append(("left to the rest", plan.memory - plan.total, "--kv-memory auto"))
    else:
        option = "--kv-memory" if config.num_blocks is None else "--num-blocks"
        rows.append(("not used", plan.memory - plan.total, f"raise {option} to use it"))
    return [*rows, ("in all", plan.memory, "--memory")]


def _show_memory(console: Console, name: str, plan: MemoryPlan) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{name}: {plan.header.config.architecture}", title_justify="left")
    table.add_column("memory")
    table.add_column("", justify="right")
    table.add_column("")
    for label, value, note in _rows(plan):
        table.add_row(label, _short(value), Text(note, style="dim"))
    console.print(table)
    if plan.budget.context_note:
        console.print(f"context: {plan.budget.max_model_len:,} tokens, {plan.budget.context_note}")


def _show_variants(
    console: Console, plan: MemoryPlan, each: list[MemoryPlan], context: int, typical: int
) -> None:
    from rich.table import Table

    table = Table(title="requests that fit at once", title_justify="left")
    for name in (
        "KV dtype",
        "block",
        "bytes a block",
        "blocks",
        "tokens",
        f"of {typical:,} tokens",
        f"of {context:,} tokens",
    ):
        table.add_column(name, justify="right")
    for other in each:
        budget = other.budget
        chosen = (other.kv_dtype, budget.block_size) == (plan.kv_dtype, plan.budget.block_size)
        table.add_row(
            other.kv_dtype,
            str(budget.block_size),
            f"{budget.bytes_per_block:,}",
            f"{budget.num_blocks:,}",
            f"{budget.num_blocks * budget.block_size:,}",
            f"{other.fitting(typical):,}",
            f"{other.fitting(context):,}",
            style="bold" if chosen else "",
        )
    console.print(table)
    console.print(
        f"Paging gives a request blocks as it grows, so requests that end at {typical:,} tokens (--typical) "
        f"take room for that; reserving {context:,} tokens for each in advance would fit only as many as the "
        "last column says. Shared prompts take even less.",
        style="dim",
    )


def _show_target(console: Console, plan: MemoryPlan, context: int, wanted: int, ways: list[Any]) -> None:
    fits = plan.fitting(context)
    if not ways:
        console.print(f"{wanted:,} requests of {context:,} tokens fit: there is room for {fits:,}.")
    else:
        console.print(
            f"{wanted:,} requests of {context:,} tokens do not fit at once: {fits:,} do. "
            "One of these would change that:"
        )
        for way in ways:
            console.print(f"  {way.option} {way.value}   {way.note}", highlight=False)
    if wanted > plan.config.max_num_seqs:
        console.print(
            f"Only {plan.config.max_num_seqs:,} run at once, though: raise --max-num-seqs to {wanted:,}."
        )


def _as_json(
    plan: MemoryPlan, each: list[MemoryPlan], context: int, typical: int, wanted: int | None, ways: list[Any]
) -> dict[str, Any]:
    def one(item: MemoryPlan) -> dict[str, Any]:
        return {
            "kv_dtype": item.kv_dtype,
            "block_size": item.budget.block_size,
            "bytes_per_block": item.budget.bytes_per_block,
            "num_blocks": item.budget.num_blocks,
            "kv_bytes": item.kv_bytes,
            "max_model_len": item.budget.max_model_len,
            "requests_typical": item.fitting(typical),
            "requests_context": item.fitting(context),
        }

    return {
        "memory": plan.memory,
        "program": plan.program,
        "weights": plan.weights,
        "draft_weights": plan.draft_weights,
        "activations": plan.activations,
        "reserve": plan.reserve,
        "total": plan.total,
        "context": context,
        "typical": typical,
        "plan": one(plan),
        "variants": [one(item) for item in each],
        "concurrency": wanted,
        "changes": ways,
    }


def _short(value: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value} B"
