"""`octavo generate`: answers to a list of prompts, all at once, printed in the order of the prompts."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.errors import CommandError
from octavo.cli.loading import deltas_of, running_engine
from octavo.cli.options import (
    add_engine_options,
    add_model,
    add_sampling_options,
    sampling_params,
    whole_number,
)
from octavo.errors import OctavoError

if TYPE_CHECKING:
    from octavo.engine.params import SamplingParams
    from octavo.engine.thread import EngineThread

MAX_N = 1024


@dataclass
class Result:
    """One sequence's text, or why its prompt was refused."""

    prompt: str
    index: int
    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers."""
    parser = commands.add_parser(
        "generate",
        help="continue prompts and print the results",
        description="Load a model, continue every prompt, print the results in the order of the prompts, and "
        "end. The prompts are run together, which is much faster than one after the other.",
        epilog="Results go to standard output, everything else to standard error.",
    )
    add_model(parser)
    group = parser.add_argument_group("prompts and output")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a text to continue; may be given several times"
    )
    source.add_argument(
        "--prompts-file",
        metavar="FILE",
        help="a UTF-8 text file with one prompt on each line; empty lines are skipped, - is standard input",
    )
    group.add_argument(
        "--n",
        type=whole_number(1, MAX_N),
        default=1,
        metavar="N",
        help="answers for each prompt; the prompt is kept in memory once (default: %(default)s)",
    )
    group.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object a line: prompt, index, text, num_tokens, finish_reason, error",
    )
    add_sampling_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate and print; exit code 2 when a prompt was refused."""
    from rich.console import Console

    params = sampling_params(args, n=args.n)
    prompts = read_prompts(args)
    with running_engine(args, Console(stderr=True)) as thread:
        return asyncio.run(_run_all(thread, prompts, params, args.json))


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of the command line or of the file. Raises CommandError when there is none."""
    if args.prompts_file is None:
        prompts: list[str] = args.prompt
    else:
        prompts = [line for line in _read(args.prompts_file).splitlines() if line.strip()]
        if not prompts:
            raise CommandError(f"--prompts-file {args.prompts_file} has no prompt in it")
    if not all(prompts):
        raise CommandError("--prompt is empty; it needs at least one character")
    return prompts


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot read --prompts-file {name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CommandError(f"--prompts-file {name} is not UTF-8 text: {error.reason}") from None


async def _run_all(
    thread: EngineThread, prompts: Sequence[str], params: SamplingParams, as_json: bool
) -> int:
    tasks = [asyncio.create_task(_run_one(thread, prompt, params)) for prompt in prompts]
    code = 0
    try:
        # In order: a prompt is printed when it and all before it are done.
        for number, task in enumerate(tasks):
            for result in await task:
                if result.error is not None:
                    code = 2
                    print(f"octavo: prompt {number + 1}: {result.error}", file=sys.stderr)
                for line in format_result(result, number, params.n, as_json):
                    print(line, flush=True)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return code


async def _run_one(thread: EngineThread, prompt: str, params: SamplingParams) -> list[Result]:
    """The sequences of one prompt. A refusal is a result: the other prompts go on."""
    results = [Result(prompt, index) for index in range(params.n)]
    try:
        ids = thread.engine.tokenizer.encode(prompt)
        async with aclosing(deltas_of(thread, ids, params)) as deltas:
            async for delta in deltas:
                if delta.error is not None:
                    raise delta.error
                for new in delta.deltas:
                    result = results[new.index]
                    result.text += new.text
                    result.num_tokens += len(new.token_ids)
                    result.finish_reason = new.finish_reason
    except OctavoError as error:
        return [Result(prompt, 0, error=str(error))]
    return results


def format_result(result: Result, number: int, n: int, as_json: bool) -> Iterator[str]:
    """The lines to print for one result."""
    if as_json:
        yield json.dumps(asdict(result), ensure_ascii=False)
    elif result.error is None:
        which = f" ({result.index + 1} of {n})" if n > 1 else ""
        if result.index == 0:
            yield f"--- prompt {number + 1}: {result.prompt}"
        yield f"--- answer {number + 1}{which}, {result.finish_reason}, {result.num_tokens} tokens:"
        yield result.text
