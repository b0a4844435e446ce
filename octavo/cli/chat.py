"""`octavo chat`: a conversation in the terminal, with answers shown as they are made."""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from octavo.cli.loading import deltas_of, running_engine
from octavo.cli.options import add_engine_options, add_model, add_sampling_options, sampling_params
from octavo.errors import InvalidRequest

if TYPE_CHECKING:
    from octavo.engine.params import SamplingParams
    from octavo.engine.thread import EngineThread

Messages = list[dict[str, str]]
HELP = "Type a message. /clear starts over, /exit ends, Ctrl-C stops an answer."


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers."""
    parser = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="Load a model and talk to it. Each answer sees the whole conversation. " + HELP,
    )
    add_model(parser)
    add_sampling_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Talk until /exit or the end of input."""
    from rich.console import Console

    params = sampling_params(args)
    console = Console(stderr=True)
    with running_engine(args, console) as thread:
        console.print(HELP, markup=False)
        _converse(thread, params)
    return 0


def _converse(thread: EngineThread, params: SamplingParams) -> None:
    messages: Messages = []
    while (line := _read_line()) is not None:
        if line == "/exit":
            return
        if line == "/clear":
            messages = []
            print("(a new conversation)")
        elif line.startswith("/"):
            print(f"{line.split()[0]} is no command. {HELP}")
        elif line:
            messages = take_turn(thread, params, messages, line)


def _read_line() -> str | None:
    """The next line without the space around it; None at the end of input or on Ctrl-C."""
    try:
        return input("you> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def take_turn(thread: EngineThread, params: SamplingParams, messages: Messages, line: str) -> Messages:
    """Print the answer to `line` and return the conversation with both.

    An answer that Ctrl-C stops is kept as far as it came. A refused turn leaves the conversation as it was.
    """
    asked = [*messages, {"role": "user", "content": line}]
    parts: list[str] = []
    try:
        asyncio.run(_answer(thread, params, asked, parts))
    except KeyboardInterrupt:
        print(" (stopped)", end="")
    except InvalidRequest as error:
        print(f"octavo: {error}\n(/clear starts a new, shorter conversation)", file=sys.stderr)
    print()
    if not parts:
        return messages
    return [*asked, {"role": "assistant", "content": "".join(parts)}]


async def _answer(thread: EngineThread, params: SamplingParams, messages: Messages, parts: list[str]) -> None:
    """Print new text as it comes and append it to `parts`."""
    ids = thread.engine.tokenizer.encode_chat(messages, add_generation_prompt=True)
    async with aclosing(deltas_of(thread, ids, params)) as deltas:
        async for delta in deltas:
            if delta.error is not None:
                raise delta.error
            for new in delta.deltas:
                parts.append(new.text)
                print(new.text, end="", flush=True)
